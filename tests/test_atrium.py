"""Atrium: its pictures are exact, its walks stay inside, its prompts and truths say what is there."""

import dataclasses
import math

import atrium_clips
import pytest
import torch
from torch import Generator

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.atrium import prompts
from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.autoencoder import Autoencoder, AutoencoderDecoder
from tachyscope.models.atrium.words import WordEncoder, WordTextEncoder
from tachyscope.models.atrium.world import ACTIONS, NEAR, SIZE, TURN
from tachyscope.models.wan.config import WanConfig
from tachyscope_lab.evaluation import sightings

ZERO = torch.zeros(1)


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def plain_room(**changes: torch.Tensor) -> atrium.Rooms:
    """A room of red walls, white floor and ceiling, nothing in it."""
    rooms = atrium.make_rooms(1, seeded())
    red, white = atrium.COLOURS.index("red"), atrium.COLOURS.index("white")
    colour = torch.tensor([[[red, white]] * 4 + [[white, red]] * 2])
    values = {name: getattr(rooms, name) for name in rooms.__dataclass_fields__}
    values |= {"kind": torch.zeros(1, 6, dtype=torch.long), "colour": colour}
    values |= {"thing": torch.zeros(1, 4, dtype=torch.long), "phase": torch.zeros(1, 6)}
    return atrium.Rooms(**values | changes)


def test_a_full_turn_shows_the_first_frame_again():
    rooms = atrium.make_rooms(3, seeded(), motion=0.0)
    actions = atrium.letters("." + "q" * TURN + "e" * TURN).expand(3, -1)
    pose = atrium.walk(atrium.make_starts(3, seeded(1)), actions)[:, [0, TURN, 2 * TURN]]
    first, turned, back = (atrium.render(rooms, pose[:, i], torch.zeros(3), 32) for i in range(3))
    assert torch.equal(first, turned)
    assert torch.equal(first, back)


def test_a_seed_is_a_world():
    a, b = (atrium_clips.make_clips(4, 12, seeded(5), still=0.3, cuts=0.5) for _ in range(2))
    assert torch.equal(atrium_clips.film(a, size=16), atrium_clips.film(b, size=16))
    assert [a.prompt(i) for i in range(4)] == [b.prompt(i) for i in range(4)]
    other = atrium_clips.make_clips(4, 12, seeded(6))
    assert not torch.equal(a.rooms.colour, other.rooms.colour)


def test_float32_and_float64_render_alike():
    clips = atrium_clips.make_clips(4, 3, seeded(2))
    scene, pose, time = clips.scene.flatten(), clips.pose.flatten(0, 1), clips.time.flatten()
    rooms = clips.rooms.rows(scene)
    single = atrium.render(rooms, pose, time, 48)
    double = atrium.render(rooms, pose.double(), time, 48)
    assert double.dtype == torch.float64
    far = (single - double).abs().amax(1)
    # a ray that meets an edge may fall to either side of it
    assert (far > 1e-4).float().mean() < 1e-3
    assert far.mean() < 1e-4


def test_a_pixel_computed_by_hand():
    pose = torch.tensor([[0.5, 0.5, 0.0]])
    picture = atrium.render(plain_room(), pose, ZERO, 2, samples=1)[0]
    # the upper left ray leaves (0.5, 0.5, 0.35) along (1, 0.45, 0.45) and meets x = 1
    # at (1, 0.725, 0.575), which the lamp at (0.5, 0.5, 0.7) lights
    far = 0.5**2 + 0.225**2 + 0.125**2
    light = 1.15 / (1 + 0.8 * far)
    expected = torch.tensor(atrium.PALETTE["red"]) * light
    torch.testing.assert_close(picture[:, 0, 0], expected)
    torch.testing.assert_close(picture[:, 0, 1], expected)  # the room is the same on both sides


def test_a_ball_stands_where_it_should():
    thing = torch.tensor([[1, 0, 0, 0]])
    room = plain_room(
        thing=thing, radius=torch.full((1, 4), 0.06), place=torch.full((1, 4), 0.5),
        slide=torch.zeros(1, 4), bob=torch.zeros(1, 4),
    )  # fmt: skip
    pose = torch.tensor([[0.41, 0.5, 0.0]])
    seen = atrium.see(room, pose, ZERO, 90)[0]
    rows, columns = (seen == atrium.OBJECTS).nonzero(as_tuple=True)
    # half a metre ahead and 0.11 below the eye, 45 pixels to a slope of 0.9
    middle = 44.5 + (atrium.EYE - atrium.FLOAT) / 0.5 / atrium.SLOPE * 45
    assert abs(columns.float().mean() - 44.5) < 0.5
    assert abs(rows.float().mean() - middle) < 1
    width = math.tan(math.asin(0.06 / 0.5)) / atrium.SLOPE * 45
    assert abs(columns.max() - columns.min() + 1 - 2 * width) < 2
    behind = torch.tensor([[0.41, 0.5, 12.0]])
    assert not (atrium.see(room, behind, ZERO, 32) == atrium.OBJECTS).any()


