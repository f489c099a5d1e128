"""Video files, pictures side by side, and files that are whole or absent."""

import http.server
import json
import os
import struct
import threading
import zlib

import av
import numpy as np
import pytest
from faults import refused
from PIL import Image

from tachyscope.cli import main
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import ASKED, Bound
from tachyscope.io.files import check_folder, replacing, write_atomically
from tachyscope.io.video import QUEUE, VideoWriter, beside, read_frames, read_video, resize_frames


def ramp(frames=6, height=32, width=48):
    """A smooth picture that slides to the right."""
    t, y, x = np.mgrid[:frames, :height, :width]
    return np.stack([4 * x + 3 * t, 6 * y, 255 - 4 * x], -1).astype(np.uint8)


def test_a_video_comes_back_with_its_count_size_rate_and_colours(tmp_path):
    frames = ramp()
    with VideoWriter(tmp_path / "a.mp4", fps=12) as video:
        video.write(frames[:4])
        video.write(frames[4:])
    back = np.stack(list(read_video(tmp_path / "a.mp4")))
    assert back.shape == frames.shape and back.dtype == np.uint8
    # half the resolution in colour, and what crf 18 rounds away: a few levels
    assert np.abs(back.astype(int) - frames).mean() < 3
    with av.open(tmp_path / "a.mp4") as container:
        stream = container.streams.video[0]
        assert (stream.average_rate, stream.frames) == (12, 6)
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")


@pytest.mark.parametrize("fps", [16, 23.976, 0.5])
def test_a_rate_may_be_a_fraction(tmp_path, fps):
    with VideoWriter(tmp_path / "a.mp4", fps) as video:
        video.write(ramp(3))
    with av.open(tmp_path / "a.mp4") as container:
        assert float(container.streams.video[0].average_rate) == pytest.approx(fps)


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 120, 40)])
def test_a_colour_stays_itself(tmp_path, colour):
    with VideoWriter(tmp_path / "a.mp4", 8) as video:
        video.write(np.full((2, 16, 16, 3), colour, np.uint8))
    for frame in read_video(tmp_path / "a.mp4"):
        assert np.abs(frame.astype(int) - colour).max() <= 2


@pytest.mark.parametrize(
    "size, written", [((31, 47), (32, 48)), ((32, 47), (32, 48)), ((1, 1), (2, 2))]
)
def test_odd_sizes_are_made_even(tmp_path, size, written):
    with VideoWriter(tmp_path / "a.mp4", 8) as video:
        video.write(ramp(2, *size))
    assert [frame.shape for frame in read_video(tmp_path / "a.mp4")] == [(*written, 3)] * 2


def test_an_added_row_and_column_repeat_the_last(tmp_path):
    with VideoWriter(tmp_path / "a.mp4", 8) as video:
        video.write(np.full((1, 15, 15, 3), 200, np.uint8))
    (frame,) = read_video(tmp_path / "a.mp4")
    assert np.abs(frame.astype(int) - 200).max() <= 2


def test_scale_makes_squares_of_pixels(tmp_path):
    board = np.indices((8, 8)).sum(0) % 2 * 255
    frames = np.repeat(board.astype(np.uint8)[None, ..., None], 3, -1)
    with VideoWriter(tmp_path / "a.mp4", 8, scale=6) as video:
        video.write(frames)
    (frame,) = read_video(tmp_path / "a.mp4")
    assert frame.shape == (48, 48, 3)
    centres = frame[3::6, 3::6].astype(int)
    assert np.abs(centres - frames[0]).max() < 16


def test_the_file_appears_only_when_the_block_ends(tmp_path):
    path = tmp_path / "a.mp4"
    with VideoWriter(path, 8) as video:
        video.write(ramp(2))
        assert not path.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("frames", [0, 2])
def test_the_temporary_file_is_gone_after_an_exception(tmp_path, fault, frames):
    with pytest.raises(fault), VideoWriter(tmp_path / "a.mp4", 8) as video:
        if frames:
            video.write(ramp(frames))
        raise fault
    assert not list(tmp_path.iterdir())


def test_an_exception_leaves_the_older_video_as_it_was(tmp_path):
    path = tmp_path / "a.mp4"
    with VideoWriter(path, 8) as video:
        video.write(ramp(3))
    before = path.read_bytes()
    with pytest.raises(RuntimeError), VideoWriter(path, 8) as video:
        video.write(ramp(2))
        raise RuntimeError
    assert path.read_bytes() == before


def test_a_video_without_frames_is_an_error_and_leaves_nothing(tmp_path):
    words = "was given no frames: write at least one$"
    with pytest.raises(TachyscopeError, match=words), VideoWriter(tmp_path / "a.mp4", 8):
        pass
    assert not list(tmp_path.iterdir())


