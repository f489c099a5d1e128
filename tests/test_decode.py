"""Frames by the decode engine are the frames of a session that makes each token by itself."""

import dataclasses
import functools
from ctypes import sizeof

import pytest
import torch
import toys
from faults import refused
from torch.utils._python_dispatch import TorchDispatchMode

import tachyscope as ts
from tachyscope.core.chunk_runner import ChunkRunner, FrameRunner
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.observers import Observer
from tachyscope.decode import (
    CodedLinear,
    can_compile,
    cpu_library,
    quantise,
    store_bf16,
    unsupported,
)
from tachyscope.decode.quantise import bits_of, weight_of
from tachyscope.io.torch_defaults import own_numerics
from tachyscope.models.checkpoint import write_tensors
from tachyscope.models.toys import toy_tokens
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.models.vila_u.transformer import Vila
from tachyscope_lab.bench.random_vila import random_calibration

PLANS = [
    "cache=keep_all",
    "attention=window:tokens=9,sink=2",
    "cache=window:budget=4f",
    "cache=window:budget=4f,positions=reindexed attention=window:tokens=5",
    "cache=merge:budget=4f",
    "cache=dedup:budget=5f replay=attentive:share=0.5,age=2",
    "replay=attentive:share=0.5",
    "replay=attentive:threshold=0.1,authors=true,cfg=free",
    "replay=attentive:threshold=-9 attention=window:tokens=16",
    "replay=random:share=0.6,age=2",
    "replay=every_k:k=3,drift=true",
    "replay=attentive:share=0.5,age=2,drift=true",
]
QUICK = ("replay=attentive:share=0.5", PLANS[3])


def _runner(model, session, native=False):
    # the launches of a GPU's step run here too, also where the native program does not
    why = unsupported(model.decode_parts(), session)
    assert not why or (not native and ("a CPU's step" in why or "cannot check" in why))
    return FrameRunner(model, session, model.decode_parts(), graph=native)


def _frames(runner, count):
    rows = []
    with torch.inference_mode():
        for i in range(count):
            latents = runner([i % 7] if runner.model.actions else [])
            row = runner.session.meter.take()
            rows.append((latents, {k: v for k, v in row.items() if not k.endswith("_ms")}))
    return rows


def _open(model, plan, frames=8, **asked):
    return toys.open_session(model, f"dense text=none {plan}", frames=frames, **asked)


def _check(model, plan, count=5, native=False, **asked):
    want = _frames(ChunkRunner(model, _open(model, plan, **asked)), count)
    got = _frames(_runner(model, _open(model, plan, **asked), native), count)
    for (codes, row), (same, same_row) in zip(got, want, strict=True):
        assert torch.equal(codes, same)
        if masked := row.pop("simulated_rows_replayed", 0):
            # a row beside one that is computed: here alone it was really skipped
            assert row["rows_replayed"] + masked == same_row["rows_replayed"]
        else:
            assert row == pytest.approx(same_row)
    return got


@pytest.mark.parametrize(
    "plan", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in PLANS]
)
def test_tokens_and_counted_work_are_those_of_single_passes(plan):
    got = _check(toy_tokens(), plan, prompt="a red room")
    assert len({tuple(codes.flatten().tolist()) for codes, _ in got}) == 5  # no frame stands still


def _calibrated(model, folder, rank=8):
    """A file of a calibration that means nothing, but fits the model's weights."""
    found = random_calibration(model, (0.5,), rank)
    write_tensors(folder / "calibration.safetensors", found.tensors())
    return f"file={folder / 'calibration.safetensors'}"


@pytest.mark.parametrize(
    "plan",
    [
        "replay=neurons:share=0.5",
        pytest.param("replay=neurons:share=0.5,age=2", marks=pytest.mark.slow),
        pytest.param(
            "attention=window:tokens=9,sink=2 replay=prune:share=0.5", marks=pytest.mark.slow
        ),
    ],
)
def test_slices_of_neurons_and_their_memory_are_those_of_single_passes(plan, tmp_path):
    model = toy_tokens()
    got = _check(model, f"{plan},{_calibrated(model, tmp_path)}", 3, prompt="a red room")
    assert len({tuple(codes.flatten().tolist()) for codes, _ in got}) == 3


