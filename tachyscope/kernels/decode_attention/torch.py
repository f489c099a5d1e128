"""A token's attention and its gate by stock torch; the host reads no number of the device's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tachyscope.kernels.decode_attention.step import Rotation, Scratch, Step, Window
from tachyscope.kernels.replay.torch import temporal_score
from tachyscope.kernels.token_gate import GateState, decide


def decode_attention(
    out: Tensor, qkv: Tensor, step: Step, scratch: Scratch | None = None, tokens: int = 1
) -> Tensor:
    """out [B, H * D] = attention of a token's qkv [B, (H + 2 Hkv) * D], unrotated, in a layer.

    Its key and value are put into the layer's slot, and where the step has a gate that decides
    whether the MLP behind is replayed. Of `tokens` tokens in a row, each row's one after the other
    in qkv and out [B * tokens, ...], each sees those before it; such steps have no gate.
    """
    held, (_, hkv, slots, d) = step.entries, step.entries.k.shape
    # small launches are what a graph of a small model is made of: as few as can be
    place, slot = step.place.long().view(1), held.slot.long().view(1)
    if tokens > 1:
        ahead = torch.arange(tokens, device=qkv.device)
        place, slot = place + ahead, slot + ahead
    # [B, heads, S, D]
    heads = qkv.unflatten(-1, (-1, d)).unflatten(0, (-1, tokens)).transpose(1, 2)
    q, k, v = heads.split([step.heads, hkv, hkv], 1)
    q_turned, k_turned = q, k
    if step.rotation is not None:
        both = _turn(heads[:, : step.heads + hkv], step.rotation, place)
        q_turned, k_turned = both.split([step.heads, hkv], 1)
    held.k.index_copy_(2, slot, k_turned)
    held.v.index_copy_(2, slot, v)
    if held.unrotated is not None:
        held.unrotated.index_copy_(2, slot, k)
    bias = held.log_count
    if bias is not None:
        bias = bias.clamp_min(-1e30).index_fill(2, slot, 0.0)
    keys, values, window = held.k, held.v, step.window
    if window is not None and window.whole + window.near + tokens < slots:
        index, once = _reach(window, slot)
        seen, index = _seen(window, index, slot) & once, index.clamp_min(0)
        keys, values = (x.index_select(2, index) for x in (keys, values))
        bias = None if bias is None else bias.index_select(2, index)
    else:
        seen = _seen(window, torch.arange(slots, device=q.device), slot)
    group = step.heads // hkv
    scores = torch.einsum("bkgtd,bksd->bkgts", q_turned.unflatten(1, (hkv, group)), keys)
    scores = scores.float() / math.sqrt(d)
    scores = scores if bias is None else scores + bias[:, :, None, None]
    # what no token wrote may be anything
    p = torch.where(seen[:, None, None], scores, -math.inf).softmax(-1).to(q.dtype)
    written = seen[:, 0] if tokens == 1 else seen.any(1)
    values = torch.where(written[:, None, :, None], values, 0)
    answer = torch.einsum("bkgts,bksd->btkgd", p, values)
    out.copy_(answer.reshape(out.shape))
    if step.gate is not None:
        assert tokens == 1
        mixed = step.gate.gate.score == "mixed"
        _decide((q if mixed else q_turned)[:, :, 0], k_turned[:, :, 0], step.gate, place)
    return out


def _decide(q: Tensor, k: Tensor, state: GateState, place: Tensor) -> None:
    """Whether each row replays, from q [B, H, D] and rotated k [B, Hkv, D], which is kept."""
    if state.key is not None:
        score = temporal_score(q[:, :, None], state.key.index_select(2, place))
        state.key.index_copy_(2, place, k[:, :, None])
    else:
        assert state.luck is not None
        score = state.luck.index_select(0, place).T
    decide(state, score)


def _turn(x: Tensor, r: Rotation, place: Tensor) -> Tensor:
    cos, sin = (t.index_select(1, place)[:, None] for t in (r.cos, r.sin))  # [B, 1, S, D]
    if r.interleaved:
        partner = x.unflatten(-1, (-1, 2)).roll(1, -1).flatten(-2)
    else:
        partner = x.roll(x.shape[-1] // 2, -1)
    return (x * cos + partner * sin).to(x.dtype)


def _reach(window: Window, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [C] of which the tokens at `slot` [S] may read some, and which count: each once."""
    first = torch.arange(window.whole, device=slot.device)
    last = slot[-1] - torch.arange(window.near + len(slot) - 1, device=slot.device)
    return torch.cat([first, last]), torch.cat([first >= 0, last >= window.whole])


def _seen(window: Window | None, index: Tensor, slot: Tensor) -> Tensor:
    """Which slots the tokens at `slot` [S] read: [B or 1, S, C]."""
    slot = slot.view(1, -1, 1)
    before = index <= slot
    if window is None:
        return before
    first = window.padding.view(-1, 1, 1)
    sink = (index >= first) & (index < first + window.sink)
    near = index > slot - window.near
    whole = slot + 1 <= first + window.sink + window.near
    return before & (sink | near | whole)
