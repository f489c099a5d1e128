"""The field's measures are what they say on true, still, blurred and made-up frames."""

import numpy as np
import pytest
import torch
from faults import refused

from tachyscope import quality
from tachyscope.evaluation import loops, lpips, scenes, videos
from tachyscope.evaluation.__main__ import main
from tachyscope.video import VideoWriter
from tachyscope.worlds import atrium


@pytest.fixture(scope="module")
def middle():
    return loops.in_the_middle(scenes.make_world(0, 4, motion=0.0))


def still(scene):
    return np.repeat(scene.frames[:1], len(scene.frames) - 1, 0)


def blurred(frames):
    return np.repeat(frames.mean((1, 2), keepdims=True).round().astype(np.uint8), 128, 1).repeat(
        128, 2
    )


@pytest.mark.parametrize("pace", [1.0, 0.25])
def test_every_loop_ends_where_it_began(pace):
    for number in range(6):
        start = loops.in_the_middle(scenes.make_world(0, number)).start
        for steps in (*loops.LOOPS.values(), ROUND):
            poses = atrium.walk(start, atrium.letters(scenes.spell(steps, pace))[None], pace)[0]
            off = poses[-1] - start[0]
            off[2] = (off[2] + 12) % 24 - 12
            assert off.abs().max() < 1e-4
            inside = poses[:, :2]
            assert inside.min() > atrium.NEAR + 0.01 and inside.max() < 1 - atrium.NEAR - 0.01


ROUND = loops.AWAY + "".join(loops.UNDONE[letter] for letter in reversed(loops.AWAY))


@pytest.fixture
def pixels_only(monkeypatch):
    """torchmetrics takes seconds to load."""
    for module in (quality, loops, videos):
        monkeypatch.setattr(module, "has_ssim", lambda: False)


def test_a_loop_scores_where_it_moves_and_is_sharp(middle, pixels_only):
    scene = scenes.make_scene(middle, "." + loops.LOOPS["return"])
    found = loops.judge_loop("return", scene.frames[1:], scene)
    assert found == {"return_gate": 1.0, "return_db": 100.0}
    for dead in (still(scene), blurred(scene.frames[1:])):
        assert loops.judge_loop("return", dead, scene)["return_db"] == 0.0
    half = np.concatenate([still(scene)[:3], scene.frames[4:]])
    assert 0 < loops.judge_loop("return", half, scene)["return_gate"] < 1
    # moving and sharp, but not back where it was
    elsewhere = np.concatenate([scene.frames[1:-1], scene.frames[3:4]])
    assert loops.judge_loop("return", elsewhere, scene)["return_db"] < 25


def test_a_mirrored_way_back_is_the_way_there(middle, pixels_only):
    scene = scenes.make_scene(middle, ".wwq" + "ess")
    assert loops.judge_mirror(scene.frames[1:], scene)["mirror_db"] == 100.0
    assert loops.judge_mirror(still(scene), scene)["mirror_db"] == 0.0
    # a way of its own counts, where the way back is the same
    strange = np.concatenate([255 - scene.frames[1:-1], scene.frames[:1]])
    assert loops.judge_mirror(strange, scene)["mirror_db"] == 100.0


def test_a_replay_is_held_to_the_truth(middle, pixels_only):
    scene = scenes.make_scene(middle, ".qqqqww")
    assert loops.judge_replay(scene.frames[3:], scene, 3)["replay_db"] == 100.0
    frozen = np.repeat(scene.frames[2:3], 4, 0)
    assert loops.judge_replay(frozen, scene, 3)["replay_db"] == 0.0


@pytest.mark.slow
def test_a_switch_counts_walls_of_the_new_prompt_and_of_the_old():
    world, other = (scenes.make_world(0, n, motion=0.0) for n in (4, 504))
    painted = loops.repainted(world, other)
    assert painted.prompt == atrium.descriptions(other.rooms, 0)[int(atrium.facing(world.start[0]))]
    assert torch.equal(painted.start, world.start)
    old, new = (scenes.make_scene(w, "." + "qqq" * 8) for w in (world, painted))
    drawn = loops.judge_switch(new.frames[1:], old, new, 1)
    assert drawn["switch_follows"] > 0.9 and drawn["switch_stays"] < 0.5
    kept = loops.judge_switch(old.frames[1:], old, new, 1)
    assert kept["switch_follows"] < 0.5 and kept["switch_stays"] == 1.0


def test_ssim_needs_torchmetrics(middle, pixels_only):
    refused(lambda: quality.ssim(*[still(scenes.make_scene(middle, ".q"))] * 2), "tachyscope[eval]")