@pytest.mark.slow
def test_errors_are_those_of_single_passes_also_with_a_square_map_and_codes(tmp_path):
    # weights that are codes are rounded again in a slice, so that tokens may differ
    for int8, rank in ((False, 64), (True, 8)):
        model, runs = toy_tokens(), []
        if int8:
            quantise(model.transformer.trunk, "int8")
        plan = f"replay=neurons:share=0.5,{_calibrated(model, tmp_path, rank)}"
        for make in (_runner, ChunkRunner):
            session = _open(model, plan)
            _frames(make(model, session), 1)
            runs.append(
                torch.stack([layer.own["replay"]["error"] for layer in session.memory.layers])
            )
        error = (runs[0] - runs[1]).norm() / runs[1].norm()
        assert error < (0.02 if int8 else 1e-5) and runs[1].norm() > 1


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 32])
def test_without_guidance_and_without_chance(top_k):
    model = toy_tokens()
    sampler = dataclasses.replace(model.config.sampler, cfg=1.0, top_k=top_k, top_p=1.0)
    config = dataclasses.replace(model.config, sampler=sampler)
    one = VilaModel(model.transformer, config, model.tokenizer)
    _check(one, "replay=attentive:threshold=0.1")


@pytest.mark.slow
def test_a_batch_of_videos_and_a_cache_that_grows():
    # two videos may decide apart: weights are then read, and what replays is told as simulated
    got = _check(
        toy_tokens(), "replay=attentive:share=0.5", frames=None, prompt=["a", "a red room"],
        seed=[1, 2],
    )  # fmt: skip
    assert got[0][0].shape[0] == 2


@pytest.mark.slow
def test_videos_of_a_batch_have_actions_of_their_own():
    model, made = toy_tokens(), []
    for make in (ChunkRunner, _runner):
        session = _open(model, "replay=input:share=0.5", prompt=["a", "a red room"], seed=[1, 2])
        runner = make(model, session)
        with torch.inference_mode():
            made.append([runner(torch.tensor([[i, 6 - i]])) for i in range(3)])
    assert all(map(torch.equal, *made))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["replay=attentive:share=0.5,age=2,drift=true", "replay=input:share=0.5"]
)
def test_launches_of_a_step_read_nothing_of_the_device(plan, monkeypatch):
    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert str(func) not in ("aten._local_scalar_dense.default", "aten.nonzero.default")
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr("tachyscope.kernels.decode_mlp.torch.host_may_read", lambda x: False)
    model = toy_tokens()
    session = _open(model, plan, prompt=["a", "a red room"], seed=[1, 2])
    runner = _runner(model, session)
    _frames(runner, 1)
    assert runner.engine is not None
    runner.engine.skips = False  # as on a GPU without kernels for these rows
    with torch.inference_mode(), NoReads():
        runner([2])
    counts = session.meter.take()
    assert counts["simulated_rows_replayed"] > 0 and not counts["rows_replayed"]


@pytest.mark.slow
def test_a_stream_goes_on_after_frames_that_were_given_and_a_state_that_was_restored():
    model, plan = toy_tokens(), "dense text=none replay=attentive:share=0.5"
    pictures = (torch.rand(2, 32, 32, 3, generator=torch.Generator().manual_seed(0)) * 255).byte()
    streams = [ts.open(model, plan, first=pictures.numpy(), seed=3, frames=8) for _ in range(2)]
    streams[1].runner = _runner(model, streams[1].session)
    for _ in range(2):
        want, got = (stream.step("w").frames for stream in streams)
        assert (want == got).all()
    states = [stream.snapshot() for stream in streams]
    after = [stream.step("a").frames for stream in streams]
    for stream, state in zip(streams, states, strict=True):
        stream.restore(state)
    again = [stream.step("a").frames for stream in streams]
    assert all((x == after[0]).all() for x in (*after, *again))


