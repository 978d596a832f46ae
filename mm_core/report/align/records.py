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

KINDS = {
    "parameter": (0, "weight", "the weights differ before the first of these steps"),
    "input": (1, "input", "what the model computes from differs"),
    "in": (1, "input", "it is called with different arguments"),
    "out": (1, "output", "its inputs agree, and its outputs do not"),
    "loss": (1, "loss", "the loss differs, and the model's outputs agree"),
    "grad_out": (1, "gradient of output", "the gradient that reaches it differs, and the loss agrees"),
    "grad_in": (1, "gradient of input", "the gradients of its outputs agree, and those of its inputs do not"),
    "gradient": (2, "gradient of", "the gradient differs, and those of all activations agree"),
    "grad_norm": (3, "grad_norm", "the gradient norm differs, and the gradients agree"),
    "updated": (4, "weight after the update", "the weight differs after the update, and its gradient agrees"),
    "optimizer": (5, "optimizer state", "the optimizer's state differs, and the updated weights agree"),
}
"""Kind of a row -> its phase of a step (of a micro-batch: 1), its name, and what a difference means."""

_NUMBER, _SKETCH = (int, float), 8
_OPTIONAL = {"micro": -1, "module": "", "call": 0, "class": ""}
_OWN = ("kind", "step", "micro", "module", "call", "name", "class")
_TYPES: Mapping[str, Any] = {
    **{key: type(value) for key, value in _OPTIONAL.items()},
    **{"kind": str, "step": int, "name": str, "shape": list, "dtype": str, "sketch": list, "hash": str},
    **dict.fromkeys(("min", "max", "mean", "l2", "bad"), _NUMBER),
}

_END = {"kind": "end"}
"""The last row of each rank, which closing the record writes."""


@dataclass(frozen=True)
class Row:
    """One tensor of a record.

    Attributes:
        kind: one of `KINDS`.
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
    def phase(self) -> int:
        return KINDS[self.kind][0]

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts by step, phase and micro-batch; rows of a micro-batch stay in the order of execution."""
        return (self.step, self.phase, self.micro)

    @property
    def of(self) -> tuple[int, int, str, int]:
        """The call that it belongs to."""
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

    def of(self, kind: str) -> dict[tuple[int, str], Row]:
        """The rows of a kind by step and name."""
        return {(row.step, row.name): row for row in self.rows if row.kind == kind}

    def steps(self, kind: str | None = None) -> set[int]:
        """The steps that have rows, or rows of a kind."""
        return {row.step for row in self.rows if kind in (None, row.kind)}

    def calls(self) -> dict[str, tuple[Any, ...]]:
        """The modules in the order in which their first calls end, with the shapes of their outputs."""
        found: dict[str, tuple[Any, ...]] = {}
        outputs = [row for row in self.rows if row.kind == "out"]
        for row in outputs:
            if row.call == 0 and row.order == outputs[0].order:
                found[row.module] = (*found.get(row.module, ()), tuple(row.facts["shape"]))
        return found


def read_record(folder: Path, names: Names | None = None) -> Record:
    """Reads a record, with its names translated.

    Raises:
        MMError: the folder holds no record, or a damaged one, or the rows of a rank are missing.
    """
    names = names or Names()
    try:
        facts = json.loads(read_plain(folder / "record.json"))
        if not isinstance(facts, dict):
            raise ValueError("record.json is no JSON object")
        files = _files_of_ranks(folder, facts.get("world"))
        # What follows the last newline is a row that was cut, or nothing.
        texts = [read_plain(file).decode().rpartition("\n")[0] for file in files]
        found = [[json.loads(line) for line in text.splitlines()] for text in texts]
        closed = all(_END in of_rank[-1:] for of_rank in found)
        rows = [_row(each, names) for of_rank in found for each in of_rank if each != _END]
    except (OSError, ValueError, RecursionError) as error:
        raise MMError(
            f"the folder holds no record that is complete: {error}",
            where=str(folder),
            accepted="a folder that mm align record, or the file that mm align recorder prints, has written",
        ) from None
    _check_map(names, rows)
    return Record(folder, facts, sorted(rows, key=lambda row: row.order), closed)


def _files_of_ranks(folder: Path, world: object) -> list[Path]:
    """The files of rows of at least this number of ranks, where it is known."""
    files = {int(file.stem.partition("_")[2]): file for file in folder.glob("rows_*.jsonl")}
    ranks = range(max([world if isinstance(world, int) else 1, *(rank + 1 for rank in files)]))
    for rank in ranks:
        if rank not in files:
            raise ValueError(f"the rows of rank {rank} are missing (rows_{rank}.jsonl)")
    return [files[rank] for rank in ranks]


def _row(found: object, names: Names) -> Row:
    """A row that is checked, with its names translated; `facts` keeps them as they are."""
    row = {**_OPTIONAL, **found} if isinstance(found, dict) else {}
    odd = [key for key, kind in _TYPES.items() if not isinstance(row.get(key), kind)]
    lists = [] if odd else [*row["shape"], *row["sketch"]]
    wrong = odd or row["kind"] not in KINDS or len(row["sketch"]) != _SKETCH
    if wrong or not all(isinstance(each, _NUMBER) for each in lists):
        raise ValueError(f"{str(found)[:80]} is not a row{f': no valid {odd[0]!r}' if odd else ''}")
    kind, step, micro, module, call, name, class_name = (row[key] for key in _OWN)
    name = name if KINDS[kind][0] == 1 else names.ours(name)
    return Row(kind, step, micro, names.ours(module), call, name, class_name, row)


def _check_map(names: Names, rows: Sequence[Row]) -> None:
    known = {row.facts["module"] for row in rows} | {row.facts["name"] for row in rows if row.phase != 1}
    for theirs, _ in names.rules:
        if known and not any(_beginning(theirs, name) for name in known):
            what = f"no name of the other record begins with {theirs!r}"
            begin = some(sorted({".".join(name.split(".")[:2]) for name in known if name}))
            raise MMError(what, where="--map", accepted=begin, hint=did_you_mean(theirs, known))


def _beginning(pattern: str, name: str) -> re.Match[str] | None:
    """The beginning of a name that a pattern matches, in which `*` is one part."""
    return re.match(re.escape(pattern).replace(r"\*", r"([^.]+)") + r"(?=\.|$)", name)


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
