"""Fit which neurons of a token model's MLPs matter, and what stands in for the others.

The dense model runs clips, and the inputs of every MLP are gathered. For each layer, activations
h ≈ B (x, 1) are fitted by ridge regression: the part of an activation that is affine in the input
can be left out at no cost. A neuron's score is the energy it adds to the output beyond that part,
relative to the output's own. The neurons left out are replaced by the map W_down B, of bounded rank
in wide models. Its error is remembered from the last whole output and faded with the distance of
inputs; the rate of fading is fitted to pairs of frames up to eight apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import check
from tachyscope.core.observers import Observer
from tachyscope.core.opening import open as open_stream
from tachyscope.core.prefill import Part, prefill
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext, SliceableMlp
from tachyscope.io.calibration import MOST, Calibration, kept_neurons
from tachyscope.io.tables import format_table
from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.visit import draw, make_world, stir_world
from tachyscope.models.base import VideoModel
from tachyscope.models.registry import MODELS

FRAMES = 16  # of a clip
SHARES = (0.5, 0.75)
RANK = 256
RIDGE = 3e-4  # of the mean square of inputs
LAGS = range(1, 9)  # frames between an error and its use
# medians: the greatest change counts as at least so many, since few clips may miss larger ones
TYPICAL = 4.0
BETAS = tuple(0.05 * 1.25**i for i in range(40))
ROOMS = 900_000  # number of the first room; evaluations use lower ones
# by kind of camera: letters of 16 frames
CAMERAS = {
    "still": "................",
    "forward": ".qqqqqqqqqqqqqqq",
    "reversing": ".eeeeeeeqqqqqqqq",
    "walk": ".wwwwqqwwwddddww",
    "sidestep": ".sssssaaaeesssdd",  # so that every action's embedding occurs
}
# degrees a frame, and steps that objects move in a frame
SPEEDS = ((0.5, 1 / 12), (1.0, 1 / 3), (2.0, 1 / 6), (4.0, 2 / 3))

Watch = Callable[[str, int], None]


@torch.inference_mode()
def calibrate(
    model: VideoModel,
    *,
    clips: int = 20,
    shares: Sequence[float] = SHARES,
    prompts: Sequence[str] = (),
    first: Sequence[np.ndarray] = (),
    seed: int = 0,
    watch: Watch | None = None,
) -> Calibration:
    """Calibrate a token model on clips of its world, or on videos of prompts where it has none.

    shares: of neurons left out, each with a map of its own. first: videos uint8 [F, H, W, 3] to
    continue, in turn. seed: of the rooms, or of the videos' noise. watch: called with the number of
    batches of clips that are done.
    """
    mlps = model.mlps
    if not mlps or not model.shape().token_by_token:
        raise TachyscopeError(
            f"{model.name} is no token model: calibrate one, atrium-tokens or vila_u"
        )
    check("clips", clips)
    if not 1 <= len(set(shares)) == len(shares) <= MOST["shares"] or any(
        not 0 < share < 1 for share in shares
    ):
        raise TachyscopeError(
            f"shares are up to {MOST['shares']} numbers between 0 and 1, got {list(shares)}: "
            f"give each once"
        )
    entry = MODELS.get(model.name)
    speeds: Sequence[tuple[float, float]] = ()
    if entry is not None and entry.world == "atrium":
        batches, speeds = _world_clips(model, clips, seed), SPEEDS
    else:
        batches = _videos(model, clips, prompts, first, seed)
    inputs: list[list[Tensor]] = [[] for _ in mlps]
    for done, batch in enumerate(batches, 1):
        for layer, x in zip(inputs, batch, strict=True):
            layer.append(x)
        if watch is not None:
            watch("batches of clips", done)
    gathered = [torch.cat(layer) for layer in inputs]
    fits = [_fit(mlp, x) for mlp, x in zip(mlps, gathered, strict=True)]
    score = torch.stack([fit.score for fit in fits])
    gain = torch.tensor([_gain(mlp, x) for mlp, x in zip(mlps, gathered, strict=True)])
    maps, bias, beta, off = {}, {}, {}, {}
    for share in shares:
        rests = [
            _rest(mlp, x, fit, kept)
            for mlp, x, fit, kept in zip(
                mlps, gathered, fits, kept_neurons(score, share), strict=True
            )
        ]
        parts = zip(*(rest.maps for rest in rests), strict=True)
        maps[share] = tuple(torch.stack(part) for part in parts)
        bias[share] = torch.stack([rest.bias for rest in rests])
        beta[share] = torch.tensor([rest.beta for rest in rests])
        off[share] = torch.tensor([rest.off for rest in rests])
    norms = torch.stack([mlp.down.float().norm(dim=0).cpu() for mlp in mlps])
    known = torch.tensor(speeds, dtype=torch.float32).reshape(-1, 2)
    plain = Calibration(score, norms, known, maps, bias, beta, gain, off)
    # as it is read from a file
    return Calibration.of(plain.tensors(), "this calibration")


def lines(calibration: Calibration) -> list[str]:
    """A table of the neurons computed in each layer, by share left out."""
    shares = list(calibration.maps)
    kept = [calibration.kept(share) for share in shares]
    cells = [
        [str(layer), *(f"{len(index[layer])} of {calibration.score.shape[1]}" for index in kept)]
        for layer in range(len(calibration.score))
    ]
    return format_table(["layer", *(f"{share:g} left out" for share in shares)], cells)


class Inputs(Observer):
    """Gathers every MLP's inputs: [B, frames, N, W] a layer, in half precision."""

    def __init__(self, frames: int) -> None:
        self.frames = frames

    def on_open(self, session: Session) -> None:
        shape = session.shape
        size = (shape.batch, self.frames, shape.tokens_per_frame, shape.width)
        self.found = [torch.zeros(size, dtype=torch.float16) for _ in range(shape.layers)]

    def on_mlp(self, ctx: PassContext, x: Tensor, y: Tensor) -> None:
        if not ctx.prefilling and ctx.chunk < self.frames:
            end = ctx.start + ctx.tokens
            self.found[ctx.layer][:, ctx.chunk, ctx.start : end] = x.to("cpu", torch.float16)


