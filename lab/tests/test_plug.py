"""What `plug` refuses; the authors' repositories themselves are not had in tests."""

import pytest

from tachyscope.core.errors import TachyscopeError
from tachyscope_lab import plug


def test_an_unknown_family_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(TachyscopeError, match="no family 'x': choose one of self-forcing, causvid"):
        plug.run("x", tmp_path)
    with pytest.raises(TachyscopeError, match="is no folder: give a clone"):
        plug.run("causvid", tmp_path / "nothing")


@pytest.mark.slow
def test_a_folder_of_other_code_is_one_line(tmp_path):
    with pytest.raises(TachyscopeError, match="causvid in .* did not run: ModuleNotFoundError"):
        plug.run("causvid", tmp_path)
