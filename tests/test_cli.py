"""Every verb, the exact words of its faults, and no half of a file after any of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

# a verb imports these when it runs; first met in a test that replaces `load`, they would keep that
import tachyscope.bench
import tachyscope.compare  # noqa: F401
from tachyscope import __version__
from tachyscope.cli import main
from tachyscope.cli.app import BENCH, app
from tachyscope.cli.app import VERBS as CLASSES
from tachyscope.cli.verb import options_of
from tachyscope.models.registry import MODELS
from tachyscope.models.wan.loading import save_wan
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.toy import toy_chunks
from tachyscope.models.wan.transformer import WanCausal
from tachyscope.plan import NAMED, NAMES, POLICIES
from tachyscope.session import Session
from tachyscope.settings import settings
from tachyscope.video import VideoWriter, read_frames, read_video
from tachyscope.worlds.visit import Visit

ROOT = Path(__file__).parent.parent
README, MANUAL = (ROOT / "README.md").read_text(), (ROOT / "docs" / "cli.md").read_text()
VERBS = ["generate", "compare", "race", "play", "serve", "inspect", "bench cpu", "bench wan", "bench tokens", "bench rivals", "bench sessions", "bench fit", "eval",
         "calibrate", "methods", "models", "doctor"]  # fmt: skip
SUMS = {"frames", "macs", "pairs", "pairs_dense", "density", "rows_computed", "rows_replayed",
        "cache_mb", "entries", "fps_avg", "first_frame_s", "warm_s", "load_s", "chunk_ms"}  # fmt: skip


def last_line(capsys):
    out = capsys.readouterr().out
    assert out.endswith("\n")
    return json.loads(out.splitlines()[-1])


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_verbs_are_the_documented_ones():
    assert sorted(name for name in app if not name.startswith("-")) == sorted(
        {verb.split()[0] for verb in VERBS} | {"fpga"}  # whose verbs test_fpga_cli.py holds
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_in_the_readme_and_in_the_manual(verb):
    assert f"tachyscope {verb}" in README
    assert f"tachyscope {verb}" in MANUAL


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_in_the_manual_and_has_help(verb, capsys):
    options = options_of((CLASSES | BENCH)[verb.split()[-1]])
    assert main([*verb.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    section = MANUAL.split(f"## tachyscope {verb}")[1].split("\n## ")[0]
    if verb == "play":
        section += MANUAL.split("## tachyscope serve")[1].split("\n## ")[0]
    if verb in ("compare", "inspect", "race"):
        section += MANUAL.split("## tachyscope generate")[1].split("\n## ")[0]
    for one in options:
        named = one.name.upper() if one.positional else one.flag
        assert named in shown and named in section, named
        assert one.help.split()[0] in shown


def test_every_kind_of_policy_is_an_option_of_a_video():
    """A plan may be changed kind by kind: a new kind needs an option."""
    assert {one.name for one in options_of(CLASSES["generate"])} >= set(POLICIES)


@pytest.mark.slow
def test_to_generate_a_video_imports_no_benchmark(tmp_path):
    code = (
        "import sys\n"
        "from tachyscope.cli import main\n"
        f"code = main('generate toy-chunks --frames 1 --quiet --out {tmp_path}'.split())\n"
        "assert code == 0 and 'torch' in sys.modules\n"
        "assert not [name for name in sys.modules if name.startswith('tachyscope.bench')]"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_help_waits_for_no_torch():
    code = (
        "import sys; from tachyscope.cli import main; main(['generate', '--help'])\n"
        "assert 'cyclopts' in sys.modules and 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_the_list_of_models_runs_none(monkeypatch, capsys):
    monkeypatch.setattr(
        "tachyscope.models.registry.load", lambda *a, **k: pytest.fail("a model was loaded")
    )
    monkeypatch.setattr(Session, "__init__", lambda *a, **k: pytest.fail("a model ran"))
    assert main(["models", "--json", "-"]) == 0
    rows = {row["name"]: row for row in last_line(capsys)["models"]}
    assert (rows["atrium-tokens"]["size"], rows["atrium-tokens"]["chunk"]) == ("128x128", 1)
    assert (rows["toy-chunks"]["size"], rows["self-forcing"]["size"]) == ("64x96", "480x832")
    assert rows["wan_causal"]["size"] is None


def test_help_and_version_are_no_faults(capsys):
    assert main([]) == 0
    assert main(["--help"]) == 0
    assert all(verb.split()[0] in capsys.readouterr().out for verb in VERBS[:1])
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    "words, message",
    [
        (["--plan", "magic"], f"no plan 'magic'; there are: {', '.join(NAMES)}"),
        (["--cache", "magic"], f"no cache policy 'magic'; there are: {', '.join(POLICIES['cache'])}"),
        (["--replay", "magic"], "no replay policy 'magic'; there are: attentive, random, every_k, "
         "input, neurons, prune, none"),
        (["--cache", "window:snk=3"], "cache policy 'window' has no 'snk'; it takes: budget, sink, positions, fold, view, max_distance"),
        (["--cache", "merge:budget=x"], "a size is entries (1344) or latent frames (21f), got 'x': give one of these"),
        (["--plan", "live", "--cache", "dedup:budget=2f,newest=1"], "cache policy 'dedup': budget=2f holds 48 entries, but 120 are protected (prompt 0, sink 1f, newest 1f, present chunk 3f): raise budget to 5f or more, or lower sink or newest"),
        (["--plan", "fast cache=window", "--cache", "merge"], "cache is given twice, 'cache=window' and 'cache=merge': leave one out"),
        (["--cache", "merge:budget=21f replay=every_k"], "--cache is one policy without spaces, got 'merge:budget=21f replay=every_k': give another part by its own option, or all of them in --plan"),
        (["--plan", "x" * 10**5], f"no plan '{'x' * 40}…{'x' * 19}'; there are: {', '.join(NAMES)}"),
        (["--text", "none"], "this model reads its prompt by cross-attention, so text=none is not possible: use text=dense, pads, ann"),
        (["--frames", "0"], "--frames must be from 1 to 1,000,000, got 0"),
        (["--frames", "-5"], "--frames must be from 1 to 1,000,000, got -5"),
        (["--frames", "many"], "--frames must be a whole number, got 'many': give its digits"),
        (["--frames", "1.5"], "--frames must be a whole number, got '1.5': give its digits"),
        (["--frames", "0x10"], "--frames must be a whole number, got '0x10': give its digits"),
        (["--seed", "1.5"], "--seed must be a whole number, got '1.5': give its digits"),
        (["--world", "1.5"], "--world must be a whole number, got '1.5': give its digits"),
        (["--frames", "9" * 30], "--frames must be from 1 to 1,000,000, got " + "9" * 30),
        (["--seed", "-1"], "--seed must be from 0 to 2**63 - 1, got -1"),
        (["--seed", str(2**63)], f"--seed must be from 0 to 2**63 - 1, got {2**63}"),
        (["--actions", "jump"], "--actions: this model takes letters of '.wsadqe', each with *count, got 'jump': try w*20"),
        (["--actions", "w*99", "--frames", "9"], "--actions are given for 99 frames, but only 9 are made: raise --frames or shorten the actions"),
        (["--size", "big"], "--size is HEIGHTxWIDTH, got 'big': try 480x832"),
        (["--size", "64x"], "--size is HEIGHTxWIDTH, got '64x': try 480x832"),
        (["--size", "63x96"], "toy-chunks makes frames of a height that 16 divides and a width that 16 divides, got 63x96: round it"),
        (["--device", "gpu"], "no device 'gpu'; give cpu, cuda or cuda:N"),
        (["--dtype", "float8"], "no dtype 'float8'; there are: float32, float64, bfloat16"),
        (["--weights", "x.pt"], "model 'toy-chunks' brings its own weights: leave --weights out"),
        (["--sede", "1"], "tachyscope {verb} has no option --sede: did you mean --seed"),
        (["--plan"], "tachyscope {verb} needs a value for --plan, got none: tachyscope {verb} --help tells more"),
        (["extra"], "tachyscope {verb} takes no 'extra' there: leave it out, or put what has spaces in quotes"),
        (["--seed", "1", "--seed", "2"], "--seed is given twice: leave one out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
@pytest.mark.parametrize("verb", ["generate", "compare"])
def test_a_fault_is_one_line_and_leaves_no_file(verb, words, message, tmp_path, capsys):
    assert main([verb, "toy-chunks", "--out", str(tmp_path), *words]) == 2
    assert capsys.readouterr() == ("", f"tachyscope: {message.format(verb=verb)}\n")
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "words, message",
    [
        (["generate", "magic", "--out", "x"], f"no model 'magic'; there are: {', '.join(MODELS)}"),
        (["generate", "vila_u", "--out", "x"], "model 'vila_u' needs a checkpoint: give its path as --weights"),
        (["generate", "--out", "x"], "tachyscope generate needs a value for MODEL, got none: tachyscope generate --help tells more"),
        (["generate", "toy-chunks"], "tachyscope generate needs a value for --out, got none: tachyscope generate --help tells more"),
        (["conjure"], "tachyscope has no verb 'conjure'; there are: generate, compare, race, play, serve, inspect, eval, calibrate, methods, models, doctor, bench, fpga"),
        (["--nope"], "tachyscope has no verb '--nope'; there are: generate, compare, race, play, serve, inspect, eval, calibrate, methods, models, doctor, bench, fpga"),
        (["eval", "moon"], "eval takes atrium, or two video files, got 'moon': try eval atrium, or eval A.mp4 B.mp4"),
        (["eval", "atrium", "--only", "moon"], "no --only 'moon'; there are: both, world, tokens, views, loops"),
        (["bench", "cpu", "--rounds", "0"], "--rounds must be from 1 to 1,000, got 0"),
        (["bench", "cpu", "--frames", "0"], "--frames must be from 1 to 1,000,000, got 0"),
        (["bench", "cpu", "--plans", ";"], "--plans are texts set apart by ';', got ';': try 'fast;balanced'"),
        (["bench", "cpu", "--plans", "fast;magic"], f"no plan 'magic'; there are: {', '.join(NAMES)}"),
        (["bench", "cpu", "--at", "9,x"], "--at is latent frames set apart by commas, got '9,x': try 25,100"),
        (["eval", "atrium", "--worlds", "0"], "--worlds must be from 1 to 10,000, got 0"),
        (["eval", "atrium", "--plan", "magic"], f"no plan 'magic'; there are: {', '.join(NAMES)}"),
        (["methods", "--json", "."], ". is a folder: give the name of a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_fault_of_any_verb_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr() == ("", f"tachyscope: {message}\n")
    assert files(tmp_path) == []


@pytest.mark.parametrize("verb", ["generate", "compare"])
def test_an_unwritable_place_is_told_before_a_model_is_loaded(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "tachyscope.models.registry.load", lambda *a, **k: pytest.fail("a model was loaded")
    )
    (tmp_path / "file").touch()
    under = tmp_path / "file" / "out"
    assert main([verb, "toy-chunks", "--out", str(under)]) == 2
    line = f"tachyscope: {tmp_path / 'file'} is a file, not a folder: give the name of a folder\n"
    assert capsys.readouterr().err == line
    words = [verb, "toy-chunks", "--out", str(tmp_path / "out"), "--json", str(under / "a.json")]
    assert main(words) == 2
    assert capsys.readouterr().err == line
    assert files(tmp_path) == ["file"]


class Code:
    """Pickled, it is a call."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_bad_checkpoint_is_one_line_and_runs_no_code(tmp_path, capsys):
    save_wan(toy_chunks(), tmp_path / "good.safetensors")
    whole = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    torch.save({"generator": {"x": Code(tmp_path / "ran")}}, tmp_path / "code.pt")
    torch.save({"generator": {"x": torch.zeros(2)}}, tmp_path / "other.pt")
    wanted = {
        "none.pt": "no model at {}: give a folder with config.json, or a checkpoint file",
        "cut.safetensors": "{} must be safetensors, it is damaged or cut short (",
        "code.pt": "{} may hold only tensors, it has pickled objects whose code was not run: ",
        "other.pt": "{} must hold a Wan model under its original names, got x: ",
    }
    out = tmp_path / "out"
    for name, message in wanted.items():
        path = tmp_path / name
        assert main(["generate", "wan_causal", "--weights", str(path), "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"tachyscope: {message.format(path)}") and said.count("\n") == 1
    assert files(out) == [] and not (tmp_path / "ran").exists()


def test_a_saved_model_makes_the_same_video(tmp_path, capsys):
    save_wan(toy_chunks(), tmp_path / "model")
    asked = ["--frames", "6", "--prompt", "x"]
    for words in (["toy-chunks"], ["wan_causal", "--weights", str(tmp_path / "model")]):
        out = str(tmp_path / words[0])
        assert main(["generate", *words, *asked, "--out", out]) == 0
    videos = [(tmp_path / n / "video.mp4").read_bytes() for n in ("toy-chunks", "wan_causal")]
    assert videos[0] == videos[1]


@pytest.mark.parametrize("model", ["toy-chunks", "toy-tokens"])
def test_generate_writes_a_video_and_ends_with_its_sums(model, tmp_path, capsys):
    words = ["generate", model, "--plan", "fast", "--frames", "4", "--prompt", "x"]
    words += ["--out", str(tmp_path), "--json", "-"]
    assert main(words) == 0
    found = last_line(capsys)
    assert (found["schema"], found["suite"]) == (1, "generate")
    assert found["command"] == f"tachyscope {' '.join(words)}"
    (row,) = found["rows"]
    assert row.keys() >= SUMS and row["frames"] == 4
    assert (row["name"], row["model"]) == ("fast", model)
    pictures = list(read_video(tmp_path / "video.mp4"))
    assert len(pictures) == 4
    assert row["size"] == "{}x{}".format(*pictures[0].shape)
    assert files(tmp_path) == ["video.mp4"]


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("verb", ["generate", "compare"])
def test_quiet_leaves_the_document_alone(verb, tmp_path, capsys):
    words = [verb, "toy-chunks", "--frames", "3", "--out", str(tmp_path), "--quiet"]
    assert main(words) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*words, "--json", "-"]) == 0
    out, said = capsys.readouterr()
    assert out.count("\n") == 1 and said == "" and json.loads(out)["suite"] == verb


