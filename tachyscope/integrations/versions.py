"""Versions of the packages whose models run by a plan in their own code."""

from __future__ import annotations

import sys

# the oldest ones that the tests pass with, as in pyproject.toml
OLDEST = {"diffusers": (0, 41), "transformers": (5, 17)}


def too_old(package: str) -> str | None:
    """Why a plan cannot act in the imported package, if it is too old."""
    found = str(getattr(sys.modules[package], "__version__", ""))
    numbers = found.split(".")[:2]
    if package not in OLDEST or not all(number.isdigit() for number in numbers):
        return None
    if tuple(map(int, numbers)) >= OLDEST[package]:
        return None
    wanted = ".".join(map(str, OLDEST[package]))
    return (
        f"{package} {found} is installed, and a plan acts in {package} {wanted} or newer: "
        f"pip install -U '{package}>={wanted}'"
    )
