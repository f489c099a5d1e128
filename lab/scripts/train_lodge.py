"""Trains Lodge's models: the autoencoder, then the world model in two phases.

    python3 lab/scripts/train_lodge.py --out out/lodge --seconds 570 --tar lodge.tar.gz
    python lab/scripts/train_lodge.py --out DIR --small        # the same, tiny, on a CPU

Three phases, each in a run of its own or one after the other, run as run_h200.py runs its parts:
one that ended is not run again. What exact resumption needs (110 MB) stays in OUT/carried; --tar
has the weights in float16, logs and sheets. On another machine the next phase resumes from these
weights in OUT. Walk through the result by

    tachyscope play tachyscope_lab.worlds.lodge.model:load --weights out/lodge/world

What to expect. Atrium's model, 9 layers of 256, took 1.0 M tokens/s on an H200 (its log is
docs/atrium/world.jsonl), and its next frame from new places had 27.2 dB after 2,043 steps of
131,072 tokens, 29.2 after 6,791. By count 8 layers take 0.12 s a step: 2,200 steps in a phase, of
which 60 s are for compiling, 30 for the first clips, 90 for the sheets and 30 % of the rest for
drawing. No GPU has drawn Lodge yet: drawing is held to its share of the time, and `drawn_s` and
`drawing` in the logs tell its rate. At 2,000 frames/s a phase sees 2,000 clips of 128 frames.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from run_h200 import Part, run_parts

SECONDS = 560  # of a phase; training ends before, by its own clock
AUTOENCODER = "lab/scripts/train_lodge_autoencoder.py --out {out} --state {kept}/autoencoder"
WORLD = (
    "lab/scripts/train_atrium_world.py --world lodge --autoencoder {folder}/autoencoder "
    "--out {folder}/world --state {kept}/world"
)
RESUME = "--resume {kept}/world"  # or the weights in --out, on another machine
# rollouts of its own come later: first a model that draws the next frame
LONG = "--minutes 9.2 --reserve 90 --pool 2048 --fresh 16 --every 10 --drawing 0.3 --rolled 0"
LONG += " --worlds 4 --runs teacher dense"
TINY = "--device cpu --no-compile --steps 1 --pool 2"
SMALL = f"{TINY} --width 64 --layers 1 --row 8 --rows 1 --fresh 2 --fill 0 --worlds 1"
SMALL += " --runs teacher --judge-frames 6"
PHASES = (
    Part(
        "autoencoder", SECONDS, "256 x 256 pixels to 16 x 16 latents of 32 numbers, and back",
        (f"{AUTOENCODER} --minutes 9.2",),
        small=(f"{AUTOENCODER} {TINY} --batch 2 --judged 2",),
    ),
    Part(
        "world_first", SECONDS, "clips of 128 frames: many houses",
        (f"{WORLD} {LONG} --row 128 --rows 8 --finish 0.5 --decay 0",),
        small=(f"{WORLD} {SMALL} --finish 0.5",),
    ),
    Part(
        "world_second", SECONDS, "clips of 256 frames: a long past",
        (f"{WORLD} {LONG} --row 256 --rows 4 --begin 0.5 --decay 0.3 {RESUME}",),
        small=(f"{WORLD} {SMALL} --begin 0.5 {RESUME}",),
    ),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that runs share")
    parser.add_argument("--seconds", type=float, default=1e9, help="of this run")
    parser.add_argument("--only", default="", help="a phase, again")
    parser.add_argument("--tar", type=Path, help="one file of all that is in OUT, or its pieces")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(argv)
    phases = [phase for phase in PHASES if args.only in ("", phase.name)]
    if not phases:
        parser.error(f"no phase {args.only!r}; there are: {', '.join(x.name for x in PHASES)}")
    named = bool(args.only)
    return run_parts(phases, args.out.resolve(), args.seconds, args.tar, args.small, named)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
