"""JPEG beside H.264 as the server sends them: bytes a second, CPU time and closeness of a frame.

    python lab/scripts/bench_codecs.py --out FILE

Frames are true pictures of a walk through an Atrium room, a sixteenth of a step each, at 16 a
second, at the size of `atrium-world` and at 480x832. One thread; CPU seconds of the process.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
import time
from pathlib import Path
from statistics import median

import av
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tachyscope.io.results import Document, document, emit
from tachyscope.measure.quality import psnr
from tachyscope.models.atrium.world import make_rooms, make_starts, render, walk
from tachyscope.serve import protocol
from tachyscope.serve.h264 import H264

FPS, FRAMES, PACE = 16, 96, 1 / 16
SIZES = ((128, 128), (480, 832))
QUALITY = 85  # the server's default


def pictures(size: tuple[int, int]) -> np.ndarray:
    """A turn to the left, then a way ahead [F, H, W, 3]."""
    generator = torch.Generator().manual_seed(0)
    rooms, start = make_rooms(1, generator), make_starts(1, generator)
    actions = torch.tensor([[5] * (FRAMES // 2) + [1] * (FRAMES // 2)])  # q, then w
    poses = walk(start, actions, PACE)[0]
    frames = [
        _picture(render(rooms, pose[None], torch.zeros(1), max(size)), size) for pose in poses
    ]
    return np.stack(frames)


def _picture(x: Tensor, size: tuple[int, int]) -> np.ndarray:
    cut = (max(size) - size[0]) // 2
    rows = x[0].permute(1, 2, 0)[cut : cut + size[0], : size[1]]
    return (255 * rows).round().clamp(0, 255).to(torch.uint8).numpy()


def measure(frames: np.ndarray, kind: str) -> Document:
    """A row of one format."""
    encoder, decoder = H264(FPS, QUALITY), av.CodecContext.create("h264", "r")
    spent, sizes, shown = [], [], []
    for frame in frames:
        begun = time.process_time()
        if kind == "h264":
            data, _ = encoder.encode(frame)
        else:
            data = protocol.encode(frame, kind, QUALITY)
        spent.append(1e3 * (time.process_time() - begun))
        sizes.append(len(data))
        if kind == "h264":
            shown += [one.to_ndarray(format="rgb24") for one in decoder.decode(av.Packet(data))]
        else:
            shown.append(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    return {
        "format": kind,
        "size": list(frames.shape[1:3]),
        "quality": QUALITY,
        "kb_per_s": round(FPS * sum(sizes) / len(sizes) / 1e3, 1),
        "encode_ms_p50": round(median(spent), 2),
        "encode_ms_worst": round(max(spent), 2),
        "psnr_db": round(float(psnr(frames, np.stack(shown)).mean()), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load, rows = os.getloadavg()[0], []
    for size in SIZES:
        frames = pictures(size)
        for kind in ("jpeg", "h264"):
            measure(frames[:8], kind)  # warm
            rows.append(measure(frames, kind))
            print(rows[-1], flush=True)
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    emit(document("codecs", rows, command, load_before=load), str(options.out))


if __name__ == "__main__":
    main()