def test_frames_of_another_size_are_an_error(tmp_path):
    with VideoWriter(tmp_path / "a.mp4", 8) as video:
        video.write(ramp(1, 32, 48))
        with pytest.raises(TachyscopeError, match="share a size, got 40x32 after 48x32"):
            video.write(ramp(1, 32, 40))


def test_what_is_not_frames_is_an_error(tmp_path):
    with VideoWriter(tmp_path / "a.mp4", 8) as video:
        video.write(ramp(1))
        with pytest.raises(
            TachyscopeError, match=r"uint8 \[F, H, W, 3\], got float64 \[1, 4, 4, 3\]"
        ):
            video.write(np.zeros((1, 4, 4, 3)))
    with pytest.raises(TachyscopeError, match="fps must be from 0.001 to 1,000, got 0"):
        VideoWriter(tmp_path / "b.mp4", 0)
    with pytest.raises(TachyscopeError, match="scale must be from 1 to 64, got 0"):
        VideoWriter(tmp_path / "b.mp4", 8, scale=0)


def test_a_writer_takes_frames_within_its_block_alone(tmp_path):
    video = VideoWriter(tmp_path / "a.mp4", fps=8)
    refused(lambda: video.write(ramp()), "writes within a with block")
    with video:
        video.write(ramp())
    refused(lambda: video.write(ramp()), "writes within a with block")


def test_an_unwritable_folder_is_one_line_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "out"
    words = f"{folder.parent} is a file, not a folder: give the name of a folder"
    with pytest.raises(TachyscopeError) as error, VideoWriter(folder / "a.mp4", 8):
        pytest.fail("the block must not start")
    assert str(error.value) == words
    with pytest.raises(TachyscopeError) as error:
        write_atomically(folder / "a.json", "{}")
    assert str(error.value) == words
    with pytest.raises(TachyscopeError) as error:
        check_folder(folder)
    assert str(error.value) == words


def test_a_file_that_is_no_video_is_one_line_that_names_it(tmp_path):
    with pytest.raises(TachyscopeError, match=r"none.mp4 cannot be read as a video \(no such file"):
        next(read_video(tmp_path / "none.mp4"))
    (tmp_path / "text.mp4").write_text("not a video")
    with pytest.raises(TachyscopeError, match=r"text.mp4 cannot be read as a video \(invalid data"):
        next(read_video(tmp_path / "text.mp4"))


def test_frames_are_read_whole_and_an_image_is_one(tmp_path):
    frames = ramp(5)
    with VideoWriter(tmp_path / "a.mp4", 8) as video:
        video.write(frames)
    back = read_frames(tmp_path / "a.mp4")
    assert np.array_equal(back, np.stack(list(read_video(tmp_path / "a.mp4"))))
    assert back.shape == frames.shape and back.dtype == np.uint8
    with av.open(tmp_path / "a.png", "w", format="image2") as file:
        stream = file.add_stream("png", rate=1)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "rgb24"
        file.mux(stream.encode(av.VideoFrame.from_ndarray(frames[2], format="rgb24")))
        file.mux(stream.encode(None))
    assert np.array_equal(read_frames(tmp_path / "a.png"), frames[2:3])


def test_a_picture_of_a_phone_is_upright(tmp_path):
    upright = ramp()[0]
    for orientation, turns in ((1, 0), (3, 2), (6, 1), (8, 3)):  # EXIF's, and quarter turns stored
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = Image.fromarray(np.ascontiguousarray(np.rot90(upright, turns)))
        stored.save(tmp_path / "phone.jpg", exif=exif, quality=100, subsampling=0)
        (read,) = read_frames(tmp_path / "phone.jpg")
        assert read.shape == upright.shape
        assert np.abs(read.astype(int) - upright).max() < 16


def test_frames_of_two_sizes_or_none_are_no_video_to_go_on_from(tmp_path, monkeypatch):
    for frames, words in [
        ([ramp(1)[0], ramp(1, 16, 24)[0]], "x has frames of 48x32 and 24x16, not some of one size"),
        ([], "x has no frames, not some of one size: give a video file, or an image"),
    ]:
        monkeypatch.setattr(
            "tachyscope.io.video.read_video", lambda path, frames=frames: iter(frames)
        )
        with pytest.raises(TachyscopeError, match=words):
            read_frames("x")


