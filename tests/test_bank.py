"""cache=bank: every entry is kept and can be read, what is resident is bounded, nothing is silent."""

import dataclasses

import pytest
import torch
from faults import refused
from streams import CHUNKS, assert_same, draw, play, play_pass, session

from tachyscope.attention.ann import Ann
from tachyscope.core.kv_allocation import slots_for
from tachyscope.core.plan import Plan
from tachyscope.core.types import Rope
from tachyscope.io.machine import ram
from tachyscope.kernels.admit.torch import STAY
from tachyscope.kernels.block_sparse import block_sparse_attention
from tachyscope.kernels.host_blocks import HostBlocks
from tachyscope.kernels.host_blocks import torch as blocks_torch
from tachyscope.kernels.host_blocks.reference import stored_reference
from tachyscope.store.bank_layout import HOST, UNUSED, host_tensors
from tachyscope.store.host_memory import register
from tachyscope.store.residents import AT_ONCE

ANN = "attention=ann:k=24,block=2,tile=3"
SMALL = f"cache=bank:resident=10f,budget=60f {ANN}"


def counted(at):
    at.count_bank()
    return at.meter.take()


@pytest.mark.parametrize("attention", [ANN, "attention=ann:k=24,block=3,tile=2,hash=lsh,bits=16"])
def test_with_everything_resident_it_equals_keep_all(attention):
    one, other = (session(CHUNKS, f"{x} {attention}") for x in ("", "cache=bank:resident=40f"))
    assert_same(play(one, 9), play(other, 9))
    mine, theirs = counted(other), one.meter.take()
    assert mine["pairs"] == theirs["pairs"] < mine["pairs_dense"]
    assert mine["blocks_fetched"] == mine["blocks_late"] == mine["blocks_denied"] == 0


def test_what_is_resident_is_what_host_memory_holds_and_pairs_stay_flat():
    at = session(CHUNKS, SMALL)
    rng = torch.Generator().manual_seed(0)
    pairs, fetched = [], 0.0
    for _ in range(14):
        play(at, 1, seed=int(torch.randint(9**9, (), generator=rng)))
        row = counted(at)
        pairs.append(row["pairs"])
        fetched += row.get("blocks_fetched", 0.0)
        for layer in at.memory.layers:
            _check_resident(layer)
    assert fetched > 0
    assert len(set(pairs[8:])) == 1


def test_a_video_of_known_length_reserves_no_more_and_is_the_same():
    known, unknown = (session(CHUNKS, SMALL, latent_frames=n) for n in (30, None))
    chunks = 30 // CHUNKS.chunk
    assert_same(play(known, chunks), play(unknown, chunks))
    mine, theirs = (x.memory.layers[0].bank for x in (known, unknown))
    assert 2 * mine.layout.capacity == theirs.layout.capacity
    assert all(2 * x.nbytes == theirs.host[name].nbytes for name, x in mine.host.items())
    assert int(mine.tensors["used"]) <= mine.layout.capacity


def test_all_that_is_resident_is_read_as_by_lists_of_all_blocks(monkeypatch):
    plan = "cache=bank:resident=10f,budget=60f attention=ann:read=1,block=2,tile=3"
    whole, listed = session(CHUNKS, plan), session(CHUNKS, plan)
    reads, read_resident = [], Ann._attend_resident

    def by_lists(self, p, q):
        layer, ctx = p.layer, p.ctx
        layout = layer.bank.layout
        if ctx.past < layout.room:
            return read_resident(self, p, q)
        reads.append(ctx.pass_index)
        early, blocks = not ctx.before and ctx.pass_index < 2, sum(layout.blocks(ctx.past))
        work = layer.bank.work
        work["count"].fill_(blocks)
        for name in ("first", "map"):
            work[name][..., :blocks] = torch.arange(blocks)
        table = layer.bank.table(layer, ctx.past, blocks, early)
        return block_sparse_attention(q, *layer.now(ctx), table).out

    for seed in range(9):
        ours = play(whole, 1, seed=seed)
        with monkeypatch.context() as patched:
            patched.setattr(Ann, "_attend_resident", by_lists)
            assert_same(ours, play(listed, 1, seed=seed), 1e-12)
    assert set(reads) == {0, 1, 2}


