"""A token's step as one native program for a CPU: no Python from its codes to the trunk's state.

The program is cpu_step.cpp, built once by the machine's C++ compiler and kept in the user's cache.
A step is a list of its operations, on the engine's own memory: what a CUDA graph is on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from ctypes import POINTER, Structure, addressof, c_double, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tachyscope.compile_cache import programs_folder
from tachyscope.decode.depth import Depth
from tachyscope.decode.layer import Layers
from tachyscope.decode.parts import DepthParts
from tachyscope.errors import TachyscopeError
from tachyscope.kernels.decode_attention import Step
from tachyscope.kernels.decode_mlp import Error, Kept, MlpWeights
from tachyscope.kernels.gemv import Norm, Weight
from tachyscope.kernels.input_gate import InputGate

if TYPE_CHECKING:
    from tachyscope.decode.engine import DecodeEngine

SOURCE = Path(__file__).with_name("cpu_step.cpp")
COMPILERS = ("c++", "g++", "clang++")
# sums may be taken in any order; infinities and NaN stay what they are
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math", "-shared", "-fPIC", "-pthread",
)  # fmt: skip
MAX_ROWS = 64
KINDS = {torch.float32: 0, torch.bfloat16: 1}
INT8 = 2
GEMV, ATTEND, MLP, SAMPLE, NORM, ADD = range(6)
RULES = {"threshold": 0, "share": 1, "draw": 2}
JUDGES = {"threshold": 1, "share": 2, "budget": 3}


def _struct(name: str, **fields: Any) -> Any:
    return type(name, (Structure,), {"_fields_": list(fields.items())})


def _of(kind: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, kind)


# as cpu_step.cpp has them
_Weight = _struct(
    "Weight", **_of(c_void_p, "data", "scale", "bias"),
    **_of(c_int64, "rows", "columns", "stride", "kind"),
)  # fmt: skip
_Norm = _struct("Norm", weight=c_void_p, bias=c_void_p, eps=c_double)
_Gemv = _struct(
    "Gemv", out=c_void_p, x=c_void_p, norm=_Norm, weights=_Weight * 3,
    **_of(c_int64, "count", "batch", "width", "out_width", "gelu", "add"),
)  # fmt: skip
_Attend = _struct(
    "Attend",
    **_of(c_void_p, "out", "k", "v", "unrotated", "qkv", "log_count", "cos", "sin"),
    **_of(c_void_p, "slot", "place", "padding"),
    **_of(c_int64, "batch", "tokens", "heads", "kv_heads", "dim", "slots", "log_heads", "places"),
    **_of(c_int64, "interleaved", "windowed", "sink", "near", "whole"),
    **_of(c_int64, "gated", "rule", "strict", "mixed", "tied", "age_limit"),
    **_of(c_void_p, "value", "luck", "ready", "age", "skip", "counts"),
    **_of(c_void_p, "key", "recent", "due", "scores"),
)
_Mlp = _struct(
    "Mlp", x=c_void_p, inner=c_void_p, norm=_Norm, **_of(_Weight, "gate", "up", "down"),
    **_of(c_int64, "batch", "width", "linear", "direct"), place=c_void_p, places=c_int64,
    keeps=c_int64, **_of(c_void_p, "ready", "skip", "age", "output", "drift", "input"),
    memory=c_double, error=c_void_p, base=c_void_p, fade=c_void_p, beta=c_double,
    **_of(c_int64, "judged", "paired"), limit=c_double,
    **_of(c_void_p, "credit", "recent", "due", "counts"),
)  # fmt: skip
_Sample = _struct(
    "Sample", **_of(c_void_p, "logits", "noise", "book", "codes", "total", "place"),
    **_of(c_int64, "rows", "videos", "count", "places", "depths", "depth", "dim"),
    **_of(c_int64, "guided", "top_k"), **_of(c_double, "cfg", "temperature", "top_p"),
)  # fmt: skip
_Plain = _struct("Plain", out=c_void_p, x=c_void_p, norm=_Norm, **_of(c_int64, "batch", "width"))
_Op = _struct("Op", code=c_int64, body=c_void_p)


class Program:
    """A list of operations on tensors that stay where they are; `replay` runs them once."""

    def __init__(self) -> None:
        self.library, self.threads = library(), torch.get_num_threads()
        self.held: list[Any] = []  # what the operations point to
        self.ops: list[tuple[int, Any]] = []
        self.numbers: int | None = None  # of a token's place and slot, which a step raises

    def finish(self) -> None:
        self.list = (_Op * len(self.ops))(*(_Op(code, addressof(x)) for code, x in self.ops))
        self.program = c_void_p(self.library.tachyscope_new(self.list, len(self.ops)))
        # before the lists are freed, which this object holds
        weakref.finalize(self, self.library.tachyscope_free, self.program)

    def replay(self) -> None:
        self.library.tachyscope_run(self.program, self.numbers, self.threads)

    def add_depth(self, depth: Depth, codes: Tensor, noise: Tensor, place: Tensor) -> None:
        """Draw codes [V, N, D] at a place."""
        draw, mlps = depth.draw, [x.mlp for x in depth.blocks.weights]
        videos, places, depths = codes.shape
        for d, weight in enumerate(depth.inputs):
            self._gemv(depth.x, depth.total if d else depth.hidden, (weight,))
            self.add_layers(depth.blocks, depth.steps[d], mlps, depth.kept)
            self._gemv(depth.logits, depth.x, (depth.classifier,), depth.norm)
            one = _Sample(
                logits=self._at(depth.logits), noise=self._at(noise),
                book=self._at(depth.books[d]), codes=self._at(codes),
                total=self._at(depth.total), place=self._at(place), rows=len(depth.x),
                videos=videos, count=noise.shape[3], places=places, depths=depths, depth=d,
                dim=depth.total.shape[1], guided=draw.guided, top_k=draw.top_k, cfg=draw.cfg,
                temperature=draw.temperature, top_p=draw.top_p,
            )  # fmt: skip
            self.ops.append((SAMPLE, one))

    def add_layers(
        self, layers: Layers, steps: Any, mlps: Any, kept: Any, judges: Any = ()
    ) -> None:
        for i, layer in enumerate(layers.weights):
            self._gemv(layers.qkv, layers.x, layer.qkv, layer.norm)
            self._attend(layers, steps[i])
            self._gemv(layers.x, layers.attended, (layer.out,), add=True)
            self._mlp(layers, mlps[i], kept[i], judges[i] if judges else None)

    def _gemv(
        self, out: Tensor, x: Tensor, weights: tuple[Weight, ...], norm: Norm | None = None,
        gelu: bool = False, add: bool = False,
    ) -> None:  # fmt: skip
        of = (_Weight * 3)(*(self._weight(weight) for weight in weights))
        one = _Gemv(
            self._at(out), self._at(x), self._norm(norm), of, len(weights), len(x), x.shape[1],
            out.shape[1], gelu, add,
        )  # fmt: skip
        self.ops.append((GEMV, one))

    def _attend(self, layers: Layers, step: Step) -> None:
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
            one.windowed, one.sink, one.near, one.whole = (
                True,
                window.sink,
                window.near,
                window.whole,
            )
            one.padding = self._at(window.padding)
        if gate is not None:
            one.gated, one.rule, one.strict, one.mixed = (
                True,
                RULES[gate.kind],
                gate.strict,
                gate.mixed,
            )
            one.tied, one.age_limit, one.places = gate.tied, gate.age_limit, gate.age.shape[1]
            for name in ("value", "luck", "ready", "age", "skip", "counts", "key", "recent", "due"):
                setattr(one, name, self._at(getattr(gate, name)))
            one.scores = self._at(torch.zeros(batch * kv_heads))
        self.ops.append((ATTEND, one))

    def _mlp(
        self,
        layers: Layers,
        mlp: MlpWeights,
        kept: Kept | Error | None,
        judge: InputGate | None = None,
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
        if judge is not None:
            one.judged, one.paired, one.limit = JUDGES[judge.kind], judge.paired, judge.limit
            for name in ("credit", "recent", "due", "counts", "input"):
                setattr(one, name, self._at(getattr(judge, name)))
        self.ops.append((MLP, one))

    def plain(self, code: int, out: Tensor, x: Tensor, norm: Norm | None = None) -> None:
        one = _Plain(self._at(out), self._at(x), self._norm(norm), len(out), out.shape[1])
        self.ops.append((code, one))

    def _weight(self, weight: Weight) -> Any:
        kind = KINDS[weight.data.dtype] if weight.scale is None else INT8
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


class StepProgram(Program):
    """A step of an engine whose activations are float32."""

    def __init__(self, engine: DecodeEngine, whole: bool, parts: str = "step") -> None:
        """`parts`: the step, or of it "trunk" or "depth" alone; "hollow": a trunk less its MLPs."""
        super().__init__()
        if parts in ("step", "depth"):
            self.add_depth(engine.depth, engine.codes, engine.noise, engine.place)
        if parts == "step":
            first, second = engine.projector
            self._gemv(engine.projected, engine.depth.total, (first,), gelu=True)
            self._gemv(engine.x, engine.projected, (second,))
            if engine.actions is not None:
                self.plain(ADD, engine.x, engine.action)
        if parts != "depth":
            mlps = [x.mlp for x in engine.trunk.weights] if whole else engine.trunk.slices
            kept: Any = engine.kept if whole else engine.errors
            self.add_layers(engine.trunk, engine.steps, mlps, kept, judges=engine.judges)
            self.plain(NORM, engine.hidden, engine.x, engine.norm)
            self.numbers = self._at(engine.numbers)
        if parts == "hollow":
            self.ops = [(code, x) for code, x in self.ops if code != MLP]
        self.finish()


class TrunkPass(Program):
    """The trunk over `tokens` tokens of an engine's session, from its place and slot on."""

    def __init__(self, engine: DecodeEngine, tokens: int) -> None:
        super().__init__()
        self.x = engine.x.new_empty(len(engine.x) * tokens, engine.x.shape[1])
        self.states, self.engine, trunk = torch.empty_like(self.x), engine, engine.trunk
        mlps, none = [x.mlp for x in trunk.weights], [None] * len(trunk.weights)
        layers = Layers(trunk.weights, self.x, trunk.scratch, tokens)
        self.add_layers(layers, engine.steps, mlps, none)
        self.plain(NORM, self.states, self.x, engine.norm)
        self.finish()

    def take(self, codes: Tensor) -> None:
        self.x.copy_(self.engine.embed(codes))


