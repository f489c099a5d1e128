"""Chooses the best way to make a video within limits of GPU memory and RAM.

What costs least quality is given up first: decoding all rows at once, then up to half of what the
cache keeps on the GPU, then bfloat16 linears, then Wan's own VAE, then the rest of the cache. A
bank's past is quantised to 4 bits if RAM is short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, cast

from tachyscope.cache.bank import Bank
from tachyscope.cache.merge import Merge
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan, spell
from tachyscope.core.types import Size
from tachyscope.memory.predict import ROOM, meta_session, model_parts, need_of
from tachyscope.memory.promise import Promise, promised
from tachyscope.models.base import VideoModel
from tachyscope.models.registry import in_bands, in_precision
from tachyscope.models.wan.fp8_gain import LEAST, linears_saved
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.sizes import VaeSize
from tachyscope.models.wan.tiny_decoder import TinyDecoder
from tachyscope.models.wan.tiny_layers import RANDOM
from tachyscope.models.wan.vae import WanVae

FP8 = "precision=fp8_linears"
# the published tiny decoder of Wan 2.1's latents and of 2.2's, by their channels
TINY = {16: "decoder=taew2_1.pth", 48: "decoder=taew2_2.pth"}
BANDS = "decoder_bands="
Words = tuple[str, ...]


class Recipe(NamedTuple):
    """A way to make a video, and the memory that it takes."""

    weights: Words  # more words for --weights
    plan: str
    promise: Promise
    fits: bool = True  # else it is the smallest of all ways


class Video(NamedTuple):
    """The video to make, and its model on the meta device."""

    model: VideoModel
    text: str  # of the plan, as given
    plan: Plan
    frames: int
    size: tuple[int, int] | None
    prompt: str
    on_cpu: bool


class Choice:
    """Chooses ways for one video; each is predicted once."""

    def __init__(self, video: Video) -> None:
        self.video = video
        self._models: dict[Words, tuple[VideoModel, dict[str, Any]]] = {}
        self._known: dict[tuple[Words, str], Promise] = {}

    def best(self, vram: float | None = None, ram: float | None = None) -> Recipe:
        """The best way within bytes of a GPU and of RAM; the smallest if none fits."""

        def fits(told: Promise) -> bool:
            return (vram is None or told.vram <= ROOM * vram) and (ram is None or told.ram <= ram)

        most = self._kept()
        for least in (max(1, most // 2), 1):
            for weights in self._weights():
                for plan in self._hosts():
                    for words in self._banded(weights):
                        whole = self.promise(words, plan)
                        if fits(whole):
                            return self._recipe(words, plan, whole)
                        if vram is None or whole.vram <= ROOM * vram:
                            break  # a smaller cache on the GPU takes no less RAM
                    else:

                        def held(count: int, words: Words = words, plan: Plan = plan) -> bool:
                            return fits(self.promise(words, bounded(plan, count)))

                        count = largest(held, most - 1)
                        if count is not None and count >= least:
                            smaller = bounded(plan, count)
                            return self._recipe(words, smaller, self.promise(words, smaller))
        *_, weights = self._weights()
        *_, words = self._banded(weights)
        *_, plan = self._hosts()
        return self._least(words, plan)

    def promise(self, weights: Words, plan: Plan) -> Promise:
        """The memory of a plan with more `weights` words."""
        video, key = self.video, (weights, str(plan))
        if key not in self._known:
            model, parts = self._model(weights)
            session = meta_session(model, plan, video.frames, video.size, video.prompt)
            if not parts:
                parts.update(model_parts(model, session))
            found = need_of(session, parts)
            self._known[key] = promised(found, video.model, on_cpu=video.on_cpu)
        return self._known[key]

    def _least(self, weights: Words, plan: Plan) -> Recipe:
        """The way with the smallest cache that the plan allows, which does not fit."""
        for kept in range(1, self._kept()):
            with suppress(TachyscopeError):  # less than a policy must keep
                smaller = bounded(plan, kept)
                told = self.promise(weights, smaller)
                return self._recipe(weights, smaller, told, fits=False)
        return self._recipe(weights, plan, self.promise(weights, plan), fits=False)

    def _recipe(self, weights: Words, plan: Plan, told: Promise, fits: bool = True) -> Recipe:
        return Recipe(weights, self._spelled(plan), told, fits)

    def _spelled(self, plan: Plan) -> str:
        """The plan as text: the given one, with the changes of its cache."""
        video = self.video
        if plan == video.plan:
            return video.text
        if "cache=" in video.text or not isinstance(plan.cache, type(video.plan.cache)):
            return str(plan)
        before, after = (_settings(x) for x in (video.plan, plan))
        changed = ",".join(f"{name}={x}" for name, x in after.items() if before.get(name) != x)
        return f"{video.text} cache={plan.cache.name}:{changed}"

    def _kept(self) -> int:
        """Latent frames that the plan's cache keeps on the device."""
        video, cache = self.video, self.video.plan.cache
        session = meta_session(video.model, video.plan, video.frames, video.size, video.prompt)
        latents = session.state.latent_frames or 1
        size = getattr(cache, cache.bounded_by, None)
        if size is None:
            return latents
        kept: int = size.entries(session.shape) // session.shape.tokens_per_frame
        return min(latents, kept)

    def _weights(self) -> Iterator[Words]:
        """Words to add to --weights; those that change the video least come first."""
        model = self.video.model
        precise, shown = [Words()], [Words()]
        if isinstance(model, WanModel):
            if model.operations is None and not self.video.on_cpu and self._fp8_gains(model):
                precise.append((FP8,))
            tiny = TINY.get(model.config.in_channels)
            if tiny and isinstance(model.decoder, WanVae | VaeSize):
                shown.append((tiny,))
        for decoder in shown:
            for precision in precise:
                yield precision + decoder

    def _fp8_gains(self, model: WanModel) -> bool:
        """Whether float8 linears can save time; `load` refuses them otherwise."""
        shape = model.shape(self.video.size)
        return linears_saved(shape.max_pass_tokens, shape.width, model.config.ffn_dim) >= LEAST

    def _banded(self, weights: Words) -> Iterator[Words]:
        """These words, then these with Wan's VAE decoding in bands, the fewest first."""
        yield weights
        decoder = getattr(self._model(weights)[0], "decoder", None)
        if isinstance(decoder, WanVae | VaeSize) and decoder.bands == 1:
            yield from (weights + (f"{BANDS}{bands}",) for bands in (2, 4, 8))

    def _hosts(self) -> Iterator[Plan]:
        """The plan, then the plan with a bank's past in 4 bits."""
        plan = self.video.plan
        yield plan
        quantises = plan.store.name == "native"
        if isinstance(plan.cache, Bank) and quantises and plan.cache.host != "int4":
            yield dataclasses.replace(plan, cache=dataclasses.replace(plan.cache, host="int4"))

    def _model(self, weights: Words) -> tuple[VideoModel, dict[str, Any]]:
        """The model with these words, and the parts of its memory once they are known."""
        if weights not in self._models:
            model = self.video.model.on_meta() if weights else self.video.model
            if isinstance(model, WanModel) and {*TINY.values()} & {*weights}:
                model.decoder = TinyDecoder.read(RANDOM, model.config, "meta", model.dtype)
            if bands := [word for word in weights if word.startswith(BANDS)]:
                in_bands(model, int(bands[0].partition("=")[2]))
            if FP8 in weights:
                model = in_precision(model, FP8.partition("=")[2])
            self._models[weights] = model, {}
        return self._models[weights]


def _settings(plan: Plan) -> dict[str, str]:
    """The settings of a plan's cache, as text."""
    words = spell(plan.cache).partition(":")[2]
    return dict(word.split("=", 1) for word in words.split(",") if word)


def bounded(plan: Plan, count: int) -> Plan:
    """The plan with a cache of `count` latent frames; a cache without a budget becomes Merge."""
    cache = plan.cache
    size: Any = {cache.bounded_by: Size(count, True)}
    if getattr(cache, cache.bounded_by, None) is None:
        return dataclasses.replace(plan, cache=Merge(**size))
    return dataclasses.replace(plan, cache=dataclasses.replace(cast(Any, cache), **size))


def largest(fits: Callable[[int], bool], most: int) -> int | None:
    """The largest number up to `most` that fits; None if none does. Larger ones take more.

    `fits` raises for numbers that are too small for a policy.
    """

    def allowed(count: int) -> bool:
        try:
            return fits(count)
        except TachyscopeError:
            return True

    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    try:
        return low if low and fits(low) else None
    except TachyscopeError:
        return None
