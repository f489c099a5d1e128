"""Verilator around any part: beats from a file in, beats out compared, stalls on every port.

A hundred times faster than Amaranth's simulator, for tens of thousands of tokens. The harness is
generated C++ and knows only streams: what goes in and what must come out is computed here.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amaranth.back import verilog
from amaranth.hdl import Value
from amaranth.lib import stream, wiring

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.tools.simulate import to_bits
from tachyscope_fpga.tools.synth import find

PRELUDE = """
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <utility>
#include <vector>
#include "Vtop.h"
#include "verilated.h"

double sc_time_stamp() { return 0; }

// a port's bits from and to 32-bit words
template <typename T> void put(T &port, const uint32_t *words) {
    uint64_t value = words[0];
    if (sizeof(T) > 4) value |= uint64_t(words[1]) << 32;
    port = T(value);
}
template <std::size_t N> void put(VlWide<N> &port, const uint32_t *words) {
    std::memcpy(&port[0], words, 4 * N);
}
template <typename T> void get(const T &port, uint32_t *words) {
    words[0] = uint32_t(port);
    if (sizeof(T) > 4) words[1] = uint32_t(uint64_t(port) >> 32);
}
template <std::size_t N> void get(const VlWide<N> &port, uint32_t *words) {
    std::memcpy(words, &port[0], 4 * N);
}

static uint64_t state = 88172645463325252ull;
static uint32_t draw() {
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return uint32_t(state >> 32);
}
"""
"""What every harness begins with."""

HARNESS = """
typedef std::vector<uint32_t> Words;

struct Beats {
    uint32_t words = 0, count = 0, total = 0;  // total: with repeats
    Words data;
    bool shown = false;
    uint64_t sent = 0, stall = 0;
    const uint32_t *at(uint64_t i) const { return &data[(i % count) * words]; }
};

static void load(FILE *file, Beats &beats) {
    uint32_t head[3];
    if (std::fread(head, 4, 3, file) != 3) std::exit(3);
    beats.words = head[0]; beats.count = head[1]; beats.total = head[2];
    beats.data.resize(std::size_t(head[0]) * head[1] + 1);
    std::size_t wanted = std::size_t(head[0]) * head[1];
    if (std::fread(beats.data.data(), 4, wanted, file) != wanted) std::exit(3);
}

int main(int argc, char **argv) {
    Verilated::commandArgs(argc, argv);
    FILE *file = std::fopen(argv[1], "rb");
    if (!file) return 3;
    const uint64_t stall = uint64_t(std::atof(argv[2]) * 4294967296.0);
    const uint64_t limit = std::strtoull(argv[3], nullptr, 10);
    Beats in[INPUTS + 1], out[OUTPUTS + 1];
    for (int i = 0; i < INPUTS; i++) load(file, in[i]);
    for (int i = 0; i < OUTPUTS; i++) load(file, out[i]);
    std::fclose(file);
    Vtop *top = new Vtop;
    uint64_t cycles = 0, mismatches = 0, left = 0;
    for (int i = 0; i < OUTPUTS; i++) left += out[i].total;
    bool ready[OUTPUTS + 1];
    uint32_t seen[MOST_WORDS];
    top->rst = 1; top->clk = 0; top->eval(); top->clk = 1; top->eval(); top->rst = 0;
    const std::clock_t began = std::clock();
    while (left && cycles < limit) {
        top->clk = 0;
DRIVE
        top->eval();
        bool go[INPUTS + 1];
SAMPLE
        top->clk = 1; top->eval();
        for (int i = 0; i < INPUTS; i++)
            if (go[i]) { in[i].shown = false; in[i].sent++; }
        cycles++;
    }
    const double seconds = double(std::clock() - began) / CLOCKS_PER_SEC;
    typedef unsigned long long Long;
    std::printf("{\\"cycles\\": %llu, \\"beats_left\\": %llu, \\"mismatches\\": %llu, ",
        Long(cycles), Long(left), Long(mismatches));
    std::printf("\\"cpu_seconds\\": %.3f}\\n", seconds);
    top->final();
    delete top;
    return 0;
}
"""


@dataclass(frozen=True)
class Verdict:
    """What a run found."""

    cycles: int
    mismatches: int
    beats_left: int
    """Beats that never came."""
    cpu_seconds: float

    @property
    def cycles_per_second(self) -> float:
        """Of processor time, so that others' work on the machine does not count."""
        return self.cycles / self.cpu_seconds if self.cpu_seconds else 0.0


def to_verilog(part: wiring.Component, name: str) -> str:
    """The part as Verilog; a memory that begins empty is cleared by a loop, not line by line.

    A replay cache of 100,000 beats is otherwise 100,000 lines, and minutes of a C++ compiler.
    """
    text = verilog.convert(part, name=name, strip_internal_attrs=True)
    blocks = itertools.count()

    def loop(lines: re.Match[str]) -> str:
        indent, memory, zero, last = lines.groups()
        return (
            f"{indent}begin : clear_{next(blocks)}\n{indent}  integer i;\n"
            f"{indent}  for (i = 0; i <= {last}; i = i + 1) {memory}[i] = {zero};\n{indent}end\n"
        )

    run = r"^( *)(\S+ ?)\[0\] = (\d+'h0+);\n(?:\1\2\[(\d+)\] = \3;\n)+"
    return re.sub(run, loop, text, flags=re.MULTILINE)