class DepthPass(Program):
    """Codes of `tokens` places at once, each drawn as if it came alone."""

    def __init__(self, engine: DecodeEngine, parts: DepthParts, tokens: int) -> None:
        super().__init__()
        rows, (videos, _, depths, count) = len(engine.x), engine.noise.shape
        self.hidden = engine.x.new_empty(rows * tokens, engine.x.shape[1])
        self.codes = engine.codes.new_zeros(videos * tokens, 1, depths)
        self.noise = engine.noise.new_empty(videos * tokens, 1, depths, count)
        place = torch.zeros((), dtype=torch.int32)
        self.depth = Depth(parts, engine.depth.draw, self.hidden)
        self.add_depth(self.depth, self.codes, self.noise, place)
        self.finish()


def is_direct(mlp: MlpWeights) -> bool:
    """Whether the linear rows of a slice are a square map, which `down` only hands on."""
    if not mlp.linear or mlp.down.scale is not None or mlp.linear != mlp.down.rows:
        return False
    handed = mlp.down.data[:, -mlp.linear :]
    return torch.equal(handed, torch.eye(mlp.linear, dtype=handed.dtype))


def can_compile(dtype: torch.dtype) -> bool:
    """Whether a step can be compiled here for activations of a dtype."""
    return dtype == torch.float32 and _compiler() is not None


