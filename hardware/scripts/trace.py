"""A replay trace for `tachyscope-fpga estimate --trace`: what a real run of atrium-tokens replayed.

    python hardware/scripts/trace.py out/trace.npz --worlds 4 --frames 2

Unseen rooms are continued together, a row each, after given frames; of every token, layer and row
the file says whether the MLP was replayed, and it holds the model's sizes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.observers import Observer
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext
from tachyscope.models.registry import load
from tachyscope.models.vila_u.model import VilaModel
from tachyscope_fpga.model.workload import Trace, Workload
from tachyscope_lab.evaluation.clips import CLIPS, GIVEN, make_clip, true_codes
from tachyscope_lab.evaluation.replay_scores import Way, begin


def workload(model: VilaModel, prompt: int, frames: int) -> Workload:
    config, head = model.config, model.transformer.head
    depth = sum(
        value.numel()
        for part in (head.head_transformer, head.classifier_mlp)
        for value in part.parameters()
        if value.ndim == 2
    )
    return Workload(
        name="atrium-tokens",
        layers=config.layers,
        width=config.hidden,
        kv_width=config.kv_heads * config.head_dim,
        inner=config.intermediate,
        tokens_per_frame=config.grid[0] * config.grid[1],
        frames=frames,
        prompt=prompt,
        depth_bytes=depth * config.depth,
        depth_weights=depth,
    )


class ReplayFlags(Observer):
    """Whether each token's MLP was replayed, layer by layer: its kept output is then older."""

    def on_open(self, session: Session) -> None:
        self.session, self.flags = session, list[np.ndarray]()

    def on_mlp(self, ctx: PassContext, x: Tensor, y: Tensor) -> None:
        age = self.session.memory.layers[ctx.layer].own["replay"]["age"][ctx.pass_index]
        self.flags.append((age[:, ctx.start + ctx.tokens - 1] > 0).cpu().numpy())


def record(session: Session, model: VilaModel, moves: list[int]) -> np.ndarray:
    """Flags [tokens, layers, rows] of one frame a move."""
    observer = ReplayFlags()
    session.watch(observer)
    for move in moves:
        model.sample(session, [move])
        session.commit()
    return np.array(observer.flags).reshape(-1, session.shape.layers, session.shape.batch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--clip", default="reversing", choices=CLIPS)
    parser.add_argument("--worlds", type=int, default=4)
    parser.add_argument("--frames", type=int, default=2, help="that are made")
    parser.add_argument("--plan", default="replay=attentive:share=0.75")
    args = parser.parse_args()
    model = load("atrium-tokens", dtype=torch.float32)
    assert isinstance(model, VilaModel)
    clip = make_clip(args.clip, args.worlds, 0, model.config.size[0])
    session = begin(model, Way(args.plan), clip, true_codes(model, clip))
    with torch.inference_mode():
        flags = record(session, model, clip.moves[GIVEN : GIVEN + args.frames, 0].tolist())
    prompt = max(model.encode_prompt(world.prompt).ids.shape[1] for world in clip.worlds)
    Trace(workload(model, prompt, GIVEN + args.frames), flags).save(args.out)
    counted = session.meter.take()
    print(f"{args.out}: {list(flags.shape)}, {flags.mean():.3f} replayed", end="")
    print(f", by layer {flags.mean((0, 2)).round(3).tolist()}")
    rows = counted["rows_replayed"] / (counted["rows_replayed"] + counted["rows_computed"])
    assert abs(rows - flags.mean()) < 1e-9, (rows, flags.mean())


if __name__ == "__main__":
    main()
