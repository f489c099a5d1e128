"""What is installed: pins that agree with pyproject, files in the wheel, types that a user sees."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import tachyscope

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BESIDE = [  # other distributions of this repository
    tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
    for name in ("lab", "hardware")
]
# which Triton each torch of the public index asks for on Linux; its CPU builds ask for none
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def _pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    bare = (line.partition("#")[0].strip() for line in lines)
    named = [Requirement(line) for line in bare if line]
    pins = {canonicalize_name(each.name): each for each in named}
    assert len(pins) == len(named)
    return pins


def _direct():
    """Everything that any pyproject names, extras too, but for our own distributions."""
    own = {each["name"] for each in (PROJECT, *BESIDE)}
    found = {}
    for each in (PROJECT, *BESIDE):
        for lines in (each["dependencies"], *each.get("optional-dependencies", {}).values()):
            found |= {line: Requirement(line) for line in lines}
    return [named for named in found.values() if named.name not in own]


def test_everything_that_pyproject_names_is_pinned_within_its_bounds():
    pins, direct = _pins(), _direct()
    for named in direct:
        (pin,) = pins[canonicalize_name(named.name)].specifier
        assert pin.operator == "=="
        assert named.specifier.contains(Version(pin.version)), named
    assert {canonicalize_name(named.name) for named in direct} == set(pins)  # and nothing else is


def test_tritons_pin_is_the_one_that_torch_asks_for():
    pins = _pins()
    (torch,), (triton,) = pins["torch"].specifier, pins["triton"].specifier
    assert triton.version == TRITON_OF_TORCH[torch.version]


def test_the_pins_hold_together_with_what_is_installed():
    """No installed package refuses a pin: a CPU build of torch asks for no Triton."""
    pins, met = _pins(), 0
    installed = {canonicalize_name(each.name): each for each in metadata.distributions()}
    for name in pins.keys() & installed.keys():
        for line in installed[name].requires or []:
            asked = Requirement(line)
            pin = pins.get(canonicalize_name(asked.name))
            if pin and (not asked.marker or asked.marker.evaluate({"extra": ""})):
                (version,) = pin.specifier
                assert asked.specifier.contains(Version(version.version)), (name, line)
                met += 1
    assert met > 5


def test_extras_name_each_other_and_nothing_unknown():
    extras = PROJECT["optional-dependencies"]
    own = [Requirement(line) for lines in extras.values() for line in lines]
    own = [each for each in own if each.name == PROJECT["name"]]
    assert own
    assert all(each.extras <= set(extras) for each in own)


def test_versions_and_pythons_agree():
    assert PROJECT["version"] == tachyscope.__version__
    assert PROJECT["requires-python"] == ">=3.11"
    tried = re.search(r"^PYTHONS = (.*)$", (ROOT / "scripts/check_install").read_text(), re.M)
    told = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if ":: 3." in name]
    assert json.loads(tried[1]) == told


def test_a_wheel_holds_types_weights_and_templates():
    listing = """
from setuptools import Distribution
dist = Distribution({"script_name": "setup.py"})
dist.parse_config_files()
build = dist.get_command_obj("build_py")
build.build_lib = "."
build.ensure_finalized()
print("\\n".join(build.get_outputs(include_bytecode=False)))
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", listing], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    held = {os.path.normpath(line) for line in ran.stdout.splitlines()}
    files = [path for path in ROOT.glob("tachyscope/**/*") if path.is_file()]
    ours = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert "tachyscope/py.typed" in held
    assert held == ours


USERS = """
import tachyscope as ts

model = ts.load("toy-chunks")
for chunk in ts.rollout(model, "fast", frames="3"):
    reveal_type(chunk)
    chunk.nothing
"""


@pytest.mark.slow
def test_a_users_mypy_sees_our_types(tmp_path):
    # as pip leaves it: in the site-packages of a Python, where mypy demands py.typed
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    (site / "tachyscope").symlink_to(ROOT / "tachyscope")
    (site / "others.pth").write_text(str(Path(pytest.__file__).parent.parent))
    (tmp_path / "user.py").write_text(USERS)
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", tmp_path / "venv/bin/python"]
        + ["--cache-dir", tmp_path / "cache", "user.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert 'user.py:5: error: Argument "frames" to "rollout" has incompatible type' in ran.stdout
    assert 'user.py:6: note: Revealed type is "tachyscope.' in ran.stdout
    assert 'user.py:7: error: "Chunk" has no attribute "nothing"' in ran.stdout
    assert "Found 2 errors in 1 file" in ran.stdout


def test_the_hf_extra_reads_a_sentencepiece_tokenizer(tmp_path):
    """Published VILA-U folders have tokenizer.model alone, which needs more than transformers."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf")
    spm = pytest.importorskip("sentencepiece")
    text = iter(["a room with a red wall", "the blue ball of the house"] * 50)
    with (tmp_path / "tokenizer.model").open("wb") as file:
        spm.SentencePieceTrainer.train(
            sentence_iterator=text,
            model_writer=file,
            vocab_size=40,
            model_type="bpe",
            minloglevel=2,
        )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    from tachyscope.models.vila_u.tokenizers import read_tokenizer

    words = read_tokenizer(transformers, tmp_path, legacy=False)
    exact = spm.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    prompt = "a red ball of the room"
    assert words(prompt, add_special_tokens=False).input_ids == exact.encode(prompt)
