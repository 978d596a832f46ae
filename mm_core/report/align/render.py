"""The result of `mm align compare` as text, JSON and a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from mm_core.errors import plural, printable, some
from mm_core.report.align.chart import chart
from mm_core.report.align.compare import Comparison, Finding, Pair

_MOST = 12
"""Findings and settings that the text lists."""
_STYLE = "body{font:14px sans-serif;margin:2em}td{padding:1px 8px}pre{background:#f4f4f4;overflow:auto}"


def label(pair: Pair) -> str:
    """Where a tensor is, in a few words: `step 1, micro-batch 0: output 0 of predictor.blocks.0`."""
    row = pair.row
    at = f"step {row.step + 1}" + (f", micro-batch {row.micro}" if row.micro >= 0 else "")
    kinds = {
        "in": "input",
        "out": "output",
        "grad_in": "gradient of input",
        "grad_out": "gradient of output",
        "updated": "weight after the update",
        "optimizer": "optimizer state",
        "parameter": "weight",
        "gradient": "gradient of",
    }
    named = f"{kinds.get(row.kind, row.kind)} {row.name}" + f" of {row.module}" * bool(row.module)
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


def finding_text(finding: Finding) -> str:
    """What a finding is, where, and its numbers."""
    kind = finding.pair.row.class_name
    place = printable(finding.where + f" ({kind})" * bool(kind))
    return f"{place}: {finding.what}\n    {label(finding.pair)}\n    {shown(finding.pair)}"


def growth(result: Comparison) -> list[Pair]:
    """Outputs of the first step's first micro-batch in order of execution: the largest of each module."""
    worst: dict[str, Pair] = {}
    outputs = [pair for pair in result.pairs if pair.row.kind == "out"]
    for pair in outputs:
        if (pair.row.step, pair.row.micro) == (outputs[0].row.step, outputs[0].row.micro):
            known = worst.get(pair.row.module)
            if known is None or pair.error > known.error:
                worst[pair.row.module] = pair
    return list(worst.values())


def text(result: Comparison, elements: str | None = None) -> str:
    """The comparison as lines for a terminal.

    Args:
        result: the comparison.
        elements: what the stored tensors of the first finding show.
    """
    agreeing = sum(pair.agrees for pair in result.pairs)
    equal = sum(pair.error == 0 for pair in result.pairs)
    counts = (
        f"{equal:,} equal, {agreeing - equal:,} within the tolerance,"
        f" {len(result.pairs) - agreeing:,} different"
    )
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
    if result.findings:
        lines += ["", "FIRST DIFFERENCE", finding_text(result.findings[0])]
        lines += [f"    {elements}"] * (elements is not None)
        later = result.findings[1:_MOST]
        lines += ["", "then"] * bool(later) + [f"  {label(each.pair)}: {each.what}" for each in later]
        if result.settings:
            lines += ["", "settings that differ"]
            lines += [
                printable(f"  {key}: {one} | {two}")
                for key, (one, two) in list(result.settings.items())[:_MOST]
            ]
    return "\n".join(lines)


def document(result: Comparison) -> dict[str, Any]:
    """The comparison as JSON values."""
    return {
        "equal": sum(pair.error == 0 for pair in result.pairs),
        "compared": len(result.pairs),
        "different": sum(not pair.agrees for pair in result.pairs),
        "findings": [
            {
                "where": each.where,
                "what": each.what,
                "kind": each.pair.row.kind,
                "step": each.pair.row.step,
                "micro": each.pair.row.micro,
                "name": each.pair.row.name,
                "error": each.pair.error if math.isfinite(each.pair.error) else None,
            }
            for each in result.findings
        ],
        "settings": result.settings,
        "unmatched": result.unmatched,
        "notes": result.notes,
        "whole": result.whole,
    }


def page(result: Comparison, names: Sequence[str]) -> str:
    """The comparison as one HTML page: the text, and how the difference grows over the modules.

    Args:
        result: the comparison.
        names: of both records.
    """
    pairs = growth(result)
    rows = [
        f'<tr style="color:{"#2e7d32" if pair.agrees else "#c62828"}">'
        f"<td>{escape(printable(pair.row.module))}</td>"
        f"<td>{escape(printable(pair.row.class_name))}</td><td>{pair.error:.2g}</td></tr>"
        for pair in pairs
    ]
    title = f"{escape(names[0])} and {escape(names[1])}"
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    body = f"<h1>{title}</h1><pre>{escape(text(result))}</pre>"
    if pairs:
        head_row = "<tr><th>module</th><th>class</th><th>difference</th></tr>"
        body += f"<h2>Outputs</h2>\n{chart(pairs)}<table>{head_row}{''.join(rows)}</table>"
    return f"{head}<body>{body}</body></html>\n"