def test_int8_weights_run_by_modules_and_by_the_engine():
    model = toy_tokens()
    dense = model.transformer.trunk.layers[0].mlp.up_proj.weight.detach().clone()
    quantise(model.transformer.trunk, "int8")
    quantise(model.transformer.head, "int8")
    rounded = model.transformer.trunk.layers[0].mlp.up_proj
    assert isinstance(rounded, CodedLinear)
    error = (rounded.weight - dense).abs().amax(1)
    assert (error <= 0.501 * rounded.scale).all() and error.max() > 0
    _check(model, "replay=attentive:share=0.5", count=2)


def _wide():
    """A toy whose widths are multiples of 128."""
    small = toy_tokens()
    config = dataclasses.replace(
        small.config, hidden=128, intermediate=256, heads=4, head_dim=32, layers=2, code_dim=128,
        head=dataclasses.replace(small.config.head, width=128, layers=1),
    )  # fmt: skip
    with own_numerics(0):
        return VilaModel(Vila(config).eval(), config, small.tokenizer)


@pytest.mark.slow
def test_int4_weights_run_by_modules_and_by_the_engine(tmp_path):
    model = _wide()
    dense = model.transformer.trunk.layers[0].mlp.up_proj.weight.detach().clone()
    for part in (model.transformer.trunk, model.transformer.head):
        quantise(part, "int4")
    rounded = model.transformer.trunk.layers[0].mlp.up_proj
    groups = dense.unflatten(1, (-1, 128))
    step = (groups.amax(2) - groups.amin(2)) / 15
    error = (rounded.weight - dense).unflatten(1, (-1, 128)).abs().amax(2)
    # scale and offset are bfloat16: at the far end of a group a fifteenth part of 1/256 more
    assert (error <= 0.6 * step + groups.abs().amax(2) / 128).all() and error.max() > 0
    _check(model, "attention=window:tokens=9,sink=2 replay=attentive:share=0.5", count=2)
    runs = []
    for make in (_runner, ChunkRunner):
        session = _open(model, f"replay=neurons:share=0.5,{_calibrated(model, tmp_path)}")
        _frames(make(model, session), 1)
        runs.append(torch.stack([layer.own["replay"]["error"] for layer in session.memory.layers]))
    # a slice's columns are rounded again
    assert (runs[0] - runs[1]).norm() < 0.2 * runs[1].norm()


class _Torchao(torch.Tensor):
    """As torchao's tensors are: codes, and what stands for a row or for 128 columns of it."""

    def detach(self):
        return self


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_codes_of_torchao_are_read_as_they_are(kind):
    rng = torch.Generator().manual_seed(0)
    linear, bound = torch.nn.Linear(256, 48), 8 if kind == "int4" else 128
    weight = linear.weight.detach().as_subclass(_Torchao)
    weight.qdata = torch.randint(-bound, bound, (48, 256), generator=rng, dtype=torch.int8)
    groups = 2 if kind == "int4" else 1
    weight.scale = torch.rand(48, groups, generator=rng).bfloat16()
    zero = torch.zeros(48, groups, dtype=torch.int8)
    if kind == "int4":
        weight.target_dtype = torch.int4
        zero = torch.randint(-3, 4, (48, 2), generator=rng, dtype=torch.int8)
    weight.zero_point = zero
    linear.weight = torch.nn.Parameter(weight)
    linear.weight.__dict__.update(weight.__dict__)
    assert bits_of(linear) == weight_of(linear).bits == int(kind[3:])
    each = 256 // groups
    scale, moved = (x.float().repeat_interleave(each, 1) for x in (weight.scale, zero))
    want, got = (weight.qdata.float() - moved) * scale, weight_of(linear)
    # an offset of eleven steps, rounded to bfloat16
    off = 11 / 256 if kind == "int4" else 0.0
    torch.testing.assert_close(got.dense(torch.float32), want, rtol=0, atol=off)
    weight.scale = linear.weight.scale = weight.scale[:, :0]
    assert bits_of(linear) == 0


