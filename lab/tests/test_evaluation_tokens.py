"""Worlds that share passes are what they are alone; scores, KL and correlations are exact."""

import pytest
import torch
from toys import open_session

from tachyscope.core.arguments import parse_actions
from tachyscope.core.errors import TachyscopeError
from tachyscope.measure.quality import psnr
from tachyscope.models.registry import load
from tachyscope_lab.evaluation import clips, gates, replay_scores, token_measures, token_timing
from tachyscope_lab.evaluation import tokens as ev


@pytest.fixture(scope="module")
def model():
    return load("toy-tokens")


@pytest.fixture(scope="module")
def clip():
    return clips.make_clip("reversing", 2, size=32)


def letters(text):
    return " ".join(text)


# --- clips


def test_the_reversing_camera_goes_back_over_what_was_given():
    clip = clips.make_clip("reversing", 1, size=32)
    frames = clip.frames[0]
    assert frames.shape == (16, 32, 32, 3)
    # frame 8 stands where frame 6 did; only things that move on their own may differ
    assert psnr(frames[8:9], frames[6:7])[0] > psnr(frames[8:9], frames[7:8])[0] + 3


def test_every_clip_has_the_given_frames_and_as_many_again():
    for given, made in clips.CLIPS.values():
        assert len(given) == len(made) == clips.GIVEN
        assert given[0] == "."
        parse_actions(letters(given + made), ".wsadqe", 16)


@pytest.mark.slow
def test_rows_of_several_clips_are_what_they_are_alone(model):
    parts = [clips.make_clip(name, 1, size=32) for name in ("walk", "still")]
    ways = [replay_scores.Way("replay=attentive:share=0.5"), replay_scores.Way("passes=draft")]
    together = token_measures.made(model, clips.join(parts), ways)
    for row, part in enumerate(parts):
        for way, found in zip(ways, together, strict=True):
            (alone,) = token_measures.made(model, part, [way])[0]
            assert found[row]["psnr_truth"] == pytest.approx(alone["psnr_truth"], abs=1e-3)
            assert found[row]["share_eligible"] == pytest.approx(alone["share_eligible"], abs=0.05)


@pytest.mark.slow
def test_a_still_camera_sees_something_move():
    for film in clips.make_clip("still", 3).frames:
        assert clips.moving(film) >= clips.MOVING


def test_worlds_in_one_batch_are_what_they_are_alone(model, clip):
    # no share: places of the toy have equal scores, which rounding would rank
    plan = "replay=attentive:threshold=0.1"
    codes = clips.true_codes(model, clip)
    both = replay_scores.begin(model, replay_scores.Way(plan), clip, codes)
    moves = clip.moves[8:9]
    with torch.inference_mode():
        together = model.score(both, codes[:, 8:9], moves)
        for i, world in enumerate(clip.worlds):
            alone = open_session(
                model, plan, prompt=world.prompt, frames=8,
                first=clip.frames[i][:8], first_actions=letters(clip.actions[0][:8]),
            )  # fmt: skip
            one = model.score(alone, codes[i : i + 1, 8:9], moves[:, i : i + 1])
            torch.testing.assert_close(together[i : i + 1], one, rtol=1e-3, atol=1e-4)
    assert both.meter.take()["rows_replayed"] > 0


@torch.inference_mode()
def test_a_frame_in_one_pass_is_scored_as_its_tokens_one_by_one(model, clip):
    codes = clips.true_codes(model, clip)
    start = replay_scores.begin_dense(model, clip, codes)
    # no shares: places of the toy have equal scores, which rounding would rank
    for plan in (
        "replay=attentive:threshold=0.1",
        "replay=input:budget=0.01",
        "replay=every_k:k=3",
    ):
        way, found = replay_scores.Way(plan), []
        for one_pass in (False, True):
            at = replay_scores.begin(model, way, clip, codes, start=start if one_pass else None)
            score = replay_scores.score if one_pass else type(model).score.__get__(model)
            args = (model, at) if one_pass else (at,)
            frames = []
            for i in (8, 9):
                frames.append(score(*args, codes[:, i : i + 1], clip.moves[i : i + 1]))
                at.commit()
                frames.append(replay_scores.replayed(at))
            found.append(frames)
        for one, all_at_once in zip(*found, strict=True):
            torch.testing.assert_close(one, all_at_once, rtol=1e-3, atol=1e-4)
        assert 0 < (found[0][1] + found[0][3]).mean() < 2, plan


# --- measures


