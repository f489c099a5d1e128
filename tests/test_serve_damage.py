"""Snapshots that are torn, gone or changed on disk, and a server that is killed while it writes."""

import json
import os
import random
import shutil

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from serving import Player, connected, make_engine, playing, serving, tiny
from test_serve import rolled

from tachyscope.core.errors import TachyscopeError
from tachyscope.serve.server import open_snapshots
from tachyscope.serve.snapshots import Saved, Snapshots, hash_secret

NAME, SECRET = "0" * 16, "1" * 32


@pytest.fixture(scope="module")
def model():
    return tiny()


def known(opened):
    return {name: opened[name] for name in ("session", "secret")}


def played(model, folder, snapshots=3):
    """What a session was told at its beginning; it lies on disk when its server has stopped."""
    with serving(make_engine(model, folder)) as client, playing(client, seed=2) as player:
        player.send("keys", id=1, actions="w")
        while len(player.until("snapshot")["chunks"]) < snapshots:
            pass
    return player.opened


def files_of(folder, opened):
    """A session's snapshots, oldest first, by their paths and chunks."""
    folder = folder / opened["session"]
    listed = json.loads((folder / "session.json").read_text())["files"]
    return [(folder / file, chunk) for chunk, file in listed]


def cut(path):
    os.truncate(path, 1000)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


DAMAGES = {"torn": cut, "flipped": flip, "missing": os.remove, "empty": lambda p: os.truncate(p, 0)}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_snapshot_costs_its_chunks_and_the_client_is_told(model, tmp_path, damage):
    opened = played(model, tmp_path)
    *_, (_, whole), (_, last), (newest, end) = files_of(tmp_path, opened)
    damage(newest)
    damage(files_of(tmp_path, opened)[-2][0])
    with (
        serving(make_engine(model, tmp_path)) as client,
        playing(client, "resume", format="png", **known(opened)) as again,
    ):
        assert again.opened["chunk"] == whole < last < end
        notice = again.until("notice")
        assert notice["code"] == "snapshot_damaged"
        assert notice["message"].startswith(f"the last {end - whole} chunks are lost")
        again.until_frame(3 * whole + 5)
        again.send("log", id=2)
        steps = again.until("log")["log"]["steps"]
    assert again.matches(rolled(model, steps, seed=2)[: 3 * whole + 6], start=3 * whole)


def test_a_session_without_a_whole_snapshot_is_refused_in_words(model, tmp_path):
    opened = played(model, tmp_path)
    for path, _ in files_of(tmp_path, opened):
        cut(path)
    with serving(make_engine(model, tmp_path)) as client, connected(client) as plain:
        player = Player(plain)
        player.send("resume", **known(opened))
        assert "no snapshot of this session is whole" in player.until("error")["message"]
        player.send("open", pace="free")  # the same connection may begin another
        player.until("opened")


@pytest.mark.parametrize("change", ['"w"', '"files": []', '"generation": 1', "}"])
def test_a_session_file_that_was_changed_is_no_session(model, tmp_path, change):
    opened = played(model, tmp_path, snapshots=1)
    path = tmp_path / opened["session"] / "session.json"
    others = {'"w"': '"a"', '"files": []': "", '"generation": 1': '"generation": 3', "}": ""}
    text = path.read_text()
    if "files" in change:
        value = json.loads(text) | {"files": []}
        text = json.dumps(value)
    path.write_text(text.replace(change, others[change]) if "files" not in change else text)
    with serving(make_engine(model, tmp_path)) as client, connected(client) as plain:
        player = Player(plain)
        player.send("resume", **known(opened))
        assert "no session of this name and secret" in player.until("error")["message"]


def test_going_back_to_a_damaged_snapshot_is_refused_and_the_session_goes_on(model, tmp_path):
    with serving(make_engine(model, tmp_path)) as client, playing(client, pace="model") as player:
        player.until("snapshot", chunk=4)
        cut(files_of(tmp_path, player.opened)[0][0])
        player.send("rewind", id=1, chunk=7)
        refused = player.until("receipt", id=1, phase="refused")
        assert "is missing or damaged" in refused["reason"]
        player.until_frame(player.latest() + 6)


def saved_twice(snapshots):
    saved = Saved(hash_secret(SECRET), {}, 0, ())
    files, _ = snapshots.save(NAME, saved, 4, {"x": torch.zeros(8)})
    return lambda: snapshots.save(NAME, Saved(saved.secret, {}, 0, files), 8, {"x": torch.ones(8)})


@pytest.mark.parametrize("when", [1, 2])
def test_a_server_killed_before_a_rename_keeps_what_was_saved_before(tmp_path, when):
    snapshots = Snapshots(str(tmp_path))
    again, renamed, move = saved_twice(snapshots), [], snapshots.fs.mv

    class Killed(BaseException):
        pass

    def killed(*given):
        renamed.append(given)
        if len(renamed) == when:
            os._exit(0)
        move(*given)

    snapshots.fs.mv = killed
    child = os.fork()
    if child == 0:
        again()
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    snapshots.fs.mv = move
    found = Snapshots(str(tmp_path)).find(NAME, SECRET)
    assert [chunk for chunk, _ in found.files] == [4]
    assert snapshots.load(NAME, found.files[-1][1])["x"].sum() == 0
    again()  # and what the kill left is cleared away
    assert len(list((tmp_path / NAME).iterdir())) == 3


