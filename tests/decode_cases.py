"""Operations of a decode step for tests/test_kernels.py: odd sizes, each backend and its reference.

A case makes its inputs on the CPU, rounded as the device will have them; the reference works on
these, a backend on a copy that was moved.
"""

import dataclasses
import functools
import itertools

import torch

from tachyscope.core.types import Rope
from tachyscope.kernels.decode_attention import Entries, Rotation, Scratch, Step, Window
from tachyscope.kernels.decode_attention import several as attention_several
from tachyscope.kernels.decode_attention import torch as attention_torch
from tachyscope.kernels.decode_attention import triton as attention_triton
from tachyscope.kernels.decode_attention.reference import decode_attention_reference
from tachyscope.kernels.decode_mlp import COPIES, Error, Kept, MlpWeights
from tachyscope.kernels.decode_mlp import torch as mlp_torch
from tachyscope.kernels.decode_mlp import triton as mlp_triton
from tachyscope.kernels.decode_mlp.reference import decode_mlp_reference
from tachyscope.kernels.device import multiprocessors
from tachyscope.kernels.gemv import Norm, Weight, to_codes
from tachyscope.kernels.gemv import torch as gemv_torch
from tachyscope.kernels.gemv import triton as gemv_triton
from tachyscope.kernels.gemv.reference import gemv_reference, norm_reference
from tachyscope.kernels.sample_code import Codes, Draw
from tachyscope.kernels.sample_code import torch as sample_torch
from tachyscope.kernels.sample_code import triton as sample_triton
from tachyscope.kernels.sample_code.reference import sample_code_reference
from tachyscope.kernels.token_gate import GateState, TokenGate
from tachyscope.kernels.token_gate import torch as gate_torch
from tachyscope.kernels.token_gate import triton as gate_triton
from tachyscope.kernels.token_gate.reference import decide_by_input_reference, decide_reference

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
SMALL = None if ON_GPU else gemv_triton.Setting(16, 16, 4)
PLACES, PLACE = 5, 2


