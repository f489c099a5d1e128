"""Each published model's stock plan is its authors' protocol; every container brings it back."""

import dataclasses
import importlib
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from faults import refused
from torch import nn
from toys import open_session

import tachyscope as ts
from tachyscope.cli import main
from tachyscope.core.errors import TachyscopeWarning
from tachyscope.core.observers import Observer
from tachyscope.core.rollout import rollout
from tachyscope.measure.fill import fill
from tachyscope.models.checkpoint import write_tensors
from tachyscope.models.registry import MODELS
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.context import Recache
from tachyscope.models.wan.loading import WEIGHTS, load_wan, save_wan
from tachyscope.models.wan.names import wan_name
from tachyscope.models.wan.plain_parts import BytesText
from tachyscope.models.wan.presets import PRESETS
from tachyscope.models.wan.random import random_wan
from tachyscope.models.wan.transformer import WanCausal

# heads of 128, so that shapes tell them; all else of a preset stays as it is
SMALL = {
    "dim": 256, "ffn_dim": 64, "layers": 2, "heads": 2, "in_channels": 4, "text_dim": 16,
    "text_len": 8, "freq_dim": 32, "size": (4, 4),
}  # fmt: skip


def small(name, **changes):
    return dataclasses.replace(PRESETS[name].config, **(SMALL | changes))


@pytest.fixture
def shrunk(monkeypatch):
    for name, preset in list(PRESETS.items()):
        monkeypatch.setitem(PRESETS, name, dataclasses.replace(preset, config=small(name)))


@dataclass(frozen=True)
class Protocol:
    """How a model's authors run it, in their own numbers."""

    window: int  # latent frames in view, the present chunk's and the sink included
    chunk: int = 3
    sink: int = 0
    relative: bool = False  # positions count from the window's first frame
    stretch: int = 0  # latent frames after which a new stretch starts from the last chunk
    apart: bool = False  # each stretch is decoded as a video of its own
    fold: float = 1.0  # what the sink keeps of itself when a frame leaves
    times: tuple[float, ...] = (1000, 937.5, 2500 / 3, 625)
    first_times: tuple[float, ...] = ()
    shift: float = 5.0


FOUR = (1000, 937.5, 2500 / 3, 625)
PROTOCOLS = {
    "self-forcing": Protocol(21),
    "causal-forcing": Protocol(21),
    "causal-forcing-framewise": Protocol(21, chunk=1),
    "causal-forcing-2step": Protocol(21, chunk=1, times=(1000, 2500 / 3), first_times=FOUR),
    "causal-forcing-1step": Protocol(21, chunk=1, times=(1000,), first_times=FOUR),
    "causvid": Protocol(21, times=(1000, 757, 522), shift=8.0, stretch=21, apart=True),
    "longlive": Protocol(12, sink=3),
    "infinite-forcing": Protocol(6, sink=1, relative=True),
    "reward-forcing": Protocol(9, sink=3, relative=True, fold=0.999),
    "krea": Protocol(6, times=(*FOUR, 0), stretch=6),
}
# Rolling-Forcing is stated by `roll`
ROLLED = (1000, 20000 / 21, 15000 / 17, 10000 / 13, 5000 / 9)

# a frame or a mix of frames by weight, and the position it has in someone's view
Entry = tuple[dict[int, float], int]


def view(p: Protocol, sizes: list[int]) -> list[Entry]:
    """What a chunk's queries see: frames with positions, the chunk's own last.

    `sizes` are the latent frames of the chunks up to it.
    """
    first, past = 0, []
    for size in sizes[:-1]:
        past += [{first + i: 1.0} for i in range(size)]
        first += size
        gone = max(0, len(past) - (p.window - p.chunk))
        for i in range(gone if p.fold < 1 else 0):
            mix, (left,) = past[i % p.sink], past[p.sink + i]
            past[i % p.sink] = {f: w * p.fold for f, w in mix.items()} | {left: 1 - p.fold}
        del past[p.sink : p.sink + gone]
    entries = past + [{first + i: 1.0} for i in range(sizes[-1])]
    return [(mix, i if p.relative else max(mix)) for i, mix in enumerate(entries)]


class Told:
    """Stands in for a session: all chunks in one pass, each seeing the entries listed for it.

    `sizes` are the chunks' latent frames, which are the last of their own entries; each chunk is
    told its own text.
    """

    def __init__(self, adapter, contexts, views, sizes):
        self.shape = adapter.shape()
        self.own = [size * self.shape.tokens_per_frame for size in sizes]
        self.rope = adapter.rope(self.shape)
        self.texts = [adapter.transformer.keys_values(context) for context in contexts]
        self.views = []
        for entries in views:
            mixes = torch.zeros(len(entries), sum(sizes), dtype=torch.float64)
            for row, (mix, _) in zip(mixes, entries, strict=True):
                row[list(mix)] = torch.tensor(list(mix.values()), dtype=torch.float64)
            pos = torch.cat([self.shape.positions(at, 1) for _, at in entries])
            self.views.append((mixes, pos[None, None]))

    def attend(self, layer, q, k, v):
        out = []
        k, v = (x.unflatten(2, (-1, self.shape.tokens_per_frame)) for x in (k, v))
        for queries, (mixes, pos) in zip(q.split(self.own, 2), self.views, strict=True):
            own = queries.shape[2]
            keys, values = (torch.einsum("ef,bhfnd->bhend", mixes, x).flatten(2, 3) for x in (k, v))
            queries = self.rope.rotate(queries, pos[:, :, -own:])
            keys = self.rope.rotate(keys, pos)
            out.append(F.scaled_dot_product_attention(queries, keys, values))
        return torch.cat(out, 2)

    def cross(self, layer, q):
        parts = zip(q.split(self.own, 2), self.texts, strict=True)
        out = [F.scaled_dot_product_attention(q, k[layer], v[layer]) for q, (k, v) in parts]
        return torch.cat(out, 2)

    def mlp(self, layer, x, fn):
        return fn(x)


@torch.no_grad()
def play(adapter, p: Protocol, chunks: int, prompt: str, draw, given=()):
    """The protocol from its statement: every pass recomputes every chunk from the latents."""
    text = adapter.encode_prompt(prompt).context.double()
    done, made = list(given), []  # of this stretch, and in all
    for chunk in range(chunks):
        if p.stretch and len(done) * p.chunk == p.stretch:
            done = [encoded_again(adapter, done if p.apart else made)]
        sizes = [x.shape[2] for x in done] + [p.chunk]
        views = [view(p, sizes[: i + 1]) for i in range(len(sizes))]
        told = Told(adapter, [text] * len(sizes), views, sizes)
        steps = p.first_times if p.first_times and chunk == 0 else p.times
        done.append(denoised(adapter, p, told, done, steps, draw))
        made.append(done[-1])
    return made