def _world_clips(model: VideoModel, clips: int, seed: int) -> Iterator[list[Tensor]]:
    """MLP inputs of clips of true frames, a batch for each kind of camera motion."""
    for n, letters in enumerate(CAMERAS.values()):
        rows = range(n, clips, len(CAMERAS))
        if not rows:
            return
        worlds = [make_world(ROOMS + 1_000 * seed + row) for row in rows]
        if set(letters) == {"."}:
            worlds = [stir_world(world) for world in worlds]
        codes = []
        for i, world in enumerate(worlds):
            angle, tempo = SPEEDS[i % len(SPEEDS)]
            pace = angle * atrium.TURN / 360
            pose = atrium.walk(world.start, atrium.letters(letters)[None], pace)[0]
            frames = draw(world.rooms, pose, tempo * torch.arange(FRAMES), model.size[0])
            codes.append(model.encode_frames(frames))
        given = torch.cat(codes)
        observer = Inputs(FRAMES)
        stream = open_stream(
            model, "dense", prompt=[world.prompt for world in worlds], seed=[0] * len(worlds),
            frames=FRAMES, observers=[observer],
        )  # fmt: skip
        for i, move in enumerate(atrium.letters(letters).tolist()):
            prefill(model, stream.session, [Part(given[:, i : i + 1], [move])])
        yield observer.found


def _videos(
    model: VideoModel, clips: int, prompts: Sequence[str], first: Sequence[np.ndarray], seed: int
) -> Iterator[list[Tensor]]:
    """MLP inputs of videos that the model makes from prompts and given frames, one by one."""
    frames = 8
    for i in range(clips):
        observer = Inputs(frames)
        prompt = prompts[i % len(prompts)] if prompts else ""
        stream = open_stream(
            model, "dense", prompt=prompt, seed=seed + i, frames=frames, observers=[observer],
            first=first[i % len(first)] if first else None,
        )  # fmt: skip
        for _ in range(frames - stream.session.memory.latent_frame):
            stream.generate()
        yield observer.found


class Fit(NamedTuple):
    """The regression of one layer."""

    map: Tensor  # [W + 1, inner]: activations, as an affine map of inputs
    gram: Tensor  # [W + 1, W + 1] of inputs
    score: Tensor  # [inner]


@dataclass(frozen=True)
class Rest:
    """What replaces the neurons of a layer that are left out."""

    maps: tuple[Tensor, ...]
    bias: Tensor
    beta: float
    off: tuple[float, float, float]  # as in `Calibration`


