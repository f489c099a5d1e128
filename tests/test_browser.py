"""The page in Chromium: Debian's package, headless, driven by playwright."""

import base64
import shutil
import time

import numpy as np
import pytest
from serving import make_engine, running, tiny

import tachyscope as ts

CHROMIUM = shutil.which("chromium")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt install chromium"),
]
PIXELS = """id => {
  const canvas = document.getElementById(id);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let text = "";
  for (const byte of data) text += String.fromCharCode(byte);
  return btoa(text);
}"""

FRAMES = "['picture', 'dense'].map((id) => document.getElementById(id).dataset.frame)"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture
def address(tmp_path):
    engine = make_engine(tiny(), tmp_path, plan="cache=window:budget=6f", chunks=8)
    engine.model.fps = 24
    with running(engine) as url:
        yield url, engine


class Page:
    """A tab that has the page, and everything it complained of or asked for."""

    def __init__(self, browser, url, **options):
        self.context = browser.new_context(**options)
        self.tab = self.context.new_page()
        self.said, self.asked = [], []
        self.tab.on("console", lambda one: self._hear(one.type, one.text))
        self.tab.on("pageerror", lambda one: self.said.append(str(one)))
        self.tab.on("request", lambda one: self.asked.append(one.url))
        self.tab.goto(url)

    def _hear(self, kind, text):
        if kind == "error":
            self.said.append(text)

    def until(self, check, what, seconds=30):
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, f"{what} did not come; {self.said}"
            time.sleep(0.05)

    def text(self, name):
        return self.tab.locator(f"#{name}").inner_text()

    def frame(self, canvas="picture"):
        return int(self.tab.locator(f"#{canvas}").get_attribute("data-frame") or -1)

    def until_frame(self, frame, canvas="picture"):
        self.until(lambda: self.frame(canvas) >= frame, f"frame {frame}")

    def pixels(self, canvas="picture"):
        """A canvas as it is: uint8 [H, W, 3]."""
        data = base64.b64decode(self.tab.evaluate(PIXELS, canvas))
        height = int(self.tab.locator(f"#{canvas}").get_attribute("height"))
        return np.frombuffer(data, np.uint8).reshape(height, -1, 4)[..., :3]


def test_the_page_plays_what_a_stream_makes(browser, address):
    url, engine = address
    page = Page(browser, url)
    page.until(lambda: page.text("status") == "live", "the session")
    page.tab.evaluate("document.getElementById('screen').focus()")
    page.tab.keyboard.down("q")
    page.until_frame(30)
    page.tab.keyboard.up("q")
    page.tab.locator("#pause").click()
    time.sleep(0.5)
    page.until(lambda: page.text("key-p50") != "–", "the time from key to pixel")
    (live,) = engine.room.sessions.values()
    with ts.open(engine.model, live.log.opening.plan) as stream:
        made = [stream.step(list(step.actions) or None).frames for step in live.log.steps]
    frames = np.concatenate(made)
    assert "q" in {step.actions for step in live.log.steps}
    shown = page.pixels()
    # a JPEG's loss is small beside the difference of two frames of noise
    errors = [float(np.abs(shown.astype(int) - frame).mean()) for frame in frames]
    assert int(np.argmin(errors)) == page.frame() == len(frames) - 1
    assert errors[-1] < 4 < sorted(errors)[1]
    for tile in ("shown", "made", "pairs", "mlp", "cache", "cache-dense", "chunk"):
        assert page.text(tile) != "–", tile
    assert not page.said
    assert all(one.startswith((url, "blob:")) for one in page.asked)
    page.context.close()


def test_two_tabs_are_two_worlds_and_a_lost_one_goes_on(browser, address):
    url, engine = address
    first, second = Page(browser, url), Page(browser, url)
    first.until_frame(8)
    second.until_frame(8)
    assert len(engine.room.sessions) == 2
    (name,) = [
        one
        for one in engine.room.sessions
        if first.tab.evaluate("sessionStorage.session").count(one)
    ]
    first.tab.reload()
    first.until(lambda: first.text("status") == "live", "the session")
    first.until_frame(24)
    assert len(engine.room.sessions) == 2 and engine.room.sessions[name].tell is not None
    assert not first.said and not second.said
    first.context.close()
    second.context.close()


