"""What a reader must know of a finished rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tachyscope.meter import summary
from tachyscope.models.wan.tiny_decoder import decoder_note
from tachyscope.plan import spell
from tachyscope.session import Session

SAVED = 0.01  # a method that saves less has not paid for its name


def notes(session: Session, rows: Sequence[Mapping[str, float]]) -> list[str]:
    """What a reader must know of a finished rollout: every method that saved under 1 %, and how
    far a tiny decoder lay from the VAE where that was checked."""
    plan, sums = session.plan, summary(rows)
    found = []
    name, kept = _name(plan.cache), session.past / max(session.total_entries, 1)
    if session.past == session.total_entries and not plan.cache.grows:
        found.append(f"cache policy {name!r} saved nothing: the video is shorter than its budget")
    elif name != "keep_all" and kept > 1 - SAVED:
        found.append(_under("cache", name, f"it kept {kept:.1%} of the entries"))
    name, read = _name(plan.attention), sums.get("pairs", 0.0) / _pairs_held(session, rows)
    if sums.get("simulated_pairs_skipped"):
        found.append(_simulated("attention", name, sums["simulated_pairs_skipped"], "pairs"))
    elif name != "dense" and read > 1 - SAVED:
        found.append(_under("attention", name, f"it read {read:.1%} of what the cache held"))
    name, read = _name(plan.text), sums.get("text_density", 0.0)
    if name not in ("none", "dense") and read > 1 - SAVED:
        found.append(_under("text", name, f"it read {read:.1%} of the prompt's tokens"))
    name, share = _name(plan.replay), sums["share_all"]
    if sums.get("simulated_rows_replayed"):
        found.append(_simulated("replay", name, sums["simulated_rows_replayed"], "MLP rows"))
    elif name != "none" and share < SAVED:
        found.append(_under("replay", name, f"it replayed {share:.1%} of the MLP rows"))
    if note := decoder_note(session.features):
        found.append(note)
    return found


def _name(policy: Any) -> str:
    return spell(policy).partition(":")[0]


def _under(part: str, name: str, why: str) -> str:
    return f"{part} policy {name!r} saved under 1 %: {why}"


def _simulated(part: str, name: str, count: float, what: str) -> str:
    return (
        f"{part} policy {name!r} only simulated its saving on this device: "
        f"{count:,.0f} {what} were worked out and then left out"
    )


def _pairs_held(session: Session, rows: Sequence[Mapping[str, float]]) -> float:
    """Pairs that reading everything would have scored over the caches this rollout had."""
    shape, pairs = session.shape, 0.0
    for i, row in enumerate(rows):
        past = int(row["entries_before"])
        if shape.token_by_token:
            n = shape.tokens_per_frame
            pairs += shape.layers * (n * past + n * (n + 1) // 2)
        else:
            chunk = shape.chunk * shape.tokens_per_frame
            passes = [chunk] * (shape.passes - 1)
            if shape.rolling_frames:
                # all that is under way shares a pass; at the start more comes with each
                widest = shape.max_pass_tokens
                passes = [widest] if i else [*range(chunk, widest + 1, chunk)]
            pairs += shape.layers * sum(n * (past + n) for n in passes)
            # the clean pass ends in its last layer before it reads
            pairs += (shape.layers - 1) * chunk * (past + chunk)
    return pairs * shape.batch * shape.heads
