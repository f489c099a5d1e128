"""Reads and writes video files frame by frame, without keeping frames in memory."""

from __future__ import annotations

import errno
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import av
import numpy as np
from av.container import InputContainer, OutputContainer
from av.video.reformatter import ColorRange
from av.video.stream import VideoStream

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import ASKED, check
from tachyscope.io.files import replacing, unwritable
from tachyscope.measure.quality import Frames, check_frames

# a URL or an ffmpeg protocol; two letters or more, since one is a Windows drive
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
PIXELS = 2**28  # most pixels of all given frames: 0.8 GB

BACKGROUND, INK = "#14161a", "#e4e2dd"
CAMERAS = "v4l2"  # as FFmpeg calls Linux's
HALF_TICK = 0.5e-3  # seconds: formats round times to a millisecond
QUEUE = 4  # chunks that may wait to be encoded
BT709 = 1  # of a file's matrix, its primaries and its transfer alike


class VideoWriter:
    """Writes chunks of frames uint8 [F, H, W, 3] to an mp4 (H.264, yuv420p).

    `scale` enlarges every pixel to a square of that side. Odd sizes are made even by repeating
    the last row or column. The file appears under its name only if the block ends without an
    exception.

    `background` encodes in another thread, up to QUEUE chunks behind, so that the caller does not
    wait while a GPU makes the next chunk. On a CPU this would compete for the cores.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fps: float,
        *,
        scale: int = 1,
        crf: int = 18,
        background: bool = False,
    ) -> None:
        check("fps", fps, "fps")
        check("scale", scale, "scale")
        self.path = Path(path)
        self.frames = 0
        self._fps = Fraction(fps).limit_denominator(1001)
        self._scale = scale
        self._crf = crf
        self._size: tuple[int, ...] = ()
        self._encoded = 0
        self._container: OutputContainer | None = None  # within the block
        self._stream: VideoStream
        self._pool = ThreadPoolExecutor(1) if background else None
        self._waiting: deque[Future[None]] = deque()
        self._block = self._writing()

    def write(self, frames: Frames) -> None:
        """Encode frames uint8 [F, H, W, 3], all of the size of the first."""
        check_frames(frames)
        if self._container is None:
            raise TachyscopeError(
                "a VideoWriter writes within a with block: with VideoWriter(path, fps) as video: "
                "video.write(frames)"
            )
        if not self._size:
            self._start(frames.shape[1:3])
        if frames.shape[1:3] != self._size:
            raise TachyscopeError(
                f"frames of one video share a size, got {_by(frames.shape[1:3])} after "
                f"{_by(self._size)}: write another file"
            )
        self.frames += len(frames)
        if self._pool is None:
            self._write(frames)
            return
        while self._waiting and (self._waiting[0].done() or len(self._waiting) > QUEUE):
            self._waiting.popleft().result()  # raises if encoding failed
        # copied, since the caller may reuse the array
        self._waiting.append(self._pool.submit(self._write, frames.copy()))

    def _write(self, frames: Frames) -> None:
        for frame in enlarge(frames, self._scale):
            height, width = frame.shape[:2]
            even = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")
            picture.pts = self._encoded
            picture.time_base = 1 / self._fps
            self._encode(
                picture.reformat(
                    format="yuv420p", dst_colorspace=BT709, dst_color_range=ColorRange.MPEG
                )
            )
            self._encoded += 1

    def __enter__(self) -> Self:
        self._block.__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        self._block.__exit__(*fault)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with replacing(self.path) as part:
            with self._faults():
                # the index goes to the front, so that a player can start before the download ends
                self._container = av.open(
                    str(part), "w", format="mp4", options={"movflags": "faststart"}
                )
            try:
                yield
                if not self.frames:
                    raise TachyscopeError(f"{self.path} was given no frames: write at least one")
                for chunk in self._waiting:
                    chunk.result()
                self._encode(None)
            except BaseException:
                self._end_pool()
                # the first error is raised, and the file is removed anyway
                with suppress(av.FFmpegError):
                    self._close()
                raise
            self._end_pool()
            with self._faults():
                self._close()

    def _close(self) -> None:
        container, self._container = self._container, None
        assert container is not None
        container.close()

    def _end_pool(self) -> None:
        """Wait for the running chunk, and cancel the others."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _start(self, size: tuple[int, ...]) -> None:
        height, width = (side * self._scale + side * self._scale % 2 for side in size)
        assert self._container is not None
        stream = self._container.add_stream("libx264", rate=self._fps)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": str(self._crf)}
        # BT.709, with tags: without them players guess the matrix by size, and colours shift
        codec = stream.codec_context
        codec.colorspace = codec.color_primaries = codec.color_trc = BT709
        codec.color_range = ColorRange.MPEG
        self._stream = stream
        self._size = size

    def _encode(self, picture: av.VideoFrame | None) -> None:
        assert self._container is not None
        with self._faults():
            self._container.mux(self._stream.encode(picture))

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self.path, error) from error


