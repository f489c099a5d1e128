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


def test_every_public_name_is_there_and_listed():
    for name in tachyscope.__all__:
        assert getattr(tachyscope, name) is not None
        assert name in dir(tachyscope)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tachyscope.nothing  # noqa: B018


@pytest.mark.slow
def test_what_a_plan_takes_is_predicted_without_triton():
    """A CPU build of torch brings none; `serve` adds up every session that it opens."""
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import tachyscope as ts\n"
        "from tachyscope.core.plan import NAMES\n"
        "from tachyscope.memory.predict import need\n"
        "model = ts.load('toy-chunks').on_meta()\n"
        "assert all(need(model, plan, frames=90).peak > 0 for plan in NAMES)"
    )
    ran = _python(code)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_a_comparison_and_a_fit_need_no_extra(tmp_path):
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'jinja2', 'diffusers', 'transformers'): sys.modules[name] = None\n"
        "from tachyscope.cli import main\n"
        f"assert main(['compare', 'toy-chunks', '--frames', '3', '--out', {str(tmp_path)!r}]) == 0\n"
        "assert main(['fit', 'wan_1.3b', '--frames', '48']) == 0"
    )
    ran = _python(code)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "report.html").exists()
