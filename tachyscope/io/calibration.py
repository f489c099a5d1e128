"""A calibration file: which MLP neurons of a model matter, and affine maps for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.types import SliceableMlp

VERSION = 2
STEP = 16  # a slice has a multiple of this many neurons, for the kernels
MOST = {"layers": 256, "inner": 1_048_576, "width": 65_536, "shares": 8, "speeds": 64, "losses": 64}
MAY_BE_EMPTY = ("speeds", "losses")
MARGIN = 1.75  # times the most that calibration saw, for a bound
OTHER = 0.02  # relative difference of norms that another dtype of the same weights may make
AGAIN = "run tachyscope inspect MODEL --fit-neurons FILE again"


@dataclass(frozen=True)
class Cut:
    """A cut of an MLP: the computed neurons [n], and what replaces the others (see `Slice`)."""

    index: Tensor
    maps: tuple[Tensor, ...]
    bias: Tensor
    beta: float


@dataclass(frozen=True)
class Slice:
    """An MLP with some neurons replaced by an affine map of its input.

    mlp    the computed neurons
    maps   [W, W], or [W, R] and [R, W]: their product is the linear map of x for the others
    bias   [W]
    beta   how fast a remembered error fades with the distance of inputs
    """

    mlp: SliceableMlp
    maps: tuple[Tensor, ...]
    bias: Tensor
    beta: float

    @property
    def macs(self) -> int:
        """Multiply-adds of one row."""
        return self.mlp.macs + sum(part.numel() for part in self.maps)

    def __call__(self, x: Tensor) -> Tensor:
        rest = x
        for part in self.maps[:-1]:
            rest = rest @ part
        rows = rest.flatten(0, -2)
        return torch.addmm(self.bias, rows, self.maps[-1]).view_as(x) + self.mlp(x)


@dataclass(frozen=True)
class Calibration:
    """The neurons' scores of every layer, and for every calibrated share a map of the rest.

    score   [L, inner]  of a neuron: how much of its layer's output is lost without it
    norms   [L, inner]  of W_down's columns: what the weights must have
    speeds  [n, 2]      degrees a frame and tempo of the clips; empty where they had none
    maps    by share: the parts of `Slice.maps`, of all layers [L, ., .]
    bias    by share: [L, W]
    beta    by share: [L]
    gain    [L]         the most that an MLP's output changed by for a change of its input by 1
    off     by share: [L, 3] the most that neuron replay was off by, for a change of the input by 1
            since the whole output; the most at any distance; the most without a memory
    losses  [n, 2]      of `replay=input`: a budget, and the dB that it lost; empty where unknown
    cost    [L]         of `replay=input`: nats of KL that a replayed token costs, over the square
                        of its input's relative change; empty where unknown
    """

    score: Tensor
    norms: Tensor
    speeds: Tensor
    maps: Mapping[float, tuple[Tensor, ...]]
    bias: Mapping[float, Tensor]
    beta: Mapping[float, Tensor]
    gain: Tensor = field(default_factory=lambda: torch.zeros(0))
    off: Mapping[float, Tensor] = field(default_factory=dict)
    losses: Tensor = field(default_factory=lambda: torch.zeros(0, 2))
    cost: Tensor = field(default_factory=lambda: torch.zeros(0))

    def budget(self, loss: float) -> float:
        """The budget of `replay=input` that loses `loss` dB, interpolated between measured ones."""
        budgets: list[float] = [0.0, *self.losses[:, 0].tolist()]
        lost: list[float] = [0.0, *self.losses[:, 1].tolist()]
        if len(lost) < 2 or not 0 <= loss <= lost[-1]:
            raise TachyscopeError(
                f"this calibration knows losses up to {lost[-1]:.2g} dB, got loss={loss:g}: "
                f"take a smaller one, or give budget or share instead"
            )
        after = next(i for i, most in enumerate(lost) if i and loss <= most)
        part = (loss - lost[after - 1]) / max(lost[after] - lost[after - 1], 1e-9)
        return budgets[after - 1] + part * (budgets[after] - budgets[after - 1])

    def kept(self, share: float) -> list[Tensor]:
        """By layer, the neurons that are computed if `share` of them is left out."""
        self.check_share(share)
        return kept_neurons(self.score, share)

    def check_share(self, share: float) -> None:
        if share not in self.maps:
            known = ", ".join(f"{x:g}" for x in self.maps)
            raise TachyscopeError(
                f"this calibration is of shares {known}, got {share:g}: use one of these, or run "
                f"tachyscope-lab calibrate with --share {share:g}"
            )

    def slices(self, share: float, mlps: Mapping[int, SliceableMlp]) -> dict[int, Slice]:
        """The MLPs of some layers, by number, as slices; raises if they are another model's."""
        cuts = {layer: self.cut(share, layer, mlp.down) for layer, mlp in mlps.items()}
        return {
            layer: Slice(mlps[layer].slice(cut.index), cut.maps, cut.bias, cut.beta)
            for layer, cut in cuts.items()
        }

    def cut(self, share: float, layer: int, down: Tensor) -> Cut:
        """The cut of a layer with this W_down; raises if that is another model's."""
        self.check_share(share)
        self._check(layer, down)
        index = kept_neurons(self.score[layer : layer + 1], share)[0].to(down.device)
        maps = tuple(part[layer].to(down.device, down.dtype) for part in self.maps[share])
        bias = self.bias[share][layer].to(down.device, down.dtype)
        return Cut(index, maps, bias, float(self.beta[share][layer]))

    def _check(self, layer: int, down: Tensor) -> None:
        """Raise unless an MLP's W_down has the calibrated norms."""
        here = down.detach().float().norm(dim=0).cpu()
        want = self.norms[layer] if layer < len(self.norms) else here.new_zeros(0)
        width = self.maps[next(iter(self.maps))][0].shape[1]
        fits = here.shape == want.shape and len(down) == width
        if not fits or bool(((here - want).abs() > OTHER * want.max()).any()):
            raise TachyscopeError(
                f"this calibration is of another model: its layer {layer} has {len(want)} neurons "
                f"of other weights: run tachyscope inspect MODEL --fit-neurons FILE for this one"
            )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a file; maps and biases in half precision."""
        values = {"version": torch.tensor([VERSION]), "score": self.score, "norms": self.norms}
        values |= {"speeds": self.speeds, "shares": torch.tensor(list(self.maps)).double()}
        for i, share in enumerate(self.maps):
            for n, part in enumerate(self.maps[share]):
                values[f"map.{i}.{n}"] = part.half()
            values |= {f"bias.{i}": self.bias[share].half(), f"beta.{i}": self.beta[share].float()}
            values[f"off.{i}"] = self.off[share]
        values |= {"cost": self.cost} if len(self.cost) else {}
        return values | {"gain": self.gain, "losses": self.losses}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], where: str) -> Calibration:
        """From a file's tensors, all of them checked."""
        one = _Reader(tensors, where)
        if one.take("version", (1,), torch.int64).tolist() != [VERSION]:
            one.refuse(f"is not of version {VERSION}")
        layers, inner = one.sizes("score", "layers", "inner")
        score = one.take("score", (layers, inner))
        norms = one.take("norms", (layers, inner))
        (count,) = one.sizes("shares", "shares")
        shares = one.take("shares", (count,), torch.float64).tolist()
        if len(set(shares)) < count or not all(0 < share < 1 for share in shares):
            one.refuse("has shares that are not numbers between 0 and 1, each once")
        speeds = one.take("speeds", (one.sizes("speeds", "speeds", "speeds")[0], 2))
        losses = one.take("losses", (one.sizes("losses", "losses", "losses")[0], 2))
        if bool((losses.diff(dim=0, prepend=losses.new_zeros(1, 2)) < 0).any()):
            one.refuse("has losses that fall")
        gain = one.take("gain", (layers,))
        maps, bias, beta, off = {}, {}, {}, {}
        for i, share in enumerate(shares):
            _, width, rank = one.sizes(f"map.{i}.0", "layers", "width", "width")
            sizes = [(width, rank)] if rank == width else [(width, rank), (rank, width)]
            maps[share] = tuple(
                one.take(f"map.{i}.{n}", (layers, *size), torch.float16).float()
                for n, size in enumerate(sizes)
            )
            bias[share] = one.take(f"bias.{i}", (layers, width), torch.float16).float()
            beta[share] = one.take(f"beta.{i}", (layers,))
            off[share] = one.take(f"off.{i}", (layers, 3))
        cost = one.take("cost", (layers,)) if "cost" in tensors else torch.zeros(0)
        if bool((cost <= 0).any()):
            one.refuse("has layers that cost nothing")
        one.done()
        return cls(score, norms, speeds, maps, bias, beta, gain, off, losses, cost)


