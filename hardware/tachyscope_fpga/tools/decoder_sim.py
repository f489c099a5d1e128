"""The whole decoder in Verilator, with memories around it: takes a token, gives its state.

The harness is our own C++: weights, scales and the KV cache are arrays in it behind the memory
ports, answered after a fixed number of cycles; registers and tokens come on its standard input.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tachyscope_fpga.decoder.memory import memory_image, pack, unpack, words_of
from tachyscope_fpga.decoder.model import DecoderModel, Layer, Token
from tachyscope_fpga.decoder.top import Top
from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.fixed import Ints
from tachyscope_fpga.parts.vector import WIDE
from tachyscope_fpga.tools.verilate import compile_program

HARNESS = r"""
#define JOIN(stream, part) top->stream##___05F##part
#define PORT(stream, part) JOIN(stream, part)

static Vtop *top;
static uint64_t cycles = 0, latency, stall;

static bool waits() { return stall && draw() < stall; }
// a memory: beats of `words` 32-bit words
struct Beats {
    uint32_t words = 0;
    uint64_t count = 0;
    std::vector<uint32_t> data;
    void load(FILE *file) {
        uint32_t head[2];
        if (std::fread(head, 4, 2, file) != 2) std::exit(3);
        words = head[0]; count = head[1];
        data.resize(uint64_t(words) * count);
        if (std::fread(data.data(), 4, data.size(), file) != data.size()) std::exit(3);
    }
    uint32_t *at(uint64_t address) {
        if (address >= count) { std::fprintf(stderr, "address %llu of %llu\n",
            (unsigned long long)address, (unsigned long long)count); std::exit(4); }
        return &data[address * words];
    }
};

// a port of it: answers in order, `latency` cycles after the request or later
struct Port {
    std::deque<std::pair<uint64_t, uint64_t>> waiting;
    bool ready = false;
};

static Beats weights, scales, kv;
static Port weight_port, scale_port, k_port, v_port;