def denoised(adapter, p, told, done, steps, draw):
    """One chunk more, behind those that are done."""
    x, clean = draw(), None
    for t in steps:
        sigma = sigma_of(t, p.shift)
        if clean is not None:
            x = (1 - sigma) * clean + sigma * draw()
        latents = torch.cat([*done, x], 2)
        times = torch.zeros(1, latents.shape[2])
        times[:, -p.chunk :] = t
        clean = x - sigma * adapter.transformer(told, latents, times)[:, :, -p.chunk :]
    return clean


@torch.no_grad()
def play_retold(adapter, p: Protocol, before, chunks: int, prompts, draw):
    """LongLive after a change of prompt.

    Where the video is longer than its window, the sink is what was remembered of the first frames
    under the first prompt; what stands behind it is one block, which sees the sink and itself.
    """
    first, second = (adapter.encode_prompt(prompt).context.double() for prompt in prompts)
    latents = torch.cat(before, 2)
    made = latents.shape[2]
    if made > p.window:
        done = [latents[:, :, : p.sink], latents[:, :, made - p.window + p.sink :]]
        place = [*range(p.sink), *range(made - p.window + p.sink, made)]
        views, texts = [range(p.sink), range(p.window)], [first, second]
    else:
        done, place, views, texts = [latents], list(range(made)), [range(made)], [second]
    for _ in range(chunks):
        held = len(place)
        place += range(place[-1] + 1, place[-1] + 1 + p.chunk)
        newest = range(max(p.sink, held - (p.window - p.chunk - p.sink)), held + p.chunk)
        views.append([*range(p.sink), *newest])
        texts.append(second)
        seen = [[({i: 1.0}, place[i]) for i in frames] for frames in views]
        sizes = [x.shape[2] for x in done] + [p.chunk]
        told = Told(adapter, texts, seen, sizes)
        done.append(denoised(adapter, p, told, done, p.times, draw))
    return done[-chunks:]


def drawn(seed, chunk):
    rng = torch.Generator().manual_seed(seed)
    size = (1, SMALL["in_channels"], chunk, *SMALL["size"])
    return lambda: torch.randn(size, generator=rng).double()


def sigma_of(t, shift):
    table = [1000 * shift * n / (1000 + (shift - 1) * n) for n in range(1, 1001)]
    return min(table, key=lambda level: abs(level - t)) / 1000


def encoded_again(adapter, made):
    """The last chunk, its first latent frame being what the VAE makes of its last picture alone.

    Of the picture as it was decoded: not as it was shown, in 8 bits.
    """
    latents = torch.cat(made, 2)
    pictures = adapter.decoder.levels(latents, {})
    # four pictures a latent frame: behind the one that is meant are those of two latent frames
    first = adapter.decoder.encode(pictures[-9:-8])
    return torch.cat([first, latents[:, :, -2:]], 2)


@torch.no_grad()
def roll(adapter, chunks, prompt, seed, given=()):
    """Rolling-Forcing from its statement: five blocks a window, each a step cleaner than the next.

    A window sees the first block, right before the newest clean ones: 21 latent frames with its
    own. A finished block is run clean, and sees the newest 21 with its own, and no anchor.
    """
    draw, text = drawn(seed, 3), adapter.encode_prompt(prompt).context.double()
    finished, noisy = list(given), {}
    for window in range(chunks + 4):
        start, end = max(0, window - 4), min(chunks - 1, window)
        if window < chunks:
            noisy[window] = draw()
        blocks = range(start, end + 1)
        before, width = 3 * len(finished), 3 * len(blocks)
        views = [
            [({i: 1.0}, i) for i in range(max(0, 3 * j + 3 - 21), 3 * j + 3)]
            for j in range(len(finished))
        ]
        newest = [i for i in range(3, before) if i >= before - (21 - width - 3)]
        anchor = [({i: 1.0}, before - len(newest) - 3 + i) for i in range(min(3, before))]
        own = range(before, before + width)
        views.append([*anchor, *(({i: 1.0}, i) for i in (*newest, *own))])
        sizes = [3] * len(finished) + [width]
        told = Told(adapter, [text] * len(sizes), views, sizes)
        x = torch.cat([noisy[i] for i in blocks], 2)
        times = torch.zeros(1, before + width)
        for i in blocks:
            times[:, before + 3 * (i - start) :][:, :3] = ROLLED[window - i]
        said = adapter.transformer(told, torch.cat([*finished, x], 2), times)[:, :, before:]
        for i, flow in zip(blocks, said.split(3, 2), strict=True):
            step = window - i
            clean = noisy[i] - sigma_of(ROLLED[step], 5.0) * flow
            if step == 4:
                finished.append(clean)
            else:
                sigma = sigma_of(ROLLED[step + 1], 5.0)
                noisy[i] = (1 - sigma) * clean + sigma * draw()
    return finished[len(given) :]


class Pixels:
    """Stands in for a VAE: a picture shows its latent frame and, less and less, those before."""

    name = "pixels"

    def __init__(self):
        rng = torch.Generator().manual_seed(1)
        self.colour = torch.randn(3, SMALL["in_channels"], generator=rng).double() / 6
        self.latent = 4 * torch.randn(SMALL["in_channels"], 3, generator=rng).double()

    def pixel_frames(self, latents):
        return max(0, 4 * latents - 3)

    def encode(self, frames):
        pixels = torch.as_tensor(frames).double() / 255 - 0.5
        return torch.einsum("ck,fhwk->cfhw", self.latent, pixels)[None]

    def skip(self, latents, features):
        self(latents, features)

    def __call__(self, latents, features):
        return self.levels(latents, features).round().to(torch.uint8).numpy()

    def levels(self, latents, features):
        shown = []
        for latent in latents[0].unbind(1):
            last = features.get("last")
            for part in range(1, 5) if last is not None else [4]:
                mixed = latent if last is None else (part * latent + (4 - part) * last) / 4
                shown.append(torch.einsum("kc,chw->hwk", self.colour, mixed) + 0.5)
            features["last"] = latent if last is None else (2 * latent + last) / 3
        return 255 * torch.stack(shown).clamp(0, 1)


# test_worlds.py has their protocols
WORLDS = {"abot-world", "lingbot-world", "lingbot-world-14b", "matrix-game-2",
          "matrix-game-2-drive", "matrix-game-2-run"}  # fmt: skip


def test_every_preset_has_its_protocol_here():
    assert {*PROTOCOLS, "rolling-forcing"} | WORLDS == PRESETS.keys()
    assert all(MODELS[name].weights and MODELS[name].wan for name in PRESETS)


def published(name, folder):
    """A preset of random weights as its file brings it, in float64, with a prompt and a VAE."""
    made = ts.load(name, "random")
    save_wan(made, folder / "model.pt")
    model = ts.load(name, folder / "model.pt", dtype="float64")
    model.text, model.decoder = made.text, Pixels()
    return model


def assert_same(found, expected):
    assert expected[-1].std() > 0.5
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