def test_beside_puts_each_video_unchanged_below_its_label():
    a, b = ramp(2, 16, 24), ramp(2, 12, 30) // 2
    out = beside([a, b], ["dense", "fast"], gap=5, scale=3)
    strip = out.shape[1] - 3 * 16 - 5
    assert out.shape == (2, strip + 48 + 5, 5 + 72 + 5 + 90 + 5, 3) and strip >= 16
    big = [video.repeat(3, 1).repeat(3, 2) for video in (a, b)]
    np.testing.assert_array_equal(out[:, strip : strip + 48, 5:77], big[0])
    np.testing.assert_array_equal(out[:, strip : strip + 36, 82:172], big[1])
    for left, right in ((5, 77), (82, 172)):
        assert out[:, :strip, left:right].max() > 180, "a label is written in light letters"
    background = out[0, 0, 0]
    assert (out[:, :, :5] == background).all() and (out[:, :, 77:82] == background).all()
    assert (out[:, -5:] == background).all() and (out[:, strip + 36 :, 82:] == background).all()


def test_a_long_label_is_cut_and_stays_in_its_place():
    video = ramp(1, 8, 60)
    long, short = (beside([video], [text])[0, :20] for text in ("replay=attentive " * 9, "replay"))
    assert long.shape == short.shape
    assert (long[:, :40] == short[:, :40]).all(), "the beginning is kept"
    assert (long[:, -8:] == long[0, 0]).all(), "nothing runs into the gap"


def test_a_label_is_plain_text():
    # as a formula this would be an error, not letters
    assert beside([ramp(1)], [r"$\frac{$"])[0, :20].max() > 180


def test_beside_wants_one_length_and_as_many_labels_as_videos():
    with pytest.raises(TachyscopeError, match=r"one length, got \[2, 3\] frames"):
        beside([ramp(2), ramp(3)], ["a", "b"])
    with pytest.raises(TachyscopeError, match="got 2 videos and 1 labels"):
        beside([ramp(2), ramp(2)], ["a"])


def test_a_file_is_written_whole_with_its_folders(tmp_path):
    path = write_atomically(tmp_path / "deep" / "er" / "a.json", json.dumps({"name": "é"}))
    assert json.loads(path.read_bytes()) == {"name": "é"}
    assert write_atomically(path, b"\x00\xff").read_bytes() == b"\x00\xff"
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_a_file_half_written_leaves_the_older_one(tmp_path):
    path = write_atomically(tmp_path / "a.txt", "old")
    with pytest.raises(RuntimeError), replacing(path) as part:
        part.write_text("ne")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_written_file_is_as_readable_as_any_other(tmp_path):
    (tmp_path / "plain").write_text("")
    mode = write_atomically(tmp_path / "ours", "").stat().st_mode
    assert mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_in_place_of_a_file_is_an_error(tmp_path):
    with pytest.raises(TachyscopeError, match="is a folder: give the name of a file"):
        write_atomically(tmp_path, "")


def test_a_checked_folder_is_there_and_empty(tmp_path):
    folder = check_folder(tmp_path / "new" / "out")
    assert folder.is_dir() and not list(folder.iterdir())


def test_beside_writes_captions_below():
    video = ramp(2)
    plain, told = beside([video], ["a"]), beside([video], ["a"], captions=["12.0 s"])
    height = plain.shape[1] - 8  # without the gap
    assert np.array_equal(told[:, :height], plain[:, :height])
    assert told[:, height:].max() > 180 and plain[:, height:].max() < 100
    with pytest.raises(TachyscopeError, match="one caption or none has, got 1 for 2 videos"):
        beside([video, video], ["a", "b"], captions=["x"])


def encoded(path, background):
    frames = np.random.default_rng(0).integers(0, 256, (9, 32, 48, 3), dtype=np.uint8)
    with VideoWriter(path, 12, background=background) as video:
        for i in range(0, 9, 3):
            chunk = frames[i : i + 3].copy()
            video.write(chunk)
            chunk[:] = 0  # the memory may be used again
    assert video.frames == 9
    return path.read_bytes()


def test_a_file_encoded_in_the_background_is_the_same(tmp_path):
    assert encoded(tmp_path / "a.mp4", True) == encoded(tmp_path / "b.mp4", False)


def test_a_slow_encoder_holds_nobody_up_until_it_is_far_behind(tmp_path, monkeypatch):
    go, begun = threading.Event(), threading.Event()
    write = VideoWriter._write

    def slow(self, frames):
        begun.set()
        assert go.wait(60)
        write(self, frames)

    monkeypatch.setattr(VideoWriter, "_write", slow)
    with VideoWriter(tmp_path / "a.mp4", 12, background=True) as video:
        video.write(np.zeros((1, 16, 16, 3), np.uint8))
        assert begun.wait(60)
        for _ in range(QUEUE):
            video.write(np.zeros((1, 16, 16, 3), np.uint8))  # none waits
        go.set()
    assert len(list(read_video(tmp_path / "a.mp4"))) == 1 + QUEUE


