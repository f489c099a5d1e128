"""Compiled programs are kept in the user's cache folder, or wherever they can be."""

import dataclasses
import os
import tempfile

import pytest
import torch
from toys import open_session

from tachyscope.io.programs import VARIABLES, keep_programs, user_folder
from tachyscope.models.toys import toy_chunks
from tachyscope.models.wan.model import COMPILED_CHUNKS, COMPILED_WIDTH


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """A user's home and temporary folder, and variables that are put back."""
    for name in (*VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def chosen():
    return [os.environ.get(name) for name in VARIABLES]


def test_programs_are_kept_in_the_users_cache_folder(places):
    keep_programs()
    folder = places / "home" / ".cache" / "tachyscope"
    assert chosen() == [str(folder / "inductor"), str(folder / "triton")]
    assert folder.stat().st_mode & 0o777 == 0o700
    keep_programs()
    assert chosen() == [str(folder / "inductor"), str(folder / "triton")]


def test_what_the_user_chose_stays(places, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(places / "xdg"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/else")
    keep_programs()
    assert chosen() == [str(places / "xdg" / "tachyscope" / "inductor"), "/somewhere/else"]


def test_a_home_that_cannot_be_written_is_no_fault(places):
    (places / "home").touch()  # a file: not even root makes a folder in it
    assert user_folder() == places / "tmp" / f"tachyscope-{os.getuid()}"
    (places / "tmp" / f"tachyscope-{os.getuid()}").rmdir()
    (places / "tmp" / f"tachyscope-{os.getuid()}").touch()
    assert user_folder() is None
    keep_programs()
    assert chosen() == [None, None]


def test_a_folder_that_others_can_write_is_not_trusted(places):
    (places / "home").touch()
    shared = places / "tmp" / f"tachyscope-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    assert user_folder() is None
    shared.rmdir()
    (places / "other").mkdir(mode=0o700)
    shared.symlink_to(places / "other")
    assert user_folder() is None


def test_torchs_own_default_is_no_choice_of_the_user(places, monkeypatch):
    # importing torch._dynamo writes it there
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(places / "tmp" / "torchinductor_somebody"))
    keep_programs()
    assert chosen()[0] == str(places / "home" / ".cache" / "tachyscope" / "inductor")


def test_a_session_on_a_gpu_keeps_its_programs(monkeypatch):
    class Kept(Exception):
        pass

    def kept():
        raise Kept

    class Empty:
        device = torch.device("cuda:0")

    model = toy_chunks()
    monkeypatch.setattr("tachyscope.core.session.keep_programs", kept)
    open_session(model, "fast", frames=3)
    monkeypatch.setattr("tachyscope.core.session.torch.empty", lambda *_, **__: Empty)
    with pytest.raises(Kept):
        open_session(model, "fast", frames=3)


def test_compiling_pays_for_long_videos_of_large_models_on_a_gpu():
    model = toy_chunks()
    wide = dataclasses.replace(model.config, dim=COMPILED_WIDTH)
    assert not model.compiling_pays(10**6)
    model.device = torch.device("cuda")
    assert not model.compiling_pays(10**6)
    model.config = wide
    assert model.compiling_pays(COMPILED_CHUNKS) and not model.compiling_pays(COMPILED_CHUNKS - 1)
    # 1,200 frames of a model of three latent frames a chunk
    assert COMPILED_CHUNKS <= 100
    model.device = torch.device("cpu")
    assert not model.compiling_pays(10**6)