# of those that run as another does, in longer videos or with more passes, the slow tests have more
LONG = {
    "causal-forcing", "causal-forcing-framewise", "causal-forcing-2step", "causal-forcing-1step",
    "infinite-forcing",
}  # fmt: skip


def by_name(names):
    marked = [pytest.param(x, marks=pytest.mark.slow if x in LONG else ()) for x in names]
    return pytest.mark.parametrize("name", marked)


@by_name(PROTOCOLS)
def test_stock_is_the_authors_protocol(name, shrunk, tmp_path):
    protocol, model = PROTOCOLS[name], published(name, tmp_path)
    # two chunks more than the window holds: a sink has moved, or was folded into, twice
    chunks = protocol.window // protocol.chunk + 2
    if protocol.stretch:
        chunks = 2 * protocol.stretch // protocol.chunk  # the third stretch has begun
    session = open_session(model, "stock", prompt="a", seed=7)
    found, shown = [], []
    for chunk in rollout(
        model, frames=model.pixel_frames(chunks * protocol.chunk), stream=ts.Stream(model, session)
    ):
        found.append(session.memory.latents)
        shown.append(chunk.frames)
    assert_same(found, play(model, protocol, chunks, "a", drawn(7, protocol.chunk)))
    # a frame that was encoded again is shown once, as it was
    expected = model.decoder(torch.cat(found, 2), {})
    if protocol.apart:
        done, pictures = [], []
        for latents in found:
            if len(done) * protocol.chunk == protocol.stretch:
                done = [encoded_again(model, done)]
            done.append(latents)
            pictures.append(model.decoder(torch.cat(done, 2), {})[-12:])
        seamless, expected = expected, np.concatenate(pictures)
        assert len(seamless) == len(expected) and not np.array_equal(seamless, expected)
    assert np.array_equal(np.concatenate(shown), expected)
    assert session.memory.features.tensors().keys() == {"features.last"}


