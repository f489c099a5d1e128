"""What passes over drafts cost at full size: whole frames by the draft engine.

Weights are random, so that what they accept means nothing. Even drafts that were drawn before with
the same noise are refuted: such layers amplify what bfloat16 rounds. A pass costs the same whatever
it settles.
"""

from __future__ import annotations

import statistics

import torch

from tachyscope.core.plan import Plan
from tachyscope.core.session import Session
from tachyscope.decode.drafts import DraftEngine
from tachyscope.io.calibration import Calibration
from tachyscope.io.results import Document
from tachyscope.models.vila_u.model import VilaModel
from tachyscope_lab.bench.device_clock import milliseconds


@torch.inference_mode()
def bench_drafts(
    model: VilaModel,
    plan: Plan,
    rounds: int,
    *,
    lengths: tuple[int, ...],
    frame: int,
    frames: int,
    calibration: Calibration | None = None,
    times: int = 10,
) -> Document:
    """Milliseconds of a pass over a plan's drafts in a frame: in frames made by them, and apart."""
    shape, device = model.shape(), model.device
    session = Session(
        shape, plan, model.rope(shape), latent_frames=frames, lengths=lengths, device=device,
        dtype=model.dtype, calibration=calibration,
    )  # fmt: skip
    for layer in session.memory.layers:
        layer.k.normal_()
        layer.v.normal_()
        layer.log_count.zero_()
        for name in {"error", "input"} & layer.own["replay"].keys():
            layer.own["replay"][name].normal_()
    session.memory.replay.ready.add(0)
    session.memory.latent_frame = session.memory.chunk = frame
    session.memory.past = session.memory.total_entries = (
        session.memory.prompt + frame * shape.tokens_per_frame
    )
    engine = DraftEngine(model.decode_parts(), session, graph=device.type == "cuda")
    noise = torch.empty_like(engine.engine.noise).exponential_()
    hidden = torch.randn_like(engine.engine.hidden)

    def begin() -> None:
        session.memory.now, session.memory.features.hidden = 0, hidden.clone()

    begin()
    dense = engine.engine.frame(noise)

    def whole_frame() -> None:
        begin()
        engine.frame(noise)

    session.memory.features.codes = dense
    whole_frame()
    equal = (session.memory.features.codes == dense).double().mean()
    whole_frame()
    size, whole = engine.size, engine.engine.neurons is None
    parts = {"trunk": engine.trunks[size, whole], "depth": engine.depths[size]}
    out: Document = {
        "tokens": size,
        "entries": session.memory.past,
        "passes_a_frame": engine.passes,
    }
    out["equal_codes"] = float(equal)
    # the frame's last pass was at its last place, behind which no more tokens fit
    engine.engine.place.zero_()
    engine.engine.slot.fill_(session.memory.past)
    for name, run in parts.items():
        takes = [milliseconds(run.replay, times, device) for _ in range(rounds)]
        out |= {f"{name}_ms": statistics.median(takes), f"{name}_takes_ms": [[t] for t in takes]}
    takes = [milliseconds(whole_frame, 1, device) / engine.passes for _ in range(rounds)]
    out |= {"step_ms": statistics.median(takes), "step_takes_ms": [[t] for t in takes]}
    return out
