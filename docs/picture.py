"""README's picture: times of contenders as dots on one axis, in SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import figures
from report import Figure, Result

COLOURS = ("#8b949e", "#2f81f7", "#d4691e")
"""Of the contenders, told apart on white and on black."""
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.back { fill: #ffffff }
.grid { stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .back { fill: #0d1117 }
  .grid { stroke: #30363d }
}
"""
WIDTH, LEFT, RIGHT = 760, 160, 660
"""Of the picture, and where the axis begins and ends."""
TOP, LINE = 50, 18
"""Where the first row begins, and the height of a dot's line."""


def drawn(result: Result | None, what: str, key: str, contenders: Sequence[str]) -> str:
    """Return a picture of what was measured of up to three contenders, which `key` tells apart: a row for each case.

    A dot is a median, the line through it joins the quartiles. Without a result the picture has no dots.
    """
    found = [one for one in result.figures if one.what == what and one.case[key] in contenders] if result else []
    if not found:
        return _svg(60, [_text(20, 35, "To be measured again.")])
    cases = list(dict.fromkeys(_case(one, key) for one in found))
    height = LINE * (len(contenders) + 1)
    end = TOP + height * len(cases)
    first = math.floor(math.log10(min(one.low for one in found)))
    last = math.floor(math.log10(max(one.high for one in found))) + 1

    def x(value: float) -> float:
        return LEFT + (math.log10(value) - first) / (last - first) * (RIGHT - LEFT)

    parts = [_text(20, 28, f"{what.capitalize()}, log scale")]
    for at, name in enumerate(contenders):
        parts += [_dot(LEFT + 90 * at + 60, 24, COLOURS[at]), _text(LEFT + 90 * at + 72, 28, name)]
    for power in range(first, last + 1):
        parts.append(f'<path class="grid" d="M{x(10.0**power):.1f} {TOP - 8}V{end}"/>')
        parts.append(_text(x(10.0**power), end + 18, figures.number(10.0**power, found[0].unit), "middle"))
    for at, case in enumerate(cases):
        parts.append(_text(20, TOP + height * at + 2 * LINE - 4, case))
    for one in found:
        line = contenders.index(str(one.case[key]))
        y, colour = TOP + height * cases.index(_case(one, key)) + LINE * line + LINE // 2, COLOURS[line]
        parts.append(f'<path stroke="{colour}" stroke-width="3" d="M{x(one.low):.1f} {y}H{x(one.high):.1f}"/>')
        parts.append(_dot(x(one.value), y, colour))
        parts.append(_text(x(one.high) + 10, y + 4, figures.number(one.value, one.unit)))
    return _svg(end + 34, parts)


def _case(one: Figure, key: str) -> str:
    return ", ".join(f"{name} = {value:,}" for name, value in one.case.items() if name != key)


def _dot(x: float, y: int, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{colour}"/>'


def _text(x: float, y: int, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: int, parts: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    back = f'<rect class="back" width="{WIDTH}" height="{height}" rx="6"/>'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>", back, *parts, "</svg>", ""]
    )