def test_generate_says_its_rates_apart_from_the_warm_up(tmp_path, capsys):
    words = ["generate", "toy-chunks", "--frames", "10", "--out", str(tmp_path)]
    assert main(words) == 0
    number = r"\d+\.\d"
    assert re.match(
        rf"dense: {number} frames/s once warm \({number} ms a chunk, {number} in the model\), "
        rf"{number} on average; loading {number} s, first frame after {number} s, warm-up {number} s "
        r"\(2 chunks\)\.\n",
        capsys.readouterr().out,
    )


def test_generate_takes_a_plan_with_changes(tmp_path, capsys):
    words = "generate toy-chunks --plan fast --attention dense --replay random:share=0.25"
    words += " --frames 30 --size 32x48 --json -"
    assert main([*words.split(), "--cache", "window:budget=6f", "--out", str(tmp_path)]) == 0
    (row,) = last_line(capsys)["rows"]
    assert row["name"] == "plan"
    assert row["plan"] == (
        "cache=window:budget=6f,sink=1,positions=absolute attention=dense text=pads "
        "replay=random:share=0.25,age=0,drift=false"
    )
    assert row["size"] == "32x48"
    assert row["rows_replayed"] > 0 and row["entries"] == 3 * 6


def test_generate_changes_the_prompt_where_a_chunk_begins(tmp_path, monkeypatch, capsys):
    written, write = [], VideoWriter.write
    monkeypatch.setattr(VideoWriter, "write", lambda *a: written.append(a[1]) or write(*a))
    words = ["generate", "toy-chunks", "--frames", "12", "--prompt", "a red room", "--actions", "w"]
    assert main([*words, "--then", "10: x", "--out", str(tmp_path / "then")]) == 2
    line = "a prompt changes where a chunk begins, from frame 1 to 9 of 12, got frame 10"
    assert capsys.readouterr().err.startswith(f"tachyscope: {line}: ")
    assert files(tmp_path) == []
    assert main([*words, "--out", str(tmp_path / "plain")]) == 0
    more = ["--then", "9: x", "--then", "4:a blue room"]
    assert main([*words, *more, "--out", str(tmp_path / "then")]) == 0
    target = tmp_path / "then" / "video.mp4"
    told = f"{target}: 12 frames of 64x96; from frame 6 on 'a blue room'; from frame 9 on 'x'\n"
    assert capsys.readouterr().out.endswith(told)
    plain, then = np.concatenate(written).reshape(2, 12, 64, 96, 3)
    same = (plain == then).all((1, 2, 3))
    assert same[:6].all() and not same[6:].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, model, side",
    [
        ("png", "atrium-world", 128),
        ("mp4", "toy-tokens", 32),
        pytest.param("mp4", "atrium-world", 128, marks=pytest.mark.slow),
        pytest.param("png", "toy-tokens", 32, marks=pytest.mark.slow),
    ],
)
def test_generate_follows_an_image_or_a_video(kind, model, side, tmp_path, capsys):
    y, x = np.mgrid[:side, :side] * 256 // side
    picture = np.stack([x, y, 255 - x], -1).astype(np.uint8)
    if model == "atrium-world":
        picture = Visit(3, [], motion=0.0).frames(0, 1)[0]
    given, count = tmp_path / f"given.{kind}", 1
    if kind == "png":
        pyplot = pytest.importorskip("matplotlib.pyplot")
        pyplot.imsave(given, picture)
    else:
        count = 3
        with VideoWriter(given, 8) as video:
            video.write(np.stack([picture] * count))
    words = ["generate", model, "--frames", "3", "--first", str(given), "--then", "1: a blue room"]
    assert main([*words, "--prompt", "a red room", "--out", str(tmp_path / "out")]) == 0
    target = tmp_path / "out" / "video.mp4"
    told = f"{target}: 3 frames of {side}x{side}, after the {count} of {given}; from frame 1 on "
    assert capsys.readouterr().out.endswith(f"{told}'a blue room'\n")
    if model == "atrium-world":
        shown = np.stack(list(read_video(target))).astype(int)
        plain = tmp_path / "plain"
        assert main(["generate", model, "--frames", "3", "--out", str(plain)]) == 0
        other = next(read_video(plain / "video.mp4")).astype(int)
        # a trained model goes on from what it was shown
        near, far = (np.abs(frame - picture).mean() for frame in (shown[0], other))
        assert near < 0.5 * far


