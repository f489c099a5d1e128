"""Every verb, the exact words of its faults, and no half of a file after any of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

# a verb imports these when it runs; first met in a test that replaces `load`, they would keep that
import tachyscope.measure.compare  # noqa: F401
from tachyscope import __version__
from tachyscope.cli import main
from tachyscope.cli.app import VERBS as CLASSES
from tachyscope.cli.app import app
from tachyscope.cli.options import read_prompts
from tachyscope.cli.verb import options_of
from tachyscope.core.plan import NAMED, NAMES, Plan
from tachyscope.core.policy import QUESTIONS, policies, settings
from tachyscope.core.session import Session
from tachyscope.io.video import VideoWriter, read_video
from tachyscope.models.atrium.visit import Visit
from tachyscope.models.registry import MODELS
from tachyscope.models.toys import toy_chunks
from tachyscope.models.wan.loading import save_wan
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.transformer import WanCausal

VERBS = ["generate", "compare", "play", "serve", "inspect", "bench", "fit", "list", "doctor"]
SUMS = {"frames", "macs", "pairs", "pairs_dense", "density", "rows_computed", "rows_replayed",
        "cache_mb", "entries", "fps_avg", "first_frame_s", "warm_s", "load_s", "chunk_ms"}  # fmt: skip


def written(folder, verb="generate"):
    return json.loads((folder / f"{verb}.json").read_text())


def last_line(capsys):
    out = capsys.readouterr().out
    assert out.endswith("\n")
    return json.loads(out.splitlines()[-1])


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_verbs_are_these():
    assert [name for name in app if not name.startswith("-")] == VERBS


def test_a_verb_has_few_options():
    counts = {verb: sum(not one.positional for one in options_of(CLASSES[verb])) for verb in VERBS}
    assert max(counts.values()) <= 12 and sum(counts.values()) <= 110, counts


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_help(verb, capsys):
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    for one in options_of(CLASSES[verb]):
        assert (one.name.upper() if one.positional else one.flag) in shown
        assert one.help.split()[0] in shown


def test_the_default_plan_is_one_and_bounded():
    defaults = {
        verb: one.default
        for verb in VERBS
        for one in options_of(CLASSES[verb])
        if one.name in ("plan", "plans") and verb not in ("inspect", "bench")
    }
    assert defaults == {"compare": "dense;fast"} | dict.fromkeys(
        ("generate", "play", "serve", "fit"), "fast"
    )
    assert not Plan.parse("fast").cache.grows


@pytest.mark.slow
def test_to_generate_a_video_imports_no_benchmark(tmp_path):
    code = (
        "import sys\n"
        "from tachyscope.cli import main\n"
        f"code = main('generate toy-chunks --frames 1 --out {tmp_path}'.split())\n"
        "assert code == 0 and 'torch' in sys.modules\n"
        "assert not [name for name in sys.modules if name == 'tachyscope.measure.bench']"
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
    assert main(["list", "models", "--json", "-"]) == 0
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
        (["--plan", "cache=magic"], f"no cache policy 'magic'; there are: {', '.join(policies('cache'))}"),
        (["--plan", "replay=magic"], "no replay policy 'magic'; there are: attentive, every_k, input, "
         "neurons, prune, random, none"),
        (["--plan", "cache=window:snk=3"], "cache policy 'window' has no 'snk'; it takes: budget, sink, positions, fold, view"),
        (["--plan", "cache=merge:budget=x"], "a size is entries (1344) or latent frames (21f), got 'x': give one of these"),
        (["--plan", "live cache=dedup:budget=2f,newest=1"], "cache policy 'dedup': budget=2f holds 48 entries, but 120 are protected (prompt 0, sink 1f, newest 1f, present chunk 3f): raise budget to 5f or more, or lower sink or newest"),
        (["--plan", "fast cache=window cache=merge"], "cache is given twice, 'cache=window' and 'cache=merge': leave one out"),
        (["--plan", "x" * 10**5], f"no plan '{'x' * 40}…{'x' * 19}'; there are: {', '.join(NAMES)}"),
        (["--plan", "text=none"], "this model reads its prompt by cross-attention, so text=none is not possible: use text=ann, dense, pads"),
        (["--frames", "0"], "--frames must be from 1 to 1,000,000, got 0"),
        (["--frames", "-5"], "--frames must be from 1 to 1,000,000, got -5"),
        (["--frames", "many"], "--frames must be a whole number, got 'many': give its digits"),
        (["--frames", "1.5"], "--frames must be a whole number, got '1.5': give its digits"),
        (["--frames", "0x10"], "--frames must be a whole number, got '0x10': give its digits"),
        (["--seed", "1.5"], "--seed must be a whole number, got '1.5': give its digits"),
        (["--world", "1.5"], "--world must be a whole number, got '1.5': give its digits"),
        (["--world", "1:x"], "--world's given frames must be a whole number, got 'x': give its digits"),
        (["--prompt", "2001: a space odyssey"], "a prompt that begins with a number and a colon comes later, got '2001: a space odyssey' alone: give the first prompt too, or write '0: 2001: a space odyssey'"),
        (["--prompt", "a", "--prompt", "b"], "a video begins with one prompt, got 'a' and 'b': write '24: b' for one that comes later"),
        (["--prompt", "a", "--prompt", "9: @b"], "prompts are all words or all files, got 'a' and '9: @b': embed the others too"),
        (["--weights", "a", "--weights", "b"], "one checkpoint is loaded, got a and b: leave one out, or write lora=b"),
        (["--frames", "9" * 30], "--frames must be from 1 to 1,000,000, got " + "9" * 30),
        (["--seed", "-1"], "--seed must be from 0 to 2**63 - 1, got -1"),
        (["--seed", str(2**63)], f"--seed must be from 0 to 2**63 - 1, got {2**63}"),
        (["--actions", "jump"], "--actions: this model takes letters of '.wsadqe', each with *count, got 'jump': try w*20"),
        (["--actions", "w*99", "--frames", "9"], "--actions are given for 99 frames, but only 9 are made: raise --frames or shorten the actions"),
        (["--size", "big"], "--size is HEIGHTxWIDTH, got 'big': try 480x832"),
        (["--size", "64x"], "--size is HEIGHTxWIDTH, got '64x': try 480x832"),
        (["--size", "63x96"], "toy-chunks makes frames of a height that 16 divides and a width that 16 divides, got 63x96: round it"),
        (["--device", "gpu"], "no device 'gpu'; give cpu, cuda or cuda:N"),
        (["--weights", "x.pt"], "model 'toy-chunks' brings its own weights: leave --weights out"),
        (["--sede", "1"], "tachyscope {verb} has no option --sede: did you mean --seed"),
        (["--seed"], "tachyscope {verb} needs a value for --seed, got none: tachyscope {verb} --help shows more"),
        (["a", "extra"], "tachyscope {verb} takes no '{extra}' there: leave it out, or put what has spaces in quotes"),
        (["--seed", "1", "--seed", "2"], "--seed is given twice: leave one out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
@pytest.mark.parametrize("verb", ["generate", "compare"])
def test_a_fault_is_one_line_and_leaves_no_file(verb, words, message, tmp_path, capsys):
    # `compare` takes several plans, and a second video
    words = ["--plans" if word == "--plan" and verb == "compare" else word for word in words]
    assert main([verb, "toy-chunks", "--out", str(tmp_path), *words]) == 2
    extra = "extra" if verb == "compare" else "a"
    assert capsys.readouterr() == ("", f"tachyscope: {message.format(verb=verb, extra=extra)}\n")
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "words, message",
    [
        (["generate", "magic", "--out", "x"], f"no model 'magic'; there are: {', '.join(MODELS)}"),
        (["generate", "vila_u", "--out", "x"], "model 'vila_u' needs a checkpoint: give its path as --weights"),
        (["generate", "--out", "x"], "tachyscope generate needs a value for MODEL, got none: tachyscope generate --help shows more"),
        (["conjure"], "tachyscope has no verb 'conjure'; there are: generate, compare, play, serve, inspect, bench, fit, list, doctor"),
        (["--nope"], "tachyscope has no verb '--nope'; there are: generate, compare, play, serve, inspect, bench, fit, list, doctor"),
        (["fit", "self-forcing", "--weights", "lora=x"], "--weights lora takes no memory of its own: leave it out of fit"),
        (["bench", "--rounds", "0"], "--rounds must be from 1 to 1,000, got 0"),
        (["bench", "--frames", "0"], "--frames must be from 1 to 1,000,000, got 0"),
        (["bench", "--plans", ";"], "--plans are separated by ';', got ';': try 'fast;balanced'"),
        (["bench", "--plans", "fast;magic"], f"no plan 'magic'; there are: {', '.join(NAMES)}"),
        (["bench", "--at", "9,x"], "--at is latent frames separated by commas, got '9,x': try 25,100"),
        (["list", "--json", "."], ". is a folder: give the name of a file"),
        (["list", "moons"], "list has no 'moons'; there are: models, plans, cache, store, attention, text, passes, replay, and every policy's name"),
        (["compare", "a.mp4"], "a video is compared with another one, got a.mp4 alone: name the second"),
        (["compare", "a.mp4", "b.mp4", "--frames", "3"], "--frames is for a model, got two videos: leave it out"),
        (["serve", "toy-chunks", "--set", "moons=3"], "no --set 'moons=3'; there are: sessions, session_frames, prompt_letters, message_bytes, log_bytes, messages_per_s, faults, idle_s, connections, connections_per_address, request_s, send_s, kept_s, kept, jobs, job_frames, snapshot_chunks"),
        (["serve", "toy-chunks", "--set", "sessions=0"], "limit sessions must be over 0, got 0"),
        (["serve", "toy-chunks", "--replicas", "3:2"], "--replicas is N, or LEAST:MOST from 1 on, got '3:2': try 2:4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_fault_of_any_verb_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr() == ("", f"tachyscope: {message}\n")
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "self-forcing"],
        ["compare", "self-forcing", "--certify", "out"],
        ["compare", "krea", "--sweep", "past"],
        ["serve", "waypoint"],
        ["inspect", "vila_u"],
    ],
)
def test_nothing_is_downloaded_for_a_cpu_that_cannot_run_it(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--weights", "download"]) == 2
    assert capsys.readouterr().err == (
        f"tachyscope: {words[1]} is too large for a CPU, and --weights download would fetch it for "
        f"one: add --device cuda, or give the files' own paths\n"
    )


@pytest.mark.parametrize("verb", ["generate", "compare", "serve"])
def test_a_gpu_that_is_not_there_is_told_before_a_download(verb, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([verb, "self-forcing", "--weights", "download", "--device", "cuda"]) == 2
    assert capsys.readouterr() == (
        "",
        "tachyscope: --device cuda: no CUDA device is usable here: tachyscope doctor tells what is, "
        "and the small models of tachyscope list models run on cpu\n",
    )


@pytest.mark.parametrize("verb", ["generate", "compare", "inspect"])
def test_an_unwritable_place_is_told_before_a_model_is_loaded(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "tachyscope.models.registry.load", lambda *a, **k: pytest.fail("a model was loaded")
    )
    (tmp_path / "file").touch()
    under = tmp_path / "file" / "out"
    assert main([verb, "toy-chunks", "--out", str(under)]) == 2
    line = f"tachyscope: {tmp_path / 'file'} is a file, not a folder: give the name of a folder\n"
    assert capsys.readouterr().err == line
    assert main(["bench", "--json", str(under / "a.json")]) == 2
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
    words += ["--out", str(tmp_path)]
    assert main(words) == 0
    found = written(tmp_path)
    assert (found["schema"], found["suite"]) == (1, "generate")
    assert found["command"] == f"tachyscope {' '.join(words)}"
    (row,) = found["rows"]
    assert row.keys() >= SUMS and row["frames"] == 4
    assert (row["name"], row["model"]) == ("fast", model)
    pictures = list(read_video(tmp_path / "video.mp4"))
    assert len(pictures) == 4
    assert row["size"] == "{}x{}".format(*pictures[0].shape)
    assert files(tmp_path) == ["generate.json", "video.mp4"]


def test_generate_says_its_rates_apart_from_the_warm_up(tmp_path, capsys):
    words = ["generate", "toy-chunks", "--plan", "dense", "--frames", "10", "--out", str(tmp_path)]
    assert main(words) == 0
    number = r"\d+\.\d"
    assert re.match(
        rf"toy-chunks by dense: predicted peak {number}\d GB of RAM\ndense: {number} frames/s once warm "
        rf"\({number} ms a chunk, p99 {number}, {number} in the model\), "
        rf"{number} on average; loading {number} s, first frame after {number} s, warm-up {number} s "
        r"\(2 chunks\)\.\n",
        capsys.readouterr().out,
    )


def test_a_world_model_without_its_world_is_warned_of(tmp_path, capsys):
    words = ["generate", "atrium-world", "--frames", "1", "--out", str(tmp_path)]
    note = "note: without a room the first picture of atrium-world is a blur: pass --world N"
    assert main(words) == 0 and note in capsys.readouterr().err
    assert main([*words, "--world", "3"]) == 0 and note not in capsys.readouterr().err


def test_generate_takes_a_plan_with_changes(tmp_path, capsys):
    plan = "fast attention=dense replay=random:share=0.25 cache=window:budget=6f"
    words = "generate toy-chunks --frames 30 --size 32x48"
    assert main([*words.split(), "--plan", plan, "--out", str(tmp_path)]) == 0
    (row,) = written(tmp_path)["rows"]
    assert row["name"] == "plan"
    assert row["plan"] == (
        "cache=window:budget=6f,sink=1,positions=absolute attention=dense text=pads "
        "replay=random:share=0.25,age=0,drift=false"
    )
    assert row["size"] == "32x48"
    assert row["rows_replayed"] > 0 and row["entries"] == 3 * 6


def test_generate_changes_the_prompt_where_a_chunk_begins(tmp_path, monkeypatch, capsys):
    shown, write = [], VideoWriter.write
    monkeypatch.setattr(VideoWriter, "write", lambda *a: shown.append(a[1]) or write(*a))
    words = ["generate", "toy-chunks", "--frames", "12", "--prompt", "a red room", "--actions", "w"]
    assert main([*words, "--prompt", "10: x", "--out", str(tmp_path / "then")]) == 2
    line = "a prompt changes where a chunk begins, from frame 1 to 9 of 12, got frame 10"
    assert capsys.readouterr().err.startswith(f"tachyscope: {line}: ")
    assert files(tmp_path) == []
    assert main([*words, "--out", str(tmp_path / "plain")]) == 0
    more = ["--prompt", "9: x", "--prompt", "4:a blue room"]
    assert main([*words, *more, "--out", str(tmp_path / "then")]) == 0
    target = tmp_path / "then" / "video.mp4"
    told = f"{target}: 12 frames of 64x96; from frame 6 on 'a blue room'; from frame 9 on 'x'\n"
    assert capsys.readouterr().out.endswith(told)
    plain, then = np.concatenate(shown).reshape(2, 12, 64, 96, 3)
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
    words = [
        "generate",
        model,
        "--frames",
        "3",
        "--first",
        str(given),
        "--prompt",
        "1: a blue room",
    ]
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
def test_compiled_layers_make_the_same_video(tmp_path, monkeypatch):
    # by a backend that needs no C++ compiler
    compile_layers = WanCausal.compile_layers
    monkeypatch.setattr(
        WanCausal, "compile_layers", lambda model: compile_layers(model, "aot_eager")
    )
    frames = []
    for pays in (False, True):
        monkeypatch.setattr(WanModel, "compiling_pays", lambda self, chunks, pays=pays: pays)
        out = tmp_path / str(pays)
        assert main(["generate", "toy-chunks", "--frames", "3", "--out", str(out)]) == 0
        row = written(out)["rows"][0]
        assert row["frames"] == 3 and row["compiled"] is pays
        frames.append(np.stack(list(read_video(out / "video.mp4"))).astype(int))
    assert frames[0].shape[0] == 3 and np.abs(frames[0] - frames[1]).max() <= 2


def test_layers_are_compiled_where_it_pays(tmp_path, monkeypatch):
    asked, compiled = [], []
    monkeypatch.setattr(
        WanModel, "compiling_pays", lambda self, chunks: asked.append(chunks) or True
    )
    monkeypatch.setattr(WanModel, "compile", lambda self: compiled.append(self.name))
    words = ["generate", "toy-chunks", "--frames", "10", "--out", str(tmp_path)]
    assert main(words) == 0
    assert written(tmp_path)["rows"][0]["compiled"] is True
    assert (asked, compiled) == ([4], ["toy-chunks"])


def test_a_first_frame_that_cannot_be_followed_is_one_line(tmp_path, monkeypatch, capsys):
    video = tmp_path / "given.mp4"
    with VideoWriter(video, 8) as file:
        file.write(np.zeros((2, 64, 96, 3), np.uint8))
    (tmp_path / "text.png").write_text("no picture")
    for model, more, words in [
        ("toy-chunks", [], "a preview shows latents and cannot make them of pixels: start without"),
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


def test_what_a_change_of_a_plan_undoes_is_told(tmp_path, capsys):
    asked = ["generate", "toy-chunks", "--frames", "3", "--out", str(tmp_path), "--plan"]
    assert main([*asked, "fast cache=window:budget=12f"]) == 0
    # a slow machine says how far it is, too
    notes = [line for line in capsys.readouterr().err.splitlines() if "loading" not in line]
    assert notes == [
        "tachyscope: note: plan 'fast cache=window:budget=12f': cache=window replaces cache=bank and "
        "its resident=21f, host=int8"
    ]
    assert main([*asked, "fast cache=bank:resident=24f"]) == 0
    out, said = capsys.readouterr()
    assert not [line for line in said.splitlines() if "loading" not in line]
    assert "bank:resident=24f,budget=240f,host=int8" in out


def test_what_fastcar_loses_where_a_camera_moves_is_told_before_the_video(tmp_path, capsys):
    out = ["--frames", "1", "--out", str(tmp_path)]
    for words in (
        ["generate", "toy-tokens", *out, "--plan", "fastcar"],
        ["compare", "toy-tokens", *out, "--plans", "dense;fastcar"],
    ):
        assert main(words) == 0
        noted = capsys.readouterr().err
        start = "tachyscope: note: replay=attentive loses 8 to 16 dB where a camera moves"
        assert noted.count(start) == 1 and "passes=draft loses nothing" in noted


def test_first_frames_are_resized_and_that_and_an_old_video_are_told(tmp_path, capsys):
    video = tmp_path / "given.mp4"
    with VideoWriter(video, 8) as file:
        file.write(np.full((1, 48, 80, 3), 200, np.uint8))
    words = ["generate", "toy-tokens", "--frames", "1", "--out", str(tmp_path)]
    assert main([*words, "--first", str(video)]) == 0
    told = f"{tmp_path / 'video.mp4'}: 1 frames of 32x32, after the 1 of {video}\n"
    out, noted = capsys.readouterr()
    assert out.endswith(told)
    assert noted == (
        "tachyscope: note: the frames of --first are 48x80: cut in the middle and scaled to 32x32\n"
    )
    assert main(words) == 0
    told = f"{tmp_path / 'video.mp4'} (replaced): 1 frames of 32x32\n"
    assert capsys.readouterr().out.endswith(told)


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


@pytest.mark.slow
def test_compare_writes_both_meters_sums(tmp_path, capsys):
    words = f"compare toy-chunks --frames 24 --out {tmp_path}"
    assert main(words.split()) == 0
    found = written(tmp_path, "compare")
    assert list(found) == [
        "schema", "suite", "date", "machine", "versions", "command", "aa", "baseline", "speed",
        "lead", "rows",
    ]  # fmt: skip
    assert (found["schema"], found["suite"]) == (1, "compare")
    assert found["command"] == f"tachyscope {words}"
    dense, plan = found["rows"]
    assert dense.keys() >= SUMS and SUMS | {"ratio_dense", "psnr_dense"} <= plan.keys()
    assert dense["frames"] == plan["frames"] == 24
    assert dense["density"] == 1 and plan["density"] < 0.7 and plan["macs"] < dense["macs"]
    assert files(tmp_path) == [
        "compare.json", "compare.mp4", "dense.mp4", "fast.mp4", "report.html",
    ]  # fmt: skip
    assert found["lead"] in capsys.readouterr().out


@pytest.mark.slow
def test_compare_takes_several_plans(tmp_path, capsys):
    words = "compare toy-tokens --plans live;dense;fast --frames 3"
    assert main([*words.split(), "--out", str(tmp_path)]) == 0
    found = written(tmp_path, "compare")
    assert [row["name"] for row in found["rows"]] == ["live", "dense", "fast"]
    assert found["baseline"] == "live" and "ratio_first" in found["rows"][1]
    out = capsys.readouterr().out
    assert "Its weights are random, so its pictures say nothing of quality.\n" in out


def test_a_first_prompt_may_begin_with_a_number():
    words = ("0: 2001: a space odyssey", "9: a red room")
    assert read_prompts(words) == ("2001: a space odyssey", None, [(9, "a red room")])


def test_compare_takes_two_videos(tmp_path, monkeypatch, capsys):
    for name, shade in (("a", 100), ("b", 110)):
        with VideoWriter(tmp_path / f"{name}.mp4", 8) as file:
            file.write(np.full((3, 32, 32, 3), shade, np.uint8))
    paths = [str(tmp_path / f"{name}.mp4") for name in "ab"]
    assert main(["compare", *paths]) == 0
    assert re.search(r"1 to 3 +2[789]\.\d\d", capsys.readouterr().out)
    assert files(tmp_path) == ["a.mp4", "b.mp4"]
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *paths, "--out", "out"]) == 0  # the folder that other forms write to
    assert written(tmp_path / "out", "compare")["suite"] == "videos"


def test_bench_prints_noise_and_counted_work(capsys):
    words = ["bench", "--plans", "fast", "--frames", "6", "--rounds", "1", "--json", "-"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"^dense against itself: \d+\.\d\dx to \d+\.\d\dx; ", out, re.M)
    assert "of dense" in out
    found = json.loads(out.splitlines()[-1])
    assert [row["name"] for row in found["rows"]] == ["dense", "fast"]
    assert found["suite"] == "bench-cpu" and found["aa"]["high"] >= 1
    assert main([*words[:-2]]) == 0
    assert "to time plans after a long past: tachyscope bench atrium-world --at 300" in (
        capsys.readouterr().out
    )


def test_list_has_every_policy_with_paper_and_parameters(capsys):
    assert main(["list", "--json", "-"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = json.loads(out)
    listed = {(p["part"], p["name"]): p for p in found["policies"]}
    known = {(part, name): make for part in QUESTIONS for name, make in policies(part).items()}
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
        ("fold", "float", None), ("view", "size", None),
    ]  # fmt: skip
    assert found["plans"] == NAMED


@pytest.mark.parametrize("part", QUESTIONS)
def test_a_kind_of_policy_is_listed_with_its_settings(part, capsys):
    assert main(["list", part]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for name, policy in policies(part).items():
        assert f"{part}={name}" in told
        assert all(f"{key} (" in told and s.about in told for key, s in settings(policy).items())
    assert "atrium-world" not in told


def test_one_policy_is_listed_by_its_name(capsys):
    assert main(["list", "merge"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("cache=merge\n") and "threshold (float)" in out and "window" not in out
    # a name that two kinds have
    assert main(["list", "window", "--json", "-"]) == 0
    assert [row["part"] for row in last_line(capsys)["policies"]] == ["cache", "attention"]


def test_a_list_of_all_is_short(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(
        name in out
        for name in (*NAMES, *MODELS, *(n for part in QUESTIONS for n in policies(part)))
    )
    assert "threshold (float)" not in out


def test_models_lists_every_model(tmp_path, capsys):
    assert main(["list", "models", "--json", str(tmp_path / "models.json")]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "models.json").read_text())["models"]
    assert [row["name"] for row in found] == list(MODELS)
    assert all(row["name"] in out for row in found)
    rows = {row["name"]: row for row in found}
    assert rows["toy-chunks"]["size"] == "64x96" and rows["toy-chunks"]["kind"] == "chunks"
    assert (rows["krea"]["size"], rows["krea"]["chunk"]) == ("480x832", 3)
    assert rows["wan_causal"]["size"] is None and rows["vila_u"]["kind"] == "tokens"
    assert [rows[name]["weights"] for name in ("atrium-world", "toy-chunks", "krea", "vila_u")] == [
        "in the package", "random", "download", "your file",
    ]  # fmt: skip
    # 14B in bfloat16 and its text encoder
    assert 35 < rows["krea"]["gb"] < 45 and rows["krea"]["gpu"] and not rows["toy-chunks"]["gpu"]


@pytest.mark.slow
def test_doctor_makes_a_video_of_every_model_it_has(capsys):
    assert main(["doctor", "--json", "-"]) == 0
    found = last_line(capsys)
    checks = {row["check"]: row for row in found["rows"]}
    assert list(checks) == [
        "cuda", "C++ compiler", "triton", "diffusers", "transformers", "compiled programs",
        "libx264", "rollout",
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
    monkeypatch.setattr("tachyscope.decode.cpu_library.find_compiler", lambda: None)
    assert main(["doctor"]) == 2
    said = capsys.readouterr()
    assert "OSError: no such codec" in said.out
    assert re.search(r"C\+\+ compiler +no +not found: token models run without", said.out)
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
    assert main(words) == 1
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
    "tachyscope: the memory is not enough: give the plan's cache a budget, for example "
    "cache=merge:budget=21f, or take a smaller --size; tachyscope fit shows what fits\n"
)


def test_too_little_memory_is_one_line(tmp_path, monkeypatch, capsys):
    words = ["generate", "toy-chunks", "--plan", "dense", "--out", str(tmp_path)]
    # petabytes
    assert main([*words, "--size", "4096x4096", "--frames", "1000000"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("tachyscope: the run would take ") and " GB of RAM, and there are " in said
    )
    assert said.endswith("shows what fits\n") and said.count("\n") == 1
    monkeypatch.setattr(WanModel, "decode_latents", failing(torch.OutOfMemoryError("CUDA is full")))
    assert main(words) == 2
    assert capsys.readouterr().err == NO_MEMORY
    assert files(tmp_path) == []


def test_an_interrupt_ends_with_130(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(WanModel, "decode_latents", failing(KeyboardInterrupt()))
    assert main(["generate", "toy-chunks", "--out", str(tmp_path)]) == 130
    out, said = capsys.readouterr()
    assert out.startswith("toy-chunks by fast: predicted peak ") and out.count("\n") == 1
    assert said == "tachyscope: interrupted\n"
    assert files(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_in_a_process_removes_what_was_begun(tmp_path):
    words = ["generate", "toy-chunks", "--plan", "cache=window", "--frames", "100000"]
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
    assert (run.returncode, err) == (130, "tachyscope: interrupted\n")
    assert out.startswith("toy-chunks by cache=window: predicted peak ") and out.count("\n") == 1
    assert files(tmp_path) == []


def test_other_faults_of_torch_are_not_taken_for_the_users(tmp_path, monkeypatch, capsys):
    fault = RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(WanModel, "decode_latents", failing(fault))
    words = ["generate", "toy-chunks", "--out", str(tmp_path), "--traceback"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "illegal memory access" in said.splitlines()[-1]
    assert files(tmp_path) == []
