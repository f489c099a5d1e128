"""Draw a code by stock torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.sample_code.draw import Codes, Draw


def sample_code(logits: Tensor, draw: Draw, to: Codes) -> None:
    """From logits [B, K] of a video's rows to a code a video, at the token's place in `to`."""
    place = to.place.long().view(1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if draw.guided:
        with_prompt, without = logits.chunk(2)
        logits = without + draw.cfg * (with_prompt - without)
    kept, index = (logits / draw.temperature).topk(min(draw.top_k, logits.shape[-1]))
    if draw.top_p < 1:
        mass = kept.softmax(-1).cumsum(-1)
        late = torch.nn.functional.pad(mass[:, :-1] >= draw.top_p, (1, 0))
        kept = kept.masked_fill(late, -torch.inf)
    noise = to.noise.index_select(1, place)[:, 0, to.depth]
    best = (kept - noise.gather(-1, index).log()).argmax(-1, keepdim=True)
    code = index.gather(-1, best)
    to.codes[:, :, to.depth].index_copy_(1, place, code)
    entry = to.book[code[:, 0]].repeat(len(to.total) // len(code), 1)
    to.total.copy_(to.total + entry if to.depth else entry)