@pytest.mark.slow
def test_layers_are_compiled_where_a_model_has_some(tmp_path, monkeypatch, capsys):
    # as the option does it, by a backend that needs no C++ compiler
    compile_layers = WanCausal.compile_layers
    monkeypatch.setattr(
        WanCausal, "compile_layers", lambda model: compile_layers(model, "aot_eager")
    )
    frames = []
    for more in ([], ["--compile"]):
        out = tmp_path / str(len(more))
        made = ["generate", "toy-chunks", *more, "--frames", "3", "--out", str(out), "--json", "-"]
        assert main(made) == 0
        assert last_line(capsys)["rows"][0]["frames"] == 3
        frames.append(np.stack(list(read_video(out / "video.mp4"))).astype(int))
    assert frames[0].shape[0] == 3 and np.abs(frames[0] - frames[1]).max() <= 2
    words = ["toy-tokens", "--compile", "--dtype", "bfloat16", "--out", str(tmp_path / "out")]
    assert main(["generate", *words]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("tachyscope: a token's step is compiled for float32")
        and said.count("\n") == 1
    )


@pytest.mark.parametrize("more, done", [([], True), (["--no-compile"], False)])
def test_layers_are_compiled_where_it_pays(more, done, tmp_path, monkeypatch, capsys):
    asked, compiled = [], []
    monkeypatch.setattr(
        WanModel, "compiling_pays", lambda self, chunks: asked.append(chunks) or True
    )
    monkeypatch.setattr(WanModel, "compile", lambda self: compiled.append(self.name))
    words = ["generate", "toy-chunks", "--frames", "10", "--out", str(tmp_path), "--json", "-"]
    assert main([*words, *more]) == 0
    assert last_line(capsys)["rows"][0]["compiled"] is done
    assert (asked, compiled) == (([4], ["toy-chunks"]) if done else ([], []))


