"""A process that is one rank of several, on the CPU: `python rank.py RANK RANKS FOLDER WORK`.

WORK is a function below; the tensors that it returns go to FOLDER/RANK.safetensors.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.models.toys import toy_chunks

CHUNKS = 8  # 24 latent frames: a past of 21 is full, and one of 12 for long
# named plans, of which a resident past is full soon, and stores whose codes are weighed
PLANS = {
    "dense": "dense",
    "stock": "stock",
    "lossless": "lossless",
    "balanced": "balanced cache=bank:resident=12f,host=int8",
    "fast": "fast",
    "live": "live",
    "pose": "pose",
    "similar": "similar cache=bank:resident=12f",
    "fastcar": "fastcar",
    "fast-ar": "fast-ar",
    "int4": "dense cache=window:budget=9f store=int4",
    "fp8": "fast cache=bank:resident=12f,host=native store=fp8",
    "every_k": "dense passes=every_k:k=2 replay=input:share=0.5",
}
COUNTED = ("macs", "pairs", "pairs_dense", "rows_computed", "text_pairs")
TURNS, BEFORE, AFTER = [1] * 12, 4, 2  # a chunk's actions; chunks before and after a snapshot


def model(dtype=torch.float64):
    """By float64 rounding turns no choice."""
    return toy_chunks(dtype=dtype)


def open_stream(plan, mesh=None, dtype=torch.float64, **asked):
    asked = {"prompt": "a red room", "seed": 1} | asked
    return ts.open(model(dtype), plan, mesh=mesh, **asked)


def advance(stream, chunks=CHUNKS):
    return torch.cat([stream.generate(TURNS).latents for _ in range(chunks)], 2)


def video(plan, mesh=None, **asked):
    """What a video is made of, and what it took."""
    with open_stream(plan, mesh, **asked) as stream:
        made = [stream.generate(TURNS) for _ in range(CHUNKS)]
        held = stream.session.memory.layers[0].k
        return {
            "latents": torch.cat([x.latents for x in made], 2),
            "frames": torch.from_numpy(stream.decode(made[-1]).frames),
            "work": torch.tensor([[x.stats[name] for name in COUNTED] for x in made]).sum(0),
            "held": torch.tensor(held.nbytes),
            "heads": torch.tensor(held.shape[1]),
        }


def switched(plan, mesh=None):
    with open_stream(plan, mesh) as stream:
        before = advance(stream, BEFORE)
        stream.set_prompt("a blue room")
        return {"latents": torch.cat([before, advance(stream, AFTER)], 2)}


def batch(mesh=None):
    with open_stream("fast", mesh, prompt=["a", "b c"], seed=[3, 4]) as stream:
        return {"latents": advance(stream, 2)}


def resumed(mesh, folder):
    """A video, and what comes of it where it is gone on with from a snapshot."""
    rank, plan = mesh.get_local_rank(), PLANS["balanced"]
    with open_stream(plan, mesh) as stream:
        before = advance(stream, BEFORE)
        state = stream.snapshot()
        save_file(state, folder / f"state{rank}.safetensors")
        rest = advance(stream, AFTER)
        stream.restore(state)
        again = advance(stream, AFTER)
    dist.barrier()  # every file is there
    with open_stream(plan, mesh) as stream:
        told(lambda: stream.restore(load_file(folder / f"state{1 - rank}.safetensors")))
        stream.restore(load_file(folder / f"state{rank}.safetensors"))
        anew = advance(stream, AFTER)
    whole = torch.cat([before, rest], 2)
    return {"latents": whole, "rest": rest, "again": again, "anew": anew}


def told(call):
    """Print what an error says."""
    try:
        call()
    except TachyscopeError as fault:
        print(fault, file=sys.stderr, flush=True)
        return
    print("no error", file=sys.stderr, flush=True)


def videos(mesh, folder):
    """All that two ranks make in one process each, by what it is."""
    made = {plan: video(text, mesh) for plan, text in PLANS.items()}
    made |= {"float32": video("fast", mesh, dtype=torch.float32)}
    made |= {f"{plan}, switched": switched(plan, mesh) for plan in ("fast", "fast-ar")}
    made |= {"batch": batch(mesh), "resumed": resumed(mesh, folder)}
    faults(mesh)
    return {f"{kind}.{name}": x for kind, one in made.items() for name, x in one.items()}


def faults(mesh):
    """What is refused, an error a line."""
    rank = mesh.get_local_rank()
    told(lambda: open_stream("fast", mesh, seed=rank))
    told(lambda: open_stream("dense cache=merge:heads=shared,budget=9f", mesh))
    told(lambda: ts.open(ts.load("toy-tokens"), "fast", mesh=mesh))
    told(lambda: open_stream("fast", "cpu"))
    with open_stream("fast", mesh) as stream:
        told(lambda: stream.step("w" if rank else "a"))


def dies(mesh, folder):
    """Rank 1 ends in the midst of a video."""
    with open_stream("fast", mesh) as stream:
        advance(stream, 1)
        if mesh.get_local_rank():
            os._exit(9)
        advance(stream, 2)
    return {}


def hangs(mesh, folder):
    """Rank 1 does not answer."""
    with open_stream("fast", mesh) as stream:
        advance(stream, 1)
        if mesh.get_local_rank():
            time.sleep(60)
        advance(stream, 2)
    return {}


def main(rank, ranks, folder, work, patience="60"):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks,
        timeout=timedelta(seconds=int(patience)),
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (ranks,))
    try:
        made = globals()[work](mesh, folder)
    except TachyscopeError as fault:
        print(fault, file=sys.stderr, flush=True)
        os._exit(2)
    save_file(made, folder / f"{rank}.safetensors")
    dist.destroy_process_group()  # its threads abort an interpreter that ends under them


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
