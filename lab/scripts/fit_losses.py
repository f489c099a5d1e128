"""Put into a calibration what `replay=input` costs by layer and by budget: then it takes `loss=`.

    python lab/scripts/fit_losses.py calibration.safetensors [--worlds 4]

All is fed the true codes of rooms that evaluations do not use. First, layer by layer, tokens up to
a threshold are replayed in that layer alone: its cost is the KL from dense over the mean square of
replayed tokens' relative changes, both over all kinds of camera. Budgets weigh layers by it. Then
budgets are measured: what one loses is its KL times DB_PER_NAT, the mean over kinds of camera.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tachyscope.core.session import Session
from tachyscope.io.calibration import Calibration
from tachyscope.models.checkpoint import read_tensors, write_tensors
from tachyscope.models.registry import load
from tachyscope.models.vila_u.model import VilaModel
from tachyscope_lab.evaluation.clips import CLIPS, GIVEN, Clip, join, make_clip, true_codes
from tachyscope_lab.evaluation.replay_scores import Way, begin, begin_dense, score
from tachyscope_lab.evaluation.token_measures import divergence

SEED = 900  # of the rooms
THRESHOLD = 0.15  # up to which KL still grows with the square of changes
BUDGETS = (0.0025, 0.005, 0.0075, 0.01, 0.02)
# of frames that are made freely, which replay more than true codes do (docs/token-models.md)
DB_PER_NAT = 25.0


class Rooms:
    """A clip, what dense says of it, and the KL of plans from that."""

    @torch.inference_mode()
    def __init__(self, model: VilaModel, clip: Clip, frames: int) -> None:
        self.model, self.clip, self.frames = model, clip, frames
        self.codes, self.moves = true_codes(model, clip), clip.moves_on(model.device)
        self.start = begin_dense(model, clip, self.codes)
        self.dense: list[Tensor] = []
        self.dense = [logits for logits, _ in self.play(Way("dense"))]

    def play(self, way: Way) -> list[tuple[Tensor, dict[int, Tensor]]]:
        """Of every frame the logits, and by layer the squares of replayed tokens' changes."""
        session = begin(self.model, way, self.clip, self.codes, start=self.start)
        out = []
        for i in range(GIVEN, GIVEN + self.frames):
            actions = self.moves[i : i + 1]
            logits = score(self.model, session, self.codes[:, i : i + 1], actions)
            session.commit()
            out.append((logits, squares(session)))
        return out

    @torch.inference_mode()
    def cost(self, layer: int) -> float:
        """Nats of KL over the mean square of changes, where one layer replays."""
        played = self.play(Way(f"replay=input:threshold={THRESHOLD}", layers=(layer,)))
        square = sum(float(by_layer[layer].mean()) for _, by_layer in played)
        return max(self.divergence([x for x, _ in played]), 1e-9) / max(square / len(played), 1e-9)

    @torch.inference_mode()
    def kl(self, plan: str) -> float:
        return self.divergence([x for x, _ in self.play(Way(plan))])

    def divergence(self, logits: Sequence[Tensor]) -> float:
        pairs = zip(self.dense, logits, strict=True)
        return sum(float(divergence(a, b).mean()) for a, b in pairs) / len(self.dense)


def squares(session: Session) -> dict[int, Tensor]:
    """Of the last frame, by layer: relative changes squared, 0 where tokens were computed."""
    scores = getattr(session.memory.replay, "scores", {})
    if session.plan.replay is None:
        return {}
    ages = [layer.own["replay"]["age"][0] for layer in session.memory.layers]
    return {i: x.square() * (ages[i] > 0) for i, x in scores.items()}


def losses(kls: Sequence[float]) -> list[tuple[float, float]]:
    """Budgets and the dB that each loses, never less than a smaller one."""
    most, out = 0.0, []
    for budget, kl in zip(BUDGETS, kls, strict=True):
        most = max(most, DB_PER_NAT * kl)
        out.append((budget, most))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("calibration", type=Path, help="to be written anew")
    parser.add_argument("--worlds", type=int, default=4, help="of every kind of camera")
    parser.add_argument("--frames", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model = VilaModel.narrow(load("atrium-tokens", device=args.device), "no token model")
    clip = join([make_clip(name, args.worlds, SEED, model.config.size[0]) for name in CLIPS])
    tensors, rooms = read_tensors(args.calibration), Rooms(model, clip, args.frames)
    calibration = Calibration.of(tensors, str(args.calibration))
    cost = []
    for layer in range(model.config.layers):
        cost.append(rooms.cost(layer))
        print(f"layer {layer}: {cost[-1]:.3g} nats", flush=True)
    calibration = replace(calibration, cost=torch.tensor(cost))
    kls = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calibration.safetensors"
        write_tensors(file, calibration.tensors())
        for budget in BUDGETS:
            kls.append(rooms.kl(f"replay=input:budget={budget},file={file}"))
            print(f"budget {budget:g}: KL {kls[-1]:.4f}", flush=True)
    calibration = replace(calibration, losses=torch.tensor(losses(kls)))
    write_tensors(args.calibration, calibration.tensors())


if __name__ == "__main__":
    main()