def test_moving_things_come_back_after_a_period_and_hold_still_without_motion():
    clips = atrium_clips.make_clips(8, atrium.PERIOD + 1, seeded(3), still=1.0)
    video = atrium_clips.film(clips, size=16)
    torch.testing.assert_close(video[:, 0], video[:, -1], atol=1e-3, rtol=0)
    assert (video[:, 0] != video[:, 4]).any()
    frozen = atrium_clips.film(
        atrium_clips.make_clips(8, 6, seeded(3), still=1.0, motion=0.0), size=16
    )
    assert torch.equal(frozen[:, 0], frozen[:, 5])


def test_walks_stay_inside_and_walls_stop_only_across():
    actions = atrium_clips.wander(64, 200, seeded(4))
    pose = atrium.walk(atrium.make_starts(64, seeded(5)), actions)
    assert pose[..., :2].min() >= NEAR
    assert pose[..., :2].max() <= 1 - NEAR
    assert set(actions.unique().tolist()) == set(range(len(ACTIONS)))
    # at the wall x = 1 - NEAR, looking 45 degrees left of it: only y goes on
    at = torch.tensor([1 - NEAR, 0.5, 3.0])
    after = atrium.step(at, atrium.letters("w")[0])
    torch.testing.assert_close(after, torch.tensor([1 - NEAR, 0.5 + 0.05 * 0.5**0.5, 3.0]))


def test_letters_walk_and_turn_as_they_say():
    at = torch.tensor([0.5, 0.5, 0.0])
    ends = {letter: atrium.step(at, atrium.letters(letter)[0]).tolist() for letter in ACTIONS}
    assert ends["."] == at.tolist()
    assert ends["q"] == [0.5, 0.5, 1.0]
    assert ends["e"] == [0.5, 0.5, TURN - 1.0]
    assert ends["w"][0] > 0.5 > ends["s"][0]
    assert ends["a"][1] > 0.5 > ends["d"][1]
    with pytest.raises(TachyscopeError, match="actions are letters of '.wsadqe', got 'xz': use"):
        atrium.letters("wxz")


def test_a_full_turn_at_half_the_pace_takes_twice_the_frames():
    start = atrium.make_starts(2, seeded())
    turn = atrium.letters("q" * 48).expand(2, -1)
    slow = atrium.walk(start, turn, atrium_clips.degrees(7.5))
    assert torch.equal(slow[:, 47], start)
    assert torch.equal(slow[:, 1::2], atrium.walk(start, turn[:, :24], atrium_clips.degrees(15)))
    each = atrium.walk(start, turn[:, :4], torch.tensor([1 / 30, 1.0]))
    assert each[:, -1, 2].sub(start[:, 2]).tolist() == pytest.approx([4 / 30, 4.0], abs=1e-5)


def test_clips_have_speeds_of_their_own_and_the_old_ones_by_default():
    old, same = (atrium_clips.make_clips(3, 8, seeded(5), **dials) for dials in ({}, {"pace": 1.0}))
    slow = atrium_clips.make_clips(3, 8, seeded(5), pace=torch.tensor([1.0, 0.5, 0.1]), tempo=0.25)
    assert torch.equal(old.pose, same.pose)
    assert torch.equal(old.pose[0], slow.pose[0])
    assert torch.equal(old.rooms.colour, slow.rooms.colour)
    assert not torch.equal(old.pose[1:], slow.pose[1:])
    assert torch.equal(slow.time, 0.25 * old.time)


@pytest.mark.parametrize("frames", [1, 2, 16, 24])
@pytest.mark.parametrize("kind", atrium_clips.CAMERAS)
def test_cameras_move_as_their_kind_says(kind, frames):
    for seed in range(8):
        actions = atrium_clips.camera(kind, frames, seeded(seed))
        assert len(actions) == frames
        assert actions[0] == "."
        changes = sum(a != b for a, b in zip(actions[1:], actions[2:], strict=False))
        if kind == "still":
            assert set(actions) == {"."}
        elif kind == "forward":
            assert set(actions[1:]) <= set("qe")
            assert changes == 0
        elif kind == "reversing":
            assert set(actions[1:]) <= set("qe")
            assert changes == (frames > 2)
        elif frames > 1:
            assert set(actions) & set("wsad")


