"""Formats a memory prediction for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from tachyscope.io.results import Document
from tachyscope.io.tables import format_table
from tachyscope.kernels.device import HAS_TRITON

# a bank's keys and values on the device; its other tensors are the index
PLACES = ("bank.places_k", "bank.places_v")


def lines(document: Document) -> list[str]:
    """Lines of text for a document of `fit`."""
    (row,) = document["rows"]
    high, wide = row["grid"]
    out = [
        f"{row['model']} {row['dtype']}, {row['frames']} frames",
        f"{high}x{wide} tokens a latent frame",
        row["plan"],
        *format_table(["RAM" if row["on_cpu"] else "GPU memory", "GB"], _parts(row)),
    ]
    if not HAS_TRITON and not row["on_cpu"]:
        out.append("counted for stock torch: Triton's kernels (pip install triton) take less")
    ram = [
        ("the cache in RAM", row["host_bytes"]),
        ("the prompt's encoder, before the cache is there", row["prompt_encoder_bytes"]),
        ("at most, with the process itself", row["ram_bytes"]),
    ]
    out += format_table(["RAM", "GB"], [[name, _gb(size)] for name, size in ram if size])
    return out + [_advice(row, one) for one in row["recipes"]]


def _parts(row: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the table: the memory of each part of a plan."""
    cache = row["cache_bytes"]
    stays = {
        "weights": row["weights_bytes"],
        "decoder": row["decoder_bytes"],
        "its state between chunks": row["decoder_state_bytes"],
        **{f"cache: {name}": n for name, n in cache.items() if not name.startswith("bank.")},
        "cache: a bank's codes": sum(n for name, n in cache.items() if name in PLACES),
        "cache: a bank's index": sum(
            n for name, n in cache.items() if name.startswith("bank.") and name not in PLACES
        ),
        "prompt's keys and values": row["prompt_bytes"],
    }
    beside = row["decoding_beside"] and not row["on_cpu"]
    turns = [
        ("a pass's activations", row["activations_bytes"]),
        ("with it, attention", row["attention_bytes"]),
        ("or the cache's upkeep", row["committing_bytes"]),
        (
            "beside, decoding" if beside else "or decoding",
            row["decoding_one_bytes" if row["on_cpu"] else "decoding_bytes"],
        ),
    ]
    sizes = [(name, size) for name, size in stays.items() if size]
    sizes += [("stays", sum(stays.values())), *turns]
    if not row["on_cpu"]:
        sizes.append(("peak", row["peak_bytes"]))
        sizes.append(("a session of a server", row["session_bytes"]))
    return [[name, _gb(size)] for name, size in sizes]


def _advice(row: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    """A sentence on what to run within a limit, or on what is missing."""
    limits = [
        f"{one[key]:g} GB of {name}"
        for key, name in (("vram_gb", "GPU memory"), ("ram_gb", "RAM"))
        if one[key] is not None
    ]
    within = " and ".join(limits)
    if not one["fits"]:
        short = [
            f"{_gb(one[key])} GB of {name}"
            for key, name in (("missing_bytes", "GPU memory"), ("missing_ram_bytes", "RAM"))
            if one[key]
        ]
        return (
            f"{within}: {' and '.join(short)} are missing for the least, {_words(one)}: take a "
            f"smaller --size or fewer --frames"
        )
    own = not one["weights"] and one["plan"] == row["name"]
    taken = f"{_gb(one['ram_bytes'])} GB of RAM"
    if one["peak_bytes"]:
        taken = f"{_gb(one['peak_bytes'])} GB of GPU memory, {taken}"
    count = one["sessions"] if own else 0
    serves = f", serves {count} session{'s' * (count > 1)}" if count else ""
    return f"{within}: {'fits as it is' if own else _words(one)}: {taken}{serves}"


def _words(one: Mapping[str, Any]) -> str:
    """The options to add to `generate`."""
    words = [part for word in one["weights"] for part in ("--weights", word)]
    return shlex.join([*words, "--plan", one["plan"]])


def _gb(size: float) -> str:
    return f"{size / 1e9:.3f}"