def read_video(path: str | os.PathLike[str]) -> Iterator[Frames]:
    """The frames of a local video file or image, one uint8 [H, W, 3] at a time."""
    with _opened(path) as container:
        for frame in container.decode(video=0):
            yield _pixels(frame)


def read_video_at(path: str | os.PathLike[str], fps: float) -> Iterator[Frames]:
    """The frames of a local video file at another rate: those shown at each of its times."""
    with _opened(path) as container:
        yield from _at_rate(container.decode(video=0), fps, str(path))


def read_camera(device: str, fps: float) -> Iterator[Frames]:
    """The endless frames of a camera (`/dev/video0`) at a rate."""
    try:
        with av.open(device, "r", format=CAMERAS) as container:
            yield from _at_rate(container.decode(video=0), fps, device)
    except (OSError, ValueError, av.FFmpegError) as error:
        raise TachyscopeError(
            f"the camera {device} cannot be read ({_reason(error)}): give one that "
            f"`v4l2-ctl --list-devices` shows, or a video file"
        ) from error


def count_frames(path: str | os.PathLike[str], fps: float) -> int | None:
    """How many frames a video file has at a rate, by its duration; None if it has none."""
    with _opened(path) as container:
        stream = container.streams.video[0]
        if stream.duration is None or stream.time_base is None:
            return None
        return max(1, math.ceil(round(stream.duration * stream.time_base * fps, 3)))


def _at_rate(frames: Iterator[av.VideoFrame], fps: float, name: str) -> Iterator[Frames]:
    """Resample frames to another rate: at each time the newest frame, repeated if needed."""
    start: float | None = None
    held: av.VideoFrame | None = None
    given = 0
    for frame in frames:
        if frame.time is None:
            raise TachyscopeError(
                f"{name} has no times of its frames, and so no frame rate: convert it to mp4"
            )
        start = frame.time if start is None else start
        # half a millisecond of tolerance, since frame times are rounded
        while held is not None and given / fps < frame.time - start - HALF_TICK:
            yield _pixels(held)
            given += 1
        held = frame
    if held is None or start is None:
        return
    lasts = float(held.duration * held.time_base) if held.duration and held.time_base else 0.0
    while given / fps < held.time - start + max(lasts, HALF_TICK) - HALF_TICK or not given:
        yield _pixels(held)
        given += 1


def _pixels(frame: av.VideoFrame) -> Frames:
    """A frame's pixels as players show them: a phone stores them sideways, with an angle."""
    pixels = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[InputContainer]:
    """Open a local video file or image; errors while it is read become one line."""
    name = os.fspath(path)
    if URL.match(name) and not os.path.exists(name):
        raise TachyscopeError(f"a video is read from a local file, got {name}: download it first")
    try:
        if os.path.exists(name) and not os.path.isdir(name) and not os.path.isfile(name):
            raise OSError(errno.EINVAL, "not a regular file")
        # an open file, and no protocols: a playlist could name other files and URLs
        with (
            open(name, "rb") as file,
            av.open(file, "r", options={"protocol_whitelist": "none"}) as container,
        ):
            if not container.streams.video:
                raise TachyscopeError(f"{path} holds no video: give a video file, or an image")
            codec = container.streams.video[0].codec_context
            if codec is None:  # FFmpeg knows the format but has no decoder
                raise OSError(errno.EINVAL, "no decoder for this format")
            codec.options = {"max_pixels": str(PIXELS)}
            yield container
    except (OSError, ValueError, av.FFmpegError) as error:
        raise TachyscopeError(
            f"{path} cannot be read as a video ({_reason(error)}): give a video file, or an image"
        ) from error


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def read_frames(path: str | os.PathLike[str]) -> Frames:
    """All frames of a video file, or the one of an image: uint8 [F, H, W, 3]."""
    frames: list[Frames] = []
    pixels, most = 0, ASKED["given"].high
    for frame in read_video(path):
        frames.append(frame)
        pixels += frame.shape[0] * frame.shape[1]
        if len(frames) > most or pixels > PIXELS:
            raise TachyscopeError(
                f"{path} has more than {most:,} frames, or than {PIXELS:,} pixels in all: cut it, "
                f"or make it smaller"
            )
    sizes = {frame.shape[:2]: _by(frame.shape[:2]) for frame in frames}
    if len(sizes) != 1:
        sizes_text = f"frames of {' and '.join(sizes.values())}" if sizes else "no frames"
        raise TachyscopeError(
            f"{path} has {sizes_text}, not some of one size: give a video file, or an image"
        )
    return np.stack(frames)


