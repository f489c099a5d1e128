"""Measures of pictures, against values made by hand."""

import math
import tracemalloc

import numpy as np
import pytest

from tachyscope.core.errors import TachyscopeError
from tachyscope.measure.quality import Quality, contrast, detail, motion, psnr


def even(level, frames=1, size=(8, 8)):
    return np.full((frames, *size, 3), level, np.uint8)


def noise(frames=4, size=(12, 16), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (frames, *size, 3), dtype=np.uint8)


def summary_of(frames, reference=None):
    quality = Quality()
    quality.add(frames, reference)
    return quality.summary()


def test_psnr_is_20_log_255_over_the_rms_error():
    assert psnr(even(100), even(101)) == pytest.approx(48.1308036)  # 20 log10 255
    assert psnr(even(0), even(255)) == pytest.approx(0)
    assert psnr(even(200), even(190)) == pytest.approx(28.1308036)
    one = even(0, size=(10, 10))
    one[0, 3, 4, 1] = 255  # one of 300 values
    assert psnr(one, even(0, size=(10, 10))) == pytest.approx(10 * math.log10(300))


def test_psnr_is_of_each_frame_and_does_not_care_for_order():
    a, b = noise(seed=1), noise(seed=2)
    b[2] = a[2]
    values = psnr(a, b)
    assert values.shape == (4,) and values[2] == 100.0
    np.testing.assert_array_equal(values, psnr(b, a))
    error = np.square(a.astype(np.float64) - b).mean((1, 2, 3))
    np.testing.assert_allclose(values[[0, 1, 3]], 10 * np.log10(255**2 / error[[0, 1, 3]]))


def test_equal_frames_have_a_hundred_decibels():
    assert psnr(noise(), noise()).tolist() == [100.0] * 4


def test_detail_is_the_laplacian_by_hand():
    point = even(0, size=(5, 5))
    point[0, 2, 2] = 90  # inside 3 x 3: 360 once, 90 four times
    assert detail(point) == pytest.approx(720 / 9)
    slope = np.broadcast_to(np.arange(10, dtype=np.uint8)[:, None], (1, 6, 10, 3))
    assert detail(slope) == pytest.approx(0)


def test_blur_lowers_sharpness_and_the_picture_itself_has_one():
    a = noise()
    half = ((a[:, :, :-1].astype(int) + a[:, :, 1:]) // 2).astype(np.uint8)
    assert summary_of(a, a)["sharpness"] == 1.0
    assert summary_of(half, a[:, :, 1:])["sharpness"] < 0.8
    assert summary_of(even(3), even(9))["sharpness"] == 1.0
    assert summary_of(a, even(9, 4, (12, 16)))["sharpness"] == math.inf


def test_motion_is_the_mean_change_and_goes_on_over_chunks():
    frames = np.concatenate([even(10), even(13), even(11), even(11)])
    assert motion(frames).tolist() == [3, 2, 0]
    assert motion(frames[2:], frames[1]).tolist() == [2, 0]
    assert motion(np.concatenate([even(255), even(0)])).tolist() == [255]
    assert motion(even(5)).tolist() == []


def test_a_still_picture_is_frozen_and_a_moving_one_is_not():
    still = np.repeat(noise(1), 5, 0)
    assert summary_of(still)["frozen_frames"] == 4
    assert summary_of(noise(5))["frozen_frames"] == 0
    still[4] ^= 1  # by one level, everywhere
    assert summary_of(still)["frozen_frames"] == 3
    assert summary_of(noise(1))["frozen_frames"] == 0, "one frame says nothing"


def test_one_colour_is_flat_and_a_picture_is_not():
    assert summary_of(even(128, 3))["flat_frames"] == 3 and summary_of(even(0))["flat_frames"] == 1
    assert summary_of(noise())["flat_frames"] == 0
    stripe = even(100, 2)
    stripe[0, :, ::2] = 110  # a standard deviation of 5
    assert contrast(stripe) == pytest.approx([5, 0])
    assert summary_of(stripe)["flat_frames"] == 1


def test_chunks_add_up_to_the_whole():
    a, b = noise(9, seed=1), noise(9, seed=2)
    a[4] = a[3]
    a[7] = 40
    whole, parts = Quality(), Quality()
    whole.add(a, b)
    rows = [parts.add(a[i : i + 2], b[i : i + 2]) for i in range(0, 9, 2)]
    assert parts.summary() == pytest.approx(whole.summary())
    assert parts.psnrs == psnr(a, b).tolist()
    assert rows[0]["psnr_dense"] == pytest.approx(psnr(a[:2], b[:2]).mean())
    summary = parts.summary()
    assert (summary["frozen_frames"], summary["flat_frames"]) == (1, 1)
    assert summary["motion"] == pytest.approx(motion(a).mean())
    assert summary["sharpness"] == pytest.approx(detail(a).sum() / detail(b).sum())


def test_the_reference_gives_the_key_its_name():
    assert "psnr_truth" in Quality("truth").add(noise(), noise())
    alone = Quality()
    assert set(alone.add(noise())) == {"motion"}
    assert set(alone.summary()) == {"motion", "frozen_frames", "flat_frames"}


def test_a_long_video_is_not_held():
    quality = Quality()
    chunk = noise(4, (64, 64))
    tracemalloc.start()
    for _ in range(50):
        quality.add(chunk.copy(), chunk)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert quality.frames == 200
    assert held < 2 * chunk.nbytes


def test_frames_that_cannot_be_compared_are_an_error():
    with pytest.raises(
        TachyscopeError, match=r"got \[4, 12, 16, 3\] and \[3, 12, 16, 3\]: compare"
    ):
        psnr(noise(4), noise(3))
    with pytest.raises(TachyscopeError, match=r"uint8 \[F, H, W, 3\], got float32 \[1, 2, 2, 3\]"):
        psnr(np.zeros((1, 2, 2, 3), np.float32), even(0))
    with pytest.raises(TachyscopeError, match="needs 3 x 3 pixels, got 2 x 9"):
        detail(even(0, size=(2, 9)))
