"""From noise to clean latents: the noise schedule, and the passes over a chunk."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tachyscope.core.exchange import calls_of
from tachyscope.core.session import Session
from tachyscope.core.types import DenoisePass
from tachyscope.models.wan.parts import Controls
from tachyscope.models.wan.stages import wider

if TYPE_CHECKING:
    from tachyscope.models.wan.config import WanConfig
    from tachyscope.models.wan.model import WanModel


NEAR = 1e-3  # noise levels that differ by less are one: training has a thousand of them


class Level(NamedTuple):
    """A denoising pass of the schedule."""

    place: int  # its index in the schedule
    timestep: float
    sigma: float  # the noise level that the pass removes
    added: float  # the level that latents are noised to before it


def schedule(config: WanConfig) -> list[tuple[float, float]]:
    """Timestep and noise level of each of the configuration's levels."""

    def shifted(s: float) -> float:
        return config.shift * s / (1 + (config.shift - 1) * s)

    if config.levels_of == "unipc":
        table = unipc_table(config.shift)
        times = [float(int(1000 * table[1000 - step])) for step in config.levels]
        found = [_unipc_level(table, step) for step in config.levels]
        return list(zip(times, found, strict=True))
    # the thousand levels of training, to which a level is rounded
    levels = [shifted(n / 1000) for n in range(1, 1001)]
    pairs = []
    for step in config.levels:
        t = 1000 * shifted(step / 1000) if config.warp else float(step)
        pairs.append((t, min(levels, key=lambda level: abs(1000 * level - t))))
    return pairs


def noising(config: WanConfig) -> list[float]:
    """The noise level that latents are noised to before each of the configuration's levels."""
    if config.levels_of == "unipc":
        table = unipc_table(config.shift)
        return [_unipc_level(table, step, 1) for step in config.levels]
    return [sigma for _, sigma in schedule(config)]


def passes(config: WanConfig) -> dict[int, Level]:
    """The denoising pass of each of the configuration's levels."""
    rows = zip(config.levels, schedule(config), noising(config), strict=True)
    return {step: Level(i, *pair, added) for i, (step, pair, added) in enumerate(rows)}


def unipc_table(shift: float) -> list[float]:
    """The thousand noise levels of UniPC's schedule, falling from 0.999 before the shift."""
    levels = (0.999 * n / 1000 for n in range(1000, 0, -1))
    return [shift * s / (1 + (shift - 1) * s) for s in levels]


def _unipc_level(table: list[float], step: int, at: int = 0) -> float:
    """The noise level of a step's integer timestep, which several table entries may share.

    The authors look a level up by its timestep: they remove the first such level, and add the
    second, as UniPC does. `at` is 0 or 1.
    """
    alike = [s for s in table if int(1000 * s) == int(1000 * table[1000 - step])]
    return alike[min(at, len(alike) - 1)]


def clean_from(config: WanConfig, x: Tensor, prediction: Tensor, sigma: float) -> Tensor:
    """x0 from latents x at noise level sigma and the model's prediction."""
    if config.prediction == "x0":
        return prediction
    # float64 is slow on a GPU, and float32 is enough for four steps
    exact = wider(x.dtype) if x.is_cuda else torch.float64
    return (x.to(exact) - sigma * prediction.to(exact)).to(x.dtype)