@pytest.mark.slow
def test_ssim_is_one_for_equal_frames_and_falls(middle):
    frames = scenes.make_scene(middle, ".q").frames
    assert quality.ssim(frames, frames).tolist() == pytest.approx([1.0, 1.0], abs=1e-9)
    assert quality.ssim(frames[:1], frames[1:])[0] < 0.8
    scene = scenes.make_scene(middle, "." + loops.LOOPS["return"])
    found = loops.judge_loop("return", scene.frames[1:], scene)
    assert found["return_ssim"] == pytest.approx(1.0, abs=1e-9)
    assert loops.judge_loop("return", still(scene), scene)["return_ssim"] == 0.0


def write(path, frames):
    with VideoWriter(path, 8) as file:
        file.write(frames)
    return str(path)


def test_any_two_videos_are_compared(tmp_path, capsys, monkeypatch, pixels_only):
    monkeypatch.setattr(videos, "STRETCH", 16)
    shade = np.linspace(0, 200, 20).astype(np.uint8)
    frames = np.broadcast_to(shade[:, None, None, None], (20, 32, 48, 3)).copy()
    frames[:, 8:16] = 255
    a = write(tmp_path / "a.mp4", frames)
    b = write(tmp_path / "b.mp4", np.concatenate([frames[:16], 255 - frames[16:]]))
    c = write(tmp_path / "c.mp4", frames[:7])
    found = videos.evaluate_videos(a, b)
    whole, first, last = found["rows"]
    assert (whole["frames"], first["frames"], last["frames"]) == (20, 16, 4)
    assert first["psnr_reference"] > 40 > 10 > last["psnr_reference"]
    assert whole["psnr_worst"] == last["psnr_worst"]
    assert main([a, b]) == 0
    told = capsys.readouterr().out
    assert "17 to 20" in told and "for SSIM" in told
    assert len(videos.evaluate_videos(c, c)["rows"]) == 1
    refused(lambda: videos.evaluate_videos(c, a), "ends after 7", "cut them alike")
    assert main([a, str(tmp_path / "none.mp4")]) == 2
    assert "cannot be read as a video" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_is_measured_in_loops(tmp_path, capsys):
    command = ["atrium", "--only", "loops", "--worlds", "1", "--plan", "dense", "--jobs", "1"]
    assert main([*command, "--json", str(tmp_path / "loops.json")]) == 0
    out = capsys.readouterr().out
    assert "mirror" in out and "follows" in out


@pytest.fixture
def alexnet(tmp_path):
    """Random weights under torchvision's names, as a file."""
    rng = torch.Generator().manual_seed(0)
    tensors = {}
    for number, wide, out, kernel, *_ in lpips.LAYERS:
        tensors[f"features.{number}.weight"] = (
            torch.randn(out, wide, kernel, kernel, generator=rng) / kernel
        )
        tensors[f"features.{number}.bias"] = torch.randn(out, generator=rng)
    torch.save(tensors, tmp_path / "alexnet.pth")
    return tmp_path / "alexnet.pth", tensors


@pytest.mark.slow
def test_lpips_is_that_of_torchmetrics(alexnet, monkeypatch, tmp_path, capsys):
    """Whose own network, built by torchvision, is put together here from the same weights."""
    theirs = pytest.importorskip("torchmetrics.functional.image.lpips")
    path, tensors = alexnet
    features = []
    for number, wide, out, kernel, stride, padding, pooled in lpips.LAYERS:
        features += [torch.nn.MaxPool2d(3, 2)] if pooled else []
        assert len(features) == number
        features += [torch.nn.Conv2d(wide, out, kernel, stride, padding), torch.nn.ReLU()]
    network = torch.nn.Sequential(*features, torch.nn.MaxPool2d(3, 2))
    network.load_state_dict({key.removeprefix("features."): x for key, x in tensors.items()})
    monkeypatch.setattr(theirs, "_get_tv_model_features", lambda *given, **more: network)
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (2, 3, 72, 96, 3), dtype=np.uint8)
    pictures = [torch.from_numpy(x).permute(0, 3, 1, 2) / 255 for x in (a, b)]
    expected = theirs._LPIPS(net="alex")(*pictures, normalize=True).flatten()
    ours = lpips.Lpips(path)
    np.testing.assert_allclose(ours(a, b), expected.numpy(), rtol=1e-4)
    assert (ours(a, a) == 0).all()
    for name, frames in (("a.mp4", a), ("b.mp4", b)):
        with VideoWriter(tmp_path / name, 8) as file:
            file.write(frames)
    words = [str(tmp_path / "a.mp4"), str(tmp_path / "b.mp4")]
    assert main([*words, "--lpips-weights", str(path)]) == 0
    assert "LPIPS" in capsys.readouterr().out
    refused(lambda: ours(a[:, :32], b[:, :32]), "LPIPS needs frames of 64 x 64 pixels, got 32 x 96")
    tensors.pop("features.8.bias")
    torch.save(tensors, path)
    refused(lambda: lpips.Lpips(path), "is no AlexNet: features.8.bias must be [256], got none")
    assert main(["atrium", "--lpips-weights", "x.pth"]) == 2
    assert "--lpips-weights are of two videos, got x.pth with atrium" in capsys.readouterr().err