def test_dense_runs_beside_and_one_can_go_back(browser, address):
    url, engine = address
    page = Page(browser, url)
    page.until(lambda: page.text("status") == "live", "the session")
    page.tab.locator("#beside").select_option("turns")
    page.tab.locator("#reset").click()
    page.until_frame(12, "dense")
    page.until(lambda: page.text("psnr") != "–", "PSNR")
    # in turns the plan's picture waits for dense's of the same frame
    at = [[int(one) for one in page.tab.evaluate(FRAMES)] for _ in range(20)]
    assert all(own <= other for own, other in at)
    page.tab.locator("#pause").click()
    time.sleep(0.5)
    page.until(lambda: page.frame("dense") == page.frame(), "dense's last frame")
    own, dense = page.pixels(), page.pixels("dense")
    page.tab.locator("#view").select_option("difference")
    wanted = np.minimum(255, 8 * np.abs(own.astype(int) - dense))
    assert np.abs(page.pixels().astype(int) - wanted).mean() < 1
    page.tab.locator("#view").select_option("wipe")
    wiped, half = page.pixels(), own.shape[1] // 2
    assert np.array_equal(wiped[:, :half], own[:, :half])
    assert np.array_equal(wiped[:, half + 1 :], dense[:, half + 1 :])
    page.tab.locator("#pause").click()
    page.until(lambda: page.tab.locator("#back").is_enabled(), "a snapshot")
    (live,) = engine.room.sessions.values()
    before = live.generation
    page.tab.locator("#back").click()
    page.until(lambda: live.generation == before + 1, "the way back")
    assert not page.said
    page.context.close()


def test_the_map_lies_over_the_picture(browser, address):
    url, _ = address
    page = Page(browser, url)
    page.until(lambda: page.text("status") == "live", "the session")
    page.tab.locator("#map-kind").select_option("read")
    page.until(lambda: page.tab.locator("#map").get_attribute("data-chunk"), "the map")
    picture, drawn = (page.tab.locator(one).bounding_box() for one in ("#picture", "#map"))
    assert drawn == pytest.approx(picture, abs=1)
    assert page.pixels("map").max() > 0
    assert "% on average" in page.text("map-note")
    page.tab.locator("#map-kind").select_option("")
    page.until(lambda: not page.tab.locator("#map").is_visible(), "its end")
    assert not page.said
    page.context.close()


def test_prompt_log_and_record(browser, address, tmp_path):
    url, _ = address
    page = Page(browser, url)
    page.until_frame(2)
    page.tab.locator("#record").click()
    page.tab.locator("#prompt").fill("a blue room")
    page.tab.locator("#prompt").press("Enter")
    page.until(lambda: page.text("prompt-receipt").startswith("applied at chunk "), "the receipt")
    page.until_frame(page.frame() + 9)
    with page.tab.expect_download() as video:
        page.tab.locator("#record").click()
    assert video.value.suggested_filename.endswith("-frames.mp4")
    with page.tab.expect_download() as log:
        page.tab.locator("#save").click()
    path = tmp_path / "log.json"
    log.value.save_as(path)
    page.tab.locator("#file").set_input_files(path)
    page.until(lambda: page.text("log-note").startswith("plays "), "the log")
    page.until_frame(5)
    assert not page.said
    page.context.close()


def test_a_phone_has_a_pad_and_nothing_sticks_out(browser, address):
    url, engine = address
    page = Page(
        browser, url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True
    )
    page.until_frame(2)
    assert page.tab.evaluate("document.documentElement.scrollWidth") == 390
    button = page.tab.locator('[data-action="a"]')
    assert button.bounding_box()["height"] >= 44
    button.tap()
    (live,) = engine.room.sessions.values()
    page.until(lambda: "a" in {step.actions for step in live.log.steps}, "the step to the left")
    assert not page.said
    page.context.close()