@by_name(
    [
        "self-forcing", "causal-forcing-framewise", "causal-forcing-2step", "causal-forcing-1step",
        "longlive", "infinite-forcing", "reward-forcing",
    ],
)  # fmt: skip
def test_given_latents_are_run_clean_and_gone_on_from(name, shrunk, tmp_path):
    protocol, model = PROTOCOLS[name], published(name, tmp_path)
    # a chunk more than the window holds
    given = [drawn(9 + i, protocol.chunk)() for i in range(protocol.window // protocol.chunk + 1)]
    session = open_session(model, "stock", prompt="a", seed=7)
    ts.Stream(model, session).refill(torch.cat(given, 2), "b")
    found = latents_of(model, session, 2)
    noise = drawn(7, protocol.chunk)
    assert_same(found, play(model, protocol, len(found), "b", noise, given))


@pytest.mark.parametrize("name", ["causal-forcing-2step", "causal-forcing-1step"])
def test_the_first_generated_chunk_has_its_own_steps(name, shrunk, tmp_path, monkeypatch):
    """Behind a given image too; never again in the same video, and not behind a filled cache."""
    protocol, model = PROTOCOLS[name], published(name, tmp_path)
    image = np.random.default_rng(3).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
    whole = model.decoder.encode
    monkeypatch.setattr(model.decoder, "encode", lambda frames: whole(frames[:, ::8, ::8]))
    given, noise = [model.encode_frames(image)], drawn(7, 1)
    session = open_session(model, "stock", prompt="a", seed=7, first=image)
    found = [
        session.memory.latents for _ in rollout(model, frames=12, stream=ts.Stream(model, session))
    ]
    expected = play(model, protocol, 3, "a", noise, given)
    assert_same(found, expected)
    for change in ("restored", "refilled", "changed"):
        other = open_session(model, "stock", prompt="a", seed=7, first=image)
        other.restore(session.state())
        later, prompt = dataclasses.replace(protocol, first_times=()), "a"
        then = [(4, "b")] if change == "changed" else ()
        rng = torch.Generator()
        rng.set_state(session.generators[0].get_state())
        draw = lambda rng=rng: torch.randn(given[0].shape, generator=rng).double()  # noqa: E731
        before = [*given, *expected]
        if change == "refilled":
            prompt = "b"
            ts.Stream(model, other).refill(torch.cat(before, 2), prompt)
        on = [
            other.memory.latents[:, :, -1:]
            for _ in rollout(model, frames=8, stream=ts.Stream(model, other), then=then)
        ]
        told = play(model, later, 1 if then else 2, prompt, draw, before)
        if then:
            # of a session that is gone on with, the last chunks are remembered again
            told += play(model, later, 1, "b", draw, [expected[-1], *told])
        assert_same(on, told)
    filled = open_session(model, "stock", prompt="a", seed=7)
    fill(filled, 2)
    (stats,) = [chunk.stats for chunk in rollout(model, frames=4, stream=ts.Stream(model, filled))]
    (first,) = [chunk.stats for chunk in rollout(model, "stock", frames=1)]
    assert stats["macs"] < first["macs"]


@pytest.mark.parametrize(
    "name, count",
    [
        pytest.param(name, count, marks=() if i == j else pytest.mark.slow)
        for i, name in enumerate(["longlive", "infinite-forcing", "reward-forcing"])
        for j, count in enumerate([1, 2, 4])
    ],
)
def test_given_latents_need_not_be_whole_chunks(name, count, shrunk, tmp_path):
    """What then leaves for the third chunk is less than the sink: its first frames take it in."""
    protocol, model = PROTOCOLS[name], published(name, tmp_path)
    given = torch.cat([drawn(9, 1)() for _ in range(count)], 2)
    session = open_session(model, "stock", prompt="a", seed=7)
    ts.Stream(model, session).refill(given, "a")
    found = latents_of(model, session, 5)
    expected = play(model, protocol, 5, "a", drawn(7, 3), list(given.split(3, 2)))
    assert_same(found, expected)
    if protocol.fold < 1:
        # at 0.999 a fold hardly shows: that one is held to the statement with a strong one too
        strong = dataclasses.replace(protocol, fold=0.5)
        session = open_session(model, model.stock.replace("0.999", "0.5"), prompt="a", seed=7)
        ts.Stream(model, session).refill(given, "a")
        found = latents_of(model, session, 5)
        assert_same(found, play(model, strong, 5, "a", drawn(7, 3), list(given.split(3, 2))))
        assert (found[-1] - expected[-1]).abs().max() > 0.01


# after more than a window; after less, as much, and more still
@pytest.mark.slow
@pytest.mark.parametrize("changes", [(15,), pytest.param((6, 12, 18), marks=pytest.mark.slow)])
def test_a_change_of_prompt_remembers_the_window_again(changes, shrunk, tmp_path):
    """LongLive, its LoRA merged: the last 12 latent frames run clean under the new text, and on."""
    made, protocol = ts.load("longlive", "random"), PROTOCOLS["longlive"]
    parts = made.transformer.blocks.named_modules(prefix="blocks")
    sizes = {name: x.weight.shape for name, x in parts if isinstance(x, nn.Linear)}
    tensors = {name: x / 8 for name, x in lora("peft", sizes)[0].items()}
    save_wan(made, tmp_path / "base.pt")
    torch.save({"generator_lora": tensors}, tmp_path / "lora.pt")
    model = ts.load("longlive", tmp_path / "base.pt", dtype="float64", lora=tmp_path / "lora.pt")
    stated = ts.load("longlive", tmp_path / "base.pt", dtype="float64")
    for name in sizes:
        up, down = (tensors[f"base_model.model.model.{name}.lora_{x}.weight"] for x in "BA")
        stated.transformer.get_parameter(f"{name}.weight").data += up.double() @ down.double()
    for one in (model, stated):
        one.text, one.decoder = made.text, Pixels()
    session = open_session(model, "stock", prompt="a", seed=7)
    noise, unchanged_noise = drawn(7, 3), drawn(7, 3)
    before, expected = latents_of(model, session, 6), play(stated, protocol, 6, "a", noise)
    assert_same(before, expected)
    ts.Stream(model, session).refill(torch.cat(before[-4:], 2), "b")
    after = latents_of(model, session, 3)
    expected += play(stated, protocol, 3, "b", noise, expected[-4:])
    assert_same(after, expected[-3:])
    unchanged = play(stated, protocol, 7, "a", unchanged_noise)
    assert (after[0] - unchanged[-1]).abs().max() > 0.01
    # said beforehand, it happens where the next chunk begins, and as by its authors: in one pass
    for frames in changes:
        session = open_session(model, "stock", prompt="a", seed=7, frames=model.pixel_frames(27))
        then = [(model.pixel_frames(frames) - 2, "b")]
        chunks = rollout(
            model, frames=model.pixel_frames(27), then=then, stream=ts.Stream(model, session)
        )
        found = [session.memory.latents[:, :, -3:] for _ in chunks]
        noise, more = drawn(7, 3), 9 - frames // 3
        expected = play(stated, protocol, frames // 3, "a", noise)
        again = play_retold(stated, protocol, expected, more, "ab", noise)
        assert_same(found, expected + again)


@pytest.mark.parametrize(
    "name",
    [
        "krea",
        "rolling-forcing",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("causvid", "self-forcing")),
    ],
)
def test_a_chunk_made_ahead_never_hangs_on_one_that_was_not_shown(
    name, shrunk, tmp_path, monkeypatch
):
    model, order = published(name, tmp_path), []
    loop = importlib.import_module(
        "tachyscope.core.rollout"
    )  # the package's own name is the function
    for call in ("sample", "decode_latents"):
        whole = getattr(model, call)

        def note(*given, call=call, whole=whole):
            order.append(call)
            return whole(*given)

        monkeypatch.setattr(model, call, note)
    films = []
    for beside in (False, True):
        monkeypatch.setattr(loop, "runs_beside", lambda device, beside=beside: beside)
        order.clear()
        films.append([c.frames for c in rollout(model, "stock", frames=model.pixel_frames(27))])
        ahead = beside and model.overlaps_decode
        assert order[:3] == [
            "sample",
            *(["sample", "decode_latents"] if ahead else ["decode_latents", "sample"]),
        ]
    assert model.context.decodes_in_loop == (name in ("krea", "causvid"))
    assert all(np.array_equal(a, b) for a, b in zip(*films, strict=True))


@pytest.mark.parametrize("given", [3, *(pytest.param(x, marks=pytest.mark.slow) for x in (0, 1))])
def test_a_rolled_window_is_the_authors_protocol(given, shrunk, tmp_path):
    model = published("rolling-forcing", tmp_path)
    latents = [drawn(5 + i, 3)() for i in range(given)]
    # until the clean pass no longer sees the first block, and the window has run empty
    chunks = 11
    session = open_session(
        model, "stock", prompt="a", seed=7, frames=model.pixel_frames(3 * chunks)
    )
    if given:
        ts.Stream(model, session).refill(torch.cat(latents, 2), "a")
    frames, found = model.pixel_frames(3 * (given + chunks)) - model.pixel_frames(3 * given), []
    for _ in rollout(model, frames=frames, stream=ts.Stream(model, session)):
        found.append(session.memory.latents)
    assert session.memory.features.tensors().keys() == {"features.last"}
    assert_same(found, roll(model, chunks, "a", 7, latents))


WIDE = "cache=merge:budget=99f attention=ann:read=1 text=pads replay=attentive:share=0"
NARROW = (
    "cache=merge:budget=22f,newest=3 attention=ann:read=0.5,block=2,tile=4 text=pads "
    "replay=attentive:share=0.5,age=2"
)


def latents_of(model, session, chunks):
    frames = model.pixel_frames(session.memory.latent_frame + 3 * chunks) - model.pixel_frames(
        session.memory.latent_frame
    )
    return [
        session.memory.latents
        for _ in rollout(model, frames=frames, stream=ts.Stream(model, session))
    ]


@pytest.mark.slow
def test_policies_wide_open_leave_a_rolled_window_as_it_is(shrunk, tmp_path):
    model = published("rolling-forcing", tmp_path)
    dense, wide, narrow = (
        latents_of(model, open_session(model, plan, prompt="a", seed=2), 8)
        for plan in ("dense", WIDE, NARROW)
    )
    torch.testing.assert_close(wide, dense, rtol=0, atol=1e-8)
    assert (narrow[-1] - dense[-1]).abs().max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "stock",
        "replay=attentive:share=0.5,drift=true",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("dense", NARROW)),
    ],
)
def test_a_rolled_window_goes_on_from_its_state(plan, shrunk, tmp_path):
    model = published("rolling-forcing", tmp_path)

    def begin():
        return open_session(model, plan, prompt="a", seed=3, frames=model.pixel_frames(30))

    whole = latents_of(model, begin(), 10)
    for cut in (1, 7):
        head = begin()
        first = latents_of(model, head, cut)
        assert head.memory.features.window.shape[2] == min(12, 30 - 3 * cut)
        tail = begin()
        tail.restore(head.state())
        torch.testing.assert_close(first + latents_of(model, tail, 10 - cut), whole, rtol=0, atol=0)


def test_a_window_is_rolled_as_far_as_the_video_goes(shrunk, tmp_path):
    """It runs empty where the end is known; beyond, it fills again and is never empty."""
    model = published("rolling-forcing", tmp_path)
    widths = []

    class Widths(Observer):
        def on_pass(self, ctx):
            frames = ctx.tokens // ctx.shape.tokens_per_frame
            widths.append((frames, ctx.pass_index, len(set(ctx.noise))))

    session = open_session(model, "stock", frames=model.pixel_frames(6), observers=[Widths()])
    latents_of(model, session, 2)
    # two chunks make no window of five: each still takes five steps
    full = [(3, 0, 1), *((6, step, 2) for step in range(1, 5)), (3, 5, 1), (3, 4, 1), (3, 5, 1)]
    assert widths == full
    widths.clear()
    latents_of(model, session, 2)
    assert widths[:6] == [*((3 * i + 3, i, i + 1) for i in range(5)), (3, 5, 1)]
    assert widths[6:] == [(15, 4, 5), (3, 5, 1)] and session.memory.features.window is not None
    assert model.shape().chunk == 3 and model.shape().max_pass_tokens == 15 * 4


