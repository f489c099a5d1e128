"""The page in Chromium: Debian's package, headless, driven by playwright."""

import base64
import dataclasses
import json
import shutil
import threading
import time

import av
import numpy as np
import pytest
import toys
from PIL import Image
from serving import make_engine, running, tiny

import tachyscope as ts
from tachyscope.models.atrium.visit import Visit
from tachyscope.models.wan import key_camera
from tachyscope.models.wan.random import random_wan
from tachyscope.serve import protocol
from tachyscope.serve.app import ROOM
from tachyscope.serve.picture import read_picture

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

PATIENCE_S = 90  # with what comes in one second on idle cores
SIDES = ("front", "left", "back", "right")
GENERATION = "import('/session.js').then(({ state }) => state.session?.generation)"
FRAMES = "['picture', 'dense'].map((id) => document.getElementById(id).dataset.frame)"
WARP = """async ([first, second, third, pose, room]) => {
  const { warp } = await import("/warp.js");
  const read = ({ pose, text }) => {
    const bytes = Uint8ClampedArray.from(atob(text), (letter) => letter.charCodeAt(0));
    return { pose, pixels: new ImageData(bytes, 128, 128) };
  };
  const out = warp(new ImageData(128, 128), read(first), read(second), pose, 0.5, room,
    third && read(third));
  let text = "";
  for (const byte of out.data) text += String.fromCharCode(byte);
  return btoa(text);
}"""
START = "async (given) => (await import('/warp.js')).startOf(...given)"
BOMB = """async () => {
  const { readWalk, writeWalk } = await import("/walk.js");
  const text = await writeWalk("q".repeat(10_000_000)); // 10 kB that become 10 MB
  return [await readWalk(await writeWalk("q"), 100), String(await readWalk(text, 1e6).catch((x) => x))];
}"""
DROPPED = """async () => {
  const canvas = new OffscreenCanvas(60, 60);
  const pen = canvas.getContext("2d");
  pen.fillStyle = "rgb(0, 0, 255)";
  pen.fillRect(0, 0, 60, 60);
  const data = new DataTransfer();
  data.items.add(new File([await canvas.convertToBlob()], "blue.png", { type: "image/png" }));
  return data;
}"""
WATCH = """() => {
  window.seen = [];
  const picture = document.getElementById("picture");
  const note = () => Number(picture.dataset.frame) >= 0 && seen.push(Number(picture.dataset.frame));
  new MutationObserver(note).observe(picture, { attributeFilter: ["data-frame"] });
}"""
UNNAMED = """[...document.querySelectorAll("button, input, select, canvas")].filter((one) =>
  !(one.ariaLabel || one.textContent.trim() || one.labels?.length || one.type === "file" ||
    one.ariaHidden)).map((one) => one.outerHTML)"""


@pytest.fixture(scope="module")
def playwright():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def browser(playwright):
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
        self.context.set_default_timeout(1000 * PATIENCE_S)
        self.tab = self.context.new_page()
        self.said, self.asked = [], []
        self.tab.on("console", lambda one: self._hear(one.type, one.text))
        self.tab.on("pageerror", lambda one: self.said.append(str(one)))
        self.tab.on("request", lambda one: self.asked.append(one.url))
        self.tab.goto(url)

    def _hear(self, kind, text):
        if kind == "error":
            self.said.append(text)

    def until(self, check, what, seconds=PATIENCE_S):
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, f"{what} did not come; {self.said}"
            self.tab.wait_for_timeout(50)  # events of the page are heard meanwhile

    def session(self, engine):
        """The engine's session that the page plays; None while it opens one."""
        kept = json.loads(self.tab.evaluate("sessionStorage.session ?? null") or "{}")
        return engine.pool.sessions.get(kept.get("session"))

    def text(self, name):
        return self.tab.locator(f"#{name}").inner_text()

    def lab(self):
        self.tab.locator("#lab-button").click()

    def frame(self, canvas="picture"):
        return int(self.tab.locator(f"#{canvas}").get_attribute("data-frame") or -1)

    def until_frame(self, frame, canvas="picture"):
        self.until(lambda: self.frame(canvas) >= frame, f"frame {frame}")

    def until_generation(self, generation):
        """Wait until the page has it: the frames of the last one are gone then."""
        self.until(lambda: self.tab.evaluate(GENERATION) == generation, f"generation {generation}")

    def pause(self, live):
        """Pause the session, and wait until its last frame is shown."""
        self.tab.locator("#pause").click()
        self.until(lambda: live.paused, "the pause")
        self.until(lambda: self.frame() == live.lane.frames - 1, "the last frame")

    def pixels(self, canvas="picture"):
        """A canvas as it is: uint8 [H, W, 3]."""
        data = base64.b64decode(self.tab.evaluate(PIXELS, canvas))
        height = int(self.tab.locator(f"#{canvas}").get_attribute("height"))
        return np.frombuffer(data, np.uint8).reshape(height, -1, 4)[..., :3]