def moved(value):
    """A copy on the device, dataclasses' tensors with it."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE, copy=True)
    if isinstance(value, tuple):
        return tuple(map(moved, value))
    if dataclasses.is_dataclass(value):
        return type(value)(
            **{f.name: moved(getattr(value, f.name)) for f in dataclasses.fields(value)}
        )
    return value


def _draw(rng, *size):
    return torch.randn(*size, generator=rng).to(DTYPE)


def _whole(*values):
    return torch.tensor(values if len(values) != 1 else values[0], dtype=torch.int32)


def _weight(rng, rows, columns, kind, bias=False):
    data = _draw(rng, rows, columns) * columns**-0.5
    weight = Weight(data, None, _draw(rng, rows) if bias else None)
    return to_codes(weight, kind) if kind else weight


def _norm(rng, kind, width):
    return Norm(_draw(rng, width), _draw(rng, width) if kind == "layer" else None, 1e-5)


def _case_gemv(rng, backend, tokens, codes, kind, add=False):
    width = 384 if codes == "int4" else 40
    x = _draw(rng, tokens, width)
    weights = tuple(_weight(rng, n, width, codes, kind == "layer") for n in (19, 7, 9))
    norm = _norm(rng, kind, width) if kind else None
    base = _draw(rng, tokens, 35) if add else torch.zeros(tokens, 35, dtype=DTYPE)
    want = base + gemv_reference(x, weights, norm, kind == "layer")
    out = moved(base) if add else torch.empty(tokens, 35, dtype=DTYPE, device=DEVICE)
    args = (out, *moved((x, weights, norm)), kind == "layer", add)
    if backend == "torch":
        return gemv_torch.gemv(*args), want
    return gemv_triton.gemv(*args, SMALL), want


def _case_mlp(
    rng, backend, tokens, codes, gated, skip, drift=False, ready=1, linear=0, remember=False,
    prenorm=False,
):  # fmt: skip
    width, inner = (128, 256) if codes == "int4" else (40, 52)
    sizes = (inner - linear, width), (inner, width), (width, inner)
    gate, up, down = (_weight(rng, *size, codes, not gated) for size in sizes)
    norm = _norm(rng, "rms" if gated else "layer", width)
    if linear:
        down = dataclasses.replace(down, bias=_draw(rng, width))
    mlp = MlpWeights(norm, gate if gated else None, up, down, linear)
    x = _draw(rng, tokens, width)
    flags = torch.tensor([skip == "all" or (skip == "first" and b == 0) for b in range(tokens)])
    age = torch.ones(tokens, PLACES, dtype=torch.int32)
    kept = Kept(flags.int(), _whole(PLACE), _draw(rng, tokens, PLACES, width), age)
    if drift:
        moved_by = _draw(rng, tokens, width)
        kept = dataclasses.replace(kept, drift=moved_by, ready=_whole(ready), memory=16.0)
    if remember:
        kept = dataclasses.replace(kept, input=_draw(rng, tokens, PLACES, width))
    kept = None if skip is None else kept
    if skip == "error":
        held = (_draw(rng, tokens, PLACES, width) for _ in range(2))
        kept = Error(_whole(PLACE), *held, 0.7, torch.zeros(tokens))
    got, there, on_device = moved(x), moved(kept), moved(mlp)
    want = decode_mlp_reference(x, mlp, kept)
    if backend == "torch":
        mlp_torch.decode_mlp(got, on_device, there)
    else:
        barrier = torch.zeros((), dtype=torch.int32, device=DEVICE)
        hidden = torch.empty(tokens, inner, dtype=DTYPE, device=DEVICE)
        # interpreted, programs run one after the other and cannot wait for the last
        setting = mlp_triton.MlpSetting(SMALL, SMALL, 3)
        if ON_GPU:
            setting = mlp_triton.setting_for(on_device, tokens, multiprocessors(got.device))
        setting = setting._replace(prenorm=prenorm)
        launches, normed = 1 if ON_GPU else 2, got.new_empty(COPIES, *got.shape)
        mlp_triton.decode_mlp(got, on_device, there, hidden, barrier, 1, normed, setting, launches)
    if isinstance(kept, Kept):
        names = ["output", "age", *["drift"] * drift, *["input"] * remember]
        got = torch.cat([got.flatten(), *(getattr(there, x).flatten() for x in names)])
        want = torch.cat([want.flatten(), *(getattr(kept, x).flatten() for x in names)])
    return got, want


def gate_state(rng, gate, rows, ready=1, age=1, places=PLACES, place=PLACE, **more):
    """What a layer keeps for a gate after some frames."""
    rule, limit = gate.rule, torch.tensor(gate.limit)
    recent = torch.randn(rows, places, generator=rng)
    recent[:, 1] = torch.nan
    return GateState(
        gate, limit, _whole(place), _whole(ready), torch.full((rows,), 7, dtype=torch.int32),
        _whole(3, 4), torch.full((rows, places), age, dtype=torch.int32),
        luck=torch.rand(places, rows, generator=rng) if gate.score == "drawn" else None,
        recent=recent if rule == "share" else None,
        due=torch.rand(rows, 1, generator=rng) if rule == "share" else None,
        credit=torch.rand(rows, 1, generator=rng) if rule == "budget" else None, **more,
    )  # fmt: skip


def _gate(rng, rows, hkv, d, rule, ready=1, limit=0.5, score="rotated", **more):
    gate = TokenGate("drawn" if rule == "draw" else score, rule, limit, **more)
    key = None if rule == "draw" else _draw(rng, rows, hkv, PLACES, d)
    return gate_state(rng, gate, rows, ready, key=key)


def _case_attention(
    rng, backend, size, gate=None, window=False, weighted=False, rope="halves", splits=None,
    tokens=1,
):  # fmt: skip
    rows, heads, hkv, d, slots, slot = size
    qkv = _draw(rng, rows * tokens, (heads + 2 * hkv) * d)
    k, v, unrotated = (_draw(rng, rows, hkv, slots, d) for _ in range(3))
    log_count = torch.randn(rows, hkv if weighted == "each" else 1, slots, generator=rng)
    log_count[:, :, 1] = -torch.inf
    log_count[:, :, slot : slot + tokens] = 0  # as of all that is written
    turn = Rope(((d, (25.0, 5.0, 1.0)),), interleaved=rope == "pairs")
    origin = torch.arange(rows, dtype=torch.float64).view(-1, 1, 1, 1)
    cos, sin = turn.cos_sin(9 * torch.rand(PLACES, 3, generator=rng), torch.float32, origin)
    step = Step(
        Entries(k, v, _whole(slot), log_count if weighted else None, unrotated), heads,
        _whole(PLACE), Rotation(cos[:, 0], sin[:, 0], rope == "pairs") if rope else None,
        Window(2, 4, 7, torch.arange(rows, dtype=torch.int32) % 2) if window else None,
        _gate(rng, rows, hkv, d, **gate) if gate else None,
    )  # fmt: skip
    # behind the token nothing was written yet
    k[:, :, slot:] = v[:, :, slot:] = torch.nan
    there, out = moved(step), torch.empty(rows * tokens, heads * d, dtype=DTYPE, device=DEVICE)
    found = decode_attention_reference(qkv, step, tokens)
    scratch = Scratch(rows, heads, hkv, d, torch.device(DEVICE), tokens)
    if backend == "torch":
        attention_torch.decode_attention(out, moved(qkv), there, scratch, tokens)
    else:
        kernel = attention_triton if tokens == 1 else attention_several
        kernel.decode_attention(out, moved(qkv), there, scratch, tokens, splits)
    assert not scratch.done.any()  # as the next launch needs it
    return _flat(out, there, tokens), _flat(found, step, tokens)


def _case_gate(rng, backend, rows, rule, limit, ready=1, **more):
    gate = TokenGate("rotated", rule, limit, **more)
    score, state = -torch.rand(rows, 1, generator=rng), gate_state(rng, gate, rows, ready)
    there = moved(state)
    {"torch": gate_torch, "triton": gate_triton}[backend].decide(there, score.to(DEVICE))
    decide_reference(state, score)
    return gate_tensors(there), gate_tensors(state)


def _case_input_gate(rng, backend, rows, rule, limit, tied=False, ready=1, norm="rms"):
    width = 40
    x, base = _draw(rng, rows, width), _draw(rng, rows, PLACES, width)
    about = _norm(rng, norm, width)
    near = norm_reference(x, about) + 0.3 * torch.arange(1, rows + 1)[:, None]
    base[:, PLACE] = near.to(DTYPE)  # some rows are nearer than others
    limit = -limit if rule == "threshold" else limit
    state = gate_state(rng, TokenGate("input", rule, limit, tied=tied), rows, ready, input=base)
    there = moved(state)
    backends = {"torch": gate_torch, "triton": gate_triton}
    backends[backend].decide_by_input(moved(x), moved(about), there)
    decide_by_input_reference(x, about, state)
    return gate_tensors(there), gate_tensors(state)


def gate_tensors(state):
    """All that a gate writes, what is unknown as a number of its own."""
    found = (
        getattr(state, name) for name in ("skip", "counts", "recent", "due", "credit", "input")
    )
    return torch.cat([x.double().cpu().flatten() for x in found if x is not None]).nan_to_num(9.0)


def _flat(out, step, tokens):
    """All that a step leaves behind, what is unknown as a number of its own."""
    end, entries = int(step.entries.slot) + tokens, step.entries
    held = [x[:, :, :end] for x in (entries.k, entries.v, entries.unrotated)]
    if step.gate is not None:
        held += [gate_tensors(step.gate)]
        held += [] if step.gate.key is None else [step.gate.key]
    return torch.cat([x.double().cpu().flatten().nan_to_num(9.0) for x in (out, *held)])


def _case_sample(rng, backend, guided, top_k, top_p, temperature, depth):
    videos, count = 2, 37
    logits = 3 * torch.randn(videos * (2 if guided else 1), count, generator=rng)
    if top_k == 12:
        logits = logits.round()  # many are equal
    noise = torch.rand(videos, PLACES, 3, count, generator=rng) + 1e-3
    codes = torch.full((videos, PLACES, 3), -1)
    to = Codes(
        codes,
        noise,
        _whole(PLACE),
        depth,
        _draw(rng, count + 1, 12),
        _draw(rng, videos, 12).repeat(2 if guided else 1, 1),
    )
    there, draw = moved(to), Draw(guided, 3.0, temperature, top_k, top_p)
    sample_code_reference(logits, draw, to)
    if backend == "torch":
        sample_torch.sample_code(moved(logits), draw, there)
    else:
        sample_triton.sample_code(moved(logits), draw, there)
    return tuple(
        torch.cat([x.codes.flatten().cpu(), x.total.flatten().cpu()]).double() for x in (there, to)
    )


def draw_code(logits):
    """A code by the kernel, of one video's logits."""
    count = logits.shape[1]
    book, total = torch.zeros(count, 12, dtype=DTYPE), torch.zeros(1, 12, dtype=DTYPE)
    to = moved(
        Codes(torch.full((1, 1, 1), -1), torch.ones(1, 1, 1, count), _whole(0), 0, book, total)
    )
    sample_triton.sample_code(moved(logits), Draw(False, 1.0, 1.0, 9, 0.9), to)
    return int(to.codes)


