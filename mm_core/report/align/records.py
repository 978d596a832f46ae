"""Records of training steps: reading them, and finding the names of one record in another."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import chain
from pathlib import Path
from typing import Any

from mm_core.errors import MMError, did_you_mean, some
from mm_core.files import read_plain

PHASES = {"parameter": 0, "gradient": 2, "grad_norm": 3, "updated": 4, "optimizer": 5}
"""Kinds of rows of a step as a whole, in the order of a step; the others are of a micro-batch: phase 1."""

_KINDS = {*PHASES, "input", "in", "out", "loss", "grad_in", "grad_out"}
_OPTIONAL = {"micro": -1, "module": "", "call": 0, "class": ""}
_NUMBER, _SKETCH = (int, float), 8
_TYPES: Mapping[str, Any] = {
    **{key: type(value) for key, value in _OPTIONAL.items()},
    **{"kind": str, "step": int, "name": str, "shape": list, "dtype": str, "sketch": list, "hash": str},
    **dict.fromkeys(("min", "max", "mean", "l2", "bad"), _NUMBER),
}

_END = {"kind": "end"}
"""The last row of each rank, which closing the record writes."""

Call = tuple[int, int, str, int]
"""Step, micro-batch, module, and number of the call."""


@dataclass(frozen=True)
class Row:
    """One tensor of a record.

    Attributes:
        kind: parameter, input, in, out, loss, grad_out, grad_in, gradient, grad_norm, updated or optimizer.
        step: from 0.
        micro: micro-batch of the step over all ranks; -1 for the step as a whole.
        module: the module whose call it belongs to, or "".
        call: number of the call in the micro-batch.
        name: argument, output, parameter or input.
        class_name: of the module.
        facts: shape, dtype, min, max, mean, l2, bad, sketch, hash and, where stored, file.
    """

    kind: str
    step: int
    micro: int
    module: str
    call: int
    name: str
    class_name: str
    facts: Mapping[str, Any]

    @property
    def of(self) -> Call:
        return (self.step, self.micro, self.module, self.call)


@dataclass(frozen=True)
class Names:
    """Translates the names of another record.

    Attributes:
        rules: (theirs, ours): the beginning of a name, in which `*` is one part, such as `layers.*.mlp`.
        modules: their modules -> ours.
    """

    rules: tuple[tuple[str, str], ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, rules: Sequence[str]) -> Names:
        """The names for `--map THEIRS=OURS`.

        Raises:
            MMError: a rule has no `=`, or its sides have different numbers of `*`.
        """
        pairs = [rule.partition("=") for rule in rules]
        for rule, (theirs, sign, ours) in zip(rules, pairs, strict=True):
            if not sign or theirs.count("*") != ours.count("*"):
                accepted = "THEIRS=OURS, with as many `*` on both sides, such as layers.*.mlp=blocks.*.ffn"
                raise MMError(f"{rule!r} is not a map of names", where="--map", accepted=accepted)
        return cls(tuple((theirs, ours) for theirs, _, ours in pairs))

    def ours(self, name: str) -> str:
        """Our name for a name of theirs; the same where no rule fits."""
        for theirs, ours in self.rules:
            if match := _beginning(theirs, name):
                between = (*match.groups(), name[match.end() :])
                return "".join(chain(*zip(ours.split("*"), between, strict=True)))
        head, _, last = name.rpartition(".")
        if name in self.modules:
            return self.modules[name]
        return f"{self.modules[head]}.{last}" if head in self.modules else name


@dataclass(frozen=True)
class Record:
    """A record as `mm align record` or the recorder's file has written it.

    Attributes:
        folder: where it lies.
        facts: versions and settings.
        rows: of all ranks, in the order of execution.
        closed: whether every rank has ended its rows; otherwise they may be cut anywhere.
    """

    folder: Path
    facts: Mapping[str, Any]
    rows: Sequence[Row]
    closed: bool = True

    def calls(self) -> dict[str, tuple[Any, ...]]:
        """The modules in the order in which their first calls end, with the shapes of their outputs."""
        found: dict[str, tuple[Any, ...]] = {}
        first = min(((row.step, row.micro) for row in self.rows if row.kind == "out"), default=(0, 0))
        for row in self.rows:
            if row.kind == "out" and row.call == 0 and (row.step, row.micro) == first:
                found[row.module] = (*found.get(row.module, ()), tuple(row.facts["shape"]))
        return found


def order_of(row: Row) -> tuple[int, int, int]:
    """Sorts rows by step, phase and micro-batch; rows of a micro-batch stay in the order of execution."""
    return (row.step, PHASES.get(row.kind, 1), row.micro)


def read_record(folder: Path, names: Names | None = None) -> Record:
    """Reads a record, with its names translated.

    Raises:
        MMError: the folder holds no record, or a damaged one, or the rows of a rank are missing.
    """
    try:
        facts = json.loads(read_plain(folder / "record.json"))
        if not isinstance(facts, dict):
            raise ValueError("record.json is no JSON object")
        files = _files_of_ranks(folder, facts.get("world"))
        # What follows the last newline is a row that was cut, or nothing.
        texts = [read_plain(file).decode().rpartition("\n")[0] for file in files]
        found = [[json.loads(line) for line in text.splitlines()] for text in texts]
        closed = all(_END in of_rank[-1:] for of_rank in found)
        values = [_checked(each) for of_rank in found for each in of_rank if each != _END]
    except (OSError, ValueError, RecursionError) as error:
        raise MMError(
            f"the folder holds no record that is complete: {error}",
            where=str(folder),
            accepted="a folder that mm align record, or the file that mm align recorder prints, has written",
        ) from None
    _check_map(names or Names(), values)
    rows = sorted((_row(each, names or Names()) for each in values), key=order_of)
    return Record(folder, facts, rows, closed)


def _files_of_ranks(folder: Path, world: object) -> list[Path]:
    """The files of rows of at least this number of ranks, where it is known."""
    files = {int(file.stem.partition("_")[2]): file for file in folder.glob("rows_*.jsonl")}
    count = max([world if isinstance(world, int) else 1, *(rank + 1 for rank in files)])
    missing = next((rank for rank in range(count) if rank not in files), None)
    if missing is not None:
        raise ValueError(f"the rows of rank {missing} are missing (rows_{missing}.jsonl)")
    return [files[rank] for rank in sorted(files)]


def _checked(row: object) -> dict[str, Any]:
    """The values of a row, optional ones included."""
    values = {**_OPTIONAL, **row} if isinstance(row, dict) else {}
    odd = [key for key, kind in _TYPES.items() if not isinstance(values.get(key), kind)]
    lists = [] if odd else [*values["shape"], *values["sketch"]]
    wrong = odd or values["kind"] not in _KINDS or len(values["sketch"]) != _SKETCH
    if wrong or not all(isinstance(each, _NUMBER) for each in lists):
        raise ValueError(f"{str(row)[:80]} is not a row{f': no valid {odd[0]!r}' if odd else ''}")
    return values


def _check_map(names: Names, rows: Sequence[Mapping[str, Any]]) -> None:
    known = {row["module"] for row in rows} | {row["name"] for row in rows if row["kind"] in PHASES}
    for theirs, _ in names.rules:
        if known and not any(_beginning(theirs, name) for name in known):
            begin = sorted({".".join(name.split(".")[:2]) for name in known if name})
            raise MMError(
                f"no name of the other record begins with {theirs!r}",
                where="--map",
                accepted=some(begin),
                hint=did_you_mean(theirs, known),
            )


def _beginning(pattern: str, name: str) -> re.Match[str] | None:
    """The beginning of a name that a pattern matches, in which `*` is one part."""
    return re.match(re.escape(pattern).replace(r"\*", r"([^.]+)") + r"(?=\.|$)", name)


def _row(values: Mapping[str, Any], names: Names) -> Row:
    name, named = values["name"], ("kind", "step", "name", *_OPTIONAL)
    return Row(
        kind=values["kind"],
        step=values["step"],
        micro=values["micro"],
        module=names.ours(values["module"]),
        call=values["call"],
        name=names.ours(name) if values["kind"] in PHASES else name,
        class_name=values["class"],
        facts={key: value for key, value in values.items() if key not in named},
    )


def names_by_order(ours: Record, theirs: Record, names: Names) -> Names:
    """Adds their modules that run in the same order as ours and return the same shapes."""
    a, b = ours.calls(), theirs.calls()
    matcher = SequenceMatcher(None, list(a.values()), list(b.values()), autojunk=False)
    pairs = {
        list(b)[block.b + i]: list(a)[block.a + i]
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    }
    return Names(names.rules, pairs)