def test_the_page_plays_what_a_stream_makes(browser, address):
    url, engine = address
    page = Page(browser, url)
    page.until(lambda: page.text("status") == "live", "the session")
    page.tab.keyboard.down("q")
    page.until_frame(30)
    page.tab.keyboard.up("q")
    page.lab()
    (live,) = engine.pool.sessions.values()
    page.pause(live)
    page.until(lambda: page.text("key-p50") != "–", "the time from key to pixel")
    with ts.open(engine.model, live.log.opening.plan) as stream:
        made = [stream.step(list(step.actions) or None).frames for step in live.log.steps]
    frames = np.concatenate(made)
    assert "q" in {step.actions for step in live.log.steps}
    shown = page.pixels()
    # a JPEG's loss is small beside the difference of two frames of noise
    errors = [float(np.abs(shown.astype(int) - frame).mean()) for frame in frames]
    assert int(np.argmin(errors)) == page.frame() == len(frames) - 1
    assert errors[-1] < 4 < sorted(errors)[1]
    for number in ("shown", "growth", "growth-dense", "step", "pairs", "cache", "chunk"):
        assert page.text(number) != "–", number
    assert not page.tab.evaluate(UNNAMED)
    assert not page.said
    assert all(one.startswith((url, "blob:")) for one in page.asked)
    page.context.close()


def test_the_page_follows_the_camera(playwright, tmp_path):
    """Chromium's own: a green picture with a yellow disc that goes round."""
    fake = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
    engine = make_engine(toys.encoding_chunks(), tmp_path, plan="cache=window:budget=6f")
    engine.model.fps = 8
    pictures = []

    def note(frames, state, encode=engine.model.decoder.encode_next):
        pictures.append(frames)
        return encode(frames, state)

    engine.model.decoder.encode_next = note
    chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET, *fake])
    with running(engine) as url:
        page = Page(chromium, url)
        page.until_frame(3)
        page.lab()
        page.tab.locator("#camera").click()
        page.until(lambda: len(pictures) >= 4, "pictures of the camera")
        assert page.text("camera") == "Stop" and "a chunk behind you" in page.text("strength-note")
        (live,) = engine.pool.sessions.values()
        assert live.log.opening.strength == 0.6 and live.generation == 2
        for frames in pictures:
            assert frames.shape == (3, 32, 48, 3)
            red, green, blue = frames.mean((0, 1, 2))
            assert green > red + 20 and green > blue + 20
        page.tab.locator("#camera").click()
        page.until_generation(3)
        page.until_frame(3)
        assert live.log.opening.strength == 0 and page.text("camera") == "Begin"
        assert not page.said
    chromium.close()


def test_two_tabs_are_two_worlds_and_a_lost_one_goes_on(browser, address):
    url, engine = address
    first, second = Page(browser, url), Page(browser, url)
    first.until_frame(8)
    second.until_frame(8)
    assert len(engine.pool.sessions) == 2
    (name,) = [
        one
        for one in engine.pool.sessions
        if first.tab.evaluate("sessionStorage.session").count(one)
    ]
    first.tab.reload()
    first.until(lambda: first.text("status") == "live", "the session")
    first.until_frame(24)
    assert len(engine.pool.sessions) == 2 and engine.pool.sessions[name].emit is not None
    assert not first.said and not second.said
    first.context.close()
    second.context.close()


def test_a_page_whose_server_was_started_anew_begins_again(browser, tmp_path):
    first, second = (make_engine(tiny(), tmp_path / name, plan="live") for name in "ab")
    with running(first) as url:
        page = Page(browser, url)
        page.until_frame(8)
    page.until(lambda: page.text("status") == "reconnecting", "the loss")
    with running(second, port=int(url.rpartition(":")[2])):
        page.until(lambda: "Here is a new one" in page.text("notice"), "a notice")
        page.until_frame(2)
        assert len(second.pool.sessions) == 1
        page.context.close()


