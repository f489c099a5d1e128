"""Frames as an H.264 stream, a packet each: what WebCodecs' VideoDecoder takes."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
from av.video.frame import PictureType
from av.video.reformatter import ColorRange

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.video import BT709

GOP = 240  # frames between key frames, at most


def check_size(height: int, width: int) -> None:
    """Raise where H.264 cannot hold frames of this size: its chroma has half of each side."""
    if height % 2 or width % 2:
        raise TachyscopeError(
            f"H.264 takes frames of even sides, got {height}x{width}: take format jpeg"
        )


class H264:
    """One lane's encoder, without delay: each frame gives its packet at once.

    Packets are Annex B; parameter sets come with every key frame.
    """

    def __init__(self, fps: float, quality: int) -> None:
        """`quality` is from 1 to 100, as of a JPEG."""
        self._fps = Fraction(fps).limit_denominator(1001)
        self._crf = min(51, round(52 - 0.4 * quality))
        self._codec: av.VideoCodecContext | None = None
        self._count = 0
        self.key = True  # whether the next frame must be a key frame

    def encode(self, frame: np.ndarray) -> tuple[bytes, bool]:
        """A frame uint8 [H, W, 3] as a packet, and whether it is a key frame."""
        if self._codec is None:
            self._codec = self._open(frame.shape[0], frame.shape[1])
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24").reformat(
            format="yuv420p", dst_colorspace=BT709, dst_color_range=ColorRange.MPEG
        )
        picture.pts, picture.time_base = self._count, 1 / self._fps
        # another thread may ask for one more while this frame is encoded
        wanted, self.key = self.key, False
        picture.pict_type = PictureType.I if wanted else PictureType.NONE
        self._count += 1
        packets = self._codec.encode(picture)
        if len(packets) != 1:
            raise RuntimeError(f"the encoder made {len(packets)} packets of a frame")
        return bytes(packets[0]), packets[0].is_keyframe

    def _open(self, height: int, width: int) -> av.VideoCodecContext:
        check_size(height, width)
        codec = av.CodecContext.create("libx264", "w")
        assert isinstance(codec, av.VideoCodecContext)
        codec.width, codec.height, codec.pix_fmt = width, height, "yuv420p"
        codec.framerate, codec.time_base = self._fps, 1 / self._fps
        codec.thread_count = 1  # the others make chunks
        codec.colorspace = codec.color_primaries = codec.color_trc = BT709
        codec.color_range = ColorRange.MPEG
        codec.gop_size = GOP
        codec.options = {
            "preset": "superfast",
            "tune": "zerolatency",
            "profile": "main",
            "crf": str(self._crf),
            "forced-idr": "1",
        }
        return codec
