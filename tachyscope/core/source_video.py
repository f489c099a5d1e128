"""The source of video-to-video: its frames, read one chunk at a time."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown, warn
from tachyscope.core.limits import check
from tachyscope.core.live_frames import LiveFrames
from tachyscope.core.session import Session
from tachyscope.io.fingerprint import digest
from tachyscope.io.torch_defaults import own_numerics
from tachyscope.models.base import VideoModel
from tachyscope.snapshot.format import MAX_COUNT, check_tensor, refuse

if TYPE_CHECKING:
    from PIL.Image import Image

    # a file or a camera's device, pictures, or whatever gives uint8 [H, W, 3] one by one
    Video = str | os.PathLike[str] | np.ndarray | Tensor | Iterable[np.ndarray] | Iterable[Image]

STRENGTH = 0.6  # the default
EDGE = 2**22  # bytes of a file's beginning and of its end that are hashed
KEPT = "source."  # prefix of a source's tensors in a state
ENCODER = "encoder."  # after it, prefix of the encoder's

FramesFrom = Callable[[int], Iterator[Any]]  # the frames from a number on


class SourceVideo:
    """A source video and a stream's position in it.

    It holds the next chunk's frames and the encoder's streaming state, and nothing else. With a
    `key`, a hash of its frames, it can be rewound; without, its frames come once.
    """

    def __init__(
        self, name: str, frames_from: FramesFrom, size: tuple[int, int], strength: float, key: str
    ) -> None:
        self.name, self.size, self.strength, self.key = name, size, strength, key
        self.encoder: dict[str, Tensor] = {}
        self.at = 0  # frames taken by chunks so far
        self.live: LiveFrames | None = None
        self._frames_from = frames_from
        self._frames: Iterator[Any] | None = None
        self._next: list[np.ndarray] = []

    def fill(self, count: int) -> bool:
        """Read the next chunk's frames; False if none are left."""
        try:
            if self._frames is None:
                self._frames = self._frames_from(self.at)
            for frame in islice(self._frames, max(0, count - len(self._next))):
                self._next.append(self._checked(frame))
        except BaseException:
            if self.key:  # read the chunk's frames again next time
                self.seek(self.at)
            raise
        return bool(self._next)

    def need(self, count: int) -> None:
        """`fill`; raises if no frames are left."""
        if not self.fill(count):
            raise TachyscopeError(
                f"{self.name} has ended after {self.at} frames, and a stream that follows it ends "
                f"there: take fewer `frames`, or give a longer `video`"
            )

    def take(self, count: int) -> np.ndarray:
        """The next frames uint8 [F, H, W, 3]; the last one is repeated after the video's end."""
        self.need(count)
        frames, self._next = self._next[:count], self._next[count:]
        self.at += len(frames)
        return np.stack(frames + [frames[-1]] * (count - len(frames)))

    def lay(self, model: VideoModel, session: Session, count: int) -> dict[str, float]:
        """Encode the next frames as the next chunk's start; stats: a camera's dropped frames."""
        frames, features = self.take(count), session.memory.features
        with session.meter.span("encode"), own_numerics():
            latents = model.encode_next(frames, self.encoder)
        if features.source is None:
            features.source = latents.clone()
        else:  # in place, since a CUDA graph reads this tensor
            features.source.copy_(latents)
        features.strength = self.strength
        return {} if self.live is None else {"source_dropped": float(self.live.count_dropped())}

    def seek(self, at: int) -> None:
        self.at, self._frames, self._next = at, None, []

    def close(self) -> None:
        self._frames, self._next = None, []
        self.encoder.clear()
        if self.live is not None:
            self.live.close()

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for a state, by name."""
        if not self.key:
            raise TachyscopeError(
                f"{self.name} comes once and cannot be rewound, so a stream that follows it has no "
                f"snapshot: give a file or an array as `video`"
            )
        names = {f"{KEPT}{ENCODER}{name}": x for name, x in self.encoder.items()}
        return names | {f"{KEPT}at": torch.tensor(self.at), f"{KEPT}key": self._known_by()}

    def read(self, kept: Mapping[str, Tensor], device: torch.device) -> Callable[[], None]:
        """A function that seeks to a state's position; raises if that is of another video."""
        key = kept.get(f"{KEPT}key")
        if key is None or not key.cpu().equal(self._known_by()):
            refuse(
                "follows another `video`, or at another `strength`",
                "open the stream with those that it was opened with",
            )
        check_tensor(kept, f"{KEPT}at", torch.tensor(0), (0, MAX_COUNT))
        begins, at = f"{KEPT}{ENCODER}", int(kept[f"{KEPT}at"])
        held = {k.removeprefix(begins): x for k, x in kept.items() if k.startswith(begins)}
        encoder = {name: x.to(device, copy=True) for name, x in held.items()}

        def go_on() -> None:
            self.seek(at)
            self.encoder = encoder

        return go_on

    def _known_by(self) -> Tensor:
        named = digest(self.key, repr(self.strength))
        return torch.frombuffer(bytearray(named.encode()), dtype=torch.uint8)

    def _checked(self, frame: Any) -> np.ndarray:
        """A copy of a frame as an array; raises unless it is uint8 of the video's size."""
        picture = np.asarray(frame)
        if picture.dtype != np.uint8 or picture.shape != (*self.size, 3):
            height, width = self.size
            raise TachyscopeError(
                f"frames of {self.name} are uint8 [{height}, {width}, 3], got {picture.dtype} "
                f"{list(picture.shape)} behind {self.at + len(self._next)} others: convert it, "
                f"or set `size`"
            )
        return picture.copy()


