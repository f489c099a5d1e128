"""Lodge: an exact picture of every pose, labels that agree with it, and a judge that reads both."""

import argparse
import json
import warnings
from dataclasses import replace

import pytest
import torch

import tachyscope as ts
from tachyscope.models.atrium.visit import UNSEEN
from tachyscope.models.atrium.words import WordEncoder
from tachyscope.models.wan.transformer import WanCausal
from tachyscope_lab.worlds.lodge import camera, plan, prompts, visit
from tachyscope_lab.worlds.lodge.autoencoder import Autoencoder, multiply_adds
from tachyscope_lab.worlds.lodge.houses import make_houses
from tachyscope_lab.worlds.lodge.judge import surfaces_right, true_surfaces
from tachyscope_lab.worlds.lodge.model import Walker
from tachyscope_lab.worlds.lodge.palette import COLOURS
from tachyscope_lab.worlds.lodge.picture import (
    GLASS,
    ITEMS,
    MOVING,
    draw,
    draw_part,
    make_scene,
    render,
    see,
)

with warnings.catch_warnings():  # of torch's own compiler, when it is first imported
    warnings.simplefilter("ignore", DeprecationWarning)
    import lodge_clips
    import train_atrium_world
    import train_lodge_autoencoder as training
    from train_atrium_world import make_config
    from training_worlds import WORLDS


def houses(count=1, seed=3, motion=True):
    return make_houses(count, torch.Generator().manual_seed(seed), motion)


def at(*poses):
    return torch.tensor(poses)


def test_a_seed_is_one_house_and_its_picture_is_always_the_same():
    pose, time = at((2.0, -3.0, 5.0)), torch.zeros(1)
    first, again = (render(houses(), pose, time, 32) for _ in range(2))
    assert torch.equal(first, again)
    assert (first - render(houses(seed=4), pose, time, 32)).abs().mean() > 0.02


def test_drawing_in_strips_leaves_out_no_solid():
    some, pose = houses(2), at((2.0, -3.0, 5.0), (-1.5, 2.5, 0.0))
    time = torch.tensor([1.0, 2.0])
    strips = draw(some, pose, time, 48)
    whole = draw_part(make_scene(some, time), pose, 48, slice(0, 48), True, sparse=False)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(strips, whole, strict=True))


def test_a_small_move_changes_the_picture_a_little():
    pose = at((-2.2, -2.6, 4.0)).repeat(4, 1)
    pose[1, 0] += 0.002
    pose[2, 2] += 0.004
    pose[3, 0] += 0.3
    pictures = render(houses().repeat(4), pose, torch.zeros(4), 48)
    moved, turned, far = (pictures[1:] - pictures[0]).abs().mean((1, 2, 3)).tolist()
    assert max(moved, turned) < 0.006 < 0.02 < far


def test_a_full_turn_by_quarter_steps_comes_back_to_the_same_bits():
    start = at((1.7, 3.1, 7.0))
    pose = camera.walk(start, camera.letters("q" * 96)[None])[0]
    assert torch.equal(pose[-1:], start)
    assert len({tuple(p.tolist()) for p in pose}) == 96
    ends = torch.cat([start, pose[-1:]])
    first, last = render(houses().repeat(2), ends, torch.zeros(2), 32)
    assert torch.equal(first, last)


def test_no_walk_leaves_the_free_floor():
    clips = lodge_clips.make_clips(64, 128, torch.Generator().manual_seed(0))
    x, y = clips.pose[..., 0], clips.pose[..., 1]
    assert plan.is_free(x, y).all()
    assert max(x.abs().max(), y.abs().max()) <= plan.OUTER - plan.MARGIN
    rooms = [len(set(row.tolist())) for row in plan.room_of(x, y)]
    assert max(rooms) == 4  # some go all around


@pytest.mark.parametrize("room", range(4))
def test_doorways_lead_from_each_room_to_two_others(room):
    side = plan.signs()[room] * plan.MIDDLE
    found = set()
    for heading in (0, 6, 12, 18):
        start = torch.tensor([[*side.tolist(), float(heading)]])
        pose = camera.walk(start, camera.letters("w" * 40)[None])[0, -1]
        found.add(int(plan.room_of(pose[0], pose[1])))
    assert len(found) == 3 and room in found and 3 - room not in found


