"""The table of kinds and faults: what finds each fault, or why it does not apply.

python tests/mutants/table.py    writes README.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from mm_core.plugin.hookspecs import KINDS  # noqa: E402
from support.mutants import Mutant, read_mutants  # noqa: E402

_ABOUT = """\
Made by table.py from sighted.toml and blind.toml: do not edit. `check` is `mm plugins check` and `mm
validate`, which import nothing; `import` is `mm plugins check --import`, a dry run and the start of a run;
other words are the checks of `mm plugins test`. Each cell is a mutant that a nightly test runs. Faults of one
kind alone are in sighted.toml."""
_BLIND = """\
Written by somebody who had the contracts, the pages and the templates, but neither the checks nor their list.
The kit of that day found {first} of {all}; checks were added for those that it missed."""
_FIRST = 62
_NOTHING = "returns nothing"
_NUMBER = "takes and returns numbers"
_NO_TENSORS = "has no tensors"
_NO_BATCH = "gets no batch of samples"
_PURE = "found as kept state: equal calls must give equal results"

FAULTS: Mapping[str, Mapping[str, str]] = {
    "wrong target": {},
    "missing member": {
        "weight_format": "the example derives from a format that has all members",
        "callback": "each method may be absent",
    },
    "wrong signature": {"optimizer": "`step(closure=None)` is torch's own"},
    "misspelt method": {"*": "found as a missing member: no base class has a method in its place"},
    "wrong shape": {
        **dict.fromkeys(("tracker", "callback"), _NOTHING),
        "lr_schedule": _NUMBER,
        "optimizer": "updates in place",
        "engine": "returns numbers and states: see its kit's tests",
        "weight_format": "shapes follow from the key map",
        "migration": _NO_TENSORS,
    },
    "wrong dtype": {
        **dict.fromkeys(("tracker", "callback"), _NOTHING),
        **dict.fromkeys(("autoencoder", "image_encoder"), "any floating dtype: the task casts"),
        "engine": "dtypes are settings",
        "weight_format": "dtypes are stored as they are",
        "migration": _NO_TENSORS,
    },
    "unset tensor": {
        "task": "its modules are filled by the engine, which names what is unset: see predictor",
        "engine": "fills tensors: see its kit's tests",
        "optimizer": "makes its state in the first step",
        "metric": "makes its sums in reset",
        "*": _NO_TENSORS,
    },
    "global random numbers": {
        **dict.fromkeys(("text_encoder", "image_encoder", "lr_schedule", "metric", "video_reader"), _PURE),
        "engine": "found by its comparison with a loop of plain torch",
        "tracker": "draws nothing that others use",
        "weight_format": "names nothing by chance: found as kept state",
        "migration": "draws nothing",
    },
    "kept state": {
        "engine": "keeps the training state: `resumes`",
        "tracker": "keeps open files: `resumes`",
        "callback": "may keep what it has seen",
        "migration": "is called once a command",
    },
    "changed input": {
        "dataset": "gets numbers",
        "video_reader": "gets a path and times",
        "lr_schedule": _NUMBER,
        "engine": "changes parameters and gradients: that is its work",
        "optimizer": "changes parameters: that is its work",
        "weight_format": "only reads a component's shapes",
        "migration": "gets paths",
    },
    "lying declaration": dict.fromkeys(
        ("dataset", "lr_schedule", "metric", "tracker", "callback", "transform", "migration"),
        "declares nothing",
    ),
    "ignored input": {
        **dict.fromkeys(("autoencoder", "image_encoder"), "has one input: ignoring it is a wrong value"),
        "lr_schedule": "has one input",
        "tracker": "may ignore what it does not show",
        "callback": "may ignore events",
        "weight_format": "has one input",
    },
    "mixed batch": {
        "scheduler": "found as not linear",
        "dataset": "samples are read one by one: found as kept state",
        "engine": "sums over the batch: found as mean for a sum",
        "*": _NO_BATCH,
    },
    "mean for a sum": {"metric": "found as mixed batch", "*": "computes no loss"},
    "scalar parameter": {
        "*": "is no fault: it trains, whole and synchronised (tests/engines/test_scalars.py)"
    },
    "device name": {"*": "found by the same check of every kind, `no_device_names`"},
    "plain error": {
        "dataset": "unreadable files: tests/testing/test_dataset.py",
        "weight_format": "unreadable files: tests/testing/test_weight_format_kit.py",
        "*": "gets no input that a user chooses",
    },
}
"""Fault -> kind -> why it does not apply; `*`: all other kinds."""


def render(mutants: tuple[Mutant, ...], blind: tuple[Mutant, ...]) -> str:
    """The tables as Markdown.

    Args:
        mutants: of the table of kinds and faults.
        blind: those that were written without knowing the checks.
    """
    found = {(mutant.kind, mutant.name): mutant for mutant in mutants}
    lines = [
        "# Faults of plugin authors, and what finds them",
        _ABOUT,
    ]
    rows = [f"| kind | {' | '.join(FAULTS)} |", "|---" * (len(FAULTS) + 1) + "|"]
    reasons: list[str] = []
    for kind in KINDS:
        cells = []
        for fault, apart in FAULTS.items():
            mutant = found.get((kind, fault))
            if mutant is None:
                reason = apart.get(kind, apart.get("*"))
                assert reason is not None, f"{kind}: {fault} has neither a mutant nor a reason"
                if reason not in reasons:
                    reasons.append(reason)
                cells.append(f"n/a {reasons.index(reason) + 1}")
            else:
                cells.append(
                    {"check": "check", "check --import": "import"}.get(mutant.seen, f"`{mutant.check}`")
                )
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))
    parts = [*lines, "\n".join(rows), "Why a fault does not apply:", notes, *_blind(blind)]
    return "\n\n".join(parts) + "\n"


def _blind(mutants: tuple[Mutant, ...]) -> Iterator[str]:
    """The section of the mutants that were written without knowing the checks."""
    yield "## Written without knowing the checks"
    yield _BLIND.format(first=_FIRST, all=len(mutants))
    rows = ["| kind | faults | found by |", "|---|---|---|"]
    for kind in KINDS:
        own = [mutant for mutant in mutants if mutant.kind == kind]
        checks = dict.fromkeys(f"`{mutant.check}`" for mutant in own if mutant.check)
        rows.append(f"| {kind} | {len(own)} | {', '.join(checks)} |")
    yield "\n".join(rows)
    yield "Those that no check finds:"
    escaped = (f"- {m.kind}, {m.name}: {m.escapes}" for m in mutants if m.escapes)
    yield "\n".join(fill(each, 110, subsequent_indent="  ", break_on_hyphens=False) for each in escaped)


if __name__ == "__main__":
    (HERE / "README.md").write_text(
        render(*(read_mutants(HERE / f"{name}.toml") for name in ("sighted", "blind"))), encoding="utf-8"
    )