def test_an_unknown_camera_is_refused():
    with pytest.raises(TachyscopeError, match="one of still, forward, reversing, walk"):
        atrium_clips.camera("crane", 8, seeded())


def test_stirred_rooms_have_something_moving_ahead_and_the_others_stay():
    rooms, pose = atrium.make_rooms(40, seeded()), atrium.make_starts(40, seeded(1))
    which = torch.arange(40) % 2 == 0
    found = atrium.stir(rooms, pose, which)
    rows, ahead = torch.arange(40), atrium.facing(pose)
    assert (found.thing[rows, ahead][which] > 0).all()
    assert (found.slide + found.bob)[rows, ahead][which].allclose(torch.tensor(atrium.SWING))
    for name in rooms.__dataclass_fields__:
        assert torch.equal(getattr(rooms, name)[~which], getattr(found, name)[~which])
    # it stays before its wall
    assert ((found.place - 0.5).abs() + found.slide).max() <= 0.24 + 1e-6
    before, after = (atrium.render(found, pose, torch.full((40,), t), 32) for t in (0.0, 4.0))
    moved = (before != after).flatten(1).any(1)
    # seen from a corner of the room, some of it may be beside the picture
    assert moved[which].float().mean() > 0.7


def test_a_cut_shows_another_room_from_its_own_start():
    clips = atrium_clips.make_clips(16, 20, seeded(7), cuts=1.0)
    cut = (clips.scene != clips.scene[:, :1]).int().argmax(1)
    assert (clips.scene[:, -1] >= 16).all()
    for row, frame in enumerate(cut.tolist()):
        assert clips.actions[row, frame] == 0
        assert clips.prompt(row, 0) != clips.prompt(row, frame)
        assert clips.prompt(row, frame) == clips.prompt(row, 19)
    assert (atrium_clips.make_clips(16, 20, seeded(7)).scene[:, -1] < 16).all()


def test_prompts_use_known_words_and_leave_walls_unsaid():
    rooms = atrium.make_rooms(64, seeded(8))
    for row in range(64):
        for prompt in prompts.descriptions(rooms, row):
            tokens = prompts.tokenize(prompt)
            assert 0 < len(tokens) <= prompts.LENGTH
            assert 2 <= prompt.count(" wall ") <= 3
    padded = prompts.pad([[3, 4], [5]])
    assert padded.shape == (2, prompts.LENGTH)
    assert padded[:, :3].tolist() == [[3, 4, 0], [5, 0, 0]]
    assert not padded[:, 2:].any()
    with pytest.raises(TachyscopeError, match="Atrium's prompts use its .* words, got 'sofa'"):
        prompts.tokenize("a room with a sofa")


def test_the_wall_ahead_is_called_front():
    rooms = plain_room(
        said=torch.tensor([[True, True, False, False]]),
        told=torch.zeros(1, 4, dtype=torch.bool),
        kind=torch.tensor([[0, 1, 0, 0, 0, 0]]),
    )
    ahead, left, _, _ = prompts.descriptions(rooms, 0)
    assert "the front wall is red, the left wall has red and white stripes" in ahead
    assert "the front wall has red and white stripes, the right wall is red" in left
    headings = torch.tensor([[0.5, 0.5, h] for h in (0.0, 2, 3, 6, 12, 18, 23)])
    assert atrium.facing(headings).tolist() == [0, 0, 1, 1, 2, 3, 0]


def test_what_is_in_view_is_what_is_ahead():
    pose = torch.tensor([[0.5, 0.5, 6.0 * wall] for wall in range(4)])
    rooms = plain_room().rows(torch.zeros(4, dtype=torch.long))
    view = sightings.in_view(rooms, pose, torch.zeros(4))
    torch.testing.assert_close(view.sum(1), torch.ones(4))
    assert view[:, :4].argmax(1).tolist() == [0, 1, 2, 3]


def test_truth_functions_know_their_own_pictures():
    rooms = atrium.make_rooms(6, seeded(9))
    pose, time = atrium.make_starts(6, seeded(10)), torch.arange(6)
    frames = atrium.render(rooms, pose, time, 64)
    wall = atrium.facing(pose)
    for i in range(6):
        one, at = rooms.rows(slice(i, i + 1)), slice(i, i + 1)
        shares = sightings.colour_shares(frames[at], one, pose[at], time[at], int(wall[i]))[0]
        first, second = one.colour[0, wall[i]].tolist()
        assert shares[first] + shares[second] > 0.85
        assert shares[first] > 0.1
    near = pose[0] + torch.tensor([0.07, -0.05, 1.0])
    found, error = sightings.locate(frames[0], rooms.rows(slice(0, 1)), near, time[:1])
    assert (found - pose[0])[:2].norm() < 0.05
    assert abs(found[2] - pose[0, 2]) < 0.5
    assert error < 0.01