def compile_program(part: wiring.Component, harness: str, folder: Path, *options: str) -> Path:
    """The part and a harness around it as a program; minutes for a large one.

    A program of the same Verilog and harness that lies in the folder is used again.
    """
    verilator = find("verilator", "apt install verilator (5 or newer)")
    find("g++", "apt install g++")
    folder.mkdir(parents=True, exist_ok=True)
    program, built = folder / "build" / "top", folder / "built"
    sources = {
        folder / "top.v": to_verilog(part, "top"),
        folder / "main.cpp": PRELUDE + harness,
    }
    if (
        program.exists()
        and built.exists()
        and all(path.exists() and path.read_text() == text for path, text in sources.items())
    ):
        return program
    built.unlink(missing_ok=True)
    for path, text in sources.items():
        path.write_text(text)
    command = [
        *(verilator, "--cc", "--exe", "--build", "-O3", "--x-assign", "fast"),
        *("--x-initial", "fast", "--noassert", "-Wno-fatal", "-Wno-lint", "--top-module", "top"),
        *(*options, "--Mdir", "build", "-o", "top", "top.v", "main.cpp"),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or not program.exists():
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        wrong = next((line for line in lines if "rror" in line), lines[-1])
        raise TachyscopeError(f"verilator stopped (exit code {done.returncode}): {wrong}")
    built.touch()
    return program


def build(part: wiring.Component, folder: Path) -> Path:
    """The part as a program that takes its beats from a file."""
    inputs, outputs = ports_of(part)
    drive, sample = [], []
    for number, (name, _) in enumerate(inputs):
        valid, payload, ready = (_member(name, part) for part in ("valid", "payload", "ready"))
        drive.append(
            f"if (!in[{number}].shown && draw() >= stall && in[{number}].sent < in[{number}].total)"
            f" {{ in[{number}].shown = true; put({payload}, in[{number}].at(in[{number}].sent)); }}"
            f" {valid} = in[{number}].shown;"
        )
        sample.append(f"go[{number}] = in[{number}].shown && {ready};")
    for number, (name, _) in enumerate(outputs):
        valid, payload, ready = (_member(name, part) for part in ("valid", "payload", "ready"))
        drive.append(f"ready[{number}] = draw() >= stall; {ready} = ready[{number}];")
        sample.append(
            f"if (ready[{number}] && {valid}) {{ Beats &b = out[{number}]; get({payload}, seen);"
            f" if (b.sent >= b.total || std::memcmp(seen, b.at(b.sent), 4 * b.words)) mismatches++;"
            f" if (b.sent < b.total) left--; b.sent++; }}"
        )
    most = max(_words(width) for _, width in inputs + outputs)
    text = HARNESS.replace("DRIVE", "\n".join(drive)).replace("SAMPLE", "\n".join(sample))
    text = text.replace("INPUTS", str(len(inputs))).replace("OUTPUTS", str(len(outputs)))
    text = text.replace("MOST_WORDS", str(most))
    return compile_program(part, text, folder, "-CFLAGS", "-O2")


def run(
    program: Path,
    part: wiring.Component,
    inputs: Mapping[str, Sequence[Any]],
    outputs: Mapping[str, Sequence[Any]],
    stall: float = 0.0,
    repeat: Mapping[str, int] | None = None,
    limit: int = 2**40,
) -> Verdict:
    """Feed the inputs' beats and compare every beat of the outputs.

    A port named in `repeat` begins again with its first beat, that many times. An output that is
    not named must stay silent.
    """
    sources, sinks = ports_of(part)
    vectors = program.parent / "vectors.bin"
    times = dict(repeat or {})
    with vectors.open("wb") as file:
        for ports, given in ((sources, inputs), (sinks, outputs)):
            unknown = sorted(set(given) - {name for name, _ in ports})
            if unknown:
                raise TachyscopeError(f"no such port: {', '.join(unknown)}")
            for name, width in ports:
                beats, words = given.get(name, ()), _words(width)
                payload = _payload(part, name)
                head = (words, len(beats), len(beats) * times.get(name, 1))
                file.write(struct.pack("<3I", *head))
                for beat in beats:
                    file.write(to_bits(payload, beat).to_bytes(4 * words, "little"))
    done = subprocess.run(
        [program, vectors, str(stall), str(limit)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise TachyscopeError(f"{program} stopped with exit code {done.returncode}")
    return Verdict(**json.loads(done.stdout))


def ports_of(part: wiring.Component) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The streams in and out, by the names that ``simulate`` takes, and their payloads' bits."""
    inputs: list[tuple[str, int]] = []
    outputs: list[tuple[str, int]] = []
    for name, member in part.signature.members.items():
        if not member.is_signature or not isinstance(member.signature, stream.Signature):
            continue
        count = member.dimensions[0] if member.dimensions else None
        names = [name] if count is None else [f"{name}[{k}]" for k in range(count)]
        into = inputs if member.flow is wiring.In else outputs
        into += [(one, len(Value.cast(_payload(part, one)))) for one in names]
    return inputs, outputs


def _payload(part: wiring.Component, name: str) -> Any:
    head, _, number = name.partition("[")
    port = getattr(part, head)
    return (port[int(number[:-1])] if number else port).payload


def _words(width: int) -> int:
    return max(1, -(-width // 32))


def _member(name: str, member: str) -> str:
    """`jobs[1]`'s valid is `jobs__1__valid` in Verilog; Verilator writes `__` as `___05F`."""
    head, _, number = name.partition("[")
    flat = f"{head}__{number[:-1]}__{member}" if number else f"{head}__{member}"
    return "top->" + flat.replace("__", "___05F")
