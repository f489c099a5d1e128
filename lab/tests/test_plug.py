"""What `plug` refuses, and diffusers as it is installed; authors' repositories are not had here."""

import pytest

from tachyscope.core.errors import TachyscopeError
from tachyscope_lab import plug


def test_an_unknown_family_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(TachyscopeError, match="no family 'x': choose one of self-forcing, causvid"):
        plug.run("x", tmp_path)
    for source in (tmp_path / "nothing", None):
        with pytest.raises(TachyscopeError, match="is no folder: give a clone"):
            plug.run("causvid", source)
    with pytest.raises(TachyscopeError, match="runs as it is installed: leave --source out"):
        plug.run("diffusers", tmp_path)


@pytest.mark.slow
def test_a_folder_of_other_code_is_one_line(tmp_path):
    with pytest.raises(TachyscopeError, match="causvid in .* did not run: ModuleNotFoundError"):
        plug.run("causvid", tmp_path)


@pytest.mark.slow
def test_the_installed_diffusers_makes_the_videos_that_are_ours():
    rows = plug.run("diffusers", None)
    assert {row["check"] for row in rows} >= {"12 latent frames", "with a LoRA", "offloaded"}
    assert all(row["error"] < 1e-5 for row in rows)
    assert [row["equal"] for row in rows if "removed" in row["check"]] == [True, True]
