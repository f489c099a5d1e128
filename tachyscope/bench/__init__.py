"""What a plan saves: work counted by the meter, and time that must first beat its own noise."""

from tachyscope.bench.cpu import bench, bench_lengths, length_lines, lines, split_plans, warm
from tachyscope.bench.noise import noise, speed_word, verdict

__all__ = [
    "bench",
    "bench_lengths",
    "length_lines",
    "lines",
    "noise",
    "speed_word",
    "split_plans",
    "verdict",
    "warm",
]
