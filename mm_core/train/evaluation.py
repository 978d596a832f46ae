"""A stored run evaluated by one process: what `mm evaluate` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn

from mm_core.config.load import load_config
from mm_core.contracts import Task
from mm_core.device import current_device
from mm_core.errors import MMError
from mm_core.plugin.registry import build
from mm_core.train.checkpoint_reading import find_checkpoint, read_facts
from mm_core.train.sampling import Weights, Which, load_task
from mm_core.train.validation import Validator, build_metrics, default_settings

Split = Literal["validation", "test"]


@dataclass(frozen=True)
class EvaluationResult:
    """What was evaluated, and the figures by name, without the split's name before them."""

    checkpoint: Path
    step: int
    split: Split
    weights: Literal["model", "ema"]
    figures: dict[str, float]


@dataclass
class _Lone:
    """What an evaluation needs of an engine, for a task that is not sharded."""

    device: torch.device
    task: nn.Module

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The task was loaded in evaluation mode, so only gradients are left to switch off."""
        with torch.no_grad():
            yield


def evaluate(
    run: str | Path,
    *,
    split: Split = "validation",
    weights: Weights = "auto",
    checkpoint: Which = "latest",
    clips: int | None = None,
    overrides: Sequence[str] = (),
    note: Callable[[str], None] = lambda sentence: None,
) -> EvaluationResult:
    """Evaluates a checkpoint of a run on its held-out rows, as validation does while training.

    Args:
        run: a run's folder, or one of its checkpoints.
        split: `validation` or `test`: the dataset under `data`.
        weights: `ema`, `model`, or `auto`: the average where the checkpoint holds one.
        checkpoint: `latest` or `best`, of the complete ones.
        clips: rows, evenly spaced; None takes as many as the run's validation, and all of a test set.
        overrides: `key=value` over the run's config, to evaluate on other data.
        note: told of rows that can not be read.

    Raises:
        MMError: no checkpoint, no such dataset in the run's config, nothing readable.
    """
    source = find_checkpoint(Path(run), checkpoint)
    config = load_config(source / "config.yaml", overrides)
    component = config.data.validation if split == "validation" else config.data.test
    if component is None:
        held = [name for name in ("validation", "test") if getattr(config.data, name) is not None]
        raise MMError(
            f"the run's config has no data.{split}",
            where=str(source / "config.yaml"),
            accepted=f"--split {' or '.join(held)}" if held else None,
            hint=f"name the data: mm evaluate ... data.{split}.type=video_text data.{split}.annotations=FILE",
        )
    settings = default_settings(config, split)
    if clips is not None:
        settings = replace(settings, clips=clips)
    dataset = build("dataset", component)
    task = load_task(config, source, weights)
    validator = Validator(
        config,
        cast(Task, task),
        _Lone(current_device(), task),
        dataset,
        run_dir=source.parent.parent,
        split=split,
        settings=settings,
        metrics=build_metrics(settings),
        note=note,
    )
    step = int(read_facts(source)["step"])
    figures = validator.run(step)
    assert figures is not None, "nobody asks a lone evaluation to stop"
    return EvaluationResult(
        checkpoint=source,
        step=step,
        split=split,
        weights="ema" if weights == "ema" or (weights == "auto" and config.ema is not None) else "model",
        figures={name.removeprefix(f"{split}/"): value for name, value in figures.items()},
    )
