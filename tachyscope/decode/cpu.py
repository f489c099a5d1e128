"""A token's step as one native program for a CPU: no Python from its codes to the trunk's state.

The program is cpu_step.cpp, built once by the machine's C++ compiler and kept in the user's cache.
A step is a list of its operations, on the engine's own memory: what a CUDA graph is on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from ctypes import addressof, c_void_p
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tachyscope.decode.cpu_library import CODE, KIND, RULE, STRUCTS, library
from tachyscope.decode.layer import Layers
from tachyscope.kernels.decode_attention import Step
from tachyscope.kernels.decode_mlp import Error, Kept, MlpWeights
from tachyscope.kernels.gemv import Norm, Weight
from tachyscope.kernels.sample_code import Codes, Draw
from tachyscope.kernels.token_gate import MAX_TOKEN_COST, GateState

KINDS = {torch.float32: KIND["F32"], torch.bfloat16: KIND["BF16"]}
_Weight, _Norm, _Gemv, _Attend, _Gate, _Mlp, _Sample, _Plain, _Op = STRUCTS.values()


class Operations:
    """A list of operations on tensors that stay where they are."""

    def __init__(self) -> None:
        self.held: list[Any] = []  # what the operations point to
        self.ops: list[tuple[int, Any]] = []
        self.numbers: int | None = None  # of a token's place and slot, which a step raises

    def finish(self) -> Callable[[], None]:
        """What runs them once."""
        native, threads = library(), torch.get_num_threads()
        listed = (_Op * len(self.ops))(*(_Op(code, addressof(x)) for code, x in self.ops))
        program = c_void_p(native.tachyscope_new(listed, len(self.ops)))

        def run() -> None:
            native.tachyscope_run(program, self.numbers, threads)

        self.listed = listed
        # before the lists are freed, which this object holds
        weakref.finalize(self, native.tachyscope_free, program)
        return run

    def raise_numbers(self, numbers: Tensor) -> None:
        """Those of a token's place and slot, at the end."""
        self.numbers = self._at(numbers)

    def sample(self, logits: Tensor, draw: Draw, codes: Codes) -> None:
        """Draw one of the codes [V, N, D] at a place."""
        videos, places, depths = codes.codes.shape
        one = _Sample(
            logits=self._at(logits), noise=self._at(codes.noise), book=self._at(codes.book),
            codes=self._at(codes.codes), total=self._at(codes.total), place=self._at(codes.place),
            rows=len(logits), videos=videos, count=codes.noise.shape[3], places=places,
            depths=depths, depth=codes.depth, dim=codes.total.shape[1], guided=draw.guided,
            top_k=draw.top_k, cfg=draw.cfg, temperature=draw.temperature, top_p=draw.top_p,
        )  # fmt: skip
        self.ops.append((CODE["SAMPLE"], one))

    def clear(self, barriers: Tensor) -> None:
        """A native program's operations wait for one another without any."""

    def gemv(
        self, out: Tensor, x: Tensor, weights: tuple[Weight, ...], norm: Norm | None = None,
        gelu: bool = False, add: bool = False,
    ) -> None:  # fmt: skip
        of = (_Weight * 3)(*(self._weight(weight) for weight in weights))
        one = _Gemv(
            self._at(out), self._at(x), self._norm(norm), of, len(weights), len(x), x.shape[1],
            out.shape[1], gelu, add,
        )  # fmt: skip
        self.ops.append((CODE["GEMV"], one))

    def attend(self, layers: Layers, step: Step) -> None:
        held, rotation, window, gate = step.entries, step.rotation, step.window, step.gate
        batch, kv_heads, slots, dim = held.k.shape
        one = _Attend(
            out=self._at(layers.attended), k=self._at(held.k), v=self._at(held.v),
            unrotated=self._at(held.unrotated), qkv=self._at(layers.qkv),
            log_count=self._at(held.log_count), slot=self._at(held.slot),
            place=self._at(step.place), batch=batch, tokens=layers.tokens, heads=step.heads,
            kv_heads=kv_heads, dim=dim, slots=slots,
            log_heads=1 if held.log_count is None else held.log_count.shape[1],
        )  # fmt: skip
        if rotation is not None:
            one.cos, one.sin = self._at(rotation.cos), self._at(rotation.sin)
            one.places, one.interleaved = rotation.cos.shape[1], rotation.interleaved
        if window is not None:
            one.windowed, one.sink, one.near = True, window.sink, window.near
            one.padding = self._at(window.padding)
        self.ops.append((CODE["ATTEND"], one))
        if gate is None:
            return
        one.places = gate.age.shape[1]
        if gate.key is None:
            self.add_gate(gate)
            return
        one.key, one.mixed = self._at(gate.key), gate.gate.score == "mixed"
        one.scores = self._at(torch.zeros(batch * kv_heads))
        size = step.heads * dim**0.5
        self.add_gate(gate, scores=one.scores, kv_heads=kv_heads, size=size)

    def decide(self, x: Tensor, norm: Norm, gate: GateState) -> None:
        self.add_gate(gate, x=self._at(x), norm=self._norm(norm))

    def add_gate(self, state: GateState, **score: Any) -> None:
        """Decide about a token by sums of scores, numbers drawn, or an MLP's input x."""
        gate, (rows, places) = state.gate, state.age.shape
        computed, replayed = gate.owed(places)
        one = _Gate(
            rule=RULE[gate.rule.upper()], strict=gate.strict, tied=gate.tied,
            age_limit=gate.age_limit, computed=computed, replayed=replayed, most=MAX_TOKEN_COST,
            batch=rows, places=places, width=0 if state.input is None else state.input.shape[2],
            **score,
        )  # fmt: skip
        for name in {field.name for field in fields(state)} & dict(_Gate._fields_).keys():
            setattr(one, name, self._at(getattr(state, name)))
        self.ops.append((CODE["GATE"], one))

    def mlp(
        self, layers: Layers, mlp: MlpWeights, kept: Kept | Error | None, barrier: Tensor
    ) -> None:
        down, direct = self._weight(mlp.down), is_direct(mlp)
        if direct:  # what is left of its rows are the neurons' columns
            down.columns -= mlp.linear
        one = _Mlp(
            x=self._at(layers.x), inner=self._at(layers.inner), norm=self._norm(mlp.norm),
            up=self._weight(mlp.up), down=down, batch=len(layers.x), width=layers.x.shape[1],
            linear=mlp.linear, direct=direct,
        )  # fmt: skip
        if mlp.gate is not None:
            one.gate = self._weight(mlp.gate)
        if isinstance(kept, Error):
            one.error, one.base, one.beta = self._at(kept.error), self._at(kept.input), kept.beta
            one.fade = self._at(kept.fade)
            one.place, one.places = self._at(kept.place), kept.error.shape[1]
        elif kept is not None:
            one.keeps, one.memory, one.places = True, kept.memory, kept.output.shape[1]
            for name in ("place", "skip", "ready", "age", "output", "drift", "input"):
                setattr(one, name, self._at(getattr(kept, name)))
        self.ops.append((CODE["MLP"], one))

    def norm(self, out: Tensor, x: Tensor, norm: Norm) -> None:
        self._plain("NORM", out, x, norm)

    def add(self, x: Tensor, y: Tensor) -> None:
        self._plain("ADD", x, y)

    def _plain(self, code: str, out: Tensor, x: Tensor, norm: Norm | None = None) -> None:
        one = _Plain(self._at(out), self._at(x), self._norm(norm), len(out), out.shape[1])
        self.ops.append((CODE[code], one))

    def _weight(self, weight: Weight) -> Any:
        kind = KINDS[weight.data.dtype] if weight.scale is None else KIND["INT8"]
        return _Weight(
            self._at(weight.data), self._at(weight.scale), self._at(weight.bias), weight.rows,
            weight.columns, weight.data.shape[1], kind,
        )  # fmt: skip

    def _norm(self, norm: Norm | None) -> Any:
        if norm is None:
            return _Norm(None, None, 0.0)
        return _Norm(self._at(norm.weight), self._at(norm.bias), norm.eps)

    def _at(self, x: Tensor | None) -> int | None:
        """Where a tensor lies; it is held as long as the program."""
        if x is None:
            return None
        assert x.is_contiguous() and x.device.type == "cpu"
        self.held.append(x)
        return x.data_ptr()


def is_direct(mlp: MlpWeights) -> bool:
    """Whether the linear rows of a slice are a square map, which `down` only hands on."""
    if not mlp.linear or mlp.down.scale is not None or mlp.linear != mlp.down.rows:
        return False
    handed = mlp.down.data[:, -mlp.linear :]
    return torch.equal(handed, torch.eye(mlp.linear, dtype=handed.dtype))
