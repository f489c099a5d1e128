"""What memory a plan will take: a model's own code, run on tensors that have shapes and no data."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tachyscope.arguments import parse_plan
from tachyscope.bounds import check
from tachyscope.cache.merge import Merge
from tachyscope.cache.window import Window
from tachyscope.errors import TachyscopeError
from tachyscope.meter import Meter
from tachyscope.models.base import VideoModel
from tachyscope.models.registry import DTYPES, MODELS, load
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.presets import PRESETS
from tachyscope.models.wan.transformer import WanCausal, wider
from tachyscope.models.wan.vae import WanVae
from tachyscope.plan import Plan, spell
from tachyscope.results import Document, document
from tachyscope.rollout import chunks_for
from tachyscope.session import Session
from tachyscope.types import LayerCache, Mlp, PassContext, Shape, Size

# published models by size: to know what they take, no checkpoint is needed
SIZES = {
    "wan_1.3b": WanConfig(),
    "wan_5b": WanConfig(
        dim=3072, ffn_dim=14336, heads=24, in_channels=48, size=(44, 80), stride=(4, 16, 16)
    ),
    "wan_14b": WanConfig(dim=5120, ffn_dim=13824, layers=40, heads=40),
}
# of a GPU's memory; the rest is left to CUDA's own and to gaps between tensors
ROOM = 0.95


class Shapes(Session):
    """A session's layers on the meta device, grown as a rollout of its length would grow them.

    A cache without a bound is taken to merge nothing, as it does on CUDA, where emptied slots stay
    in use.
    """

    def reset(self) -> None:
        shape, cache = self.shape, self.plan.cache
        self.prompt, self.past, self.now = max(self.lengths, default=0), 0, shape.max_pass_tokens
        self.left_padding = tuple(self.prompt - n for n in self.lengths)
        self._origin = torch.zeros(shape.batch, 1, 1, 1, dtype=torch.float64, device=self.device)
        slots = self.slots_for(self.lengths)
        self.layers = [self._empty_layer(slots)]  # one stands for all
        entries = self.prompt + (self.latent_frames or 0) * shape.tokens_per_frame
        step = 1 if shape.token_by_token else shape.max_pass_tokens
        while cache.grows and (slots := self.layers[0].k.shape[2]) < entries:
            # up to the first pass that finds no room
            self.past = self.prompt + (slots - self.prompt) // step * step
            self._make_room(self.moment()._replace(start=0))
        slots = self.layers[0].k.shape[2]
        self.past = max(0, min(slots, entries) - shape.max_pass_tokens)

    def moment(self) -> PassContext:
        """The first pass over the next chunk, in the last layer."""
        shape = self.shape
        tokens = 1 if shape.token_by_token else shape.max_pass_tokens
        return PassContext(
            shape, shape.layers - 1, 1, self.past, shape.max_pass_tokens - tokens, tokens,
            shape.passes - 1, shape.passes, (0.0,) * shape.chunk, self.prompt, self.left_padding,
            not self.plan.cache.merges,
        )  # fmt: skip

    def tensors(self) -> dict[str, int]:
        """Bytes of all layers, by the tensors' names."""
        (layer,) = self.layers
        held = layer.entries() | layer.extra
        return {name: self.shape.layers * _bytes([x]) for name, x in held.items()}

    def reading(self) -> int:
        """Bytes that one layer's attention works with, beside what goes in and out."""
        plan, ctx, shape = self.plan, self.moment(), self.shape
        q = self._empty(shape.heads, ctx.tokens)
        found = peak(lambda: plan.attention.attend(q, self.layers[0], ctx, Meter()))
        if plan.text is None:
            return found
        k, v = (self._empty(shape.heads, shape.text) for _ in range(2))
        policy, text = plan.text, plan.text.prepare(k, v, (shape.text,) * shape.batch)
        return max(found, peak(lambda: policy.attend(q, text, Meter())))

    def committing(self) -> int:
        """Bytes that bringing one layer within its budget works with, or indexing it."""
        plan, layer, ctx, shape = self.plan, self.layers[0], self.moment(), self.shape
        n = shape.chunk * shape.tokens_per_frame

        def commit(layer: LayerCache) -> None:
            plan.cache.commit(layer, ctx._replace(start=0), n, self._rotate, Meter())

        return max(
            peak(lambda: plan.attention.restore_order(layer, ctx, self.past)),
            peak(lambda: commit(layer)),
            peak(lambda: plan.attention.build_index(layer, ctx, self.past, Meter())),
        )

    def _empty(self, heads: int, tokens: int) -> Tensor:
        size = (self.shape.batch, heads, tokens, self.shape.head_dim)
        return torch.empty(size, dtype=self.dtype, device=self.device)