def test_what_a_rolled_window_reads_is_counted(shrunk, tmp_path):
    model = published("rolling-forcing", tmp_path)
    session = open_session(model, "stock", prompt="a")
    rows = [
        chunk.stats
        for chunk in rollout(model, frames=model.pixel_frames(30), stream=ts.Stream(model, session))
    ]
    heads, places = model.config.heads, 4
    # two layers; the clean pass reads in the first alone
    assert rows[-1]["pairs"] == heads * places**2 * (2 * 15 * 21 + 3 * 21)
    assert rows[-1]["pairs_dense"] == heads * places**2 * (2 * 15 * (27 + 15) + 3 * 30)
    dense = open_session(model, "dense", prompt="a")
    for chunk in rollout(model, frames=model.pixel_frames(30), stream=ts.Stream(model, dense)):
        assert chunk.stats["pairs"] == chunk.stats["pairs_dense"]


def test_a_chunk_remembered_alone_is_counted_alone(shrunk, tmp_path):
    model = published("krea", tmp_path)
    session = open_session(model, "dense", prompt="a")
    *_, row = [
        chunk.stats
        for chunk in rollout(model, frames=model.pixel_frames(9), stream=ts.Stream(model, session))
    ]
    # five passes of two layers over three chunks, and one layer over the chunk itself
    pairs = model.config.heads * 12**2 * (5 * 2 * 3 + 1)
    assert row["pairs"] == row["pairs_dense"] == pairs


def test_a_video_that_starts_again_forgets(shrunk, tmp_path):
    model = published("causvid", tmp_path)
    session = open_session(model, "dense", prompt="a")
    held = [chunk.stats["entries"] // 4 for chunk in rollout(
        model, frames=model.pixel_frames(27), stream=ts.Stream(model, session))]  # fmt: skip
    assert held == [3, 6, 9, 12, 15, 18, 3, 6, 9]
    assert session.memory.latent_frame == 27 and session.memory.chunk == 9


def test_what_is_encoded_again_is_so_when_given(shrunk, tmp_path):
    """Remembering what was made leaves what making it left."""
    for name, chunks in (("krea", 3), ("causvid", 8)):
        model = published(name, tmp_path)
        session = open_session(model, "stock", prompt="a")
        made = latents_of(model, session, chunks)
        other = open_session(model, "stock", prompt="a")
        ts.Stream(model, other).refill(torch.cat(made, 2), "a")
        used = slice(0, session.memory.past)
        assert (
            other.memory.past == session.memory.past
            and other.memory.features.tensors().keys() == {"features.last"}
        )
        for ours, theirs in zip(other.memory.layers, session.memory.layers, strict=True):
            torch.testing.assert_close(ours.k[:, :, used], theirs.k[:, :, used], rtol=0, atol=1e-9)


