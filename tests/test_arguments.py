"""What callers hand in is checked when they call, and said in one line where it is wrong."""

import inspect
from dataclasses import fields

import numpy as np
import pytest
import torch
import toys
from faults import refused
from PIL import Image

import tachyscope as ts
from tachyscope.core.arguments import parse_actions
from tachyscope.core.opening import open_request
from tachyscope.core.pictures import parse_first
from tachyscope.core.plan import Plan
from tachyscope.core.request import VideoOptions, VideoRequest
from tachyscope.io.video import VideoWriter
from tachyscope.measure.compare import compare
from tachyscope.measure.inspection import inspect_model

RGB = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)


@pytest.fixture(scope="module")
def chunks():
    return ts.load("toy-chunks")


@pytest.fixture(scope="module")
def tokens():
    return ts.load("toy-tokens")


def _video(model, **asked):
    return np.concatenate([c.frames for c in ts.rollout(model, **{"frames": 3} | asked)])


WRONG = [
    ({"frames": 3.5}, "`frames` must be a whole number from 1 to 1,000,000, got 3.5"),
    ({"frames": "3"}, "`frames` must be a whole number from 1 to 1,000,000, got '3'"),
    ({"frames": True}, "`frames` must be a whole number from 1 to 1,000,000, got True"),
    ({"frames": None}, "`frames` must be a whole number from 1 to 1,000,000, got None"),
    ({"frames": 0}, "`frames` must be from 1 to 1,000,000, got 0"),
    (
        {"frames": -(10**5000)},
        "`frames` must be from 1 to 1,000,000, got a number of more than 30 digits",
    ),
    ({"prompt": b"a"}, "prompt must be text, got "),
    ({"prompt": 7}, "prompt must be text, got 7"),
    ({"prompt": b"a"}, "prompt must be text, got a bytes"),
    ({"plan": {}}, "plan must be text or a Plan, got a dict: try 'fast'"),
    ({"plan": "nope"}, "no plan 'nope'"),
    ({"seed": -1}, "`seed` must be from 0 to 2**63 - 1, got -1"),
    ({"seed": 2**64}, "`seed` must be from 0 to 2**63 - 1, got 18446744073709551616"),
    ({"seed": 0.5}, "`seed` must be a whole number"),
    ({"size": "64 by 96"}, "`size` is HEIGHTxWIDTH, got '64 by 96': try 480x832"),
    ({"size": (64,)}, "size is (height, width) or 'HEIGHTxWIDTH', got a tuple: try (480, 832)"),
    ({"size": 64}, "size is (height, width) or 'HEIGHTxWIDTH', got 64"),
    ({"size": (64, 96.0)}, "the width of `size` must be a whole number from 1 to 16,384, got 96.0"),
    ({"size": (-64, 96)}, "the height of `size` must be from 1 to 16,384, got -64"),
    ({"actions": 3}, "actions must be text, or a list of letters or indices, got 3: try 'w*20"),
    ({"actions": {"w": 1}}, "got a dict"),
    ({"actions": None}, "actions must be text, or a list of letters or indices, got None"),
    ({"actions": ["w", "z"]}, "one letter of '.wsadqe' a frame, or its index from 0 to 6, got 'z'"),
    ({"actions": [7]}, "or its index from 0 to 6, got 7: give one of these"),
    ({"actions": [-1]}, "or its index from 0 to 6, got -1"),
    ({"actions": [0.5]}, "got 0.5"),
    ({"actions": [True]}, "got True"),
    ({"actions": np.zeros((2, 2), int)}, "actions has one dimension, got [2, 2]: flatten it"),
    ({"actions": [1] * 4}, "`actions` are given for 4 frames, but only 3 are made"),
    ({"first_actions": ["w"]}, "`actions` are given for 1 frames, but only 0 are made"),
    ({"first": 3}, "first must be a path, PIL images, an array or a tensor, got 3"),
    ({"first": "nowhere.png"}, "nowhere.png"),
]
ROLLOUT_ONLY = [
    ({"then": "24: blue"}, "then must be (frame, prompt) pairs, got '24: blue': try [(24, 'a"),
    ({"then": [24]}, "then must be (frame, prompt) pairs, got 24"),
    (
        {"then": [("24", "blue")]},
        "a frame of `then` must be a whole number from 1 to 1,000,000, got '24'",
    ),
    ({"then": [(24, None)]}, "a prompt of then must be text, got None"),
    ({"overlap_decode": "no"}, "overlap_decode must be True, False or None, got 'no'"),
    ({"stream": "s"}, "stream must be a Stream, got a str: use tachyscope.open"),
]