def test_a_file_is_on_disk_before_its_name_and_the_name_before_it_is_listed(tmp_path, monkeypatch):
    snapshots, done = Snapshots(str(tmp_path)), []
    again, move, sync = saved_twice(snapshots), snapshots.fs.mv, os.fsync

    def synced(number):
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{number}") else "file")
        sync(number)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(snapshots.fs, "mv", lambda *given: (done.append("name"), move(*given)))
    again()
    assert done == ["file", "name", "folder"] * 2


def test_what_is_too_old_or_too_much_is_swept_and_what_is_being_written_is_not(tmp_path):
    snapshots = Snapshots(str(tmp_path))
    names = [f"{i:016x}" for i in range(5)]
    for name in names[:4]:
        snapshots.save(name, Saved("", {}, 0, ()), 4, {"x": torch.zeros(8)})
    (tmp_path / names[4]).mkdir()  # the first file of a session is on its way
    (tmp_path / "videos").mkdir()
    snapshots.sweep(3600, 3)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [*names[2:], "videos"]
    snapshots.sweep(0, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["videos"]


def test_a_place_that_cannot_be_written_is_told_at_the_start(tmp_path, monkeypatch):
    with open_snapshots(str(tmp_path)):
        assert not list(tmp_path.iterdir())

    def read_only(self, path, *given, **options):
        raise OSError(30, "Read-only file system", path)

    monkeypatch.setattr(LocalFileSystem, "open", read_only)
    with pytest.raises(OSError, match="Read-only file system"), open_snapshots(str(tmp_path)):
        pass


@pytest.mark.parametrize(
    "name", ["../../elsewhere.safetensors", "0-4.safetensors", "", "/dev/zero"]
)
def test_no_other_file_is_read(tmp_path, name):
    with pytest.raises(TachyscopeError, match="is missing or damaged"):
        Snapshots(str(tmp_path)).load(NAME, name)


class Disk:
    """What a folder's files are on the disk itself, if the power is cut after so many events.

    A file's bytes are certain once it is synced, and its name once the folder is: before, any of
    the folder's changes may be there or not.
    """

    def __init__(self, snapshots, monkeypatch):
        self.events = []
        fs, sync = snapshots.fs, os.fsync
        made, move, remove = fs.open, fs.mv, fs.rm_file

        def synced(number):
            path = os.readlink(f"/proc/self/fd/{number}")
            sync(number)
            if os.path.isdir(path):
                self.events.append(("folder", path))
            else:
                with open(path, "rb") as file:
                    self.events.append(("sync", path, file.read()))

        def noted(kind, do):
            def work(*given, **more):
                if kind != "make" or given[1] == "wb":
                    self.events.append((kind, *given))
                return do(*given, **more)

            return work

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(fs, "open", noted("make", made))
        monkeypatch.setattr(fs, "mv", noted("move", move))
        monkeypatch.setattr(fs, "rm_file", noted("remove", remove))

    def after(self, count, draw):
        """Files by their paths, of those that are left after a cut."""
        seen, kept, waiting, contents = {}, {}, [], {}
        for number, (kind, *given) in enumerate(self.events[:count]):
            if kind == "make":
                seen[given[0]], contents[number] = number, b""
                waiting.append((None, given[0], number))
            elif kind == "sync":
                contents[seen[given[0]]] = given[1]
            elif kind == "move":
                seen[given[1]] = seen.pop(given[0])
                waiting.append((given[0], given[1], seen[given[1]]))
            elif kind == "remove":
                del seen[given[0]]
                waiting.append((given[0], None, None))
            else:
                self._apply(waiting, kept)
                waiting = []
        self._apply([one for one in waiting if draw.random() < 0.5], kept)
        return {
            path: contents[file] or draw.randbytes(draw.randrange(99))
            for path, file in kept.items()
        }

    @staticmethod
    def _apply(changes, kept):
        for old, new, file in changes:
            kept.pop(old, None)
            if new is not None:
                kept[new] = file


def test_a_power_cut_at_any_moment_loses_at_most_the_snapshot_that_was_written(
    tmp_path, monkeypatch
):
    snapshots, files, done = Snapshots(str(tmp_path / "was")), (), [0]
    with monkeypatch.context() as patch:
        disk = Disk(snapshots, patch)
        for chunk in range(4, 32, 4):
            saved = Saved(hash_secret(SECRET), {"chunk": chunk}, 0, files)
            files, _ = snapshots.save(NAME, saved, chunk, {"x": torch.full((8,), chunk)})
            # the last folder that is synced is that of session.json: what is removed comes after
            kinds = [kind for kind, *_ in disk.events]
            done.append(len(kinds) - kinds[::-1].index("folder"))
    assert disk.events[0] == ("folder", str(tmp_path / "was"))  # which has the session's now
    draw, folder = random.Random(0), tmp_path / "is" / NAME
    for cut in range(done[1], len(disk.events) + 1):
        for _ in range(4):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for path, data in disk.after(cut, draw).items():
                (folder / os.path.basename(path)).write_bytes(data)
            again = Snapshots(str(tmp_path / "is"))
            found = again.find(NAME, SECRET)
            chunk, file = found.files[-1]
            assert again.load(NAME, file)["x"].unique().item() == chunk == found.log["chunk"]
            assert chunk >= 4 * sum(end <= cut for end in done[1:])
