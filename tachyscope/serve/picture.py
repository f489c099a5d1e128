"""Pictures that clients send: one that a session begins with, and those of a camera."""

from __future__ import annotations

import base64
import io

import numpy as np

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.video import resize_frames

KINDS = ("JPEG", "PNG", "WEBP")
PIXELS = 2**22
SCAN = b"\xff\xda"  # begins a scan of a JPEG; each decodes the whole picture once more
SCANS = 64


def decode(data: bytes, size: tuple[int, int]) -> np.ndarray:
    """A client's picture, cut and scaled to uint8 [H, W, 3] of that size."""
    from PIL import Image, ImageOps  # an engine without clients needs none

    try:
        picture = Image.open(io.BytesIO(data), formats=KINDS)
        if picture.width * picture.height > PIXELS:
            raise ValueError
        if picture.format == "JPEG" and data.count(SCAN) > SCANS:
            raise ValueError
        upright = ImageOps.exif_transpose(picture)  # a phone's pictures may lie on their side
        frame = np.array(upright.convert("RGB"), np.uint8)
    except Exception:  # whatever a damaged file leads to
        raise TachyscopeError(
            f"a picture is a JPEG, PNG or WebP of at most {PIXELS:,} pixels, got something else"
        ) from None
    return frame if frame.shape[:2] == size else resize_frames(frame[None], *size)[0]


def read_picture(text: str, size: tuple[int, int]) -> np.ndarray:
    """A file in base64 as frames uint8 [1, H, W, 3] of a size."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise TachyscopeError("an image is a file in base64, got something else") from None
    return decode(data, size)[None]