class Passing:
    """Stands in for a session: attention costs nothing here, since it is measured by itself."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty_like(q)

    def cross(self, layer: int, q: Tensor) -> Tensor:
        return torch.empty_like(q)

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        return fn(x)


class Live(TorchDispatchMode):
    """Adds up what tensors hold while they live, and remembers the most."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Any = WeakIdKeyDictionary()
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._meet((args, kwargs), counted=False)  # what comes in was there before
        out = func(*args, **(kwargs or {}))
        self._meet(out, counted=True)
        return out

    def _meet(self, tree: Any, counted: bool) -> None:
        for x in tree_leaves(tree):
            if isinstance(x, Tensor) and x.is_meta:
                storage = x.untyped_storage()
                if storage not in self.known:
                    self.known[storage] = True
                    if counted:
                        self._add(storage.nbytes())
                        weakref.finalize(storage, self._add, -storage.nbytes())

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


class Fused(TorchFunctionMode):
    """Attention as fused kernels compute it: without a matrix of scores."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))


def peak(call: Callable[[], object]) -> int:
    """The most bytes that a call on meta tensors holds at once, besides what it was given.

    Where a call asks for data there is none, and what it held until then is the answer.
    """
    with torch.no_grad(), Live() as live, Fused():
        try:
            call()
        except (NotImplementedError, RuntimeError) as fault:
            if "meta" not in str(fault).lower():
                raise
    most: int = live.most
    return most


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes by what takes them: what stays, and what comes and goes."""

    weights: int
    decoder: int  # its weights, and what it keeps between chunks
    cache: dict[str, int]  # by tensor
    prompt: int
    activations: int  # of a pass, attention left out
    attention: int
    committing: int
    decoding: int
    beside: bool  # whether a chunk is decoded while the next is made

    @property
    def stays(self) -> int:
        return self.weights + self.decoder + sum(self.cache.values()) + self.prompt

    @property
    def making(self) -> int:
        """The largest of what comes and goes by turns while a chunk is made."""
        return max(self.activations + self.attention, self.committing)

    @property
    def peak(self) -> int:
        """What stays, making a chunk, and decoding beside it or after."""
        if self.beside:
            return self.stays + self.making + self.decoding
        return self.stays + max(self.making, self.decoding)

    @property
    def undecoded(self) -> int:
        """The peak where nothing is shown."""
        return self.stays - self.decoder + self.making


def sized(name: str, weights: str | Path | None = None, dtype: str = "bfloat16") -> VideoModel:
    """A model whose weights are shapes alone, by its name or its published size.

    Where the name stands for an architecture, the checkpoint is read for its shapes.
    """
    if dtype not in DTYPES:
        raise TachyscopeError(f"no dtype {dtype!r}; there are: {', '.join(DTYPES)}")
    published = SIZES | {name: preset.config for name, preset in PRESETS.items()}
    if name in published:
        if weights is not None:
            raise TachyscopeError(f"the size of {name} is known: leave `weights` out")
        return _wan(name, published[name], DTYPES[dtype])
    if name not in MODELS:
        raise TachyscopeError(f"no model {name!r}; there are: {', '.join((*MODELS, *SIZES))}")
    return on_meta(load(name, weights, dtype=dtype))


M = TypeVar("M", bound=VideoModel)


def on_meta(model: M) -> M:
    """A copy of the model whose tensors are shapes alone."""
    found = copy.copy(model)
    found.device = torch.device("meta")
    if isinstance(found, WanModel):
        found.decoder = copy.deepcopy(found.decoder)
        for part in _modules(found.decoder):
            part.to("meta")
        with torch.device("meta"):  # made anew: a copy would first take the weights' memory again
            found.model = WanCausal(found.config).cast(found.dtype)
    else:
        assert isinstance(found, VilaModel)
        found.model = copy.deepcopy(found.model).to("meta")
    return found