def test_divergence_of_a_case_by_hand():
    dense = torch.tensor([0.5, 0.5]).log().view(1, 1, 1, 2)
    other = torch.tensor([0.25, 0.75]).log().view(1, 1, 1, 2)
    by_hand = 0.5 * torch.log(torch.tensor(2.0)) + 0.5 * torch.log(torch.tensor(2 / 3))
    assert token_measures.divergence(dense, other).item() == pytest.approx(by_hand.item(), abs=1e-6)
    assert token_measures.divergence(dense, dense).item() == 0.0


def test_rank_correlation_sees_order_alone():
    x = torch.tensor([3.0, 1.0, 2.0, 7.0])
    assert token_measures.spearman(x, x.exp()) == pytest.approx(1.0)
    assert token_measures.spearman(x, -x) == pytest.approx(-1.0)


@pytest.mark.slow
def test_dense_is_no_way_off_itself_and_shares_are_kept(model, clip):
    ways = [replay_scores.Way("replay=attentive:share=0"), *ev.FORCED.values()]
    dense, off, *rest = token_measures.forced(model, clip, ways, frames=4)
    assert all(x["kl"] == 0 and x["share_eligible"] == 0 for x in dense)
    # one row at a time or all at once: float32 rounds otherwise
    assert all(abs(x["kl"]) < 1e-6 and x["share_eligible"] == 0 for x in off)
    for (key, _), found in zip(ev.FORCED.items(), rest, strict=True):
        share = 0.5 if key.endswith("half") else 0.75
        assert all(x["kl"] > 1e-6 for x in found)
        # a share of single tokens comes in steps, and a draw of 16 places is a small one
        near = 0 if "every_k" in key else 0.15
        assert found[0]["share_eligible"] == pytest.approx(share, abs=near + 1e-9)


def test_replay_in_one_layer_leaves_the_others_whole(model, clip):
    codes = clips.true_codes(model, clip)
    session = replay_scores.begin(
        model, replay_scores.Way("replay=every_k:k=9", layers=(1,)), clip, codes
    )
    with torch.inference_mode():
        model.score(session, codes[:, 8:9], clip.moves[8:9])
    row = session.meter.take()
    assert row["rows_replayed"] == row["rows_eligible"] == session.shape.batch * 16
    assert row["rows_computed"] == 2 * row["rows_replayed"]


@pytest.mark.slow
def test_the_best_ranking_replays_what_changes_least(model, clip):
    ways = [
        replay_scores.Way("replay=attentive:share=0.5", rank)
        for rank in ("change", "tas", "reversed")
    ]
    _, best, tas, back = token_measures.forced(model, clip, ways, frames=3)
    mean = [sum(x["kl"] for x in found) for found in (best, tas, back)]
    assert mean[0] < min(mean[1:])
    assert mean[1] != mean[2]


def test_mass_is_the_attention_that_is_paid(model, clip):
    codes = clips.true_codes(model, clip)
    session = replay_scores.begin(
        model, replay_scores.Way("replay=attentive:share=0.5", "mass"), clip, codes
    )
    with torch.inference_mode():
        model.score(session, codes[:, 8:9], clip.moves[8:9])
    for mass in session.memory.replay.mass.found.values():
        assert mass.shape == (4, 1)
        assert ((mass > 0) & (mass < 0.2)).all()  # of 150 entries, by random weights


def test_a_moved_picture_is_found_where_it_went():
    old = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    found = token_measures._compare(old.roll(2, 1).flatten(0, 1), old.flatten(0, 1), (4, 6))
    assert found["change_moved"] == pytest.approx(0.0, abs=1e-6)
    assert found["change_nearest"] == pytest.approx(0.0, abs=1e-3)
    assert found["change"] > 1


# --- gates


@pytest.mark.slow
def test_heads_and_thresholds_come_from_other_rooms(model, clip):
    heads, scores = gates.choose(model, clip)
    assert len(heads) == len(scores) == 3 and all(0 <= head < 4 for head in heads)
    names = ("tas", "tas_head", "threshold", "thresholds")
    task = gates.Task("forced", ("reversing", "still"), 0.5, names, 2, frames=2)
    found = gates.measure(model, task)
    assert [row["clip"] for row in found] == ["reversing", "still"] * 4
    rows = {row["method"]: row for row in found if row["clip"] == "reversing"}
    assert rows["threshold"]["kl"] != rows["thresholds"]["kl"]
    # a rank holds its share; a threshold of other rooms comes near
    assert rows["tas"]["share_eligible"] == pytest.approx(0.5, abs=0.1)
    assert rows["threshold"]["share_eligible"] == pytest.approx(0.5, abs=0.3)
    assert rows["tas_head"]["kl"] != rows["tas"]["kl"] and rows["tas"]["kl_worst"] > 0


