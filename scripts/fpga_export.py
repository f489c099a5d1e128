"""Atrium's token model as integers: export its arrays, draw frames with them, show the pictures.

    python scripts/fpga_export.py export --out out/fpga       # needs torch, as float and show do
    python scripts/fpga_export.py float --out out/fpga
    python scripts/fpga_export.py draw --out out/fpga         # the integer model: NumPy alone
    python scripts/fpga_export.py rtl --out out/fpga          # the hardware, in Verilator
    python scripts/fpga_export.py show --out out/fpga --docs docs/fpga

`export` writes trunk.npz (int8 weights, multipliers, shifts), depth.npz (the depth transformer and
the projector) and clip.npz (an unseen room: prompt, given frames' codes, actions, noise). `float`
draws with the float model; `draw` and `rtl` one computed frame and one in which the gate decides.
`rtl` draws with the hardware's states and compares each with the integer model's. `show` decodes
what was drawn, writes pictures, and prints decibels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tachyscope.fpga.decoder_core import DecoderCore
from tachyscope.fpga.decoder_model import (
    PARTS,
    DecoderModel,
    DecoderShape,
    Layer,
    Linear,
    Token,
    layer_of,
    threshold_of,
)
from tachyscope.fpga.decoder_sim import DecoderSim
from tachyscope.fpga.depth_model import DepthModel, Sampler
from tachyscope.fpga.fixed import Ints
from tachyscope.fpga.gemv import GemvArray
from tachyscope.fpga.rope import Rope
from tachyscope.fpga.top import Top

GIVEN = 4
MADE = 2  # one computed, one in which the gate decides
TAS = 0.0
Step = Callable[[Ints, Token], tuple[Ints, list[bool]]]


def export(args: argparse.Namespace) -> None:
    import torch

    from tachyscope.evaluation.clips import make_clip, true_codes
    from tachyscope.models.registry import load
    from tachyscope.models.vila_u.depth import draw_noise
    from tachyscope.models.vila_u.model import VilaModel

    model = load("atrium-tokens", dtype=torch.float32)
    assert isinstance(model, VilaModel)
    model.model.requires_grad_(False)
    config, trunk = model.config, model.model.trunk
    out = args.out
    out.mkdir(parents=True, exist_ok=True)

    found: dict[str, np.ndarray] = {}
    for i, layer in enumerate(trunk.layers):
        named = {
            name.split(".")[-2]: value.double().numpy()
            for name, value in layer.state_dict().items()
        }
        for part, linear in layer_of(named, config.head_dim)._asdict().items():
            found[f"{i}.{part}.weight"] = linear.weight.astype(np.int8)
            found[f"{i}.{part}.multiplier"] = linear.multiplier.astype(np.int16)
            found[f"{i}.{part}.shift"] = linear.shift.astype(np.int8)
    places = config.grid[0] * config.grid[1]
    rope = Rope.of(config.head_dim, config.theta, config.rope_scale)
    prompt_ids = model.encode_prompt("").ids.shape[1]
    shape = {
        "width": config.hidden,
        "inner": config.intermediate,
        "layers": config.layers,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "places": places,
        "context": prompt_ids + (GIVEN + MADE) * places,
    }
    np.savez(out / "trunk.npz", shape=json.dumps(shape), eps=config.eps, steps=rope.steps, **found)

    head, projector = model.model.head, model.model.mm_projector
    arrays = {
        "codebooks": torch.stack(
            [book.weight[:-1] for book in model.model.vae.quantizer.codebooks]
        ),
        "norm.weight": trunk.norm.weight,
        "embed_tokens": trunk.embed_tokens.weight,
        "pos_emb_d": head.pos_emb_d[0],
        "actions": projector.action_embedding.weight,
        **{f"projector.{name}": value for name, value in projector.layers.state_dict().items()},
        **{
            f"in_mlp_{n}.{name}": value
            for n in (1, 2)
            for name, value in getattr(head, f"in_mlp_{n}").state_dict().items()
        },
        **{name: value for name, value in head.head_transformer.state_dict().items()},
        **{f"classifier.{name}": value for name, value in head.classifier_mlp.state_dict().items()},
    }
    sampler = config.sampler
    np.savez(
        out / "depth.npz",
        heads=config.head.heads,
        sampler=[sampler.temperature, sampler.top_k, sampler.top_p],
        **{name: value.numpy() for name, value in arrays.items()},
    )

    clip = make_clip(args.clip, args.world + 1, 0, config.size[0])
    codes = true_codes(model, clip)[args.world]
    encoded = model.encode_prompt(clip.worlds[args.world].prompt)
    generator = torch.Generator().manual_seed(args.seed)
    noise = [
        draw_noise(generator, (1, places, config.depth, config.codes), torch.device("cpu"))[0]
        for _ in range(MADE)
    ]
    first = len(clip.actions) // 2 - GIVEN  # the made frames are the clip's own
    chosen = slice(first, first + GIVEN + MADE)
    clip_arrays = {
        "prompt": encoded.ids[0].numpy(),
        "codes": codes[chosen].flatten(1, 2).numpy(),
        "moves": np.array(clip.moves[chosen]),
        "noise": torch.stack(noise).numpy(),
        "truth": clip.frames[args.world][chosen],
    }
    np.savez(out / "clip.npz", **clip_arrays)


def load_decoder(out: Path, tas: float | None = None) -> DecoderModel:
    arrays = np.load(out / "trunk.npz")
    shape = DecoderShape(**json.loads(str(arrays["shape"])))
    kinds = ("weight", "multiplier", "shift")
    layers = []
    for i in range(shape.layers):
        parts = [
            [arrays[f"{i}.{part}.{kind}"].astype(np.int64) for kind in kinds] for part in PARTS
        ]
        layers.append(Layer(*(Linear(*part) for part in parts)))
    rope = Rope(tuple(arrays["steps"].tolist()))
    thresholds = () if tas is None else [threshold_of(tas, shape)] * shape.layers
    return DecoderModel(shape, layers, rope, float(arrays["eps"]), thresholds)


def load_depth(out: Path) -> DepthModel:
    arrays = dict(np.load(out / "depth.npz"))
    temperature, top_k, top_p = arrays.pop("sampler").tolist()
    return DepthModel(arrays, int(arrays.pop("heads")), Sampler(temperature, int(top_k), top_p))


def prefill(out: Path, model: DecoderModel, depth: DepthModel) -> tuple[Ints, int]:
    """Run the prompt and the given frames through the model: the last state, and the next index.

    What the cache holds then is kept in state.npz.
    """
    clip, file = np.load(out / "clip.npz"), out / "state.npz"
    inputs = [depth.words[word] for word in clip["prompt"]]
    for codes, move in zip(clip["codes"][:GIVEN], clip["moves"], strict=False):
        inputs += [depth.embed(place, int(move)) for place in codes]
    if file.exists():
        kept = np.load(file)
        model.kv[:], model.kv_exponents[:] = kept["kv"], kept["exponents"]
        return kept["state"], len(inputs)
    for index, x in enumerate(inputs):
        state, _ = model.step(x, Token(index, 0, False))
    np.savez(file, kv=model.kv.astype(np.int8), exponents=model.kv_exponents, state=state)
    return state, len(inputs)


def draw(
    args: argparse.Namespace, step: Step, state: Ints, index: int, depth: DepthModel, name: str
) -> dict[str, np.ndarray]:
    """One frame computed, one in which the gate decides; everything that was seen, in NAME.npz."""
    clip = np.load(args.out / "clip.npz")
    found: dict[str, list[Any]] = {"codes": [], "inputs": [], "states": [], "replayed": []}
    for frame in range(MADE):
        for place, noise in enumerate(clip["noise"][frame]):
            codes = depth.generate(state, noise)
            x = depth.embed(codes, int(clip["moves"][GIVEN + frame]))
            state, replayed = step(x, Token(index, place, frame == MADE - 1))
            index += 1
            for key, value in zip(found, (codes, x, state, replayed), strict=True):
                found[key].append(value)
            if place % 16 == 15:
                print(f"{name}: frame {frame} place {place}", flush=True)
    arrays = {key: np.array(value) for key, value in found.items()}
    np.savez(args.out / f"{name}.npz", **arrays)
    return arrays


def draw_integers(args: argparse.Namespace) -> None:
    model, depth = load_decoder(args.out, args.tas), load_depth(args.out)
    state, index = prefill(args.out, model, depth)
    scores: list[list[int]] = []

    def step(x: Ints, token: Token) -> tuple[Ints, list[bool]]:
        result = model.step(x, token)
        scores.append(list(model.scores))
        return result

    found = draw(args, step, state, index, depth, args.name or "integer")
    places = model.shape.tokens_per_frame
    tas = np.array(scores[-places:]) / threshold_of(1.0, model.shape)
    print(f"replayed by layer {found['replayed'][-places:].mean(0)} of {places} places")
    print(f"TAS quarters by layer {np.quantile(tas, (0, 0.25, 0.5, 0.75, 1), axis=0).T.round(2)}")


def draw_rtl(args: argparse.Namespace) -> None:
    model, depth = load_decoder(args.out, args.tas), load_depth(args.out)
    state, index = prefill(args.out, model, depth)
    array = GemvArray(args.lanes, args.macs)
    core = DecoderCore(model.shape, array, model.rope, model.norm.eps)
    sim = DecoderSim(Top(core), model.layers, args.out / "rtl", latency=args.latency)
    if not sim.program.exists():
        sim.build()
    sim.start(model)
    places = model.shape.tokens_per_frame
    bad = 0

    def step(x: Ints, token: Token) -> tuple[Ints, list[bool]]:
        nonlocal bad
        want, got = model.step(x, token), sim.step(x, token)
        bad += not (np.array_equal(want[0], got[0]) and want[1] == got[1])
        return got

    found = draw(args, step, state, index, depth, "rtl")
    cycles = np.array(sim.cycles).reshape(MADE, places)
    report = {
        "tokens": len(sim.cycles),
        "mismatches": bad,
        "array": [args.lanes, args.macs],
        "memory_latency": args.latency,
        "cycles_computed_frame": int(cycles[0].sum()),
        "cycles_replayed_frame": int(cycles[-1].sum()),
        "replayed_by_layer": found["replayed"][-places:].sum(0).tolist(),
        "cycles_per_cpu_second": round(sum(sim.cycles) / sim.seconds),
        "counters": sim.counts(),
    }
    sim.close()
    (args.out / "rtl.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def draw_float(args: argparse.Namespace) -> None:
    """The float model's frames: both computed, and the second with the gate."""
    import dataclasses

    import torch

    from tachyscope.models.registry import load
    from tachyscope.models.vila_u.model import Prompt, VilaModel
    from tachyscope.rollout import parse_plan
    from tachyscope.session import Session

    model = load("atrium-tokens", dtype=torch.float32)
    assert isinstance(model, VilaModel)
    clip = np.load(args.out / "clip.npz")
    never, gate = (parse_plan(model, f"replay=attentive:threshold={t}") for t in (1e9, args.tas))
    places, config = model.shape().tokens_per_frame, model.config
    for name, last in (("float-computed", never), ("float", gate)):
        shape = model.shape()
        lengths = (len(clip["prompt"]),)
        session = Session(shape, never, model.rope(shape), lengths=lengths)
        drawn = []
        with torch.inference_mode():
            model.prefill_prompt(session, Prompt(torch.from_numpy(clip["prompt"])[None], lengths))
            for codes, move in zip(clip["codes"][:GIVEN], clip["moves"], strict=False):
                latents = torch.from_numpy(codes).view(1, 1, *config.grid, -1)
                model.prefill_latents(session, latents, [int(move)])
                session.commit()
            session.meter.take()
            for frame in range(MADE):
                if frame == MADE - 1:
                    session.plan = dataclasses.replace(never, replay=last.replay)
                noise = torch.from_numpy(clip["noise"][frame])
                pos = shape.positions(session.latent_frame, 1)
                move = [int(clip["moves"][GIVEN + frame])]
                for i in range(places):
                    hidden = session.features["hidden"]
                    books = model.model.vae.quantizer
                    codes = model.model.head.generate(
                        hidden, books, config.sampler, noise[i : i + 1]
                    )
                    drawn.append(codes[0].numpy())
                    model._feed(session, codes[:, None], pos[i : i + 1], move)
                session.commit()
            row = session.meter.take()
        np.savez(args.out / f"{name}.npz", codes=np.array(drawn))
        print(name, {key: row[key] for key in ("rows_computed", "rows_replayed") if key in row})


