"""The decoder's registers and the events that it counts: one table for hardware, map and header."""

from __future__ import annotations

from tachyscope_fpga.parts.counters import Counters
from tachyscope_fpga.parts.csr import CsrBank, Register

IDENTITY = 0x54414348  # "TACH"
VERSION = 1
EVENTS = (
    ("CYCLES", "cycles from start to the last beat of the state"),
    ("TOKENS", "tokens, of all rows together"),
    ("COMPUTED", "MLPs computed, by row and layer"),
    ("REPLAYED", "MLPs replayed, by row and layer"),
    ("WEIGHT_BEATS", "beats of weights taken"),
    ("WEIGHT_WAITS", "cycles in which all active cores could take weights and none were there"),
    ("KEY_BEATS", "beats of keys that came to core 0"),
    ("VALUE_BEATS", "beats of values that came to core 0"),
    ("PROJECT", "cycles in which core 0 norms and projects q, k, v"),
    ("STORE", "cycles in which core 0 stores its new entry"),
    ("GATE", "cycles in which core 0 scores the token"),
    ("ATTEND", "cycles in which core 0 attends and projects the output"),
    ("MLP", "cycles in which core 0 computes an MLP"),
    ("NORM", "cycles in which core 0 norms a state"),
)


def decoder_registers(layers: int, counters: Counters) -> CsrBank:
    return CsrBank(
        (
            Register("ID", "ro", "0x54414348"),
            Register("VERSION", "ro", "of this table"),
            Register("PARAMS", "ro", "layers, rows, cores, lanes of the array, a byte each"),
            Register("CTRL", "wo", "bit 0: start a token; 1: empty the replay cache; 2: counters"),
            Register("STATUS", "ro", "bit 0: busy"),
            Register("INDEX", "rw", "the token's entry in the KV cache, which is its position"),
            Register("PLACE", "rw", "the token's place in its frame"),
            Register("REPLAY", "rw", "bit 0: the gate may decide; else all is computed"),
            Register("SINK", "rw", "first entries that are always read"),
            Register("WINDOW", "rw", "newest entries that are read; 0: all"),
            Register("WEIGHT_BASE", "rw", "address of the weights, in beats"),
            Register("SCALE_BASE", "rw", "address of the scales, in beats"),
            Register("THRESHOLD_LOW", "rw", "of a layer's TAS, bits 0 to 31", layers),
            Register("THRESHOLD_HIGH", "rw", "bits 32 to 47", layers, 0x7FFF),
            Register("REPLAYED", "ro", "a layer's rows that replayed the last token", layers),
            *counters.registers(),
        )
    )
