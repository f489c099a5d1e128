"""The definition of drawing a code, in float64 and sorted by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.sample_code.draw import Codes, Draw


def sample_code_reference(logits: Tensor, draw: Draw, to: Codes) -> None:
    """Video by video."""
    logits, place, videos = logits.double(), int(to.place), to.codes.shape[0]
    for video in range(videos):
        own = logits[video]
        if draw.guided:
            own = logits[videos + video] + draw.cfg * (own - logits[videos + video])
        own = own / draw.temperature
        cut = own.sort(descending=True).values[min(draw.top_k, len(own)) - 1]
        own = own.masked_fill(own < cut, -torch.inf)
        mass = own.softmax(0)
        before = torch.stack([mass[own > x].sum() for x in own])
        if draw.top_p < 1:
            own = own.masked_fill(before >= draw.top_p, -torch.inf)
        code = (own - to.noise[video, place, to.depth].double().log()).argmax()
        to.codes[video, place, to.depth] = code
        for row in range(video, len(to.total), videos):
            to.total[row] = to.book[code] + (to.total[row] if to.depth else 0)
