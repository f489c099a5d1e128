"""A model of one's own: a file with a class, which every named plan, comparison and verb serves."""

import importlib.metadata
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tachyscope as ts
from tachyscope.cli import main
from tachyscope.core.plan import NAMES
from tachyscope.measure.compare import compare
from tachyscope.models import registry
from tachyscope.models.own import make_own

FILE = Path(__file__).parent / "own_world.py"
WORLD = f"{FILE}:MyWorld"


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """The names of models, and what may be imported, as they were."""
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    monkeypatch.setattr(sys, "path", list(sys.path))


def play(model, plan, chunks=5, **asked):
    with ts.open(model, plan, seed=3, **asked) as stream:
        return np.stack([chunk.frames for chunk in stream.take(chunks, "w*2 a d w")])


@pytest.mark.parametrize("plan", [name for name in NAMES if name not in ("stock", "pose")])
def test_every_named_plan_serves_it(plan):
    model = ts.load(WORLD)
    made, dense = play(model, plan), play(model, "dense")
    assert made.shape == (5, 1, 32, 32, 3) and np.array_equal(made[0], dense[0])
    if plan in ("dense", "lossless"):  # the others weigh the past
        assert np.array_equal(made, dense)


def test_it_goes_on_from_frames_and_from_a_snapshot_and_comes_in_batches():
    model = ts.load(WORLD)
    given = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    first = play(model, "live", first=given)
    assert not np.array_equal(first, play(model, "live"))
    with ts.open(model, "live", seed=1) as one, ts.open(model, "live") as two:
        one.step("w")
        state, after = one.snapshot(), one.step("d")
        two.restore(state)
        assert np.array_equal(two.step("d").frames, after.frames)
    with ts.open(model, "live", seed=[1, 2]) as batch, ts.open(model, "live", seed=1) as alone:
        assert np.array_equal(batch.step("w").frames[0], alone.step("w").frames)


def test_a_prompt_it_does_not_read_is_refused():
    model = ts.load(WORLD)
    with pytest.raises(ts.TachyscopeError, match="my-world reads no prompt, got 'a room'"):
        ts.open(model, prompt="a room")
    with pytest.raises(ts.TachyscopeError, match="has no cross-attention, got text=pads"):
        ts.open(model, "fast text=pads")


def test_two_plans_are_compared_on_it(tmp_path):
    found = compare(ts.load(WORLD), "live", out=tmp_path, frames=6, actions="w*6", aa=False)
    assert found


def test_the_command_line_takes_the_file(tmp_path, capsys):
    words = ["generate", WORLD, "--plan", "fast", "--actions", "w*4", "--frames", "4"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert list(tmp_path.glob("**/*.mp4"))


def test_it_may_be_registered_by_name(monkeypatch):
    world = type(ts.load(WORLD))
    ts.register("my-own", world)
    assert ts.load("my-own").name == "my-world" and "my-own" in registry.MODELS
    ts.register("my-own", lambda: world())  # again, as a notebook's cell does
    for name, make, words in [
        ("toy-chunks", world, "there is a model 'toy-chunks' already"),
        ("a b", world, "a model's name has letters"),
        ("mine", 3, "must be a class derived from VideoModel, or a function"),
    ]:
        with pytest.raises(ts.TachyscopeError, match=words):
            ts.register(name, make)


def test_another_distribution_names_it_by_an_entry_point(monkeypatch, tmp_path):
    entries = [
        importlib.metadata.EntryPoint("far-world", "own_world:MyWorld", registry.GROUP),
        importlib.metadata.EntryPoint("lost-world", "my_lost_world:World", registry.GROUP),
        importlib.metadata.EntryPoint("broken-world", "my_broken_world:World", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    monkeypatch.syspath_prepend(FILE.parent)
    assert ts.load("far-world").name == "my-world"
    with pytest.raises(ts.TachyscopeError, match="'lost-world' of my_lost_world:World cannot be"):
        ts.load("lost-world")
    (tmp_path / "my_broken_world.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ts.TachyscopeError, match="cannot be loaded: ZeroDivisionError: division"):
        ts.load("broken-world")
    sys.modules.pop("own_world", None)


def test_a_model_on_the_first_gpu_is_on_cuda():
    made = type(ts.load(WORLD))()
    made.device = torch.device("cuda:0")

    def make():
        return made

    given = {"device": torch.device("cuda"), "dtype": torch.float32}
    assert make_own("mine", make, **given) is made
    made.device = "cuda"
    with pytest.raises(ts.TachyscopeError, match=r"torch\.device as self\.device, got 'cuda'"):
        make_own("mine", make, **given)
    made.device = torch.device("cuda:0")
    for device in ("cpu", "cuda:1"):
        with pytest.raises(ts.TachyscopeError, match=f"is on cuda:0, got {device}: give its"):
            make_own("mine", make, **given | {"device": torch.device(device)})


FAULTS = {
    "gone.py:World": "there is no file .*gone.py",
    "{here}/empty.py:World": "empty.py has no World: name a class in it",
    "{here}/number.py:World": "must be a class derived from VideoModel, or a function",
    "{here}/broken.py:World": "cannot be imported: ZeroDivisionError: division by zero",
    "{here}/other.py:World": "must make a VideoModel, got a dict",
    "{here}/half.py:World": "cannot be made: Can't instantiate abstract class World",
    "{here}/needs.py:World": "cannot be made: .*missing 1 required positional argument: 'size'",
    "no_such_module:World": "no_such_module cannot be imported: ModuleNotFoundError",
}
FILES = {
    "empty": "",
    "number": "World = 3",
    "broken": "1 / 0",
    "other": "World = dict",
    "half": "import tachyscope as ts\nclass World(ts.VideoModel):\n    pass",
    "needs": "def World(size): ...",
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_a_file_is_one_line(name, tmp_path):
    for stem, code in FILES.items():
        (tmp_path / f"{stem}.py").write_text(code)
    with pytest.raises(ts.TachyscopeError, match=FAULTS[name]) as fault:
        ts.load(name.format(here=tmp_path))
    assert "\n" not in str(fault.value)


def test_a_model_says_what_it_lacks():
    model = ts.load(WORLD)
    with pytest.raises(ts.TachyscopeError, match="MyWorld defines no memory_parts"):
        model.memory_parts(model.shape(), 0)
    del model.transformer
    with pytest.raises(ts.TachyscopeError, match="MyWorld has no `transformer`: set self.transfor"):
        ts.open(model)
    with pytest.raises(ts.TachyscopeError, match="takes no weights: leave `weights` out"):
        ts.load(WORLD, "a.pt")
    silent = ts.load(WORLD)
    silent.encode_prompt = lambda prompt: None
    with pytest.raises(ts.TachyscopeError, match="encode_prompt must return what has `lengths`"):
        ts.open(silent)


def test_the_example_of_the_page_is_loaded_as_a_file():
    model = ts.load(f"{FILE.parent.parent / 'examples' / 'my_world.py'}:MyWorld")
    with ts.open(model, "fast", seed=0) as stream:
        assert stream.step().frames.dtype == np.uint8


def test_fit_takes_the_file_and_names_what_it_does_not_define(capsys):
    assert main(["fit", WORLD]) == 2
    assert "cannot say what memory it takes: MyWorld defines no on_meta" in capsys.readouterr().err
    assert main(["fit", "nobody"]) == 2
    assert "no model 'nobody'; there are: atrium-world" in capsys.readouterr().err
