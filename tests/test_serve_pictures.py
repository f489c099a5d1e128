"""Pictures that clients upload: what decodes to more than it is, and what a phone makes."""

import io
import struct
import time
import zlib

import numpy as np
import pytest
from faults import refused
from PIL import Image

from tachyscope.serve.picture import SCANS, decode

LEFT, RIGHT = (200, 0, 0), (0, 0, 200)


def halves(size=(32, 48)):
    """Red on the left and blue on the right."""
    frame = np.zeros((*size, 3), np.uint8)
    frame[:, : size[1] // 2], frame[:, size[1] // 2 :] = LEFT, RIGHT
    return frame


def file_of(frame, kind="JPEG", **options):
    file = io.BytesIO()
    Image.fromarray(frame).save(file, kind, **options)
    return file.getvalue()


def with_scans(data, more):
    """A progressive JPEG with its last scan so many times more."""
    at = data.rindex(b"\xff\xda")
    return data[:at] + data[at:-2] * more + data[at:]


def test_a_jpeg_of_thousands_of_scans_is_refused_before_it_is_decoded():
    progressive = file_of(np.zeros((512, 512, 3), np.uint8), progressive=True)
    assert decode(progressive, (8, 8)).shape == (8, 8, 3)
    assert decode(with_scans(progressive, 20), (8, 8)).shape == (8, 8, 3)
    bomb, begun = with_scans(progressive, 20_000), time.process_time()
    refused(lambda: decode(bomb, (8, 8)), "a picture is a JPEG, PNG or WebP")
    assert len(bomb) < 500_000 and bomb.count(b"\xff\xda") > SCANS
    assert time.process_time() - begun < 1  # decoded it takes half a minute of a core


@pytest.mark.parametrize(("orientation", "turned"), [(1, 0), (3, 2), (6, 3), (8, 1)])
def test_a_picture_is_shown_upright_as_its_phone_says(orientation, turned):
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying = np.rot90(halves((64, 64)), -turned)  # as the sensor saw it
    upright = decode(file_of(lying, quality=95, exif=exif), (64, 64))
    assert np.abs(upright.astype(int) - halves((64, 64))).mean() < 8


def test_of_an_animation_the_first_picture_is_taken():
    first, second = (Image.fromarray(x) for x in (halves(), halves()[:, ::-1].copy()))
    for kind in ("PNG", "WEBP"):
        file = io.BytesIO()
        first.save(file, kind, save_all=True, append_images=[second] * 20, lossless=True)
        assert np.array_equal(decode(file.getvalue(), (32, 48)), halves())


def test_a_small_file_of_a_huge_picture_is_refused_by_its_header():
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    png = bytearray(file_of(np.zeros((8, 8, 3), np.uint8), "PNG"))
    png[16:29] = head
    png[29:33] = struct.pack(">I", zlib.crc32(bytes(png[12:29])))
    refused(lambda: decode(bytes(png), (8, 8)), "at most 4,194,304 pixels")
