"""`inspect(model)`: how much of any model's attention could be left out, seen while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.tables import format_table

IDLE = 0.01  # of a query's mass: the pairs called idle carry at most so much together
MOST = 1 << 22  # scores held at a time
ROWS = 16  # queries weighed of each head, drawn in each call
PAYS = 0.2  # of all pairs: from this idle share on a plan is worth a trial
NAMES = ("pairs", "past", "idle", "idle_past", "oldest")


@dataclass
class Seen:
    """Pairs of a query and a key, of one layer or of all."""

    calls: int = 0
    pairs: float = 0.0
    past: float = 0.0  # with keys from before the present pass
    idle: float = 0.0  # as many as carry 1 % of their query's mass together
    idle_past: float = 0.0  # of them, in the past
    oldest: float = 0.0  # as many as do, oldest first, after a first chunk that is kept

    def add(self, other: Seen) -> None:
        for name in ("calls", *NAMES):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def share(self, name: str) -> float:
        return float(getattr(self, name)) / max(self.pairs, 1.0)


@dataclass
class Inspected:
    """What `inspect` saw: `total`, `layers` by name, and in words by `print`."""

    layers: dict[str, Seen] = field(default_factory=dict)

    @property
    def total(self) -> Seen:
        total = Seen()
        for seen in self.layers.values():
            total.add(seen)
        return total

    @property
    def advice(self) -> str:
        """The plan that could pay at best: choosing costs time too, and quality is not measured."""
        total = self.total
        if not total.past:
            return (
                "no call reads keys from before its own pass: a plan has no past to leave out here"
            )
        if total.share("oldest") >= max(PAYS, 0.8 * total.share("idle_past")):
            return (
                f"a window could leave out {total.share('oldest'):.0%} of all pairs: "
                f"try 'live', or cache=window"
            )
        if total.share("idle_past") >= PAYS:
            return (
                f"reading by similarity could leave out {total.share('idle_past'):.0%} of all "
                f"pairs, a window {total.share('oldest'):.0%}: try 'fast', or attention=ann"
            )
        return "few pairs of the past are idle: try 'lossless', which leaves none out"

    def __str__(self) -> str:
        total = self.total
        if not total.calls:
            return (
                "no torch scaled_dot_product_attention was called: flash_attn, xformers and "
                "flex_attention are not seen; set the model's attention to sdpa"
            )
        rows = [
            (name, str(seen.calls), *(f"{seen.share(what):.0%}" for what in NAMES[1:]))
            for name, seen in self.layers.items()
        ]
        columns = ("layer", "calls", "past", "idle", "idle past", "oldest idle")
        first = f"{total.share('idle'):.0%} of your pairs carry {IDLE:.0%} of the mass: "
        return "\n".join([first + self.advice, *format_table(columns, rows)])


class inspect:
    """Weigh a model's attention while it runs in its own code.

        with ts.inspect(pipe) as seen:
            pipe(...)
        print(seen)

    model: a module, or a pipeline with a `transformer` or `generator`. Every call of torch's
    scaled_dot_product_attention inside it, in this thread, is seen; its results are its own.
    `queries` of each head are weighed a call; memory stays bounded at any length.
    """

    def __init__(self, model: Any, queries: int = ROWS) -> None:
        named = (getattr(model, name, None) for name in ("transformer", "generator"))
        found = [one for one in (model, *named) if isinstance(one, nn.Module)]
        if not found:
            raise TachyscopeError(
                f"inspect takes a torch module, or a pipeline with a transformer or generator, got "
                f"a {type(model).__name__}"
            )
        if queries < 1:
            raise TachyscopeError(f"`queries` must be 1 or more, got {queries}")
        self.model, self.queries = found[0], queries
        self.seen, self._inside, self._hooks = Inspected(), list[str](), list[Any]()
        self._mode, self._rng = _Calls(self), torch.Generator().manual_seed(0)

    def __enter__(self) -> Inspected:
        for name, module in self.model.named_modules():
            self._hooks += [
                module.register_forward_pre_hook(partial(self._enter, name or "model")),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        self._mode.__enter__()
        return self.seen

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, fault, at)
        while self._hooks:
            self._hooks.pop().remove()

    def _enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    @torch.no_grad()
    def call(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:  # fmt: skip
        """Weigh one call of scaled_dot_product_attention, with torch's parameters."""
        if not self._inside:
            return
        seen = self.seen.layers.setdefault(self._inside[-1], Seen())
        seen.calls += 1
        queries, keys = query.shape[-2], key.shape[-2]
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]) or torch.Size([1])
        rows = torch.randperm(queries, generator=self._rng)[: self.queries].to(query.device)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        q = query.index_select(-2, rows).expand(*lead, -1, -1).flatten(0, -3) * scale
        k = key.expand(*lead, -1, -1).flatten(0, -3)
        mask = _mask(attn_mask, rows, queries, keys)
        more = queries / len(rows)  # queries that each row represents
        for first in range(0, len(q), step := max(1, MOST // (len(rows) * keys))):
            part = torch.arange(first, min(first + step, len(q)), device=q.device)
            scores = q[part].float() @ k[part].float().mT
            if mask is not None:
                scores = scores + mask.expand(*lead, -1, -1)[torch.unravel_index(part, lead)]
            if is_causal:  # torch counts from the first key
                ahead = torch.arange(keys, device=q.device) > rows[:, None]
                scores = scores.masked_fill(ahead, -math.inf)
            seen.add(_weigh(scores, max(0, keys - queries), queries, more))


class _Calls(TorchFunctionMode):
    def __init__(self, inspector: inspect) -> None:
        super().__init__()
        self.inspector = inspector

    def __torch_function__(
        self, fn: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if fn is F.scaled_dot_product_attention:
            self.inspector.call(*args, **kwargs)
        return fn(*args, **kwargs)


def _mask(mask: Tensor | None, rows: Tensor, queries: int, keys: int) -> Tensor | None:
    """What is added to the scores [.., rows, keys]."""
    if mask is None:
        return None
    picked = mask.expand(*mask.shape[:-2], queries, keys).index_select(-2, rows)
    if picked.dtype == torch.bool:
        picked = torch.zeros_like(picked, dtype=torch.float32).masked_fill(~picked, -math.inf)
    return picked.float()


def _weigh(scores: Tensor, past: int, first: int, more: float) -> Seen:
    """Count pairs of scores [heads, rows, keys]; the first `past` keys are older, `first` kept."""
    mass = scores.softmax(-1).nan_to_num()
    visible = scores > -math.inf
    sorted_mass, order = mass.masked_fill(~visible, math.inf).sort(-1)
    idle = sorted_mass.cumsum(-1, dtype=torch.float64) <= IDLE
    old = visible[..., first:past]
    oldest = old & (mass[..., first:past].cumsum(-1, dtype=torch.float64) <= IDLE)
    counted = (visible, visible[..., :past], idle, idle & (order < past), oldest)
    return Seen(0, *(more * float(part.sum()) for part in counted))
