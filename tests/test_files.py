"""Only regular files are replaced, whole or not at all, and nothing unfinished stays."""

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading

import pytest
from faults import refused

from tachyscope.io.files import (
    check_file,
    check_folder,
    is_stream,
    replacing,
    unwritable,
    user_path,
    write_atomically,
)
from tachyscope.io.results import check_json, emit
from tachyscope.io.video import VideoWriter


def names(folder):
    return sorted(os.listdir(folder))


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    target.unlink()
    write_atomically(link, "again")  # a link to nothing yet
    assert link.is_symlink() and target.read_text() == "again"
    assert names(tmp_path) == ["far", "link.json"] and names(tmp_path / "far") == ["target.json"]


def test_a_loop_of_links_is_one_line(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    words = "a cannot be written (too many levels of symbolic links): choose another place"
    refused(lambda: check_json(str(tmp_path / "a")), words)
    refused(lambda: write_atomically(tmp_path / "a", "x"), words)
    refused(lambda: check_folder(tmp_path / "a"), "a cannot be written (")


def test_a_fifo_is_written_to_and_stays_one(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    check_json(str(fifo))  # must not wait for a reader
    got = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_text()))
    reader.start()
    emit({"a": 1}, str(fifo))
    reader.join(10)
    assert got == ['{\n  "a": 1\n}\n'] and stat.S_ISFIFO(fifo.stat().st_mode)
    assert names(tmp_path) == ["fifo"]


def test_a_device_is_written_to_and_stays_one(tmp_path):
    before = os.stat("/dev/null")
    check_json("/dev/null")
    emit({"a": 1}, "/dev/null")
    assert os.stat("/dev/null").st_rdev == before.st_rdev
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    refused(
        lambda: emit({}, "/dev/full"),
        "/dev/full cannot be written (no space left on device): choose another place",
    )
    # and before anything is measured
    refused(
        lambda: check_json("/dev/full"), "/dev/full cannot be written (no space left on device)"
    )
    check_json("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    emit({"a": 1}, str(link))
    assert link.is_symlink() and stat.S_ISCHR(link.stat().st_mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_in_a_folder_that_could_be_written_stays_one(tmp_path):
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("devices are not allowed here")
    try:
        emit({"a": 1}, str(device))
    except Exception as fault:  # a file system without devices
        assert "cannot be written" in str(fault)
    assert stat.S_ISCHR(device.stat().st_mode) and names(tmp_path) == ["null"]


@pytest.mark.slow
def test_an_open_descriptor_is_written_to_and_not_replaced(tmp_path):
    out = tmp_path / "out.txt"
    code = (
        "from tachyscope.io.results import check_json, emit\n"
        "print('before'); check_json('/dev/stdout'); emit({'a': 1}, '/dev/stdout')"
    )
    with out.open("w") as file:
        before = os.fstat(file.fileno()).st_ino
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert out.read_text() == 'before\n{\n  "a": 1\n}\n' and out.stat().st_ino == before
    with out.open("r+") as file:
        path = f"/dev/fd/{file.fileno()}"
        assert is_stream(path)
        # a video cannot be streamed into it
        refused(lambda: VideoWriter(path, 8).__enter__(), "is a file, which is not replaced")
    assert names(tmp_path) == ["out.txt"]


def test_sockets_folders_and_fifos_are_not_replaced(tmp_path):
    place = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(place))
        refused(lambda: check_json(str(place)), "is a socket, which is not replaced: give another")
    refused(lambda: check_json(str(tmp_path)), "is a folder: give the name of a file")
    os.mkfifo(tmp_path / "video.mp4")
    refused(lambda: VideoWriter(tmp_path / "video.mp4", 8).__enter__(), "is a fifo, which is not")
    assert names(tmp_path) == ["socket", "video.mp4"]


def test_something_else_where_a_folder_should_be_is_named(tmp_path):
    (tmp_path / "file").touch()
    said = "file is a file, not a folder: give the name of a folder"
    refused(lambda: check_folder(tmp_path / "file"), said)
    refused(lambda: check_folder(tmp_path / "file" / "under"), said)
    refused(lambda: check_json(str(tmp_path / "file" / "a.json")), said)
    refused(lambda: check_json("/dev/null/x"), "/dev/null is a device, not a folder")
    refused(lambda: check_folder("/dev/null"), "/dev/null is a device, not a folder")


def test_paths_that_cannot_be_are_told_in_right_words(tmp_path):
    long = tmp_path / ("x" * 300)
    for call in (check_folder, check_file):
        message = refused(lambda call=call: call(long), "cannot be written (file name too long)")
        assert max(map(len, message.split())) <= 201
    for call in (check_folder, check_file, user_path):
        refused(lambda call=call: call("a\0b"), "a path has no NUL bytes, got 'a\\x00b'")
    refused(lambda: user_path(""), "a path must name a file or folder, got '': . is this folder")
    refused(lambda: user_path("~nouser/x"), "~nouser is the home of a user that is not known here")
    refused(lambda: check_json(""), "`json` must name a file or folder, got ''")
    assert user_path("~") == user_path(os.path.expanduser("~"))


def test_a_name_as_long_as_file_systems_allow_is_written(tmp_path):
    for name in ("x" * 255, "é" * 127):
        write_atomically(tmp_path / name, "whole")
        assert (tmp_path / name).read_text() == "whole"
    assert len(names(tmp_path)) == 2


def test_what_may_be_read_by_few_stays_so(tmp_path):
    path = tmp_path / "private.json"
    path.write_text("old")
    path.chmod(0o600)
    write_atomically(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text() == "new"


def test_parts_of_dead_processes_are_swept_and_those_of_living_ones_are_not(tmp_path):
    target = tmp_path / "a.json"
    code = (
        "import os, sys; from tachyscope.io.files import replacing\n"
        "with replacing(sys.argv[1]) as part:\n"
        "    part.write_text('begun'); print(part.name, flush=True); sys.stdin.read(); os._exit(9)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(target)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        left = run.stdout.readline().strip()
        other = tmp_path / ".b.json.0123abcd.part"  # of another target
        other.touch()
        assert left in names(tmp_path)
        write_atomically(target, "mine")  # while the other still writes
        assert left in names(tmp_path)
        run.communicate(timeout=60)
        assert run.returncode == 9 and left in names(tmp_path)
        write_atomically(target, "mine")
    finally:
        run.kill()
    assert names(tmp_path) == [other.name, "a.json"]


def test_a_part_that_is_swept_between_its_making_and_its_lock_is_made_again(tmp_path, monkeypatch):
    real, swept = fcntl.flock, []

    def flock(file, how):
        if not swept:
            swept.append(os.readlink(f"/proc/self/fd/{file}"))
            os.unlink(swept[0])
        return real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    write_atomically(tmp_path / "a.json", "whole")
    assert swept and (tmp_path / "a.json").read_text() == "whole" and names(tmp_path) == ["a.json"]


def test_file_systems_without_locks_still_serve(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    (tmp_path / ".a.json.0123abcd.part").touch()
    write_atomically(tmp_path / "a.json", "whole")
    # whether its process lives cannot be told
    assert names(tmp_path) == [".a.json.0123abcd.part", "a.json"]


def test_a_full_disk_is_one_line_and_the_old_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old")
    fault = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError), replacing(path) as part:
        part.write_text("ne")
        raise fault
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]
    words = "a.json cannot be written (no space left on device): choose another place"
    assert words in str(unwritable(path, fault))