def resize_frames(frames: Frames, height: int, width: int) -> Frames:
    """Frames [F, H, W, 3], center-cropped to the aspect ratio and scaled to height x width."""
    # imported late: most videos do not need it
    from PIL import Image, ImageOps

    def fitted(frame: Frames) -> Frames:
        picture = ImageOps.fit(Image.fromarray(frame), (width, height), Image.Resampling.LANCZOS)
        return np.asarray(picture, np.uint8)

    return np.stack([fitted(frame) for frame in frames])


def beside(
    videos: Sequence[Frames],
    labels: Sequence[str],
    gap: int = 8,
    scale: int = 1,
    captions: Sequence[str] = (),
) -> Frames:
    """Place chunks of equal length side by side, `gap` pixels apart and from the edge.

    Each chunk is uint8 [F, H, W, 3], its pixels enlarged to squares of side `scale`; sizes may
    differ. Each video has a label above and, if given, a caption of one or more lines below; lines
    that are too long are cut.
    """
    check("scale", scale, "scale")
    if not videos or len(videos) != len(labels):
        raise TachyscopeError(
            f"every video has one label, got {len(videos)} videos and {len(labels)} labels: "
            "give as many"
        )
    if captions and len(captions) != len(videos):
        raise TachyscopeError(
            f"every video has one caption or none has, got {len(captions)} for {len(videos)} "
            f"videos: give as many"
        )
    for frames in videos:
        check_frames(frames)
    lengths = [len(frames) for frames in videos]
    if len(set(lengths)) > 1:
        raise TachyscopeError(
            f"videos side by side have one length, got {lengths} frames: cut them to the shortest"
        )
    heights = [frames.shape[1] * scale for frames in videos]
    widths = [frames.shape[2] * scale for frames in videos]
    # one font size for all labels, which grows slowly with the picture
    letters = max(11, min(24, min(widths) // 16))
    strip = 2 * letters + letters % 2
    below = [caption.split("\n") for caption in captions or [""] * len(labels)]
    lines = max(map(len, below)) if captions else 0
    bottom = strip + (lines - 1) * (letters + letters // 2) if captions else gap
    size = (strip + max(heights) + bottom, gap + sum(width + gap for width in widths))
    out = np.empty((lengths[0], *size, 3), np.uint8)
    out[:] = list(bytes.fromhex(BACKGROUND[1:]))
    left = gap
    for i, (frames, height, width) in enumerate(zip(videos, heights, widths, strict=True)):
        right = left + width
        out[:, :strip, left:right] = _label(labels[i], width, strip, letters)
        out[:, strip : strip + height, left:right] = enlarge(frames, scale)
        for k, line in enumerate(below[i]):
            if line:
                top = size[0] - bottom + k * (letters + letters // 2)
                out[:, top : top + strip, left:right] = _label(line, width, strip, letters)
        left = right + gap
    return out


def enlarge(frames: Frames, scale: int) -> Frames:
    """Frames [F, H, W, 3] with every pixel a square of side `scale`."""
    return frames if scale == 1 else frames.repeat(scale, 1).repeat(scale, 2)


@lru_cache(maxsize=64)
def _label(text: str, width: int, height: int, letters: int) -> Frames:
    """Text on the background, uint8 [height, width, 3], cut with an ellipsis if too long."""
    from PIL import Image, ImageDraw

    font = _font(letters)
    kept = len(text)
    while kept and font.getlength(shown := _cut(text, kept)) > width:
        kept -= 1
    picture = Image.new("RGB", (width, height), BACKGROUND)
    if kept:
        ImageDraw.Draw(picture).text((0, height // 2), shown, fill=INK, font=font, anchor="lm")
    return np.asarray(picture, np.uint8)


def _cut(text: str, kept: int) -> str:
    return text if kept == len(text) else text[:kept].rstrip() + "…"


@lru_cache
def _font(letters: int) -> Any:
    """Pillow's own font, `letters` pixels high."""
    from PIL import ImageFont

    return ImageFont.load_default(letters)


def _by(size: tuple[int, ...]) -> str:
    return f"{size[1]}x{size[0]}"
