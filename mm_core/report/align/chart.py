"""The drawing of `mm align compare`: how the difference grows from module to module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from mm_core.errors import MMError, printable
from mm_core.report.align.compare import Pair

WIDTH, TOP, BOTTOM, LEFT, RIGHT = 720, 28, 250, 52, 708
"""Of the drawing, and the edges of its plot, in px."""

_LEAST = -9
"""Exponent of the smallest difference of the scale; a smaller one is drawn there, and 0 below it."""


def chart(pairs: Sequence[Pair]) -> str:
    """An SVG drawing of the difference of each module's outputs, on a logarithmic scale.

    Args:
        pairs: one of each module, in order of execution.

    Raises:
        MMError: there is none.
    """
    if not pairs:
        hint = "map names with --map THEIRS=OURS, or match --by-order"
        raise MMError("no module is in both records: there is nothing to draw", where="--svg", hint=hint)
    step = (RIGHT - LEFT) / len(pairs)
    xs = [LEFT + step * (index + 0.5) for index in range(len(pairs))]
    parts = [*_groups(pairs, step), *_scale()]
    allowed = "".join(
        f"M{x - step / 2:.1f} {_y(p.tolerance):.1f}h{step:.1f}" for x, p in zip(xs, pairs, strict=True)
    )
    parts.append(f'<path d="{allowed}" stroke="#55616d" stroke-dasharray="4 3"/>')
    parts.append(_text(LEFT + 4, _y(pairs[0].tolerance) - 5, "allowed"))
    first = next((index for index, pair in enumerate(pairs) if not pair.agrees), None)
    if first is not None:
        x, left = xs[first], first < len(pairs) / 2
        parts.append(f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="#c62828"/>')
        name = f"first: {pairs[first].row.module}"
        parts.append(
            _text(x + 5 if left else x - 5, BOTTOM - 22, name, "start" if left else "end", "#c62828")
        )
    for x, pair in zip(xs, pairs, strict=True):
        named = printable(f"{pair.row.module} ({pair.row.class_name}): {pair.error:.2g}")
        title = f"<title>{escape(named)}</title>"
        colour = "#2e7d32" if pair.agrees else "#c62828"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{_y(pair.error):.1f}" r="3.5" fill="{colour}">{title}</circle>'
        )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BOTTOM + 28}" width="{WIDTH}"'
            ' font-family="sans-serif" font-size="12" role="img">',
            '<rect width="100%" height="100%" fill="#fff"/>',
            _text(LEFT, 16, "relative difference of each module's outputs, in order of execution"),
            *parts,
            "</svg>\n",
        ]
    )


def _y(error: float) -> float:
    """The height of a difference, in px from the top."""
    exponent = math.log10(min(error, 1.0)) if error else _LEAST - 1
    return TOP + (BOTTOM - 10 - TOP) * max(exponent, _LEAST if error else _LEAST - 1) / (_LEAST - 1)


def _scale() -> Iterator[str]:
    for exponent in range(0, _LEAST - 1, -3):
        y = _y(10.0**exponent)
        yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#cfd6dd"/>'
        yield _text(LEFT - 6, y + 4, f"1e{exponent}" if exponent else "1", "end")
    yield _text(LEFT - 6, _y(0.0) + 4, "0", "end")


def _groups(pairs: Sequence[Pair], step: float) -> Iterator[str]:
    """A band behind each block of a model, with its name where there is room."""
    begin = 0
    names = (_group(pair.row.module) for pair in pairs)
    for number, (name, members) in enumerate(groupby(names)):
        count = sum(1 for _ in members)
        x, width = LEFT + step * begin, step * count
        if number % 2 == 0:
            yield f'<rect x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{BOTTOM - TOP}" fill="#f1f4f7"/>'
        if width > 7 * len(name):
            yield _text(x + width / 2, BOTTOM + 17, name, "middle")
        begin += count


def _group(module: str) -> str:
    """`blocks.1` of `predictor.blocks.1.attn.q`, and `head` of `predictor.head.norm`."""
    parts = module.split(".")[1:] or [module]
    numbered = next((index for index, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[: numbered + 1])


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#1c2733") -> str:
    shown = escape(printable(text))
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{shown}</text>'