def test_a_part_that_encodes_must_be_there(shrunk, tmp_path):
    for name, frames in (("krea", 6), ("causvid", 21)):
        model = published(name, tmp_path)
        made = ts.load(name, "random")
        assert not made.config.context.reencode and model.config.context.reencode
        for decoder, words in (
            (made.decoder, f"{name} encodes a frame again after showing it, and its decoder only "
             "shows: load it with its VAE"),
            (None, f"{name} was loaded without a decoder, got latents to show"),
        ):  # fmt: skip
            model.decoder = Pixels()
            session = open_session(model, "stock", prompt="a")
            latents_of(model, session, frames // 3 - 1)
            model.decoder = decoder
            with torch.inference_mode():
                refused(lambda m=model, s=session: m.sample(s, []), words)
        # random weights are for a clock, and their preview encodes nothing
        assert (
            len(list(rollout(made, "stock", frames=made.pixel_frames(frames + 3))))
            == frames // 3 + 1
        )


def test_a_view_says_itself_what_is_read(shrunk):
    model = ts.load("rolling-forcing", "random")
    for plan, words in [
        ("stock attention=ann:read=0.5", "says itself what a pass reads, got attention=ann"),
        ("cache=window:budget=36f,sink=3,view=21f", "got positions=absolute: set positions=re"),
        ("cache=window:budget=36f,sink=3,positions=reindexed,view=17f", "chunk of 15f: raise it "
         "to 18f or more"),
        ("cache=window:budget=17f,sink=3", "present chunk 15f): raise budget to 18f or more"),
        ("cache=merge:budget=17f", "leaves no entry to merge into"),
    ]:  # fmt: skip
        refused(lambda plan=plan: open_session(model, plan), words)


def test_the_first_chunk_shares_its_passes_with_the_others():
    """A ring of outputs belongs to a noise level, whichever chunk comes to it."""
    config = PRESETS["causal-forcing-2step"].config
    assert config.levels == (1000, 750, 500, 250)
    assert PRESETS["causal-forcing-1step"].config.levels == config.levels
    assert random_wan(small("causal-forcing-2step")).shape().passes == 5
    assert PRESETS["krea"].config.levels == (1000, 750, 500, 250, 0)


def test_a_preview_has_as_many_frames_as_the_video_would(shrunk):
    model = ts.load("self-forcing", "random")
    found = [len(chunk.frames) for chunk in ts.rollout(model, "stock", frames=81)]
    assert found == [9, 12, 12, 12, 12, 12, 12] and model.pixel_frames(21) == 81


@pytest.mark.parametrize("name, size", [("self-forcing", (825, 1_418_996_800)),
                                        ("krea", (1095, 14_288_491_584))])  # fmt: skip
def test_presets_have_their_published_sizes(name, size):
    with torch.device("meta"):
        held = WanCausal(PRESETS[name].config).state_dict()
    assert (len(held), sum(x.numel() for x in held.values())) == size
    inferred = WanConfig.infer(held, "x")
    assert inferred.size_words == PRESETS[name].config.size_words
    assert inferred.heads == PRESETS[name].config.heads


def test_random_weights_are_drawn_on_the_device(monkeypatch, shrunk):
    """Nothing larger than a toy part is made elsewhere."""
    drawn, randn = [], torch.randn

    def record(*size, **options):
        out = randn(*size, **options)
        if out.device.type != "meta":
            drawn.append(options.get("device"))
        return out

    monkeypatch.setattr(torch, "randn", record)
    model = ts.load("krea", "random", dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and model.name == "krea"
    # the two that name no device are the prompt's table and the preview
    assert drawn.count(None) == 2
    assert drawn.count(torch.device("cpu")) == len(model.transformer.state_dict())


@pytest.fixture(scope="module")
def made():
    return random_wan(small("self-forcing"), seed=3)


def sharded(tensors, folder):
    """The tensors in two files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    places = {}
    for i in range(2):
        write_tensors(folder / f"part-{i}.safetensors", {n: tensors[n] for n in names[i::2]})
        places |= dict.fromkeys(names[i::2], f"part-{i}.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))


def store(kind, made, path):
    """The model in a container; where it is then."""
    tensors = made.transformer.state_dict()
    if kind == "folder":
        save_wan(made, path)
    elif kind == "shards":
        sharded(tensors, path)
    elif kind.endswith(".safetensors"):
        path = path.with_suffix(".safetensors")
        write_tensors(path, {f"model.{name}": x for name, x in tensors.items()})
    else:
        entry = kind.removesuffix(".pt")
        path = path.with_suffix(".pt")
        entry, _, wrapper = entry.partition(" ")
        wrapper = wrapper or "_fsdp_wrapped_module"
        wrapped = {f"model.{wrapper}.{name}": x for name, x in tensors.items()}
        torch.save({entry: wrapped, "step": 3}, path)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "folder", "shards", "model.safetensors", "generator.pt", "generator_ema.pt", "model.pt",
        "generator _orig_mod.pt", "generator _checkpoint_wrapped_module._orig_mod.pt",
    ],
)  # fmt: skip
def test_every_container_brings_the_weights_back(kind, made, shrunk, tmp_path):
    model = ts.load("self-forcing", store(kind, made, tmp_path / "x"))
    tensors = made.transformer.state_dict()
    assert all(x.equal(tensors[name]) for name, x in model.transformer.state_dict().items())
    assert (model.name, model.config) == ("self-forcing", small("self-forcing"))


def wan_freqs(theta=10000, places=1024):
    """RoPE's table as Wan's code holds it: axes of 44, 42 and 42 channels, side by side."""
    ladders = [theta ** -(torch.arange(0, n, 2).double() / n) for n in (44, 42, 42)]
    angles = torch.outer(torch.arange(places).double(), torch.cat(ladders))
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.slow
def test_a_table_of_rope_is_passed_over_with_a_note(made, shrunk, tmp_path, capsys):
    tensors, path = made.transformer.state_dict(), tmp_path / "x.pt"

    def load(name, table):
        torch.save({"generator_ema": tensors | {name: table}}, path)
        return ts.load("self-forcing", path)

    for name, table in [
        ("model.freqs", wan_freqs()),
        ("model._orig_mod.freqs", wan_freqs().to(torch.complex64)),
        ("rope.freqs_sin", wan_freqs().imag.repeat_interleave(2, 1).bfloat16()),
        ("rope.freqs_cos", wan_freqs().real.repeat_interleave(2, 1)),
    ]:
        with pytest.warns(TachyscopeWarning, match="is not read, RoPE's angles are computed"):
            model = load(name, table)
        assert all(x.equal(tensors[key]) for key, x in model.transformer.state_dict().items())
    words = ["generate", "self-forcing", "--weights", str(path), "--frames", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 2  # it has no text encoder
    note, fault = capsys.readouterr().err.splitlines()
    assert (
        note == f"tachyscope: note: {path}: rope.freqs_cos is not read, RoPE's angles are computed"
    )
    for table in (wan_freqs(5000), wan_freqs()[:, :32], torch.tensor(1j)):
        words = "freqs must be the angles of a RoPE of 3 axes and theta 10000 over 128 channels, it"
        refused(lambda table=table: load("freqs", table), str(path), words)
    for name, table in [
        ("rope.freqs_cos", torch.ones(8, 128)),
        ("rope.freqs_sin", wan_freqs().real.repeat_interleave(2, 1)),
        ("freqs", wan_freqs()[:1].expand(10**9, -1)),
    ]:
        refused(lambda n=name, x=table: load(n, x), f"{name} must be the angles of a RoPE")
    refused(lambda: load("blocks.0.freqs", wan_freqs()), "it also has blocks.0.freqs")


def test_a_tensor_under_both_names_is_refused(made, shrunk, tmp_path):
    tensors = made.transformer.state_dict()
    tensors |= {"blocks.1.attn2.to_k.bias": tensors["blocks.1.cross_attn.k.bias"] + 1}
    write_tensors(tmp_path / "x.safetensors", tensors)
    names = ("'blocks.1.cross_attn.k.bias'", "'blocks.1.attn2.to_k.bias'")
    words = ("must name each tensor once", "are Wan's and diffusers' names of one", *names)
    refused(lambda: ts.load("self-forcing", tmp_path / "x.safetensors"), *words)


@pytest.mark.slow
def test_of_several_copies_the_authors_own_is_taken(made, shrunk, tmp_path):
    tensors = made.transformer.state_dict()
    other = {name: x + 1 for name, x in tensors.items()}
    torch.save({"generator": other, "generator_ema": tensors}, tmp_path / "x.pt")
    for name in PRESETS.keys() - WORLDS:
        model = ts.load(name, tmp_path / "x.pt")
        shift = name in ("causal-forcing", "causvid", "longlive")
        assert model.transformer.head.head.bias.equal(tensors["head.head.bias"] + shift)
        assert model.fps == 16  # as Wan 2.1 is trained


def theirs():
    """diffusers' own model of the small size."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=128, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=64, num_layers=2,
    )  # fmt: skip


def test_diffusers_names_are_wans_and_back():
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    held = theirs().state_dict()
    ours = {wan_name(name): x for name, x in held.items()}
    with torch.device("meta"):
        wanted = WanCausal(small("self-forcing")).state_dict()
    assert {n: x.shape for n, x in ours.items()} == {n: x.shape for n, x in wanted.items()}
    assert all(wan_name(name) == name for name in ours)
    back = convert_wan_transformer_to_diffusers(dict(ours))
    assert back.keys() == held.keys()
    assert all(back[name].equal(x) for name, x in held.items())


@pytest.mark.parametrize("place", ["", "transformer"])
@pytest.mark.parametrize("shard", ["5GB", "200KB"])
def test_a_diffusers_folder_is_read(place, shard, shrunk, tmp_path):
    model = theirs()
    model.save_pretrained(tmp_path / place, max_shard_size=shard)
    assert bool(list((tmp_path / place).glob("*.index.json"))) == (shard == "200KB")
    plain, preset = load_wan(tmp_path), ts.load("self-forcing", tmp_path)
    assert plain.config == dataclasses.replace(small("self-forcing"), text_len=512, size=(60, 104))
    for name, x in model.state_dict().items():
        assert plain.transformer.state_dict()[wan_name(name)].equal(x)
        assert preset.transformer.state_dict()[wan_name(name)].equal(x)


@pytest.mark.parametrize(
    "kind, name",
    [
        ("SkyReelsV2Transformer3DModel", "inject_sample_info"),
        ("AnyFlowFARTransformer3DModel", "chunk_partition"),
        ("HeliosTransformer3DModel", "guidance_cross_attn"),
    ],
)
def test_another_model_of_diffusers_is_named(kind, name):
    found = dict(theirs().config) | {"_class_name": kind, name: True}
    words = refused(
        lambda: WanConfig.from_json(found), f"is of a {kind}, which tachyscope does not"
    )
    assert "remove" not in words


def test_a_diffusers_folder_of_the_5b_runs_end_to_end_with_its_vae(tmp_path):
    """Wan 2.2 5B's layout: 48 channels, and a VAE of 16 x 16 pixels a place."""
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    torch.manual_seed(0)
    WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=128, in_channels=48, out_channels=48, text_dim=16,
        freq_dim=32, ffn_dim=64, num_layers=2,
    ).save_pretrained(tmp_path / "transformer")  # fmt: skip
    vae = {
        "base_dim": 8, "decoder_base_dim": 8, "z_dim": 48, "is_residual": True, "in_channels": 12,
        "out_channels": 12, "patch_size": 2, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
    }  # fmt: skip
    AutoencoderKLWan(**vae, scale_factor_spatial=16).save_pretrained(tmp_path / "vae")
    model = ts.load("wan_causal", tmp_path)
    assert (model.config.stride, model.size) == ((4, 16, 16), (704, 1280))
    model.text = BytesText.seeded(model.config, 0)
    size, first = (32, 64), np.zeros((1, 32, 64, 3), np.uint8)
    asked = {"prompt": "a", "size": size, "first": first, "frames": 12}
    (chunk,) = ts.rollout(model, "dense", **asked)
    assert chunk.frames.shape == (12, 32, 64, 3) and chunk.frames.std() > 0
    AutoencoderKLWan(**vae).save_pretrained(tmp_path / "vae")  # says that it takes 8 x 8
    refused(lambda: ts.load("wan_causal", tmp_path), "has a VAE of 4x8x8", "is of 4x16x16")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"image_dim": 1280}, "image_dim must be null, got 1280: give a text-to-video model"),
        ({"qk_norm": None}, "qk_norm must be 'rms_norm_across_heads', got null"),
        ({"attention_head_dim": "x"}, "must be whole numbers, got 2 and 'x'"),
        ({"speed": 1}, "has an unknown 'speed'"),
        ({"out_channels": 8}, "out_dim must equal in_dim (4), got 8"),
    ],
)
def test_a_fault_in_diffusers_config_is_named(change, words):
    refused(lambda: WanConfig.from_json(dict(theirs().config) | change), words)


