"""Comparing two records: the first number that differs, the module it comes from, and how it grows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mm_core.report.align.common import common
from mm_core.report.align.records import PHASES, Call, Record, Row, order_of
from mm_core.schema.nodes import leaves

TOLERANCES = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}
TOLERANCES |= {"complex128": 1e-12, "complex64": 1e-6}
"""Largest relative L2 difference that counts as equal, by the coarser dtype; others must be equal."""

_SMALL = 0.1
"""Gradients are judged by at least this share of the largest of their kind: what is smaller is rounding."""

_NEIGHBOURS = {"float16": 2**-10, "bfloat16": 2**-7}
"""Largest relative distance of two numbers without one between them: one element may be rounded otherwise."""

_ROUNDING = {"float64": 1e-12, "complex128": 1e-12}
"""What sums over the same bits may differ by on two devices; 1e-5 for others. Beyond it, signs have changed:
the hash of bits is a sum that misses the signs of an even number of elements."""

_PLACES = ("config.run.dir", "config.run.name")

_WHAT = {
    "parameter": "the weights differ before the first of these steps",
    "input": "what the model computes from differs",
    "in": "it is called with different arguments",
    "out": "its inputs agree, and its outputs do not",
    "loss": "the loss differs, and the model's outputs agree",
    "grad_out": "the gradient that reaches it differs, and the loss agrees",
    "grad_in": "the gradients of its outputs agree, and those of its inputs do not",
    "gradient": "the gradient differs, and those of all activations agree",
    "grad_norm": "the gradient norm differs, and the gradients agree",
    "updated": "the weight differs after the update, and its gradient agrees",
    "optimizer": "the optimizer's state differs, and the updated weights agree",
}


@dataclass(frozen=True)
class Pair:
    """A tensor in both records.

    Attributes:
        row: as in the first record.
        other: in the second.
        error: estimated relative L2 difference; 0 for equal bits, inf for other shapes or non-finite values.
        tolerance: what counts as equal.
    """

    row: Row
    other: Row
    error: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Finding:
    """A place where the records begin to differ.

    Attributes:
        what: what is observed.
        where: the module, parameter or input.
        pair: the tensor.
    """

    what: str
    where: str
    pair: Pair


@dataclass
class Comparison:
    """The result of comparing two records.

    Attributes:
        findings: in the order of execution; the first is the cause to look at.
        pairs: every tensor in both records, in order.
        unmatched: modules of the first record that the second one lacks, and the reverse; also weights that
            only one of them has, outside these modules.
        weights_apart: whether one of them has a weight that the other lacks.
        settings: facts that differ: key -> (first, second).
        laid_otherwise: steps whose samples are in rows of other shapes (packed, padded), and whose gradients
            agree; of these only what is of the step as a whole is compared.
        notes: sentences about what is not compared.
        whole: whether both records were closed, so that no rows can be missing.
    """

    findings: list[Finding] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    unmatched: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    weights_apart: bool = False
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    laid_otherwise: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole: bool = True

    @property
    def same(self) -> bool:
        """Whether nothing differs, no weight is in one record only, and no module has another name. A module
        without weights may be in one record only: a script calls a function in its place."""
        return self.whole and not self.findings and not self.weights_apart and not all(self.unmatched)


def compare(a: Record, b: Record, tolerance: float | None = None) -> Comparison:
    """Compares two records.

    Args:
        a: the first; its order of execution counts.
        b: the second, with names translated to those of the first.
        tolerance: replaces `TOLERANCES`; 0 compares bits.
    """
    result = Comparison(settings=settings_that_differ(a.facts, b.facts), whole=a.closed and b.closed)
    a, b, result.notes = common(a, b)
    result.unmatched = (_alone(a, b), _alone(b, a))
    result.weights_apart = _weights(a) != _weights(b)
    result.pairs = _pairs(a, b, tolerance)
    calls: dict[Call, dict[str, list[Pair]]] = {}
    for pair in result.pairs:
        calls.setdefault(pair.row.of, {}).setdefault(pair.row.kind, []).append(pair)
    for step in sorted({pair.row.step for pair in result.pairs}):
        pairs = [pair for pair in result.pairs if pair.row.step == step]
        result.findings = _findings(pairs, calls)
        if _laid_otherwise(pairs):
            whole = [pair for pair in pairs if pair.row.kind in PHASES]
            result.laid_otherwise.append(step)
            result.findings = _findings(whole, calls)
            result.pairs = [p for p in result.pairs if p.row.step != step or p.row.kind in PHASES]
        if result.findings:
            break  # what follows is its consequence
    return result


def _alone(record: Record, other: Record) -> list[str]:
    """Modules that the other record lacks, and weights that it lacks and that are not of these modules."""
    modules, others = ({row.module for row in each.rows if row.module} for each in (record, other))
    alone = modules - others
    weights = {name for name in _weights(record) - _weights(other) if name.rpartition(".")[0] not in alone}
    return sorted(alone | weights)


def _weights(record: Record) -> set[str]:
    return {row.name for row in record.rows if row.kind == "parameter"}


def _findings(pairs: Sequence[Pair], calls: Mapping[Call, Mapping[str, Sequence[Pair]]]) -> list[Finding]:
    """The findings of one step: every place at which a difference begins without one before it."""
    findings: list[Finding] = []
    kinds: set[str] = set()
    blamed: set[str] = set()
    modules = {pair.row.module for pair in pairs if pair.row.module}
    for pair in pairs:
        row, own = pair.row, calls[pair.row.of]
        if pair.agrees:
            continue
        if row.kind == "out":
            begins = _agree(own.get("in", ()))
        elif row.kind == "grad_in":
            begins = bool(own.get("grad_out")) and _agree(own["grad_out"])
        elif row.kind == "in":  # of other modules, it is a consequence of what is before
            begins = not kinds and not any(row.module.startswith(f"{each}.") for each in modules)
        else:  # weights and inputs have no cause in a record; the others are consequences of what is before
            begins = row.kind in ("parameter", "input") or not kinds - {row.kind}
        place = row.module or row.name
        inside = any(each.startswith(f"{place}.") for each in blamed) and bool(row.module)
        if begins and not inside and place not in blamed:
            findings.append(Finding(_WHAT[row.kind], place, pair))
            blamed.add(place)
        if row.kind != "in" or begins:
            kinds.add(row.kind)
    return findings


def _laid_otherwise(pairs: Sequence[Pair]) -> bool:
    """Whether the samples of a step are in rows of other shapes (packed, padded), with the same gradients."""
    reshaped = any(p.row.kind == "input" and p.row.facts["shape"] != p.other.facts["shape"] for p in pairs)
    whole = [pair for pair in pairs if pair.row.kind in ("parameter", "gradient", "grad_norm")]
    return reshaped and any(pair.row.kind == "gradient" for pair in whole) and _agree(whole)


def _agree(pairs: Iterable[Pair]) -> bool:
    return all(pair.agrees for pair in pairs)


def _pairs(a: Record, b: Record, tolerance: float | None) -> list[Pair]:
    other: dict[tuple[Any, ...], list[Row]] = {}
    for row in b.rows:
        other.setdefault((row.kind, row.of), []).append(row)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in a.rows:
        groups.setdefault((row.kind, row.of), []).append(row)
    matched = {id(x): y for key, rows in groups.items() for x, y in _match(rows, other.get(key, []))}
    floors = _floors(a.rows)
    found = []
    for row in a.rows:
        if (twin := matched.get(id(row))) is not None:
            floor = floors.get(_family(row), 0.0)
            found.append(Pair(row, twin, difference(row, twin, floor), _tolerance(row, twin, tolerance)))
    return sorted([*found, *_one_sided(a, b)], key=lambda pair: order_of(pair.row))


def _one_sided(a: Record, b: Record) -> list[Pair]:
    """Gradients of weights that both records have, and that only one of them trains."""
    both = {row.name for row in a.rows if row.kind == "parameter"}
    both &= {row.name for row in b.rows if row.kind == "parameter"}
    one, two = ({(r.step, r.name): r for r in x.rows if r.kind == "gradient"} for x in (a, b))
    alone = [row for key, row in (one | two).items() if (key in one) != (key in two) and key[1] in both]
    pairs = [(row, replace(row, facts={**row.facts, "shape": None})) for row in alone]
    pairs = [pair if (pair[0].step, pair[0].name) in one else pair[::-1] for pair in pairs]
    return [Pair(row, other, math.inf, 0.0) for row, other in pairs]


def _match(rows: Sequence[Row], others: Sequence[Row]) -> Iterable[tuple[Row, Row]]:
    """By name; what is left of a call by shape, in order: other scripts name their arguments otherwise."""
    named = {row.name.rpartition(".")[2] if row.kind == "input" else row.name: row for row in others}
    left = []
    for row in rows:
        name = row.name.rpartition(".")[2] if row.kind == "input" else row.name
        if (twin := named.pop(name, None)) is not None:
            yield row, twin
        else:
            left.append(row)
    rest = list(named.values())
    for row in left if rows and rows[0].module else ():
        same = [each for each in rest if each.facts["shape"] == row.facts["shape"]]
        if same:
            rest.remove(same[0])
            yield row, same[0]


def _floors(rows: Iterable[Row]) -> dict[tuple[int, str, str], float]:
    largest: dict[tuple[int, str, str], float] = {}
    for row in rows:
        if row.kind in ("gradient", "grad_in", "grad_out", "optimizer"):
            key = _family(row)
            largest[key] = max(largest.get(key, 0.0), row.facts["l2"])
    return {key: _SMALL * norm for key, norm in largest.items()}


def _family(row: Row) -> tuple[int, str, str]:
    """What has one scale in a step: gradients, or one kind of optimizer state (`step`, `exp_avg`)."""
    return (row.step, row.kind, row.name.rpartition(".")[2] if row.kind == "optimizer" else "")


def difference(one: Row, other: Row, floor: float = 0.0) -> float:
    """Estimated relative L2 difference of two tensors, from their statistics.

    Args:
        one: of the first record.
        other: of the second.
        floor: smallest norm that the difference is divided by.
    """
    a, b = one.facts, other.facts
    if a["shape"] != b["shape"] or a["bad"] != b["bad"]:
        return math.inf
    norm = max(a["l2"], b["l2"], floor)
    peak = max(abs(x[key]) for x in (a, b) for key in ("min", "max"))
    apart = math.dist(a["sketch"], b["sketch"])
    edges = max(abs(a[key] - b[key]) for key in ("min", "max"))
    if norm == 0:
        return 0.0
    edge = edges / max(peak, floor)
    edge = edge if edge > max(_NEIGHBOURS.get(x["dtype"], 0.0) for x in (a, b)) else 0.0
    error = float(max(apart / norm, abs(a["l2"] - b["l2"]) / norm, edge))
    same = a["hash"] == b["hash"] and a["dtype"] == b["dtype"]
    return 0.0 if same and error <= _ROUNDING.get(a["dtype"], 1e-5) else error


def _tolerance(one: Row, other: Row, given: float | None) -> float:
    if given is not None:
        return given
    return max(TOLERANCES.get(row.facts["dtype"], 0.0) for row in (one, other))


def settings_that_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Facts that are in both documents and differ, by dotted key; lists and sections are compared by item."""
    one, other = ({k: v for k, v in leaves(x, lists=True) if k not in _PLACES} for x in (a, b))
    return {key: (one[key], other[key]) for key in one if key in other and one[key] != other[key]}
