"""Comparing two records: the first number that differs, the module it comes from, and how it grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mm_core.errors import plural, some
from mm_core.report.align.records import KINDS, Record, Row
from mm_core.schema.nodes import leaves

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

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

_MOST = 4
"""Steps that a sentence lists."""


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

    @property
    def where(self) -> str:
        """The module, parameter or input."""
        return self.row.module or self.row.name

    @property
    def what(self) -> str:
        """What a difference that begins here means."""
        return KINDS[self.row.kind][2]


@dataclass
class Comparison:
    """The result of comparing two records.

    Attributes:
        findings: where the records begin to differ, in the order of execution; the first is the cause to look
            at.
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

    findings: list[Pair] = field(default_factory=list)
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
    a, b, result.notes = _common(a, b)
    result.unmatched = (_alone(a, b), _alone(b, a))
    result.weights_apart = _weights(a) != _weights(b)
    result.pairs = _pairs(a, b, tolerance)
    calls = _grouped(result.pairs, lambda pair: (pair.row.kind, pair.row.of))
    for step in sorted({pair.row.step for pair in result.pairs}):
        pairs = [pair for pair in result.pairs if pair.row.step == step]
        result.findings = _findings(pairs, calls)
        if _laid_otherwise(pairs):
            result.laid_otherwise.append(step)
            result.pairs = [pair for pair in result.pairs if pair.row.step != step or pair.row.phase != 1]
            result.findings = _findings([pair for pair in pairs if pair.row.phase != 1], calls)
        if result.findings:
            break  # what follows is its consequence
    return result


def _common(a: Record, b: Record) -> tuple[Record, Record, list[str]]:
    """Both records without what cannot be compared, and sentences about it."""
    sides, both = (("first", a, b), ("second", b, a)), a.steps() & b.steps()
    notes = [
        f"the {side} record was not closed, its script has ended early: what both records have is compared"
        for side, record, _ in sides
        if not record.closed
    ]
    for side, record, other in sides:
        if steps := record.steps() - other.steps():
            count = plural(len(steps), "step")
            notes.append(f"only the {side} record has {count}, not compared: {_listed(steps)}")
    for side, record, other in sides:
        if steps := (other.steps("gradient") - record.steps("gradient")) & both:
            where = "" if steps == both else f" in {plural(len(steps), 'step')} ({_listed(steps)})"
            notes.append(f"the {side} record has no gradients{where}: not compared")
    # Of a step that a record does not end, gradients may be missing because it was cut there.
    ended = a.steps("updated") & b.steps("updated") - (a.steps("gradient") ^ b.steps("gradient"))
    named = a.of("gradient").keys() & b.of("gradient").keys()

    def compared(row: Row) -> bool:
        alone = row.kind == "gradient" and row.step not in ended and (row.step, row.name) not in named
        return row.step in both and not alone

    a, b = (replace(record, rows=[row for row in record.rows if compared(row)]) for record in (a, b))
    return a, b, notes


def _listed(steps: Iterable[int]) -> str:
    """The numbers of steps, from 1."""
    return some([str(step + 1) for step in sorted(steps)], _MOST)


def _alone(record: Record, other: Record) -> list[str]:
    """Modules that the other record lacks, and weights that it lacks and that are not of these modules."""
    modules, others = ({row.module for row in each.rows if row.module} for each in (record, other))
    alone = modules - others
    weights = {name for name in _weights(record) - _weights(other) if name.rpartition(".")[0] not in alone}
    return sorted(alone | weights)


def _weights(record: Record) -> set[str]:
    return {name for _, name in record.of("parameter")}


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _findings(pairs: Sequence[Pair], calls: Mapping[tuple[str, Any], Sequence[Pair]]) -> list[Pair]:
    """The findings of one step: every place at which a difference begins without one before it."""
    findings: list[Pair] = []
    kinds: set[str] = set()
    blamed: set[str] = set()
    modules = {pair.row.module for pair in pairs if pair.row.module}
    for pair in (pair for pair in pairs if not pair.agrees):
        row = pair.row
        if row.kind == "out":
            begins = _agree(calls.get(("in", row.of), ()))
        elif row.kind == "grad_in":
            before = calls.get(("grad_out", row.of), ())
            begins = bool(before) and _agree(before)
        elif row.kind == "in":  # of other modules, it is a consequence of what is before
            begins = not kinds and not any(row.module.startswith(f"{each}.") for each in modules)
        else:  # weights and inputs have no cause in a record; the others are consequences of what is before
            begins = row.kind in ("parameter", "input") or not kinds - {row.kind}
        inside = row.module and any(each.startswith(f"{row.module}.") for each in blamed)
        if begins and not inside and pair.where not in blamed:
            findings.append(pair)
            blamed.add(pair.where)
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
    groups, others = (_grouped(record.rows, lambda row: (row.kind, row.of)) for record in (a, b))
    matched = {id(x): y for key, rows in groups.items() for x, y in _match(rows, others.get(key, []))}
    floors = _floors(a.rows)
    found = []
    for row in a.rows:
        if (twin := matched.get(id(row))) is not None:
            allowed = max(TOLERANCES.get(each.facts["dtype"], 0.0) for each in (row, twin))
            error = difference(row, twin, floors.get(_family(row), 0.0))
            found.append(Pair(row, twin, error, allowed if tolerance is None else tolerance))
    return sorted([*found, *_one_sided(a, b)], key=lambda pair: pair.row.order)


def _one_sided(a: Record, b: Record) -> Iterator[Pair]:
    """Gradients of weights that both records have, and that only one of them trains."""
    one, two, weights = a.of("gradient"), b.of("gradient"), _weights(a) & _weights(b)
    for key, row in (one | two).items():
        if (key in one) != (key in two) and key[1] in weights:
            none = replace(row, facts={**row.facts, "shape": None})
            yield Pair(*((row, none) if key in one else (none, row)), math.inf, 0.0)


def _match(rows: Sequence[Row], others: Sequence[Row]) -> Iterable[tuple[Row, Row]]:
    """By name; what is left of a call by shape, in order: other scripts name their arguments otherwise."""
    rest, left = {_tail(row): row for row in others}, []
    for row in rows:
        if (twin := rest.pop(_tail(row), None)) is not None:
            yield row, twin
        else:
            left.append(row)
    for row in left if rows[0].module else ():
        same = next((key for key in rest if rest[key].facts["shape"] == row.facts["shape"]), None)
        if same is not None:
            yield row, rest.pop(same)


def _tail(row: Row) -> str:
    """The name; of an input without the part that other scripts do not have (`given.latents`)."""
    return row.name.rpartition(".")[2] if row.kind == "input" else row.name


def _floors(rows: Iterable[Row]) -> dict[tuple[int, str, str], float]:
    largest: dict[tuple[int, str, str], float] = {}
    for row in rows:
        if row.kind in ("gradient", "grad_in", "grad_out", "optimizer"):
            key = _family(row)
            largest[key] = max(largest.get(key, 0.0), _SMALL * row.facts["l2"])
    return largest


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


def settings_that_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Facts that are in both documents and differ, by dotted key; lists and sections are compared by item."""
    one, other = ({k: v for k, v in leaves(x, lists=True) if k not in _PLACES} for x in (a, b))
    return {key: (one[key], other[key]) for key in one if key in other and one[key] != other[key]}
