"""The migration of MindSpeed-MM: its files as runs of mm_core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_core.interchange import UNKNOWN, Left, Line, Migrated, Node, apply, place_of, to_python
from mm_mindspeed.files import Files, find_runs, is_of_tool, value_at
from mm_mindspeed.language import migrate_language, migrate_one_file
from mm_mindspeed.tables.engine import ENGINE
from mm_mindspeed.tables.flags import FLAGS
from mm_mindspeed.video import migrate_hunyuan, migrate_wan

_ANCHOR = "an anchor of the file, which other keys repeat"
_FILES = ("--mm-model", "--mm-data", "--mm-tool", "--fsdp2-config-path", "--layerzero-config")
_OF_WAN = ("wandit", "vacedit", "vace")
_RANKS = "It counts as 1 here, also in a train.global_batch_size that is made of the accumulated steps"
_ASCEND = ("CUDA_DEVICE_MAX_CONNECTIONS",)  # Megatron checks it


@dataclass(frozen=True)
class NoOptions:
    """Config of the migration: it has no keys."""


class MindSpeedMM:
    """Reads launch scripts with model.json, data.json and fsdp2_config.yaml, and the YAML of newer runs."""

    tool = "MindSpeed-MM"

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
    run = Migrated(files.main.stem)
    named = [flag.path for flag in files.flags.children if flag.path in _FILES]
    run.set("run.name", files.name, files.main.name, f"with the files of {', '.join(named)}" if named else "")
    given = [flag.path for flag in files.launcher.children] if files.launcher is not None else []
    run.set("engine.type", "fsdp2", files.main.name, f"launched by {', '.join(given)}" if given else "")
    run.set("optimizer.type", "adamw", files.main.name, "decoupled weight decay, as theirs")
    _launch(files, run)
    for path in files.missing:
        run.differs.append(Left(files.main.name, "file", path, "this file is not there, so it was not read"))
    for node in files.rest:  # anchors, whose values other keys repeat
        repeated = not isinstance(node.value, dict) or value_at(files.data, f"dataset_param.{node.path}")
        why, rows = (_ANCHOR, run.dropped) if repeated else (UNKNOWN, run.differs)
        rows.append(Left(place_of(node), node.path, to_python(node), why))
    if files.one_file is not None:
        migrate_one_file(files, files.one_file, run)
    else:
        apply(FLAGS, files.flags, run)
        if files.engine is not None:
            apply(ENGINE, files.engine, run)
        _model(files, run)
        _recompute(files, run)
    _adapters(files, run)
    _settle(run)
    return run


def _model(files: Files, run: Migrated) -> None:
    model = files.model or Node({}, str(files.main), "")
    name = value_at(model, "predictor.model_id")
    if name == "hunyuanvideo15dit":
        migrate_hunyuan(files, model, run)
    elif name is not None and (name in _OF_WAN or model.at("ae") is not None):  # or one of the user's own
        migrate_wan(files, model, run)
    else:
        migrate_language(files, model, run)


def _launch(files: Files, run: Migrated) -> None:
    """The command that launches the run, with the environment of the script."""
    given = files.launcher or Node({}, str(files.main), "")
    given = given.holding({f"--{key[2:].replace('-', '_')}": node for key, node in given.value.items()})
    ranks, hosts = (value_at(given, name, 1) for name in ("--nproc_per_node", "--nnodes"))
    if files.script is None:
        run.todo.append(f"--nproc of the launch: no script that names {files.main.name} is here. {_RANKS}")
    for ours, count in (("--nproc", ranks), ("--nnodes", hosts)):
        if not isinstance(count, int):
            run.todo.append(f"{ours} of the launch: {count} is known only where the script runs. {_RANKS}")
    words = ["mm-train --config {config}"]
    if isinstance(ranks, int):
        words.append(f"--nproc {ranks}")
    if isinstance(hosts, int) and hosts > 1:
        address, port = (value_at(given, f"--master_{name}") for name in ("addr", "port"))
        port = port[0] if isinstance(port, list) else port
        words.append(f"--nnodes {hosts} --node-rank {value_at(given, '--node_rank', 0)}")
        words.append(f"--rdzv-endpoint {address}:{port}")
    run.world = (ranks if isinstance(ranks, int) else 1) * (hosts if isinstance(hosts, int) else 1)
    lines = [f"export {name}={value}" for name, value in _exports(files).items()]
    if files.script is not None and files.program is not None:
        for each in files.script.unrun:
            if each.line >= files.program.name.line:
                continue
            left = Left(f"{files.script.path.name}:{each.line}", each.text, each.text, each.why)
            if each.text.startswith("source ") and "set_env.sh" in each.text:
                lines.insert(0, each.text)
            elif each.sets or each.text.startswith("<<"):
                run.differs.append(left)
            else:
                run.dropped.append(left)
    run.launch = "\n".join([*lines, " ".join(words)])


def _exports(files: Files) -> dict[str, str]:
    exports = files.script.exports if files.script is not None else {}
    return {name: value for name, value in exports.items() if name not in _ASCEND}


def _recompute(files: Files, run: Migrated) -> None:
    """Megatron's recomputation of the first blocks."""
    count = value_at(files.flags, "--recompute-num-layers")
    if "engine.recompute_modules" in run.lines:
        return
    uniform = value_at(files.flags, "--recompute-method") == "uniform"  # in chunks of so many: all of them
    if not uniform and not (isinstance(count, int) and count):
        return
    blocks: Any = "auto"
    if not uniform and run.lines["task.type"].value == "text_to_video":
        last = min(count, value_at(files.model, "predictor.num_layers", 10**6)) - 1
        blocks = [f"predictor.blocks.{{0-{last}}}"]
    flag = "--recompute-method" if uniform else "--recompute-num-layers"
    run.set("engine.recompute_modules", blocks, f"{files.main.name} {flag}")


def _adapters(files: Files, run: Migrated) -> None:
    """Low-rank adapters, where they are asked for, with the defaults of their keys."""
    start = "train.adapters.0."
    on, switch = files.flags.at("--lora-target-modules"), "--lora-target-modules is absent"
    targets: Any = "auto"
    if files.one_file is not None:
        on, switch = files.one_file.at("training", "lora", "enable"), "training.lora.enable is not true"
        targets = ["q_proj", "k_proj", "v_proj"]
    if on is None or not on.value:
        for key in [key for key in run.lines if key.startswith(start)]:
            run.leave(key, f"no adapter is trained: {switch}")
        return
    run.leave("train.freeze", "adapters alone are trained")
    if f"{start}from" in run.lines:
        run.leave(f"{start}targets", "the adapter's files name them")
        return
    for name, value in (("rank", 8), ("alpha", 16.0), ("targets", targets)):
        note = "in the place of theirs" if value == "auto" else "default of the tool"
        run.lines.setdefault(start + name, Line(value, place_of(on), note))


def _settle(run: Migrated) -> None:
    """Lines that only hold together with others."""
    lines = run.lines
    style = lines.get("lr_schedule.type")
    if style is None or style.value == "constant":
        run.leave("lr_schedule.min_lr", "a constant rate has no lowest one")
    if "lr_schedule.warmup_fraction" in lines:
        run.leave("lr_schedule.warmup_steps", "the fraction counts")
    if "engine.context_parallel.size" not in lines:
        run.leave("engine.context_parallel.kind", "each rank has its own samples")
