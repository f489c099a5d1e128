"""Float8 kernels on a Hopper GPU against their definitions, on the same codes, memory poisoned."""

import math

import pytest
import torch
import torch.nn.functional as F

from tachyscope.kernels.attention_fp8 import torch as stock
from tachyscope.kernels.attention_fp8.reference import attention_fp8_reference
from tachyscope.kernels.attention_fp8.torch import Listed
from tachyscope.kernels.dispatch import has_hopper
from tachyscope.kernels.linear_fp8 import fp8_weight, linear_fp8
from tachyscope.kernels.linear_fp8.reference import linear_fp8_reference
from tachyscope.kernels.norm_quantise import quantise
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.random import random_wan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not has_hopper(torch.device("cuda")),
        reason="needs a Hopper GPU",
    ),
]
DEVICE = "cuda"


@pytest.fixture
def generator():
    return torch.Generator(DEVICE).manual_seed(11)


def vectors(generator, *shape):
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)


def poison(*shape):
    held = [torch.full(shape, math.nan, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    del held


def off(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("heads, kv_heads, queries, entries", [(4, 4, 300, 700), (4, 2, 128, 129)])
def test_attention_of_codes_is_its_definition(
    generator, heads, kv_heads, queries, entries, weighted
):
    from tachyscope.kernels.attention_fp8 import hopper, triton

    q = vectors(generator, 2, heads, queries, 128)
    k, v = (vectors(generator, 2, kv_heads, entries, 128) for _ in range(2))
    log_count = None
    if weighted:
        log_count = 4 * torch.rand(2, kv_heads, entries, generator=generator, device=DEVICE)
        log_count[:, :, 40:60] = -math.inf
    code, scale = triton.quantise_queries(q)
    held = triton.quantise_entries(k, v, 128, log_count)
    for got, want in zip(triton.quantise_queries(q), stock.quantise_queries(q), strict=True):
        assert torch.equal(got.float(), want.float())
    poison(2, heads, queries, 128)
    got = hopper.flash(code, scale, held, entries, log_count, None)
    # a share between two codes may go either way, which counts where few entries have it all
    want = attention_fp8_reference(code, scale, held, entries, log_count)
    assert off(got, want) < (2e-2 if weighted else 5e-3)


def test_attention_over_listed_blocks_of_codes_is_its_definition(generator):
    from tachyscope.kernels.attention_fp8 import hopper, triton

    q, k, v = (vectors(generator, 1, 4, 300, 128) for _ in range(3))
    old_k, old_v = (vectors(generator, 1, 4, 20 * 128, 128) for _ in range(2))
    log_count = torch.rand(1, 4, 20 * 128, generator=generator, device=DEVICE)
    log_count[:, :, -5:] = -math.inf
    ids = torch.rand(1, 4, 3, 20, generator=generator, device=DEVICE).argsort(-1)[..., :7].int()
    counts = torch.full((1, 4, 3), 7, dtype=torch.int32, device=DEVICE)
    counts[0, 0, 0] = 3
    entries = triton.quantise_entries(old_k, old_v, 128, log_count)
    past = Listed(entries, log_count, ids.contiguous(), counts, 128)
    code, scale = triton.quantise_queries(q)
    held = triton.quantise_entries(k, v, 128)
    poison(1, 4, 300, 128)
    got = hopper.flash(code, scale, held, 300, None, past)
    assert off(got, attention_fp8_reference(code, scale, held, 300, None, past)) < 5e-3


def test_a_linear_of_codes_is_its_definition(generator):
    x, weight = vectors(generator, 300, 256), vectors(generator, 512, 256)
    bias = vectors(generator, 512)
    held = fp8_weight(weight)
    code, scale = quantise(x)
    poison(300, 512)
    got = linear_fp8(code, scale, held, bias, torch.bfloat16)
    assert off(got, linear_fp8_reference(code, scale, held, bias)) < 5e-3
    assert off(got, F.linear(x.double(), weight.double(), bias.double())) < 0.06


def test_a_model_in_float8_makes_nearly_the_latents_of_bfloat16():
    import tachyscope as ts
    from tachyscope.models.registry import in_precision

    config = WanConfig(
        dim=256, ffn_dim=512, layers=2, heads=2, text_dim=64, text_len=8, size=(16, 16)
    )
    made = []
    for precision in ("bfloat16", "fp8"):
        model = random_wan(config, device=DEVICE, dtype=torch.bfloat16)
        model = model if precision == "bfloat16" else in_precision(model, precision)
        with ts.open(model, "dense", prompt="a b", seed=3) as stream:
            made.append(torch.cat([stream.generate().latents.float() for _ in range(2)], 2))
    assert torch.isfinite(made[1]).all() and not torch.equal(*made)
    assert off(made[1], made[0].double()) < 0.2
