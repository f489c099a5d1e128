"""ComfyUI's nodes: by a stand-in for its API, and by its own server where its source is there."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import tachyscope as ts
from tachyscope.cli import main
from tachyscope.core.errors import TachyscopeError
from tachyscope.io.video import read_video

EXAMPLES = Path(__file__).parent.parent / "examples" / "comfyui"
FOLDER = os.environ.get("COMFYUI", "")  # a clone of ComfyUI; its packages are importable


class Any_:
    """Any class of the API, and what its inputs and outputs are made by."""

    Input = Output = staticmethod(lambda *args, **kwargs: (args, kwargs))


class Interrupted(Exception):
    pass


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    """The pack beside a stand-in: what ComfyUI gives a node, recorded from its third API."""
    told = SimpleNamespace(progress=[], freed=[], brought=[], interrupt=False)

    def check():
        if told.interrupt:
            raise Interrupted

    class Bar:
        def __init__(self, total):
            self.total = total

        def update_absolute(self, at, total, preview):
            told.progress.append((at, total, preview[1].size))

    class File:
        def __init__(self, path):
            self.path = path

        def get_stream_source(self):
            return self.path

    io = SimpleNamespace(
        ComfyNode=object, Custom=lambda name: Any_, Schema=lambda **fields: SimpleNamespace(**fields),
        NodeOutput=lambda *values: values, **dict.fromkeys(
            ("Combo", "String", "Float", "Int", "Image", "Video"), Any_
        ),
    )  # fmt: skip
    import torch

    modules = {
        "comfy": {}, "comfy.utils": {"ProgressBar": Bar}, "comfy_api": {},
        "comfy.model_management": {
            "get_torch_device": lambda: torch.device("cpu"),
            "throw_exception_if_processing_interrupted": check,
            "free_memory": lambda size, device: told.freed.append(size),
            "unet_offload_device": lambda: torch.device("cpu"),
            "load_models_gpu": lambda models, **asked: told.brought.append((models[0], asked)),
        },
        "comfy.model_patcher": {"ModelPatcher": lambda *given: given},
        "folder_paths": {"get_temp_directory": lambda: str(tmp_path / "temp")},
        "comfy_api.latest": {
            "ComfyExtension": object, "io": io, "InputImpl": SimpleNamespace(VideoFromFile=File),
        },
    }  # fmt: skip
    for name, values in modules.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    monkeypatch.delitem(sys.modules, "tachyscope.integrations.comfyui", raising=False)
    import tachyscope.integrations.comfyui as pack

    yield SimpleNamespace(pack=pack, told=told)
    del sys.modules["tachyscope.integrations.comfyui"]


def streamed(nodes, plan="fast", frames=20, name="toy-chunks", **more):
    (model,) = nodes.pack.LoadModel.execute(name, "")
    (text,) = nodes.pack.MakePlan.execute(plan)
    given = {"prompt": "a red ball", "frames": frames, "seed": 3, "height": 0, "width": 0} | more
    return model, nodes.pack.StreamVideo.execute(model, text, **given)


def encoded(chunks, fps, path):
    """A rollout's frames as an mp4 shows them."""
    with ts.VideoWriter(path, fps=fps) as video:
        for chunk in chunks:
            video.write(chunk.frames)
    return np.stack(list(read_video(path))).astype(int)


def test_one_side_alone_is_refused_when_queued(nodes):
    check = nodes.pack.StreamVideo.validate_inputs
    assert check(height=480) == "give both height and width, or 0 for both, got 480 x 0"
    assert check(height=480, width=832) is True and check() is True
    with pytest.raises(TachyscopeError, match="got 480 x 0"):
        streamed(nodes, height=480)


def test_an_input_from_another_node_is_checked_when_it_is_known(nodes):
    """ComfyUI gives None for it when a workflow is queued."""
    pack = nodes.pack
    assert pack.StreamVideo.validate_inputs(later_prompts=None, height=None, width=832) is True
    assert pack.MakePlan.validate_inputs("fast", None) is True
    with pytest.raises(TachyscopeError, match="cache policy 'nope'"):
        pack.MakePlan.execute("fast", "cache=nope")