def lora(form, layers, rank=3, alpha=None):
    """A LoRA's tensors in one of the published forms, and what they add to each layer."""
    rng = torch.Generator().manual_seed(5)
    names = {"peft": ("lora_A", "lora_B"), "default": ("lora_A.default", "lora_B.default"),
             "kohya": ("lora_down", "lora_up"), "diffusers": ("lora_A", "lora_B")}[form]  # fmt: skip
    tensors, added = {}, {}
    for name, (out, into) in layers.items():
        down, up = (torch.randn(size, generator=rng) for size in ((rank, into), (out, rank)))
        key = {
            "peft": f"base_model.model.model.{name}",
            "default": f"base_model.model.{name}",
            "kohya": "lora_unet_" + name.replace(".", "_"),
            "diffusers": "transformer." + name.replace("self_attn.q", "attn1.to_q")
            .replace("ffn.0", "ffn.net.0.proj"),
        }[form]  # fmt: skip
        tensors |= {f"{key}.{names[0]}.weight": down, f"{key}.{names[1]}.weight": up}
        if alpha is not None:
            tensors[f"{key}.alpha"] = torch.tensor(float(alpha))
        added[name] = (1.0 if alpha is None else alpha / rank) * up @ down
    return tensors, added


LAYERS = {"blocks.0.self_attn.q": (256, 256), "blocks.1.ffn.0": (64, 256)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form, alpha", [("peft", None), ("default", None), ("kohya", 6),
                                         ("diffusers", 1.5)])  # fmt: skip
def test_a_lora_is_merged_before_rounding(form, alpha, dtype, made, shrunk, tmp_path):
    save_wan(made, tmp_path / "base.pt")
    tensors, added = lora(form, LAYERS, alpha=alpha)
    torch.save({"generator_lora": tensors, "step": 1}, tmp_path / "lora.pt")
    merged = ts.load("longlive", tmp_path / "base.pt", lora=tmp_path / "lora.pt", dtype=dtype)
    for name, x in made.transformer.named_parameters():
        layer = name.removesuffix(".weight")
        held = merged.transformer.get_parameter(name)
        exact = x.detach() + added.get(layer, 0)
        torch.testing.assert_close(held, exact.to(held.dtype), rtol=1e-6, atol=1e-6)
    if dtype == "bfloat16":
        return
    layer, rows = merged.transformer.get_submodule("blocks.1.ffn.0"), torch.randn(5, 256)
    weight = made.transformer.get_parameter("blocks.1.ffn.0.weight") + added["blocks.1.ffn.0"]
    expected = rows @ weight.T + made.transformer.get_parameter("blocks.1.ffn.0.bias")
    torch.testing.assert_close(layer(rows), expected, rtol=0, atol=1e-4)


def test_a_loras_alpha_can_be_given(made, shrunk, tmp_path, capsys):
    save_wan(made, tmp_path / "base.pt")
    file, rank = tmp_path / "lora.safetensors", 3
    tensors, added = lora("peft", LAYERS, rank=rank)
    write_tensors(file, tensors)
    base = made.transformer.state_dict()

    def change(alpha):
        model = ts.load("longlive", tmp_path / "base.pt", lora=file, lora_alpha=alpha)
        held = model.transformer.state_dict()
        return {name: held[f"{name}.weight"] - base[f"{name}.weight"] for name in LAYERS}

    for alpha, scale in ((None, 1), (rank, 1), (2 * rank, 2), (1.5, 0.5)):
        for name, found in change(alpha).items():
            torch.testing.assert_close(found, scale * added[name], rtol=1e-4, atol=1e-5)
    for alpha in (0, -1.0, float("nan"), float("inf"), "6"):
        refused(lambda alpha=alpha: change(alpha), f"a number over 0, got {alpha}: give another")
    refused(
        lambda: ts.load("longlive", tmp_path / "base.pt", lora_alpha=6), "got 6 and no LoRA: give"
    )
    weights = [str(tmp_path / "base.pt"), f"lora={file}", "lora_alpha=-2"]
    words = [word for given in weights for word in ("--weights", given)]
    assert main(["generate", "longlive", *words, "--out", str(tmp_path)]) == 2
    assert "a LoRA's alpha is a number over 0, got -2.0" in capsys.readouterr().err
    # a file that tells its own keeps it
    tensors, added = lora("kohya", LAYERS, rank=rank, alpha=6)
    write_tensors(file, tensors)
    with pytest.warns(TachyscopeWarning, match=r"has its own alpha for .*, which is used there"):
        found = change(3)
    torch.testing.assert_close(found, added, rtol=1e-4, atol=1e-5)


