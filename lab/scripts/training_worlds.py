"""The worlds that a model of rooms is trained on: how each is made, walked, drawn and said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import atrium_clips
import lodge_clips
import torch
from atrium_clips import Clips
from torch import Generator, Tensor

from tachyscope.models.atrium import autoencoder as atrium_autoencoder
from tachyscope.models.atrium import prompts as atrium_prompts
from tachyscope.models.atrium import world as atrium
from tachyscope_lab.worlds.lodge import autoencoder as lodge_autoencoder
from tachyscope_lab.worlds.lodge import camera as lodge_camera
from tachyscope_lab.worlds.lodge import prompts as lodge_prompts
from tachyscope_lab.worlds.lodge.houses import make_houses
from tachyscope_lab.worlds.lodge.model import LodgePictures, LodgeWords
from tachyscope_lab.worlds.lodge.picture import ITEMS, SURFACES
from tachyscope_lab.worlds.lodge.picture import render as render_lodge
from tachyscope_lab.worlds.lodge.picture import see as see_lodge

CELLS = 16  # latents of a picture's side, of every world; a token is 2 by 2 of them
SLOWEST = atrium_clips.degrees(1.0)


@dataclass(frozen=True)
class World:
    """What training needs of a world."""

    prompts: ModuleType  # WORDS, LENGTH, descriptions, tokenize, pad
    camera: ModuleType  # ACTIONS, letters, make_starts, walk, facing, seen_from, rays
    make_scenes: Callable[[int, Generator], Any]
    make_clips: Callable[[int, int, Generator], Clips]
    render: Callable[..., Tensor]
    see: Callable[..., Tensor]
    make_autoencoder: Callable[[], Any]
    channels: int  # of a latent
    stride: int  # pixels of its side
    layers: int  # of the world model, 256 wide
    text_encoder: str  # how the model's configuration names these parts
    decoder: str
    surfaces: int
    objects: int  # the first surface that is a thing
    at_once: int  # frames that are drawn together
    pace: float  # of the judge's walk, which is made again at half of it
    way: str  # that walk: a full turn, the same again, and on from there

    def tokens(self, texts: Sequence[str]) -> Tensor:
        padded: Tensor = self.prompts.pad([self.prompts.tokenize(text) for text in texts])
        return padded


def _atrium_clips(count: int, frames: int, generator: Generator) -> Clips:
    """Walks at paces of their own: two of five at a whole step a frame, the others slower.

    A slower clip does less, in smaller steps; things in it move slower too, by a power of two, so
    that a jump of whole periods is one at every tempo.
    """
    pace = SLOWEST ** torch.rand(count, generator=generator)
    pace = torch.where(torch.rand(count, generator=generator) < 0.4, 1.0, pace)
    tempo = 2.0 ** -(1 / pace).log2().round()
    clips = atrium_clips.make_clips(count, frames, generator, still=0.03, tempo=tempo)
    # every action is held for as many frames as make a whole step
    held = torch.arange(frames) // (1 / pace).round().long()[:, None]
    actions = clips.actions.gather(1, held)
    pose = atrium.walk(clips.pose[:, 0], actions, pace)
    return replace(clips, actions=actions, pose=pose)


_TURNS = "q" * atrium.TURN * 2
WORLDS = {
    "atrium": World(
        prompts=atrium_prompts,
        camera=atrium,
        make_scenes=atrium.make_rooms,
        make_clips=_atrium_clips,
        render=atrium.render,
        see=atrium.see,
        make_autoencoder=atrium_autoencoder.Autoencoder,
        channels=16,
        stride=atrium_autoencoder.STRIDE,
        layers=9,
        text_encoder="words",
        decoder="autoencoder",
        surfaces=atrium.OBJECTS + 4,
        objects=atrium.OBJECTS,
        at_once=512,
        pace=1.0,
        way=_TURNS + "wwaa" + "e" * 20 + "dddd" + "q" * 20 + "ssss" + "e" * 16 + "wwww",
    ),
    "lodge": World(
        prompts=lodge_prompts,
        camera=lodge_camera,
        make_scenes=make_houses,
        make_clips=lodge_clips.make_clips,
        render=render_lodge,
        see=see_lodge,
        make_autoencoder=lodge_autoencoder.Autoencoder,
        channels=lodge_autoencoder.CHANNELS,
        stride=lodge_autoencoder.STRIDE,
        layers=8,
        text_encoder=LodgeWords.kind,
        decoder=LodgePictures.kind,
        surfaces=SURFACES,
        objects=ITEMS,
        at_once=64,
        pace=0.5,
        way=_TURNS + "wwww" + "e" * 12 + "wwww" + "q" * 18 + "wwww" + "e" * 12 + "ss",
    ),
}
