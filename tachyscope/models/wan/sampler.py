"""From noise to clean latents: the noise schedule, and the passes over a chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tachyscope.models.wan.parts import Controls
from tachyscope.models.wan.transformer import wider
from tachyscope.session import Session
from tachyscope.types import DenoisePass

if TYPE_CHECKING:
    from tachyscope.models.wan.config import WanConfig
    from tachyscope.models.wan.model import WanModel


def schedule(config: WanConfig) -> list[tuple[float, float]]:
    """Timestep and noise level of each of the configuration's levels."""

    def shifted(s: float) -> float:
        return config.shift * s / (1 + (config.shift - 1) * s)

    # the thousand levels of training, which a level between them is rounded to
    levels = [shifted(n / 1000) for n in range(1, 1001)]
    pairs = []
    for step in config.levels:
        t = 1000 * shifted(step / 1000) if config.warp else float(step)
        pairs.append((t, min(levels, key=lambda level: abs(1000 * level - t))))
    return pairs


def clean_from(config: WanConfig, x: Tensor, prediction: Tensor, sigma: float) -> Tensor:
    """x0 from latents x at noise level sigma and the model's prediction."""
    if config.prediction == "x0":
        return prediction
    # float64 is slow on a GPU, and float32 is enough for four steps
    exact = wider(x.dtype) if x.is_cuda else torch.float64
    return (x.to(exact) - sigma * prediction.to(exact)).to(x.dtype)


def noised(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """Clean latents brought to noise level sigma."""
    return (1 - sigma) * clean + sigma * noise


def denoise_chunk(model: WanModel, session: Session, controls: Controls) -> Tensor:
    """The next chunk's clean latents, by one pass a step."""
    c = model.config
    x = clean = model.noise(session, 0)
    # the first generated chunk is special, whether or not frames were given before it
    steps = (not session.made and c.first_steps) or c.steps
    embed = model.embed_time, model.transformer.embed_patches

    def run(now: DenoisePass) -> Tensor:
        level = c.levels.index(steps[now.index])
        return denoise_pass(model, session, [now.x], [level], controls)[0]

    for i, step in enumerate(steps):
        timestep, sigma = model.schedule[c.levels.index(step)]
        if i:
            x = noised(clean, model.noise(session, i), sigma)
        clean = session.predict(DenoisePass(i, len(steps), timestep, sigma, x, *embed), run)
    return clean


def denoise_rolling(model: WanModel, session: Session) -> Tensor:
    """The first chunk of a window where each is a step further from noise than the next.

    Every pass denoises all of it, and finishes its first chunk; noise enters behind, as long as
    more is to come. At the start the window fills up, a chunk and a pass at a time.
    """
    chunk, steps = model.config.chunk, len(model.schedule)
    held = session.features.pop("window", None)
    window = [] if held is None else list(held.split(chunk, 2))
    # beyond the latent frames that were announced, there is always more
    known = session.latent_frames if (session.latent_frames or 0) > session.latent_frame else None
    clean: list[Tensor] = []
    # what waits in a window lacks its last step, and what is behind it one step more
    for step in range(steps - 1 if window else 0, steps):
        if not window or known is None or session.latent_frame + len(window) * chunk < known:
            window.append(model.noise(session, 0, len(window)))
        levels = [step - i for i in range(len(window))]
        clean = denoise_pass(model, session, window, levels, Controls())
        window = [
            noised(x, model.noise(session, level + 1, i), model.schedule[level + 1][1])
            for i, (x, level) in enumerate(zip(clean, levels, strict=True))
            if level + 1 < steps
        ]
    if window:
        session.features["window"] = torch.cat(window, 2)
    return clean[0]


def denoise_pass(
    model: WanModel,
    session: Session,
    chunks: list[Tensor],
    levels: list[int],
    controls: Controls,
) -> list[Tensor]:
    """One pass over chunks, each at its own level of the schedule: their clean latents."""
    x, frames = torch.cat(chunks, 2), chunks[0].shape[2]
    sigmas = [model.schedule[level][1] for level in levels]
    begin_pass(model, session, x, levels[0], sigmas)
    fine: dict[str, Any] = {"dtype": torch.float32, "device": model.device}
    times = [torch.full((len(x), frames), model.schedule[level][0], **fine) for level in levels]
    predictions = model.transformer(session, x, torch.cat(times, 1), *controls).split(frames, 2)
    return [
        clean_from(model.config, *each) for each in zip(chunks, predictions, sigmas, strict=True)
    ]


def clean_pass(
    model: WanModel, session: Session, x: Tensor, controls: Controls, past: bool = True
) -> None:
    """A pass over clean latents for the keys and values that it leaves.

    It reads nothing of the past where `past` is False.
    """
    c, shape = model.config, session.shape
    pos = begin_pass(model, session, x, len(model.schedule), [0.0], past)
    # it ends in its last layer: three linears there, one of the head, and attention are not run
    unused = 3 * c.dim**2 + c.in_channels * c.patch[1] * c.patch[2] * c.dim
    session.meter.add("macs", -shape.batch * len(pos) * unused)
    read = len(pos) + (session.total_entries if past else 0)
    session.meter.add("pairs_dense", -shape.batch * shape.heads * len(pos) * read)
    t = torch.zeros(len(x), x.shape[2], dtype=torch.float32, device=model.device)
    model.transformer.prefill(session, session.write_kv, x, t, *controls)


def begin_pass(
    model: WanModel, session: Session, x: Tensor, step: int, sigmas: list[float], past: bool = True
) -> Tensor:
    """Begin a pass over latents in as many parts as there are sigmas; the tokens' positions."""
    frames = x.shape[2]
    noise = tuple(sigma for sigma in sigmas for _ in range(frames // len(sigmas)))
    pos = session.positions(frames)
    session.begin(pos, step=step, steps=len(model.schedule) + 1, noise=noise, past=past)
    return pos
