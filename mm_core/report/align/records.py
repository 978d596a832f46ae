"""Records of training steps: reading them, and finding the names of one record in another."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from mm_core.errors import MMError

PHASES = {"parameter": 0, "gradient": 2, "grad_norm": 3, "updated": 4, "optimizer": 5}
"""Kinds of rows of a step as a whole, in the order of a step; the others are of a micro-batch: phase 1."""

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
            beginning = re.escape(theirs).replace(r"\*", r"([^.]+)")
            if match := re.match(beginning + r"(?=\.|$)", name):
                put = ours.replace("*", "{}").format(*match.groups())
                return put + name[match.end() :]
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
        facts = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        files = _files_of_ranks(folder, facts.get("world", 1))
        # What follows the last newline is a row that was cut, or nothing.
        texts = [file.read_text(encoding="utf-8").rpartition("\n")[0] for file in files]
        found = [[json.loads(line) for line in text.splitlines()] for text in texts]
        closed = all(_END in of_rank[-1:] for of_rank in found)
        rows = [_row(values, names or Names()) for each in found for values in each if values != _END]
    except (OSError, ValueError, KeyError) as error:
        raise MMError(
            f"the folder holds no record that is complete: {error}",
            where=str(folder),
            accepted="a folder that mm align record, or the file that mm align recorder prints, has written",
        ) from None
    rows.sort(key=order_of)
    return Record(folder, facts, rows, closed)


def _files_of_ranks(folder: Path, count: int) -> list[Path]:
    """The files of rows of at least this number of ranks."""
    files = {int(file.stem.partition("_")[2]): file for file in folder.glob("rows_*.jsonl")}
    missing = [rank for rank in range(max([count, *(rank + 1 for rank in files)])) if rank not in files]
    if missing:
        what = f"the record lacks the rows of rank {missing[0]}: rows_{missing[0]}.jsonl does not exist"
        raise MMError(what, where=str(folder), hint="copy the files of all ranks, or record again")
    return [files[rank] for rank in sorted(files)]


def _row(values: dict[str, Any], names: Names) -> Row:
    module = names.ours(values.pop("module")) if "module" in values else ""
    name, whole = values.pop("name"), values["kind"] in PHASES
    return Row(
        kind=values.pop("kind"),
        step=values.pop("step"),
        micro=values.pop("micro", -1),
        module=module,
        call=values.pop("call", 0),
        name=names.ours(name) if whole else name,
        class_name=values.pop("class", ""),
        facts=values,
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
