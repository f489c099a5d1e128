"""A causal language model of transformers whose attention reads its own cache by a plan.

Keys and values stay in transformers' cache, of whatever kind; an attention policy says which of
them a token of the video reads. Its index of them lies in the cache object: two videos do not meet.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any, final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tachyscope.attention import AttentionPolicy
from tachyscope.attention.dense import Dense
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import ASKED, within
from tachyscope.core.meter import summary
from tachyscope.core.plan import Plan, spell
from tachyscope.core.types import PassContext, Shape
from tachyscope.core.work import Work
from tachyscope.integrations.accelerate import Accelerated, Patches, check_options, uncompiled
from tachyscope.store import KVStore, LayerPass

NAME = "tachyscope_plan"  # of our attention among transformers', and of our part of a cache
UNSUPPORTED = ("sliding_window", "softcap", "s_aux")  # what attention functions may be given
LIMIT = 1e-2  # of the relative error to the model's own output, which may be bfloat16
PROBE = 4, 1  # tokens of a frame, and of a block, in the check at the door
TOKENS = ASKED["tokens of a pass"]

_own = AttentionInterface()["sdpa"]
_rng = torch.Generator()
_reader: ContextVar[_Reader | None] = ContextVar("reader", default=None)  # of the present pass


@final
class TransformersLm(Accelerated):
    @staticmethod
    def matches(thing: Any) -> bool:
        return isinstance(uncompiled(thing), PreTrainedModel)

    def __init__(self, thing: Any, plan: str | Plan, options: Mapping[str, Any]) -> None:
        check_options(options, "check", "tokens_per_frame")
        thing = uncompiled(thing)
        parsed = Plan.parse(plan, "tokens") if isinstance(plan, str) else plan
        self.policy, tokens = _served(parsed), options.get("tokens_per_frame", 1)
        if "tokens_per_frame" not in options and self.policy != Dense():
            raise TachyscopeError(
                f"attention={spell(self.policy)} needs to know a video frame's tokens: "
                f"give accelerate(…, tokens_per_frame=…)"
            )
        if not within(TOKENS, tokens):
            raise TachyscopeError(
                f"`tokens_per_frame` must be a whole number {TOKENS}, got {tokens!r:.80}"
            )
        self.decoder, self.patches = thing.get_decoder(), Patches()
        config = self.decoder.config
        if config.is_encoder_decoder:
            raise TachyscopeError(
                f"{type(thing).__name__} has an encoder beside its decoder, and a plan serves "
                f"decoders alone: use another model"
            )
        if NAME in (config._attn_implementation, vars(self.decoder).get(NAME)):
            raise TachyscopeError("this model is accelerated already: remove() that first")
        self.reader = self._reader(self.policy, tokens)
        self._tokens = tokens
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
        inner = self.decoder.forward
        if options.get("check", True):
            self._check(inner)
        self.patches.set(config, "_attn_implementation_internal", NAME)
        self.patches.set(self.decoder, "forward", self._forward(inner, self.policy, tokens))

    def stats(self) -> dict[str, float]:
        return summary([self.reader.work.take().row()])

    def _reader(self, policy: AttentionPolicy, tokens: int) -> _Reader:
        return _Reader(policy, tokens, self.decoder.config.num_hidden_layers)

    def _forward(self, inner: Any, policy: AttentionPolicy, tokens: int) -> Callable[..., Any]:
        """The decoder's forward, with the reader of its cache at hand."""
        names = inspect.signature(inner)

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = names.bind_partial(*args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            cache = given.get("past_key_values")
            reader = None if cache is None else vars(cache).get(NAME)
            self.reader = reader = reader or self._reader(policy, tokens)
            if _keys(cache) is not reader.keys:
                reader.take(_keys(cache))
            x = given.get("input_ids")
            x = given["inputs_embeds"] if x is None else x
            known = 0 if cache is None else int(cache.get_seq_length())
            reader.begin(known, x.shape[1], given.get("attention_mask"))
            before = _reader.set(reader)
            try:
                out = inner(*args, **kwargs)
            finally:
                _reader.reset(before)
            if cache is None:
                cache = getattr(out, "past_key_values", None)
            if cache is not None:
                vars(cache)[NAME], reader.keys = reader, _keys(cache)
            return out

        outside_graphs: Callable[..., Any] = torch.compiler.disable(forward)
        return outside_graphs

    @torch.no_grad()
    def _check(self, inner: Any) -> None:
        """Raise unless a plan that reads everything makes what the model's own attention makes."""
        decoder, config = self.decoder, self.decoder.config
        weight = decoder.get_input_embeddings().weight
        if weight.device.type == "meta":
            return  # offloaded layer by layer: its weights are not here now
        frame, block = PROBE
        ids = torch.arange(2 * frame + 1, device=weight.device)[None] * 7 % weight.shape[0]
        own = inner(input_ids=ids, use_cache=False)[0][:, -1].float()
        policy = Plan.parse(f"dense attention=ann:read=1,block={block},order=time").attention
        patches, out = Patches(), None
        patches.set(config, "_attn_implementation_internal", NAME)
        forward = self._forward(inner, policy, frame)
        try:
            for part in ids.split((frame, frame, 1), 1):
                cache = None if out is None else out.past_key_values
                out = forward(input_ids=part, past_key_values=cache, use_cache=True)
        finally:
            patches.undo()
        assert out is not None
        served, cache = self.reader.served, getattr(out, "past_key_values", None)
        self.reader = self._reader(self.policy, self._tokens)
        what = type(decoder).__name__
        if any(getattr(cache, "is_sliding", ())):
            raise TachyscopeError(_unlike(what, "layers of a sliding window, which are short"))
        if len(served) != config.num_hidden_layers or not getattr(cache, "is_croppable", False):
            raise TachyscopeError(
                _unlike(what, "layers without a cache of keys and values (a recurrent state)")
            )
        error = float((out[0][:, -1].float() - own).norm() / own.norm())
        if not error <= LIMIT:
            raise TachyscopeError(
                f"the plan's whole attention differs from {what}'s own by {error:.1e} of its "
                f"length, {LIMIT:g} is allowed: its attention is not plain and causal"
            )


class _Reader:
    """How one video's cache is read: an index a layer, of the frames that are complete.

    All that is there after the first pass is a prompt, which is always read; so is the frame under
    way. Frames between are for the policy to choose from.
    """

    def __init__(self, policy: AttentionPolicy, tokens: int, layers: int) -> None:
        self.policy, self.tokens, self.layers = policy, tokens, layers
        self.dense = policy == Dense()
        self.work = Work()
        self.keys: Tensor | None = None  # the first layer's, as the last pass left them
        self.known = self.now = 0  # entries before this pass, and its own
        self.reset()

    def reset(self) -> None:
        self.shape: Shape | None = None
        self.prompt = self.past = 0
        self.left_padding: tuple[int, ...] = ()
        self.log_count = torch.empty(0, 0, 0)
        self.indexes: dict[int, _Index] = {}
        self.served: set[int] = set()  # layers of the present pass

    def take(self, keys: Tensor | None) -> None:
        """The host's keys are other tensors than the last pass left: cropped, or other rows."""
        if keys is None or self.keys is None or keys.data_ptr() != self.keys.data_ptr():
            self.reset()

    def begin(self, known: int, tokens: int, mask: Any) -> None:
        """A pass over so many tokens starts, behind entries that are known."""
        self.served = set()
        self.known, self.now = known, tokens
        if not self.prompt or known < self.prompt:
            self.reset()
            self.prompt, self.left_padding = known + tokens, _left_padding(mask, known + tokens)
        else:  # the frames that are complete, without those that the host took back
            self.past = known - (known - self.prompt) % self.tokens

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Any
    ) -> tuple[Tensor, None]:
        """As transformers' attention functions: q [B, H, S, D], k and v [B, Hkv, n, D]."""
        layer, end = module.layer_idx, self.known + self.now
        if self.shape is None:
            self.shape = Shape(
                self.layers, q.shape[1], k.shape[1], q.shape[3], q.shape[1] * q.shape[3],
                (1, self.tokens), token_by_token=True, batch=q.shape[0],
            )  # fmt: skip
            self.policy.check(self.shape, self.prompt, None)
        if not self.served:
            self.work.add_tokens(self.shape, self.now, self.known, self.known)
        self.served.add(layer)
        if self.dense or not self.past:
            queries = q.shape[0] * q.shape[1] * self.now
            self.work.add_pairs(queries * self.known + queries * (self.now + 1) // 2, q.shape[3])
            out: tuple[Tensor, None] = _own(module, q, k, v, mask, **options)
            return out
        if torch.is_grad_enabled() and q.requires_grad:
            raise TachyscopeError(
                "accelerated attention has no gradients: call the model under torch.no_grad()"
            )
        by = (options.get("scaling") or q.shape[3] ** -0.5) * math.sqrt(q.shape[3])
        with torch.inference_mode():
            p = self._layer_pass(layer, k[:, :, :end], v[:, :, :end])  # a static one has more
            read = self.policy.attend(p, q * by if abs(by - 1) > 1e-6 else q)
            read = read.transpose(1, 2).contiguous()
        return (read if torch.is_inference_mode_enabled() else read.clone()), None

    def _layer_pass(self, layer: int, k: Tensor, v: Tensor) -> LayerPass:
        """What the policy is given: the host's entries and our index of them, up to date."""
        shape, entries, index = self.shape, k.shape[2], self.indexes.setdefault(layer, _Index())
        assert shape is not None
        if entries > index.slots:
            slots = entries + entries // 4 + shape.tokens_per_frame
            index.grow(self.policy, shape, slots, k.device)
        if self.log_count.shape[2] < index.slots:
            self.log_count = torch.zeros(shape.batch, 1, index.slots, device=k.device)
            for row, pads in enumerate(self.left_padding):
                self.log_count[row, :, :pads] = -math.inf
        ctx = PassContext(
            shape, layer, 0, self.past, self.known - self.past, self.now, 0, 1, (),
            prompt=self.prompt, left_padding=self.left_padding, plain=not any(self.left_padding),
            total=self.known,
        )  # fmt: skip
        store = KVStore(k, v, self.log_count, k.new_empty(0), own={"attention": index.own})
        p = LayerPass(ctx, store, self.work, lambda keys, _: keys, _rng)
        if index.past != self.past:
            self.policy.build_index(p, self.past, index.past if index.past < self.past else 0)
            index.past = self.past
        return p


class _Index:
    """A policy's tensors beside one layer's entries, and how many of these it has seen."""

    def __init__(self) -> None:
        self.own: dict[str, Tensor] = {}
        self.slots = self.past = 0

    def grow(self, policy: AttentionPolicy, shape: Shape, slots: int, device: Any) -> None:
        made = policy.tensors(shape, slots, device)
        larger = {name: x for name, x in made.items() if isinstance(x, Tensor)}
        if self.slots:
            policy.grow(self.own, larger, self.past)
        else:
            self.own = larger
        self.slots = slots


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers' layers call for attention."""
    reader = _reader.get()
    if reader is None:  # of another part of the model
        out: tuple[Tensor, None] = _own(module, query, key, value, attention_mask, **options)
        return out
    if odd := [name for name in UNSUPPORTED if options.get(name) is not None]:
        raise TachyscopeError(_unlike(type(module).__name__, f"attention with {odd[0]}"))
    return reader.attend(module, query, key, value, attention_mask, options)


def _keys(cache: Any) -> Tensor | None:
    layers = getattr(cache, "layers", None)
    return getattr(layers[0], "keys", None) if layers else None


def _left_padding(mask: Any, entries: int) -> tuple[int, ...]:
    """Empty entries before each row, of the mask that transformers was given."""
    if isinstance(mask, dict):  # by kind of layer, of which there is one
        mask = mask.get("full_attention")
    if mask is None:
        return ()
    seen = mask
    if isinstance(mask, Tensor) and mask.dim() == 4:  # made beforehand: of the newest query
        seen = mask[:, 0, -1]
        seen = seen if seen.dtype == torch.bool else seen >= 0
    if not isinstance(seen, Tensor) or seen.dim() != 2:
        raise TachyscopeError(
            f"an accelerated model takes an attention_mask [batch, tokens] of padding on the left, "
            f"got a {type(mask).__name__}: leave it out"
        )
    rows = seen[:, :entries].long()
    if bool((rows.diff(dim=1) < 0).any()):
        raise TachyscopeError(
            "an accelerated model takes padding on the left alone, got an attention_mask with "
            "gaps: set the tokenizer's padding_side='left'"
        )
    return tuple((entries - rows.sum(1)).tolist())


def _served(plan: Plan) -> AttentionPolicy:
    """The plan's attention policy; raises for what transformers' own cache and loop decide."""
    stock = Plan.parse("dense", "tokens")
    ways = {
        "cache": "here transformers keeps the entries: use ts.token_adapter",
        "store": "here transformers keeps the entries: use ts.token_adapter",
        "passes": "drafts are generate(custom_generate=ts.drafts(tokens_per_frame=…)), and a plan "
        "here is its attention, as 'dense attention=ann:read=0.3,order=time'",
        "replay": "it acts outside attention: use ts.token_adapter",
    }
    for question, way in ways.items():
        if plan[question] != stock[question]:
            raise TachyscopeError(f"{question}={spell(plan[question])} is not served: {way}")
    if plan.attention.reorders:
        raise TachyscopeError(
            f"attention={spell(plan.attention)} puts entries in another order, and those of "
            f"transformers' cache stay: add order=time"
        )
    if plan.attention.wants_poses:
        raise TachyscopeError(
            f"attention={spell(plan.attention)} needs a camera's poses, which a language model has "
            f"none of: use attention=ann"
        )
    return plan.attention


def _unlike(what: str, has: str) -> str:
    return f"{what} has {has}, and a plan reads whole caches: use a model of plain causal attention"
