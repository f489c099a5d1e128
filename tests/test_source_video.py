"""A video that follows another: exact at strength 1, near it at low strength, bounded, restorable."""

import itertools
import threading

import numpy as np
import pytest
import torch
import toys
from faults import refused
from test_graph_runner import Again

import tachyscope as ts
from tachyscope.cli import main
from tachyscope.cli.options import read_video_word
from tachyscope.core import live_frames
from tachyscope.core.chunk_runner import ChunkRunner
from tachyscope.core.live_frames import LiveFrames
from tachyscope.io import video as files
from tachyscope.measure.compare import compare
from tachyscope.memory.predict import need, sized
from tachyscope.models.atrium.visit import Visit
from tachyscope.models.wan.context import Restart, Rolling
from tachyscope.models.wan.presets import PRESETS
from tachyscope.models.wan.sampler import levels_of, noised
from tachyscope.models.wan.vae import WanVae

PLANS = ["dense", "fast", "cache=merge:budget=9f passes=every_k:k=2"]


def clip(count=24, size=(32, 48), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *size, 3), np.uint8)


@pytest.fixture(scope="module")
def model():
    return toys.encoding_chunks()


def film(model, plan="fast", frames=18, **asked):
    chunks = ts.rollout(model, plan, frames=frames, **{"prompt": "a", "seed": 2} | asked)
    return np.concatenate([chunk.frames for chunk in chunks])


def with_vae(**changes):
    """narrow_chunks under a small Wan VAE, four frames a latent one."""
    from diffusers import AutoencoderKLWan

    model = toys.encoding_chunks(stride=(4, 8, 8), **changes)
    torch.manual_seed(1)
    model.decoder = WanVae(AutoencoderKLWan(base_dim=4).eval())
    return model


@pytest.mark.parametrize("plan", PLANS)
def test_at_full_strength_it_is_the_video_of_the_prompt_to_the_bit(model, plan):
    alone = film(model, plan)
    assert np.array_equal(film(model, plan, video=clip(), strength=1), alone)
    assert not np.array_equal(film(model, plan, video=clip(), strength=0.5), alone)


@pytest.mark.parametrize("strength", [0.9, 0.5])
@torch.no_grad()
def test_chunks_are_those_of_the_definition_in_float64(strength):
    """Noise at the level over the encoded chunk, then that pass and the sampler's below it, each
    over the whole video anew."""
    model, video = toys.encoding_chunks(torch.float64), clip(9)
    stream = ts.open(model, "dense", prompt="a", seed=5, video=video, strength=strength)
    made = [stream.generate().latents for _ in range(3)]
    prompt, same = model.encode_prompt("a"), torch.Generator().manual_seed(5)
    pixels = torch.from_numpy(video).permute(0, 3, 1, 2).float() / 255
    source = model.decoder.model.encode(pixels).transpose(0, 1)[None].double()
    levels = [(1000 * strength, strength)]
    levels += [(x.timestep, x.sigma) for x in model.levels.values() if x.sigma < strength]
    clean = torch.zeros(1, 16, 0, 4, 6, dtype=torch.float64)
    for i in range(3):
        x = source[:, :, 3 * i : 3 * i + 3]
        whole = toys.WholeSession(model, 3 * i + 3, prompt.context, chunk=3)
        for t, sigma in levels:
            noise = torch.randn(1, 16, 3, 4, 6, generator=same).double()
            x = (1 - sigma) * x + sigma * noise
            times = torch.cat([torch.zeros(1, 3 * i), torch.full((1, 3), t)], 1)
            actions = torch.zeros(3 * i + 3, dtype=torch.int64)
            flow = model.transformer(whole, torch.cat([clean, x], 2), times, actions)
            x = x - sigma * flow[:, :, 3 * i :]
        clean = torch.cat([clean, x], 2)
        torch.testing.assert_close(made[i], x, rtol=0, atol=1e-6)


def test_passes_that_are_left_by_strength(model):
    steps, (first, *later) = model.config.steps, levels_of(model, model.config.steps)
    assert [x.sigma for x in (first, *later)] == pytest.approx([1, 0.9375, 0.8333, 0.625], abs=1e-4)
    for strength, count in ((1.0, 4), (0.97, 4), (0.9375, 3), (0.9, 3), (0.7, 2), (0.3, 1)):
        named, *below = levels_of(model, steps, strength)
        assert named[1:] == pytest.approx((1000 * strength, strength, strength), abs=1e-4)
        assert below == later[len(later) - count + 1 :] and named.place == 0
    lingbot = toys.encoding_chunks(levels_of="unipc")
    assert levels_of(lingbot, steps, 1.0) == levels_of(lingbot, steps)
    assert levels_of(lingbot, steps, 0.70005)[0].timestep == 700.0
    x, noise = torch.tensor([0.3, -7.0]), torch.randn(2)
    assert noised(x, noise, 1.0).equal(noise)