def test_things_move_by_an_exact_rule_and_come_back_after_their_period():
    world = houses(seed=12)
    shown = at((1.3, 1.3, 3.0)).repeat(3, 1)
    first, half, back = render(world.repeat(3), shown, torch.tensor([0.0, 5.0, 16.0]), 48)
    torch.testing.assert_close(first, back, atol=1e-3, rtol=0)
    assert (first - half).abs().max() > 0.1
    still = houses(seed=12, motion=False)
    first, later = render(still.repeat(2), shown[:2], torch.tensor([0.0, 5.0]), 48)
    assert torch.equal(first, later)


def test_labels_name_what_the_picture_shows():
    world, pose, time = houses(seed=12), at((1.3, 1.3, 3.0)), torch.zeros(1)
    seen, before = see(world, pose, time, 64), render(world, pose, time, 64)
    wall = int(seen[0][seen[0] < 16].mode().values)
    colour = world.wall_colour.clone()
    colour[0, wall] = COLOURS.index("black")
    after = render(replace(world, wall_colour=colour), pose, time, 64)
    changed = (after - before).abs().amax(1) > 0.2
    # but for edges, where a pixel shows two surfaces
    assert (seen[changed] == wall).float().mean() > 0.9
    assert changed[seen == wall].float().mean() > 0.6  # the rest is a painting
    moved = see(world, pose, time + 3, 64) != seen
    assert moved.any()
    assert ((seen >= MOVING) | (see(world, pose, time + 3, 64) >= MOVING))[moved].all()


def test_the_judge_knows_the_truth_another_place_and_one_wrong_wall():
    world = visit.make_world(2)
    pose, time = world.start, torch.zeros(1)
    truth, picture = true_surfaces(world.houses, pose, time), render(world.houses, pose, time, 128)
    right = surfaces_right(picture, truth)[0]
    judged = ~right.isnan()
    assert judged.sum() >= 4 and (right[judged] == 1).all()
    elsewhere = render(world.houses, at((-2.0, 2.0, 1.0)), time, 128)
    assert surfaces_right(elsewhere, truth)[0].nanmean() < 0.5
    wall = next(i for i in range(16) if judged[i])
    colour = world.houses.wall_colour.clone()
    colour[0, wall] = (colour[0, wall] + 5) % len(COLOURS)
    other = render(replace(world.houses, wall_colour=colour), pose, time, 128)
    lost = (surfaces_right(other, truth)[0] == 0) & judged
    assert lost.nonzero().flatten().tolist() == [wall]


def test_windows_furniture_and_moving_things_are_seen_on_walks():
    clips = lodge_clips.make_clips(8, 96, torch.Generator().manual_seed(0))
    pick = slice(0, 96, 48)
    seen = see(
        clips.rooms.rows(clips.scene[:, pick].flatten()), clips.pose[:, pick].flatten(0, 1),
        clips.time[:, pick].flatten(), 32,
    ).flatten()  # fmt: skip
    kinds = set(seen.tolist())
    assert GLASS in kinds and any(ITEMS <= k < MOVING for k in kinds) and max(kinds) >= MOVING


def test_prompts_say_what_is_there_in_known_words():
    for number in range(20):
        world = visit.make_world(number)
        for text in prompts.descriptions(world.houses, 0):
            assert 0 < len(prompts.tokenize(text)) <= prompts.LENGTH
    room = prompts.descriptions(world.houses, 0)
    # turned by a quarter, what was ahead to the left is ahead to the right
    assert len(set(room)) == 4
    ahead = room[0].split("front left")[1].split(", front right")[0]
    assert f"front right{ahead}" in room[1]


def test_worlds_of_evaluation_are_none_that_training_draws():
    assert UNSEEN > 2**31 + 10**6
    told = {visit.make_world(number).prompt for number in range(100)}
    seen = {
        text
        for seed in (0, 1_000_003, 2**31)
        for some in [houses(50, seed)]
        for row in range(50)
        for text in prompts.descriptions(some, row)
    }
    assert len(told) == 100 and not told & seen


def test_latents_are_as_many_tokens_as_atriums_and_the_decoder_is_counted():
    model = Autoencoder()
    latents = torch.zeros(1, 32, 16, 16)
    with torch.no_grad():
        assert model.eval().decode(latents).shape == (1, 3, 256, 256)
    assert multiply_adds(model.decoder, latents) == 1_674_838_016
    assert WORLDS["lodge"].channels == 32