#define BEFORE(name, of, port, memory) \
    port.ready = !waits(); PORT(name##_request##of, ready) = port.ready; \
    if (!port.waiting.empty() && port.waiting.front().first <= cycles && !waits()) { \
        put(PORT(name##_response##of, payload), memory.at(port.waiting.front().second)); \
        PORT(name##_response##of, valid) = 1; port.waiting.pop_front(); \
    } else PORT(name##_response##of, valid) = 0;
#define AFTER(name, of, port) \
    if (port.ready && PORT(name##_request##of, valid)) \
        port.waiting.emplace_back(cycles + latency, PORT(name##_request##of, payload));

// half a cycle: everything that is shown has settled
static void settle() {
    top->clk = 0;
    BEFORE(weight, , weight_port, weights)
    BEFORE(scale, , scale_port, scales)
    BEFORE(k, ___05F0, k_port, kv)
    BEFORE(v, ___05F0, v_port, kv)
    top->eval();
}
static void edge() {
    AFTER(weight, , weight_port)
    AFTER(scale, , scale_port)
    AFTER(k, ___05F0, k_port)
    AFTER(v, ___05F0, v_port)
    if (PORT(kv_write___05F0, valid)) {
        uint32_t beat[ENTRY_WORDS + 1];
        get(PORT(kv_write___05F0, payload), beat);
        std::memcpy(kv.at(beat[0]), beat + 1, 4 * ENTRY_WORDS);
    }
    top->clk = 1; top->eval(); cycles++;
}

static uint32_t access(uint32_t address, bool write, uint32_t value) {
    uint32_t request[3] = {address, uint32_t(write) | (value << 1), value >> 31};
    put(PORT(csr_request, payload), request);
    PORT(csr_request, valid) = 1; PORT(csr_response, ready) = 1;
    bool sent = false;
    while (true) {
        settle();
        const bool take = PORT(csr_response, valid);
        const uint32_t found = PORT(csr_response, payload);
        const bool given = !sent && PORT(csr_request, ready);
        edge();
        if (given) { sent = true; PORT(csr_request, valid) = 0; }
        if (take) return found;
    }
}

static void read_in(void *to, std::size_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(0);
}

int main(int argc, char **argv) {
    Verilated::commandArgs(argc, argv);
    FILE *file = std::fopen(argv[1], "rb");
    if (!file) return 3;
    weights.load(file); scales.load(file); kv.load(file);
    std::fclose(file);
    latency = std::strtoull(argv[2], nullptr, 10);
    stall = uint64_t(std::atof(argv[3]) * 4294967296.0);
    top = new Vtop;
    PORT(kv_write___05F0, ready) = 1;
    top->rst = 1; top->clk = 0; top->eval(); top->clk = 1; top->eval(); top->rst = 0;
    std::vector<uint32_t> x(BEATS * LANE_WORDS), o(BEATS * LANE_WORDS);
    while (true) {
        char what;
        read_in(&what, 1);
        if (what == 'W' || what == 'R') {
            uint32_t given[2] = {0, 0};
            read_in(given, what == 'W' ? 8 : 4);
            const uint32_t found = access(given[0], what == 'W', given[1]);
            if (what == 'R') { std::fwrite(&found, 4, 1, stdout); std::fflush(stdout); }
        } else if (what == 'T') {
            read_in(x.data(), 4 * x.size());
            const uint64_t began = cycles;
            const std::clock_t clock = std::clock();
            access(CTRL, true, 1);
            uint64_t given = 0, taken = 0;
            bool shown = false;
            while (taken < BEATS) {
                if (!shown && given < BEATS && !waits()) shown = true;
                if (shown) put(PORT(x, payload), &x[given * LANE_WORDS]);
                PORT(x, valid) = shown;
                const bool ready = !waits();
                PORT(o, ready) = ready;
                settle();
                const bool gave = shown && PORT(x, ready);
                if (ready && PORT(o, valid)) get(PORT(o, payload), &o[taken++ * LANE_WORDS]);
                edge();
                if (gave) { given++; shown = false; }
                if (cycles - began > 100000000ull) return 5;
            }
            PORT(x, valid) = 0; PORT(o, ready) = 0;
            const uint64_t ticks = uint64_t(std::clock() - clock);
            const uint64_t times[2] = {cycles - began, ticks * 1000000ull / CLOCKS_PER_SEC};
            std::fwrite(o.data(), 4, o.size(), stdout);
            std::fwrite(times, 8, 2, stdout);
            std::fflush(stdout);
        }
    }
}
"""


class DecoderSim:
    """`Top` with one row and one core as a program; `step` is DecoderModel's.

    latency: cycles in which a memory answers. stall: how often in a cycle a port waits.
    """

    def __init__(
        self, top: Top, layers: Sequence[Layer], folder: Path, latency: int = 20, stall: float = 0.0
    ) -> None:
        if (top.rows, top.cores) != (1, 1):
            raise TachyscopeError(
                f"the Verilator harness runs one row on one core, got {top.rows} and {top.cores}"
            )
        self.top, self.layers, self.folder = top, layers, folder
        self.latency, self.stall = latency, stall
        self.cycles: list[int] = []
        self.seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def _lane_words(self) -> int:
        return words_of(WIDE * self.top.core.lanes)

    @property
    def _entry_bits(self) -> int:
        return self.top.core.attention.entry_layout().size

    @property
    def program(self) -> Path:
        return self.folder / "build" / "top"

    def build(self) -> None:
        """Verilog, C++ and the program; minutes for a large one."""
        core = self.top.core
        harness = HARNESS
        for name, value in {
            "ENTRY_WORDS": words_of(self._entry_bits),
            "LANE_WORDS": self._lane_words,
            "BEATS": core.shape.width // core.lanes,
            "CTRL": self.top.csr.address("CTRL"),
        }.items():
            harness = harness.replace(name, f"{value}u")
        options = ("-j", "2", "-CFLAGS", "-O1", "--output-split", "20000")
        compile_program(self.top.create(), harness, self.folder, *options)

    def start(self, model: DecoderModel) -> None:
        """Begin with a model's KV cache; its replay cache is empty here."""
        memories = memory_image(self.top.core, self.layers, model)
        with (self.folder / "memory.bin").open("wb") as file:
            for beats in memories:
                file.write(struct.pack("<2I", beats.shape[1], len(beats)))
                file.write(beats.astype("<u4").tobytes())
        self._process = subprocess.Popen(
            [self.program, self.folder / "memory.bin", str(self.latency), str(self.stall)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.write("SINK", model.sink)
        self.write("WINDOW", model.window)
        for layer, threshold in enumerate(model.thresholds):
            self.write("THRESHOLD_LOW", threshold & 0xFFFFFFFF, layer)
            self.write("THRESHOLD_HIGH", (threshold >> 32) & 0xFFFF, layer)

    def _send(self, what: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(what)
        self._process.stdin.flush()

    def _receive(self, size: int) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) != size:
            raise TachyscopeError(f"the simulation stopped with exit code {self._process.wait()}")
        return data

    def write(self, name: str, value: int, number: int = 0) -> None:
        self._send(b"W" + struct.pack("<2I", self.top.csr.address(name, number), value))

    def read(self, name: str, number: int = 0) -> int:
        self._send(b"R" + struct.pack("<I", self.top.csr.address(name, number)))
        return int(struct.unpack("<I", self._receive(4))[0])

    def step(self, x: Ints, token: Token) -> tuple[Ints, list[bool]]:
        """As DecoderModel's."""
        core = self.top.core
        for name, value in (
            ("INDEX", token.index),
            ("PLACE", token.place),
            ("REPLAY", token.replay),
        ):
            self.write(name, int(value))
        beats = pack(np.reshape(x, (-1, core.lanes)), WIDE)
        self._send(b"T" + beats.astype("<u4").tobytes())
        words = np.frombuffer(self._receive(4 * beats.size), "<u4").reshape(beats.shape)
        cycles, microseconds = struct.unpack("<2Q", self._receive(16))
        self.cycles.append(cycles)
        self.seconds += microseconds / 1e6
        replayed = [bool(self.read("REPLAYED", n)) for n in range(core.shape.layers)]
        return unpack(words, WIDE, core.lanes).reshape(-1), replayed

    def counts(self) -> dict[str, int]:
        """The performance counters."""
        return {name: self.read(f"COUNT_{name}") for name, _ in self.top.counters.events}

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
