"""The Hopper kernel without one: who computes what, how shares are joined, when it serves.

tests/test_gpu.py holds the kernel itself to its reference.
"""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from tachyscope.kernels import attention as operation
from tachyscope.kernels import device, dispatch
from tachyscope.kernels.attention import attention, hopper
from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.block_sparse import block_sparse_attention
from tachyscope.kernels.block_table import BlockTable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted where no GPU is")
TILE = hopper.TILE.value
CUTS = [
    # tiles, units of a tile, multiprocessors
    (444, 256, 132),
    (132, 256, 132),
    (1, 256, 132),
    (5, 3, 132),
    (131, 9, 132),
    (67, 17, 132),
    (200, 4, 132),
    (10, 7, 4),
    (9, 16, 4),
    (3, 100, 2),
]


def _programs(cut, monkeypatch):
    """From where to where each program works, by the kernel's own arithmetic."""
    for i in range(cut.whole + (cut.programs if cut.left else 0)):
        monkeypatch.setattr(hopper, "gl", SimpleNamespace(program_id=lambda axis, i=i: i))
        yield i, *hopper._work.fn(*cut)


def _parts(cut, monkeypatch):
    """Of each cut tile its shares: where one stands, and from where to where in the tile."""
    units = cut.units
    for i, start, stop in _programs(cut, monkeypatch):
        for each in range(start // units, -(-stop // units)):
            if each >= cut.whole:
                first, last = max(start - each * units, 0), min(stop - each * units, units)
                yield each - cut.whole, i - cut.whole + each - cut.whole, first, last


@pytest.mark.parametrize("tiles, units, processors", CUTS)
def test_every_unit_is_computed_once(tiles, units, processors, monkeypatch):
    cut = hopper._shares(tiles, units, processors)
    spans = [(start, stop) for _, start, stop in _programs(cut, monkeypatch)]
    assert all(start < stop for start, stop in spans)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == tiles * units
    # whole tiles fill whole waves; shares are of one size, and no more than there are processors
    assert spans[: cut.whole] == [(i * units, (i + 1) * units) for i in range(cut.whole)]
    if cut.left:
        sizes = {stop - start for start, stop in spans[cut.whole :]}
        assert cut.whole % processors == 0 and max(sizes) - min(sizes) <= 1
        assert len(spans) - cut.whole <= processors and max(sizes) <= units


@pytest.mark.parametrize("tiles, units, processors", CUTS)
def test_no_two_shares_stand_in_one_place(tiles, units, processors, monkeypatch):
    cut = hopper._shares(tiles, units, processors)
    places = [place for _, place, _, _ in _parts(cut, monkeypatch)]
    assert len(places) == len(set(places))
    assert all(0 <= place < cut.left + cut.programs for place in places)


def test_tiles_are_cut_where_that_fills_the_device():
    assert hopper._shares(444, 256, 132) == (396, 48, 132, 256)
    assert hopper._shares(132, 256, 132).left == 0
    assert hopper._shares(12, 2, 132).left == 0  # a share would be too little to pay
    assert hopper._shares(1, 256, 132).programs == 16


@pytest.mark.slow
@pytest.mark.parametrize("b, h, s, units, processors", [(1, 5, 200, 12, 4), (2, 3, 130, 8, 132)])
def test_joined_shares_are_the_whole(rng, monkeypatch, b, h, s, units, processors):
    d, n = 16, 8
    q = torch.randn(b, s, h, d, generator=rng).transpose(1, 2)
    k, v = (torch.randn(b, h, units * n, d, generator=rng) for _ in range(2))
    tiles = -(-s // TILE)
    cut = hopper._shares(b * h * tiles, units, processors)
    assert cut.left
    answers = torch.full((cut.left + cut.programs, TILE, d), math.nan)
    sums = torch.full((cut.left + cut.programs, TILE), math.nan)
    want = attention_reference(q, k, v)
    out = want.clone()
    for mine, place, first, last in list(_parts(cut, monkeypatch)):
        row, tile = divmod(cut.whole + mine, tiles)
        at, entries = (row // h, row % h), slice(first * n, last * n)
        rows = slice(tile * TILE, min((tile + 1) * TILE, s))
        scores = q[at][rows] @ k[at][entries].T / math.sqrt(d)
        there = slice(0, scores.shape[0])
        answers[place, there] = scores.softmax(-1) @ v[at][entries]
        sums[place, there] = scores.logsumexp(-1) / math.log(2)
        out[at][rows] = math.nan
    hopper.join_shares[cut.left, TILE // 16](
        answers, sums, out, *out.stride()[:3], tiles, h, s, *cut, D=d, T=TILE, M=16
    )
    torch.testing.assert_close(out, want)


def test_a_share_of_empty_slots_counts_for_nothing():
    cut = hopper.Shares(0, 1, 2, 8)
    answers, sums = torch.randn(3, TILE, 16), torch.randn(3, TILE)
    answers[1], sums[1] = 0.0, -1e30 * math.log2(math.e)  # as the kernel leaves them
    out = torch.full((1, 1, TILE, 16), math.nan)
    numbers = (*out.stride()[:3], 1, 1, TILE, *cut)
    hopper.join_shares[1, TILE // 16](answers, sums, out, *numbers, D=16, T=TILE, M=16)
    torch.testing.assert_close(out[0, 0], answers[0])
    sums[0], answers[0] = sums[1], 0.0
    hopper.join_shares[1, TILE // 16](answers, sums, out, *numbers, D=16, T=TILE, M=16)
    assert torch.equal(out, torch.zeros_like(out))


def _meta(tile):
    q = torch.empty(1, 12, 4680, 128, dtype=torch.bfloat16, device="meta")
    log_count = torch.empty(1, 12, 9984, device="meta")
    ids = torch.empty(1, 12, -(-4680 // tile), 20, dtype=torch.int32, device="meta")
    return q, BlockTable(q, q, log_count, ids, ids[..., 0], tile, 128)


@pytest.fixture
def served(monkeypatch):
    """Which of its functions were called."""
    calls = []
    for name in ("flash_attention", "block_sparse_attention"):
        real = getattr(hopper, name)
        monkeypatch.setattr(
            hopper, name, lambda *args, name=name, real=real: calls.append(name) or real(*args)
        )
    dispatch.has_hopper.cache_clear()
    yield calls
    dispatch.has_hopper.cache_clear()


def test_it_serves_tiles_of_128(served):
    q, past = _meta(128)
    block_sparse_attention(q, q, q, _meta(64)[1])
    assert served == []
    assert attention(q, q, q, past.log_count).shape == q.shape
    assert block_sparse_attention(q, q, q, past).out.shape == q.shape
    assert served == ["flash_attention", "block_sparse_attention"]


@pytest.mark.parametrize("capability, serves", [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_it_serves_hopper_gpus_alone(served, monkeypatch, capability, serves):
    monkeypatch.setattr(dispatch, "get_device_capability", lambda device: capability)
    assert dispatch.has_hopper(torch.device("cuda")) == serves


def test_without_gluon_triton_serves(served, monkeypatch):
    monkeypatch.delattr(operation, "hopper")
    monkeypatch.setitem(sys.modules, "tachyscope.kernels.attention.hopper", None)
    q, past = _meta(128)
    assert attention(q, q, q, past.log_count).shape == q.shape
    assert block_sparse_attention(q, q, q, past).out.shape == q.shape
    assert served == []


def test_it_serves_every_block():
    assert set(hopper.STAGES) == set(device.BLOCKS)
    for block, stages in hopper.STAGES.items():
        held = 2 * (TILE + 2 * stages * block) * max(device.HEAD_DIMS) + 4 * stages * block
        assert held < 227 * 1024  # what a program may hold on such a GPU


def test_what_is_built_is_launched_again_without_asking_triton(monkeypatch, rng):
    arguments = len(hopper._flash.arg_names)
    asked, launched = [], []

    class Built:
        def __getitem__(self, grid):
            return lambda *args: launched.append(args)

    class Asked:
        def __getitem__(self, grid):
            return lambda *args, **options: asked.append(args) or Built()

    monkeypatch.setattr(hopper, "_flash", Asked())
    monkeypatch.setattr(hopper, "join_shares", {(4, 8): lambda *args, **options: None})
    monkeypatch.setattr(hopper, "_built", {})

    def builds(*args):
        before = len(asked), len(launched)
        hopper.flash_attention(*args)
        return len(asked) - before[0], len(launched) - before[1]

    q = torch.randn(1, 4, 12800, 64, generator=rng).bfloat16()  # 400 tiles: four are cut
    k = torch.randn(1, 2, 3000, 64, generator=rng).bfloat16()
    log_count = torch.zeros(1, 2, 3000)
    assert builds(q, k, k, log_count) == (1, 0)
    assert builds(q, k[:, :, :2000], k[:, :, :2000], log_count[:, :, :2000]) == (
        0,
        1,
    )  # lengths are data
    assert len(asked[0]) == len(launched[0]) == arguments
    assert asked[0][-6:] == launched[0][-6:] == (True, False, 128, 64, 128, 2)
    assert builds(q, k, k) == (1, 0)  # no weights
    assert builds(q[:, :, : 33 * 128], k, k) == (1, 0)  # nothing is cut, so nothing set aside
    far = k.as_strided((1, 2, 3000, 64), (2**33, 192000, 64, 1))
    assert builds(q, far, far) == (1, 0)  # a number that needs 64 bits
    assert builds(q, far, far) == (0, 1)
