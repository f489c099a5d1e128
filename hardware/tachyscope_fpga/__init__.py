"""FastCar's accelerator in Amaranth: every part as exact integers, as hardware, and as cycles.

A part is one file. Its parameters are a frozen dataclass that checks its ranges and has

- ``compute(...)``: what the part means, in exact NumPy integers;
- ``create()``: the hardware, an Amaranth ``wiring.Component`` with a ready/valid
  ``stream.Signature`` on every port, inputs and outputs alike: both sides may stall;
- ``cycles(...)``: how long it takes when nothing stalls, from the clock edge that takes the first
  input beat to the edge that hands over the last output beat, both counted.

Numbers (``parts/fixed.py``): int8 weights with one scale an output channel, int8 activations with
one scale a token, int32 accumulators, requantisation by an integer multiplier and a shift, rounded
half up and saturated. Vectors on a stream are ``data.ArrayLayout``; element 0 is in the lowest
bits.

``parts`` is the library of units, ``decoder`` a whole decoder of them, ``model`` cycles, boards and
estimates, ``tools`` simulation, bounded checks and synthesis. Only NumPy and Amaranth are needed.
"""

__version__ = "0.1.0"
