"""Served sessions."""

from __future__ import annotations

from tachyscope_lab.results import Results
from tachyscope_lab.tables.markdown import number, table


def serve(results: Results) -> str:
    """Sessions whose clients press keys at random times, server and clients on one machine."""
    rows = []
    for name, entry in results.entries("serve").items():
        if "clients" not in entry["rows"][0]:
            continue
        for row in results.rows("serve", name):
            one = row["clients"] == 1
            rows.append([
                f"`{row['model']}`", number(row["clients"], 0), number(row["seconds"] / 60),
                number(row["key_ms_p50"], 0), number(row["key_ms_p95"], 0),
                number(row["step_ms_p50"], 0),
                "" if one else number(row["wait_worst_over_mean"], 2),
                number(max(row["rss_mb_first_half"], row["rss_mb_second_half"]), 0),
            ])  # fmt: skip
    return table(
        ["model", "clients", "minutes", "key to pixel p50, ms", "p95", "a step p50, ms",
         "worst wait / mean", "server's memory, MB"],
        rows,
    )  # fmt: skip
