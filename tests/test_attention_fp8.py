"""Attention of float8 operands: its codes by every backend, and the definition they are held to."""

import math

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.attention_fp8 import attention_fp8
from tachyscope.kernels.attention_fp8 import torch as stock
from tachyscope.kernels.attention_fp8.reference import attention_fp8_reference
from tachyscope.kernels.attention_fp8.torch import FP8, LARGEST, ORDER, dequantise
from tachyscope.kernels.block_sparse.reference import block_sparse_attention_reference
from tachyscope.kernels.block_table import BlockTable

pytest.importorskip("triton")
from tachyscope.kernels.attention_fp8 import triton as fast

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted where no GPU is")


@pytest.fixture(autouse=True)
def _round_as_the_gpu_does(monkeypatch):
    """The interpreter loses the carry where a number is rounded up to the next power of two."""
    convert = interpreter._convert_float

    def exact(data, source, target, mode):
        if target != tl.float8e4nv:
            return convert(data, source, target, mode)
        return torch.from_numpy(data).to(FP8).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", exact)


def _draw(rng, b, h, n, d):
    """As a session hands them over: a part of a longer cache, heads beside each other."""
    return torch.randn(b, n + 9, h, d, generator=rng).transpose(1, 2)[:, :, 3 : n + 3]


@pytest.mark.parametrize("b, h, n, d", [(2, 3, 70, 64), (1, 1, 5, 16)])
def test_queries_have_the_same_codes_everywhere(rng, b, h, n, d):
    q = _draw(rng, b, h, n, d)
    q[0, 0, 1] = 0
    for got, want in zip(fast.quantise_queries(q), stock.quantise_queries(q), strict=True):
        assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n, block", [(70, 32), (64, 64), (130, 128)])
def test_entries_have_the_same_codes_everywhere(rng, n, block, weighted):
    k, v = _draw(rng, 2, 2, n, 32), 30 * _draw(rng, 2, 2, n, 32)
    log_count = centre = None
    if weighted:
        log_count = torch.zeros(2, 1, n)
        log_count[:, :, 3:9] = -math.inf
        k[:, :, 3:9] = v[:, :, 3:9] = math.nan  # nothing is there
        centre = stock.centre_of(k, log_count)
    got = fast.quantise_entries(k, v, block, log_count, centre)
    want = stock.quantise_entries(k, v, block, log_count, centre)
    for x, y in zip(got[:3], want[:3], strict=True):
        assert x.shape == y.shape and torch.equal(x.float(), y.float())


def test_codes_stand_for_their_entries_within_their_rounding(rng):
    k, v = _draw(rng, 1, 2, 70, 32), _draw(rng, 1, 2, 70, 32)
    back = dequantise(stock.quantise_entries(k, v, 64), torch.float64)
    for x, y in zip((k, v), back, strict=True):
        most = torch.cat(
            [
                x[:, :, :64].abs().amax((2, 3), True).expand(-1, -1, 64, -1),
                x[:, :, 64:].abs().amax((2, 3), True).expand(-1, -1, 6, -1),
            ],
            2,
        )
        # three bits behind the first; under 2^-6, of 448, steps are of one size
        bound = (x.abs() / 16).maximum(most * 2**-10 / LARGEST) * (1 + 1e-6)
        assert ((y[:, :, :70] - x).abs() <= bound).all()
        assert (y[:, :, 70:] == 0).all()


def test_the_order_of_values_is_that_of_a_threads_shares():
    # thread t of four has columns 2t, 2t + 1 of eight, and is asked for four in a row
    assert sorted(ORDER) == list(range(16))
    for t in range(4):
        assert ORDER[4 * t : 4 * t + 4] == (2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t)


def test_the_definition_is_attention_of_what_the_codes_stand_for(rng):
    q, k, v = (_draw(rng, 1, 4 if i == 0 else 2, 150, 32) for i in range(3))
    log_count = torch.randn(1, 2, 150, generator=rng)
    log_count[:, :, 20:30] = -math.inf
    code, scale = stock.quantise_queries(q)
    entries = stock.quantise_entries(k, v, 64, log_count)
    got = attention_fp8_reference(code, scale, entries, 150, log_count)
    keys, values = (x[:, :, :150] for x in dequantise(entries, torch.float64))
    queries = code.double() * scale.double().unsqueeze(-1) * math.sqrt(32)
    want = attention_reference(queries, keys, values, log_count)
    # a share of three bits is off by a sixteenth at most, and by half of that twice as often
    error = (got - want).norm() / want.norm()
    assert 0.002 < error < 0.04
    assert (got - attention_reference(q, k, v, log_count)).norm() / want.norm() < 0.08