ONE, PAIR, GROUPED = (1, 1, 1, 16, 9, 0), (2, 3, 3, 32, 90, 89), (2, 6, 2, 16, 40, 25)
ATTENTION = {
    "first": (ONE, {}),
    "plain": (PAIR, {"splits": 2}),
    "grouped": (GROUPED, {"weighted": "each", "rope": "pairs", "splits": 1}),
    "weighted": (PAIR, {"weighted": True, "rope": "", "splits": 4}),
    "odd_heads": ((2, 4, 4, 12, 90, 70), {"weighted": True, "gate": {"rule": "share"}}),
    "odd_groups": ((1, 4, 2, 12, 40, 30), {"splits": 2}),
    "window": (GROUPED, {"window": True, "weighted": True}),
    "whole_window": ((2, 2, 2, 16, 9, 5), {"window": True}),
    # one row leaves entries out, the other has none to leave out
    "window_of_a_row": ((2, 4, 2, 16, 9, 6), {"window": True, "weighted": True}),
    "several_window_of_a_row": ((2, 2, 2, 16, 12, 6), {"tokens": 3, "window": True}),
    "threshold": (GROUPED, {"gate": {"rule": "threshold", "limit": 0.0}}),
    "mixed": (
        PAIR,
        {
            "gate": {
                "rule": "threshold",
                "limit": -9.0,
                "score": "mixed",
                "tied": True,
                "strict": True,
            }
        },
    ),
    "age": (GROUPED, {"gate": {"rule": "threshold", "limit": -9.0, "age_limit": 1}}),
    "share": (PAIR, {"gate": {"rule": "share", "limit": 0.6, "tied": True}}),
    "share_age": (GROUPED, {"gate": {"rule": "share", "limit": 0.3, "age_limit": 2}}),
    "not_ready": (PAIR, {"gate": {"rule": "share", "ready": 0}}),
    "draw": (GROUPED, {"gate": {"rule": "draw"}}),
    "draw_all": (PAIR, {"gate": {"rule": "draw", "limit": 1.0}, "window": True}),
    "several": ((2, 3, 3, 32, 90, 70), {"tokens": 3, "splits": 2}),
    "several_first": ((1, 2, 1, 16, 9, 0), {"tokens": 2, "rope": "pairs"}),
    "several_weighted": ((2, 6, 2, 12, 90, 70), {"tokens": 3, "weighted": "each", "splits": 4}),
    "several_window": ((2, 4, 2, 16, 40, 25), {"tokens": 3, "window": True, "splits": 2}),
    "several_near_window": ((2, 2, 2, 16, 12, 5), {"tokens": 3, "window": True, "rope": ""}),
}
BOTH = ("torch", "triton")
KINDS = ("", "int8", "int4")
CASES = {}
for tokens, codes, kind in itertools.product((1, 2, 3), KINDS, ("", "rms", "layer")):
    name = f"gemv_{tokens}_{codes}{'_' if codes else ''}{kind or 'plain'}"
    add = kind == "" or tokens == 2
    case = functools.partial(_case_gemv, tokens=tokens, codes=codes, kind=kind, add=add)
    CASES[name] = case, BOTH
