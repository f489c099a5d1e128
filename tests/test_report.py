"""The report: one file, no network, nothing taken for what it is not."""

import base64
import platform
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from tachyscope.io.machine import machine, versions
from tachyscope.measure.chart import STROKES, Curve, chart, ticks
from tachyscope.measure.report import write_report
from tachyscope.measure.runs import Run, number

VOID = {"meta", "img", "source", "br", "link", "input"}
HOSTILE = """</title><script>alert("x")</script>&<img src=//evil.example/a onerror='x()'>"""


class Page(HTMLParser):
    """Tags with their attributes, text by tag, and a check that every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.open = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append((self.open[-1] if self.open else "", data))

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def said(self, tag):
        return " ".join(data.strip() for name, data in self.text if name == tag)


def rows(psnr=None, chunks=8, slow=1.0):
    out = []
    for i in range(chunks):
        row = {"frames": 12.0, "wall_ms": slow * (300 + 20 * i), "cache_mb": 9.5 * (i + 1)}
        out.append(row if psnr is None else row | {"psnr_dense": psnr - 2 * i})
    return out


def runs(drawn=False):
    """The dense run and a faster one; drawing takes most of a report's time, so only when asked."""
    dense = {"frames": 96, "fps_avg": 31.25, "ratio_dense": 1.0, "density": 1.0, "cache_mb": 76.0,
             "rows_computed": 5898240, "rows_replayed": 0, "macs": 3.81e12}  # fmt: skip
    fast = dense | {"ratio_dense": 1.84, "density": 0.094, "psnr_dense": 41.23}
    plans = (
        "cache=keep_all attention=dense text=none replay=none",
        "cache=merge:budget=21f attention=ann:read=0.2 text=none replay=none",
    )
    return [
        Run("dense", plans[0], rows() if drawn else [], dense),
        Run("fast", plans[1], rows(46.0) if drawn else [], fast, ["replay saved under 1 %"]),
    ]


def report(tmp_path, title="A title", which=None, model="toy", video=None, **given):
    found = {"command": "tachyscope compare toy", "machine": machine(), "versions": versions(),
             "date": "2025-01-02", "lead": ""} | given  # fmt: skip
    path = tmp_path / "report.html"
    write_report(path, title, which or runs(), found, model=model, video=video)
    return path.read_text(encoding="utf-8")


def test_a_report_fetches_nothing(tmp_path):
    text = report(tmp_path, which=runs(drawn=True), video=b"ftypmp42")
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<iframe", strip(text))
    for tag, attributes in Page(text).tags:
        for name in ("src", "srcset", "href", "poster", "data", "action"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, name)
        assert not any(name.startswith("on") for name in attributes)


def strip(text):
    """The page without what its data URIs hold, in which any letters may follow another."""
    return re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)


def test_a_report_says_what_was_run_on_what(tmp_path):
    lead = "fast is fast\nand small"
    text = report(
        tmp_path, lead=lead, aa={"low": 0.97, "high": 1.04}, speed=3.27, video=b"ftypmp42"
    )
    page = Page(text)
    assert "by each run's own clock, 3.27 times as fast" in page.said("h2")
    # what matters most stands first, in large letters; each sentence is a paragraph
    assert text.index('class="tiles"') < text.index('<p class="lead">fast is fast</p>')
    assert '<p class="lead">and small</p>' in text
    said = page.said("dd")
    for words in ("toy", "2025-01-02", f"python {versions()['python']}", machine()["cpu"]):
        assert words in said
    assert "tachyscope compare toy" in page.said("code")
    for run in runs():
        assert run.plan in page.said("code")
    assert "replay saved under 1 %" in page.said("span")
    assert "gave 0.97× to 1.04×" in page.said("p") and "fast is fast" in page.said("p")


def test_what_was_not_measured_is_said(tmp_path):
    assert "The baseline was not timed against itself" in report(tmp_path)


def test_a_hostile_title_is_only_text(tmp_path):
    bad = Run(HOSTILE, HOSTILE, rows(40.0), {"frames": 1.0, HOSTILE: 2.0}, [HOSTILE])
    text = report(
        tmp_path, HOSTILE, [bad], model=HOSTILE, command=HOSTILE, lead=HOSTILE,
        machine={"cpu": HOSTILE}, versions={"a": HOSTILE}, date=HOSTILE, video=b"x",
    )  # fmt: skip
    page = Page(text)
    assert not page.all("script") and not page.all("img") and len(page.all("svg")) == 3
    assert page.said("title").startswith(HOSTILE) and page.said("h1") == HOSTILE


def cells(text):
    table = text[text.index("<tbody>") : text.index("</tbody>")]
    lines = re.findall(r'<th scope="row">([^<]*?) ?<.*?</th>(.*?)</tr>', table, re.S)
    return {
        name: [re.sub(r"<[^>]*>", "", c) for c in re.findall(r"<td>(.*?)</td>", rest, re.S)]
        for name, rest in lines
    }


def test_the_table_holds_the_sums_that_say_something(tmp_path):
    table = cells(report(tmp_path))
    assert table["Speed to dense once warm"] == ["1.00×", "1.84×"]
    assert table["Pairs scored, % of dense"] == ["100 %", "9.40 %"]
    assert table["PSNR to dense"] == ["–", "41.2 dB"]
    assert "Warm-up, s" not in table, "what no run measured takes no line"
    # what is 0 or alike in both runs stands among all numbers alone
    assert not {"MLP rows computed", "MLP rows replayed", "Counted GMACs"} & table.keys()
    alone = cells(report(tmp_path, which=runs()[:1]))
    assert alone["Frames/s on average"] == ["31.2"]
    assert alone["MLP rows computed"] == ["5\u202f898\u202f240"]
    assert alone["Counted GMACs"] == ["3\u202f810"] and "MLP rows replayed" not in alone