def _fit(mlp: SliceableMlp, x: Tensor) -> Fit:
    """Ridge regression of all activations on inputs x [B, T, N, W], in float64."""
    down = mlp.down
    width, inner = down.shape
    gram = torch.zeros(width + 1, width + 1, dtype=torch.float64)
    cross = torch.zeros(width + 1, inner, dtype=torch.float64)
    square, energy, rows = torch.zeros(inner, dtype=torch.float64), 0.0, 0
    for part in x.flatten(0, 2).split(8_192):
        here = part.to(down.device, down.dtype)
        h = mlp.activations(here)
        ones = torch.cat([here, torch.ones_like(here[:, :1])], 1)
        gram += (ones.T @ ones).double().cpu()
        cross += (ones.T @ h).double().cpu()
        square += h.double().square().sum(0).cpu()
        energy += float((h @ down.T).double().square().sum())
        rows += len(here)
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(width + 1, dtype=torch.float64)
    solution = torch.linalg.solve(gram + ridge, cross)
    left = square - 2 * (solution * cross).sum(0) + (solution * (gram @ solution)).sum(0)
    score = left.clamp_min(0) * down.double().square().sum(0).cpu() / max(energy, 1e-30)
    return Fit(solution, gram, score.float())


def _rest(mlp: SliceableMlp, x: Tensor, fit: Fit, kept: Tensor) -> Rest:
    """The map that replaces the neurons not in `kept`, and how fast its error fades."""
    down = mlp.down
    out = torch.ones(down.shape[1], dtype=torch.bool)
    out[kept] = False
    rest = fit.map[:, out] @ down[:, out.to(down.device)].T.double().cpu()  # [W + 1, W]
    linear, bias = rest[:-1], rest[-1].float()
    maps: tuple[Tensor, ...] = (linear.float(),)
    if len(linear) > 2 * RANK:
        # the output directions that the map explains best
        top = torch.linalg.eigh(linear.T @ fit.gram[:-1, :-1] @ linear).eigenvectors[:, -RANK:]
        maps = ((linear @ top).float(), top.T.float().contiguous())
    errors, parts = [], [part.to(down.device, down.dtype) for part in maps]
    left = mlp.slice(out.nonzero()[:, 0].to(down.device))
    some = x[:, :, ::4].to(down.device, down.dtype)  # enough positions to fit one number
    for frame in some.unbind(1):
        about = frame
        for part in parts:
            about = about @ part
        errors.append(left(frame) - about - bias.to(about))
    error = torch.stack(errors, 1)
    beta = _fading(error, some)
    off, most = [0.0], [0.0]
    for new, old, x, base in _apart(error, some):
        distance = (x - base).norm(dim=-1)
        weight = torch.exp(-beta * (distance / base.norm(dim=-1).clamp_min(1e-12)).square())
        left = (new - weight[..., None] * old).norm(dim=-1)
        off.append(_steepest(left, distance))
        most.append(_greatest(left))
    return Rest(maps, bias, beta, (max(off), max(most), _greatest(error.norm(dim=-1))))


def _gain(mlp: SliceableMlp, x: Tensor) -> float:
    """The largest ratio of an output's change to its input's, for inputs x [B, T, N, W]."""
    some = x[:, :, ::4].to(mlp.down.device, mlp.down.dtype)
    y = torch.stack([mlp(frame) for frame in some.unbind(1)], 1)
    gains = [0.0]
    for new, old, now, base in _apart(y, some):
        gains.append(_steepest((new - old).norm(dim=-1), (now - base).norm(dim=-1)))
    return max(gains)


def _apart(y: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Frames LAGS apart of y and x [B, T, N, W]: later y, earlier y, later x, earlier x."""
    for lag in LAGS:
        if lag < x.shape[1]:
            yield y[:, lag:], y[:, :-lag], x[:, lag:], x[:, :-lag]


def _steepest(change: Tensor, distance: Tensor) -> float:
    """The greatest change per distance, where inputs differ by more than rounding."""
    far = distance > 1e-6
    return _greatest(change[far] / distance[far])


def _greatest(values: Tensor) -> float:
    """The greatest value, or TYPICAL times the median where that is more; of none 0."""
    if not values.numel():
        return 0.0
    return max(float(values.max()), TYPICAL * float(values.median()))


def _fading(error: Tensor, x: Tensor) -> float:
    """The beta that minimises the errors [B, T, N, W] left after the remembered part, over LAGS."""
    far, alike, size = [], [], []
    for new, old, now, base in _apart(error, x):
        square = base.square().sum(-1).clamp_min(1e-12)
        far.append(((now - base).square().sum(-1) / square).flatten())
        alike.append((new * old).sum(-1).flatten())
        size.append(old.square().sum(-1).flatten())
    d, c, s = (torch.cat(x).double().cpu() for x in (far, alike, size))

    def left(beta: float) -> float:
        weight = torch.exp(-beta * d)
        return float((weight * (weight * s - 2 * c)).sum())

    return min(BETAS, key=left)
