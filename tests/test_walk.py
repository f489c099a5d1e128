"""How long the way of one chunk, and of one token, is through the package."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from toys import load

import tachyscope
from tachyscope.core.opening import open

PACKAGE = str(Path(tachyscope.__file__).parent)
LAYERS = {"Block.forward", "Block.prefill", "Layer.forward"}  # of Wan's transformer, and of LLaMA's
# by model and plan, at a full cache: the most files of a step and of its layers, and the most
# Python calls of a layer and pass, generators' steps counted
BOUNDS = {
    ("toy-chunks", "balanced"): (46, 24, 87),
    ("toy-chunks", "dense"): (35, 12, 52),
    ("toy-tokens", "dense"): (32, 11, 28),
}


class Walk:
    """What one step of a stream calls within the package."""

    def __init__(self, model, plan, chunks):
        self.files, self.in_layers = set(), []
        self.layers = 0  # a layer's passes
        self._inside = None  # the frame of the layer that runs
        with open(load(model), plan) as stream:
            for _ in range(chunks):
                stream.step()
            before = sys.getprofile()
            sys.setprofile(self._note)
            try:
                stream.step()
            finally:
                sys.setprofile(before)

    def _note(self, frame, event, arg):
        code = frame.f_code
        if event == "return" and frame is self._inside:
            self._inside = None
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        name = code.co_qualname
        file = code.co_filename.removeprefix(PACKAGE)
        self.files.add(file)
        if self._inside is not None:
            self.in_layers.append((file, name))
        elif name in LAYERS and "/depth.py" not in file:
            self._inside, self.layers = frame, self.layers + 1


@pytest.mark.parametrize("model, plan", BOUNDS)
def test_a_step_crosses_few_files_and_makes_few_calls_a_layer(model, plan):
    walk = Walk(model, plan, chunks=15)
    here = {file for file, _ in walk.in_layers}
    calls = len(walk.in_layers) / walk.layers
    print(f"{model} {plan}: {len(walk.files)} files, {len(here)} of them in layers")
    print(f"{calls:.1f} calls a layer and pass")
    for (file, name), count in Counter(walk.in_layers).most_common():
        print(f"{count / walk.layers:6.2f}  {file}  {name}")
    files, in_layers, most = BOUNDS[model, plan]
    assert len(walk.files) <= files
    assert len(here) <= in_layers
    assert calls <= most
