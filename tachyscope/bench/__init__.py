"""What a plan saves: work counted by the meter, and time that must first beat its own noise.

`python -m tachyscope.bench` needs neither cyclopts, rich nor av.
"""

from tachyscope.bench.command import Parser, main
from tachyscope.bench.cpu import (
    bench,
    bench_asked,
    bench_lengths,
    label,
    length_lines,
    lines,
    split_plans,
    warm,
)
from tachyscope.bench.noise import noise, speed_word, verdict

__all__ = [
    "Parser",
    "bench",
    "bench_asked",
    "bench_lengths",
    "label",
    "length_lines",
    "lines",
    "main",
    "noise",
    "speed_word",
    "split_plans",
    "verdict",
    "warm",
]