def kept_neurons(score: Tensor, share: float) -> list[Tensor]:
    """By layer, the neurons of scores [L, inner] that are computed if `share` is left out.

    Every layer keeps the same number: ranked over all layers together, the first layers lost too
    many (docs/token-models.md).
    """
    inner = score.shape[1]
    count = min(inner, max(STEP, STEP * round((1 - share) * inner / STEP)))
    return [scores.topk(count).indices.sort().values for scores in score]


class _Reader:
    """Tensors of a file, taken one by one and checked."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.left, self.where = dict(tensors), where

    def sizes(self, name: str, *kinds: str) -> tuple[int, ...]:
        """A tensor's sizes, one for each of `kinds` and within the bound of that kind."""
        x = self.left.get(name)
        if x is None:
            self.refuse(f"lacks {name!r}")
        fits = x.dim() == len(kinds) and all(
            (n > 0 or kind in MAY_BE_EMPTY) and n <= MOST[kind]
            for n, kind in zip(x.shape, kinds, strict=True)
        )
        if not fits:
            self.refuse(f"has {name!r} of sizes {list(x.shape)}")
        return tuple(x.shape)

    def take(self, name: str, size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        x = self.left.pop(name, None)
        if x is None:
            self.refuse(f"lacks {name!r}")
        if tuple(x.shape) != size or x.dtype != dtype:
            self.refuse(f"has {name!r} as {x.dtype} {list(x.shape)}, and not {dtype} {list(size)}")
        if x.is_floating_point() and not bool(x.isfinite().all()):
            self.refuse(f"has NaN or infinity in {name!r}")
        return x

    def done(self) -> None:
        if self.left:
            self.refuse(f"has {shown(next(iter(self.left)))}, which no calibration has")

    def refuse(self, what: str) -> NoReturn:
        raise TachyscopeError(
            f"{self.where} is no calibration that is read here, it {what}: {AGAIN}"
        )
