"""The second world: exact, and its model is trained, played by the engine and judged as one."""

import json
import sys
import warnings

import numpy as np
import pytest
import torch

import tachyscope as ts
from tachyscope.models.wan.plain_parts import BytesText
from tachyscope_lab.worlds import evaluate, town
from tachyscope_lab.worlds.model import (
    TownCausal,
    load_model,
    make_config,
    to_latents,
    to_pictures,
    waves,
)

with warnings.catch_warnings():  # of torch's own compiler, when it is first imported
    warnings.simplefilter("ignore", DeprecationWarning)
    import eval_second_world as judging
    import train_second_world as training


def towns(count, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return town.make_towns(count, generator), town.make_starts(count, generator)


def write_model(path):
    torch.manual_seed(0)
    config = make_config(64, 2)
    model = TownCausal(config)
    training.write_folder(path, config, BytesText.seeded(config, 0), model.state_dict())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model of random weights, as training writes one."""
    return write_model(tmp_path_factory.mktemp("town"))


def test_a_way_around_the_map_leads_to_the_same_picture():
    maps, start = towns(3)
    place = town.walk(start, town.letters("d" * town.AROUND).expand(3, -1))
    torch.testing.assert_close(place[:, -1], start)
    first, last = (town.render(maps, start, torch.full((3,), t)) for t in (7.0, 7.0 + town.LAP))
    torch.testing.assert_close(first, last, atol=1e-3, rtol=0)  # things are back too
    assert (first - town.render(maps, start, torch.full((3,), 8.0))).abs().max() > 0.1


def test_a_step_moves_what_rests_by_a_patch():
    maps, start = towns(4)
    rest = torch.zeros_like(maps.walk)
    still = town.Towns(**(vars(maps) | {"walk": rest, "swing": rest[..., None].expand(-1, -1, 2)}))
    place = town.walk(start, town.letters("d").expand(4, -1))[:, 0]
    before, after = (to_latents(town.render(still, at, torch.zeros(4))) for at in (start, place))
    torch.testing.assert_close(before[..., 1:], after[..., :-1])
    assert (before[..., :1] - after[..., -1:]).abs().max() > 0.1


def test_the_ends_of_the_map_stop_the_window_and_a_slower_pace_takes_more_frames():
    _, start = towns(8)
    up = town.walk(start, town.letters("w" * 4).expand(8, -1))[:, -1]
    assert (up[:, 1] == 0).all() and (up[:, 0] == start[:, 0]).all()
    fast = town.walk(start, town.letters("dds").expand(8, -1))
    slow = town.walk(start, town.letters("ddddss").expand(8, -1), 0.5)
    torch.testing.assert_close(fast, slow[:, 1::2])


def test_a_place_is_told_by_a_letter_of_its_own():
    x, y = torch.meshgrid(torch.arange(town.WIDTH), torch.arange(town.LOWEST + 1), indexing="ij")
    told = town.told(torch.stack([x, y], -1).flatten(0, 1).float())
    assert sorted(told.tolist()) == list(range(len(town.PLACES)))
    assert len(set(town.PLACES)) == len(town.PLACES)


def test_tokens_that_lie_at_one_place_of_the_map_are_told_the_same():
    there, a_step_on = (town.told(torch.tensor([[x, 4.0]])) for x in (92.0, 96.0 % town.WIDTH))
    side = town.VIEW // town.STEP
    first, second = (waves(x).view(side, side, -1) for x in (there, a_step_on))
    torch.testing.assert_close(first[:, 1:], second[:, :-1], atol=1e-4, rtol=0)
    assert (first[:, :-1] - second[:, :-1]).abs().amax(-1).min() > 0.1


def test_pictures_are_latents_and_back():
    picture = town.render(*towns(2), torch.zeros(2))
    torch.testing.assert_close(to_pictures(to_latents(picture)), picture)


@pytest.mark.parametrize("name", evaluate.REGIMES)
def test_what_is_judged_was_seen_before(name):
    regime = evaluate.REGIMES[name]
    place = evaluate.way_of(regime)
    seen = torch.zeros(town.HEIGHT, town.WIDTH, dtype=torch.bool)
    at = torch.arange(town.VIEW)
    for i, (x, y) in enumerate(place.long()):
        window = (y + at)[:, None], (x + at) % town.WIDTH
        if i < len(regime.given):
            seen[window] = True
        else:
            assert seen[window].all()
    # and what enters the window was out of it for two windows' width
    if name != "walk":
        first = len(regime.given) + regime.judged[0]
        entering = place[first, 0] + town.VIEW - 1
        lately = place[first - round(2 * evaluate.SEEN / regime.pace) : first, 0]
        assert ((entering - lately) % town.WIDTH >= town.VIEW).all()


def test_training_and_the_engine_make_the_same_frames(folder):
    model = load_model(folder, "cpu", "float32")
    context = model.text("")[0]
    letters, given = ".ddsadd", 4
    maps, start = towns(2)
    place = town.walk(start, town.letters(letters).expand(2, -1))
    actions = town.told(place)
    truth = town.film(maps, place, torch.arange(len(letters)))
    frames = np.stack([evaluate.frames_of(one) for one in truth])
    latents = torch.cat([model.encode_frames(one) for one in frames])
    made = training.play(model.transformer, model, context, latents, actions, given, seed=3)
    generator, shape = torch.Generator().manual_seed(3), (2, 48, 1, 4, 4)
    noise = torch.stack(
        [torch.randn(shape, generator=generator) for _ in range(4 * (len(letters) - given))]
    )
    noise = noise.unflatten(0, (-1, 4))[:, :, :, :, 0].transpose(0, 1)  # [draws, frames, B, ...]
    for row in range(2):
        moves = actions[row].tolist()
        stream = ts.open(
            model, "dense", first=frames[row, :given], first_actions=moves[:given],
            noise=noise[:, :, row],
        )  # fmt: skip
        ours = torch.cat([stream.generate([move]).latents for move in moves[given:]], 2)
        torch.testing.assert_close(ours[0], made[row, :, given:], atol=2e-4, rtol=0)


def test_a_clip_is_taught_as_it_is_played(folder):
    model = load_model(folder, "cpu", "float32")
    context, length = model.text("")[0], 4
    packing = training.Packing(model.rope(model.shape()), model.shape(), length, "cpu")
    packing.use(length)
    walks = training.make_walks(8, 16, torch.Generator().manual_seed(0))
    batch = walks.draw(1, length, torch.Generator().manual_seed(1), town.render)
    both = batch.latents.transpose(1, 2).repeat(1, 1, 2, 1, 1)
    levels = torch.tensor([[0.0] * length + [400.0] * length])
    keys, values = model.transformer.keys_values(context)
    taught = training.Teaching(packing, keys, values)
    out = model.transformer(taught, both, levels, batch.actions.repeat(1, 2))
    session = training.Playing(model.rope(model.shape()), model.shape(), keys, values, length)
    for i in range(length):
        session.frame = i
        session.begin()
        x, action = both[:, :, i : i + 1], batch.actions[:, i : i + 1]
        played = model.transformer(session, x, torch.tensor([[400.0]]), action)
        torch.testing.assert_close(played, out[:, :, length + i, None], atol=2e-4, rtol=0)
        model.transformer(session, x, torch.zeros(1, 1), action)


def test_a_weight_of_one_is_dense_and_rows_are_paired_by_town(folder):
    def row(plan):
        task = evaluate.Task("short", plan)
        return task, evaluate.measure(folder, "cpu", "float32", 0, 2, task)

    (_, dense), (task, same) = row("dense"), row("attention=dense:past_weight=1")
    model = load_model(folder, "cpu", "float32")
    made = evaluate.row_of(model, task, same, dense)
    assert made["to_dense_db"] == made["worst_town_db"] == 0 and len(made["by_town"]) == 2
    other = {"db": {number: db + number for number, db in dense["db"].items()}}
    assert evaluate.row_of(model, task, other, dense)["to_dense_db"] == pytest.approx(0.5)
    forced = evaluate.Task("short", evaluate.FORCED)
    found = evaluate.measure(folder, "cpu", "float32", 0, 2, forced)
    assert list(found["db"]) == list(dense["db"]) and min(found["db"].values()) > 3
    rows = [evaluate.row_of(model, *x, dense) for x in ((forced, found), (task, same))]
    told = evaluate.lines({"rows": rows, "towns": 2, "enough": False})
    assert "does not count" in told[-1]


@pytest.mark.slow
def test_a_short_training_can_be_gone_on_with_and_its_model_is_judged(tmp_path, monkeypatch):
    small = "--minutes 0.05 --reserve 1 --width 64 --layers 1 --row 16 --rows 1 --towns 1"
    once = [*small.split(), "--device", "cpu", "--no-compile"]
    monkeypatch.setattr(sys, "argv", ["train", "--out", str(tmp_path / "a"), *once])
    training.main()
    more = ["--out", str(tmp_path / "b"), "--resume", str(tmp_path / "a")]
    monkeypatch.setattr(sys, "argv", ["train", *more, *once])
    training.main()
    assert (tmp_path / "b" / "sheet.png").is_file()
    judged = "--towns 2 --regime short --plan fast --device cpu --json"
    file = tmp_path / "second.json"
    argv = ["eval", str(tmp_path / "b"), *judged.split(), str(file)]
    monkeypatch.setattr(sys, "argv", argv)
    judging.main()
    made = json.loads(file.read_text())
    assert [row["plan"] for row in made["rows"]] == [evaluate.FORCED, "dense", "fast"]
    assert not made["enough"]
