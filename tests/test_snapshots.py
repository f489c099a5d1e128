"""A stream's snapshots in a folder: a process that is killed goes on exactly."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from faults import refused
from toys import load

import tachyscope as ts
from tachyscope.snapshot.folder import Snapshots

BANK = "cache=bank:resident=9f,budget=24f,host=int8 attention=ann:read=0.6,block=4 text=pads"
KILLED = """
import os, signal, sys
import numpy as np
sys.path.insert(0, sys.argv[3])
from toys import load
import tachyscope as ts
from tachyscope.snapshot.folder import Snapshots
stream = ts.open(load(sys.argv[4]), sys.argv[1], prompt="a red floor", seed=3)
folder = sys.argv[2]
snapshots = Snapshots(folder)
for i in range(8):
    if i and i % 3 == 0:
        snapshots.save(stream)
    stream.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def stream(plan, model="toy-chunks"):
    return ts.open(load(model), plan, prompt="a red floor", seed=3)


def play(one, chunks):
    return np.concatenate([one.step().frames for _ in range(chunks)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, plan",
    [
        ("toy-chunks", BANK),
        ("toy-chunks", "balanced"),
        ("toy-chunks", BANK.replace("host=int8", "host=native") + " store=fp8"),
        ("atrium-world", "cache=bank:resident=5f,budget=8f,host=int4 attention=ann:k=160"),
    ],
)
def test_a_killed_process_goes_on_exactly(model, plan, tmp_path):
    command = [sys.executable, "-c", KILLED, plan, str(tmp_path), os.path.dirname(__file__), model]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    whole = play(stream(plan, model), 12)
    other, snapshots = stream(plan, model), Snapshots(tmp_path)
    snapshots.load(other)  # taken before the seventh chunk
    assert other.session.memory.chunk == 6
    assert np.array_equal(play(other, 6), whole[len(whole) // 2 :])


@pytest.mark.slow
def test_segments_are_added_and_none_is_written_twice(tmp_path):
    one, snapshots, names = stream(BANK), Snapshots(tmp_path), []
    for _ in range(6):
        play(one, 3)
        sizes = snapshots.save(one)
        assert sizes > 0
        names.append(sorted(path.name for path in tmp_path.glob("segment-*")))
    # 24 latent frames are 8 chunks: the later segments have blocks that took others' place
    assert all(set(a) < set(b) for a, b in zip(names, names[1:], strict=False))
    assert len(list(tmp_path.glob("state-*"))) == 1
    other = stream(BANK)
    Snapshots(tmp_path).load(other)
    assert np.array_equal(play(one, 4), play(other, 4))
    # a video that begins anew in the same folder leaves nothing of the last
    Snapshots(tmp_path).save(stream(BANK))
    assert not list(tmp_path.glob("segment-*"))
    fresh = stream(BANK)
    Snapshots(tmp_path).load(fresh)
    assert fresh.session.memory.chunk == 0


def test_a_damaged_folder_is_refused_in_one_line_and_the_stream_goes_on(tmp_path):
    one, snapshots = stream(BANK), Snapshots(tmp_path)
    for _ in range(2):
        play(one, 2)
        snapshots.save(one)
    first = min(tmp_path.glob("segment-*"), key=lambda path: path.stat().st_mtime)
    whole, manifest = first.read_bytes(), json.loads((tmp_path / "manifest.json").read_text())
    other = stream(BANK)
    first.write_bytes(whole[:-7])
    refused(lambda: Snapshots(tmp_path).load(other), first.name, "cut short")
    first.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(lambda: Snapshots(tmp_path).load(other), first.name, "not as it was written")
    first.write_bytes(whole)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"version": 9}))
    refused(lambda: Snapshots(tmp_path).load(other), "manifest", "version 1")
    unsealed = [{k: x for k, x in one.items() if k != "sealed"} for one in manifest["segments"]]
    for damage in ({"segments": unsealed}, {"state": {"name": "", "bytes": 0, "hash": ""}}):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | damage))
        refused(lambda: Snapshots(tmp_path).load(other), "no manifest of version 1")
    fewer = manifest | {"segments": manifest["segments"][1:]}
    (tmp_path / "manifest.json").write_text(json.dumps(fewer))
    refused(lambda: Snapshots(tmp_path).load(other), "lacks blocks")
    refused(lambda: Snapshots(tmp_path / "none").load(other), "manifest.json")
    assert other.session.memory.chunk == 0
    # what is whole is taken into the host memory that the stream has
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    memory = [
        x.data_ptr() for layer in other.session.memory.layers for x in layer.bank.host.values()
    ]
    Snapshots(tmp_path).load(other)
    held = [x.data_ptr() for layer in other.session.memory.layers for x in layer.bank.host.values()]
    assert sorted(memory) == sorted(held)
    assert np.array_equal(play(other, 1), play(one, 1))


def test_a_new_prompt_takes_the_host_memory_that_is_there():
    """To page-lock it again would take a GPU's user seconds."""
    one = stream(BANK)
    play(one, 2)
    memory = {x.data_ptr() for layer in one.session.memory.layers for x in layer.bank.host.values()}
    one.set_prompt("a blue floor")
    play(one, 1)
    held = {x.data_ptr() for layer in one.session.memory.layers for x in layer.bank.host.values()}
    assert memory == held and len(held) == 4 * one.session.shape.layers