def test_dense_is_shown_once_it_is_in_step_and_one_can_go_back(browser, address):
    url, engine = address
    page = Page(browser, url)
    page.until_frame(12)
    page.lab()
    page.tab.locator("#beside").select_option("dense")
    assert not page.tab.locator("#dense").is_visible()
    page.until(lambda: page.tab.locator("#dense").is_visible(), "dense in step")
    begun = page.frame("dense")
    assert begun >= 12
    page.until_frame(begun + 9, "dense")
    page.until(lambda: page.text("psnr") != "–", "PSNR")
    at = [[int(one) for one in page.tab.evaluate(FRAMES)] for _ in range(20)]
    assert all(own == other for own, other in at)
    (live,) = engine.pool.sessions.values()
    page.pause(live)
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
    before = live.generation
    page.tab.locator("#back").click()
    page.until_generation(before + 1)
    page.tab.locator("#beside").select_option("")
    page.until(lambda: live.beside is None, "the end of dense")
    page.until_frame(page.frame() + 6)  # ours goes on alone
    assert not page.tab.locator("#dense").is_visible()
    assert not page.said
    page.context.close()


def test_what_was_read_tints_the_picture(browser, address):
    url, _ = address
    page = Page(browser, url)
    page.until(lambda: page.text("status") == "live", "the session")
    page.lab()
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
    page.lab()
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
    page.until_generation(2)
    page.until_frame(5)
    assert not page.said
    page.context.close()


def test_dragging_turns_and_prompts_wait_for_their_chunk(browser, address):
    url, engine = address
    page = Page(browser, url)
    page.until_frame(2)
    (live,) = engine.pool.sessions.values()
    box = page.tab.locator("#screen").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.tab.mouse.move(x, y)
    page.tab.mouse.down()
    page.tab.mouse.move(x - 200, y, steps=3)  # the picture goes left, the view right
    page.tab.mouse.up()
    page.until(lambda: "e" in {step.actions for step in live.log.steps}, "the turn")
    page.lab()
    page.pause(live)
    later = live.chunk + 5
    page.tab.locator("#prompt").fill("a red room")
    page.tab.locator("#prompt-chunk").fill(str(later))
    page.tab.locator("#prompt").press("Enter")
    page.until(lambda: page.text("prompt-receipt") == f"waits for chunk {later}", "the receipt")
    page.tab.locator("#pause").click()
    page.until(lambda: live.chunk > later + 1, "the chunk")
    assert [i for i, step in enumerate(live.log.steps) if step.prompt] == [later]
    page.until(lambda: page.text("prompt-receipt") == f"applied at chunk {later}", "the receipt")
    assert not page.said
    page.context.close()


def test_two_keys_of_a_published_world_are_one_action(browser, tmp_path):
    world = random_wan(
        dataclasses.replace(tiny().config, actions=key_camera.ACTIONS), name="toy-chunks"
    )
    engine = make_engine(world, tmp_path)
    with running(engine) as url:
        page = Page(browser, url)
        page.until_frame(2)
        lead = page.text("lead")
        assert "turn with J and L" in lead and "Its weights are random" in lead
        (live,) = engine.pool.sessions.values()
        page.tab.keyboard.down("w")
        page.tab.keyboard.down("ArrowLeft")
        page.until(lambda: live.log.steps[-1].actions == "q", "walking on and looking left")
        page.tab.keyboard.up("w")
        page.until(lambda: live.log.steps[-1].actions == "j", "looking left alone")
        page.tab.keyboard.up("ArrowLeft")
        assert not page.said
        page.context.close()


def drop_blue(page):
    """Drop a blue picture on the video."""
    dropped = page.tab.evaluate_handle(DROPPED)
    page.tab.dispatch_event("#screen", "drop", {"dataTransfer": dropped})


def until_begun_with(page, engine, colour):
    """Wait until the page shows a session whose first picture has this colour."""

    def begun():
        live = page.session(engine)
        if live is None or not live.log.opening.image:
            return False
        frame = read_picture(live.log.opening.image, engine.model.size)
        return np.abs(frame.astype(int) - colour).max() < 6

    page.until(begun, f"a session that begins with {colour}")
    page.until_frame(2)
    assert page.text("status") == "live" and len(engine.pool.sessions) == 1


RED, BLUE = (200, 0, 0), (0, 0, 255)


@pytest.fixture
def red(tmp_path):
    Image.new("RGB", (300, 200), RED).save(tmp_path / "red.png")
    return tmp_path / "red.png"


def test_a_session_begins_with_a_picture_chosen_or_dropped(browser, tmp_path, red):
    engine = make_engine(toys.encoding_chunks(), tmp_path, plan="cache=window:budget=6f")
    with running(engine) as url:
        page = Page(browser, url)
        page.until_frame(2)
        page.lab()
        page.tab.locator("#first").set_input_files(red)
        until_begun_with(page, engine, RED)  # and the session before is closed
        drop_blue(page)
        until_begun_with(page, engine, BLUE)
        assert not page.said
        page.context.close()


