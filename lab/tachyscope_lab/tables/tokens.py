"""Token models: the decode step, drafts, and what replay costs."""

from __future__ import annotations

from collections.abc import Mapping

from tachyscope_lab.evaluation.intervals import versus
from tachyscope_lab.results import Document, Results
from tachyscope_lab.tables.markdown import Row, number, signed, table, times

CAMERAS = {  # clips and what pages call them
    "still": "still",
    "forward": "forward",
    "walk": "walk",
    "reversing": "turning back",
}
# entries of tokens-decode, the one with the present kernels last
RUNS = ("all", "slices", "tuned", "drafts", "neurons", "present")
ROWS = {
    "dense": "dense",
    "window256": "window 256 + 4",
    "window16": "window 16 + 4",
    "replay20": "20 % replayed",
    "replay50": "50 %",
    "replay80": "80 %",
    "all": "all after the first frame",
    "all-window256": "all, window 256 + 4",
    "all-window16": "all, window 16 + 4",
    "neurons50": "neurons, half computed",
    "neurons75": "neurons, a quarter computed",
    "prune75": "prune, a quarter computed",
}
DRAFT = "draft32"
# a pass of drafts and what it settles: rows of drafts/*
DRAFTS = {
    "codes, 16": "last frame's codes, `places=16`",
    "codes, 32": "the same, 32",
    "codes, 64": "the same, 64",
    "logits, 32": "drawn anew from the last frame's logits, 32",
    "row, 32": "the row above, 32",
    "repeat, 32 (coupled Jacobi)": "a repeated code, 32: coupled Jacobi decoding",
    "codes, 32, no Jacobi": "last frame's codes, 32, `jacobi=false`",
}
METHODS = {
    "draft": "drafts",
    "neurons": "`replay=neurons`",
    "prune": "`replay=prune`",
    "input": "`replay=input`",
    "tas": "`replay=attentive` (FastCar's score)",
    "random": "`replay=random`",
    "every_k": "`replay=every_k`",
}


def tokens_decode(results: Results) -> str:
    """A 7B model, bf16, one row: the latest run that has the plan."""
    rows = []
    for name, label in ROWS.items():
        run = next((x for x in reversed(RUNS) if _find(results, x, name, 1)), None)
        if run is None:
            continue
        row, dense = _find(results, run, name, 1), name == "dense"
        rows.append([
            label, number(row["trunk_ms"], 2), number(row.get("trunk_of_copy"), 2),
            "1" if dense else number(row.get("trunk_speedup"), 2), number(row["step_ms"], 2),
            "1" if dense else number(row.get("step_speedup"), 2), number(row.get("paper"), 2),
        ])  # fmt: skip
    return table(
        ["plan", "trunk, ms a token", "of a copy's bandwidth", "trunk, x dense over 8 frames",
         "step, ms", "step, x dense", "the paper's (FPGA)"],
        rows,
    )  # fmt: skip


def _find(results: Results, run: str, name: str, pair: int) -> Document:
    for row in results.rows("tokens-decode", run):
        if (row["name"], row["weights"], row["rows"]) == (name, "bf16", pair):
            return row
    return {}


CPU = ("dense", "replay80", "all", "neurons75", "all-window16")
CPU_WEIGHTS = (("1b", "bf16"), ("atrium-tokens", "float32"))


def tokens_cpu(results: Results) -> str:
    """Steps on two CPU cores, by turns."""
    rows = []
    for name in results.entries("tokens-cpu"):
        for row in results.rows("tokens-cpu", name):
            if row["name"] not in CPU or (name, row["weights"]) not in CPU_WEIGHTS:
                continue
            rows.append([
                name, row["weights"], f"`{row['name']}`", number(row["trunk_ms"]),
                _ratio(row), number(row.get("later_speedup"), 2), number(row.get("limit"), 2),
                number(row.get("step_speedup"), 2),
            ])  # fmt: skip
    return table(
        ["model", "weights", "row", "trunk, ms a token", "x dense, 8 frames", "after the first",
         "limit", "step, x dense"],
        rows,
    )  # fmt: skip


def _ratio(row: Row) -> str:
    text = number(row["ratio_dense"], 2)
    return text if row["real"] or row["name"] == "dense" else f"{text}, within the noise"


