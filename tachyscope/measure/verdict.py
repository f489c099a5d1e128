"""A comparison in sentences; a cause is named only if it was measured."""

from __future__ import annotations

from collections.abc import Sequence

from tachyscope.measure.runs import Run, decibels, percent
from tachyscope.measure.take import Take

MUCH = 0.9  # of the baseline's counted work: a plan with more cannot be much faster
NOISY = 1.15  # of a run's speed to itself: above it the clock is too noisy


def lead(
    runs: Sequence[Run], takes: Sequence[Take], aa: tuple[float, float] | None, against: str
) -> str:
    """A line for every plan but the baseline: its speed, its cost, its counted work."""
    base, lines = runs[0], []
    for run, take in zip(runs[1:], takes[1:], strict=True):
        lines.append(f"{_speed(base, run, take, aa, against)} {_work(base, run)}")
    if aa is not None and aa[1] > NOISY:
        lines.append(
            f"The machine was too busy or its clock too noisy to tell much: {_noise(base, aa)}."
        )
    return "\n".join(lines)


def _noise(base: Run, aa: tuple[float, float]) -> str:
    return f"{base.name} against itself {aa[0]:.2f}x to {aa[1]:.2f}x"


def _speed(base: Run, run: Run, take: Take, aa: tuple[float, float] | None, against: str) -> str:
    """How much faster a plan was and at what cost; or that it was not, with measured causes."""
    costs = _costs(base, run, against)
    if aa is None:
        sentence = "Speeds were not compared: noise is unknown without a second run"
        return f"{sentence}; {run.name} has a {' and a '.join(costs)}." if costs else f"{sentence}."
    stats = run.summary
    ratio, real = stats[f"ratio_{against}"], stats["real"]
    whole = f"{stats[f'ratio_{against}_all']:.2f}x over the whole video, {_noise(base, aa)}"
    if real and ratio > 1:
        at = f", at a {' and a '.join(costs)}" if costs else ""
        return f"{run.name} is {ratio:.2f}x as fast as {base.name} once warm ({whole}){at}."
    what = "slower than" if real else "not measurably faster than"
    known = _known(base, run, take)
    because = f": {'; '.join(known)}" if known else ""
    sentence = f"{run.name} is {what} {base.name} here, {ratio:.2f}x once warm ({whole}){because}."
    return f"{sentence} It has a {' and a '.join(costs)}." if costs else sentence


def _known(base: Run, run: Run, take: Take) -> list[str]:
    """Measured causes that keep a plan from being faster."""
    stats, known = run.summary, []
    if take.past_is_whole:
        known.append("the video is too short, the cache was never full and left nothing out")
    if stats["steady_chunks"] < 3:
        known.append(
            f"only {stats['steady_chunks']:.0f} chunks came after the warm-up of "
            f"{stats['warm_chunks']:.0f}, in which kernels are compiled and the cache fills"
        )
    work = stats["macs"] / base.summary["macs"]
    if work > MUCH:
        known.append(f"it did {percent(work)} of {base.name}'s counted work")
    return known


def _costs(base: Run, run: Run, against: str) -> list[str]:
    """The PSNR of a plan to the baseline and to the truth, if measured."""
    stats, costs = run.summary, []
    if (near := stats.get(f"psnr_{against}")) is not None:
        costs.append(
            f"PSNR to {base.name} of {decibels(near)} over {stats['psnr_frames']:.0f} frames "
            f"(higher is closer)"
        )
    if "psnr_truth" in stats:
        theirs = decibels(base.summary["psnr_truth"])
        costs.append(
            f"PSNR to the truth of {decibels(stats['psnr_truth'])} ({base.name}: {theirs})"
        )
    return costs


def _work(base: Run, run: Run) -> str:
    work = run.summary["macs"] / base.summary["macs"]
    return (
        f"{run.name} scored {percent(run.summary['density'])} of the full cache's query-key pairs "
        f"and did {percent(work)} of {base.name}'s counted work."
    )