def test_a_first_frame_that_cannot_be_followed_is_one_line(tmp_path, monkeypatch, capsys):
    video = tmp_path / "given.mp4"
    with VideoWriter(video, 8) as file:
        file.write(np.zeros((2, 64, 96, 3), np.uint8))
    (tmp_path / "text.png").write_text("no picture")
    size = "--first has frames of 64x96 (height x width), the video is {}: add --resize, which cuts"
    for model, more, words in [
        ("toy-chunks", [], "a preview shows latents and cannot make them of pixels: start without"),
        ("toy-tokens", [], size.format("32x32")),
        ("atrium-world", [], size.format("128x128")),
        ("atrium-world", ["--size", "256x128"], size.format("256x128")),
        ("atrium-world", ["--world", "1"], "a world brings its own first frame: leave --first or"),
    ]:
        out = tmp_path / "out"
        given = ["--first", str(video), *more]
        assert main(["generate", model, *given, "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"tachyscope: {words}") and said.count("\n") == 1
        assert not out.exists() or files(out) == []
    monkeypatch.setattr(
        "tachyscope.models.registry.load", lambda *a, **k: pytest.fail("a model was loaded")
    )
    for name, reason in [
        ("none.png", "no such file or directory"),
        ("text.png", "invalid data found when processing input"),
        ("", "is a directory"),
    ]:
        path = tmp_path / name
        words = ["generate", "toy-chunks", "--first", str(path), "--out", str(tmp_path / "out")]
        assert main(words) == 2
        advice = "give a video file, or an image"
        line = f"tachyscope: {path} cannot be read as a video ({reason}): {advice}\n"
        assert capsys.readouterr().err == line
    words = ["generate", "toy-chunks", "--then", "soon", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    line = "a change of prompt is FRAME: PROMPT, got 'soon': try '24: a blue room'"
    assert capsys.readouterr().err == f"tachyscope: {line}\n"


def test_what_a_change_of_a_plan_undoes_is_told(tmp_path, capsys):
    asked = ["generate", "toy-chunks", "--frames", "3", "--out", str(tmp_path), "--plan", "fast"]
    assert main([*asked, "--cache", "window:budget=12f"]) == 0
    assert capsys.readouterr().err == (
        "tachyscope: note: plan 'fast cache=window:budget=12f': cache=window replaces cache=bank and "
        "its resident=21f, host=int8\n"
    )
    assert main([*asked, "--cache", "bank:resident=24f"]) == 0
    out, said = capsys.readouterr()
    assert said == "" and "bank:resident=24f,budget=240f,host=int8" in out


def test_first_frames_are_resized_where_asked_for_and_an_old_video_is_told(tmp_path, capsys):
    video = tmp_path / "given.mp4"
    with VideoWriter(video, 8) as file:
        file.write(np.full((1, 48, 80, 3), 200, np.uint8))
    words = ["generate", "toy-tokens", "--frames", "1", "--out", str(tmp_path)]
    assert main([*words, "--first", str(video), "--resize"]) == 0
    told = f"{tmp_path / 'video.mp4'}: 1 frames of 32x32, after the 1 of {video}\n"
    assert capsys.readouterr().out.endswith(told)
    assert main(words) == 0
    told = f"{tmp_path / 'video.mp4'} (replaced): 1 frames of 32x32\n"
    assert capsys.readouterr().out.endswith(told)
    assert main([*words, "--resize"]) == 2
    line = "--resize is for the frames of --first, got none: leave it out"
    assert capsys.readouterr().err == f"tachyscope: {line}\n"


@pytest.mark.parametrize(
    "first", ["http://127.0.0.1:9/a.png", "rtsp://x", "concat:a|b", "pipe:0", "file:x.png"]
)
def test_first_frames_come_from_local_files_alone(first, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("av.open", lambda *a, **k: pytest.fail("ffmpeg was asked"))
    assert main(["generate", "toy-chunks", "--first", first, "--out", str(tmp_path / "out")]) == 2
    line = f"a video is read from a local file, got {first}: download it first"
    assert capsys.readouterr().err == f"tachyscope: {line}\n"


def test_generate_says_which_methods_saved_nothing(tmp_path, capsys):
    words = ["generate", "toy-chunks", "--plan", "fast", "--frames", "6", "--out", str(tmp_path)]
    assert main(words) == 0
    note = "fast: cache policy 'bank' saved nothing: the video is shorter than what it may hold\n"
    assert note in capsys.readouterr().out


@pytest.mark.usefixtures("no_plots")
@pytest.mark.slow
def test_compare_ends_with_one_line_of_both_meters_sums(tmp_path, capsys):
    words = f"compare toy-chunks --plan fast --frames 24 --out {tmp_path} --json -"
    assert main(words.split()) == 0
    found = last_line(capsys)
    assert list(found) == [
        "schema", "suite", "date", "machine", "versions", "command", "aa", "floor", "lead", "rows",
    ]  # fmt: skip
    assert (found["schema"], found["suite"]) == (1, "compare")
    assert found["command"] == f"tachyscope {words}"
    dense, plan = found["rows"]
    assert dense.keys() >= SUMS and SUMS | {"ratio_dense", "psnr_dense"} <= plan.keys()
    assert dense["frames"] == plan["frames"] == 24
    assert dense["density"] == 1 and plan["density"] < 0.7 and plan["macs"] < dense["macs"]
    assert found["floor"]["run"] == "dense float64"
    assert files(tmp_path) == [
        "compare.json", "compare.mp4", "dense.mp4", "plan.mp4", "report.html",
    ]  # fmt: skip
    assert json.loads((tmp_path / "compare.json").read_text()) == found


@pytest.mark.slow
@pytest.mark.usefixtures("no_plots")
def test_compare_without_floor_and_noise_claims_neither(tmp_path, capsys):
    target = tmp_path / "a.json"
    words = "compare toy-tokens --plan fast --frames 3 --no-floor --no-aa"
    assert main([*words.split(), "--out", str(tmp_path), "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "Speed to dense" not in out
    assert out.startswith("Speeds were not compared: noise is unknown without a second dense run")
    assert "Floor not measured" in out
    assert "Its weights are random, so its pictures say nothing of quality.\n" in out
    found = json.loads(target.read_text())
    assert "aa" not in found and "floor" not in found


def test_bench_prints_noise_and_counted_work(capsys):
    words = ["bench", "cpu", "--plans", "fast", "--frames", "6", "--rounds", "1", "--json", "-"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"^dense against itself: \d+\.\d\dx to \d+\.\d\dx; ", out, re.M)
    assert "of dense" in out
    found = json.loads(out.splitlines()[-1])
    assert [row["name"] for row in found["rows"]] == ["dense", "fast"]
    assert found["suite"] == "bench-cpu" and found["aa"]["high"] >= 1


def test_eval_has_both_models_in_one_document(monkeypatch, tmp_path, capsys):
    from tachyscope.evaluation import atrium

    def document(suite):
        return {"schema": 1, "suite": suite, "rows": [{"suite": suite}], "given": "", "walk": ""}

    asked = []

    def world(plans, **options):
        asked.append((plans, options))
        options["watch"](1)
        return document("atrium") | {"world": {"revisit_db": 1.0}}

    def tokens(**options):
        asked.append(options)
        return document("atrium-tokens") | {"tokens": {"kl_random": 2.0}, "clips": {}}

    monkeypatch.setattr(atrium.world_rows, "evaluate_world", world)
    monkeypatch.setattr(atrium.tokens, "evaluate_tokens", tokens)
    words = ["eval", "atrium", "--quick", "--seed", "3", "--plan", "dense", "--plan", "fast"]
    assert main([*words, "--json", "-"]) == 0
    found = last_line(capsys)
    assert found["world"] == {"revisit_db": 1.0} and found["tokens"] == {"kl_random": 2.0}
    assert found["rows"] == [{"suite": "atrium"}]
    assert found["token_rows"] == [{"suite": "atrium-tokens"}]
    plans, options = asked[0]
    assert tuple(plans) == ("dense", "fast")
    for given in (options, asked[1]):
        assert (given["seed"], given["quick"], given["worlds"]) == (3, True, 4)
    assert options["command"].startswith("tachyscope eval atrium --quick")


def test_methods_lists_every_policy_with_paper_and_parameters(capsys):
    assert main(["methods", "--json", "-"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = json.loads(out)
    listed = {(p["part"], p["name"]): p for p in found["policies"]}
    known = {(part, name): make for part, by in POLICIES.items() for name, make in by.items()}
    assert listed.keys() == known.keys()
    for key, make in known.items():
        policy = listed[key]
        assert policy["about"].endswith(".") and "\n" not in policy["about"]
        assert policy["paper"] == make.paper
        assert [p["name"] for p in policy["parameters"]] == list(settings(make))
        assert [p["about"] for p in policy["parameters"]] == [
            s.about for s in settings(make).values()
        ]
    window = listed["cache", "window"]["parameters"]
    assert [(p["name"], p["type"], p["default"]) for p in window] == [
        ("budget", "size", "21f"), ("sink", "int", 1), ("positions", "absolute|reindexed", "absolute"),
        ("fold", "float", None), ("view", "size", None), ("max_distance", "int", None),
    ]  # fmt: skip
    assert found["plans"] == NAMED


def test_methods_tells_people_the_same(capsys):
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    for part, known in POLICIES.items():
        assert all(f"{part}={name}" in out for name in known)
    told = " ".join(out.split())
    for table in POLICIES.values():
        for policy in table.values():
            assert all(
                f"{key} (" in told and s.about in told for key, s in settings(policy).items()
            )
    assert all(name in out for name in NAMES)


def test_models_lists_every_model(tmp_path, capsys):
    assert main(["models", "--json", str(tmp_path / "models.json")]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "models.json").read_text())["models"]
    assert [row["name"] for row in found] == list(MODELS)
    assert all(row["name"] in out for row in found)
    rows = {row["name"]: row for row in found}
    assert rows["toy-chunks"]["size"] == "64x96" and rows["toy-chunks"]["kind"] == "chunks"
    assert (rows["krea"]["size"], rows["krea"]["chunk"]) == ("480x832", 3)
    assert rows["wan_causal"]["size"] is None and rows["vila_u"]["kind"] == "tokens"


@pytest.mark.slow
def test_doctor_makes_a_video_of_every_model_it_has(capsys):
    assert main(["doctor", "--json", "-"]) == 0
    found = last_line(capsys)
    checks = {row["check"]: row for row in found["rows"]}
    assert list(checks) == [
        "cuda", "triton", "diffusers", "transformers", "compiled programs", "libx264", "rollout",
    ]  # fmt: skip
    assert checks["rollout"]["ok"] and checks["libx264"]["ok"]
    assert checks["rollout"]["found"] == (
        "atrium-world, atrium-tokens, toy-chunks, toy-tokens made 2 frames each"
    )


def test_doctor_says_what_is_broken(monkeypatch, capsys):
    def broken():
        raise OSError("no such codec")

    monkeypatch.setattr("tachyscope.cli.doctor._try_codec", broken)
    monkeypatch.setattr("tachyscope.cli.doctor._try_rollouts", lambda: "made some")
    assert main(["doctor"]) == 2
    said = capsys.readouterr()
    assert "OSError: no such codec" in said.out
    assert said.err == "tachyscope: this machine cannot serve: libx264 failed, see above\n"


def failing(fault, calls=2):
    """A decoder that gives way at its calls-th chunk."""
    real, made = WanModel.decode_latents, []

    def decode(self, session, latents):
        made.append(None)
        if len(made) >= calls:
            raise fault
        return real(self, session, latents)

    return decode


@pytest.mark.parametrize("verb", ["generate", "compare"])
def test_a_fault_inside_a_chunk_leaves_no_file(verb, tmp_path, monkeypatch, capsys):
    # past the chunks that warm up
    monkeypatch.setattr(WanModel, "decode_latents", failing(ZeroDivisionError("boom"), 9))
    words = [verb, "toy-chunks", "--frames", "48", "--out", str(tmp_path)]
    assert main([*words, "--json", str(tmp_path / "a.json")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("tachyscope: ZeroDivisionError: boom: this is a fault of tachyscope's")
    assert files(tmp_path) == []


def test_an_old_video_outlives_a_fault(tmp_path, monkeypatch):
    (tmp_path / "video.mp4").write_bytes(b"old")
    monkeypatch.setattr(WanModel, "decode_latents", failing(ZeroDivisionError("boom")))
    assert main(["generate", "toy-chunks", "--out", str(tmp_path)]) == 1
    assert (tmp_path / "video.mp4").read_bytes() == b"old"
    assert files(tmp_path) == ["video.mp4"]


NO_MEMORY = (
    "tachyscope: the memory is not enough: give the plan's cache a budget, for example --cache "
    "merge:budget=21f, or take a smaller --size; tachyscope bench fit tells what fits\n"
)


def test_too_little_memory_is_one_line(tmp_path, monkeypatch, capsys):
    words = ["generate", "toy-chunks", "--out", str(tmp_path)]
    # petabytes
    assert main([*words, "--size", "4096x4096", "--frames", "1000000"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "tachyscope: the memory of cpu does not hold the cache of cache=keep_all"
    )
    assert said.endswith("tachyscope bench fit tells what fits\n") and said.count("\n") == 1
    monkeypatch.setattr(WanModel, "decode_latents", failing(torch.OutOfMemoryError("CUDA is full")))
    assert main(words) == 2
    assert capsys.readouterr().err == NO_MEMORY
    assert files(tmp_path) == []


def test_an_interrupt_ends_with_130(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(WanModel, "decode_latents", failing(KeyboardInterrupt()))
    assert main(["generate", "toy-chunks", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr() == ("", "tachyscope: interrupted\n")
    assert files(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_in_a_process_removes_what_was_begun(tmp_path):
    words = ["generate", "toy-chunks", "--cache", "window", "--frames", "100000"]
    run = subprocess.Popen(
        [sys.executable, "-m", "tachyscope", *words, "--out", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while run.poll() is None and not list(tmp_path.glob(".video.mp4.*")):
            time.sleep(0.02)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert (run.returncode, out, err) == (130, "", "tachyscope: interrupted\n")
    assert files(tmp_path) == []


@pytest.mark.slow
def test_the_readmes_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = README.split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert len(read_frames(tmp_path / "room.mp4")) == 14


@pytest.mark.parametrize("part", POLICIES)
def test_every_policy_is_in_the_readme_or_on_the_page_of_its_kind(part):
    methods = README.split("## Methods")[1].split("## ")[0]
    row = [line for line in methods.splitlines() if f"(`{part}`)" in line]
    told = row[0] if row else (ROOT / "docs" / f"{part}.md").read_text()
    for name in POLICIES[part]:
        assert f"`{name}`" in told or f"={name}`" in told, name


def test_every_model_and_every_module_are_in_the_docs():
    listed = (ROOT / "docs" / "models.md").read_text()
    assert all(f"| `{name}` |" in listed for name in MODELS)
    files = (ROOT / "docs/architecture.md").read_text().split("## File map")[1]
    for path in (ROOT / "tachyscope").rglob("*.py"):
        if path.name != "__init__.py":
            assert re.search(rf"\b{path.stem}\b", files), path.name


def test_every_link_of_the_docs_leads_to_a_file():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_other_faults_of_torch_are_not_taken_for_the_users(tmp_path, monkeypatch, capsys):
    fault = RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(WanModel, "decode_latents", failing(fault))
    words = ["generate", "toy-chunks", "--out", str(tmp_path), "--traceback"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "illegal memory access" in said.splitlines()[-1]
    assert files(tmp_path) == []
