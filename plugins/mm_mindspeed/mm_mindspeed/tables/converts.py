"""Conversions of values, and rows of several keys, that the tables use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mm_core.interchange import Drop, Key, Row


def drops(names: str, why: str) -> tuple[Drop, ...]:
    """A row for each name, which does nothing here for the same reason."""
    return tuple(Drop(name, why) for name in names.split())


def notes(names: str, note: str) -> tuple[Key, ...]:
    """A row for each name, which the migration reads with others."""
    return tuple(Key(name, note=note) for name in names.split())


def same(names: str, ours: str) -> tuple[Key, ...]:
    """A row for each name, which a section of ours has too."""
    return tuple(Key(name, f"{ours}.{name}") for name in names.split())


def under(prefix: str, *rows: Row) -> tuple[Row, ...]:
    """Rows about keys below a prefix."""
    return tuple(replace(row, theirs=prefix + row.theirs) for row in rows)


def always(value: Any) -> Callable[[Any], Any]:
    """A conversion to one value."""
    return lambda _: value


def one_of(known: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """A conversion of known values; another is an error that lists them."""

    def convert(value: Any) -> Any:
        if value not in known:
            raise ValueError(f"{value!r} has no counterpart here; known: {', '.join(map(str, known))}")
        return known[value]

    return convert


STYLES = {each: each for each in ("constant", "linear", "cosine")}
"""Styles of the learning rate that are schedules here."""
FASTER = "it changes speed or memory, not what is computed"

dtype = one_of(
    {
        **{"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16"},
        **{"fp32": "fp32", "float32": "fp32", "float": "fp32", "tf32": "fp32", None: None},
    }
)


def norm(value: Any) -> float | None:
    """The largest norm of gradients; 0 is off."""
    return float(value) or None


def path(value: Any) -> str:
    """A path; one with spaces that was not quoted comes as several words."""
    words = value if isinstance(value, list) else [value]
    return " ".join(str(word) for word in words).rstrip("/")


def sharding(value: Any) -> int | str:
    """Ranks of a shard group."""
    return value if value == "auto" else int(value)


def training(decay: float, style: str, seed: int) -> tuple[Row, ...]:
    """Keys of every generation, which have other defaults of the weight decay, the schedule and the seed."""
    return (
        Key("micro_batch_size", "train.micro_batch_size"),
        Key("train_iters", "train.steps"),
        Key("lr", "optimizer.lr", float),
        Key("weight_decay", "optimizer.weight_decay", float, absent=decay),
        Key("adam_beta1", "optimizer.betas.0", float, absent=0.9),
        Key("adam_beta2", "optimizer.betas.1", float, absent=0.999),
        Key("adam_eps", "optimizer.eps", float, absent=1e-8),
        Key("lr_decay_style", "lr_schedule.type", one_of(STYLES), absent=style),
        Key("clip_grad", "train.clip_grad_norm", norm, "0 is off, which is null here", absent=1.0),
        Key("seed", "run.seed", note="other random numbers than theirs", absent=seed),
        Drop("save", "the run's folder: run.dir", only=(None,)),
        Key("save", "run.dir", path),
        Key("save_interval", "checkpoint.every"),
        Key("log_interval", "log.every"),
        *drops(
            "no_load_optim no_load_rng no_save_optim no_save_rng",
            "checkpoints always hold everything; weights alone are loaded without the rest",
        ),
    )