def parse_video(
    video: Any,
    strength: Any,
    model: VideoModel,
    size: tuple[int, int],
    chunk: int,
    frames: int | None,
) -> SourceVideo | None:
    """The source of a stream of `frames` frames; None without `video`."""
    if video is None:
        if strength is not None:
            raise TachyscopeError(
                f"`strength` needs a `video` to follow, got {shown(strength)} without one: give "
                f"`video` too"
            )
        return None
    model.check_source()
    level = check("strength", STRENGTH if strength is None else strength)
    if not isinstance(video, str | os.PathLike):
        return _of_frames(video, size, level)
    path = os.fspath(video)
    # PyAV is not loaded where no file is read
    from tachyscope.io import video as files

    def fitted(pictures: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        for i, frame in enumerate(pictures):
            if frame.shape[:2] == size:
                yield frame
                continue
            if not i:
                given, wanted = ("{}x{}".format(*each) for each in (frame.shape[:2], size))
                warn(f"the frames of {path} are {given}: cut in the middle and scaled to {wanted}")
            yield files.resize_frames(frame[None], *size)[0]

    if is_camera(path):
        live = LiveFrames(2 * model.pixel_frames(chunk), f"the camera {path}")
        live.feed(fitted(files.read_camera(path, model.fps)))
        return _of_frames(live, size, level)
    there = files.count_frames(path, model.fps)
    if there is not None and frames is not None and there < frames:
        raise TachyscopeError(
            f"{path} has {there} frames at the {model.fps} a second of {model.name}, got "
            f"`frames` {frames}: take at most {there}, or a longer `video`"
        )

    def frames_from(at: int) -> Iterator[np.ndarray]:
        return fitted(islice(files.read_video_at(path, model.fps), at, None))

    return SourceVideo(path, frames_from, size, level, file_key(path))


def _of_frames(video: Any, size: tuple[int, int], level: float) -> SourceVideo:
    name = "`video`"
    if isinstance(video, LiveFrames):
        source = SourceVideo(video.name, lambda _: iter(video), size, level, "")
        source.live = video
        return source
    if isinstance(video, np.ndarray | Tensor | list | tuple):
        if getattr(video, "ndim", 4) != 4 or not len(video):
            raise TachyscopeError(
                f"{name} as an array is uint8 [F, H, W, 3], got {shown(video)}: stack its frames"
            )
        pictures = _in_numpy(video)
        return SourceVideo(name, lambda at: iter(pictures[at:]), size, level, video_key(pictures))
    if not isinstance(video, Iterable):
        raise TachyscopeError(
            f"{name} is a file, a camera's device, an array, or gives frames one by one, got "
            f"{shown(video)}: try 'clip.mp4'"
        )
    frames = iter(video)
    return SourceVideo(name, lambda _: frames, size, level, "")


def comes_once(video: Any) -> bool:
    """Whether a source video cannot be rewound."""
    return video is not None and not video_key(video)


def is_camera(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except (OSError, ValueError):  # no such file, or no path at all
        return False


def video_key(video: Any) -> str:
    """The hash by which a stream recognises its source video; empty if its frames come once."""
    if isinstance(video, str | os.PathLike):
        return "" if is_camera(os.fspath(video)) else file_key(os.fspath(video))
    if not isinstance(video, np.ndarray | Tensor | list | tuple):
        return ""
    return digest(*(part for x in _in_numpy(video) for part in _of_frame(np.asarray(x))))


def _in_numpy(video: Any) -> Any:
    """A list or an array of frames, a tensor as an array."""
    if not isinstance(video, Tensor):
        return video
    if video.dtype != torch.uint8:
        raise TachyscopeError(
            f"`video` as a tensor is uint8 [F, H, W, 3], got {shown(video)}: convert it"
        )
    return video.cpu().numpy()


def _of_frame(frame: np.ndarray) -> tuple[str, bytes]:
    return f"{frame.dtype} {frame.shape}", frame.tobytes()


def file_key(path: str) -> str:
    """The hash of a file's length, beginning and end."""
    try:
        with open(path, "rb") as file:
            length = file.seek(0, os.SEEK_END)
            ends = []
            for at in (0, max(0, length - EDGE)):
                file.seek(at)
                ends.append(file.read(EDGE))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TachyscopeError(
            f"{path} cannot be read as a video ({reason.lower()}): give a video file"
        ) from error
    return digest(str(length), *ends)
