"""Whether frames show the surfaces of a house as they truly are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope_lab.worlds.lodge.houses import Houses
from tachyscope_lab.worlds.lodge.picture import ITEMS, SURFACES, render, see

REGION, THING = 0.03, 0.008  # shares of the picture from which a surface, a thing is judged
SMALL = 64  # pixels of the picture that surfaces are read from
NEAR = 0.14  # between colours, of red, green and blue from 0 to 1, that look alike
SHARE = 0.8  # of a surface's pixels that must look alike
DETAIL = 0.02  # root mean square of a pattern that must be there
ALIKE = 0.5  # correlation of a pattern with its truth


@dataclass(frozen=True)
class Truth:
    """What frames truly show, in SMALL x SMALL pixels."""

    picture: Tensor  # [F, 3, SMALL, SMALL]
    members: Tensor  # [F, P, SURFACES] which surface each pixel shows, as zeros and ones

    @property
    def area(self) -> Tensor:
        """The share of the picture that each surface takes: [F, SURFACES]."""
        return self.members.mean(1)


def true_surfaces(houses: Houses, pose: Tensor, time: Tensor) -> Truth:
    """What houses of F rows show from poses [F, 3] at times [F]."""
    seen = see(houses, pose, time, SMALL).flatten(1)
    members = F.one_hot(seen, SURFACES).to(pose.dtype)
    return Truth(render(houses, pose, time, SMALL), members)


def surfaces_right(pictures: Tensor, truth: Truth) -> Tensor:
    """Whether each surface is what it should be: [F, SURFACES], NaN where too little is in view.

    pictures are [F, 3, S, S] in 0..1. A surface is right when most of its pixels have the colour of
    the truth's and its pattern, where it has one, correlates with the truth's.
    """
    small = F.interpolate(pictures, size=(SMALL, SMALL), mode="area")
    near = ((small - truth.picture).norm(dim=1) < NEAR).flatten(1).to(small)
    count = truth.members.sum(1).clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        """Of values [F, P] over each surface."""
        return (values[:, None] @ truth.members)[:, 0] / count

    ours, theirs = _detail(small), _detail(truth.picture)
    both = mean((ours * theirs).sum(1))
    own, true = mean(ours.square().sum(1)), mean(theirs.square().sum(1))
    alike = both >= ALIKE * (own * true).clamp(min=1e-12).sqrt()
    right = (mean(near) >= SHARE) & (alike | (true.sqrt() < DETAIL))
    least = torch.full((SURFACES,), REGION, device=pictures.device)
    least[ITEMS:] = THING
    return right.float().masked_fill(truth.area < least, math.nan)


def _detail(picture: Tensor) -> Tensor:
    """What a 5 by 5 mean takes away, [F, 3, P]."""
    rough = F.avg_pool2d(picture, 5, 1, 2, count_include_pad=False)
    return (picture - rough).flatten(2)
