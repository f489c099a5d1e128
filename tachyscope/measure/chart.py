"""Curves as SVG, in the colours of their page, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 40  # of the axes, from the edges
TICKS = 5
# dashes, so that lines do not differ by colour alone
STROKES = ("", "6 3", "2 2", "7 3 2 3")
COLOURS = 7  # the page defines --run-0 to --run-6


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart, in the colour of its run."""

    index: int  # of its run
    name: str
    x: list[float]
    y: list[float]

    def map(self, change: Callable[[float], float]) -> Curve:
        return replace(self, y=[change(value) for value in self.y])


def chart(curves: Sequence[Curve], top: float, across: str, words: str) -> str:
    """An SVG of the curves from 0 to `top`; values above are triangles. words: the alt text."""
    right = max((max(curve.x) for curve in curves), default=1.0) or 1.0
    top = top or 1.0
    high, wide = HEIGHT - TOP - BOTTOM, WIDTH - LEFT - RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + wide * x / right, TOP + high * (1 - min(y, top) / top)

    parts = []
    for value in ticks(top):
        _, y = place(0, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" {_at("y", y)}/>')
        parts.append(_text(LEFT - 6, y + 4, short(value), "end"))
    for value in ticks(right):
        x, _ = place(value, 0)
        parts.append(_text(x, HEIGHT - BOTTOM + 18, short(value), "middle"))
    parts.append(_text(LEFT + wide / 2, HEIGHT - 4, across, "middle"))
    for curve in curves:
        parts += _curve(curve, top, place)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}">'
        f"{''.join(parts)}</svg>"
    )


def _curve(
    curve: Curve, top: float, place: Callable[[float, float], tuple[float, float]]
) -> list[str]:
    colour = f"stroke: var(--run-{curve.index % COLOURS})"
    inside = [place(x, y) for x, y in zip(curve.x, curve.y, strict=True)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in inside)
    dashes = STROKES[curve.index % len(STROKES)]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    parts = [
        f'<polyline class="curve" style="{colour}"{dashed} points="{points}">'
        f"<title>{escape(curve.name)}</title></polyline>"
    ]
    fill = f"fill: var(--run-{curve.index % COLOURS})"
    if len(inside) == 1:
        parts.append(
            f'<circle style="{fill}" cx="{inside[0][0]:.1f}" cy="{inside[0][1]:.1f}" r="4"/>'
        )
    for (x, y), value in zip(inside, curve.y, strict=True):
        if value > top:
            parts.append(f'<path style="{fill}" d="M{x - 4:.1f} {y + 9:.1f}h8l-4 -7z"/>')
    return parts


def ticks(top: float) -> list[float]:
    """About five round numbers from 0 to `top`."""
    step = 10 ** math.floor(math.log10(top / TICKS))
    step *= next(by for by in (1, 2, 2.5, 5, 10) if top / (by * step) <= TICKS + 1)
    return [i * step for i in range(math.floor(top / step + 1e-9) + 1)]


def short(value: float) -> str:
    return f"{value:.6g}"


def _at(axis: str, value: float) -> str:
    return f'{axis}1="{value:.1f}" {axis}2="{value:.1f}"'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