def test_a_blurred_frame_is_less_sharp_and_less_true():
    rooms = atrium.make_rooms(4, seeded(11))
    frames = atrium.render(rooms, atrium.make_starts(4, seeded(12)), torch.zeros(4), 64)
    blurred = torch.nn.functional.avg_pool2d(frames, 3, 1, 1, count_include_pad=False)
    assert (atrium_clips.sharpness(blurred) < 0.7 * atrium_clips.sharpness(frames)).all()
    assert (atrium_clips.psnr(frames, frames) == 100).all()
    assert (atrium_clips.psnr(blurred, frames) < 40).all()


def test_the_autoencoder_keeps_its_shapes_and_size():
    torch.manual_seed(0)
    model = Autoencoder().eval()
    assert sum(p.numel() for p in model.parameters()) <= 1_500_000
    pictures = torch.rand(2, 3, SIZE, SIZE)
    latents = model.encode(pictures)
    assert latents.shape == (2, 16, 16, 16)
    assert model.decode(latents).shape == pictures.shape
    assert torch.equal(model.encode(pictures), latents)
    part = AutoencoderDecoder(model)
    frames = part(latents.transpose(0, 1)[None], {})
    assert frames.shape == (2, SIZE, SIZE, 3)
    assert frames.dtype == "uint8"
    again = part.encode((pictures * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy())
    torch.testing.assert_close(again, latents.transpose(0, 1)[None], atol=0.05, rtol=0.05)


def test_latents_of_training_have_unit_variance():
    torch.manual_seed(0)
    latents = Autoencoder().train().encode(torch.rand(4, 3, 32, 32))
    torch.testing.assert_close(latents.mean((0, 2, 3)), torch.zeros(16), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        latents.var((0, 2, 3), correction=0), torch.ones(16), rtol=1e-2, atol=0
    )


def test_padding_is_embedded_as_zero_and_does_not_touch_words():
    torch.manual_seed(0)
    model = WordEncoder(len(prompts.WORDS), 8, 32).eval()
    short, long = torch.tensor([[1, 2, 3, 0, 0, 0, 0, 0]]), torch.tensor([[1, 2, 3, 4, 0, 0, 0, 0]])
    embedded = model(short)
    assert not embedded[:, 3:].any()
    assert embedded[:, :3].abs().min() > 0
    assert not torch.equal(model(long)[:, :3], embedded[:, :3])
    assert not model(torch.zeros(1, 8, dtype=torch.long)).any()


def test_a_text_encoder_that_is_no_numbers_is_refused(tmp_path):
    model = WordEncoder(len(prompts.WORDS), 8, 32)
    model.norm.bias.data[3] = torch.nan
    WordTextEncoder(model).write(tmp_path)
    config = WanConfig(text_len=8, text_dim=32)
    with pytest.raises(TachyscopeError, match="has NaN or infinity in norm.bias: get it again"):
        WordTextEncoder.read(tmp_path, config)


def test_rays_meet_what_the_renderer_shows():
    """A ray ends on the surface that is seen there, and leads from the walker to that point."""
    rooms = atrium.make_rooms(3, seeded(1))
    pose = atrium.make_starts(3, seeded(2))
    place, way, point = atrium.rays(pose, 16).split([2, 3, 3], -1)
    eye = torch.cat([place, torch.full_like(place[..., :1], atrium.EYE)], -1)
    torch.testing.assert_close(eye + (point - eye).norm(dim=-1, keepdim=True) * way, point)
    ends = torch.stack([point, torch.tensor([1.0, 1.0, atrium.HEIGHT]) - point], -1)  # by side
    ends = ends.flatten(-2)
    assert ends.min() > -1e-6
    walls = torch.tensor([2, 0, 3, 1, atrium.FLOOR, atrium.CEILING])
    empty = dataclasses.replace(rooms, thing=torch.zeros_like(rooms.thing))
    seen = atrium.see(empty, pose, torch.zeros(3), 16).flatten(1)
    assert torch.equal(walls[ends.argmin(-1)], seen)


@pytest.mark.parametrize("front", range(4))
def test_a_room_seen_from_a_wall_has_that_wall_ahead(front):
    pose = atrium.make_starts(50, seeded(front))
    there = atrium.seen_from(pose, torch.full((50,), front))
    assert torch.equal(atrium.facing(there), (atrium.facing(pose) - front) % 4)
    back = atrium.seen_from(there, torch.full((50,), 4 - front))
    torch.testing.assert_close(back, pose)