def test_a_width_that_codes_do_not_fit_is_refused():
    with pytest.raises(
        TachyscopeError, match="int4 weights need a width that is a multiple of 128"
    ):
        quantise(toy_tokens().transformer.trunk, "int4")


@pytest.fixture
def compiler():
    if not can_compile(torch.float32):
        pytest.skip("no C++ compiler")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "plan", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in PLANS]
)
def test_a_compiled_step_makes_the_tokens_and_counts_of_single_passes(plan):
    got = _check(toy_tokens(), plan, native=True, prompt="a red room")
    assert len({tuple(codes.flatten().tolist()) for codes, _ in got}) == 5


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("rank", [8, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["neurons:share=0.5,age=2", "prune:share=0.5"])
def test_a_compiled_step_runs_slices_of_neurons(kind, rank, tmp_path):
    model = toy_tokens()
    _check(model, f"replay={kind},{_calibrated(model, tmp_path, rank)}", 3, native=True)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("store", [functools.partial(quantise, kind="int8"), store_bf16])
def test_a_compiled_step_reads_stored_weights(store):
    model = toy_tokens()
    for part in (model.transformer.trunk, model.transformer.head):
        store(part)
    _check(model, "replay=attentive:share=0.5", count=2, native=True)
    _check(model, "cache=keep_all", count=1, native=True, prompt=["a", "a b c"], seed=[1, 2])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "plan",
    [
        "cache=merge:budget=4f passes=draft:places=4",
        pytest.param(
            "attention=window:tokens=9,sink=2 passes=draft:places=3", marks=pytest.mark.slow
        ),
        pytest.param("passes=draft:places=5,source=row,jacobi=false", marks=pytest.mark.slow),
    ],
)
def test_compiled_passes_over_drafts_make_the_tokens_and_counts_of_torchs(plan):
    _check(toy_tokens(), plan, 3, native=True, prompt="a red room")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "plan",
    [
        "replay=input:share=0.5",
        pytest.param("replay=input:budget=0.4", marks=pytest.mark.slow),
        pytest.param("replay=input:threshold=2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("native", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_replays_by_inputs(plan, native):
    got = _check(toy_tokens(), plan, 4, native=native, prompt="a red room")
    assert sum(row["rows_replayed"] for _, row in got) > 0


DRAFTED = [
    "cache=merge:budget=4f passes=draft:places=4",
    "attention=window:tokens=9,sink=2 passes=draft:places=3,source=row",
    "passes=draft:places=30,jacobi=false",
    "passes=draft:places=4 replay=neurons:share=0.5",
    "passes=draft:places=2 replay=prune:share=0.5",
]


@pytest.mark.slow
@pytest.mark.parametrize("plan", DRAFTED)
def test_passes_over_drafts_that_all_have_one_size_make_the_same_tokens(plan, tmp_path):
    model = toy_tokens(dtype=torch.float64)
    if "replay" in plan:
        plan = f"{plan},{_calibrated(model, tmp_path)}"
    runner = _runner(model, _open(model, plan, prompt="a red room"))
    want = _frames(ChunkRunner(model, _open(model, plan, prompt="a red room")), 3)
    got = _frames(runner, 3)
    for (codes, row), (same, same_row) in zip(got, want, strict=True):
        assert torch.equal(codes, same)
        for name in ("drafts", "drafts_accepted", "pairs_dense"):
            assert row[name] == same_row[name]
        # what a pass runs over anew is work
        assert all(row[name] >= same_row[name] for name in ("pairs", "macs", "mlp_macs"))
    size = min(16, 1 + runner.session.plan.passes.places)
    assert {tokens for tokens, _ in runner.engine.trunks} <= {1, size}


@pytest.mark.usefixtures("compiler")
def test_compiled_drafts_of_a_batch_in_a_cache_that_grows():
    asked = {"frames": None, "prompt": ["a", "a red room"], "seed": [1, 2]}
    got = _check(toy_tokens(), "passes=draft:places=4", 3, native=True, **asked)
    dense = _frames(_runner(toy_tokens(), _open(toy_tokens(), "cache=keep_all", **asked), True), 3)
    for (codes, row), (same, _) in zip(got, dense, strict=True):
        assert torch.equal(codes, same) and row["drafts"] > 0


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("threads", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_compiled_step_makes_the_same_of_any_number_of_threads(threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        _check(toy_tokens(), "replay=attentive:share=0.5", count=2, native=True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("compiler")
def test_a_compiled_model_is_streamed_and_says_what_it_cannot_compile(recwarn):
    model, plain = toy_tokens().compile(), toy_tokens()
    for plan, warned in (("dense", False), ("dense attention=ann:read=1", True)):
        one, other = (ts.open(x, plan, prompt="a", seed=4) for x in (model, plain))
        assert isinstance(one.runner, ChunkRunner if warned else FrameRunner)
        assert any("without a compiled step" in str(x.message) for x in recwarn) == warned
        made = [stream.step("w") for stream in (one, other)]
        assert (made[0].frames == made[1].frames).all()
        assert made[0].stats["cuda_graph"] == 0
    refused(lambda: toy_tokens(dtype=torch.bfloat16).compile(), "compiled for float32")


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(cpu_library, "COMPILERS", ())
    cpu_library.library.cache_clear()
    refused(lambda: toy_tokens().compile(), "no C++ compiler", "install g++")
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(cpu_library, "FLAGS", ("-another",))
    refused(lambda: toy_tokens().compile(), "could not compile", "install g++")
    cpu_library.library.cache_clear()


@pytest.mark.usefixtures("compiler")
def test_a_struct_of_another_size_than_python_has_is_not_compiled(monkeypatch):
    read = cpu_library.read_structs(cpu_library.TEXT.replace("i64 batch, width;", "i64 batch;"))
    assert {
        name for name, one in read.items() if sizeof(one) != sizeof(cpu_library.STRUCTS[name])
    } == {"Plain"}
    monkeypatch.setattr(cpu_library, "STRUCTS", read)
    cpu_library.library.cache_clear()
    refused(lambda: toy_tokens().compile(), "cpu_library.py reads another Plain")
    cpu_library.library.cache_clear()


class _Outputs(Observer):
    """Counts MLPs that it was told of."""

    count = 0

    def on_mlp(self, ctx, x, y):
        self.count += 1


@pytest.mark.slow
def test_an_observer_sees_every_pass_and_changes_no_token():
    model, plan, seen, got = toy_tokens(), "replay=attentive:share=0.5", _Outputs(), []
    want, runner = (_runner(model, _open(model, plan)) for _ in range(2))
    for watched in (False, True, False):
        if watched:
            runner.session.watch(seen)
        got += _frames(runner, 1)
        runner.session.unwatch(seen)
    assert seen.count == 16 * model.config.layers
    for codes, _ in got:
        assert torch.equal(codes, _frames(want, 1)[0][0])


class _Subclass(torch.Tensor):
    """As torchao's quantised weights are."""


def test_what_the_engine_cannot_do_it_says():
    model = toy_tokens()
    parts = model.decode_parts()
    for plan, word in {
        "attention=ann:read=0.5,block=4": "attention=ann",
        "cache=merge:threshold=0.7": "queries",
        "passes=draft:places=4,source=logits": "passes=draft",
        "store=int8 cache=window:budget=4f": "store=int8",
    }.items():
        assert word in unsupported(parts, _open(model, plan))
    mixed = toy_tokens()
    layer = mixed.transformer.trunk.layers[1]
    layer.mlp.up_proj = CodedLinear(layer.mlp.up_proj, "int8")
    assert "several kinds" in unsupported(mixed.decode_parts(), _open(mixed, "cache=keep_all"))
    linear = model.transformer.trunk.layers[1].self_attn.o_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(_Subclass))
    assert "codes" in unsupported(parts, _open(model, "cache=keep_all"))