def test_low_strength_keeps_the_source():
    """Its own walk through a room that the prompt tells nothing of."""
    model = ts.load("atrium-world")
    walk, other = (Visit(room, [5] * 4) for room in (3, 9))
    truth = walk.frames(1, 4)
    asked = {"prompt": other.prompt, "start": walk.view, "actions": "q*3", "video": truth}

    def psnr(strength):
        made = film(model, frames=3, strength=strength, **asked).astype(float)
        return 10 * np.log10(255**2 / np.square(made - truth).mean())

    low, middle, high = map(psnr, (0.2, 0.6, 1.0))
    assert low > 33 and low > middle + 6 and middle > high + 6


def test_a_file_an_array_and_an_iterator_are_one_source(model, tmp_path):
    path = tmp_path / "clip.mp4"
    with ts.VideoWriter(path, fps=model.fps) as video:
        video.write(clip())
    frames = np.stack(list(files.read_video(path)))
    want = film(model, video=frames)
    assert np.array_equal(film(model, video=path), want)
    assert np.array_equal(film(model, video=(x for x in frames)), want)
    assert np.array_equal(film(model, video=torch.from_numpy(frames)), want)
    assert np.array_equal(film(model, video=frames, strength=0.6), want)
    assert not np.array_equal(film(model, video=frames, seed=3), want)
    larger = tmp_path / "large.mp4"
    with ts.VideoWriter(larger, fps=2 * model.fps) as video:
        video.write(clip(40, (64, 64)))
    with pytest.warns(ts.core.errors.TachyscopeWarning, match="64x64: cut in the middle"):
        assert film(model, video=larger).shape == want.shape
    refused(
        lambda: film(model, frames=21, video=larger), "20 frames at the 16 a second", "at most 20"
    )


def test_a_stream_is_one_chunk_behind_and_holds_no_more(model):
    taken = []

    def frames():
        for i, frame in enumerate(clip(10)):
            taken.append(i)
            yield frame

    with ts.open(model, "fast", prompt="a", video=frames()) as stream:
        assert not taken
        for made in (3, 6, 9):
            stream.step()
            assert len(taken) == made and not stream.video._next
        # the last chunk is filled up with the last frame, and behind it there is none
        assert len(list(stream.take(5))) == 1 and len(taken) == 10
        refused(stream.step, "`video` has ended after 10 frames", "a longer `video`")
        stream.set_prompt("b")  # nothing was interrupted
        refused(stream.snapshot, "comes once", "give a file or an array")
    padded = np.concatenate([clip(10), clip(10)[-1:].repeat(2, 0)])
    assert np.array_equal(
        film(model, frames=12, video=padded), film(model, frames=12, video=clip(10))
    )


@pytest.mark.parametrize(
    "make", [toys.encoding_chunks, pytest.param(with_vae, marks=pytest.mark.slow)]
)
def test_a_snapshot_goes_on_with_the_source(make):
    model, video = make(), clip(60)
    asked = {"prompt": "a", "video": video, "strength": 0.7}
    first = ts.open(model, "fast", **asked)
    for _ in range(2):
        first.step()
    kept = first.snapshot()
    want = [first.step().frames for _ in range(2)]
    again = ts.open(model, "fast", **asked)
    again.step()
    again.video.fill(again.next_frames)
    for stream in (again, first):
        stream.restore(kept)
        for frames in want:
            assert np.array_equal(stream.step().frames, frames)
    words = "follows another `video`, or at another `strength`"
    for other in ({"video": clip(60, seed=1)}, {"strength": 0.6}):
        refused(lambda x=other: ts.open(model, "fast", **asked | x).restore(kept), words)
    refused(lambda: ts.open(model, "fast", prompt="a").restore(kept), "follows a `video`")
    refused(lambda: again.restore(ts.open(model, "fast", prompt="a").snapshot()), words)
    assert again.step().frames.shape == want[0].shape  # a refused one changed nothing


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"context": Restart(6, reencode=True)}])
def test_a_video_is_followed_by_the_vaes_own_encoder(changes):
    """Behind given frames, over a change of prompt and a restart of the past: one encoding."""
    model, video = with_vae(**changes), clip(46)
    seen = []

    def note(frames, state, encode=model.decoder.encode_next):
        seen.append(encode(frames, state))
        return seen[-1]

    model.decoder.encode_next = note
    film(
        model,
        frames=36,
        video=video[9:],
        first=video[:9],
        strength=0.5,
        then=[(12, "b")],
        size=None,
    )
    del model.decoder.encode_next
    seen = [x for x in seen if x.shape[2] == 3]
    assert torch.cat(seen, 2).equal(model.decoder.encode(video[:45]))


