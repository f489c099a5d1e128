"""What becomes resident, and what tiles read of it: by every backend as it is defined."""

import pytest
import torch
from streams import CHUNKS, play, session

from tachyscope.kernels import admit as operation
from tachyscope.kernels.admit import Residency
from tachyscope.kernels.admit import torch as admit_torch
from tachyscope.kernels.admit.reference import admit_reference, best_slots_reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GARBAGE = 12345
# B, Hkv, heads of a group, most, slots, blocks that are in use, those that are resident, tiles, n
SIZES = {
    "odd": (2, 2, 2, 37, 11, 37, 11, 3, 4),
    "one video": (1, 2, 1, 130, 33, 100, 33, 3, 9),
    "slots left": (2, 1, 2, 37, 11, 30, 4, 2, 3),
    "fewer blocks than slots": (1, 2, 2, 40, 19, 7, 5, 3, 4),
    "nothing resident": (1, 2, 2, 50, 9, 50, 0, 2, 6),
    "everything is wanted": (2, 2, 2, 37, 11, 37, 11, 2, 37),
    "all there is": (1, 2, 1, 16, 16, 16, 16, 2, 5),
    "one of each": (1, 1, 1, 1, 1, 1, 0, 1, 1),
}


def _backends(device):
    """Of stock torch and Triton; where kernels are compiled, they take no tensors of the CPU."""
    yield admit_torch
    if device == "cuda" or not torch.cuda.is_available():
        pytest.importorskip("triton")
        from tachyscope.kernels.admit import triton as admit_triton

        yield admit_triton


def _residency(rng, batch, heads, most, slots, used, held):
    """After 5 choices: what is resident stands anywhere, and was wanted at times of its own."""
    rows = batch * heads
    wanted = torch.full((rows, most), -1.0)
    slot = torch.full((rows, most + 1), -1, dtype=torch.int32)
    block = torch.full((rows, slots), -1, dtype=torch.int32)
    for row in range(rows):
        wanted[row, :used] = torch.randperm(used, generator=rng) / used * 4.9
        here = torch.randperm(used, generator=rng)[:held]
        at = torch.randperm(slots, generator=rng)[:held]
        block[row, at], slot[row, here] = here.int(), at.int()
    now, later = (torch.full((rows, slots), GARBAGE, dtype=torch.int32) for _ in range(2))
    tensors = (x.view(batch, heads, -1) for x in (wanted, slot, block, now, later))
    return Residency(torch.tensor([5.0]), *tensors)


def _mass(rng, residency, group, tiles, used):
    """Masses that differ, and -1 where no block is."""
    batch, heads, most = residency.wanted.shape
    mass = torch.rand(batch, heads * group, tiles, most, generator=rng)
    mass[..., used:] = -1.0
    return mass


def _case(rng, size):
    batch, heads, group, most, slots, used, held, tiles, n = size
    residency = _residency(rng, batch, heads, most, slots, used, held)
    chosen = _mass(rng, residency, group, tiles, used).topk(n, -1, sorted=False)
    return chosen.values, chosen.indices, residency


def _run(backend, device, mass, ids, residency, at_once):
    """A backend's residency and what stands in each slot at first, on the CPU."""
    moved = Residency(*(x.to(device, copy=True) for x in residency))
    ids = None if ids is None else ids.to(device)
    first = backend.admit(mass.to(device), ids, moved, at_once)
    return Residency(*(x.cpu() for x in moved)), first.cpu()