def test_a_streamed_file_has_the_frames_of_a_rollout(nodes, tmp_path):
    (model, weights), (video, fps, report) = streamed(nodes, later_prompts="9: a blue ball\n")
    made = np.stack(list(read_video(video.path)))
    chunks = ts.rollout(
        model, "fast", prompt="a red ball", frames=20, seed=3, then=[(9, "a blue ball")]
    )
    wanted = encoded(chunks, model.fps, tmp_path / "wanted.mp4")
    assert made.shape == wanted.shape and fps == model.fps
    # the encoder's threads may change a level here and there
    assert np.abs(made.astype(int) - wanted).mean() < 0.5
    assert nodes.told.progress[-1][:2] == (20, 20)
    # its weights are ComfyUI's to move, and were asked for when it was loaded, and for the video
    assert [patcher for patcher, _ in nodes.told.brought] == [weights, weights]
    assert set(weights[0].parameters()) >= set(model.transformer.parameters())
    assert report.startswith("fast: 20 frames, ") and "of the full cache's pairs read" in report


def test_every_video_is_a_file_of_its_own_and_two_are_compared(nodes):
    _, (one, *_) = streamed(nodes)
    _, (two, *_) = streamed(nodes, plan="dense")
    assert one.path != two.path
    psnr, report = nodes.pack.CompareVideos.execute(one, two)
    assert psnr > 20 and "PSNR, dB" in report


def test_an_interrupt_ends_a_chunk_and_leaves_no_file(nodes, tmp_path):
    nodes.told.interrupt = True
    with pytest.raises(Interrupted):
        streamed(nodes)
    assert list((tmp_path / "temp").iterdir()) == []


def test_wrong_inputs_are_refused_when_queued(nodes):
    assert nodes.pack.MakePlan.validate_inputs("fast", "") is True
    assert "no cache policy 'nope'" in nodes.pack.MakePlan.validate_inputs("fast", "cache=nope")
    assert nodes.pack.StreamVideo.validate_inputs("48: snow falls") is True
    fault = nodes.pack.StreamVideo.validate_inputs("snow falls")
    assert fault == "a later prompt is a frame and words, got 'snow falls': try '48: snow falls'"


def test_given_frames_begin_the_video(nodes):
    import torch

    first = torch.rand(1, 128, 128, 3)
    _, (video, *_) = streamed(nodes, name="atrium-world", frames=4, first_frames=first)
    assert len(list(read_video(video.path))) == 4
    with pytest.raises(TachyscopeError, match="127"):
        streamed(nodes, name="atrium-world", frames=4, first_frames=torch.rand(1, 127, 127, 3))


def test_a_video_is_followed(nodes, tmp_path):
    path = tmp_path / "clip.mp4"
    with ts.VideoWriter(path, fps=8) as clip:
        clip.write(np.random.default_rng(0).integers(0, 256, (6, 96, 96, 3), np.uint8))
    source = SimpleNamespace(get_stream_source=lambda: str(path))
    with pytest.warns(ts.core.errors.TachyscopeWarning, match="96x96: cut in the middle"):
        (model, _), (video, *_) = streamed(
            nodes, name="atrium-world", frames=4, video=source, strength=0.4
        )
        asked = {"prompt": "a red ball", "frames": 4, "seed": 3, "video": path, "strength": 0.4}
        wanted = encoded(ts.rollout(model, "fast", **asked), model.fps, tmp_path / "wanted.mp4")
    made = np.stack(list(read_video(video.path))).astype(int)
    assert np.abs(made - wanted).mean() < 0.5


def test_a_plan_tells_what_there_is(nodes):
    base, changes = (kwargs for _, kwargs in nodes.pack.MakePlan.define_schema().inputs)
    lines = base["tooltip"].splitlines()
    assert len(lines) == len(base["options"]) and any("cache=bank" in line for line in lines)
    for policy in ("cache=bank: ", "attention=ann: ", "store=int4: ", "replay=attentive: "):
        assert policy in changes["tooltip"]


