"""2,000 seeded inputs end as a command should, and the judge sees it when one does not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import Case, Outcome, judge

FUZZ = Path(__file__).parent / "fuzz.py"


@pytest.mark.slow
def test_no_input_ends_in_a_traceback_or_takes_too_long_or_leaves_a_file():
    ran = subprocess.run([sys.executable, str(FUZZ)], capture_output=True, text=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["findings"] == [], ran.stdout
    assert found["count"] == 2_000 and sum(found["codes"].values()) == 2_000
    # both kinds of end were met, and often
    assert set(found["codes"]) == {"0", "2"} and min(found["codes"].values()) > 200


# a bound, and what is found by an input when it is taken out
TAKEN_OUT = """
import sys; sys.path.insert(0, {tests!r})
import json
from pathlib import Path
import fuzz
import copy
from tachyscope.core.limits import Bound

from tachyscope.core.policy import find_policy, settings
from tachyscope.models.wan.config import WanConfig

NONE = Bound(-10**40, 10**40)

def wide(table, name, words, prepare=lambda folder: None, seconds=4, none=NONE):
    case = fuzz.Case(words, prepare)
    with_bound = fuzz.judge(fuzz.run(case, seconds), seconds)
    kept, table[name] = table[name], none
    try:
        without = fuzz.judge(fuzz.run(case, seconds), seconds)
    finally:
        table[name] = kept
    return with_bound, without

def layers(folder):
    import shutil
    shutil.copytree(shared.wan, folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {{"num_layers": 10**9}}))

fields = WanConfig.__dataclass_fields__
free = copy.copy(fields["layers"])
free.metadata = {{**free.metadata, "bound": NONE}}
ages = settings(find_policy("replay", "attentive"))
generate = ["generate", "toy-chunks", "--frames", "3", "--out", "out", "--plan"]
load = ["generate", "wan_causal", "--weights", "model", "--frames", "1", "--out", "out"]
with fuzz.shared_parts() as shared:
    print(json.dumps({{
        "age": wide(ages, "age", [*generate, "replay=attentive:share=0.5,age=-1"],
                    none=ages["age"]._replace(bound=NONE)),
        "layers": wide(fields, "layers", load, layers, none=free),
    }}))
"""


@pytest.mark.slow
def test_a_bound_that_is_taken_out_is_found():
    code = TAKEN_OUT.format(tests=str(FUZZ.parent))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    for name, words in {
        "age": "ended with 1",  # a division by zero
        "layers": "s of CPU",  # layers are made without end
    }.items():
        with_bound, without = found[name]
        assert with_bound == [], name
        assert any(words in problem for problem in without), (name, without)


def ended(**changes):
    good = {
        "code": 2,
        "out": "",
        "err": "tachyscope: no plan 'x'\n",
        "left": [],
        "cpu": 0.1,
        "wall": 0.1,
        "grown": 0,
    }
    return Outcome(**good | changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, None),
        ({"code": 0, "err": "", "left": ["out/video.mp4"]}, None),
        ({"err": "tachyscope: note: x\ntachyscope: no plan 'x'\n"}, None),
        ({"code": 1}, "ended with 1"),
        ({"code": -11}, "ended with -11"),
        ({"code": 2, "err": ""}, "told its fault in 0 lines"),
        ({"err": "tachyscope: a\ntachyscope: b\n"}, "told its fault in 2 lines"),
        ({"err": "usage: x\n"}, "told its fault in 1 lines"),
        ({"err": f"tachyscope: {'x' * 300}\n"}, "told its fault in 312 letters"),
        ({"err": f"tachyscope: {'x ' * 3000}\n"}, "letters"),
        ({"err": "tachyscope: `frames` must be\n"}, "as it is typed"),
        ({"err": "Traceback (most recent call last):\n"}, "a traceback"),
        ({"err": "tachyscope: the memory is not enough: give\n"}, "ran out of its memory"),
        ({"cpu": 91.0}, "took 91 s of CPU"),
        ({"code": -9, "wall": 130.0}, "did not end within 130 s"),
        ({"grown": 3 * 10**9}, "took 3.0 GB"),
        ({"left": ["out/video.mp4"]}, "after a fault"),
        ({"code": 0, "err": "", "left": ["out/.video.mp4.0123abcd.part"]}, "left a part of a file"),
    ],
)  # fmt: skip
def test_the_judge_sees_what_is_wrong(changes, words):
    found = judge(ended(**changes))
    assert found == [] if words is None else any(words in problem for problem in found)
    assert str(Case(["generate", "x" * 500])) == f"'generate' '{'x' * 80}'"