def show(args: argparse.Namespace) -> None:
    import torch
    from PIL import Image

    from tachyscope.models.registry import load
    from tachyscope.models.vila_u.model import VilaModel
    from tachyscope.quality import psnr

    model = load("atrium-tokens", dtype=torch.float32)
    assert isinstance(model, VilaModel)
    clip = np.load(args.out / "clip.npz")
    grid, depth = model.config.grid, model.config.depth

    def decode(codes: np.ndarray) -> np.ndarray:
        latents = torch.from_numpy(codes).view(1, -1, *grid, depth)
        with torch.inference_mode():
            return model.decode_latents(None, latents)  # type: ignore[arg-type]

    truth = clip["truth"][GIVEN : GIVEN + MADE]
    rows = {"truth": truth, "true codes": decode(clip["codes"][GIVEN : GIVEN + MADE])}
    for name in ("float-computed", "float", "integer-computed", "integer", "rtl"):
        if (args.out / f"{name}.npz").exists():
            rows[name] = decode(np.load(args.out / f"{name}.npz")["codes"])
    report = {}
    for name, frames in rows.items():
        report[name] = {"dB to truth": psnr(frames, truth).round(2).tolist()}
        for other in ("float-computed", "float", "integer"):
            if name != other and other in rows and name != "truth":
                report[name][f"dB to {other}"] = psnr(frames, rows[other]).round(2).tolist()
        print(name, json.dumps(report[name]))
    args.docs.mkdir(parents=True, exist_ok=True)
    for name, frames in rows.items():
        strip = np.concatenate(list(frames), 1)
        image = Image.fromarray(strip).resize((2 * strip.shape[1], 2 * strip.shape[0]), 0)
        image.save(args.docs / f"decoder-{name.replace(' ', '-')}.png")
    (args.out / "show.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    steps = {
        "export": export,
        "float": draw_float,
        "draw": draw_integers,
        "rtl": draw_rtl,
        "show": show,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=steps)
    parser.add_argument("--out", type=Path, default=Path("out/fpga"))
    parser.add_argument("--clip", default="pan", help="of evaluation.clips.CLIPS")
    parser.add_argument("--world", type=int, default=0, help="an unseen room's number")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--tas", type=float, default=TAS, help="replay above this score")
    parser.add_argument("--name", default="", help="of what draw writes")
    parser.add_argument("--lanes", type=int, default=16, help="of the array")
    parser.add_argument("--macs", type=int, default=32, help="of the array")
    parser.add_argument("--latency", type=int, default=20, help="of the memories, in cycles")
    parser.add_argument("--docs", type=Path, default=Path("docs/fpga"), help="for the pictures")
    args = parser.parse_args()
    steps[args.what](args)


if __name__ == "__main__":
    main()