def test_the_largest_share_is_rounded_alike_wherever_it_stands(rng):
    """A maximum of whole powers of two: what a later one shrinks was rounded as if it were known."""
    q, k = _draw(rng, 1, 1, 8, 16), 4 * _draw(rng, 1, 1, 128, 16)
    v = _draw(rng, 1, 1, 128, 16)
    code, scale = stock.quantise_queries(q)
    entries = stock.quantise_entries(k, v, 128)
    want = attention_fp8_reference(code, scale, entries, 128)
    keys, values = dequantise(entries, torch.float64)
    scores = (code.double() * scale.double().unsqueeze(-1)) @ keys.mT / math.log(2)
    most = torch.full((1, 1, 8, 1), -1e30, dtype=torch.float64)
    total, acc = torch.zeros_like(most), torch.zeros(1, 1, 8, 16, dtype=torch.float64)
    for part in torch.arange(128).split(16):
        new = torch.maximum(most, scores[..., part].amax(-1, True).ceil())
        shares = torch.exp2(scores[..., part] - new + 8)
        alpha = torch.exp2(most - new)
        total = total * alpha + shares.sum(-1, True)
        acc = acc * alpha + shares.float().to(FP8).double() @ values[:, :, part]
        most = new
    torch.testing.assert_close(acc / total, want, rtol=1e-4, atol=1e-4)


def _table(rng, b, h, kv, blocks, block, tiles, most, d, tile):
    slots = blocks * block - 2
    k, v = (_draw(rng, b, kv, slots, d) for _ in range(2))
    log_count = torch.randn(b, kv, blocks * block, generator=rng)
    log_count[:, :, slots - 3 :] = log_count[:, :, :block] = -math.inf
    k[:, :, :block] = 1e4  # an empty block, of anything
    ids = torch.rand(b, h, tiles, blocks, generator=rng).argsort(-1)[..., :most].int()
    counts = torch.full((b, h, tiles), most, dtype=torch.int32)
    return BlockTable(k, v, log_count, ids, counts, tile, block)


@pytest.mark.parametrize("block", [32, 4])
def test_listed_blocks_of_codes_equal_the_definition(rng, block):
    q, k, v = (_draw(rng, 1, 4 if i == 0 else 2, 40, 16) for i in range(3))
    past = _table(rng, 1, 4, 2, 6, block, 3, 3, 16, 16)
    got = stock.block_sparse_attention_fp8(q, k, v, past)
    slots = past.k.shape[2]
    centre = stock.centre_of(past.k, past.log_count[:, :, :slots])
    held = stock.quantise_entries(past.k, past.v, block, past.log_count[:, :, :slots], centre)
    listed = stock.Listed(held, past.log_count, past.ids, past.counts, past.tile)
    now = stock.quantise_entries(k, v, block, None, centre)
    want = attention_fp8_reference(*stock.quantise_queries(q), now, 40, None, listed)
    assert (got.out - want).norm() / want.norm() < 1e-3
    exact = block_sparse_attention_reference(q, k, v, past)
    assert 0.01 < (got.out - exact).norm() / exact.norm() < 0.1
    assert got.pairs == 4 * 40 * (3 * block + 40)


def test_attention_by_stock_torch_equals_the_definition(rng):
    q, k, v = (_draw(rng, 2, 4 if i == 0 else 2, 150, 32) for i in range(3))
    log_count = torch.randn(2, 1, 150, generator=rng)
    log_count[:, :, 9:20] = -math.inf
    k[:, :, 9:20] = v[:, :, 9:20] = math.nan
    for w in (log_count, None):
        if w is None:
            k, v = k.nan_to_num(1), v.nan_to_num(1)
        want = attention_fp8_reference(
            *stock.quantise_queries(q),
            stock.quantise_entries(k, v, 128, w, stock.centre_of(k, w)),
            150,
            w,
        )
        got = attention_fp8(q, k, v, w)
        assert (got - want).norm() / want.norm() < 1e-3
    empty = torch.full_like(log_count, -math.inf)
    assert torch.equal(attention_fp8(q, k, v, empty), torch.zeros_like(q))


def test_what_all_keys_have_in_common_changes_nothing(rng):
    """Centred, keys far from zero keep the bits that tell them apart."""
    q, k, v = (_draw(rng, 1, 2, 150, 32) for _ in range(3))
    far = k + 20 * torch.randn(1, 2, 1, 32, generator=rng)
    want = attention_reference(q, k, v)
    for keys in (k, far):
        got = attention_fp8(q, keys, v)
        assert (got - want).norm() / want.norm() < 0.06
    apart = [x.norm() / want.norm() for x in (stock.centre_of(far), stock.centre_of(k))]
    assert apart[0] > 3 * apart[1]


def test_another_kernel_is_compiled_for_scales_of_another_alignment(rng, monkeypatch):
    """Triton compiles for pointers to multiples of 16 bytes, and a kept kernel must not meet others."""
    pytest.importorskip("triton.experimental.gluon")
    from tachyscope.kernels.attention_fp8 import hopper

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: self

    monkeypatch.setattr(hopper, "_flash", Kernel())
    monkeypatch.setattr(hopper, "_built", {})
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 2)
    q, k, v = (_draw(rng, 1, 2, 128, 64) for _ in range(3))
    code, scale = stock.quantise_queries(q)
    held = stock.quantise_entries(k, v, 128)

    moved = [
        torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (scale, held.scale)
    ]
    kernels = []
    for q_scale, kv_scale in ((scale, held.scale), (moved[0], held.scale), (scale, moved[1])):
        hopper.flash(code, q_scale, held._replace(scale=kv_scale), 128, None, None)
        kernels.append(len(hopper._built))
    assert kernels == [1, 2, 3]