def test_a_lora_that_does_not_fit_is_refused(made, shrunk, tmp_path):
    save_wan(made, tmp_path / "base.pt")
    path = tmp_path / "lora.safetensors"

    def load(tensors):
        write_tensors(path, tensors)
        return lambda: ts.load("longlive", tmp_path / "base.pt", lora=path)

    good, _ = lora("peft", LAYERS)
    refused(load(lora("peft", {"blocks.7.ffn.0": (64, 256)})[0]), "it has none for base_model")
    refused(load(lora("peft", {"blocks.0.ffn.0": (64, 128)})[0]), "blocks.0.ffn.0 is [64, 128] and")
    refused(load({"diff.weight": torch.ones(1)}), "must hold a LoRA's lora_A and lora_B", "diff")
    refused(load({}), "got nothing")
    refused(load(dict(list(good.items())[:1])), "must hold both factors of blocks.0.self_attn.q")
    refused(load(lora("kohya", LAYERS, rank=0)[0]), "got float32 [0, 256] and float32 [")
    name = next(iter(good))
    refused(load(good | {name: good[name].to(torch.complex64)}), "as floats", "got complex64 [")
    own, _ = lora("kohya", LAYERS, alpha=6)
    name = next(key for key in own if key.endswith("alpha"))
    refused(load(own | {name: torch.tensor(1j)}), f"one number in {name}, got complex64 []")
    refused(load(good | {"x.y.dora_scale": torch.ones(1)}), "got x.y.dora_scale")
    twice = good | {name.removeprefix("base_model.model.model."): x + 1 for name, x in good.items()}
    refused(load(twice), "got two of blocks.0.self_attn.q, in ", "base_model.model.model.blocks.0")
    scaled, _ = lora("kohya", LAYERS, alpha=6)
    name = "lora_unet_blocks_1_ffn_0.alpha"
    refused(load(scaled | {name: torch.ones(2)}), f"one number in {name}, got float32 [2]")
    for name in good:
        good[name][0, 0] = torch.nan
    refused(load(good), str(path), "NaN or infinity in blocks.0.self_attn.q.weight, blocks.1.ffn")
    refused(lambda: ts.load("toy-chunks", lora=path), "model 'toy-chunks' takes no LoRA")
    refused(lambda: ts.load("krea", "random", lora=path), "random weights take no LoRA")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_no_numbers_are_refused(value, dtype, made, shrunk, tmp_path):
    tensors = {name: x.clone() for name, x in made.transformer.state_dict().items()}
    tensors["blocks.1.ffn.2.weight"][3, 4] = value
    path = tmp_path / "x.safetensors"
    write_tensors(path, tensors)
    words = f"{path} must hold finite numbers, it has NaN or infinity in blocks.1.ffn.2.weight: "
    refused(lambda: ts.load("self-forcing", path, dtype=dtype), words)


def test_faults_of_a_checkpoint_are_one_line(made, shrunk, tmp_path):
    whole, path = made.transformer.state_dict(), tmp_path / "x.safetensors"

    def load(tensors):
        write_tensors(path, tensors)
        return lambda: ts.load("self-forcing", path)

    refused(load(whole | {"img_emb.proj.0.weight": torch.ones(2)}), "it also has img_emb.proj.0")
    less = {name: x for name, x in whole.items() if name != "head.modulation"}
    refused(load(less), "it lacks head.modulation: give a complete checkpoint")
    refused(load(whole | {"head.head.bias": torch.ones(3)}), "head.head.bias is float32 [3] and")
    path.write_bytes(path.read_bytes()[:5000])
    refused(lambda: ts.load("self-forcing", path), "damaged or cut short", "get it again")
    refused(lambda: ts.load("self-forcing"), "give its path as `weights`, or 'random' to time it")
    refused(lambda: ts.load("self-forcing", tmp_path / "none.pt"), "no model at")


def test_weights_of_another_size_are_refused(made, tmp_path):
    save_wan(made, tmp_path / "x.pt")
    refused(
        lambda: ts.load("krea", tmp_path / "x.pt"),
        "x.pt holds a model of 2 layers of 256 channels, MLPs of 64, but krea has 40 layers of "
        "5120 channels, MLPs of 13824: give krea's own weights, or load them as wan_causal",
    )


def test_a_presets_protocol_serves_another_size(made, tmp_path):
    """As docs/models.md tells it: by the configuration, or by a folder that holds it."""
    config = dataclasses.replace(PRESETS["longlive"].config, **SMALL)
    save_wan(made, tmp_path / "x.pt")
    model = load_wan(tmp_path / "x.pt", config=config)
    assert (model.stock, model.context) == (PRESETS["longlive"].config.stock, Recache(12, 3))
    save_wan(made, tmp_path / "folder")
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config.to_json()))
    assert ts.load("wan_causal", tmp_path / "folder").config == config


def test_a_fold_needs_a_sink_that_what_leaves_covers():
    model = random_wan(small("reward-forcing"))
    words = "cache=window:budget={},sink={},positions={},fold=0.9"
    for change, message in [
        (("9f", 3, "absolute"), "needs a sink and positions=reindexed"),
        (("9f", 0, "reindexed"), "needs a sink"),
        (("9f", 2, "reindexed"), "a sink that divides the chunk of 3f"),
        (("8f", 3, "reindexed"), "a budget of whole chunks, got sink=3f, budget=8f"),
    ]:
        refused(lambda change=change: open_session(model, words.format(*change)), message)


@pytest.mark.slow
def test_the_command_line_times_a_preset(shrunk, tmp_path, capsys):
    words = ["generate", "longlive", "--weights", "random", "--plan", "stock", "--frames", "9"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "generate.json").read_text())["rows"]
    assert (row["model"], row["frames"], row["size"]) == ("longlive", 9, "32x32")
    words = ["compare", "krea", "--weights", "random", "--plans", "stock;fast", "--frames", "9"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert "Its weights are random" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("option", ["weights", "decoder", "lora"])
def test_what_is_no_path_is_refused(option, tmp_path):
    for path, why in ((3, "not a path"), (b"x", "not a path"), ("a" * 300, "file name too long")):
        refused(
            lambda path=path: ts.load("self-forcing", **{"weights": tmp_path, option: path}),
            f"`{option}` must be the path of a file or folder", why,
        )  # fmt: skip


def test_shapes_that_no_wan_model_has_are_refused():
    tensors = {
        "patch_embedding.weight": torch.zeros(128, 16, 0, 2, 2),
        "head.head.weight": torch.zeros(64, 128),
    }
    refused(lambda: WanConfig.infer(tensors, "x.pt"), "x.pt must hold a Wan model under its")