def test_where_all_is_read_a_block_is_a_part_of_a_latent_frame():
    """So that none is left a part, and attention needs no log-weights."""
    sizes = {1560: 120, 3600: 120, 64: 4, 6: 1, 1559: 128}  # a prime number has no parts
    for tokens, block in sizes.items():
        shape = dataclasses.replace(CHUNKS, grid=(1, tokens))
        layout = Ann(read=1).bank_layout(shape, 21 * tokens, 240 * tokens)
        assert (layout.block, layout.blocks_full) == (block, tokens != 1559)
    wan = dataclasses.replace(CHUNKS, grid=(30, 52))
    assert Ann(read=0.4).bank_layout(wan, 21 * 1560, 240 * 1560).block == 128  # as lists need it


def _check_resident(layer):
    bank, layout = layer.bank, layer.bank.layout
    own = bank.tensors
    keys = layer.k[:, :, layout.first : layout.first + layout.resident_slots * layout.block]
    held = own["log_count"][:, :, layout.first :]
    for b, h in torch.cartesian_prod(*map(torch.arange, own["block"].shape[:2])).tolist():
        there = own["block"][b, h].tolist()
        stand = bank.slot_of[b, h].tolist()
        assert stand[-1] == -1
        assert {block: i for i, block in enumerate(there) if block >= 0} == {
            block: slot for block, slot in enumerate(stand) if slot >= 0
        }
        for i, block in enumerate(there):
            if block < 0:
                continue
            slots = slice(i * layout.block, i * layout.block + int(own["length"][b, h, block]))
            rest = slice(slots.stop, (i + 1) * layout.block)
            assert torch.equal(
                keys[b, h, slots], bank.host["k"][b, h, block, : slots.stop - slots.start]
            )
            assert (held[b, h, slots] == 0).all() and (held[b, h, rest] == -torch.inf).all()


@pytest.mark.parametrize("block", [2, 4, 5])
def test_a_block_that_is_a_part_reads_no_more_than_its_entries(block):
    """6 entries a latent frame: blocks of 4 and 5 leave parts."""
    at = session(CHUNKS, f"cache=bank:resident=12f attention=ann:k=30,block={block},tile=3")
    out = play(at, 12)
    for layer in at.memory.layers:
        _check_resident(layer)
    assert all(x.isfinite().all() for part in out for x in part)


def test_a_choice_admits_the_largest_mass_and_counts_what_it_denies():
    """Against the rule, block by block: wanted first by summed mass, what is resident counted
    more, then the last wanted."""
    at = session(dataclasses.replace(CHUNKS, heads=2), f"cache=bank:resident=7f,budget=60f {ANN}")
    play(at, 12)
    counted(at)
    layer = at.memory.layers[0]
    bank, layout = layer.bank, layer.bank.layout
    rng = torch.Generator().manual_seed(3)
    tiles, read = 4, layout.sink + layout.newest_blocks + 5
    rows = layout.index_rows
    mass = torch.rand(1, 2, tiles, rows, generator=rng)
    before = bank.tensors["block"].clone()
    wanted_before = bank.tensors["wanted"].clone()
    live = int(bank.tensors["used"])
    mass[..., layout.sink + live : layout.sink + layout.capacity] = -1.0  # no entries
    bank.choose(mass, layout.room, read, True, 3)
    bank.finish_choice()
    late = denied = fetched = 0
    at_once = layout.resident_slots // AT_ONCE
    for h in range(2):
        rest = mass[0, h, :, layout.sink : layout.sink + live]
        chosen = [set(row.topk(5).indices.tolist()) for row in rest]
        demand = {}
        for i, ids in enumerate(chosen):
            for block in ids:
                demand[block] = demand.get(block, 0.0) + float(rest[i, block])
        was = {x for x in before[0, h].tolist() if x >= 0}
        weighed = {x: y * STAY if x in was else y for x, y in demand.items()}
        order = sorted(weighed, key=weighed.get, reverse=True)
        order += sorted(was - demand.keys(), key=lambda x: -float(wanted_before[0, h, x]))
        resident = set(order[: layout.resident_slots])
        assert {x for x in bank.tensors["block"][0, h].tolist() if x >= 0} == resident
        fetched += len(resident - was)
        now = set([x for x in order if x in resident - was][:at_once])
        early = {x for x in bank.work["now"][0, h].tolist() if x >= 0}
        assert early == now
        kept = [
            b if n < 0 else n for b, n in zip(before[0, h], bank.work["now"][0, h], strict=True)
        ]
        was = {int(x) for x in kept}  # what the first pass finds
        late += sum(len(ids & resident - was) for ids in chosen)
        denied += sum(len(ids - resident) for ids in chosen)
        # until all has come a tile reads the best of what is there
        for name, there in (("first", was), ("map", resident)):
            for i in range(tiles):
                best = sorted(there, key=lambda x: -float(rest[i, x]))[:5]
                table = bank.work[name][0, h, i, :read].tolist()[-5:]
                source = kept if name == "first" else bank.tensors["block"][0, h]
                read_now = [int(source[x - layout.sink]) for x in table]
                assert set(read_now) == set(best)
    assert denied > 0 and late > 0
    row = counted(at)
    assert row["blocks_wanted"] == 2 * tiles * 5 * 3
    assert (row["blocks_late"], row["blocks_denied"], row["blocks_fetched"]) == (
        late, 3 * denied, fetched,
    )  # fmt: skip