def _wan(name: str, config: WanConfig, dtype: torch.dtype) -> WanModel:
    with torch.device("meta"):
        model = WanCausal(config).cast(dtype)
        decoder = WanVae.sized(config.in_channels, dtype)
    return WanModel(name, model, None, decoder)


def need(
    model: VideoModel,
    plan: Plan | str,
    *,
    frames: int,
    size: tuple[int, int] | None = None,
    prompt: str = "",
) -> Need:
    """What a rollout of so many frames will take, for a model on the meta device.

    The prompt matters in models that hold it in their cache.
    """
    session = _shapes(model, plan, frames, size, prompt)
    return _need(session, _parts(model, session.shape, session.prompt))


def _shapes(
    model: VideoModel,
    plan: Plan | str,
    frames: int,
    size: tuple[int, int] | None,
    prompt: str,
) -> Shapes:
    shape = model.shape(size)
    # one that is read by cross-attention fills no entries
    lengths = () if shape.text else model.encode_prompt(prompt).lengths
    latents = chunks_for(model, shape.chunk, 0, frames) * shape.chunk
    return Shapes(
        shape, parse_plan(model, plan), model.rope(shape), latent_frames=latents, lengths=lengths,
        device="meta", dtype=model.dtype,
    )  # fmt: skip


def _need(session: Shapes, parts: Mapping[str, Any]) -> Need:
    return Need(
        cache=session.tensors(),
        attention=session.reading(),
        committing=session.committing(),
        **parts,
    )


def _parts(model: VideoModel, shape: Shape, prompt: int) -> dict[str, Any]:
    """What hangs on the model and the size, and on no plan."""
    assert isinstance(model, WanModel | VilaModel)
    # as a rollout on a GPU does it
    found = {"weights": _bytes(model.model.parameters()), "beside": model.overlaps_decode}
    if isinstance(model, WanModel):
        return found | _wan_parts(model, shape)
    return found | _vila_parts(model, shape, prompt)


def _wan_parts(model: WanModel, shape: Shape) -> dict[str, int]:
    c = model.config
    frames = shape.chunk + shape.rolling_frames  # of a pass
    high, wide = shape.grid[0] * c.patch[1], shape.grid[1] * c.patch[2]
    size = (shape.batch, c.in_channels, frames, high, wide)
    x = torch.empty(size, dtype=wider(model.dtype), device="meta")
    t = torch.empty(shape.batch, frames, device="meta")
    told = torch.empty(frames, dtype=torch.int64, device="meta") if c.actions else None
    context = torch.empty(shape.batch, c.text_len, c.text_dim, device="meta")
    with torch.no_grad():
        keys, values = model.model.keys_values(context)
    features: dict[str, Tensor] = {}
    decoding, held = 0, 0
    if model.decoder is not None:
        decoder = model.decoder
        for _ in range(2):  # the first chunk has nothing before it
            decoding = max(decoding, peak(lambda: decoder(x[:1, :, : shape.chunk], features)))
        held = sum(_bytes(part.parameters()) for part in _modules(decoder))
    return {
        "prompt": _bytes((*keys, *values)),
        "activations": peak(lambda: model.model(Passing(), x, t, told)),
        "decoder": held + _bytes(features.values()),
        "decoding": decoding,
    }


def _vila_parts(model: VilaModel, shape: Shape, prompt: int) -> dict[str, int]:
    c = model.config
    x = torch.empty(shape.batch, max(prompt, 1), c.hidden, dtype=model.dtype, device="meta")
    codes = torch.empty(1, 1, *c.grid, c.depth, dtype=torch.int64, device="meta")
    return {
        "prompt": 0,  # in the cache
        "activations": peak(lambda: model.model.trunk(Passing(), x)),
        "decoder": 0,  # among the weights
        "decoding": peak(lambda: model.model.vae.decode(model.model.vae.quantizer.sum(codes[0]))),
    }


