"""Both Dockerfiles: what they copy and install is there, and the server is started as documented."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tachyscope.cli.serve import Serve
from tachyscope.models.registry import MODELS
from tachyscope.serve.server import Endpoint

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GUIDE = (ROOT / "docs/serve.md").read_text().partition("## Docker\n")[2].partition("\n## ")[0]


@pytest.fixture(params=["Dockerfile", "Dockerfile.cuda"])
def steps(request):
    """A file's instructions as pairs of name and the rest, in order."""
    text = re.sub(r"^#.*\n", "", (ROOT / request.param).read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line]


def _of(steps, name):
    return [rest for each, rest in steps if each == name]


def test_what_is_copied_exists_and_is_sent_to_the_build(steps):
    from_context = [rest.split()[:-1] for rest in _of(steps, "COPY") if "--from=" not in rest]
    copied = {path for paths in from_context for path in paths}
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / path).exists() for path in copied)
    stages = {rest.partition(" AS ")[2] for rest in _of(steps, "FROM")}
    taken = [rest for rest in _of(steps, "COPY") if "--from=" in rest]
    assert taken and all(re.match(r"--from=(\w+) ", rest)[1] in stages for rest in taken)


def test_the_extras_that_are_installed_exist(steps):
    found = re.search(r"'\.\[(.*?)\]'", " ".join(_of(steps, "RUN")))
    extras = found[1].split(",") if found else []
    assert set(extras) <= set(PROJECT["optional-dependencies"])


def test_the_image_serves_as_the_user_the_port_and_the_folder_that_are_documented(steps):
    (user,), (port,), (volume,) = (_of(steps, name) for name in ("USER", "EXPOSE", "VOLUME"))
    assert int(user) > 0 and f"uid {user}" in GUIDE
    made = " ".join(_of(steps, "RUN"))
    assert f"useradd --uid {user} " in made and f"chown {user}:{user} {volume}" in made
    assert int(port) == Endpoint.port
    (entry,), (command,) = _of(steps, "ENTRYPOINT"), _of(steps, "CMD")
    words = json.loads(entry) + json.loads(command)
    assert words[0] in PROJECT["scripts"] and words[1] == "serve" and words[2] in MODELS
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given["--host"] == "0.0.0.0" and given["--state"] == volume
    assert {name[2:].replace("-", "_") for name in given} <= set(Serve.__dataclass_fields__)
    # what the first lines of the file and the guide mount is what the command reads
    assert f":{given['--token-file']}:ro" in GUIDE


def test_the_documented_commands_name_files_and_ports_that_exist():
    commands = [line for line in GUIDE.splitlines() if line.startswith("docker ")]
    built = [shlex.split(line) for line in commands if line.startswith("docker build")]
    files = [words[words.index("-f") + 1] if "-f" in words else "Dockerfile" for words in built]
    assert sorted(files) == ["Dockerfile", "Dockerfile.cuda"]
    ran = [line for line in commands if line.startswith("docker run")]
    assert len(ran) == 2
    assert all(f"-p {Endpoint.port}:{Endpoint.port}" in line for line in ran)
