"""Notes on a finished rollout: methods that saved nothing, and how a tiny decoder differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tachyscope.attention.dense import Dense, DenseText
from tachyscope.cache.keep_all import KeepAll
from tachyscope.core.meter import summary
from tachyscope.core.plan import spell
from tachyscope.core.session import Session
from tachyscope.models.wan.tiny_decoder import decoder_note
from tachyscope.passes.all import AllPasses
from tachyscope.store.native import Native

Sums = Mapping[str, float]
SAVED = 0.01  # a method that saves a smaller share is named


def notes(session: Session, rows: Sequence[Mapping[str, float]]) -> list[str]:
    """A sentence for every method that saved under 1 %, and the PSNR of a tiny decoder to the VAE
    if `decoder_check` measured it."""
    sums = summary(rows)
    sentences = []
    for kind, policy in session.plan.items():
        if kind in SAVINGS and (note := SAVINGS[kind](session, sums)):
            name = spell(policy).partition(":")[0]
            sentences.append(f"{kind} policy {name!r} {note}")
    return [*sentences, *filter(None, [decoder_note(session.memory.features.decoder())])]


def _cache(session: Session, sums: Sums) -> str:
    if session.memory.past == session.memory.total_entries and not session.plan.cache.grows:
        return "saved nothing: the video is shorter than what it may hold"
    kept = session.memory.past / max(session.memory.total_entries, 1)
    return _under(session.plan.cache != KeepAll(), 1 - kept, f"it kept {kept:.1%} of the entries")


def _store(session: Session, sums: Sums) -> str:
    share = session.memory.layers[0].stored_share
    return _under(session.plan.store != Native(), 1 - share, f"it takes {share:.1%} of the bytes")


def _attention(session: Session, sums: Sums) -> str:
    if skipped := sums.get("simulated_pairs_skipped"):
        return _simulated(skipped, "pairs")
    # a bank holds all that there was
    held = sums["pairs_dense" if session.memory.layers[0].bank is not None else "pairs_held"]
    read = sums.get("pairs", 0.0) / held
    acts = session.plan.attention != Dense()
    return _under(acts, 1 - read, f"it read {read:.1%} of what the cache held")


def _text(session: Session, sums: Sums) -> str:
    read = sums.get("text_density", 0.0)
    acts = session.plan.text not in (None, DenseText())
    return _under(acts, 1 - read, f"it read {read:.1%} of the prompt's tokens")


def _replay(session: Session, sums: Sums) -> str:
    if replayed := sums.get("simulated_rows_replayed"):
        return _simulated(replayed, "MLP rows")
    share = sums["share_all"]
    acts = session.plan.replay is not None
    return _under(acts, share, f"it replayed {share:.1%} of the MLP rows")


def _passes(session: Session, sums: Sums) -> str:
    if drafts := sums.get("drafts"):
        share = sums.get("drafts_accepted", 0.0) / drafts
        return _under(True, share, f"{share:.1%} of its drafts were right")
    share = sums.get("passes_skipped", 0.0) / max(sums.get("passes", 0.0), 1.0)
    return _under(
        session.plan.passes != AllPasses(), share, f"it skipped {share:.1%} of the passes"
    )


# by kind: a sentence on its policy, or ""
SAVINGS: dict[str, Callable[[Session, Sums], str]] = {
    "cache": _cache, "store": _store, "attention": _attention, "text": _text, "passes": _passes,
    "replay": _replay,
}  # fmt: skip


def _under(acts: bool, saved: float, why: str) -> str:
    return f"saved under 1 %: {why}" if acts and saved < SAVED else ""


def _simulated(count: float, what: str) -> str:
    return (
        f"only simulated its saving on this device: {count:,.0f} {what} were computed and "
        f"then masked"
    )