def test_recorded_launches_read_each_chunks_source(model):
    asked = {"prompt": "a", "video": clip(30), "strength": 0.6}
    plain, repeated = (ts.open(model, "cache=window:budget=9f", **asked) for _ in range(2))
    found = []

    def record(*given):
        found.append(Again(*given))
        return found[-1]

    repeated.runner = ChunkRunner(model, repeated.session, record)
    for _ in range(10):
        assert np.array_equal(repeated.step().frames, plain.step().frames)
    assert found[0].repeats == 5


def test_what_cannot_be_followed_is_refused_in_a_line(model, tmp_path):
    def told(*words, by=model, **asked):
        refused(lambda: ts.open(by, **{"video": clip()} | asked), *words)

    told("`strength` must be over 0 and at most 1, got 0", strength=0)
    told("`strength` needs a `video`", video=None, strength=0.5)
    told("got it for a batch", prompt=["a", "b"])
    told("got 7: try 'clip.mp4'", video=7)
    told("`video` as an array is uint8 [F, H, W, 3]", video=clip()[0])
    told("cannot be read as a video (no such file", video=tmp_path / "none.mp4")
    told("cannot be read as a video (embedded null byte)", video="a\0.mp4")
    for wrong in (np.array(7), torch.tensor(7)):
        told("`video` as an array is uint8 [F, H, W, 3]", video=wrong)
    for kind in (torch.bfloat16, torch.float32):
        told("`video` as a tensor is uint8", video=torch.zeros(9, 32, 48, 3, dtype=kind))
    told("shows latents and cannot make them", by=toys.narrow_chunks())
    told("several chunks together", by=toys.encoding_chunks(context=Rolling(), actions=""))
    told("toy-tokens cannot follow a source video", by=toys.load("toy-tokens"))
    for wrong in (clip().astype(np.float32), clip(size=(32, 32)), clip()[..., :1]):
        stream = ts.open(model, video=wrong)
        refused(stream.step, "frames of `video` are uint8 [32, 48, 3]", "behind 0 others")
    once = ts.open(model, "fast", video=iter(clip()))
    refused(lambda: ts.rollout(model, frames=3, stream=once, video=iter(clip())), "another video")
    refused(lambda: ts.rollout(model, frames=3, stream=once, video="a\0.mp4"), "null byte")
    again = ts.open(model, "fast", video=torch.from_numpy(clip()))
    assert len(list(ts.rollout(model, frames=3, stream=again, video=clip(), strength=0.6))) == 1
    refused(lambda: ts.rollout(model, frames=3, stream=again, strength=0.5), "another strength")
    refused(lambda: compare(model, ["fast"], frames=3, video=iter(clip())), "this one comes once")


def test_plans_are_compared_on_one_source(model):
    asked = {"frames": 6, "prompt": "a", "aa": False}
    rows = compare(model, ["dense", "fast"], video=clip(), strength=0.5, **asked).document["rows"]
    alone = compare(model, ["dense", "fast"], **asked).document["rows"]
    for row, other in zip(rows, alone, strict=True):
        # one denoising pass of four is left, and the clean one
        assert 0.3 < row["macs"] / other["macs"] < 0.4


def test_of_a_camera_the_newest_frames_wait(model):
    live = LiveFrames(6)
    for frame in clip(8):
        live.put(frame)
    stream = ts.open(model, "fast", prompt="a", seed=2, video=live)
    assert stream.step().stats["source_dropped"] == 2
    assert stream.step().stats["source_dropped"] == 0
    with ts.open(model, "fast", prompt="a", seed=2, video=clip(8)[2:]) as other:
        for chunk in other.take(2):
            want = chunk.frames
    live.feed(itertools.cycle(clip(8)))
    assert stream.step().frames.shape == want.shape
    stream.close()
    assert not list(itertools.islice(live, 20))[6:]  # what waited, and then the end


