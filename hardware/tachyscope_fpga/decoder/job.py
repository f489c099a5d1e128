"""What the decoder asks of a core, and the phases that a core goes through."""

from __future__ import annotations

import enum

from amaranth.hdl import signed
from amaranth.lib import data

from tachyscope_fpga.decoder.model import DecoderShape
from tachyscope_fpga.parts.fixed import index
from tachyscope_fpga.parts.streamers import ADDRESS_BITS

THRESHOLD_BITS = 48


class Work(enum.IntEnum):
    """What a job asks for."""

    ATTEND = 0
    MLP = 1
    NORM = 2


class Phase(enum.IntEnum):
    """What a core does in a cycle; each has a counter."""

    IDLE = 0
    PROJECT = 1  # norm, q, k, v
    STORE = 2  # the new entry goes to memory
    GATE = 3
    ATTEND = 4  # attention and its output projection
    MLP = 5
    NORM = 6


def job_layout(shape: DecoderShape) -> data.StructLayout:
    return data.StructLayout(
        {
            "work": Work,
            "index": index(shape.context),
            "slot": 16,  # row * layers + layer
            "gate": 1,
            "threshold": signed(THRESHOLD_BITS),
            "sink": ADDRESS_BITS,
            "window": ADDRESS_BITS,
        }
    )