def test_the_few_numbers_that_matter_stand_first_in_large_letters(tmp_path):
    page = Page(report(tmp_path))
    assert page.said("strong").split("  ")[0].startswith("1.84×")
    assert "41.2 dB" in page.said("strong")
    assert "within noise" in page.said("div")  # nothing told that the ratio is real


def test_a_ratio_inside_the_noise_is_marked_and_the_baseline_is_not(tmp_path):
    table = cells(report(tmp_path, aa={"low": 0.9, "high": 1.9}))
    assert table["Speed to dense once warm"] == ["1.00×", "1.84× within noise"]
    assert (
        cells(report(tmp_path, aa={"low": 0.9, "high": 1.8}))["Speed to dense once warm"][1]
        == "1.84×"
    )


def test_a_simulated_saving_is_named_so(tmp_path):
    run = Run("mask", "replay", [], {"rows_replayed": 0.0, "simulated_rows_replayed": 640.0})
    assert cells(report(tmp_path, which=[run]))["MLP rows replayed"] == ["640 simulated"]


def test_no_number_of_a_summary_is_left_out(tmp_path):
    run = Run("one", "plan", [], {"frames": 12.0, "my_own_count": 77.0})
    text = report(tmp_path, which=[run])
    assert "my_own_count" in text and "<td>77</td>" in text


def test_pictures_have_words_and_tables_have_heads(tmp_path):
    page = Page(report(tmp_path, which=runs(drawn=True), video=b"x"))
    assert [image["aria-label"] for image in page.all("svg")] == [
        "Frames over time, frames, over seconds: dense from 0 to 96; fast from 0 to 96.",
        "Time of a chunk, ms, over frames: dense from 300 to 440; fast from 300 to 440.",
        "Cache, MB, over frames: dense from 9.50 to 76; fast from 9.50 to 76.",
        "PSNR to dense, dB, over frames: fast from 46 to 32.",
    ]
    assert {head["scope"] for head in page.all("th")} == {"row", "col"}
    (video,) = page.all("video")
    assert video["aria-label"] == "dense, fast, side by side"
    assert {"controls", "loop", "muted"} <= set(video)
    assert base64.b64decode(video["src"].removeprefix("data:video/mp4;base64,")) == b"x"
    assert page.all("html") == [{"lang": "en"}]


def drawings(text):
    return re.findall(r"<svg.*?</svg>", text, re.S)


def test_plots_have_a_colour_and_a_stroke_a_run(tmp_path):
    text = report(tmp_path, which=runs(drawn=True))
    _, time, cache, closeness = drawings(text)
    for picture in (time, cache, closeness):
        ET.fromstring(picture)
    assert "var(--run-0)" in cache and "var(--run-1)" in cache
    assert "var(--run-0)" not in closeness, "the dense run has no PSNR to itself"
    assert f'stroke-dasharray="{STROKES[1]}"' in cache
    assert all(f"--run-{i}:" in text for i in range(7))


def test_a_curve_is_drawn_where_its_values_are():
    picture = ET.fromstring(chart([Curve(0, "a", [0.0, 10.0], [0.0, 5.0])], 10.0, "frames", "w"))
    (line,) = [x for x in picture if x.tag == "polyline"]
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    grid = {x.attrib["y1"] for x in picture if x.attrib.get("class") == "grid"}
    assert x0 < x1 and f"{y0:.1f}" in grid and y0 > y1
    top = min(map(float, grid))
    assert y1 == pytest.approx((y0 + top) / 2, abs=0.2)


@pytest.mark.parametrize(
    "top, expected",
    [(10, [0, 2, 4, 6, 8, 10]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (63, [0, 20, 40, 60])],
)
def test_ticks_are_round_numbers(top, expected):
    assert ticks(top) == pytest.approx(expected)


def test_a_slow_first_chunk_does_not_flatten_the_others(tmp_path):
    slow = rows()
    slow[0]["wall_ms"] = 9000.0
    text = report(tmp_path, which=[Run("dense", "plan", slow, {})])
    assert "▲ one chunk lies above the axis, at most 9\u202f000 ms." in text
    assert "Time of a chunk, s" in report(tmp_path, which=[Run("d", "plan", rows(slow=9.0), {})])


@pytest.mark.parametrize("some", [[], [{"frames": 3.0}], [{"wall_ms": float("nan")}]])
def test_a_run_without_values_has_no_plot(tmp_path, some):
    assert not Page(report(tmp_path, which=[Run("none", "plan", some, {})])).all("svg")


def test_one_chunk_is_enough_and_a_name_is_plain_text(tmp_path):
    row = {"wall_ms": 0.0, "cache_mb": 0.0, "psnr_dense": 100.0}
    pictures = drawings(report(tmp_path, which=[Run(r"$\frac{$", "plan", [row], {})]))
    assert len(pictures) == 3 and all(r"$\frac{$" in picture for picture in pictures)


@pytest.mark.slow
def test_two_reports_of_one_run_are_equal(tmp_path):
    first, second = (report(tmp_path, which=runs(drawn=True)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (1, "1"), (0.0123456, "0.0123"), (41.234, "41.2"), (1234.5, "1\u202f234"),
     (1e-7, "1.00e-07"), (3.81e12, "3.81e+12"), (-2.5, "-2.50"), (float("nan"), "–"),
     (float("inf"), "∞")],
)  # fmt: skip
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_the_machine_is_described_without_its_name():
    found = machine()
    assert set(found) >= {"cpu", "cores", "memory_gb", "gpu"}
    assert found["cores"] >= 1
    assert platform.node() not in str(found)
    assert {"python", "torch"} <= set(versions())
