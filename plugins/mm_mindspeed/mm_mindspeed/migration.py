"""The migration of MindSpeed-MM: its files as runs of mm_core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mm_core.errors import ConfigError
from mm_core.interchange import UNKNOWN, Left, Line, Migrated, apply, place_of, to_python
from mm_mindspeed.files import PARTS, Files, find_runs, is_of_tool, value_at
from mm_mindspeed.language import migrate_language, migrate_one_file
from mm_mindspeed.tables import TABLES
from mm_mindspeed.tables.engine import ENGINE
from mm_mindspeed.tables.flags import FLAGS, LAUNCHER
from mm_mindspeed.video import migrate_hunyuan, migrate_wan

_ANCHOR = "an anchor of the file, which other keys repeat"
_OF_WAN = ("wandit", "vacedit", "vace")
_RANKS = "It counts as 1 here, also in a train.global_batch_size that is made of the accumulated steps"
_ASCEND = ("CUDA_DEVICE_MAX_CONNECTIONS",)  # Megatron checks it
_ADAPTER = "train.adapters.0."


@dataclass(frozen=True)
class NoOptions:
    """Config of the migration: it has no keys."""


class MindSpeedMM:
    """Reads launch scripts with model.json, data.json and fsdp2_config.yaml, and the YAML of newer runs."""

    tool = "MindSpeed-MM"
    keys = tuple(chain.from_iterable(TABLES.values()))

    def recognise(self, paths: Sequence[Path]) -> bool:
        """Whether one of these files or folders is of MindSpeed-MM."""
        return any(is_of_tool(path) for path in paths)

    def migrate(self, paths: Sequence[Path]) -> Sequence[Migrated]:
        """The runs that these files or folders describe.

        Raises:
            MMError: there is no launch script or YAML of a run, or a file cannot be read.
        """
        return [_run(files) for files in find_runs(paths)]


def _run(files: Files) -> Migrated:
    run, main = Migrated(files.main.stem), files.main.name
    launcher = files.program.launcher.value if files.program is not None else {}
    for key, value, note in (
        ("run.name", files.name, ", ".join(flag for flag in PARTS if flag in files.flags.value)),
        ("engine.type", "fsdp2", ", ".join(launcher)),
        ("optimizer.type", "adamw", "decoupled weight decay, as theirs"),
    ):
        run.set(key, value, main, note)
    _launch(files, run)
    apply(LAUNCHER, files.program.launcher if files.program is not None else files.flags.holding({}), run)
    for path in files.missing:
        run.differs.append(Left(main, "file", path, "this file is not there, so it was not read"))
    for node in files.rest:  # anchors, whose values other keys repeat
        repeated = not isinstance(node.value, dict) or value_at(files.data, f"dataset_param.{node.path}")
        why, rows = (_ANCHOR, run.dropped) if repeated else (UNKNOWN, run.differs)
        rows.append(Left(place_of(node), node.path, to_python(node), why))
    if files.one_file is not None:
        migrate_one_file(files, files.one_file, run)
    else:
        apply(FLAGS, files.flags, run)
        apply(ENGINE, files.engine or files.flags.holding({}), run)
        _model(files, run)
        _recompute(files, run)
    _settle(files, run)
    return run


def _model(files: Files, run: Migrated) -> None:
    if (model := files.model) is None:
        named = files.flags.at("--mm-model")
        what = "the file of the model is not there" if files.missing else "no key names the model's file"
        where = place_of(named) if named is not None else files.main.name
        hint = "copy it there, or correct the path in the script"
        raise ConfigError(f"{what}: {', '.join(files.missing)}".rstrip(": "), where=where, hint=hint)
    name = value_at(model, "predictor.model_id")
    if name == "hunyuanvideo15dit":
        migrate_hunyuan(files, model, run)
    elif name is not None and (name in _OF_WAN or model.at("ae") is not None):  # or one of the user's own
        migrate_wan(files, model, run)
    else:
        migrate_language(files, model, run)


def _launch(files: Files, run: Migrated) -> None:
    """The command that launches the run, with the environment of the script."""
    found = files.program.launcher.value if files.program is not None else {}
    given: dict[str, Any] = {name[2:].replace("-", "_"): to_python(node) for name, node in found.items()}
    if files.script is None:
        run.todo.append(f"--nproc of the launch: no script that names {files.main.name} is here. {_RANKS}")
    counts = []
    if (workers := given.get("worker_num")) is not None:  # of msrun, in all
        local = given.get("local_worker_num", workers)
        whole = isinstance(workers, int) and isinstance(local, int) and local
        given |= {"nproc_per_node": local, "nnodes": workers // local if whole else 1}
    for ours, theirs in (("--nproc", "nproc_per_node"), ("--nnodes", "nnodes")):
        count = given.get(theirs, 1)
        if not isinstance(count, int):
            run.todo.append(f"{ours} of the launch: {count} is known only where the script runs. {_RANKS}")
        counts.append(count if isinstance(count, int) else 0)
    ranks, hosts = counts
    words = "mm-train --config {config}" + (f" --nproc {ranks}" if ranks else "")
    if hosts > 1:
        port = given.get("master_port")
        words += f" --nnodes {hosts} --node-rank {given.get('node_rank', 0)} --rdzv-endpoint "
        words += f"{given.get('master_addr')}:{port[0] if isinstance(port, list) else port}"
    run.world = max(ranks, 1) * max(hosts, 1)
    lines = [words]
    if files.script is not None and files.program is not None:
        exports = files.script.exports.items()
        lines[:0] = [f"export {name}={value}" for name, value in exports if name not in _ASCEND]
        for each in files.script.unrun:
            left = Left(f"{files.script.path.name}:{each.line}", each.text, each.text, each.why)
            if each.line >= files.program.name.line:
                continue
            if each.text.startswith("source ") and "set_env.sh" in each.text:
                lines.insert(0, each.text)
            else:
                (run.differs if each.sets or each.text.startswith("<<") else run.dropped).append(left)
    run.launch = "\n".join(lines)


def _recompute(files: Files, run: Migrated) -> None:
    """Megatron's recomputation of the first blocks, or in chunks of so many: of all of them."""
    uniform = value_at(files.flags, "--recompute-method") == "uniform"
    count = value_at(files.flags, "--recompute-num-layers")
    if "engine.recompute_modules" in run.lines or not (uniform or (isinstance(count, int) and count)):
        return
    blocks: Any = "auto"
    if not uniform and run.lines["task.type"].value == "text_to_video":
        last = min(count, value_at(files.model, "predictor.num_layers", 10**6)) - 1
        blocks = [f"predictor.blocks.{{0-{last}}}"]
    flag = "--recompute-method" if uniform else "--recompute-num-layers"
    run.set("engine.recompute_modules", blocks, f"{files.main.name} {flag}")


def _settle(files: Files, run: Migrated) -> None:
    """Lines that only hold together with others."""
    lines = run.lines
    if "lr_schedule.type" not in lines or lines["lr_schedule.type"].value == "constant":
        run.leave("lr_schedule.min_lr", "a constant rate has no lowest one")
    if "lr_schedule.warmup_fraction" in lines:
        run.leave("lr_schedule.warmup_steps", "the fraction counts")
    if any(key.startswith(_ADAPTER) for key in lines):
        run.leave("train.freeze", "adapters alone are trained")
        if files.one_file is None:
            auto = Line("auto", f"{files.main.name} --lora-target-modules", "in the place of theirs")
            lines.setdefault(f"{_ADAPTER}targets", auto)
