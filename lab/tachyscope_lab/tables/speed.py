"""Full-size models and kernels on one H200."""

from __future__ import annotations

from collections.abc import Iterator

from tachyscope_lab.results import Document, Results
from tachyscope_lab.tables.markdown import number, percent, table, times

VIDEO = "1880"
SIZES = ("size-720", "size-1088-window", "size-1088", "14b")
CHUNKS = {  # rows of wan-chunks/all that the pages show
    "merge21": "`merge` of 21 (TempCache)",
    "headline": "`merge` of 21, a fifth read",
    "budget6": "`merge` of 6, a fifth read",
}


def wan_chunks(results: Results) -> str:
    """Chunks at a full cache, and whole videos added up from them."""
    old = results.by("wan-chunks", "all", "name")
    latest = results.by("wan-chunks", "plans-60", "name")
    authors = results.by("wan-chunks", "authors", "name")["self-forcing"]["chunk_ms"]
    rows = [_chunk("`dense`, 468 latent frames", old["dense"], old["dense"])]
    rows.append([
        "Self-Forcing's own code, window of 21", number(authors, 0), number(12e3 / authors), "1x",
        *[""] * 5,
    ])  # fmt: skip
    for row in results.rows("wan-chunks", "plans"):
        chunk_ms = latest[row["name"]]["chunk_ms"]
        row = row | {"chunk_ms": chunk_ms, "to_authors": authors / chunk_ms}
        rows.append(_chunk(f"`{row['name']}`", row, old["dense"]))
    rows += [_chunk(label, old[name], old["dense"]) for name, label in CHUNKS.items()]
    return table(
        ["plan", "ms a chunk", "frames/s", "to the authors' code", "1,880 frames: frames/s",
         "to dense", "at their end", "reading, ms", "peak, GB (predicted)"],
        rows,
    )  # fmt: skip


def _chunk(label: str, row: Document, dense: Document) -> list[str]:
    rate, base = row["rates"][VIDEO], dense["rates"][VIDEO]
    return [
        label, number(row["chunk_ms"], 0), number(12e3 / row["chunk_ms"]),
        times(row["to_authors"]) if "to_authors" in row else "", number(rate["fps"]),
        times(rate["fps"] / base["fps"], 1), times(rate["fps_end"] / base["fps_end"], 1),
        number(row["parts_ms"]["read"], 0),
        f"{number(row['peak_gb'])} ({number(row['fit_gb'])})",
    ]  # fmt: skip


def wan_sizes(results: Results) -> str:
    """Other sizes, as frames/s over 480 frames."""
    rows = []
    for name in SIZES:
        for row in results.rows("wan-chunks", name):
            fps = row["rates"].get("480", {}).get("fps")
            rows.append([
                row["model"], row["size"], CHUNKS.get(row["name"], f"`{row['name']}`"),
                number(row["chunk_ms"], 0), number(fps), number(row["peak_gb"]),
            ])  # fmt: skip
    return table(
        ["model", "size", "plan", "ms a chunk", "frames/s over 480 frames", "peak, GB"], rows
    )


ROLLOUTS = ("headline-4800", "bank-int4", "bank-int8", "traced")


def wan_rollouts(results: Results) -> str:
    """Whole videos, every chunk made."""
    rows = []
    for name, row in _rollouts(results):
        if name not in ROLLOUTS:
            continue
        traced = ", a trained model's keys and values" if name == "traced" else ""
        rows.append([
            CHUNKS.get(row["name"], f"`{row['name']}`") + traced, number(row["frames"], 0),
            number(12e3 / row["settled_ms"]),
            number(row["fps"]), percent(row["time_spread"], 1), number(row["peak_gb"]),
            number(row.get("host_gb")), percent(row.get("late_share"), 1),
        ])  # fmt: skip
    return table(
        ["plan", "frames", "frames/s once warm", "with compiling", "spread from frame 300 on",
         "GPU, GB", "host, GB", "blocks late"],
        rows,
    )  # fmt: skip


def _rollouts(results: Results) -> Iterator[tuple[str, Document]]:
    for name in results.entries("wan-rollouts"):
        for row in results.rows("wan-rollouts", name):
            yield name, row


KERNELS = (
    "cuDNN, plain", "ours, plain", "ours, weighted", "for any GPU, weighted",
    "torch, weight as a mask", "ours, blocks of 128", "ann, blocks of 128: a chunk's passes",
)  # fmt: skip


def kernels(results: Results) -> str:
    """Attention kernels of a denoising pass at two lengths of the past."""
    found: dict[tuple[str, int], Document] = {
        (row["what"], row["entries"]): row
        for row in results.rows("kernels", "attention")
        if "entries" in row and row["what"] in KERNELS
    }
    names = dict.fromkeys(what for what, _ in found)
    lengths = sorted({entries for _, entries in found})
    columns = ["kernel"]
    for entries in lengths:
        columns += [f"ms, {entries:,} entries", "TFLOP/s"]
    rows = []
    for name in names:
        cells = [name]
        for entries in lengths:
            row = found.get((name, entries))
            cells += ["", ""] if row is None else [number(row["ms"], 2), number(row["tflops"], 0)]
        rows.append(cells)
    return table(columns, rows)
