"""A stored run evaluated by one process: what `mm evaluate` calls."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
import yaml
from torch import nn

from mm_core.config.dump import to_mapping
from mm_core.config.load import load_config
from mm_core.config.schema import RunConfig
from mm_core.contracts import Task
from mm_core.device import current_device
from mm_core.errors import MMError
from mm_core.plugin.registry import build
from mm_core.train.checkpoint_reading import find_checkpoint, read_facts
from mm_core.train.sampling import Weights, Which, load_task, stored_weights
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
    config = load_config(source / "config.yaml", _with_section(source / "config.yaml", overrides))
    component = config.data.validation if split == "validation" else config.data.test
    if component is None:
        raise _without_data(run, source, config, split)
    settings = default_settings(config, split)
    if clips is not None:
        settings = replace(settings, clips=clips)
    dataset = build("dataset", component)
    used = stored_weights(source, weights)
    task = load_task(config, source, used)
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
        weights=used,
        figures={name.removeprefix(f"{split}/"): value for name, value in figures.items()},
    )


def _with_section(path: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides, with a `validation` section for a run that has none where one of them names held-out
    data: a config is refused with one of the two alone."""
    if not any(text.startswith(("data.validation=", "data.validation.")) for text in overrides):
        return list(overrides)
    stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    lacks = isinstance(stored, dict) and stored.get("validation") is None
    return [*(["validation={}"] if lacks else []), *overrides]


def _without_data(run: str | Path, source: Path, config: RunConfig, split: Split) -> MMError:
    """The sentence for a run without the split, with a command that works once it names other files."""
    held = [name for name in ("validation", "test") if getattr(config.data, name) is not None]
    train = {key: value for key, value in to_mapping(config)["data"]["train"].items() if value is not None}
    flow = yaml.safe_dump(train, default_flow_style=True, sort_keys=False, width=10**6).strip()
    words = ["mm", "evaluate", "--run", str(run), *(["--split", split] if split != "validation" else [])]
    return MMError(
        f"the run's config has no data.{split}",
        where=str(source / "config.yaml"),
        accepted=f"--split {' or '.join(held)}" if held else None,
        hint=f"name the data, here that of the training: {shlex.join([*words, f'data.{split}={flow}'])}",
    )
