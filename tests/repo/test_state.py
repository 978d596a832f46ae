"""Which modules of the core keep state between calls, and why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "mm_core"

ALLOWED = {
    "checkpoint.files.fingerprints._adds_integers": "a fact of a kind of device",
    "contracts.batch._default_levels": "the table of 256 pixel values on each device",
    "checkpoint.run_lock._held": "the lock of a run is held until the process ends",
    "data.media.images._transform": "a function of its arguments; pictures share few profiles",
    "data.media.limits._limit": "a worker ends when a decoder hangs; readers of plugins cannot pass it",
    "data.loading.sampler.epoch_order": "a function of its arguments, and long",
    "data.loading.sampler.grouped_order": "a function of its arguments, and long",
    "data.loading.stopping._asked": "datasets ask whether the run was told to stop; nobody passes it to them",
    "data.loading.workers._end_at_exit": "registered once a process",
    "data.rows.mixture._rows": "a function of its arguments, and long",
    "data.rows.sources._head": "the beginning of a file as written at a time; a plan asks for it often",
    "device.kind.device_type": "a fact of the process",
    "plugin.checks.values._return_type": "what a method of a contract returns; asked at each call of some",
    "plugin.checks.source._parsed": "the tree of a file as written at a time; several classes ask for it",
    "schema.describe._comments": "the comments of a class; a JSON Schema asks for those of each class often",
    "testing.ranks._origins": "processes that fork the ranks of the checks, which have imported once",
    "tasks.conversations.rows.data_urls._column": "row groups of Parquet files that were read last",
    "tasks.conversations.rows.data_urls._starts": "row groups of Parquet files",
    "tasks.conversations.packing._epoch": "the order of an epoch's samples",
    "telemetry.align.recorder._tables": "fixed numbers, by device",
    "optim.adamw.has_fused_adamw": "a fact of the installed torch",
    "optim.adamw_8bit._check_runs": "a fact of the installed torchao",
    "optim.adamw_8bit._optimizer_class": "a class, made once",
    "plugin.manager.entry_point_records": "what is installed",
    "plugin.registry._warn": "warnings that were printed already",
    "plugin.signatures._from_signature": "a class for each signature, equal to itself",
    "plugin.local._installations": "where Python keeps what is installed",
    "runtime.groups._patience": "the timeout of torch's groups, which engines make too",
    "runtime.launch.rank_logs._current": "the log of this process",
    "runtime.launch.rank_logs._latest": "where that log was, for what fails after its end",
    "runtime.launch.signals._noted": "a signal asks this process to stop, whoever asks for it later",
    "runtime.leftovers._also": "what is removed after this process",
    "runtime.leftovers._emptied": "what is removed after this process",
}
"""Names below mm_core with state, each with its reason. The registry is not one: it is a value of the run."""

_CHANGES = {"append", "add", "update", "pop", "setdefault", "clear", "extend", "insert", "remove", "discard"}


def kept(source: str) -> Iterator[str]:
    """Names that a module changes after its import: containers, context variables, caches, globals."""
    tree = ast.parse(source)
    top = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    within = [n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)]
    for node in within:
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in top and node.func.attr in _CHANGES | {"set"}:
                yield owner.id
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield from {node.value.id} & top if isinstance(node.value, ast.Name) else ()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names = [ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list]
            if {"cache", "lru_cache"} & set(names):
                yield node.name


def test_what_is_kept_is_found():
    source = (
        "from functools import cache\na, b, c = [], {}, 0\nlst = []\ntable = {}\nconst = {1: 2}\n"
        "def f():\n    lst.append(1)\n    table[1] = const[1]\n    global c\n@cache\ndef g(): ...\n"
    )
    assert set(kept(source)) == {"lst", "table", "c", "g"}


def test_no_module_keeps_anything_without_a_reason():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        found |= {f"{module}.{name}" for name in kept(file.read_text())}
    assert found == set(ALLOWED)
    assert not any("regist" in name.rpartition(".")[2] for name in found)
