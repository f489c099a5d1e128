"""Parts of an HTML page of measurements that needs no network: facts, tables and videos."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

UNITS = {"cores": "cores", "memory_gb": "GB", "gpu_memory_gb": "GB"}


def html_page(title: str, lead: str, sections: Sequence[str]) -> str:
    """The whole file; title and lead are text, sections HTML."""
    text = (Path(__file__).parent / "templates" / "report.html").read_text()
    body = "\n".join(sections)
    return Template(text).substitute(title=escape(title), lead=html_text(lead), body=body)


def html_text(text: str) -> str:
    """A paragraph for each line of a text."""
    return "\n".join(f'<p class="lead">{escape(line)}</p>' for line in text.splitlines())


def html_section(heading: str, *parts: str) -> str:
    inside = "\n".join(parts)
    return f"<section><h2>{escape(heading)}</h2>\n{inside}</section>"


def html_facts(pairs: Mapping[str, str]) -> str:
    """Names and values, both HTML."""
    rows = "\n".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs.items())
    return f"<dl>\n{rows}\n</dl>"


def facts_of(results: Mapping[str, Any]) -> dict[str, str]:
    """Date, machine, versions and command of a results document."""
    machine = results["machine"]
    parts = [f"{v} {UNITS.get(k, '')}".strip() for k, v in machine.items() if v is not None]
    if "gpu" in machine and machine["gpu"] is None:
        parts.append("no GPU")
    return {
        "Date": escape(results["date"]),
        "Machine": escape(", ".join(parts)),
        "Versions": escape(", ".join(f"{n} {v}" for n, v in results["versions"].items())),
        "Command": f"<code>{escape(results['command'])}</code>",
    }


def html_table(heads: Sequence[str], rows: Mapping[str, Sequence[str]], label: str) -> str:
    """Cells by a row's name; heads, names and cells are HTML, the label is text."""
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "\n".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for name, cells in rows.items()
    )
    label = escape(label)
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0"><table>\n'
        f'<caption class="unseen">{label}</caption><thead><tr><td></td>{top}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def html_video(mp4: bytes, label: str) -> str:
    return (
        f'<video controls loop muted autoplay playsinline aria-label="{escape(label)}" '
        f'src="{_data("video/mp4", mp4)}">This browser plays no mp4.</video>'
    )


def html_picture(png: bytes, label: str) -> str:
    return f'<img alt="{escape(label)}" src="{_data("image/png", png)}">'


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
