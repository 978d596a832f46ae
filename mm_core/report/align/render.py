"""The result of `mm align compare` as text, JSON, a page and its chart: how the difference grows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, takewhile
from typing import Any

from mm_core.errors import MMError, plural, printable, some
from mm_core.report.align.compare import Comparison, Pair
from mm_core.report.align.records import KINDS
from mm_core.report.page import document as in_style
from mm_core.report.page import table

_MOST = 12
"""Findings and settings that the text lists."""
_RED = "#c62828"

WIDTH, TOP, BOTTOM, LEFT, RIGHT = 720, 28, 250, 52, 708
"""Of the drawing, and the edges of its plot, in px."""

_LEAST = -9
"""Exponent of the smallest difference of the scale; a smaller one is drawn there, and 0 below it."""


def label(pair: Pair) -> str:
    """Where a tensor is, in a few words: `step 1, micro-batch 0: output 0 of predictor.blocks.0`."""
    row = pair.row
    at = f"step {row.step + 1}" + (f", micro-batch {row.micro}" if row.micro >= 0 else "")
    named = f"{KINDS[row.kind][1]} {row.name}" + f" of {row.module}" * bool(row.module)
    return f"{at}: {printable(named)}"


def shown(pair: Pair) -> str:
    """How far a tensor is apart: its relative difference, and the statistics of both records."""
    a, b = pair.row.facts, pair.other.facts
    if None in (a["shape"], b["shape"]):
        return f"only the {'second' if a['shape'] is None else 'first'} record has it"
    if a["shape"] != b["shape"]:
        return f"shapes {a['shape']} and {b['shape']}"
    if a["bad"] != b["bad"]:
        return f"{a['bad']:.3g} and {b['bad']:.3g} of the elements are not finite"
    both = "; ".join(f"{key} {a[key]:.7g} and {b[key]:.7g}" for key in ("l2", "mean", "min", "max"))
    types = f", {a['dtype']} and {b['dtype']}" if a["dtype"] != b["dtype"] else f", {a['dtype']}"
    return f"relative difference about {pair.error:.2g} (allowed {pair.tolerance:.2g}){types}; {both}"


def growth(result: Comparison) -> list[Pair]:
    """Outputs of the first step's first micro-batch in order of execution: the largest of each module."""
    worst: dict[str, Pair] = {}
    outputs = [pair for pair in result.pairs if pair.row.kind == "out"]
    for pair in outputs:
        if pair.row.order == outputs[0].row.order:
            known = worst.setdefault(pair.row.module, pair)
            worst[pair.row.module] = max(known, pair, key=lambda each: each.error)
    return list(worst.values())


def text(result: Comparison, elements: str | None = None) -> str:
    """The comparison as lines for a terminal.

    Args:
        result: the comparison.
        elements: what the stored tensors of the first finding show.
    """
    lines = _summary(result)
    if result.findings:
        place, *first = _first(result.findings[0], elements)
        lines += ["", "FIRST DIFFERENCE", place, *(f"    {each}" for each in first)]
        later = result.findings[1:_MOST]
        lines += ["", "then"] * bool(later) + [f"  {label(each)}: {each.what}" for each in later]
        settings = list(result.settings.items())[:_MOST]
        lines += ["", "settings that differ"] * bool(settings)
        lines += [printable(f"  {key}: {one} | {two}") for key, (one, two) in settings]
    return "\n".join(lines)


def _summary(result: Comparison) -> list[str]:
    """How many tensors are compared and equal, and what is not compared."""
    equal, different = _counts(result)
    within = len(result.pairs) - equal - different
    counts = f"{equal:,} equal, {within:,} within the tolerance, {different:,} different"
    lines = [f"{plural(len(result.pairs), 'tensor')} compared: {counts}"]
    for names, which in zip(result.unmatched, ("first", "second"), strict=True):
        if names:
            count = f"{plural(len(names), 'name')} of modules and weights"
            lines.append(f"only the {which} record has {count}: {printable(some(names, 3))}")
    lines += result.notes
    if result.laid_otherwise:
        lines.append(
            f"rows of other shapes in {plural(len(result.laid_otherwise), 'step')} (packed or padded),"
            " with the same gradients: compared without modules"
        )
    return lines


def _first(first: Pair, elements: str | None) -> list[str]:
    """The first difference: its module and what it means, the tensor, how far it is apart, its elements."""
    place = printable(first.where + f" ({first.row.class_name})" * bool(first.row.class_name))
    lines = [f"{place}: {first.what}", label(first), shown(first), elements]
    return [each for each in lines if each is not None]


def _counts(result: Comparison) -> tuple[int, int]:
    """How many tensors are equal, and how many differ by more than the tolerance."""
    return sum(p.error == 0 for p in result.pairs), sum(not p.agrees for p in result.pairs)


def document(result: Comparison) -> dict[str, Any]:
    """The comparison as JSON values."""
    equal, different = _counts(result)
    findings = [
        {"where": each.where, "what": each.what}
        | {key: getattr(each.row, key) for key in ("kind", "step", "micro", "name")}
        | {"error": each.error if math.isfinite(each.error) else None}
        for each in result.findings
    ]
    known = {key: getattr(result, key) for key in ("settings", "unmatched", "notes", "whole")}
    counts = {"equal": equal, "compared": len(result.pairs), "different": different}
    return {**counts, "findings": findings, **known}


