"""Both of Atrium's models on unseen worlds, in one document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.results import Document, Parts
from tachyscope_lab.evaluation import (
    loops,
    prompt_adherence,
    tokens,
    world_lines,
    world_rows,
)
from tachyscope_lab.evaluation import (
    regimes as past_regimes,
)

PARTS = ("both", "world", "tokens", "views", "loops", "regimes")
WORLDS, WORLDS_QUICK, VIEWS = 16, 4, 200
PLANS = ("dense", "balanced", "fast")


def evaluate_atrium(
    plans: Sequence[str] = (),
    *,
    only: str = "both",
    worlds: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    quick: bool = False,
    command: str = "",
    watch: Callable[[str, int], None] | None = None,
    jobs: int | None = None,
    timed: bool = True,
    weights: str | None = None,
    pace: float = 1.0,
    regimes: Sequence[str] = (),
    parts: Parts | None = None,
    **options: Any,
) -> Document:
    """A results document with `world`, `tokens`, and a row for each plan of the world model.

    only: `world` or `tokens`, one of the models; `views`, what a prompt names at first sight,
    which needs more worlds than the rest; `loops`, the world model's memory as the field measures
    it. weights: a world model's folder instead of the shipped one's. timed: take the time of a
    token. watch: is told what is measured, and how much of it is done. parts: what was measured
    before, and where it is kept. More options are `evaluate_world`'s.
    """
    if only not in PARTS:
        raise TachyscopeError(f"only is one of {', '.join(PARTS)}, got {only!r}")
    common: dict[str, Any] = {
        "worlds": (WORLDS_QUICK if quick else WORLDS) if worlds is None else worlds,
        "device": device,
        "seed": seed,
        "quick": quick,
        "command": command,
        "jobs": jobs,
        "parts": parts,
    }

    def bar_of(part: str) -> Callable[[int], None] | None:
        return None if watch is None else lambda done: watch(part, done)

    if only in ("tokens", "views") and (weights is not None or pace != 1):
        raise TachyscopeError(
            f"`weights` and `pace` are of the world model's walks, got them with {only!r}: leave "
            f"them out, or measure world or loops"
        )
    if only not in ("both", "world") and options.get("runs", 1) != 1:
        raise TachyscopeError(
            f"`runs` are of the world model, got {options['runs']} with {only!r}: leave them out"
        )
    if only == "views":
        worlds = VIEWS if worlds is None else worlds
        return prompt_adherence.evaluate_views(
            worlds=worlds, device=device, seed=seed, command=command, parts=parts,
            watch=bar_of("worlds"),
        )  # fmt: skip
    if only == "tokens":
        return tokens.evaluate_tokens(
            plans=plans, **common, timed=timed, watch=bar_of("measures of tokens")
        )
    if only == "regimes":
        return past_regimes.evaluate_regimes(
            plans or PLANS, regimes, worlds=common["worlds"], device=device, seed=seed, jobs=jobs,
            command=command, weights=weights, parts=parts, watch=bar_of("batches of rooms"),
        )  # fmt: skip
    if only == "loops":
        return loops.evaluate_loops(
            plans or PLANS, worlds=common["worlds"], device=device, seed=seed, jobs=jobs,
            command=command, weights=weights, pace=pace, parts=parts, watch=bar_of("worlds"),
        )  # fmt: skip
    results = world_rows.evaluate_world(
        plans or PLANS, **common, weights=weights, pace=pace, watch=bar_of("worlds"), **options
    )
    if only == "world":
        return results
    more = tokens.evaluate_tokens(**common, timed=timed, watch=bar_of("measures of tokens"))
    kept = {key: more[key] for key in ("tokens", "clips", "speed", "aa") if key in more}
    return results | kept | {"token_rows": more["rows"]}


def lines(results: Document) -> list[str]:
    """An evaluation as a reader wants it."""
    if results["suite"] == "atrium-views":
        return prompt_adherence.lines(results)
    if results["suite"] == "world-regimes":
        return past_regimes.lines(results)
    if results["suite"] == "atrium-loops":
        return loops.lines(results)
    out = [] if results["suite"] == "atrium-tokens" else world_lines.lines(results)
    if "tokens" in results:
        rows = results.get("token_rows", results["rows"])
        out += tokens.lines(results | {"rows": rows})
    return out
