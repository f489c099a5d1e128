"""How many places one pass of the trunk settles, by kind of camera and of draft, on atrium-tokens.

    python lab/scripts/bench_drafts.py --out drafts.json [--worlds 16] [--jobs 2] [--row NAME]

Every video is made alone, since videos of a batch share the decision, and beside others with the
same seed: `equal` is the share of codes that are the first row's own, dense's if all are made.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from itertools import islice
from typing import Any

import torch

from tachyscope.core.opening import open as open_stream
from tachyscope.io.results import check_json, document, emit
from tachyscope.models.registry import load
from tachyscope_lab.evaluation.clips import CLIPS, GIVEN, Clip, make_clip
from tachyscope_lab.evaluation.intervals import combined
from tachyscope_lab.processes import spread

MODEL = "atrium-tokens"
PLANS = {
    "dense": "dense",
    "codes, 32": "passes=draft:places=32",
    "codes, 16": "passes=draft:places=16",
    "codes, 64": "passes=draft:places=64",
    "logits, 32": "passes=draft:places=32,source=logits",
    "row, 32": "passes=draft:places=32,source=row",
    "repeat, 32 (coupled Jacobi)": "passes=draft:places=32,source=repeat",
    "codes, 32, no Jacobi": "passes=draft:places=32,jacobi=false",
    "codes, 32, neurons": "passes=draft:places=32 replay=neurons:share=0.75",
}
model: Any = None


def prepare() -> None:
    global model
    torch.set_num_threads(1)
    model = load(MODEL)


def play(task: tuple[Clip, int, int, list[str]]) -> dict[str, dict[str, float]]:
    """One world's clip by plans: passes, tokens that they ran over, seconds, equal codes."""
    clip, number, frames, names = task
    world, shown, letters = clip.worlds[0], clip.frames[0], clip.actions[0]
    results, want = {}, None
    for name in names:
        stream = open_stream(
            model, PLANS[name], prompt=world.prompt, seed=number, first=shown[:GIVEN],
            first_actions=" ".join(letters[:GIVEN]),
        )  # fmt: skip
        begun, latents, stats = time.perf_counter(), [], []
        with stream:
            for letter in letters[GIVEN : GIVEN + frames]:
                stats.append(stream.step(letter).stats)
                latents.append(stream.session.memory.latents)
        seconds, codes = time.perf_counter() - begun, torch.cat(latents, 1)
        want = codes if want is None else want
        places = codes[0, ..., 0].numel()
        drafts, right = (
            sum(x.get(key, 0.0) for x in stats) for key in ("drafts", "drafts_accepted")
        )
        results[name] = {
            "places_a_pass": places / (places - right),
            "tokens_a_place": (places - right + drafts) / places,
            "seconds_a_frame": seconds / frames,
            "equal": (codes == want).float().mean().item(),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--clip", action="append", choices=list(CLIPS), help="of all, which")
    parser.add_argument("--row", action="append", choices=list(PLANS), help="of all, which")
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    check_json(args.out)
    command = shlex.join(["python", *sys.argv])
    rows, tasks, clips = [], [], args.clip or tuple(CLIPS)
    names = args.row or list(PLANS)
    if args.jobs == 1:
        prepare()
    for camera in clips:
        clip = make_clip(camera, args.worlds)
        for number in range(args.worlds):
            each = slice(number, number + 1)
            alone = Clip(clip.worlds[each], clip.actions[each], clip.frames[each])
            tasks.append((alone, number, args.frames, names))
    played = spread(play, tasks, args.jobs, prepare)
    for camera in clips:
        results = list(islice(played, args.worlds))
        for name in names:
            values = [result[name] for result in results]
            worst = min(x["places_a_pass"] for x in values)
            rows.append(
                {
                    "model": MODEL,
                    "camera": camera,
                    "name": name,
                    "plan": PLANS[name],
                    "worlds": len(values),
                }
                | combined(values)
                | {"places_a_pass_worst": worst}
            )
            print(camera, name, rows[-1]["places_a_pass"], worst, flush=True)
        emit(document("atrium-drafts", rows, command), args.out)


if __name__ == "__main__":
    main()
