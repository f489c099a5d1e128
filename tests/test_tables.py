"""Text tables: numbers set right, words left, long words whole."""

from tachyscope.io import tables
from tachyscope.io.tables import format_table


def test_numbers_are_set_right_and_words_left():
    rows = [["dense", "1.40", "100.0%", "yes"], ["fast", "12.3", "–", "no"]]
    assert format_table(["plan", "frames/s", "pairs", "kept"], rows) == [
        "plan   frames/s   pairs  kept",
        "dense      1.40  100.0%  yes",
        "fast       12.3       –  no",
    ]


def test_the_first_column_is_of_names():
    assert format_table(["budget", "dB"], [["6f", "1.0"], ["12f", "22.5"]])[1:] == [
        "6f       1.0",
        "12f     22.5",
    ]


def test_a_rows_last_cells_may_be_left_out():
    rows = [["dense", "1.0"], ["fast", "2.0", "2.00x faster"]]
    assert format_table(["plan", "fps", "to dense"], rows)[1] == "dense  1.0"


def test_a_last_column_of_words_is_wrapped_and_its_words_stay_whole(monkeypatch):
    monkeypatch.setattr(tables, "terminal_width", lambda: 36)
    plan = "cache=merge:threshold=0.9,heads=shared text=pads replay=none"
    assert format_table(["plan", "stands for"], [["fast-ar", plan]]) == [
        "plan     stands for",
        "fast-ar  cache=merge:threshold=0.9,heads=shared",
        "         text=pads replay=none",
    ]


def test_a_table_of_nothing_is_its_head():
    assert format_table(["plan", "dB"], []) == ["plan  dB"]