@pytest.mark.parametrize(
    "asked, words", WRONG + ROLLOUT_ONLY, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_wrong_argument_is_told_when_rollout_is_called(chunks, asked, words):
    refused(lambda: ts.rollout(chunks, **{"frames": 3} | asked), words)


@pytest.mark.parametrize(
    "call", [ts.open, compare, inspect_model], ids=["open", "compare", "inspect"]
)
def test_the_same_checks_stand_at_the_other_doors(chunks, call):
    plan = "plans" if call is compare else "plan"
    for asked, words in WRONG:
        asked = {plan if name == "plan" else name: value for name, value in asked.items()}
        if call is ts.open and ("actions" in asked or asked == {"frames": None}):
            continue
        if call is compare and asked == {"plans": {}}:
            continue  # several plans may have names
        refused(lambda asked=asked: call(chunks, **{"frames": 3} | asked), words)
    for name in (plan, "prompt", "seed"):
        refused(lambda name=name: call(chunks, **{"frames": 3, name: None}), f"{name}", "must be")
    loaded = "model must be a loaded model, got 'toy-chunks': use tachyscope.load('toy-chunks')"
    refused(lambda: call("toy-chunks", frames=3), loaded)


@pytest.mark.parametrize("call", [compare, inspect_model], ids=["compare", "inspect"])
def test_one_video_is_compared_or_inspected_at_a_time(chunks, call):
    refused(lambda: call(chunks, frames=3, prompt=["a", "b"]), "prompt must be text, got a list")
    refused(lambda: call(chunks, frames=3, seed=[1, 2]), "`seed` must be a whole number")


def test_a_request_has_the_keywords_of_a_rollout_and_a_comparison():
    of_rollout = set(inspect.signature(ts.rollout).parameters)
    names = {field.name for field in fields(VideoRequest)}
    assert of_rollout - names == {"model", "plan", "then", "stream", "overlap_decode"}
    assert names == set(VideoOptions.__annotations__) | {"frames"}


def test_a_request_makes_the_video_of_its_keywords(tokens):
    request = VideoRequest(frames=1, first=RGB, first_actions="w e", actions="q", seed=3)
    want = _video(tokens, **vars(request))
    again = VideoRequest(**vars(request)).one_video()
    stream = open_request(tokens, "dense", again)
    made = ts.rollout(tokens, frames=1, actions=again.actions, stream=stream)
    assert np.array_equal(np.concatenate([c.frames for c in made]), want)
    parsed = request.parse(tokens)
    assert (parsed.prompts, parsed.seeds, parsed.batch, parsed.frames) == ([""], [3], None, 1)
    both = VideoRequest(prompt=["a", "b"], first=[RGB, RGB]).parse(tokens)
    assert (both.batch, both.seeds, len(both.pictures)) == (2, [0, 0], 2)
    assert both.shape.batch == 2 * parsed.shape.batch


def test_every_fault_of_the_video_shows_when_rollout_is_called(chunks, tokens):
    refused(lambda: ts.rollout("toy-chunks", frames=3), "use tachyscope.load('toy-chunks')")
    refused(lambda: ts.rollout(None, frames=3), "got None: use tachyscope.load(NAME)")
    refused(lambda: ts.rollout(chunks, frames=3, prompt="x" * 99), "at most 63 bytes")
    refused(lambda: ts.rollout(chunks, "cache=window:budget=1f", frames=3), "raise budget")
    refused(lambda: ts.rollout(chunks, "text=none", frames=3), "cross-attention")
    refused(lambda: ts.rollout(tokens, "text=pads", frames=3), "has no cross-attention")
    refused(lambda: ts.rollout(tokens, frames=3, size=(8, 8)), "32x32 pixels only")
    refused(lambda: ts.rollout(chunks, frames=9, then=[(9, "b")]), "a prompt changes where")
    refused(lambda: ts.rollout(chunks, frames=9, then=[(3, "x" * 99)]), "at most 63 bytes")


@pytest.mark.parametrize("name", ["toy-chunks", "toy-tokens"])
def test_a_refill_is_checked_before_anything_is_forgotten(name):
    model = ts.load(name)
    session = toys.open_session(model)
    list(ts.rollout(model, frames=3, stream=ts.Stream(model, session)))
    before, good = session.state(), session.memory.latents
    codes = not good.is_floating_point()
    for latents, prompt, actions, words in [
        ("x", "", "", "latents must be a tensor"),
        (good[..., :1], "", "", "latents must be"),
        (good.narrow(model.frame_dim, 0, 0), "", "", "latents must be"),
        (good.double() if codes else good.long(), "", "", "latents must be"),
        (good * 0 + 10**6 if codes else good / 0, "", "", "latents must be"),
        (good, None, "", "prompt must be text"),
        (good, "", [9], "from 0 to 6, got 9"),
    ]:
        refused(
            lambda x=latents, p=prompt, a=actions: ts.Stream(model, session).refill(x, p, a), words
        )
    assert all(torch.equal(x, before[name]) for name, x in session.state().items())


@pytest.mark.parametrize(
    "actions",
    [
        ["w", "w", "q"],
        [1, 1, 5],
        ("w", 1, "q"),
        np.array([1, 1, 5]),
        np.array(["w", "w", "q"]),
        [np.int64(1), np.int32(1), np.uint8(5)],
        torch.tensor([1, 1, 5]),
        torch.tensor([1, 1, 5], dtype=torch.uint8),
    ],
    ids=str,
)
def test_actions_are_text_letters_or_indices(chunks, actions):
    assert parse_actions(actions, chunks.actions, 4) == [1, 1, 5, 0]
    assert parse_actions("w*2 q", chunks.actions, 4) == [1, 1, 5, 0]


def test_actions_as_a_list_make_the_video_of_the_text(chunks, tokens):
    want = _video(chunks, actions="w*2 q")
    assert np.array_equal(_video(chunks, actions=[1, "w", 5]), want)
    assert not np.array_equal(_video(chunks), want)
    given = {"first": RGB, "frames": 1}
    want = _video(tokens, **given, first_actions="w e")
    assert np.array_equal(_video(tokens, **given, first_actions=np.array([1, 6])), want)
    assert not np.array_equal(_video(tokens, **given), want)
    sessions = [toys.open_session(tokens, first=RGB) for _ in range(2)]
    for session, actions in zip(sessions, ("w e", [1, "e"]), strict=True):
        ts.Stream(tokens, session).refill(session.memory.latents, "", actions)
    one, other = (session.state() for session in sessions)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_without_actions_refuses_a_list_of_them():
    refused(lambda: parse_actions([0], "", 3), "this model takes no actions, got 0: leave them out")
    assert parse_actions([], "", 2) == [0, 0]


def test_numbers_of_numpy_and_sizes_as_text_are_taken(chunks):
    want = _video(chunks, frames=2, seed=3, size=(32, 64))
    assert np.array_equal(
        _video(chunks, frames=np.int64(2), seed=torch.tensor(3), size="32x64"), want
    )
    assert np.array_equal(_video(chunks, frames=2, seed=3, size=[32, np.int32(64)]), want)
    assert np.array_equal(
        _video(chunks, frames=2, seed=3, size=(32, 64), plan=Plan.parse("")), want
    )


FLOATS = RGB.astype(np.float32) / 255
FORMS = {
    "array": RGB,
    "floats": FLOATS,
    "float64": FLOATS.astype(np.float64),
    "tensor": torch.from_numpy(RGB),
    "float tensor": torch.from_numpy(FLOATS),
    "strided tensor": torch.from_numpy(RGB).permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "PIL list": [Image.fromarray(x) for x in RGB],
    "PIL tuple": tuple(Image.fromarray(x) for x in RGB),
}


@pytest.mark.parametrize("form", FORMS)
def test_first_frames_come_in_many_forms(form):
    assert np.array_equal(parse_first(FORMS[form]), RGB)


def test_one_picture_needs_no_frame_dimension(tmp_path):
    Image.fromarray(RGB[0]).save(tmp_path / "a.png")
    for form in (
        RGB[0], FLOATS[0], torch.from_numpy(RGB[0]), Image.fromarray(RGB[0]),
        tmp_path / "a.png", str(tmp_path / "a.png"),
    ):  # fmt: skip
        assert np.array_equal(parse_first(form), RGB[:1])
    half = torch.full((4, 4, 3), 0.5)
    assert parse_first(half.bfloat16()).tolist() == parse_first(half).tolist()


def test_a_video_follows_a_path_as_it_follows_its_frames(tokens, tmp_path):
    Image.fromarray(RGB[0]).save(tmp_path / "a.png")
    want = _video(tokens, frames=1, first=RGB[:1])
    assert np.array_equal(_video(tokens, frames=1, first=str(tmp_path / "a.png")), want)
    with VideoWriter(tmp_path / "b.mp4", 8) as file:
        file.write(RGB)
    assert parse_first(tmp_path / "b.mp4").shape == RGB.shape


MISTAKES = {
    "RGBA": (np.zeros((32, 32, 4), np.uint8), "got [32, 32, 4]: drop the transparency: x[..., :3]"),
    "gray": (np.zeros((32, 32), np.uint8), "a gray picture: repeat it, np.stack([x] * 3, -1)"),
    "gray 1": (np.zeros((1, 32, 32, 1), np.uint8), "gray pictures: repeat them, np.repeat(x, 3, -1)"),
    "empty": (np.zeros((0, 32, 32, 3), np.uint8), "it is empty: give one picture or more"),
    "flat": (np.zeros((1, 0, 32, 3), np.uint8), "it is empty"),
    "CHW": (np.zeros((3, 32, 32), np.uint8), "channels must come last: use np.moveaxis(x, -3, -1)"),
    "FCHW": (torch.zeros(2, 3, 32, 32), "channels must come last"),
    "two": (np.zeros((32, 32, 2), np.uint8), "give three channels, red, green and blue"),
    "batch": (np.zeros((1, 1, 32, 32, 3), np.uint8), "or [H, W, 3] for one picture"),
    "line": (np.zeros(3, np.uint8), "or [H, W, 3] for one picture"),
    "int": (np.zeros((32, 32, 3), np.int64), "uint8, or floats from 0 to 1, got int64: convert"),
    "bool": (np.zeros((32, 32, 3), bool), "got bool"),
    "object": (np.zeros((32, 32, 3), object), "got object"),
    "255": (FLOATS * 255, "floats must be from 0 to 1, got 0 to 255: scale it, here probably by x / 255"),
    "-1": (FLOATS * 2 - 1, "from 0 to 1, got -1 to 1: scale it, here probably by (x + 1) / 2"),
    "NaN": (FLOATS * np.nan, "first must be finite, it has NaN or infinity"),
    "PIL RGBA": (Image.new("RGBA", (32, 32)), "mode RGBA: use image.convert('RGB')"),
    "PIL gray": ([Image.new("L", (32, 32))], "mode L: use image.convert('RGB')"),
    "PIL sizes": (
        [Image.new("RGB", (32, 32)), Image.new("RGB", (32, 16))],
        "first frames share one size, got 16x32 and 32x32: resize them",
    ),
    "none": ([], "first must hold one picture or more, got none"),
    "arrays": ([RGB[0]], "first as a list holds PIL images, got ndarray of uint8 [32, 32, 3]: stack"),
}  # fmt: skip


def test_what_is_no_list_for_a_batch_is_one_line(chunks):
    for first in (Image.new("RGB", (96, 64)), 3, np.array(3), torch.tensor(3)):
        refused(lambda x=first: ts.open(chunks, prompt=["a", "b"], first=x), "here 2, got 1")
    stream = ts.open(chunks, prompt=["a", "b"])
    for actions in (3, torch.tensor(3), iter("ww")):
        refused(lambda x=actions: stream.step(x), "actions ")
    refused(lambda: stream.step(["w", "q"]), "the videos of a batch take the same actions")
    assert stream.step("w").frames.shape[0] == 2


def test_noise_of_any_float_array_is_the_noise_of_its_numbers(chunks):
    noise = np.random.default_rng(0).normal(size=(1, 3, 16, 8, 12)).astype(np.float32)
    want = _video(chunks, noise=noise)
    for same in (noise[:, ::-1][:, ::-1], noise.astype(">f4"), noise.astype(np.longdouble)):
        assert np.array_equal(_video(chunks, noise=same), want)
    flipped = _video(chunks, noise=noise[:, ::-1])
    assert np.array_equal(flipped, _video(chunks, noise=noise[:, ::-1].copy()))


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_first_frames_are_told_apart(tokens, name):
    first, words = MISTAKES[name]
    refused(lambda: ts.rollout(tokens, frames=1, first=first), words)


def test_a_wrong_size_names_the_models_and_how_to_resize(tokens):
    first = np.zeros((1, 24, 48, 3), np.uint8)
    assert refused(lambda: ts.rollout(tokens, frames=1, first=first)) == (
        "first frames are 24x48 (height x width), this model makes 32x32: resize them, in PIL by "
        "image.resize((32, 32))"
    )


def _stream(model, **asked):
    stream = ts.open(model, **asked)
    return stream, lambda **more: ts.rollout(model, **{"frames": 3, "stream": stream} | more)


def test_a_stream_is_not_asked_for_what_it_is_not(chunks, tokens):
    _, go_on = _stream(chunks, plan="fast", prompt="a", seed=3, size=(32, 64))
    for name, other in {
        "plan": "dense", "prompt": "b", "seed": 4, "size": (64, 96), "first": RGB,
    }.items():  # fmt: skip
        refused(lambda name=name, other=other: go_on(**{name: other}), f"another {name}: leave")
    refused(lambda: go_on(plan="dense", seed=1), "another plan and seed: leave that out, or open")
    refused(lambda: go_on(pace="x"), "`pace` must be a number from")
    for given in ("w", ["w"], np.array([1])):
        refused(lambda x=given: go_on(first_actions=x), "another first_actions: leave that out")
    assert len(list(go_on(first_actions=[]))) == 1
    same = {"plan": "fast", "prompt": "a", "seed": 3, "size": "32x64"}
    assert len(list(go_on(**same))) == 1
    # as it is now: after a change the new prompt is its own
    list(go_on(frames=6, then=[(3, "b")]))
    refused(lambda: go_on(prompt="a"), "another prompt")
    assert go_on(prompt="b")
    _, go_on = _stream(tokens, first=RGB)
    refused(lambda: go_on(first=RGB[:1]), "another first")
    assert go_on(first=RGB)


def test_a_stream_goes_on_with_its_own_model(chunks, tokens):
    from tachyscope.models.toys import toy_chunks

    stream = ts.open(chunks)
    for other in (tokens, toy_chunks(seed=1), ts.load("toy-chunks", dtype="float64")):
        refused(lambda m=other: ts.rollout(m, frames=3, stream=stream), "another model")
    assert ts.rollout(toy_chunks(), frames=3, stream=stream)


def test_one_rollout_at_a_time_plays_a_stream(chunks):
    whole = _video(chunks, frames=12)
    stream, go_on = _stream(chunks)
    busy = "this stream is being played by another rollout"
    running = go_on()
    refused(go_on, busy)  # called, not begun
    made = [next(running).frames]
    refused(go_on, busy)  # under way
    made += [c.frames for c in running]
    made += [c.frames for c in go_on()]  # at its end
    running = go_on(frames=6)
    made.append(next(running).frames)
    running.close()
    made += [c.frames for c in go_on()]  # closed
    assert np.array_equal(np.concatenate(made), whole)
    go_on()  # dropped
    go_on().close()  # closed before it began
    failing = go_on()
    next(failing)
    with pytest.raises(KeyError):
        failing.throw(KeyError("mine"))
    assert len(list(go_on())) == 1
    assert stream.session.memory.chunk == 6


def test_a_rollout_leaves_the_callers_modes_alone(chunks):
    running = ts.rollout(chunks, frames=6)
    for _ in range(2):
        next(running)
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    assert running.gi_frame is not None and next(running, None) is None


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"dtype": torch.float16}, "no dtype 'float16'; there are: float32, float64, bfloat16"),
        ({"dtype": None}, "no dtype 'None'"),
        ({"device": 3.5}, "no device 3.5"),
        ({"device": None}, "no device None"),
    ],
)
def test_a_fault_in_loading_is_one_line(asked, words):
    refused(lambda: ts.load("toy-chunks", **asked), words)


def test_a_model_is_loaded_by_its_name():
    refused(lambda: ts.load(None), "no model None")
    refused(lambda: ts.load(["toy-chunks"]), "no model ['toy-chunks']")
    assert ts.load("toy-chunks", dtype=torch.bfloat16).dtype == torch.bfloat16
