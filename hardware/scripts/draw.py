"""Atrium's token model as integers: export its arrays, draw frames with them, show the pictures.

    python hardware/scripts/draw.py export --out out/fpga       # needs torch, as float and show do
    python hardware/scripts/draw.py draw --out out/fpga         # the integer model: NumPy alone
    python hardware/scripts/draw.py rtl --out out/fpga          # the hardware, in Verilator
    python hardware/scripts/draw.py float --out out/fpga
    python hardware/scripts/draw.py show --picture docs/hardware/drawn.png --json FILE

`export` writes trunk.npz (int8 weights, multipliers, shifts), depth.npz (the depth transformer and
the projector) and clip.npz (an unseen room: prompt, given frames' codes, actions, noise), with all
sizes taken from the model. `draw` and `rtl` write one computed frame and one in which the gate
decides, above the median score of that frame unless --tas names another. `rtl` draws with the
hardware's states and compares each with the integer model's. `float` draws both frames with the
float model at that threshold. `show` decodes what was drawn into one picture with decibels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tachyscope_fpga.decoder.core import DecoderCore
from tachyscope_fpga.decoder.depth_model import DepthModel, Sampler
from tachyscope_fpga.decoder.model import (
    PARTS,
    DecoderModel,
    DecoderShape,
    Layer,
    Linear,
    Token,
    layer_of,
    threshold_of,
)
from tachyscope_fpga.decoder.top import Top
from tachyscope_fpga.parts.fixed import Ints
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.rope import Rope
from tachyscope_fpga.tools.decoder_sim import DecoderSim

GIVEN = 4
MADE = 2  # one computed, one in which the gate decides
STATE = ("kv", "kv_exponents", "kept", "valid")  # of a DecoderModel
Step = Callable[[Ints, Token], tuple[Ints, list[bool]]]
Drawn = dict[str, np.ndarray]


def export(args: argparse.Namespace) -> None:
    import torch

    from tachyscope.models.registry import load
    from tachyscope.models.token_model import draw_noise
    from tachyscope.models.vila_u.model import VilaModel
    from tachyscope_lab.evaluation.clips import make_clip, true_codes

    model = load("atrium-tokens", dtype=torch.float32)
    assert isinstance(model, VilaModel)
    model.transformer.requires_grad_(False)
    config, trunk = model.config, model.transformer.trunk
    out = args.out
    out.mkdir(parents=True, exist_ok=True)

    tensors: dict[str, np.ndarray] = {}
    for i, layer in enumerate(trunk.layers):
        named = {
            name.split(".")[-2]: value.double().numpy()
            for name, value in layer.state_dict().items()
        }
        for part, linear in layer_of(named, config.head_dim)._asdict().items():
            tensors[f"{i}.{part}.weight"] = linear.weight.astype(np.int8)
            tensors[f"{i}.{part}.multiplier"] = linear.multiplier.astype(np.int16)
            tensors[f"{i}.{part}.shift"] = linear.shift.astype(np.int8)
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
        "tokens_per_frame": places,
        "context": prompt_ids + (GIVEN + MADE) * places,
    }
    np.savez(
        out / "trunk.npz", shape=json.dumps(shape), eps=config.eps, steps=rope.steps, **tensors
    )

    head, projector = model.transformer.head, model.transformer.mm_projector
    arrays = {
        "codebooks": torch.stack(
            [book.weight[:-1] for book in model.transformer.vae.quantizer.codebooks]
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
    first = clip.length // 2 - GIVEN  # the made frames are the clip's own
    chosen = slice(first, first + GIVEN + MADE)
    clip_arrays = {
        "prompt": encoded.ids[0].numpy(),
        "codes": codes[chosen].flatten(1, 2).numpy(),
        "moves": clip.moves[chosen, args.world].numpy(),
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
    args: argparse.Namespace, step: Step, state: Ints, index: int, depth: DepthModel, frame: int
) -> Drawn:
    """A frame, token by token; in the last one the gate may decide. All that was seen is kept."""
    clip = np.load(args.out / "clip.npz")
    recorded: dict[str, list[Any]] = {"codes": [], "inputs": [], "states": [], "replayed": []}
    for place, noise in enumerate(clip["noise"][frame]):
        codes = depth.generate(state, noise)
        x = depth.embed(codes, int(clip["moves"][GIVEN + frame]))
        state, replayed = step(x, Token(index + place, place, frame == MADE - 1))
        for key, value in zip(recorded, (codes, x, state, replayed), strict=True):
            recorded[key].append(value)
        if place % 64 == 63:
            print(f"{args.what}: frame {frame} place {place}", flush=True)
    return {key: np.array(value) for key, value in recorded.items()}


def save(args: argparse.Namespace, name: str, frames: Sequence[Drawn], tas: float) -> None:
    both = {key: np.concatenate([frame[key] for frame in frames]) for key in frames[0]}
    np.savez(args.out / f"{name}.npz", tas=tas, **both)


def draw_integers(args: argparse.Namespace) -> None:
    """A computed frame, then the next one twice: computed, and with the gate."""
    model, depth = load_decoder(args.out), load_depth(args.out)
    shape = model.shape
    state, index = prefill(args.out, model, depth)
    scores: list[list[int]] = []

    def step(x: Ints, token: Token) -> tuple[Ints, list[bool]]:
        result = model.step(x, token)
        scores.append(list(model.scores))
        return result

    first = draw(args, step, state, index, depth, 0)
    state, index = first["states"][-1], index + shape.tokens_per_frame
    before = {name: getattr(model, name).copy() for name in STATE}
    computed = draw(args, step, state, index, depth, 1)
    scored = np.array(scores[-shape.tokens_per_frame :]) / threshold_of(1.0, shape)
    tas = float(np.median(scored)) if args.tas is None else args.tas
    save(args, "integer-computed", (first, computed), tas)
    for name, value in before.items():
        setattr(model, name, value)
    model.thresholds = (threshold_of(tas, shape),) * shape.layers
    gated = draw(args, step, state, index, depth, 1)
    save(args, "integer", (first, gated), tas)
    quarters = np.quantile(scored, (0, 0.25, 0.5, 0.75, 1), axis=0).T.round(2).tolist()
    print(f"TAS by layer, in quarters: {quarters}; replayed above {tas:.3f}")
    print(f"share of the places that replayed, by layer: {gated['replayed'].mean(0)}")


def draw_rtl(args: argparse.Namespace) -> None:
    drawn = np.load(args.out / "integer.npz")
    model, depth = load_decoder(args.out, float(drawn["tas"])), load_depth(args.out)
    state, index = prefill(args.out, model, depth)
    array = GemvArray(args.lanes, args.macs)
    core = DecoderCore(model.shape, array, model.rope, model.norm.eps)
    sim = DecoderSim(Top(core), model.layers, args.out / "rtl", latency=args.latency)
    sim.build()
    sim.start(model)
    bad = 0

    def step(x: Ints, token: Token) -> tuple[Ints, list[bool]]:
        nonlocal bad
        want, got = model.step(x, token), sim.step(x, token)
        bad += not (np.array_equal(want[0], got[0]) and want[1] == got[1])
        if len(sim.cycles) % 16 == 0:
            print(f"{len(sim.cycles)} tokens in hardware, {bad} unlike the integers", flush=True)
        return got

    frames = []
    for frame in range(MADE):
        frames.append(draw(args, step, state, index, depth, frame))
        state, index = frames[-1]["states"][-1], index + model.shape.tokens_per_frame
    save(args, "rtl", frames, float(drawn["tas"]))
    cycles = np.array(sim.cycles).reshape(MADE, -1).sum(1).tolist()
    report = {
        "shape": asdict(model.shape),
        "tas": float(drawn["tas"]),
        "tokens": len(sim.cycles),
        "mismatches": bad,
        "codes_unlike_the_integer_models": int(
            (np.concatenate([frame["codes"] for frame in frames]) != drawn["codes"]).sum()
        ),
        "lanes": args.lanes,
        "macs": args.macs,
        "memory_latency": args.latency,
        "cycles_computed_frame": cycles[0],
        "cycles_replayed_frame": cycles[-1],
        "replayed_by_layer": frames[-1]["replayed"].mean(0).round(4).tolist(),
        "cycles_per_cpu_second": round(sum(sim.cycles) / sim.seconds),
        "counters": sim.counts(),
    }
    sim.close()
    (args.out / "rtl.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    if bad:
        raise SystemExit(f"{bad} of {len(sim.cycles)} tokens differ from the integer model's")


def draw_float(args: argparse.Namespace) -> None:
    """The float model's frames: both computed, and the second with the gate."""
    import torch

    from tachyscope.core.rollout import parse_plan
    from tachyscope.core.session import Session
    from tachyscope.models.registry import load
    from tachyscope.models.token_model import Prompt
    from tachyscope.models.vila_u.model import VilaModel

    model = load("atrium-tokens", dtype=torch.float32)
    assert isinstance(model, VilaModel)
    clip = np.load(args.out / "clip.npz")
    tas = float(np.load(args.out / "integer.npz")["tas"])
    never, gate = (parse_plan(model, f"replay=attentive:threshold={t}") for t in (1e9, tas))
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
                    session.memory.replay.policy = last.replay
                noise = torch.from_numpy(clip["noise"][frame])
                pos = shape.positions(session.memory.latent_frame, 1)
                move = [int(clip["moves"][GIVEN + frame])]
                for i in range(places):
                    hidden = session.memory.features.last_state()
                    books = model.transformer.vae.quantizer
                    codes = model.transformer.head.generate(
                        hidden, books, config.sampler, noise[i : i + 1]
                    )
                    drawn.append(codes[0].numpy())
                    model.feed(session, codes[:, None], pos[i : i + 1], move)
                session.commit()
            row = session.meter.take()
        replayed = row["rows_replayed"] / (places * config.layers)
        if (replayed > 0) != (last is gate):
            raise SystemExit(f"{name}: {replayed:.3f} of the last frame's MLPs were replayed")
        np.savez(args.out / f"{name}.npz", codes=np.array(drawn), replayed=replayed)
        print(f"{name}: {replayed:.3f} of the last frame's MLPs were replayed")


