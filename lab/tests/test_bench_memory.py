"""The benchmark of memory reads the first line of `tachyscope generate`."""

from tachyscope.cli.options import promise_memory
from tachyscope.models.registry import load
from tachyscope_lab.bench.memory import PROMISE


def test_the_predicted_ram_is_read_from_the_first_line_of_a_run():
    promised, line = promise_memory(load("toy-chunks"), "toy-chunks", ["fast"], frames=9)
    assert float(PROMISE.search(line)[1]) == round(promised.ram / 1e9, 2)
