"""A script over an editable install is checked by mypy: types reach whoever imports the package."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import tachyscope as ts

model = ts.load("atrium-world")
plan = ts.plan("fast", cache=ts.Window("9f"))
same = ts.Plan(cache=ts.Window(budget=1344, sink=2), attention=ts.Ann(read=0.5), replay=None)
with ts.open(model, plan, prompt="a red room", seed=0) as stream:
    with ts.VideoWriter("room.mp4", model.fps) as video:
        for chunk in stream.take(8, "q*4 w*4"):
            video.write(chunk.frames)
            print(chunk.index, chunk.stats["chunk_ms"], stream.session.plan == same)
"""
WRONG = 'import tachyscope as ts\nts.Window(3.5)\nts.open("toy")\nts.Ann(raed=0.5)\n'


@pytest.mark.slow
def test_a_users_script_passes_mypy_against_the_editable_install(tmp_path):
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns("*.safetensors", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "tachyscope", source / "tachyscope", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    def run(*words):
        ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
        return ran.returncode, ran.stdout + ran.stderr

    assert run(sys.executable, "-m", "venv", "--without-pip", "venv")[0] == 0
    python = tmp_path / "venv" / "bin" / "python"
    code, site = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    code, told = run(
        sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index",
        "--target", site.strip(), "--editable", str(source),
    )  # fmt: skip
    assert code == 0, told
    path = Path(site.strip()) / "others.pth"  # torch and numpy, as they are here
    path.write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(WRONG)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable"]
    code, told = run(*mypy, str(python), "script.py")
    assert code == 0, told
    code, told = run(*mypy, str(python), "wrong.py")
    assert code == 1 and told.count("error:") == 3, told