def test_the_whole_model_fits_twelve_megabytes_in_eight_bits():
    """A code a number and 16 bits of scale a row; vectors, norms and biases, in 16 bits."""
    world = WORLDS["lodge"]
    args = argparse.Namespace(width=256, layers=None, shift=2.0)
    with torch.device("meta"):
        parts = (
            WanCausal(make_config(args, world)), world.make_autoencoder(),
            WordEncoder(len(world.prompts.WORDS), world.prompts.LENGTH),
        )  # fmt: skip
    weights = [p for part in parts for p in part.parameters()]
    stored = sum(p.numel() + 2 * len(p) if p.dim() > 1 else 2 * p.numel() for p in weights)
    assert stored == 11_891_368 < 12e6


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_a_world_to_train_on_gives_clips_prompts_and_rays(world):
    clips = world.make_clips(2, 8, torch.Generator().manual_seed(0))
    assert clips.pose.shape == (2, 8, 3) and (clips.actions[:, 0] == 0).all()
    front = world.camera.facing(clips.pose[:, :1])
    turned = world.camera.seen_from(clips.pose, front)
    assert (world.camera.facing(turned[:, 0]) == 0).all()
    rays = world.camera.rays(turned, 8)
    assert rays.shape == (2, 8, 64, 8) and rays.abs().max() <= 1.001
    texts = world.prompts.descriptions(clips.rooms, 0)
    assert world.tokens(texts).shape == (4, world.prompts.LENGTH)


@pytest.mark.slow
def test_the_autoencoder_learns_and_goes_on_from_its_state(tmp_path):
    tiny = ["--out", f"{tmp_path}/out", "--state", f"{tmp_path}/state", "--size", "32", "--batch", "2",
            "--judged", "4", "--pool", "8", "--minutes", "60", "--device", "cpu", "--no-compile"]  # fmt: skip
    training.main([*tiny, "--steps", "50"])
    training.main([*tiny, "--steps", "2", "--resume", f"{tmp_path}/state"])
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    ends = [row for row in rows if row.get("final")]
    assert [row["step"] for row in ends] == [50, 52]
    assert ends[0]["psnr"] > 10 and (tmp_path / "out" / "sheet-autoencoder.png").is_file()


@pytest.mark.slow
def test_a_world_model_of_lodge_is_trained_in_phases_and_loads(tmp_path):
    """Each phase is a command: the autoencoder, then the world twice."""
    folder, out = f"{tmp_path}/autoencoder", tmp_path / "world"
    training.main(["--out", folder, "--batch", "2", "--pool", "2", "--judged", "2", "--steps", "1",
                   "--device", "cpu", "--no-compile"])  # fmt: skip
    tiny = ["--world", "lodge", "--autoencoder", folder, "--out", str(out), "--device", "cpu",
            "--no-compile", "--width", "64", "--layers", "1", "--row", "8", "--rows", "1",
            "--pool", "2", "--fresh", "2", "--fill", "0", "--steps", "1", "--worlds", "1",
            "--runs", "teacher", "--state", f"{tmp_path}/state", "--judge-frames", "6"]  # fmt: skip
    train_atrium_world.main([*tiny, "--finish", "0.5"])
    train_atrium_world.main([*tiny, "--begin", "0.5", "--resume", f"{tmp_path}/state"])
    train_atrium_world.main([*tiny, "--begin", "0.5", "--resume", str(out)])
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("trained")] == [1, 2, 3]
    assert (out / "sheet-world-2.png").is_file()
    assert max(path.stat().st_size for path in out.iterdir()) < 16 * 2**20
    model = ts.load("tachyscope_lab.worlds.lodge.model:load", out)
    with ts.open(model, "fast", prompt=visit.make_world(3).prompt, seed=0) as stream:
        chunks = [stream.step(action) for action in "qw"]
    assert all(chunk.frames.shape == (1, 256, 256, 3) for chunk in chunks)


def test_a_walker_in_the_model_goes_as_in_the_world_that_it_was_trained_in():
    start = torch.tensor([[-plan.MIDDLE, -plan.MIDDLE, 0.0]])
    actions = camera.letters("wwwqqaw")
    cameras = Walker.at([Walker.START], 1.0, torch.device("cpu"))
    poses = Walker.walk(cameras, actions)
    torch.testing.assert_close(poses, camera.walk(start, actions[None]))
    assert torch.equal(cameras[:, :3], poses[:, -1])
    assert torch.equal(Walker.rays(poses, (8, 8)), camera.rays(poses, 8).flatten(1, 2))
