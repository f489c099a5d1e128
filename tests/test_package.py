"""What `import tachyscope` gives, and what it costs."""

import subprocess
import sys

import pytest

import tachyscope


def _python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_importing_the_package_imports_no_torch():
    ran = _python("import tachyscope, sys; assert 'torch' not in sys.modules; dir(tachyscope)")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_rollout_is_the_function_though_its_module_is_imported_first():
    ran = _python("import tachyscope.rollout as it; assert callable(it), it")
    assert ran.returncode == 0, ran.stderr


def test_every_public_name_is_there_and_listed():
    for name in tachyscope.__all__:
        assert getattr(tachyscope, name) is not None
        assert name in dir(tachyscope)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tachyscope.nothing  # noqa: B018