for tokens, codes in ((66, "int8"), (33, "int4")):  # as many as drafts have
    case = functools.partial(_case_gemv, tokens=tokens, codes=codes, kind="")
    CASES[f"gemv_{tokens}_{codes}"] = case, BOTH
for i, skip in enumerate((None, "none", "all", "first")):
    for tokens in (1, 2, 3):
        codes, gated = KINDS[(i + tokens) % 3], skip is not None or tokens == 1
        name = f"decode_mlp_{tokens}_{skip}{'_' if codes else ''}{codes}"
        case = functools.partial(_case_mlp, tokens=tokens, codes=codes, gated=gated, skip=skip)
        CASES[name] = case, BOTH
for tokens, codes, gated in ((1, "", True), (2, "int8", False), (2, "int4", True), (3, "", True)):
    case = functools.partial(
        _case_mlp, tokens=tokens, codes=codes, gated=gated, skip="none", prenorm=True
    )
    CASES[f"decode_mlp_prenorm_{tokens}_{codes}"] = case, BOTH[1:]
for skip, ready in (("none", 1), ("none", 0), ("all", 1), ("first", 1)):
    case = functools.partial(
        _case_mlp, tokens=2, codes="", gated=True, skip=skip, drift=True, ready=ready
    )
    CASES[f"decode_mlp_drift_{skip}_{ready}"] = case, BOTH