def test_a_fault_in_the_background_is_raised_and_leaves_no_file(tmp_path, monkeypatch):
    def full(self, frames):
        raise TachyscopeError("the disk is full")

    monkeypatch.setattr(VideoWriter, "_write", full)
    frames = np.zeros((1, 16, 16, 3), np.uint8)
    with (
        pytest.raises(TachyscopeError, match="^the disk is full$"),
        VideoWriter(tmp_path / "a.mp4", 12, background=True) as video,
    ):
        for _ in range(3 * QUEUE):
            video.write(frames)
    with (
        pytest.raises(TachyscopeError, match="^the disk is full$"),
        VideoWriter(tmp_path / "b.mp4", 12, background=True) as video,
    ):
        video.write(frames)
    assert not list(tmp_path.iterdir())


def test_a_block_that_fails_ends_the_background_too(tmp_path):
    before = threading.active_count()
    with (
        pytest.raises(KeyboardInterrupt),
        VideoWriter(tmp_path / "a.mp4", 12, background=True) as video,
    ):
        video.write(np.zeros((1, 16, 16, 3), np.uint8))
        raise KeyboardInterrupt
    assert threading.active_count() == before and not list(tmp_path.iterdir())


def test_a_playlist_opens_no_address(tmp_path):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            there = f"http://127.0.0.1:{server.server_address[1]}/a.ts"
            (tmp_path / "a.m3u8").write_text(
                f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{there}\n#EXT-X-ENDLIST\n"
            )
            (tmp_path / "a.ffconcat").write_text(f"ffconcat version 1.0\nfile {there}\n")
            (tmp_path / "b.ffconcat").write_text("ffconcat version 1.0\nfile /etc/passwd\n")
            for name in ("a.m3u8", "a.ffconcat", "b.ffconcat"):
                refused(lambda name=name: read_frames(tmp_path / name), "cannot be read as a video")
        finally:
            server.shutdown()
            thread.join()
    assert asked == []


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    refused(lambda: read_frames(tmp_path / "fifo"), "fifo cannot be read as a video (not a regular")
    refused(lambda: read_frames("/dev/zero"), "/dev/zero cannot be read as a video (not a regular")
    refused(lambda: read_frames("a\0b"), "cannot be read as a video (embedded null byte)")
    refused(lambda: read_frames("x" * 5000), "cannot be read as a video (file name too long)")


def test_given_frames_are_bounded(tmp_path, monkeypatch):
    with VideoWriter(tmp_path / "a.mp4", 8) as video:
        video.write(np.zeros((5, 16, 16, 3), np.uint8))
    assert len(read_frames(tmp_path / "a.mp4")) == 5
    monkeypatch.setattr("tachyscope.io.video.PIXELS", 4 * 16 * 16)
    refused(
        lambda: read_frames(tmp_path / "a.mp4"), "has more than 2,000 frames, or than 1,024 pix"
    )
    # one picture of more: its header is enough
    monkeypatch.setattr("tachyscope.io.video.PIXELS", 16 * 16 - 1)
    refused(lambda: read_frames(tmp_path / "a.mp4"), "cannot be read as a video")
    monkeypatch.undo()
    monkeypatch.setitem(ASKED, "given", Bound(1, 4))
    refused(lambda: read_frames(tmp_path / "a.mp4"), "has more than 4 frames")


@pytest.mark.parametrize("size", [(32, 48), (16, 48), (64, 24), (7, 5)])
def test_resized_frames_are_cut_in_their_middle(size):
    y, x = np.mgrid[:32, :48]
    frame = np.stack([5 * x, 7 * y, 0 * x + 9], -1).astype(np.uint8)
    found = resize_frames(np.stack([frame, frame]), *size)
    assert found.shape == (2, *size, 3) and found.dtype == np.uint8
    if size == (32, 48):
        assert (found == frame).all()
    # the middle stays the middle, and what is left is cut evenly
    centre = found[0].astype(int).mean((0, 1))
    assert np.abs(centre - frame.astype(int).mean((0, 1))).max() < 6
    scale = min(32 / size[0], 48 / size[1])
    width = found[0, :, -1, 0].astype(int).mean() - found[0, :, 0, 0].astype(int).mean()
    assert abs(width - 5 * scale * (size[1] - 1)) < 0.1 * 5 * scale * size[1] + 2


def test_a_damaged_picture_or_one_without_a_decoder_is_one_line(tmp_path):
    (tmp_path / "a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'></svg>")

    def part(name, data):
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    parts = part(b"IHDR", head) + part(b"IDAT", b"\xff" * 500) + part(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    refused(lambda: read_frames(tmp_path / "a.svg"), "a.svg cannot be read", "no decoder for this")
    refused(lambda: read_frames(tmp_path / "a.png"), "a.png cannot be read as a video (")
    for name in ("a.svg", "a.png"):
        words = ["generate", "toy-chunks", "--frames", "3", "--first", str(tmp_path / name)]
        assert main([*words, "--out", str(tmp_path / "out")]) == 2
