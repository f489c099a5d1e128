"""The ranks that torchrun started, which make one video."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from tachyscope.core.errors import TachyscopeError, TachyscopeWarning

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WAIT = timedelta(minutes=5)  # for a rank that is late, before all of them end


class Joined(NamedTuple):
    """This process among the ranks; alone unless torchrun started it."""

    device: str
    mesh: DeviceMesh | None = None
    first: bool = True  # whether it writes and prints


def count() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def check_alone(verb: str) -> None:
    """Raise if torchrun started several processes of a verb that runs in one."""
    if count() > 1:
        raise TachyscopeError(
            f"{verb} runs in one process, and torchrun started {count()}: start generate with it, "
            f"or {verb} without"
        )


@contextmanager
def joined(device: str) -> Iterator[Joined]:
    """This process among the ranks that torchrun started, each on a GPU of its own."""
    if count() == 1:
        yield Joined(device)
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    kind, _, number = device.partition(":")
    if number:
        raise TachyscopeError(
            f"{count()} ranks take a GPU each, got `device` {device}: write cuda, and choose GPUs "
            f"by CUDA_VISIBLE_DEVICES"
        )
    if kind == "cuda":
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise TachyscopeError(
                f"rank {local} of this machine finds {there} GPUs: start as many ranks as there "
                f"are GPUs"
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=WAIT)
    mesh = init_device_mesh(kind, (count(),))
    first = mesh.get_local_rank() == 0
    with warnings.catch_warnings():
        if not first:  # the first one prints them
            warnings.simplefilter("ignore", TachyscopeWarning)
        yield Joined(device, mesh, first)
    # not after an error: it would wait for ranks that may be gone
    dist.destroy_process_group()
