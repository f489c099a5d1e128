"""What deploys a server: compose files, nginx, Prometheus, and a board whose queries are run."""

import json
import math
import re
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from promql import Query, scraped
from serving import Player, connected, make_engine, running, serving, tiny
from websockets.sync.client import connect

from tachyscope import __version__
from tachyscope.cli.serve import Serve
from tachyscope.models.registry import MODELS
from tachyscope.serve.healthcheck import URL, fault, main
from tachyscope.serve.limits import Limits
from tachyscope.serve.security import Guard
from tachyscope.serve.server import Endpoint

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
GUIDE = (ROOT / "docs/serve.md").read_text().partition("## Docker\n")[2].partition("\n## ")[0]
FIRST = (DEPLOY / "compose.yaml").read_text().partition("\nname:")[0]  # what makes secrets
BOARD = json.loads((DEPLOY / "grafana/board.json").read_text())
TOKEN = "a-token-of-many-letters"


def compose(name):
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.fixture(scope="module")
def services():
    return compose("compose.yaml")["services"]


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def scrapes(model, tmp_path_factory):
    """/metrics before and after a session, snapshots, refusals and a video, and the time between."""
    engine = make_engine(model, tmp_path_factory.mktemp("state"))
    with serving(engine, Guard((TOKEN,))) as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        before, begun = scraped(client.get("/metrics").text), time.monotonic()
        with connected(client, headers={"authorization": f"Bearer {TOKEN}"}) as socket:
            player = Player(socket)
            player.send("open", pace="free", format="png")
            player.send("keys", id=1, actions="w")
            player.until("receipt", id=1, phase="applied")
            player.until("snapshot")
            player.until_frame(11)
            player.send("close")
            player.until("closed")
        client.get("/metrics", headers={"authorization": "Bearer wrong"})
        video = client.post("/v1/videos", json={"prompt": "", "seconds": "0.2"}).json()["id"]
        while client.get(f"/v1/videos/{video}").json()["status"] != "completed":
            time.sleep(0.01)
        engine.call(lambda: None).result()  # it has closed the video's session
        after = scraped(client.get("/metrics").text)
    return before, after, time.monotonic() - begun


@pytest.mark.parametrize("panel", BOARD["panels"], ids=lambda panel: panel["title"])
def test_every_query_of_the_board_has_an_answer(scrapes, panel):
    for target in panel["targets"]:
        value = Query(target["expr"], *scrapes).value
        assert value and all(math.isfinite(one) and one >= 0 for one in value.values()), target
        if "{{" in target["legendFormat"]:
            label = target["legendFormat"].strip("{}")
            assert all(label in dict(labels) for labels in value)
        else:
            assert len(value) == 1  # a line of its own


def test_what_was_played_is_on_the_board(scrapes):
    shown = {
        (panel["title"], target["legendFormat"]): Query(target["expr"], *scrapes).value
        for panel in BOARD["panels"]
        for target in panel["targets"]
    }
    (frames,) = shown["Frames a second", "made"].values()
    assert frames * scrapes[2] >= 12
    assert shown["Refusals", "{{why}}"] == {frozenset({("why", "status_401")}): 1}
    assert shown["Sessions ended", "{{why}}"] == {frozenset({("why", "closed")}): 2}
    (low,), (high,) = (shown["A chunk", share].values() for share in ("p50", "p99"))
    assert 0 < low <= high


def test_the_board_and_its_source_fit_one_another():
    (source,) = yaml.safe_load((DEPLOY / "grafana/source.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {source["uid"]}
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]}
    assert len(places) == len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    (provider,) = yaml.safe_load((DEPLOY / "grafana/boards.yaml").read_text())["providers"]
    assert source["url"] == "http://prometheus:9090"
    mounted = [one.split(":") for one in compose("compose.yaml")["services"]["grafana"]["volumes"]]
    (board,) = [inside for outside, inside, *_ in mounted if outside.endswith("board.json")]
    assert Path(board).parent == Path(provider["options"]["path"])