def test_every_method_is_measured_once_a_share():
    found = gates.tasks(16)
    for share in (0.75, 0.5):
        for what in ("forced", "made"):
            some = [t for t in found if (t.what, t.share, t.seed) == (what, share, 0)]
            names = [name for task in some for name in task.methods]
            assert sorted(["dense", "draft", "fastcar", *names]) == sorted(gates.METHODS)


def test_the_table_tells_losses_room_by_room():
    def row(method, share, measure, **values):
        by_world = {key: [value - 1, value, value + 2] for key, value in values.items()}
        named = {"method": method, "share": share, "measure": measure, "clip": "still", "seed": 0}
        values |= {f"psnr_truth_{end}": 29.0 for end in ("low", "high", "worst")}
        return named | values | {"by_world": by_world}

    rows = [
        row("dense", 0.0, "made", psnr_truth=30.0, share_eligible=0.0),
        row("tas", 0.5, "made", psnr_truth=27.5, share_eligible=0.7),
        row("tas", 0.5, "forced", kl=1.25, share_eligible=0.7),
    ]  # fmt: skip
    assert "| tas |  |  |  | [0.70]; 1.25; 2.50 (2.50 to 2.50), worst 2.5 |" in gates.lines(rows)
    for at, one in enumerate(rows[:2]):
        for end in (16, 24):
            one[f"psnr_truth_to_{end}"] = 30.0
            one["by_world"][f"psnr_truth_to_{end}"] = [30.0 - at, 30.0 - at * (end - 14)]
        one |= {"frames": 16, "motion": 0.5}
    cells = "1.50 (-4.85 to 7.85), worst 2.0; 5.50 (-51.68 to 62.68), worst 10.0; 0.50"
    assert gates.lines(rows)[-1] == f"| tas |  |  |  | {cells} |"


# --- time


def test_a_hollow_model_computes_no_rows_and_leaves_the_model_alone(model):
    before = [x.clone() for x in model.transformer.parameters()]
    empty = token_timing.hollow(model, projections=True)
    for layer in empty.transformer.trunk.layers:
        assert isinstance(layer.mlp, token_timing.Nothing) and isinstance(
            layer.self_attn.q_proj, token_timing.Nothing
        )
    x = torch.ones(2, 3, 64)
    assert empty.transformer.trunk.layers[0].mlp(x).shape == (2, 3, 64)
    assert all(
        torch.equal(x, y) for x, y in zip(before, model.transformer.parameters(), strict=True)
    )


# --- the whole


@pytest.mark.slow
def test_an_evaluation_has_the_keys_it_promises(monkeypatch):
    short = {name: (a, b[:2]) for name, (a, b) in clips.CLIPS.items()}
    monkeypatch.setattr(clips, "CLIPS", short)
    done = []
    found = ev.evaluate_tokens("toy-tokens", worlds=2, jobs=1, watch=done.append)
    assert (found["schema"], found["suite"]) == (1, "atrium-tokens")
    assert done == list(range(1, len(ev.TASKS) + 1))
    keys = {"psnr_truth_dense", "psnr_truth_replay", "psnr_truth_repeat", "psnr_tokenizer",
            "speedup_replay", "speedup_replay_window", "speedup_whole"}  # fmt: skip
    keys |= {f"kl_{name}{end}" for name in ev.CONTROLS for end in ("", "_half")}
    assert keys <= set(found["tokens"])
    assert found["tokens"]["kl_random_over"][0] == pytest.approx(
        found["tokens"]["kl_random"] - found["tokens"]["kl_attentive"]
    )
    assert "replay_window" in "\n".join(ev.lines(found))
    quick = ev.evaluate_tokens("toy-tokens", worlds=1, jobs=1, quick=True, timed=False)
    named = {key for key in keys if not key.startswith("speedup") and "_paper" not in key}
    assert named <= set(quick["tokens"])


@pytest.mark.slow
def test_given_plans_are_measured_instead_of_the_usual_ones():
    found = ev.evaluate_tokens("toy-tokens", ["fastcar"], worlds=2, jobs=1, quick=True, timed=False)
    measured = {(row["measure"], row.get("plan")) for row in found["rows"]}
    assert measured == {
        ("made", "dense"), ("made", "fastcar"), ("forced", "dense"), ("forced", "fastcar"),
        ("bounds", None),
    }  # fmt: skip
    assert found["tokens"]["psnr_truth_fastcar_loss"][0] == pytest.approx(
        found["tokens"]["psnr_truth_dense"] - found["tokens"]["psnr_truth_fastcar"]
    )


def test_faults_are_one_line():
    with pytest.raises(TachyscopeError, match="toy-chunks is no token model of Atrium"):
        ev.evaluate_tokens("toy-chunks")
    with pytest.raises(TachyscopeError, match="`worlds` must be from 1 to 10,000, got 0"):
        ev.evaluate_tokens("toy-tokens", worlds=0)