for tokens, codes, skip, linear in (
    (1, "", "error", 20), (2, "int8", "error", 16), (1, "int4", "error", 32), (3, "", "error", 0),
    (2, "", None, 20), (1, "int8", "none", 0), (2, "", "none", 0), (3, "int4", "none", 0),
):  # fmt: skip
    case = functools.partial(
        _case_mlp, tokens=tokens, codes=codes, gated=True, skip=skip, linear=linear,
        remember=skip == "none",
    )  # fmt: skip
    CASES[f"decode_mlp_slice_{tokens}_{skip}_{linear}"] = case, BOTH
for name, (size, options) in ATTENTION.items():
    case = functools.partial(_case_attention, size=size, **options)
    CASES[f"decode_attention_{name}"] = case, BOTH
for guided, top_k, top_p, temperature, depth in (
    (True, 900, 0.96, 1.3, 0), (False, 9, 0.8, 0.7, 2), (True, 1, 0.96, 1.0, 1),
    (True, 37, 0.3, 1.0, 2), (False, 12, 1.0, 1.0, 0),
):  # fmt: skip
    case = functools.partial(
        _case_sample, guided=guided, top_k=top_k, top_p=top_p, temperature=temperature, depth=depth
    )
    CASES[f"sample_code_{top_k}_{top_p}_{guided}"] = case, BOTH
for rows, rule, limit, options in (
    (1, "threshold", 0.5, {}), (3, "threshold", 0.5, {"norm": "layer"}),
    (2, "share", 0.5, {"tied": True}), (3, "share", 0.4, {}), (4, "budget", 0.3, {"tied": True}),
    (3, "budget", 0.2, {}), (2, "share", 0.5, {"ready": 0}), (2, "budget", 0.5, {"ready": 0}),
):  # fmt: skip
    case = functools.partial(_case_input_gate, rows=rows, rule=rule, limit=limit, **options)
    CASES[f"token_gate_by_input_{rows}_{rule}_{'_'.join(options)}"] = case, BOTH
for rows, rule, limit, options in (
    (3, "threshold", -0.5, {}), (2, "threshold", -0.5, {"strict": True, "tied": True}),
    (3, "share", 0.4, {"age_limit": 1}), (4, "share", 0.6, {"tied": True}), (3, "draw", -0.3, {}),
    (3, "budget", 0.2, {}), (2, "budget", 0.5, {"ready": 0}),
):  # fmt: skip
    case = functools.partial(_case_gate, rows=rows, rule=rule, limit=limit, **options)
    CASES[f"token_gate_{rows}_{rule}_{'_'.join(options)}"] = case, BOTH
# interpreted in every run of the quick tests
QUICK = {
    "gemv_2_int8_rms", "gemv_1_int4_rms", "decode_mlp_1_all", "decode_mlp_2_first_int4",
    "decode_mlp_slice_1_error_20", "decode_attention_share", "decode_attention_window",
    "sample_code_9_0.8_False", "token_gate_by_input_2_share_tied", "token_gate_4_share_tied",
}  # fmt: skip
assert CASES.keys() >= QUICK
