"""attention=pose: the latent frames seen from nearest are read, and weighed by how near."""

import dataclasses
import math

import pytest
import torch
from faults import refused
from streams import CHUNKS, assert_same, draw, play, play_pass, session

POSED = dataclasses.replace(CHUNKS, chunk=1, batch=2, poses=True)
PLAN = "cache=bank:resident=6f,budget=20f attention=pose:past_weight=8,angle=10,distance=0.5"


def camera(degrees, x=0.0):
    """Two videos' next camera, [2, 1, 3, 4]: the second turns the other way."""
    out = torch.zeros(2, 1, 3, 4, dtype=torch.float64)
    for row, angle in enumerate((math.radians(degrees), -math.radians(degrees))):
        cos, sin = math.cos(angle), math.sin(angle)
        turned = [[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]
        out[row, 0, :, :3] = torch.tensor(turned, dtype=torch.float64)
        out[row, 0, 0, 3] = x
    return out


def walk(at, headings):
    for number, heading in enumerate(headings):
        at.set_poses(camera(*heading) if isinstance(heading, tuple) else camera(heading))
        play(at, 1, seed=number)


def ages(at, row=0):
    bank = at.memory.layers[0].bank
    return sorted(bank.ages[row, bank.resident[row].long()].tolist())


@pytest.mark.parametrize("host", ["native", "int8"])
def test_frames_seen_from_nearest_are_read_whole(host):
    at = session(POSED, PLAN.replace("20f", f"20f,host={host}"))
    # latent frame 0 is the sink; frame n of the bank is latent frame n + 1
    walk(at, [0, 0, 30, 60, 90, 120, 150, 180])
    at.set_poses(camera(65))
    assert ages(at, 0) == ages(at, 1) == [1, 2, 3]  # of 30, 60 and 90 degrees
    layer, bank = at.memory.layers[0], at.memory.layers[0].bank
    for row in range(2):
        for place, group in enumerate(bank.resident[row].tolist()):
            slots = slice((1 + place) * 6, (2 + place) * 6)
            held, kept = layer.k[row, :, slots], bank.host["k"][row, :, group].to(layer.k.dtype)
            if host == "native":
                assert torch.equal(held, kept)
            else:
                scale = bank.host["k_scale"][row, :, group]
                torch.testing.assert_close(held, kept * scale, rtol=0.02, atol=0.02)


def test_of_frames_seen_from_the_same_pose_the_older_are_read():
    at = session(POSED, PLAN)
    walk(at, [0, 0, 40, 0, 40, 0, 40, 0, 0])
    at.set_poses(camera(0))
    assert ages(at) == [0, 2, 4]


def test_poses_that_rounding_alone_tells_apart_count_as_the_same():
    """In float32 three turns of 20 degrees are not quite one of 60."""
    at = session(POSED, PLAN)
    once, turned, step = (camera(x).float() for x in (60, 0, 20))
    for _ in range(3):
        turned[..., :3] = turned[..., :3] @ step[..., :3]
    assert not torch.equal(once, turned)
    for number, pose in enumerate([once] * 4 + [turned] * 4):
        at.set_poses(pose)
        play(at, 1, seed=number)
    at.set_poses(once)
    assert ages(at, 0) == ages(at, 1) == [0, 1, 2]


def give(at, degrees):
    """A latent frame by a clean pass alone."""
    at.set_poses(camera(degrees))
    layers = draw(torch.Generator().manual_seed(degrees), at.shape, 6, at.dtype)
    play_pass(at, layers, at.shape.positions(at.memory.latent_frame, 1), 2, 3)
    at.commit()


def held(at):
    return sorted(at.memory.layers[0].bank.ages[0].tolist())


def test_of_frames_seen_from_near_poses_the_newer_leaves():
    at = session(POSED, PLAN.replace("20f", "7f"))
    give(at, 0), give(at, 0), give(at, 40)  # the sink, and two of the seven of the bank
    walk(at, [80, 120, 160, 41, 81, 1, 121, 161, 42, 0])
    # the first views of 0, 40, 80, 120 and 160 degrees, and the newest two that were sealed
    assert held(at) == [0, 1, 2, 3, 4, 9, 10]
    walk(at, range(-1, -40, -4))
    assert held(at)[:2] == [0, 1]


def test_given_frames_leave_a_full_bank_after_all_generated_ones():
    at = session(POSED, PLAN.replace("20f", "7f"))
    for _ in range(4):  # the sink, and three views of one pose
        give(at, 0)
    walk(at, range(30, 330, 25))
    assert held(at)[:3] == [0, 1, 2]


def test_the_weight_is_all_of_it_at_the_same_pose_and_falls_without_a_jump():
    at = session(POSED, PLAN)
    walk(at, [0, 0, 90, 180, 0, 0])
    step, before = 0.25, None
    for count in range(200):
        at.set_poses(camera(count * step, x=0.01 * count))
        weights = at.memory.layers[0].bank.log_weights(at.memory.past + 6)[0, 0].view(-1, 6)
        assert weights[0].eq(0).all() and weights[-2:].eq(0).all()  # the sink, the newest, now
        at_zero = weights[1 + at.memory.layers[0].bank.resident[0].tolist().index(0), 0].item()
        wanted = math.log(8) * math.exp(-((count * step / 10) ** 2 + (0.02 * count) ** 2) / 2)
        assert at_zero == pytest.approx(wanted, abs=1e-6)
        assert before is None or abs(at_zero - before) < 0.03 * math.log(8)
        before = at_zero


@pytest.mark.parametrize("budget", [30, 8])
def test_a_video_of_a_batch_is_the_video_made_alone(budget):
    """One returns after three frames, the other after five, so that different frames are alike."""
    plan, alone = PLAN.replace("20f", f"{budget}f"), dataclasses.replace(POSED, batch=1)
    both, one = session(POSED, plan), session(alone, plan)
    rng = torch.Generator().manual_seed(0)
    for number in range(16):
        poses = torch.cat([camera(number % 3 * 40)[:1], camera(number % 5 * 40)[1:]])
        both.set_poses(poses), one.set_poses(poses[1:])
        pos = POSED.positions(both.memory.latent_frame, 1)
        for step in range(3):
            layers = draw(rng, POSED, 6)
            got = play_pass(both, layers, pos, step, 3)
            want = play_pass(one, [[x[1:] for x in part] for part in layers], pos, step, 3)
            assert_same([[x[1:] for x in part] for part in got], want, 1e-9)
        both.commit(), one.commit()
    held = [x.memory.layers[0].bank.ages[-1].tolist() for x in (both, one)]
    assert held[0] == held[1]


def test_given_frames_are_read_without_weights():
    at = session(POSED, PLAN)
    walk(at, [0, 0, 90, 180, 0, 0])
    at.set_poses(camera(0))
    at.begin(POSED.positions(at.memory.latent_frame, 1), 2, 3, (0.0,))
    assert not at.plan.attention.weighs(at.present.ctx)
    at.begin(POSED.positions(at.memory.latent_frame, 1), 0, 3, (1.0,))
    assert at.plan.attention.weighs(at.present.ctx)


def test_what_it_cannot_serve_is_refused_in_one_line():
    refused(lambda: session(POSED, "attention=pose"), "reads a bank")
    refused(lambda: session(CHUNKS, PLAN), "camera's poses")
    refused(lambda: session(POSED, PLAN.replace("6f", "3f")), "raise resident to 4f")
