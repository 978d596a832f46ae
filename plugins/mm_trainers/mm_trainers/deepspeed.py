"""The JSON of DeepSpeed beside arguments of Transformers: the engine, and what it decides in their place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_core.interchange import Node, read_source, to_python, value_at
from mm_trainers.common import Source, file_of, found, warm_up

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "warmup_decay", "WarmupCosineLR": "cosine"}
_SCHEDULE = "a scheduler that lr_schedule has, too: write its keys there, or remove it from the file"
_DECAY = "DeepSpeed's optimizer decays biases and norms, too"


def use_deepspeed(source: Source, beside: Sequence[Path]) -> None:
    """Makes DeepSpeed the engine, where the arguments name its JSON or one is beside them.

    As in Transformers, `auto` is the arguments' value, and sections of the file count in their place.
    """
    named = source.get("deepspeed")
    given = isinstance(named, dict)
    file = found(named, file_of(source.node)) if isinstance(named, str) else next(iter(beside), None)
    if named and not given and file is None:
        source.differ("deepspeed", "this file is not there, so it was not read: the engine is fsdp2")
    if not given and file is None:
        return
    run = source.run
    dtype = run.lines.get("engine.param_dtype")
    settings = read_source(file) if file is not None and not given else source.node.at("deepspeed")
    assert settings is not None
    del run.lines["engine.type"]
    source.take_off("the file of DeepSpeed decides", "engine.")
    source.set("engine.type", "deepspeed", "deepspeed")
    resolved = _with_dtype(settings, None if dtype is None else str(dtype.value))
    if given or resolved is not None:
        note = "" if resolved is None else f"{file.name if file else 'as it is'}; bf16, fp16 as the arguments"
        source.set("engine.settings", resolved or to_python(settings), "deepspeed", note)
    else:
        source.set("engine.config", str(file), "deepspeed", "as it is")
    if value_at(settings, "zero_optimization.stage") == 3:
        source.set("task.loss", "plain", "deepspeed", "as stage 3 needs it")
    if isinstance(batch := value_at(settings, "train_batch_size"), int):
        source.set("train.global_batch_size", batch, "deepspeed", "train_batch_size, on all ranks")
        run.todo = [each for each in run.todo if not each.startswith("train.global_batch_size")]
    if value_at(settings, "optimizer") is not None:
        source.set("train.decay_norms_and_biases", True, "deepspeed", _DECAY)
    if value_at(settings, "gradient_clipping") is None:
        source.set("train.clip_grad_norm", None, "deepspeed", "absent, DeepSpeed clips nothing")
    if (kind := value_at(settings, "scheduler.type")) is not None:
        _schedule(source, kind, value_at(settings, "scheduler.params", {}))


def _with_dtype(settings: Node, dtype: str | None) -> dict[str, Any] | None:
    """The settings with an `auto` of bf16 and fp16 as the arguments have it; None: there is none, or it is
    the bf16 that the engine takes it for, too."""
    autos = [kind for kind in ("bf16", "fp16") if value_at(settings, f"{kind}.enabled") == "auto"]
    taken = "bf16" in autos and value_at(settings, "zero_optimization.stage") in (1, 2, 3)
    if not autos or (taken and dtype == "bf16"):
        return None
    whole: Any = to_python(settings)
    return {**whole, **{kind: {**whole[kind], "enabled": kind == dtype} for kind in autos}}


def _schedule(source: Source, kind: str, params: dict[str, Any]) -> None:
    if kind not in _SCHEDULES:
        source.differ("deepspeed", _SCHEDULE, f"scheduler.type {kind}")
        return

    def number(key: str, otherwise: Any = 0.0) -> Any:
        return otherwise if params.get(key, "auto") == "auto" else params[key]

    if kind != "WarmupCosineLR" and "warmup_max_lr" not in params:
        source.differ("deepspeed", 'absent, it is 0.001: write optimizer.lr, or "auto"', "warmup_max_lr")

    rate = source.run.lines["optimizer.lr"].value
    least = number("warmup_min_lr")
    cosine = {
        "min_lr": number("cos_min_ratio", 1e-4) * rate,
        "warmup_init": number("warmup_min_ratio") * rate,
    }
    line = {"warmup_init": least, **({"min_lr": least} if kind == "WarmupDecayLR" else {})}
    kept = {"type": _SCHEDULES[kind], **(cosine if kind == "WarmupCosineLR" else line)}
    for key in [key for key in source.run.lines if key.startswith("lr_schedule.")]:
        del source.run.lines[key]  # the arguments' own count where the file has "auto", and else do nothing
    if params.get("warmup_num_steps", 1000) != "auto":
        kept["warmup_steps"] = params.get("warmup_num_steps", 1000)
    else:
        warm_up(source, "warmup_steps" if source.get("warmup_steps") else "warmup_ratio")
    if params.get("warmup_type") != "auto":
        kept["warmup_type"] = params.get("warmup_type", "log")
    for key, value in kept.items():
        source.set(f"lr_schedule.{key}", value, "deepspeed", f"its {kind}")
