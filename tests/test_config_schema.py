"""A configuration says type, bound and key of a field once: reading, writing and faults follow."""

from dataclasses import dataclass
from typing import Literal

import pytest
from faults import refused

from tachyscope.core.limits import Bound
from tachyscope.models.config_schema import Config, Tables, entries, entry, paths, written


@dataclass(frozen=True, slots=True)
class Inner(Config):
    subject, section = "an inner's", ""

    heads: int = entry(2, Bound(1, 8))
    rate: float = entry(0.5, Bound(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Outer(Config):
    subject, section = "an outer's", "ours"

    width: int = entry(bound=Bound(1, 64), at="sizes.width")
    steps: tuple[int, ...] = entry((3, 1), Bound(0, 9))
    size: tuple[int, int] | None = entry(None, Bound(1, 9))
    kind: Literal["flow", "x0"] = entry("flow")
    loud: bool = entry(False)
    name: str = entry("", Bound(0, 4))
    inner: Inner = entry(Inner(heads=4))

    def check_fields(self):
        self.demand(self.width % self.inner.heads == 0, "width must divide by heads", self.width)


def read(values):
    tables = Tables(values, "config.json")
    tables.only(Outer)
    tables.only(Outer, "ours")
    return Outer(**tables.fields(Outer))


def test_what_is_written_is_read_and_what_is_not_said_is_the_default():
    made = Outer(8, steps=(9, 4, 0), size=(2, 3), kind="x0", inner=Inner(2, 1))
    assert written(made) == {
        "sizes": {"width": 8},
        "ours": {
            "steps": [9, 4, 0], "size": [2, 3], "kind": "x0", "loud": False, "name": "",
            "inner": {"heads": 2, "rate": 1.0},
        },
    }  # fmt: skip
    assert read(written(made)) == made and type(made.inner.rate) is float
    # null says nothing; of an inner object its own default's other values stay
    said = {"sizes": {"width": 8}, "ours": {"steps": None, "inner": {"rate": 0}}}
    assert read(said) == Outer(8, inner=Inner(4, 0.0))
    assert [one.field for one in entries(Inner)] == ["heads", "rate"]
    assert ("ours", "inner", "rate") in paths(Outer) and ("sizes", "width") in paths(Outer)


@pytest.mark.parametrize(
    "values, words",
    [
        ({}, "config.json: sizes.width must be a whole number from 1 to 64, got null: mend it"),
        ({"sizes": {"width": 65}}, "sizes.width must be from 1 to 64, got 65"),
        ({"sizes": {"width": True}}, "sizes.width must be a whole number from 1 to 64, got true"),
        ({"sizes": [1]}, "config.json: sizes must be an object, got [1]"),
        ({"ours": {"steps": [1, 10]}}, "steps must be from 0 to 16 whole numbers, each from 0 to 9"),
        ({"ours": {"size": [1]}}, "ours.size must be 2 whole numbers, each from 1 to 9, got [1]"),
        ({"ours": {"kind": "noise"}}, "ours.kind must be one of flow, x0, got 'noise'"),
        ({"ours": {"loud": 1}}, "ours.loud must be true or false, got 1"),
        ({"ours": {"name": "12345"}}, "ours.name must be text of at most 4 letters, got '12345'"),
        ({"ours": {"inner": {"rate": "x"}}}, "ours.inner.rate must be a number from 0 to 1, got 'x'"),
        ({"ours": {"colour": 1}}, "has an unknown 'ours.colour'; it takes steps, size, kind, loud"),
        ({"depth": 1}, "config.json has an unknown 'depth'; it takes sizes, ours: remove it"),
    ],
)  # fmt: skip
def test_a_fault_names_the_files_own_key(values, words):
    refused(lambda: read({"sizes": {"width": 8}, **values} if values else {}), words)


def test_a_configuration_made_by_hand_is_checked_too():
    refused(lambda: Outer(0), "an outer's width must be from 1 to 64, got 0: change it")
    refused(lambda: Outer(6), "an outer's width must divide by heads, got 6: change it")
    refused(lambda: Outer(8, inner=3), "an outer's inner must be of type Inner, got 3")