def drafts(results: Results) -> str:
    """Places that one pass of the trunk settles."""
    settled = _settled(results)
    return table(
        ["drafts", *CAMERAS.values()],
        [
            [label, *(_places(settled[name, camera]) for camera in CAMERAS)]
            for name, label in DRAFTS.items()
        ],
    )


def _places(row: Row) -> str:
    return f"{number(row['places_a_pass'])} ({number(row['places_a_pass_worst'])})"


def _settled(results: Results) -> dict[tuple[str, str], Document]:
    return {
        (row["name"], row["camera"]): row
        for entry in ("beside-neurons", "still-and-walk", "pans")
        for row in results.rows("drafts", entry)
    }


def frontier(results: Results) -> str:
    """Whole steps at 7B's shape by what a pass settles, and dB that are lost."""
    speed = _speeds(results)
    lost = {camera: _lost(results, "neurons", camera) for camera in CAMERAS}
    rows = [
        ["neurons, a quarter computed",
         *(f"{times(speed['neurons'][x])}; {number(lost[x][0])} dB" for x in CAMERAS)],
        ["draft, 32 places", *(f"{times(speed['draft'][x], 1)}; 0" for x in CAMERAS)],
        ["both", *(f"{times(speed['both'][x], 1)}; {number(lost[x][0])} dB" for x in CAMERAS)],
    ]  # fmt: skip
    return table(["", *CAMERAS.values()], rows)


def _speeds(results: Results) -> Mapping[str, Mapping[str, float]]:
    """Times dense of a whole step by camera."""
    run = {
        (row["name"], row["rows"]): row
        for row in results.rows("tokens-decode", "drafts")
        if row["weights"] == "bf16"
    }
    dense = run["dense", 1]["step_ms"]
    settled = _settled(results)

    def of(name: str, drafts: str) -> dict[str, float]:
        ms = run[name, 1]["step_ms"]
        return {x: settled[drafts, x]["places_a_pass"] * dense / ms for x in CAMERAS}

    return {
        "draft": of(DRAFT, "codes, 32"),
        "both": of(f"{DRAFT}-neurons75", "codes, 32, neurons"),
        # over a video, whose first frame is whole
        "neurons": dict.fromkeys(CAMERAS, float(run["neurons75", 1]["step_speedup"])),
    }


def readme_tokens(results: Results) -> str:
    """Drafts, which lose nothing, and the least loss of replay."""
    speed = _speeds(results)
    losses = {camera: _lost(results, "neurons", camera) for camera in CAMERAS}
    return table(
        ["plan, 7B, one H200", *CAMERAS.values()],
        [
            ["**`lossless`**: the last frame's codes as drafts, exact",
             *(times(speed["draft"][x], 1) for x in CAMERAS)],
            ["`replay=neurons:share=0.75`, not exact: dB to dense (worst room)",
             *(f"{times(speed['neurons'][x], 1)}, {signed(-mean)} dB ({signed(-worst)})"
               for x, (mean, worst, _) in losses.items())],
        ],
    )  # fmt: skip


def _gates(results: Results, measure: str) -> dict[tuple[str, str], Document]:
    return {
        (row["method"], row["clip"]): row
        for row in results.rows("tokens-gates", "three-quarters")
        if row["measure"] == measure and row["share"] in (0.0, 0.75)
    }


def _lost(results: Results, method: str, camera: str) -> tuple[float, float, str]:
    """dB that a method loses to dense: the mean, the worst room, and the mean's interval."""
    made = _gates(results, "made")
    row, dense = made[method, camera], made["dense", camera]
    mean, low, high = versus(dense, row, "psnr_truth")
    pairs = zip(dense["by_world"]["psnr_truth"], row["by_world"]["psnr_truth"], strict=True)
    return mean, max(a - b for a, b in pairs), f"({number(low)} to {number(high)})"


def replay(results: Results) -> str:
    """dB lost with three quarters of the MLPs left out: the mean, and the worst room."""
    made = _gates(results, "made")
    rows = [
        ["*dense, dB to the truth*",
         *(number(made["dense", x]["psnr_truth"]) for x in CAMERAS)],
    ]  # fmt: skip
    for method, label in METHODS.items():
        lost = [_lost(results, method, camera) for camera in CAMERAS]
        rows.append([label, *(f"{number(mean)} ({number(worst)})" for mean, worst, _ in lost)])
    return table(["three quarters left out", *CAMERAS.values()], rows)