def _check(device, mass, ids, residency, at_once):
    """By all backends as it is defined, and alike to the last bit."""
    want, first = admit_reference(mass, ids, residency, at_once)
    wanted = want.wanted.float()
    for b, h in torch.cartesian_prod(*map(torch.arange, first.shape[:2])).view(-1, 2).tolist():
        among = set(want.block[b, h].tolist()) | set(residency.block[b, h].tolist())
        among = torch.tensor(sorted(among - {-1}), dtype=torch.long)
        assert wanted[b, h, among].unique().numel() == among.numel()  # else order is open
    found = [_run(backend, device, mass, ids, residency, at_once) for backend in _backends(device)]
    for got, stood in found:
        assert torch.equal(stood, first)
        for name in ("choices", "slot", "block", "now", "later"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        torch.testing.assert_close(got.wanted.double(), want.wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(got.wanted, found[0][0].wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_once", [0, 1, None])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_what_becomes_resident_is_as_defined(rng, size, at_once, device):
    at_once = size[4] if at_once is None else at_once
    _check(device, *_case(rng, size), at_once)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_without_ids_every_block_is_wanted(rng, size, device):
    batch, heads, group, most, slots, used, held, tiles, _ = size
    residency = _residency(rng, batch, heads, most, slots, used, held)
    _check(device, _mass(rng, residency, group, tiles, used), None, residency, slots // 2)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_taken_in_parts(rng, device, monkeypatch):
    """More of them than a program looks at together, at the edges of parts too."""
    pytest.importorskip("triton")
    monkeypatch.setattr("tachyscope.kernels.admit.triton.CHUNK", 16)
    for most in (16, 63, 64, 65):
        _check(device, *_case(rng, (2, 2, 1, most, 13, most, 13, 3, 5)), 3)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_comes_where_what_is_wanted_is_resident(rng, device):
    _, _, residency = _case(rng, SIZES["odd"])
    ids = residency.block.long().repeat_interleave(2, 1).unsqueeze(2)[..., :5].contiguous()
    mass = torch.rand(ids.shape, generator=rng)
    _check(device, mass, ids, residency, 2)
    for backend in _backends(device):
        got, first = _run(backend, device, mass, ids, residency, 2)
        assert (got.now == -1).all() and (got.later == -1).all()
        assert torch.equal(got.block, residency.block) and torch.equal(first, residency.block)


@pytest.mark.parametrize("device", DEVICES)
def test_a_resident_block_stays_until_another_is_wanted_twice_as_much(device):
    """One resident slot, in which block 3 stands: block 1 comes by more than twice its mass."""
    for mass, comes in ((1.99, False), (2.01, True)):
        wanted, slot = torch.full((1, 1, 8), -1.0), torch.full((1, 1, 9), -1, dtype=torch.int32)
        wanted[..., 3], slot[..., 3] = 4.5, 0
        block, now, later = torch.tensor([[[3]], [[-1]], [[-1]]], dtype=torch.int32).split(1)
        residency = Residency(torch.tensor([5.0]), wanted, slot, block, now, later)
        ids, masses = torch.tensor([[[[1, 3]]]]), torch.tensor([[[[mass, 1.0]]]])
        _check(device, masses, ids, residency, 1)
        for backend in _backends(device):
            got, _ = _run(backend, device, masses, ids, residency, 1)
            assert got.block.item() == (1 if comes else 3)


@pytest.mark.parametrize("device", DEVICES)
def test_of_blocks_wanted_alike_any_may_come(rng, device):
    """The kernels take those of lower number; of stock torch only how much they were wanted."""
    mass, ids, residency = _case(rng, SIZES["odd"])
    mass = mass.mul(3).round() / 4
    residency.wanted.mul_(2).round_()
    want, first = admit_reference(mass, ids, residency, 2)
    for i, backend in enumerate(_backends(device)):
        got, stood = _run(backend, device, mass, ids, residency, 2)
        torch.testing.assert_close(got.wanted.double(), want.wanted, rtol=1e-6, atol=1e-6)
        assert _alike(got, want, residency)
        assert (got.slot >= 0).sum() == got.block.numel()
        if i:  # the kernels
            assert torch.equal(stood, first)
            for name in ("slot", "block", "now", "later"):
                assert torch.equal(getattr(got, name), getattr(want, name)), name


def _every_slot(block):
    return torch.arange(block.shape[2], dtype=torch.int32).expand_as(block)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 4, 10])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_tile_reads_the_best_of_what_is_there(rng, size, n, device):
    batch, heads, group, most, slots, used, held, tiles, _ = size
    residency, n, sink = _residency(rng, *size[:2], most, slots, used, held), min(n, slots), 3
    # masses and table are parts of others; some blocks have equal masses, and some none
    mass = _mass(rng, residency, group, tiles, used)
    mass = torch.where(mass > 0.8, 0.8, mass).masked_fill(mass.abs() < 0.1, 0.0)
    wide = torch.nn.functional.pad(mass, (2, 5), value=7.0).to(device)
    best = best_slots_reference(mass, residency.block, n)
    for backend in _backends(device):
        table = torch.full((batch, heads * group, tiles + 2, n + 4), GARBAGE, device=device).int()
        out, blocks = table[:, :, :tiles, 3 : 3 + n], residency.block.to(device)
        backend.best_slots(wide[..., 2 : 2 + most], blocks, out, sink)
        found = out.cpu().long().clone() - sink
        assert found.min() >= 0 and found.max() < slots
        assert (found.sort(-1).values.diff(dim=-1) > 0).all()
        stood = residency.block.repeat_interleave(group, 1).unsqueeze(2).expand(-1, -1, tiles, -1)
        ids = stood.gather(3, found).long()
        near = mass.gather(3, ids.clamp(min=0)).masked_fill(ids < 0, -1.0)
        near = near.sort(-1, descending=True).values
        assert torch.equal(near.view(-1, n), torch.tensor(best).view(-1, n))
        out.fill_(GARBAGE)
        assert (table == GARBAGE).all()  # nothing else was written


@pytest.mark.parametrize("device", DEVICES)
def test_a_tile_that_reads_all_reads_every_slot(rng, device):
    residency = _residency(rng, 1, 2, 37, 11, 37, 9)
    out = torch.full((1, 4, 3, 11), GARBAGE, dtype=torch.int32, device=device)
    mass = _mass(rng, residency, 2, 3, 37).to(device)
    operation.best_slots(mass, residency.block.to(device), out, 5)
    assert torch.equal(out.cpu(), torch.arange(5, 16).int().expand_as(out))


@pytest.mark.slow
def test_the_kernels_serve_a_whole_video(serve_by_triton):
    """Triton in the place of stock torch, interpreted: the same video, the same blocks."""
    if torch.cuda.is_available():
        pytest.skip("where kernels are compiled, they take no tensors of the CPU")
    pytest.importorskip("triton")
    from tachyscope.kernels.admit import triton as admit_triton

    plan = "cache=bank:resident=10f,budget=60f attention=ann:k=24,block=2,tile=3"
    results = []
    for backend in (admit_torch, admit_triton):
        if backend is admit_triton:
            serve_by_triton("admit.admit", "admit.best_slots")
        at = session(CHUNKS, plan, dtype=torch.float32)
        out = play(at, 12)
        results.append((out, [layer.bank.tensors for layer in at.memory.layers]))
    (want, state), (found, same) = results
    off = [float((x[0] - y[0]).abs().max()) for x, y in zip(want, found, strict=True)]
    assert max(off) < 1e-5
    for one, other in zip(state, same, strict=True):
        assert torch.equal(one["block"], other["block"])
        assert torch.equal(one["place"], other["place"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "most, slots, n", [(7000, 194, 96), (14700, 194, 96), (30000, 450, 200), (32768, 1024, 500)]
)
def test_the_kernels_equal_stock_torch_at_full_size(rng, most, slots, n):
    """Wan's 12 heads and 37 tiles, launches recorded in a CUDA graph and run again."""
    from tachyscope.kernels.launch import record

    size = (1, 12, 1, most, slots, most - 100, slots, 37, n)
    residency = _residency(rng, 1, 12, most, slots, most - 100, slots)
    mass = _mass(rng, residency, 1, 37, most - 100).pow(20).to("cuda")  # few have most of it
    chosen = mass.topk(n, -1, sorted=False)
    start = [x.to("cuda") for x in residency]
    (want, first), out = _run(admit_torch, "cuda", *chosen, residency, slots // 4), []
    held, tables = Residency(*(x.clone() for x in start)), [mass.new_zeros(1, 12, 37, n).int()] * 2

    def work():
        out[:] = [operation.admit(*chosen, held, slots // 4)]
        operation.best_slots(mass, held.block, tables[0], 7)

    work()
    graph = record(work)
    for _ in range(2):
        for x, y in zip(held, start, strict=True):
            x.copy_(y)
        graph.replay()
        got = Residency(*(x.cpu() for x in held))
        assert torch.equal(got.wanted, want.wanted), size
        assert _alike(got, want, residency)
        for b in range(12):  # the same blocks, but where two are wanted just as much
            mine, other = (set(x.block[0, b].tolist()) for x in (got, want))
            assert len(mine - other) <= 2
        assert ((got.now >= 0).sum(-1) == (want.now >= 0).sum(-1)).all()
        assert (out[0].cpu() >= 0).all() and first.shape == out[0].shape
    true = torch.full_like(tables[0], GARBAGE)
    admit_torch.best_slots(mass, held.block, true, 7)
    stood = held.block.unsqueeze(2).expand(-1, -1, 37, -1).long()
    masses = [
        mass.gather(3, stood.gather(3, x.long() - 7)).sort(-1).values for x in (tables[0], true)
    ]
    assert torch.equal(*masses)


def _alike(got, want, before):
    """Whether blocks that were wanted as much are resident, each in one slot."""
    # a block that was resident counts twice among those that were wanted now
    now = want.wanted.double() >= want.choices
    share = (want.wanted.double() - want.choices) * torch.where(before.slot[:, :, :-1] >= 0, 2, 1)
    score = torch.where(now, want.choices + share, want.wanted.double())
    mine, true = (score.gather(2, x.block.long()).sort(-1).values for x in (got, want))
    stand = torch.equal(got.slot.gather(2, got.block.long()), _every_slot(got.block))
    return torch.allclose(mine, true, rtol=0, atol=1e-5) and stand