def fit(
    model: VideoModel,
    plan: Plan | str,
    *,
    frames: int,
    size: tuple[int, int] | None = None,
    prompt: str = "",
    gpu_gb: float | None = None,
    command: str = "",
) -> Document:
    """Whether a plan's peak fits a GPU; if not, the largest budget that would. A document."""
    check("frames", frames)
    if gpu_gb is not None:
        check("gpu_gb", gpu_gb)
    parsed = parse_plan(model, plan)
    session = _shapes(model, parsed, frames, size, prompt)
    shape = session.shape
    parts = _parts(model, shape, session.prompt)
    found = _need(session, parts)
    bytes_of = dataclasses.asdict(found)
    beside = bytes_of.pop("beside")
    row: Document = {
        "name": "plan" if isinstance(plan, Plan) else plan,
        "plan": str(parsed),
        "model": model.name,
        "frames": frames,
        "grid": list(shape.grid),
        "dtype": str(model.dtype).removeprefix("torch."),
        **{f"{key}_bytes": value for key, value in bytes_of.items()},
        "decoding_beside": beside,
        "peak_bytes": found.peak,
    }
    if gpu_gb is not None:
        room = ROOM * gpu_gb * 1e9
        row |= {"gpu_gb": gpu_gb, "fits": found.peak <= room}
        if not row["fits"]:

            def fits(count: int) -> bool:
                trial = _shapes(model, bounded(parsed, count), frames, size, prompt)
                stays = sum(parts[name] for name in ("weights", "decoder", "prompt"))
                if stays + sum(trial.tensors().values()) > room:
                    return False
                return _need(trial, parts).peak <= room

            best = largest(fits, session.latent_frames or 0)
            row["largest_budget"] = best and spell(bounded(parsed, best).cache)
    return document("bench-fit", [row], command)


def bounded(plan: Plan, count: int) -> Plan:
    """The plan with a cache of so many latent frames; one without a budget merges instead."""
    cache = plan.cache
    if isinstance(cache, Window) or (isinstance(cache, Merge) and cache.budget is not None):
        return dataclasses.replace(plan, cache=dataclasses.replace(cache, budget=Size(count, True)))
    return dataclasses.replace(plan, cache=Merge(budget=Size(count, True)))


def largest(fits: Callable[[int], bool], most: int) -> int | None:
    """The largest number up to `most` that fits, where more takes more; some may be refused."""

    def allowed(count: int) -> bool:
        try:
            return fits(count)
        except TachyscopeError:
            return True  # fewer than a policy must keep, or can read a share of

    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    try:
        return low if low and fits(low) else None
    except TachyscopeError:
        return None


def lines(found: Document) -> list[str]:
    """A document of `fit` as a reader wants it."""
    (row,) = found["rows"]
    stays = {
        "weights": row["weights_bytes"],
        "decoder, and what it keeps": row["decoder_bytes"],
        **{f"cache: {name}": size for name, size in row["cache_bytes"].items()},
        "prompt's keys and values": row["prompt_bytes"],
    }
    turns = [
        ("a pass's activations", row["activations_bytes"]),
        ("with it, attention", row["attention_bytes"]),
        ("or the cache's upkeep", row["committing_bytes"]),
        ("beside, decoding" if row["decoding_beside"] else "or decoding", row["decoding_bytes"]),
    ]
    high, wide = row["grid"]
    out = [
        f"{row['model']} {row['dtype']}, {row['frames']} frames",
        f"{high}x{wide} tokens a latent frame",
        row["plan"],
        *(_line(name, size) for name, size in stays.items() if size),
        _line("stays", sum(stays.values())),
        *(_line(name, size) for name, size in turns),
        _line("peak", row["peak_bytes"]),
    ]
    if "fits" not in row:
        return out
    gpu = f"{row['gpu_gb']:g} GB, of which {1 - ROOM:.0%} are left to CUDA"
    if row["fits"]:
        return [*out, f"fits {gpu}"]
    budget = row["largest_budget"]
    advice = f"use cache={budget}" if budget else "no budget of the cache would: shrink the size"
    return [*out, f"does not fit {gpu}: {advice}"]


def _line(name: str, size: int) -> str:
    return f"{name:28}{size / 1e9:9.3f} GB"


def _modules(part: object) -> list[nn.Module]:
    """The modules that a text encoder or decoder holds."""
    return [value for value in vars(part).values() if isinstance(value, nn.Module)]


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