def compile_step(dtype: torch.dtype) -> None:
    """Build the program of a step; raises where that cannot be done."""
    if dtype != torch.float32:
        raise TachyscopeError(
            f"a token's step is compiled for float32 on a CPU, got {str(dtype)[6:]}: load the "
            f"model in float32, and its weights may be bfloat16 or int8 inside"
        )
    library()


def _compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)


@functools.cache
def library() -> Any:
    """The built program; it is built where no process of this machine has done so."""
    folder, compiler = programs_folder(), _compiler()
    if compiler is None or folder is None:
        lacks = "a C++ compiler" if compiler is None else "a cache folder that can be written"
        raise TachyscopeError(
            f"a token's step is compiled by a C++ compiler into ~/.cache/tachyscope, and there is "
            f"no {lacks.removeprefix('a ')}: install g++, or leave `compile` out"
        )
    source = SOURCE.read_text(encoding="utf-8")
    known = "\n".join([source, compiler, *FLAGS, _processor()])
    path = folder / "cpu" / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.so"
    if not path.is_file():
        _build(compiler, path)
    loaded = ctypes.CDLL(str(path))
    loaded.tachyscope_new.argtypes = [POINTER(_Op), c_int64]
    loaded.tachyscope_new.restype = c_void_p
    loaded.tachyscope_run.argtypes = [c_void_p, c_void_p, c_int64]
    loaded.tachyscope_free.argtypes = [c_void_p]
    loaded.tachyscope_run.restype = loaded.tachyscope_free.restype = None
    return loaded


def _build(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / path.name
        command = [*compiler.split(), *FLAGS, "-o", str(out), str(SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                out.replace(path)
                return
            reason = (done.stderr.strip() or "nothing").splitlines()[0][:200]
        except OSError as fault:
            reason = str(fault)
    raise TachyscopeError(
        f"{compiler} could not compile a token's step ({reason}): install g++, or leave out "
        f"`compile`"
    )


def _processor() -> str:
    """What a program made for this machine's processor depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine() + platform.processor()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features", "model")))
    return "\n".join(sorted(set(lines)))