def test_a_picture_dropped_while_another_is_opened_is_the_one_that_plays(browser, tmp_path, red):
    engine = make_engine(toys.encoding_chunks(), tmp_path, plan="cache=window:budget=6f")
    opening, go_on, open_session = threading.Event(), threading.Event(), engine.open
    sent = []
    with running(engine) as url:
        page = Page(browser, "about:blank")
        page.tab.on("websocket", lambda one: one.on("framesent", lambda text: sent.append(text)))
        page.tab.goto(url)
        page.until_frame(2)

        def slow(message, tell):
            opening.set()
            assert go_on.wait(30)
            return open_session(message, tell)

        engine.open = slow
        page.lab()
        page.tab.locator("#first").set_input_files(red)
        page.until(opening.is_set, "the first picture")
        drop_blue(page)
        page.until(lambda: str(sent).count('"close"') == 2, "the second picture")
        go_on.set()
        until_begun_with(page, engine, BLUE)
        assert not page.said
        page.context.close()


def test_a_page_that_finds_no_room_keeps_its_session_and_says_why(browser, tmp_path):
    engine = make_engine(tiny(), tmp_path, sessions=1)
    with running(engine) as url:
        page = Page(browser, url)
        page.until_frame(2)
        kept = page.tab.evaluate("sessionStorage.session")
        page.tab.goto("about:blank")
        other = Page(browser, url)
        other.until_frame(2)  # its session takes the place of the one whose page left
        page.tab.goto(url)
        page.until(lambda: page.text("status") == "no room, trying again", "the refusal")
        assert "1 of 1 sessions are open" in page.text("notice")
        assert page.tab.evaluate("sessionStorage.session") == kept
        other.context.close()
        page.context.close()


def test_large_pictures_come_as_one_stream_and_are_shown_in_order(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "encode", None)  # no picture comes by itself
    large = {"size": (20, 30), "stride": (1, 16, 16), "steps": (1000,)}
    model = random_wan(dataclasses.replace(tiny().config, **large), name="toy-chunks")
    engine = make_engine(model, tmp_path, plan="cache=window:budget=6f")
    with running(engine) as url:
        page = Page(browser, url)
        page.tab.evaluate(WATCH)
        page.until(lambda: page.tab.evaluate("seen.length") >= 100, "a hundred frames")
        seen = page.tab.evaluate("seen")
        assert seen == sorted(set(seen))
        page.tab.reload()  # another stream of the same session
        page.until_frame(seen[-1] + 9)
        page.lab()
        (live,) = engine.pool.sessions.values()
        page.pause(live)
        with ts.open(engine.model, live.log.opening.plan) as stream:
            made = np.concatenate([stream.step().frames for _ in live.log.steps])
        assert page.pixels().shape == made.shape[1:]
        errors = [float(np.abs(page.pixels().astype(int) - frame).mean()) for frame in made[-9:]]
        assert int(np.argmin(errors)) == 8 and page.frame() == len(made) - 1
        assert not page.said
        page.context.close()


def test_a_link_repeats_the_walk_and_holds_no_token(browser, address):
    url, engine = address
    page = Page(browser, f"{url}/#token=secret-of-mine-alone")
    page.until_frame(5)
    page.tab.keyboard.press("d")
    (live,) = engine.pool.sessions.values()
    page.until(lambda: "d" in {step.actions for step in live.log.steps}, "the step")
    page.lab()
    page.pause(live)
    page.tab.keyboard.press("Escape")
    assert not page.tab.locator("#lab").is_visible()
    page.tab.locator("#share").click()
    page.until(lambda: page.tab.locator("#share-link").input_value(), "the link")
    link = page.tab.locator("#share-link").input_value()
    assert "secret" not in link
    friend = Page(browser, link)
    friend.until_frame(page.frame())
    (other,) = (one for one in engine.pool.sessions.values() if one is not live)
    assert other.log.steps[: len(live.log.steps)] == live.log.steps
    assert "walk" not in friend.tab.url  # a reload goes on with the session
    assert page.tab.evaluate(BOMB) == ["q", "RangeError: a walk that is too long"]
    for broken in ("walk=AAAA", f"{link.split('#')[1][:-20]}"):
        wrong = Page(browser, f"{url}/#{broken}")
        wrong.until(lambda tab=wrong: "Here is a new one" in tab.text("notice"), "a notice")
        wrong.until_frame(2)
        assert not wrong.said
        wrong.context.close()
    assert not page.said and not friend.said
    page.context.close()
    friend.context.close()