def page(result: Comparison, names: Sequence[str], elements: str | None = None) -> str:
    """The comparison as one HTML page in the style of `mm report`: the first difference, the settings
    that differ, and how the difference grows over the modules.

    Args:
        result: the comparison.
        names: of both records.
        elements: what the stored tensors of the first finding show.
    """
    title = printable(f"{names[0]} and {names[1]}")
    parts = [f"<h1>{escape(title)}</h1>"]
    if result.findings:
        place, *first = (escape(each) for each in _first(result.findings[0], elements))
        more = "".join(f'<p class="lines">{each}</p>' for each in first)
        head = f'<h2>First difference</h2><p class="remark">{place}</p>{more}'
        parts.append(f'<section class="card">{head}</section>')
    if result.settings:
        settings = [(key, str(one), str(two)) for key, (one, two) in result.settings.items()]
        parts += ["<h2>Settings that differ</h2>", _table(("setting", *names), settings)]
    parts += [f"<p>{escape(each)}</p>" for each in _summary(result)]
    if pairs := growth(result):
        parts += ["<h2>Outputs</h2>", f'<div class="scroll drawn">{chart(pairs)}</div>', *_outputs(pairs)]
    later = [(label(each), each.what, f"{each.error:.2g}") for each in result.findings[1:]]
    if later:
        parts += ["<h2>Also</h2>", _table(("tensor", "what", "difference"), later)]
    return in_style(f"{title}: mm align compare", f"<main>{''.join(parts)}</main>")


def _outputs(pairs: Sequence[Pair]) -> Iterator[str]:
    """Tables of the modules: of those whose outputs differ, and, folded, of those with equal outputs."""
    heads = ("module", "class", "difference")
    unequal, equal = ([pair for pair in pairs if bool(pair.error) is each] for each in (True, False))
    if unequal:
        red = [number for number, pair in enumerate(unequal) if not pair.agrees]
        cells = [(pair.row.module, pair.row.class_name, f"{pair.error:.2g}") for pair in unequal]
        yield _table(heads, cells, red)
    if equal:
        same = _table(heads[:2], [(pair.row.module, pair.row.class_name) for pair in equal])
        count = plural(len(equal), "module")
        yield f"<details><summary>{count} without a difference</summary>{same}</details>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], red: Sequence[int] = ()) -> str:
    return table([printable(each) for each in heads], [[*map(printable, row)] for row in rows], red)


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
    return "\n".join(_drawn(pairs))


def _drawn(pairs: Sequence[Pair]) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BOTTOM + 28}" width="{WIDTH}"'
        ' font-family="sans-serif" font-size="12" role="img">'
    )
    yield '<rect width="100%" height="100%" fill="#fff"/>'
    yield _text(LEFT, 16, "relative difference of each module's outputs, in order of execution")
    step = (RIGHT - LEFT) / len(pairs)
    yield from _groups(pairs, step)
    yield from _scale()
    placed = [(LEFT + step * (index + 0.5), pair) for index, pair in enumerate(pairs)]
    allowed = "".join(f"M{x - step / 2:.1f} {_y(pair.tolerance):.1f}h{step:.1f}" for x, pair in placed)
    yield f'<path d="{allowed}" stroke="#55616d" stroke-dasharray="4 3"/>'
    yield _text(LEFT + 4, _y(pairs[0].tolerance) - 5, "allowed")
    different = [index for index, pair in enumerate(pairs) if not pair.agrees]
    for index in different[:1]:
        x, side = placed[index][0], 1 if index < len(pairs) / 2 else -1
        yield f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="{_RED}"/>'
        name, anchor = f"first: {pairs[index].row.module}", "start" if side > 0 else "end"
        yield _text(x + 5 * side, BOTTOM - 22, name, anchor, _RED)
    for x, pair in placed:
        named = escape(printable(f"{pair.row.module} ({pair.row.class_name}): {pair.error:.2g}"))
        at = f'cx="{x:.1f}" cy="{_y(pair.error):.1f}" r="3.5" fill="{_colour(pair)}"'
        yield f"<circle {at}><title>{named}</title></circle>"
    yield "</svg>\n"


def _colour(pair: Pair) -> str:
    return "#2e7d32" if pair.agrees else _RED


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
    modules = [pair.row.module.split(".") for pair in pairs]
    shared = _shared(modules)
    names = (_group(parts, shared) for parts in modules)
    for number, (name, members) in enumerate(groupby(names)):
        count = sum(1 for _ in members)
        x, width = LEFT + step * begin, step * count
        if number % 2 == 0:
            yield f'<rect x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{BOTTOM - TOP}" fill="#f1f4f7"/>'
        while width <= 7 * len(name) and name.count(".") > 1:
            name = name.partition(".")[2]
        if width > 7 * len(name):
            yield _text(x + width / 2, BOTTOM + 17, name, "middle")
        begin += count


def _shared(modules: Sequence[list[str]]) -> list[str]:
    """The parts that the names of modules begin with; containers of others and children of a root aside."""
    around = {tuple(parts[:count]) for parts in modules for count in range(1, len(parts))}
    inner = [parts[:-1] for parts in modules if len(parts) > 2 and tuple(parts) not in around]
    ends = zip(min(inner, default=[]), max(inner, default=[]), strict=False)
    shared = [part for part, other in takewhile(lambda both: both[0] == both[1], ends)]
    within = [parts for parts in modules if parts[: len(shared)] == shared and len(parts) > len(shared)]
    # What numbers are of is a part of the label: `blocks.1`.
    return shared[:-1] if all(parts[len(shared)].isdecimal() for parts in within) else shared


def _group(parts: list[str], shared: list[str]) -> str:
    """`blocks.1` of `predictor.blocks.1.attn.q`, and `head` of `predictor.head.norm`."""
    begin = len(shared) if parts[: len(shared)] == shared else 1
    parts = parts[max(begin, 1) :] or parts[-1:]
    numbered = next((index for index, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[: numbered + 1])


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#1c2733") -> str:
    shown = escape(printable(text))
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{shown}</text>'
