"""Tables of Wan-type models' times, as a reader wants them."""

from __future__ import annotations

from tachyscope.io.results import Document
from tachyscope.io.tables import format_table
from tachyscope_lab.bench.rollout import flat_lines
from tachyscope_lab.bench.wan import FRAMES, RIVALS


def wan_lines(results: Document) -> list[str]:
    """A document of `bench_wan` or `bench_rollout` as a reader wants it."""
    if "rollout" in results["suite"]:
        return flat_lines(results)
    machine, rows = results["machine"], results["rows"]
    done = [row for row in rows if "failed" not in row]
    out = [
        f"{rows[0]['model']} {rows[0].get('size', '')}, torch {results['versions']['torch']}, "
        f"{machine['gpu'] or machine['cpu']}; warm after {results['warm_s']:.0f} s"
        + (", caches traced from atrium-world" if results["traced"] else ""),
        "",
        "ms a chunk after so many latent frames (how far two halves of the rounds lie apart)",
        *format_table(["", ""], [[row["name"], _points(row)] for row in rows])[1:],
    ]
    if done:
        out += [
            "",
            "frames/s over a video of so many frames (at its end); memory; counted work",
            *format_table(SPEEDS, [[row["name"], *_speeds(row)] for row in done]),
            "",
            "ms of one chunk by part; TF/s of attention alone, and with choosing and ordering",
            *format_table(
                ["", *done[0]["parts_ms"], "TF/s", "TF/s, all"],
                [[row["name"], *_parts(row)] for row in done],
            ),
            "",
            "times as fast over the longest video that both were measured for (at its end)",
            *format_table(["", *RIVALS], [[row["name"], *_times(row)] for row in done]),
        ]
    return out + [f"{row['name']} failed: {row['failed']}" for row in rows if "failed" in row]


def _points(row: Document) -> str:
    def written(point: Document) -> str:
        apart = f" ({point['aa'][1] - 1:.1%})" if point["aa"] else ""
        return f"{point['length']:g}: {point['chunk_ms']:.1f}{apart}"

    return ", ".join(written(point) for point in row.get("points", []))


SPEEDS = (
    "", *map(str, FRAMES), "first chunk, ms", "host, ms", "peak GB", "predicted",
    "pairs, % of dense", "TMAC",
)  # fmt: skip


def _speeds(row: Document) -> list[str]:
    rates = [row["rates"].get(str(frames)) for frames in FRAMES]
    return [
        *(f"{rate['fps']:.1f} ({rate['fps_end']:.1f})" if rate else "–" for rate in rates),
        f"{row['first_chunk_ms']:.0f}", f"{row['host_ms']:.0f}", f"{row['peak_gb']:.2f}",
        f"{row['fit_gb']:.2f}", f"{row['density']:.1%}", f"{row['macs'] / 1e12:.1f}",
    ]  # fmt: skip


def _parts(row: Document) -> list[str]:
    spent = [f"{ms:.1f}" for ms in row["parts_ms"].values()]
    return [*spent, f"{row['read_tflops']:.0f}", f"{row['chosen_tflops']:.0f}"]


def _times(row: Document) -> list[str]:
    def written(times: Document) -> str:
        last = times[[key for key in times if key != "real"][-1]]
        word = "" if times["real"] else ", within noise"
        return f"{last['fps']:.2f}x ({last['fps_end']:.2f}x{word})"

    return [written(row["times"][name]) if name in row["times"] else "–" for name in RIVALS]