def noised(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """Clean latents noised to level sigma."""
    return (1 - sigma) * clean + sigma * noise


def levels_of(model: WanModel, steps: tuple[int, ...], strength: float = 1.0) -> list[Level]:
    """A chunk's denoising passes.

    With a source video they start at noise level `strength`, and only steps below it follow. The
    first pass keeps the first place of the schedule, by which policies know it.
    """
    c, own = model.config, [model.levels[step] for step in steps]
    if strength >= own[0].sigma:
        return own
    timestep = 1000 * strength
    if c.levels_of == "unipc":
        timestep = float(int(timestep))
    below = [level for level in own if level.sigma < strength - NEAR]
    return [Level(own[0].place, timestep, strength, strength), *below]


def denoise_chunk(model: WanModel, session: Session, controls: Controls) -> Tensor:
    """The next chunk's clean latents, by one pass a step."""
    c, features = model.config, session.memory.features
    # the first generated chunk is special, whether or not frames were given before it
    steps = (not session.memory.made and c.first_steps) or c.steps
    levels = levels_of(model, steps, features.strength)
    embed = model.embed_time, model.transformer.embed_patches
    held = _held(model, session)
    still = 0 if held is None else held.shape[2]

    def run(now: DenoisePass) -> Tensor:
        return denoise_pass(model, session, [now.x], [levels[now.index]], controls, still)[0]

    x = clean = model.noise(session, 0)
    if features.source is not None:
        x = noised(features.source.to(x), x, features.strength)
    for i, level in enumerate(levels):
        if i:
            x = noised(clean, model.noise(session, i), level.added)
        x = _with_held(held, x)
        now = DenoisePass(i, len(levels), level.timestep, level.sigma, x, *embed)
        clean = _with_held(held, session.predict(now, run))
    return clean


def _held(model: WanModel, session: Session) -> Tensor | None:
    """Given latent frames that the next chunk begins with: those of a video's first image."""
    first = model.config.image == "held" and not session.memory.latent_frame
    return session.memory.features.image if first else None


def _with_held(held: Tensor | None, x: Tensor) -> Tensor:
    """Latents whose first frames are replaced by the given ones."""
    if held is None:
        return x
    shown = held.to(x.dtype).expand(len(x), -1, -1, -1, -1)
    return torch.cat([shown, x[:, :, held.shape[2] :]], 2)


def denoise_rolling(model: WanModel, session: Session) -> Tensor:
    """The first chunk of a window in which each chunk is one step cleaner than the next.

    Every pass denoises the whole window and finishes its first chunk; a chunk of noise is appended,
    unless the video ends. At the start the window fills up, one chunk a pass.
    """
    chunk, levels = model.config.chunk, levels_of(model, model.config.steps)
    steps = len(levels)
    features, frame = session.memory.features, session.memory.latent_frame
    held, features.window = features.window, None
    window = [] if held is None else list(held.split(chunk, 2))
    # a video that is longer than announced has no known end
    announced = session.memory.latent_frames or 0
    end = announced if announced > frame else math.inf
    clean: list[Tensor] = []
    # the first chunk of a waiting window lacks one step, each later one a step more
    for step in range(steps - 1 if window else 0, steps):
        if not window or frame + len(window) * chunk < end:
            window.append(model.noise(session, 0, len(window)))
        at = [levels[step - i] for i in range(len(window))]
        clean = denoise_pass(model, session, window, at, Controls())
        window = [
            noised(x, model.noise(session, level.place + 1, i), levels[level.place + 1].sigma)
            for i, (x, level) in enumerate(zip(clean, at, strict=True))
            if level.place + 1 < steps
        ]
    if window:
        features.window = torch.cat(window, 2)
    return clean[0]


def denoise_pass(
    model: WanModel,
    session: Session,
    chunks: list[Tensor],
    levels: list[Level],
    controls: Controls,
    still: int = 0,
) -> list[Tensor]:
    """One pass over chunks, each at its own noise level: their clean latents.

    The first `still` latent frames are clean already.
    """
    x, frames = torch.cat(chunks, 2), chunks[0].shape[2]
    sigmas = [level.sigma for level in levels]
    begin_pass(model, session, x, levels[0].place, sigmas, still=still)
    fine: dict[str, Any] = {"dtype": torch.float32, "device": model.device}
    times = [torch.full((len(x), frames), level.timestep, **fine) for level in levels]
    t, calls = torch.cat(times, 1), calls_of(session)
    t[:, :still] = 0
    predictions = model.transformer(calls, x, t, *controls).split(frames, 2)
    return [
        clean_from(model.config, *each) for each in zip(chunks, predictions, sigmas, strict=True)
    ]


def clean_pass(
    model: WanModel, session: Session, x: Tensor, controls: Controls, past: bool = True
) -> None:
    """A pass over clean latents, whose keys and values stay in the cache.

    Without `past` it attends to the chunk alone.
    """
    c = model.config
    # it ends in its last layer: three linears there, one of the head, and attention are not run
    unused = 3 * c.dim**2 + c.in_channels * c.patch[1] * c.patch[2] * c.dim
    begin_pass(model, session, x, len(model.levels), [0.0], past, unused)
    t = torch.zeros(len(x), x.shape[2], dtype=torch.float32, device=model.device)
    calls = calls_of(session)
    model.transformer.prefill(calls, calls.write_kv, x, t, *controls)
    if controls.inputs is not None:
        controls.inputs.commit(session.memory.features, c.reach - c.chunk)


def begin_pass(
    model: WanModel,
    session: Session,
    x: Tensor,
    step: int,
    sigmas: list[float],
    past: bool = True,
    unused: int = 0,
    still: int = 0,
) -> None:
    """Call `Session.begin` for latents split evenly among the noise levels `sigmas`.

    The first `still` latent frames have no noise.
    """
    frames = x.shape[2]
    noise = tuple(sigma for sigma in sigmas for _ in range(frames // len(sigmas)))
    noise = (0.0,) * still + noise[still:]
    steps = len(model.levels) + 1
    session.begin(session.positions(frames), step, steps, noise, past, unused=unused)
