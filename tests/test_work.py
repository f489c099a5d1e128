"""Work is counted once: layer by layer, by the decode engine, and by what the passes are."""

import pytest
import test_contract as contract

from tachyscope.core.chunk_runner import FrameRunner
from tachyscope.core.observers import Observer
from tachyscope.core.work import NAMES, Work
from tachyscope.decode import unsupported

MACS = ("macs", "mlp_macs")
COUNTED = {*NAMES} - {"past_readers"}


class Passes(Observer):
    """What passes the dense model would score, from their contexts alone."""

    def on_open(self, session):
        self.session, self.work, self.last = session, Work(), None

    def on_pass(self, ctx):
        self.last = ctx
        if not ctx.shape.token_by_token:
            clean = ctx.pass_index == ctx.pass_count - 1 and not any(ctx.noise)
            self._add(ctx.shape.layers - clean, ctx.tokens * (ctx.tokens + ctx.total))

    def on_commit(self, ctx, n):
        if ctx.shape.token_by_token:
            self._add(ctx.shape.layers, sum(ctx.total + i + 1 for i in range(n)))

    def _add(self, layers, pairs):
        shape = self.session.shape
        self.work.pairs_dense += shape.batch * shape.heads * layers * pairs


def counts(row):
    return {name: value for name, value in row.items() if name in COUNTED}


@pytest.mark.parametrize("family", ["chunks", "steps", "poses", "tokens", "rolling", "cosmos"])
def test_the_dense_models_pairs_are_those_of_its_passes(family):
    stream = contract.stream("dense", family, "cpu")
    passes = Passes()
    stream.session.watch(passes)
    for _ in range(3):
        row = stream.step("w" if stream.model.actions else None).stats
        assert row["pairs"] == row["pairs_dense"] == row["pairs_held"] == passes.work.pairs_dense
        passes.work = Work()


def test_passes_that_are_skipped_are_the_dense_models_all_the_same():
    dense, every = (
        contract.play(contract.stream(plan, "steps", "cpu"), 3)[1]
        for plan in ("dense", "dense passes=every_k:k=2")
    )
    for want, row in zip(dense, every, strict=True):
        assert row["pairs_dense"] == want["pairs_dense"] and row["passes"] == want["passes"]
        assert row["pairs_held"] == row["pairs"] < want["pairs"] and row["passes_skipped"] > 0


@pytest.mark.parametrize(
    "kind, name", [x for x in contract.LISTED if "tokens" in contract.families(*x)], ids=str
)
def test_the_decode_engine_counts_what_single_passes_do(kind, name):
    plan = contract.plan_of(kind, contract.setting_of(kind, name)[1], "tokens")
    eager, engine = (contract.stream(plan, "tokens", "cpu") for _ in range(2))
    parts = engine.model.decode_parts()
    supported = not unsupported(parts, engine.session)
    assert supported == (name == "native" or not (kind == "store" or name in ("ann", "strided")))
    if not supported:
        return
    engine.runner = FrameRunner(engine.model, engine.session, parts, graph=False)
    for want, row in zip(contract.play(eager, 4)[1], contract.play(engine, 4)[1], strict=True):
        ours, theirs = counts(row), counts(want)
        # its passes over drafts have one size, and its slices compute a map apart
        more = {"neurons": MACS, "prune": MACS, "draft": (*MACS, "pairs", "rows_computed")}
        for key in more.get(name, ()):
            assert ours.pop(key) >= theirs.pop(key)
        assert ours == theirs