def test_a_clip_shows_three_plans_on_one_walk(browser, address, tmp_path):
    url, _ = address
    page = Page(browser, url)
    page.until_frame(12)
    with page.tab.expect_download(timeout=60_000) as clip:
        page.tab.locator("#clip").click()
    path = tmp_path / clip.value.suggested_filename
    clip.value.save_as(path)
    with av.open(path) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert len(frames) > 20 and frames[0].shape[1] > 3 * 300
    page.until_frame(page.frame() + 3)  # and it goes on
    assert not page.said
    page.context.close()


def test_between_two_pictures_both_are_turned_to_where_the_camera_stands(browser, address):
    visit, half = Visit(2, "q q"), Visit(2, "q q q q", pace=0.5, tempo=1.0)
    behind, first, second = visit.frames(0, 3)
    early, late = half.frames(1, 2)[0], half.frames(3, 4)[0]
    x, y, degrees = visit.view
    page = Page(browser, address[0])

    def told(frame, turn):
        data = np.concatenate([frame, np.full((128, 128, 1), 255, np.uint8)], -1)
        return {"pose": [x, y, degrees + turn], "text": base64.b64encode(data).decode()}

    def warped(turn, third=None):
        pictures = [told(first, 15), told(second, 30), third and told(*third)]
        data = page.tab.evaluate(WARP, [*pictures, [x, y, degrees + turn], ROOM])
        return np.frombuffer(base64.b64decode(data), np.uint8).reshape(128, 128, 4)[..., :3]

    def error(picture, wanted):
        return float(np.abs(picture.astype(int) - wanted).mean())

    assert error(warped(22.5), late) < 3 < 6 < error(first.astype(int) // 2 + second // 2, late)
    # of a view that is still behind both, a part is on the picture before alone
    assert error(warped(7.5, (behind, 0)), early) < 3 < 4 < error(warped(7.5), early)
    assert error(warped(22.5, (behind, 0)), late) < 3
    page.context.close()


def test_a_turn_starts_at_most_a_picture_behind_the_last(browser, address):
    page = Page(browser, address[0])

    def start(shown, third):
        return page.tab.evaluate(START, [shown, {"pose": [0.5, 0.5, 30]}, third])

    before = {"pose": [0.5, 0.5, 15]}
    assert start([0.5, 0.5, 20], before) == [0.5, 0.5, 20]
    assert start([0.5, 0.5, 355], before) == before["pose"]  # two pictures behind
    assert start([0.5, 0.4, 30], {"pose": [0.5, 0.45, 30]}) == [0.5, 0.45, 30]
    assert start([0.5, 0.5, 355], None) == [0.5, 0.5, 355]
    page.context.close()


def test_a_visitor_sees_that_walls_are_remembered_and_a_window_forgets(browser, tmp_path):
    engine = make_engine(
        ts.load("atrium-world"), tmp_path, name="atrium-world", plan="fast", session_frames=200
    )
    with running(engine) as url:
        page = Page(browser, url)
        page.until(lambda: "true pictures" in page.text("line"), "the look around")
        page.until(lambda: page.text("badge") == "true picture, shown to it", "its badge")
        page.until(lambda: "from memory" in page.text("line"), "the turn", 240)
        page.until(lambda: "Now walk yourself" in page.text("line"), "the verdict", 480)
        (live,) = engine.pool.sessions.values()
        assert page.text("kept") == "4 of 4" and page.text("badge") == "drawn by the network"
        marks = {
            row: [page.tab.locator(f"#{row}-{side} .mark").inner_text() for side in SIDES]
            for row in ("own", "window")
        }
        assert marks["own"] == ["✓"] * 4 and "✗" in marks["window"]
        assert [("✓", "✗")[one["right"] is False] for one in live.beside_walls.check(live.log)] == (
            marks["window"]
        )
        assert page.text("growth") == "+0 MB" != page.text("growth-dense")
        assert page.pixels("plan-map").max() > 0
        page.tab.keyboard.down("ArrowLeft")
        page.until(lambda: live.log.steps[-1].actions == "q", "the turn by an arrow")
        page.tab.keyboard.up("ArrowLeft")
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
    (live,) = engine.pool.sessions.values()
    page.until(lambda: "a" in {step.actions for step in live.log.steps}, "the step to the left")
    page.tab.locator('[data-action="d"]').dispatch_event("click")  # as a screen reader does
    page.until(lambda: "d" in {step.actions for step in live.log.steps}, "the step to the right")
    assert not page.tab.locator("#lead").is_visible()
    page.tab.locator("#more").tap()
    assert page.tab.locator("#lead").is_visible()
    assert not page.said
    page.context.close()