def test_images_have_tags_and_what_is_mounted_is_there_or_made_first(services):
    assert services["server"]["image"] == f"tachyscope:${{TACHYSCOPE_VERSION:-{__version__}}}"
    assert f"docker build -t tachyscope:{__version__} ." in GUIDE
    for name, service in services.items():
        image, _, tag = service["image"].partition(":")
        assert tag and tag != "latest", name
        for volume in service["volumes"]:
            outside = volume.split(":")[0]
            if outside.startswith("./secrets/"):
                assert f"deploy/{outside[2:]}" in FIRST
            elif outside.startswith("./"):
                assert (DEPLOY / outside).is_file()
            else:
                assert outside in compose("compose.yaml")["volumes"]
        assert set(service.get("depends_on", ())) <= set(services)


@pytest.mark.parametrize("file", ["compose.yaml", "compose.cuda.yaml"])
def test_the_server_is_started_by_options_that_it_has(services, file):
    model, *options = compose(file)["services"]["server"]["command"]
    given = [one.partition("=")[::2] for one in options]
    assert model in MODELS
    assert {name[2:].replace("-", "_") for name, _ in given} <= set(Serve.__dataclass_fields__)
    values = dict(given)
    mounts = {one.split(":")[1] for one in services["server"]["volumes"]}
    assert {values["--token-file"], values["--state"]} <= mounts
    limits, _ = Serve(model=model, set=(values["--set"],)).settings()
    assert limits.connections_per_address == limits.connections  # all come through nginx


@pytest.mark.parametrize("file", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_says_which_version_it_is_and_is_checked_by_playing(file):
    text = (ROOT / file).read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"image.version={project['version']} " in text and project["version"] == __version__
    (words,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.M)
    python, option, module, url, tokens = json.loads(words)
    assert (python, option, module) == ("python3", "-m", "tachyscope.serve.healthcheck")
    assert url == URL == f"http://127.0.0.1:{Endpoint.port}"
    assert f'"--token-file", "{tokens}"' in text


def test_nginx_passes_on_what_the_server_expects(services):
    text = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text())
    depth = 0
    for line in filter(None, map(str.strip, text.splitlines())):
        assert line[-1] in ";{}", line
        depth += line.count("{") - line.count("}")
        assert depth >= 0
    assert depth == 0
    found = dict(re.findall(r"(\w+) +([^;{}]+);", text))
    assert found["proxy_pass"] == f"http://server:{Endpoint.port}" and "server" in services
    assert float(found["proxy_read_timeout"].rstrip("s")) > Limits().idle_s
    assert 2**20 * int(found["client_max_body_size"].rstrip("m")) >= Limits().message_bytes
    most = {zone: int(count) for zone, count in re.findall(r"limit_conn +(\w+) +(\d+);", text)}
    assert most["addresses"] == Limits().connections_per_address
    assert 4 * most["sessions"] == Limits().sessions  # no address can hold all of them
    assert set(most) == set(re.findall(r"zone=(\w+):", text))
    files = {found["ssl_certificate"], found["ssl_certificate_key"]}
    assert all(
        any(f.startswith(one.split(":")[1]) for one in services["nginx"]["volumes"]) for f in files
    )


def test_prometheus_asks_the_server_with_a_token(services):
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{Endpoint.port}"]}]
    mounts = [one.split(":")[1] for one in services["prometheus"]["volumes"]]
    assert job["authorization"]["credentials_file"] in mounts


def test_a_health_check_plays_a_chunk(model, tmp_path, capsys):
    engine = make_engine(model, tmp_path / "state")
    with running(engine) as url:
        assert main(url) == 0
        assert engine.metrics.registry.get_sample_value("tachyscope_steps_total", {"lane": "main"})
        assert not engine.pool.sessions and not list((tmp_path / "state").glob("*/session.json"))
        engine.runner.run_turn = lambda live: time.sleep(0.01)  # a device that makes no chunk
        assert fault(url, within_s=0.5) == "no picture came in 0.5 s"
    assert main(url) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_full_server_is_healthy(model, tmp_path):
    with running(make_engine(model, tmp_path, sessions=1)) as url:
        address = url.replace("http", "ws") + "/v1/sessions"
        with connect(address, subprotocols=["tachyscope.v1"]) as one:
            one.send('{"type": "open"}')
            one.recv()
            assert fault(url) == ""