def test_every_node_has_a_schema_and_the_examples_name_its_inputs(nodes):
    import asyncio

    listed = asyncio.run(asyncio.run(nodes.pack.comfy_entrypoint()).get_node_list())
    inputs = {}
    for node in listed:
        schema = node.define_schema()
        inputs[schema.node_id] = {args[0] for args, _ in schema.inputs}
        assert schema.category == "Tachyscope" and schema.description
    for path in EXAMPLES.glob("*.json"):
        for step in json.loads(path.read_text()).values():
            if step["class_type"] in inputs:
                assert step["inputs"].keys() <= inputs[step["class_type"]]


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="COMFYUI names no clone of ComfyUI")
def test_comfyuis_own_server_runs_the_examples(tmp_path):
    base = "http://127.0.0.1:8197"
    pack = Path(FOLDER) / "custom_nodes" / "tachyscope"
    if not pack.exists():
        pack.symlink_to(EXAMPLES.parent.parent / "comfyui")
    walk = ["generate", "atrium-world", "--actions", "q*24", "--frames", "24"]
    assert main([*walk, "--seed", "5", "--out", str(tmp_path / "input")]) == 0
    clip = (tmp_path / "input/video.mp4").rename(tmp_path / "input/clip.mp4")
    for name, more in {"tachyscope": [], "follow": ["--video", f"{clip}:0.5"]}.items():
        assert main([*walk, "--seed", "3", *more, "--out", str(tmp_path / name)]) == 0
    words = ["--cpu", "--listen", "127.0.0.1", "--port", "8197", "--disable-api-nodes"]
    for folder in ("input", "output", "temp"):
        words += [f"--{folder}-directory", str(tmp_path / folder)]
    server = subprocess.Popen([sys.executable, "main.py", *words], cwd=FOLDER)

    def ask(path, data=None):
        body = None if data is None else json.dumps(data).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(base + path, body, headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read()
        return json.loads(text) if text else {}

    def until(condition, seconds=300):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if found := condition():
                    return found
            except OSError:
                assert server.poll() is None, "the server ended"
            time.sleep(0.3)
        raise AssertionError("took too long")

    def run(flow):
        number = ask("/prompt", {"prompt": flow})["prompt_id"]
        return until(lambda: ask(f"/history/{number}").get(number))

    def frames(path):
        return np.stack(list(read_video(path))).astype(int)

    try:
        until(lambda: ask("/object_info/TachyscopeStream"))
        flows = {p.stem: json.loads(p.read_text()) for p in EXAMPLES.glob("*.json")}
        for flow in flows.values():
            assert run(flow)["status"]["status_str"] == "success"
        for name in ("tachyscope", "follow"):
            (made,) = (tmp_path / "output/video").glob(f"{name}*.mp4")
            made, wanted = frames(made), frames(tmp_path / name / "video.mp4")
            assert made.shape == wanted.shape and np.abs(made - wanted).mean() < 0.5
        # unloaded by ComfyUI, the model comes back; a wrong plan does not even begin
        ask("/free", {"unload_models": True})
        again = json.loads(json.dumps(flows["stream"]))
        again["3"]["inputs"]["seed"] = 4
        assert run(again)["status"]["status_str"] == "success"
        wrong = json.loads(json.dumps(flows["stream"]))
        wrong["2"]["inputs"]["changes"] = "cache=nope"
        with pytest.raises(urllib.error.HTTPError) as fault:
            ask("/prompt", {"prompt": wrong})
        assert fault.value.code == 400 and b"no cache policy 'nope'" in fault.value.read()
        long = flows["stream"]
        long["3"]["inputs"] |= {"frames": 5000, "actions": "q*5000"}
        number = ask("/prompt", {"prompt": long})["prompt_id"]
        time.sleep(5)
        ask("/interrupt", {})
        ended = until(lambda: ask(f"/history/{number}").get(number), 20)
        assert ended["status"]["messages"][-1][0] == "execution_interrupted"
        assert not list((tmp_path / "temp").rglob("*.part"))
    finally:
        server.terminate()
        server.wait(20)