def show(args: argparse.Namespace) -> None:
    import torch
    from matplotlib import pyplot

    from tachyscope.io.results import document, emit
    from tachyscope.measure.quality import psnr
    from tachyscope.models.registry import load
    from tachyscope.models.vila_u.model import VilaModel

    model = load("atrium-tokens", dtype=torch.float32)
    assert isinstance(model, VilaModel)
    clip = np.load(args.out / "clip.npz")
    grid, depth = model.config.grid, model.config.depth

    def decode(codes: np.ndarray) -> np.ndarray:
        latents = torch.from_numpy(codes).view(1, -1, *grid, depth)
        with torch.inference_mode():
            return model.decode_latents(None, latents)  # type: ignore[arg-type]

    truth = clip["truth"][GIVEN : GIVEN + MADE]
    names = {
        "float-computed": "float, computed",
        "float": "float, replayed",
        "integer-computed": "int8, computed",
        "integer": "int8, replayed",
    }
    if (args.out / "rtl.npz").exists():
        names["rtl"] = names.pop("integer") + "\n(hardware in Verilator)"
    drawings = {name: np.load(args.out / f"{name}.npz") for name in names}
    frames = {name: decode(drawn["codes"]) for name, drawn in drawings.items()}
    figure, axes = pyplot.subplots(MADE, len(names) + 1, figsize=(11, 5.6), layout="constrained")
    rows = []
    for column, (name, title) in enumerate([("truth", "truth"), *names.items()]):
        drawn = truth if name == "truth" else frames[name]
        for number, axis in enumerate(axes[:, column]):
            axis.imshow(drawn[number], interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            if not number:
                axis.set_title(title, fontsize=10)
            if not column:
                kind = "the gate decides" if number == MADE - 1 else "computed by all"
                axis.set_ylabel(f"frame {number + 1}: {kind}", fontsize=9)
        if name == "truth":
            continue
        to_truth, to_float = (
            psnr(drawn, other).round(2).tolist() for other in (truth, frames["float-computed"])
        )
        flags = drawings[name]["replayed"]  # of all tokens, or of the last frame the share alone
        share = float(flags if not flags.ndim else flags[-len(flags) // MADE :].mean())
        rows.append({"frames": name, "replayed": round(share, 3), "db_to_truth": to_truth})
        if name != "float-computed":
            rows[-1]["db_to_float_computed"] = to_float
        for number, axis in enumerate(axes[:, column]):
            text = f"{to_truth[number]:.1f} dB to the truth"
            if (drawn[number] == frames["float-computed"][number]).all():
                text += "\nequal to float, computed" if name != "float-computed" else ""
            else:
                text += f"\n{to_float[number]:.1f} dB to float, computed"
            axis.set_xlabel(text, fontsize=9)
        print(json.dumps(rows[-1]))
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture, dpi=110)
    if args.json:
        report = args.out / "rtl.json"
        rtl = json.loads(report.read_text()) if report.exists() else None
        command = f"hardware/scripts/draw.py export, draw, rtl, float, show --clip {args.clip} "
        command += f"--world {args.world} --seed {args.seed}"
        emit(document("fpga-draw", rows, command, model="atrium-tokens", rtl=rtl), args.json)


def main() -> None:
    steps = {
        "export": export,
        "draw": draw_integers,
        "rtl": draw_rtl,
        "float": draw_float,
        "show": show,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=steps)
    parser.add_argument("--out", type=Path, default=Path("out/fpga"))
    parser.add_argument("--clip", default="reversing", help="of evaluation.clips.CLIPS")
    parser.add_argument("--world", type=int, default=0, help="an unseen room's number")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--tas", type=float, help="replay above this score")
    parser.add_argument("--lanes", type=int, default=16, help="of the array")
    parser.add_argument("--macs", type=int, default=32, help="of the array")
    parser.add_argument("--latency", type=int, default=20, help="of the memories, in cycles")
    parser.add_argument("--picture", type=Path, default=Path("out/fpga/drawn.png"))
    parser.add_argument("--json", help="write show's rows to this file")
    args = parser.parse_args()
    steps[args.what](args)


if __name__ == "__main__":
    main()
