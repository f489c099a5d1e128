"""The plans that a Wan-type benchmark times, by row."""

from __future__ import annotations

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import NAMES

MERGE = "cache=merge:budget=21f"
FIFTH_READ = f"{MERGE} attention=ann:read=0.2 text=pads"
HEADLINE = f"{FIFTH_READ} replay=none"
BANK = "cache=bank:resident=21f,budget=300f,host=int4"
MAIN = {
    "dense": "dense",
    "stock": "stock",
    "window21": "cache=window:budget=21f",
    "merge21": MERGE,
    "read1": f"{MERGE} attention=ann:read=1",
    "read.3": f"{MERGE} attention=ann:read=0.3",
    "read.2": f"{MERGE} attention=ann:read=0.2",
    # of 18 past frames a tenth is less than a sink and a newest one
    "read.1": f"{MERGE} attention=ann:read=0.1,sink=0",
    "headline": HEADLINE,
    "balanced": "balanced",
    "fast": "fast",
    "live": "live",
}
# a fifth of few frames is less than a sink and a newest one
FIFTH = "attention=ann:read=0.2,sink=0,newest=0"
ALL = MAIN | {
    "budget6": f"cache=merge:budget=6f {FIFTH} text=pads",
    "budget12": f"cache=merge:budget=12f {FIFTH} text=pads",
    "budget21": f"cache=merge:budget=21f {FIFTH} text=pads",
    "text-ann": f"{MERGE} attention=ann:read=0.2 text=ann",
    "replay.25": f"{FIFTH_READ} replay=attentive:share=0.25",
    "replay.5": f"{FIFTH_READ} replay=attentive:share=0.5",
    # of 18 past latent frames that are resident ten are read, or all; more lies in host memory
    "bank10": f"{BANK} attention=ann:read=0.555 text=pads",
    "bank20": f"{BANK} attention=ann:read=1 text=pads",
    "bank10-int8": f"{BANK.replace('int4', 'int8')} attention=ann:read=0.555 text=pads",
    "int8": f"{FIFTH_READ} store=int8",
    "fp8": f"{FIFTH_READ} store=fp8",
}
TABLES = {"main": MAIN, "all": ALL}


def choose_rows(table: str, rows: str | None) -> dict[str, str]:
    """Plans by row: a table's, or those of a text of names and plans, separated by `;`."""
    if rows is None:
        if table not in TABLES:
            raise TachyscopeError(f"no table {table!r}; there are: {', '.join(TABLES)}")
        return TABLES[table]
    words = [word.strip() for word in rows.split(";") if word.strip()]
    if not words:
        raise TachyscopeError(f"rows are separated by ';', got {rows!r}: try 'dense;headline'")
    for word in words:
        if word not in ALL and word not in NAMES and "=" not in word:
            raise TachyscopeError(f"no row {word!r}; there are: {', '.join(ALL)}, or a plan")
    return {word: ALL.get(word, word) for word in words}
