"""Methods of other authors, by their papers' rules: policies that register themselves.

With the laboratory installed a plan finds them by its entry points; to import this package is
enough as well.
"""

from tachyscope_lab.rivals import (
    deep_forcing,
    frames,
    memrope,
    radial,
    svg,
    svg2,
    worldkv,
)

__all__ = ["deep_forcing", "frames", "memrope", "radial", "svg", "svg2", "worldkv"]