def test_a_camera_that_is_silent_or_breaks_is_told(model, monkeypatch):
    monkeypatch.setattr(live_frames, "WAIT", 0.05)
    silent = ts.open(model, video=LiveFrames(6, "the camera /dev/video0"))
    refused(silent.step, "the camera /dev/video0 gave no frame for 0 seconds", "open the stream")

    def broken():
        yield clip(1)[0]
        raise OSError("unplugged")

    stream = ts.open(model, video=LiveFrames(6).feed(broken()))
    with pytest.raises(OSError, match="unplugged"):
        stream.step()
    monkeypatch.setattr(files, "CAMERAS", "lavfi")
    frames = list(itertools.islice(files.read_camera("testsrc=size=48x32:rate=30", 16), 9))
    assert np.stack(frames).shape == (9, 32, 48, 3)
    monkeypatch.setattr("tachyscope.core.source_video.is_camera", lambda path: True)
    with ts.open(model, "fast", prompt="a", video="testsrc=size=48x32:rate=16") as stream:
        monkeypatch.setattr(live_frames, "WAIT", 10)
        assert stream.step().frames.shape == (3, 32, 48, 3)
        assert not stream.video.key
    assert threading.active_count() < 50
    with ts.open(model, video="nothing=at:all") as stream:
        refused(stream.step, "the camera nothing=at:all cannot be read", "v4l2-ctl")


@pytest.mark.slow
def test_generate_follows_a_video(tmp_path, capsys):
    first, second = tmp_path / "a", tmp_path / "b"
    words = ["generate", "atrium-world", "--world", "3", "--actions", "q*4", "--frames", "4"]
    assert main([*words, "--seed", "1", "--out", str(first)]) == 0
    video = f"{first}/video.mp4"
    assert main([*words, "--video", f"{video}:0.2", "--out", str(second)]) == 0
    assert f"behind {video}" in capsys.readouterr().out
    theirs, ours = (np.stack(list(files.read_video(x / "video.mp4"))) for x in (first, second))
    assert 10 * np.log10(255**2 / np.square(ours.astype(float) - theirs).mean()) > 30
    assert main([*words, "--video", f"{video}:0", "--out", str(second)]) == 2
    assert "the strength of --video must be over 0" in capsys.readouterr().err


def test_the_words_of_a_source():
    for text, found in {
        "a.mp4": ("a.mp4", None), "a.mp4:0.25": ("a.mp4", 0.25), "/dev/video0": ("/dev/video0", None),
        "take:2/a.mp4": ("take:2/a.mp4", None), "/dev/video0:1": ("/dev/video0", 1.0),
    }.items():  # fmt: skip
        assert read_video_word(text) == found
    refused(lambda: read_video_word("a.mp4:1.5"), "the strength of `video` must be over 0")


@pytest.mark.parametrize("rates", [(8, 8), (25, 16), (8, 16), (30, 16), (29.97, 8)])
def test_a_file_is_read_at_the_models_rate(tmp_path, rates):
    theirs, ours = rates
    path, count = tmp_path / "x.mp4", 30
    with ts.VideoWriter(path, fps=theirs) as video:
        video.write(np.stack([np.full((64, 64, 3), 8 * i, np.uint8) for i in range(count)]))
    read = [round(float(frame.mean()) / 8) for frame in files.read_video_at(path, ours)]
    shown = -(-count * ours // theirs)
    assert len(read) == shown == files.count_frames(path, ours)
    assert read == [min(count - 1, int(i * theirs / ours + 1e-6)) for i in range(int(shown))]


@pytest.mark.slow
def test_the_encoder_is_part_of_the_promise_of_memory():
    for name, decoder in (("self-forcing", None), ("self-forcing", "random-tiny")):
        shapes = sized(name, decoder=decoder)
        found = [need(shapes, "fast", frames=48, follows=x).decoder_state for x in (False, True)]
        assert found[1] - found[0] == 60 * 104 * 179_712  # 1.1 GB
    assert toys.encoding_chunks().on_meta().encoder_state(toys.encoding_chunks().shape()) == 0


def test_every_preset_is_known_to_follow_or_not():
    """Only a rolling window cannot: its chunks are at several levels at once."""
    refuses = {name for name, x in PRESETS.items() if x.config.context.rolling_frames(x.config)}
    assert refuses == {"rolling-forcing"}