def test_where_all_is_read_the_largest_summed_mass_is_resident_and_nothing_denied():
    plan = "cache=bank:resident=7f,budget=60f attention=ann:read=1,block=2,tile=3"
    at = session(dataclasses.replace(CHUNKS, heads=2), plan)
    play(at, 12)
    counted(at)
    layer = at.memory.layers[0]
    bank, layout = layer.bank, layer.bank.layout
    tiles, rows = 4, layout.index_rows
    mass = torch.rand(1, 2, tiles, rows, generator=torch.Generator().manual_seed(3))
    live, before = int(bank.tensors["used"]), bank.tensors["block"].clone()
    mass[..., layout.sink + live : layout.sink + layout.capacity] = -1.0  # no entries
    bank.choose(mass, layout.room, None, True, 3)
    bank.finish_choice()
    fetched = late = 0
    for h in range(2):
        was = set(before[0, h].tolist())
        total = mass[0, h, :, layout.sink : layout.sink + live].sum(0).tolist()
        weighed = [x * STAY if i in was else x for i, x in enumerate(total)]
        order = sorted(range(live), key=lambda i: -weighed[i])[: layout.resident_slots]
        assert set(bank.tensors["block"][0, h].tolist()) == set(order)
        comes = [x for x in order if x not in was]
        fetched += len(comes)
        late += tiles * len(comes[layout.resident_slots // AT_ONCE :])
    row = counted(at)
    assert row["blocks_wanted"] == 2 * tiles * layout.resident_slots * 3
    assert (row["blocks_late"], row["blocks_denied"], row["blocks_fetched"]) == (late, 0, fetched)
    assert fetched > 0


@pytest.mark.parametrize("resident", [10, 11])
def test_a_past_that_is_just_full_has_no_stale_codes(resident):
    """12 entries a chunk, blocks of 2: 10f end with a chunk, 11f in the middle of one."""
    at = session(CHUNKS, f"cache=bank:resident={resident}f,budget=60f {ANN}")
    for _ in range(9):
        play(at, 1)
        for layer in at.memory.layers:
            own, layout = layer.bank.tensors, layer.bank.layout
            sealed = own["weight"][:, :, layout.sink : layout.sink + layout.capacity]
            if at.memory.past == layout.room:
                assert ((sealed > -1e29) == (own["length"] > 0)).all()
                assert (own["weight"][:, :, layout.sink + layout.capacity :] > -1e29).all()
                assert (own["block"] >= 0).all()


@pytest.mark.parametrize(
    "host, early, chunks, length",
    # Of 4 pixel frames a latent one: planted at frame 10, looked for at frame 4,700. Of 7,000
    # random keys in 12 dimensions some point anywhere, so that it is longer than those.
    [("int8", 4, 30, 1), pytest.param("int4", 1, 588, 2, marks=pytest.mark.slow)],
)
def test_an_entry_planted_early_is_found_late(host, early, chunks, length):
    """One key of an early frame, and much later queries that point at it."""
    at = session(CHUNKS, f"cache=bank:resident=8f,budget=1203f,host={host} {ANN}")
    rng = torch.Generator().manual_seed(0)
    planted = length * torch.randn(12, generator=rng, dtype=torch.float64)
    for chunk in range(chunks):
        pos = at.shape.positions(at.memory.latent_frame, 2)
        for step in range(3):
            layers = draw(rng, at.shape, 12, at.dtype)
            for _, k, v, _ in layers:
                if chunk == early:
                    k[:, :, 3], v[:, :, 3] = planted, 100.0
            play_pass(at, layers, pos, step, 3)
        if chunk == early:
            key = at.memory.layers[0].k[:, :, at.memory.past + 3].clone()
        at.commit()
    # queries are rotated back by what the last chunk's positions turn them
    pos = at.shape.positions(at.memory.latent_frame, 2)
    back = at.rope.cos_sin(pos, at.dtype)
    turned = key.repeat_interleave(2, 1).unsqueeze(2).expand(-1, -1, 12, -1)
    q = 20 * at.rope.apply(turned, back[0], -back[1])
    assert (at.memory.layers[0].v[:, :, : at.memory.past].abs() < 50).all()  # it is not resident
    results = []
    for step in range(3):
        layers = draw(rng, at.shape, 12, at.dtype)
        layers = [[q, k, v, x] for _, k, v, x in layers]
        results.append(play_pass(at, layers, pos, step, 3)[0][0])
    # from the second pass on at the latest every query reads it
    assert results[1].min() > 50 and results[2].min() > 50
    assert at.memory.layers[0].bank.tensors["block"].shape[2] < at.memory.total_entries / 15


@pytest.mark.parametrize("keep", [0, 1])
def test_a_rewound_bank_goes_on_as_one_that_never_had_more(keep):
    """With everything resident a bank reads as `keep_all` does, which has no blocks to drop."""
    ann = ANN + ",sink=1"
    one, other = (session(CHUNKS, f"{x} {ann}") for x in ("", "cache=bank:resident=40f"))
    assert_same(play(one, 6), play(other, 6))
    for at in (one, other):
        at.memory.rewind(at.memory.latent_frame - keep, keep)
    assert all(int(layer.bank.tensors["used"]) == 0 for layer in other.memory.layers)
    assert one.memory.past == other.memory.past == keep * one.shape.tokens_per_frame
    assert_same(play(one, 6, seed=1), play(other, 6, seed=1))


def test_a_bank_keeps_no_more_than_its_sink_when_it_is_rewound():
    at = session(CHUNKS, SMALL)
    play(at, 6)
    before = {name: x.clone() for name, x in at.memory.layers[0].bank.tensors.items()}
    refused(lambda: at.memory.rewind(4, 8), "sealed", "keep fewer")
    assert at.memory.latent_frame == 12
    assert all(torch.equal(x, before[name]) for name, x in at.memory.layers[0].bank.tensors.items())


def test_what_leaves_a_full_bank_is_what_repeats():
    at = session(CHUNKS, "cache=bank:resident=7f,budget=20f attention=ann:k=24,block=1,tile=3")
    rng = torch.Generator().manual_seed(0)
    still = draw(rng, at.shape, 12, at.dtype)
    still[0][1][..., :4] = still[1][1][..., :4] = 0.0  # what turns with time
    seen = []
    for chunk in range(30):
        # every fifth chunk shows something new, the others what was there already
        layers = draw(rng, at.shape, 12, at.dtype) if chunk % 5 == 0 else still
        pos = at.shape.positions(at.memory.latent_frame, 2)
        for step in range(3):
            play_pass(at, layers, pos, step, 3)
        if chunk % 5 == 0 and chunk:
            seen.append(at.memory.layers[0].k[:, :, at.memory.past : at.memory.past + 12].clone())
        at.commit()
    bank = at.memory.layers[0].bank
    assert int(bank.tensors["used"]) == bank.layout.capacity
    assert (bank.tensors["alike"] != UNUSED).all()
    held = bank.host["k"].flatten(2, 3)
    kept = [
        (x[0, h, i] == held[0, h]).all(-1).any()
        for x in seen for h in range(2) for i in range(12)
    ]  # fmt: skip
    # 5 of the last 29 chunks were new, and the bank holds 10, three the newest: what repeats has left
    assert all(kept)


def test_first_views_stay_in_a_full_bank_and_what_was_given_leaves_last():
    """Scenes of one chunk each: two are given, one drawn; all are then drawn over and over, and a
    bank of six chunks has room for three more, which are the newest."""
    plan = "cache=bank:resident=7f,budget=12f attention=ann:k=24,block=1,tile=3,sink=0,newest=0"
    at = session(CHUNKS, plan)
    rng = torch.Generator().manual_seed(0)
    scenes = [draw(rng, at.shape, 12, at.dtype) for _ in range(3)]
    for scene in scenes:
        for part in scene:
            part[1][..., :4] = 0.0  # what turns with time
    views = []

    def show(scene, given=False):
        new = draw(rng, at.shape, 12, at.dtype)  # values tell views of a scene apart
        layers = [[q, k, mine[2], x] for (q, k, _, x), mine in zip(scenes[scene], new, strict=True)]
        pos = at.shape.positions(at.memory.latent_frame, 2)
        for step in (2,) if given else range(3):
            play_pass(at, layers, pos, step, 3)
        views.append(at.memory.layers[0].v[:, :, at.memory.past : at.memory.past + 12].clone())
        at.commit()

    def held():
        """Of every view so far, the entries that the bank has."""
        host = at.memory.layers[0].bank.host["v"].flatten(2, 3)
        return [
            sum(bool((x[0, h, i] == host[0, h]).all(-1).any()) for h in range(2) for i in range(12))
            for x in views
        ]

    show(0, given=True), show(1, given=True), show(2)
    assert int(at.memory.layers[0].bank.tensors["given"]) == 0
    for scene in (0, 1, 2) * 3:
        show(scene)
    assert held() == [24] * 3 + [0] * 6 + [24] * 3
    stays = at.memory.layers[0].bank.tensors["alike"][0, :, :24]
    assert (stays < -1).all()  # what was given leaves after all that was drawn
    for scene in (0, 1, 2) * 2:  # drawings that are like nothing
        scenes[scene] = draw(rng, at.shape, 12, at.dtype)
        show(scene)
    assert held()[:2] == [24, 24]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("host", HOST)
@pytest.mark.parametrize("size", [(2, 1, 5, 12, 3, 7), (1, 2, 2, 96, 5, 2)])
def test_blocks_in_host_memory_read_back_as_defined(host, size, device):
    batch, heads, slots, width, block, most = size
    rng = torch.Generator().manual_seed(0)
    # a part of a cache: more slots before and behind
    k, v = (torch.randn(batch, heads, slots * block + 5, width, generator=rng) for _ in "kv")
    part, count = slice(3, 3 + slots * block), 2
    rows = [torch.randperm(most, generator=rng)[:count] for _ in range(batch * heads)]
    ids = torch.stack(rows).view(batch, heads, count).int()
    rows = [torch.randperm(slots, generator=rng)[:count] for _ in range(batch * heads)]
    stood = torch.stack(rows).view(batch, heads, count).int()
    want = [stored_reference(x[:, :, part], block, host) for x in (k, v)]
    for backend in _backends(device):
        held = host_tensors((batch, heads, most, block), width, host, k.dtype, torch.device(device))
        blocks, (a, b) = HostBlocks(**held), (x.to(device) for x in (k, v))
        backend.store_blocks(a[:, :, part], b[:, :, part], stood.to(device), blocks, ids.to(device))
        # nothing is copied to the first slot
        asked = torch.cat([torch.full_like(ids[:, :, :1], -1), ids], 2)
        out = [torch.full((batch, heads, 3 * block + 5, width), 7.0, device=device) for _ in "kv"]
        to = slice(2, 2 + 3 * block)
        backend.load_blocks(blocks, asked.to(device), out[0][:, :, to], out[1][:, :, to])
        for x, value in zip(out, want, strict=True):
            x = x.cpu()
            assert (x[:, :, : 2 + block] == 7.0).all() and (x[:, :, to.stop :] == 7.0).all()
            index = stood.long()[..., None, None].expand(-1, -1, -1, block, width)
            found = x[:, :, 2 + block : to.stop].unflatten(2, (count, block)).double()
            off = (found - value.gather(2, index)).abs()
            # one code where a number lies between two
            assert (off > 1e-5).double().mean() < 0.02
            assert off.max() <= 2.02 * value.abs().max() / {"int8": 254, "int4": 15}.get(host, 1e9)


def _backends(device):
    if device == "cpu":
        yield blocks_torch
    if device == "cpu" and torch.cuda.is_available():
        return  # where kernels are compiled, they take no tensors of the CPU
    pytest.importorskip("triton")
    from tachyscope.kernels.host_blocks import triton as blocks_triton

    yield blocks_triton


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("host", ["int8", "int4"])
def test_codes_of_ties_are_those_of_torch(host, device):
    """Values half way between two codes."""
    if host == "int8":
        x = (torch.arange(508) % 254 - 126.5).view(1, 1, -1, 1).repeat(1, 1, 1, 64)
        x[..., ::32] = 127
    else:
        # of a block and channel a step is 1, from a zero of -3 on
        half = torch.arange(15) + 0.5
        blocks = torch.stack([torch.zeros(15), half, half.flip(0), torch.full((15,), 15.0)], 1)
        x = (blocks - 3).view(1, 1, -1, 1).repeat(1, 1, 1, 64)
    ids = torch.arange(x.shape[2] // 4).view(1, 1, -1).int()
    for backend in _backends(device):
        held = host_tensors((1, 1, ids.numel(), 4), 64, host, x.dtype, torch.device(device))
        blocks, y, n = HostBlocks(**held), x.to(device), ids.to(device)
        backend.store_blocks(y, y, n, blocks, n)
        code, _ = blocks_torch.encode(x.unflatten(2, (-1, 4)), blocks.k.dtype)
        if device == "cuda":
            torch.cuda.synchronize()  # the kernel writes to host memory
        assert torch.equal(blocks.k.cpu(), code)


@pytest.mark.slow
@pytest.mark.parametrize("host", HOST)
def test_the_kernels_serve_a_whole_video(host, serve_by_triton):
    """Triton instead of stock torch, interpreted: the same video."""
    pytest.importorskip("triton")
    plan = f"cache=bank:resident=12f,budget=20f,host={host} attention=ann:k=30,block=4,tile=3"
    want = play(session(CHUNKS, plan, dtype=torch.float32), 12)
    serve_by_triton("host_blocks.load_blocks", "host_blocks.store_blocks")
    at = session(CHUNKS, plan, dtype=torch.float32)
    found = play(at, 12)
    assert counted(at)["blocks_fetched"] > 0
    off = [float((x[0] - y[0]).abs().max()) for x, y in zip(want, found, strict=True)]
    # a code of half a step may go either way
    assert max(off) < {"native": 1e-6, "int8": 0.05, "int4": 0.5}[host]


@pytest.mark.parametrize("host", ["int8", "int4"])
def test_codes_in_host_memory_stay_near_native(host):
    native, coded = (
        session(CHUNKS, SMALL.replace("60f", f"60f,host={x}")) for x in ("native", host)
    )
    want, found = play(native, 8), play(coded, 8)
    off = [
        float((x[0] - y[0]).abs().mean() / x[0].abs().mean())
        for x, y in zip(want, found, strict=True)
    ]
    assert 0 < max(off) < 0.01


@pytest.mark.parametrize(
    "plan, told",
    [
        ("cache=bank", "attention=dense"),
        ("cache=bank attention=ann:k=24,dense_layers=0.5", "dense_layers"),
        ("cache=bank store=int8 attention=ann:k=24", "store=int8"),
        ("cache=bank:budget=9f attention=ann:k=24", "raise budget to 21f"),
        ("cache=bank:resident=4f attention=ann:k=24", "raise resident"),
    ],
)
def test_what_a_bank_cannot_serve_is_refused_in_one_line(plan, told):
    refused(lambda: session(CHUNKS, plan), "bank", told)


@pytest.mark.parametrize("grid", [(2, 3), (8, 8), (30, 52)])
def test_the_attention_that_a_refusal_names_is_not_refused(grid):
    shape, plan = dataclasses.replace(CHUNKS, grid=grid, chunk=3), "dense text=none cache=bank %s"
    message = refused(lambda: Plan.parse(plan % "attention=dense").check(shape), "cannot serve")
    advised = Plan.parse(plan % message.rpartition("use ")[2])
    advised.check(shape)
    assert slots_for(advised, shape, (), None) == 21 * grid[0] * grid[1]


def test_a_bank_larger_than_host_memory_is_refused():
    plan = f"cache=bank:budget=1000000f {ANN}"
    wide = dataclasses.replace(CHUNKS, layers=200)
    refused(lambda: session(wide, plan), "host memory", "set host=int4")
    for coded in (plan.replace("000f", "000f,host=int4"), f"{plan} store=fp8"):
        assert "set host" not in refused(lambda coded=coded: session(wide, coded))


def test_its_text_parses_back():
    plan = Plan.parse("cache=bank:resident=12f,host=int4 attention=ann:k=640")
    assert Plan.parse(str(plan)) == plan


def test_memory_that_cannot_be_page_locked_is_refused(monkeypatch):
    class Refusing:
        def cudaHostRegister(self, *_):
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    refused(lambda: register(torch.zeros(8)), "page-lock", "budget")


@pytest.mark.parametrize("block", [5, 7])
def test_what_fills_a_last_block_up_is_no_entry(block):
    """Blocks that do not divide a chunk's 12 entries: all of the past is read, each entry once."""
    plan = f"cache=bank:resident=40f,host=native attention=ann:read=1,block={block},tile=3"
    bank, dense = session(CHUNKS, plan), session(CHUNKS, "")
    assert_same(play(bank, 6), play(dense, 6), 1e-9)
    live = bank.memory.layers[0].bank.tensors["log_count"][0, 0] > -torch.inf
    assert int(live[: bank.memory.past].sum()) == bank.memory.total_entries


def test_a_chunk_of_one_pass_waits_for_all_that_it_reads(monkeypatch):
    """As given frames are: there is no later pass in which what is fetched could arrive."""
    at = session(CHUNKS, f"cache=bank:resident=10f,budget=60f {ANN}")
    play(at, 12)
    told, bank = [], type(at.memory.layers[0].bank)
    own = bank.choose

    def choose(self, mass, past, read, early, passes):
        told.append(early)
        own(self, mass, past, read, early, passes)

    monkeypatch.setattr(bank, "choose", choose)
    rng = torch.Generator().manual_seed(5)
    for steps in (3, 1):
        play_pass(at, draw(rng, CHUNKS, 12), CHUNKS.positions(at.memory.latent_frame, 2), 0, steps)
        at.commit()
    assert told == [True, True, False, False]  # in each of two layers


@pytest.mark.skipif(ram() is None, reason="needs /proc")
def test_on_a_cpu_a_bank_of_unknown_length_takes_what_its_blocks_fill(monkeypatch):
    monkeypatch.undo()  # `torch.empty` as it is, which writes nothing
    wide = dataclasses.replace(CHUNKS, layers=1, head_dim=128, width=512)
    plan = "cache=bank:resident=10f,budget=20000f attention=ann:k=24,block=12,tile=3"
    before = ram()
    at = session(wide, plan, rope=Rope(((128, (1, 0, 0)),)))
    reserved = sum(x.nbytes for x in at.memory.layers[0].host_tensors().values())
    opened = ram() - before
    play(at, 10)
    taken = ram() - before
    assert reserved > 400e6
    assert opened <= taken < reserved / 4


@pytest.mark.parametrize("host", HOST)
@pytest.mark.parametrize("attention", [ANN, "attention=similar:newest=1"])
def test_host_memory_is_written_before_it_is_read(host, attention):
    plan = f"cache=bank:resident=10f,budget=30f,host={host} {attention}"
    plain, poisoned = (session(CHUNKS, plan) for _ in range(2))
    for layer in poisoned.memory.layers:
        for x in layer.bank.host.values():
            x.view(torch.uint8).fill_(255)  # NaN, where these are floats
    assert_same(play(plain, 14), play(poisoned, 14))
