"""Turning by a kernel, by stock torch and by the definition."""

import pytest
import torch

from tachyscope.kernels.rotary import turn_into
from tachyscope.kernels.rotary.reference import turn_into_reference
from tachyscope.types import Rope

pytest.importorskip("triton")
from tachyscope.kernels.rotary.triton import turn

WAN = Rope(((24, (1.0, 0, 0)), (20, (0, 1.0, 0)), (20, (0, 0, 1.0))))
LLAMA = Rope(((64, (24.0, 6.0, 1.0)),), interleaved=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [WAN, LLAMA], ids=["wan", "llama"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_head_is_turned_straight_into_a_cache(rng, rope, dtype, rows):
    tokens, heads, width = 70, 3, 64
    # as they come: queries beside keys in one linear's output, and slots inside a cache
    qkv = torch.randn(rows, tokens, 2 * heads * width, generator=rng).to(dtype)
    x = qkv.chunk(2, -1)[1].unflatten(-1, (heads, width)).transpose(1, 2)
    origin = torch.arange(rows, dtype=torch.float64).view(-1, 1, 1, 1)
    cos, sin = rope.cos_sin(torch.rand(tokens, 3, generator=rng) * 50, dtype, origin)
    cache = [torch.full((rows, heads, 200, width), 7.0, dtype=dtype) for _ in range(3)]
    slots = [part[:, :, 100 : 100 + tokens] for part in cache]
    turn(slots[0], x, cos, sin, rope.interleaved)
    turn_into(slots[1], x, cos, sin, rope)
    turn_into_reference(slots[2], x, cos, sin, rope)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for part in cache[:2]:
        torch.testing.assert_close(part, cache[2], rtol=tolerance, atol=tolerance)
        assert (part[:, :, :100] == 7).all() and (part[:, :, 170:] == 7).all()
    assert torch.equal(slots[1], rope.apply(x, cos, sin))
