"""One layer's KV cache: fixed tensors, finished chunks first, the present chunk right behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.core.ranks import alone
from tachyscope.core.types import PassContext, Rope, Shape
from tachyscope.kernels.codes import Past
from tachyscope.kernels.entries import take
from tachyscope.kernels.merge import Entries, join_entries, merge_entries
from tachyscope.kernels.rotary import apply_rotary
from tachyscope.kernels.slots import permute, shift
from tachyscope.store.codec import Codec
from tachyscope.store.host_bank import HostBank

# unrotated keys [B, Hkv, n, D] and their positions -> rotated keys
Rotate = Callable[[Tensor, Tensor], Tensor]
# consecutive slots, the same in every row of the batch or a slice for each row
Run = slice | Sequence[slice]


class PerSlot(NamedTuple):
    """A policy's tensor with slots in dimension 2, which is moved with the entries."""

    tensor: Tensor


# a policy's tensors of a layer, by name
Tensors = Mapping[str, Tensor | PerSlot]


@dataclass(slots=True)
class KVStore:
    """Keys and values of C slots, and the tensors of policies.

    k, v       [B, Hkv, C, D]       rotated keys, and values; without the entries that a bank holds
                                    as float8 codes (`HostBank.coded_entries`)
    log_count  [B, Hkv or 1, C]     log of the number of entries merged into one, less half the
                                    noise of its code; -inf: an empty slot, 0: not written yet
    pos        [B, Hkv or 1, C, 3]  (t, y, x)
    unrotated  [B, Hkv, C, D]       keys before RoPE, if the cache policy moves keys; else None
    scales     [B, Hkv, C / g, ..]  of k, v and unrotated, by name, if these are codes; g slots
                                    share a scale
    present    [B, Hkv, S, D]       the present chunk's k, v and unrotated, by name, if the past's
                                    are codes
    square     [B, Hkv, D]          mean square of the last pass's queries, if codes are coarse
                                    enough for their noise to matter (`Codec.noise`); else None
    own        tensors of policies, by question and name
    bank       the offloaded past, if the cache policy has one; else None
    scratch    tensors that an attention policy reuses in a chunk's later passes; no state

    Slots before `ctx.past` are the past; a pass writes behind them. Where the store has codes, a
    chunk is encoded when it is final (`append`), and moved as codes from then on.
    """

    k: Tensor
    v: Tensor
    log_count: Tensor
    pos: Tensor
    unrotated: Tensor | None = None
    scales: dict[str, Tensor] = field(default_factory=dict)
    present: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    per_slot: frozenset[tuple[str, str]] = frozenset()
    bank: HostBank | None = None
    scratch: tuple[Tensor, ...] = ()
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    square: Tensor | None = None

    @classmethod
    def empty(
        cls,
        shape: Shape,
        slots: int,
        heads: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        unrotated: bool = False,
        codecs: Mapping[str, Codec],
        bank: HostBank | None = None,
        declared: Mapping[str, Tensors],
    ) -> KVStore:
        """A store without entries; `heads` of log_count and pos, 1 if all heads keep the same."""
        names = ("k", "v", "unrotated") if unrotated else ("k", "v")
        coded = 0 if bank is None else bank.coded_entries(slots - shape.max_pass_tokens)
        kv, group = (shape.batch, shape.kv_heads, slots - coded), (shape.batch, heads, slots)
        # torch's default dtype belongs to the caller
        float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        held, scales, present = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        now = (*kv[:2], shape.max_pass_tokens, shape.head_dim)
        for name in names:
            codec = codecs.get(name)
            if codec is None:
                held[name] = torch.zeros(*kv, shape.head_dim, dtype=dtype, device=device)
                continue
            width, size = codec.width(shape.head_dim), codec.scale_size(shape.head_dim)
            held[name] = torch.zeros(*kv, width, dtype=codec.dtype, device=device)
            scales[name] = torch.zeros(
                *kv[:2], -(-slots // codec.group), *size, dtype=codec.scale_dtype, device=device
            )
            present[name] = torch.zeros(now, dtype=dtype, device=device)
        own, per_slot = dict[str, dict[str, Tensor]](), set()
        for question, tensors in declared.items():
            own[question] = {}
            for name, x in tensors.items():
                own[question][name] = x.tensor if isinstance(x, PerSlot) else x
                if isinstance(x, PerSlot):
                    per_slot.add((question, name))
        weights, pos = torch.zeros(group, **float32), torch.zeros(*group, 3, **float32)
        noisy = "k" in codecs and codecs["k"].noisy
        square = torch.zeros(*kv[:2], shape.head_dim, **float32) if noisy else None
        return cls(
            held["k"], held["v"], weights, pos, held.get("unrotated"), scales, present, own,
            frozenset(per_slot), bank, (), codecs, square,
        )  # fmt: skip

    @property
    def slots(self) -> int:
        return self.pos.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.present["k"].dtype if self.present else self.k.dtype

    # ---- what is held

    def entries(self) -> dict[str, Tensor]:
        """The tensors with slots in dimension 2, by name; without those of policies."""
        tensors = {"k": self.k, "v": self.v, "log_count": self.log_count, "pos": self.pos}
        if self.unrotated is not None:
            tensors["unrotated"] = self.unrotated
        return tensors | {f"{name}_scale": x for name, x in self.scales.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors on the device that a snapshot holds, by name."""
        own = {f"{key}.{name}": x for key, group in self.own.items() for name, x in group.items()}
        bank = {} if self.bank is None else self.bank.tensors
        return self.entries() | own | {f"bank.{name}": x for name, x in bank.items()}

    def host_tensors(self) -> dict[str, Tensor]:
        """The tensors in host memory that a snapshot holds, by name."""
        bank = {} if self.bank is None else self.bank.host
        return {f"host.{name}": x for name, x in bank.items()}

    def buffers(self) -> dict[str, Tensor]:
        """The tensors on the device that a snapshot leaves out, by name."""
        bank = {} if self.bank is None else self.bank.work
        present = {f"present.{name}": x for name, x in self.present.items()}
        if self.square is not None:
            present["square"] = self.square
        return present | {f"bank.{name}": x for name, x in bank.items()}

    def bytes(self, entries: int | None = None) -> int:
        """Bytes of the tensors on the device, or of them the share of `entries`."""
        share = 1.0 if entries is None else min(1.0, entries / self.slots)
        by_slot = self.entries().keys() | {f"{question}.{name}" for question, name in self.per_slot}
        total = sum(x.nbytes for x in self.buffers().values()) + 0.0
        for name, x in self.tensors().items():
            total += share * x.nbytes if name in by_slot else x.nbytes
        return round(total)

    @property
    def stored_share(self) -> float:
        """Bytes of keys and values over those that they would take in the model's dtype."""
        held = [x for x in (self.k, self.v, self.unrotated) if x is not None]
        taken = sum(x.nbytes for x in (*held, *self.scales.values(), *self.present.values()))
        codes = () if self.bank is None else self.bank.resident_codes
        whole = sum(x.numel() * self.dtype.itemsize for x in (*held, *codes))
        return (taken + sum(x.nbytes for x in codes)) / whole

    def _moved(self) -> Iterator[tuple[Tensor, int]]:
        """The tensors that move with entries, and the slots of each of their rows."""
        for name, x in self.entries().items():
            codec = self.codecs.get(name.removesuffix("_scale")) if "_scale" in name else None
            yield x, 1 if codec is None else codec.group
        for question, name in sorted(self.per_slot):
            yield self.own[question][name], 1

    # ---- a pass

    def write(
        self,
        ctx: PassContext,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        rope: Rope,
    ) -> Tensor:
        """Write a pass's keys and values [B, Hkv, S, D] behind the past; the rotated keys."""
        past, end = ctx.past, ctx.end
        coded = 0 if self.bank is None else self.bank.coded_entries(past)
        slots, now = slice(past + ctx.start, end), slice(past + ctx.start - coded, end - coded)
        held: Mapping[str, Tensor] = {"k": self.k, "v": self.v}
        if self.present:
            held, now = self.present, slice(ctx.start, end - past)
            for name, x in self.present.items():
                # a prompt, or latents that are prefilled again, may be longer than a chunk
                if (more := end - past - x.shape[2]) > 0:
                    self.present[name] = F.pad(x, (0, 0, 0, more))
        rotated = apply_rotary(held["k"][:, :, now], k, *cos_sin, rope)
        held["v"][:, :, now] = v
        self.pos[:, :, slots] = pos
        if self.unrotated is not None:
            (self.present or {"unrotated": self.unrotated})["unrotated"][:, :, now] = k
        return rotated

    def now(self, ctx: PassContext) -> tuple[Tensor, Tensor]:
        """Keys and values of the present chunk [B, Hkv, n, D]."""
        if self.present:
            count = ctx.end - ctx.past
            return self.present["k"][:, :, :count], self.present["v"][:, :, :count]
        coded = 0 if self.bank is None else self.bank.coded_entries(ctx.past)
        now = slice(ctx.past - coded, ctx.end - coded)
        return self.k[:, :, now], self.v[:, :, now]

    def past(self, end: int) -> Past:
        """Past entries before slot `end` as kernels read them: vectors, or codes with scales."""
        used = slice(0, end)
        if self.codecs and not self.codecs["k"].directional:  # kernels cannot read such codes
            return Past(self.vectors("k", used), self.vectors("v", used))
        k, v = self.k[:, :, used], self.v[:, :, used]
        if not self.scales:
            return Past(k, v)
        return Past(k, v, self.scales["k"][:, :, used], self.scales["v"][:, :, used])

    def read(
        self, ctx: PassContext, *runs: Run, log_count: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and log-weights of runs of slots, as `attention` takes them.

        One run is a view; several are concatenated, and codes are decoded, into temporary memory.
        """
        if len(runs) == 1 and isinstance(runs[0], slice) and not self.scales:
            run = runs[0]
            weights = None if log_count is None else log_count[:, :, run]
            return self.k[:, :, run], self.v[:, :, run], weights
        if self.scales:
            k, v = (_join([self._decoded(name, ctx, run) for run in runs]) for name in ("k", "v"))
        else:
            k, v = (_join([_rows(x, run) for run in runs]) for x in (self.k, self.v))
        return k, v, None if log_count is None else _join([_rows(log_count, run) for run in runs])

    def keys(self, ctx: PassContext) -> Tensor:
        """Rotated keys of the past and the present chunk [B, Hkv, end, D], decoded if codes."""
        if self.bank is not None:
            return self.bank.keys(self, ctx)
        if not self.scales:
            return self.k[:, :, : ctx.end]
        return self._decoded("k", ctx, slice(0, ctx.end))

    def _decoded(self, name: str, ctx: PassContext, run: Run) -> Tensor:
        if not isinstance(run, slice):
            rows = [self._decoded(name, ctx, each)[i : i + 1] for i, each in enumerate(run)]
            return torch.cat(rows)
        now = self.present[name]
        old = slice(run.start, max(run.start, min(run.stop, ctx.past)))
        new = slice(max(run.start - ctx.past, 0), max(run.stop - ctx.past, 0))
        count = old.stop - old.start
        out = now.new_empty(*now.shape[:2], run.stop - run.start, now.shape[3])
        self._decode(name, old, out[:, :, :count])
        out[:, :, count:] = now[:, :, new]
        return out

    # ---- between chunks

    def append(self, past: int, n: int, mean_heads: Callable[[Tensor], Tensor] = alone) -> None:
        """Store the first n entries of the present chunk, which are final, behind the past."""
        new = slice(past, past + n)
        for name, x in self.present.items():
            self.put(name, new, x[:, :, :n])
        if self.square is not None:
            steps = self.scales["k"][:, :, self._grouped("k", new)]
            noise = self.codecs["k"].noise(steps, self.square)
            if self.log_count.shape[1] == 1:  # all heads share log-weights
                noise = mean_heads(noise.mean(1, keepdim=True))
            self.log_count[:, :, new] -= noise.unsqueeze(2) / 2

    def vectors(self, name: str, slots: slice) -> Tensor:
        """k, v or unrotated [B, Hkv, n, D] of stored slots: a view, or decoded codes."""
        values: Tensor = getattr(self, name)[:, :, slots]
        if not self.scales:
            return values
        size = (*values.shape[:3], self.present[name].shape[3])
        out = torch.empty(size, dtype=self.dtype, device=values.device)
        self._decode(name, slots, out)
        return out

    def _decode(self, name: str, slots: slice, out: Tensor) -> None:
        """Decode slots to `out` [B, Hkv, n, D]."""
        codec, scale = self.codecs[name], self.scales[name]
        held: Tensor = getattr(self, name)
        rows = slice(slots.start // codec.group, -(-slots.stop // codec.group))
        first = slots.start % codec.group
        codec.decode(held[:, :, slots], scale[:, :, rows], out, first)

    def _grouped(self, name: str, slots: slice) -> slice:
        """The groups of slots that share scales; the slots must be whole groups."""
        group = self.codecs[name].group
        assert slots.start % group == 0 and slots.stop % group == 0, (slots, group)
        return slice(slots.start // group, slots.stop // group)

    def directions(self, name: str, slots: slice) -> Tensor:
        """`vectors`, but as codes where these have the vectors' directions."""
        if self.codecs and not self.codecs[name].directional:
            return self.vectors(name, slots)
        values: Tensor = getattr(self, name)
        return values[:, :, slots]

    def put(self, name: str, slots: slice, x: Tensor) -> None:
        """Store k, v or unrotated [B, Hkv, n, D] in slots, encoded if the store has codes."""
        held: Tensor = getattr(self, name)[:, :, slots]
        if self.scales:
            self.codecs[name].encode(x, held, self.scales[name][:, :, self._grouped(name, slots)])
        else:
            held.copy_(x)

    def permute(self, slots: slice, order: Tensor, back: bool = False) -> None:
        """Permute keys and values of slots by order [B, Hkv, n], or by its inverse."""
        for x in (self.k, self.v):
            permute(x[:, :, slots], order, back)
        for name in ("k", "v") if self.scales else ():
            scale = self.scales[name][:, :, slots]
            permute(scale if scale.dim() == 4 else scale.unsqueeze(-1), order, back)

    def move(self, source: int, target: int, count: int) -> None:
        """Move `count` entries from slot `source` to slot `target`."""
        if source != target and count:
            for x, group in self._moved():
                shift(x, source // group, target // group, count // group)

    def gather(self, slots: slice, order: Tensor) -> None:
        """Permute entries of slots by order [B, Hkv or 1, n], with positions and log-weights."""
        for x, group in self._moved():
            span = slice(slots.start // group, slots.stop // group)
            index = order if group == 1 else order[:, :, ::group] // group
            x[:, :, span] = take(x[:, :, span], index)

    def merge(
        self, slots: slice, alike: Tensor, partner: Tensor, excess: int, newest: bool, mean: bool
    ) -> tuple[Tensor, Tensor]:
        """`merge_entries` of slots. Codes are moved unchanged; a mean is encoded again."""
        with self._open_values(slots, mean) as held:
            return merge_entries(held, alike, partner, excess, newest, mean)

    def join(self, slots: slice, source: Tensor, root: Tensor, newest: bool) -> None:
        """`join_entries` of slots by their mean; the sources' slots are empty after."""
        with self._open_values(slots, True) as held:
            join_entries(held, source, root, newest, True)

    @contextmanager
    def _open_values(self, slots: slice, mean: bool) -> Iterator[Entries]:
        """Slots as `kernels/merge` takes them, values decoded if their codes have no mean."""
        held = Entries(**{name: x[:, :, slots] for name, x in self.entries().items()})
        if not (mean and self.codecs and not self.codecs["v"].directional):
            yield held
            return
        values = self.vectors("v", slots)
        yield held._replace(v=values, v_scale=None)
        self.put("v", slots, values)

    def rotate(self, slots: slice, rotate: Rotate) -> None:
        """Rotate the unrotated keys of slots to their positions `pos`."""
        self.put("k", slots, rotate(self.vectors("unrotated", slots), self.pos[:, :, slots]))

    def truncate(self, past: int) -> None:
        """Drop all entries from slot `past` on; with past 0 also those of a bank."""
        self.log_count[:, :, past:] = 0.0
        if past == 0 and self.bank is not None:
            self.bank.clear()

    def grow(self, larger: KVStore) -> None:
        """Take over the tensors of an empty store of more slots, with this one's entries."""
        before = self.slots
        for (new, group), (old, _) in zip(larger._moved(), self._moved(), strict=True):
            new[:, :, : -(-before // group)] = old
        self.k, self.v, self.unrotated = larger.k, larger.v, larger.unrotated
        self.log_count, self.pos, self.scales = larger.log_count, larger.pos, larger.scales
        for question, name in self.per_slot:
            self.own[question][name] = larger.own[question][name]


def _rows(x: Tensor, run: Run) -> Tensor:
    if isinstance(run, slice):
        return x[:, :, run]
    return torch.cat([x[i : i + 1, :, each] for i, each in enumerate(run)])


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)
