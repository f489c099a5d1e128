"""One gate, many backends: each decides as the definition does, bit for bit, over many tokens."""

import copy
import dataclasses

import pytest
import torch

pytest.importorskip("triton")
from decode_cases import DEVICE, PLACE, gate_state, gate_tensors, moved

from tachyscope.decode import can_compile
from tachyscope.decode.cpu import Operations
from tachyscope.kernels.gemv import Norm
from tachyscope.kernels.gemv.reference import norm_reference
from tachyscope.kernels.token_gate import TokenGate
from tachyscope.kernels.token_gate import torch as gate_torch
from tachyscope.kernels.token_gate import triton as gate_triton
from tachyscope.kernels.token_gate.reference import decide_by_input_reference, decide_reference

ROWS, PLACES, FRAMES, WIDTH = 4, 16, 4, 24
GATES = [
    TokenGate("rotated", "threshold", -0.4, tied=True),
    TokenGate("rotated", "threshold", -0.4, strict=True, age_limit=2),
    TokenGate("rotated", "share", 0.5, tied=True),
    TokenGate("rotated", "share", 0.3, age_limit=3),
    TokenGate("rotated", "share", 0.75),
    TokenGate("rotated", "draw", 0.6, age_limit=2),
    TokenGate("input", "budget", 0.03),
    TokenGate("input", "budget", 0.1, tied=True),
]  # 8 of 4 rows over 64 tokens: 2,048 decisions


def _native(state, **score):
    """A program of the gate alone."""
    operations = Operations()
    operations.add_gate(state, **{k: x.data_ptr() for k, x in score.items()}, kv_heads=1, size=1.0)
    return operations, operations.finish()


def _play(gate, decide, device="cpu"):
    """Every decision of four frames, and what is left behind; a value is older if it serves."""
    rng = torch.Generator().manual_seed(1)
    state = gate_state(rng, gate, ROWS, age=0, places=PLACES, place=0)
    if device != "cpu":
        state = moved(state)
    out = []
    scores = -torch.rand(FRAMES * PLACES, ROWS, generator=rng).round(decimals=1)  # many are equal
    for i, score in enumerate(scores):
        state.place.fill_(i % PLACES)
        state.ready.fill_(i >= 3)
        decide(state, (score.abs() if gate.rule == "draw" else score)[:, None].to(device))
        out.append(state.skip.cpu().clone())
        state.age[:, i % PLACES] = (state.age[:, i % PLACES] + 1) * state.skip
    return torch.stack(out), gate_tensors(dataclasses.replace(state, input=None))


def _by_program():
    held = {}

    def decide(state, score):
        if not held:
            held["score"] = torch.zeros(ROWS)
            held["list"], held["run"] = _native(state, scores=held["score"])
        held["score"].copy_(score[:, 0])
        held["run"]()

    return decide


BACKENDS = {
    "torch": lambda: (gate_torch.decide, DEVICE),
    "triton": lambda: (gate_triton.decide, DEVICE),
    "native": lambda: (_by_program(), "cpu"),
}


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: f"{gate.rule}-{gate.limit}")
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_decision_is_the_definitions(gate, backend):
    if backend == "native" and not can_compile(torch.float32):
        pytest.skip("no C++ compiler")
    decide, device = BACKENDS[backend]()
    want, left = _play(gate, decide_reference)
    found, rest = _play(gate, decide, device)
    assert torch.equal(found, want) and torch.equal(rest, left)
    assert 0 < want.float().mean() < 1


@pytest.mark.skipif(not can_compile(torch.float32), reason="no C++ compiler")
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_native_gate_keeps_the_inputs_of_computed_tokens(rng, norm):
    x, base = torch.randn(ROWS, WIDTH, generator=rng), torch.randn(ROWS, PLACES, WIDTH)
    weight, bias = torch.randn(2, WIDTH, generator=rng)
    about = Norm(weight, bias if norm == "layer" else None, 1e-5)
    base[:, PLACE] = norm_reference(x, about) + 0.3 * torch.arange(ROWS)[:, None]
    gate = TokenGate("input", "threshold", -0.4)
    state = gate_state(rng, gate, ROWS, places=PLACES, input=base)
    want = copy.deepcopy(state)
    decide_by_input_reference(x, about, want)
    operations = Operations()
    operations.add_gate(state, x=x.data_ptr(), norm=operations._norm(about))
    operations.finish()()
    assert torch.equal(state.skip, want.skip) and 0 < int(state.skip.sum()) < ROWS
    torch.testing.assert_close(state.input, want.input)
