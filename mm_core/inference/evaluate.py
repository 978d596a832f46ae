"""`mm eval`: evaluates a stored run, in one process or on several ranks that share the model and the rows."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import StoredRun, Weights, Which, checkpoint_at
from mm_core.config.dump import to_mapping, to_yaml, without_defaults
from mm_core.config.load import load_config
from mm_core.config.sections import ValidationSection
from mm_core.contracts import Metric, SupportsEvaluated
from mm_core.data.class_names import check_class_names
from mm_core.data.loading.seeding import build_split
from mm_core.errors import MMError
from mm_core.evaluation.predictions import Predictions, Row
from mm_core.evaluation.validator import Validator, build_metrics, default_settings
from mm_core.files import json_numbers
from mm_core.inference.sample import among_ranks, load_as_rank, stored_weights
from mm_core.plan import build_task, in_buckets
from mm_core.plugin.registry import Registry
from mm_core.runtime.ranks import Ranks
from mm_core.schema.fields import ComponentConfig

Split = Literal["train", "validation", "test"]

_COUNTS = ("rows", "unreadable")
_CUT = ("part", "split_seed")
"""Options of datasets that select a part of a file."""


@dataclass(frozen=True)
class EvaluationResult:
    """The result of evaluating a stored run.

    Attributes:
        checkpoint: folder of the evaluated checkpoint.
        step: number of steps it was trained.
        split: the dataset's key under `data`.
        weights: which weights were evaluated.
        figures: metrics by name, without the split as prefix.
        config_sha256: hash of the config with the overrides.
        overrides: of the config.
        ranks: number of ranks.
        predictions: one row for each sample in the dataset's order, on rank 0, if requested.
    """

    checkpoint: Path
    step: int
    split: Split
    weights: Literal["model", "ema"]
    figures: dict[str, float]
    config_sha256: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    predictions: list[Row] = field(default_factory=list)

    def to_mapping(self) -> dict[str, object]:
        """The evaluation's result without the predictions, as a mapping for JSON."""
        return {
            "checkpoint": str(self.checkpoint),
            "step": self.step,
            "split": self.split,
            "weights": self.weights,
            **{name: int(self.figures.get(name, 0)) for name in _COUNTS},
            "metrics": json_numbers({k: v for k, v in self.figures.items() if k not in _COUNTS}),
            "config_sha256": self.config_sha256,
            "overrides": [*self.overrides],
            "ranks": self.ranks,
        }


@dataclass(frozen=True)
class EvaluationTarget(StoredRun):
    """A stored run and the dataset to evaluate it on, found before anything large is read."""

    split: Split
    dataset: ComponentConfig


def evaluate(
    run: str | Path,
    *,
    split: Split = "validation",
    weights: Weights = "auto",
    checkpoint: Which = "latest",
    rows: int | None = None,
    metrics: Sequence[str | Mapping[str, object]] = (),
    predictions: bool = False,
    overrides: Sequence[str] = (),
    note: Callable[[str], None] = lambda sentence: None,
    allow_code: bool = False,
) -> EvaluationResult:
    """Evaluates a checkpoint of a stored run on held-out rows, as validation does during training.

    Call it on each rank that was launched; ranks share the model, as in training, and the rows.

    Args:
        run: a run's folder, `DIR@STEP`, or one of its checkpoints.
        split: `validation`, `test` or `train`: the dataset's key under `data`.
        weights: `ema`, `model`, or `auto`: the average if the checkpoint contains one.
        checkpoint: `latest` or `best` complete checkpoint.
        rows: number of rows, evenly spaced; None uses that of the run's validation, and all of other sets.
        metrics: added to the run's own, replacing those of the same type: names, or `{type: f1, ...}`.
        predictions: whether to keep the prediction for each row.
        overrides: `key=value` to override the run's config, for example with other data.
        note: receives messages about unreadable rows, on rank 0.
        allow_code: whether code named by the run may be executed if this user has not trained with it.

    Raises:
        MMError: no checkpoint, no such dataset in the run's config, no readable row, or a metric that
            does not fit the task.
    """
    chosen = choose(run, split, checkpoint, overrides, allow_code)
    settings = default_settings(chosen.config.validation, split)
    if rows is not None:
        settings = replace(settings, rows=rows)
    measured = _metrics(chosen.config.registry, settings, metrics)
    used = stored_weights(chosen.checkpoint, weights)
    step = int(chosen.checkpoint.facts["step"])
    with among_ranks() as ranks:
        report = note if ranks.rank == 0 else lambda sentence: None
        figures, found = _pass(chosen, ranks, settings, measured, used, step, predictions, report)
    return EvaluationResult(
        checkpoint=chosen.checkpoint.folder,
        step=step,
        split=split,
        weights=used,
        figures={name.removeprefix(f"{split}/"): value for name, value in figures.items()},
        config_sha256=hashlib.sha256(to_yaml(chosen.config).encode()).hexdigest(),
        overrides=tuple(overrides),
        ranks=ranks.count,
        predictions=found,
    )


def _pass(
    chosen: EvaluationTarget,
    ranks: Ranks,
    settings: ValidationSection,
    metrics: Sequence[tuple[str, Metric]],
    weights: Literal["model", "ema"],
    step: int,
    predictions: bool,
    note: Callable[[str], None],
) -> tuple[dict[str, float], list[Row]]:
    """One pass of all ranks over the rows: the metrics, and on rank 0 the predictions if requested."""
    found, config = Predictions(), chosen.config
    mode = config.data.loader.mode
    dataset = build_split(config.registry, chosen.dataset, config.run.seed, mode, chosen.split)
    task = build_task(config, chosen.checkpoint.adapters)
    engine = load_as_rank(task, config, ranks, chosen.checkpoint, weights)
    check_class_names(task, {chosen.split: dataset})
    samples = in_buckets(config, task, {chosen.split: dataset})[chosen.split]
    validator = Validator(
        config,
        ranks,
        task,
        engine,
        samples,
        run_dir=chosen.checkpoint.folder.parent.parent,
        split=chosen.split,
        settings=settings,
        metrics=metrics,
        note=note,
        seen=found.batch if predictions and engine.data_ranks.leads else lambda batch, evaluation: None,
    )
    figures = validator.run(step)
    assert figures is not None, "this evaluation has no stop requests"
    return figures, found.gather(ranks) if predictions else []


def choose(
    run: str | Path,
    split: Split,
    checkpoint: Which = "latest",
    overrides: Sequence[str] = (),
    allow_code: bool = False,
) -> EvaluationTarget:
    """Finds what to evaluate: the stored run's checkpoint, its config with overrides, and the dataset.

    Args:
        run: a run's folder, `DIR@STEP`, or one of its checkpoints.
        split: the dataset's key under `data`.
        checkpoint: `latest` or `best` complete checkpoint.
        overrides: `key=value` to override the run's config.
        allow_code: whether code named by the run may be executed if this user has not trained with it.

    Raises:
        MMError: there is no checkpoint, or the config has no such dataset.
    """
    source = OpenedCheckpoint(checkpoint_at(run, checkpoint))
    file = source.folder / "config.yaml"
    config = load_config(file, _with_section(file, overrides), stored=True, allow_code=allow_code, fetch=True)
    dataset = config.data.splits.get(split)
    if dataset is None:
        train = _train_as_written(to_mapping(config)["data"]["train"], config.data.train, config.registry)
        words = ["mm", "eval", "--run", str(run), *(["--split", split] if split != "validation" else [])]
        command = shlex.join([*words, f"data.{split}={train}"])
        raise MMError(
            f"the run's config has no data.{split}",
            where=str(file),
            accepted=f"--split {' or '.join([*[*config.data.splits][1:], 'train'])}",  # after train
            hint=f"add the data to the command, here with the complete training file: {command}",
        )
    return EvaluationTarget(source, config, split, dataset)


def _metrics(
    registry: Registry, settings: ValidationSection, asked: Sequence[str | Mapping[str, object]]
) -> list[tuple[str, Metric]]:
    """The section's metrics and the requested ones, which replace those of the same type."""
    wanted = [{"type": each} if isinstance(each, str) else dict(each) for each in asked]
    added = [(str(each.get("type")), registry.build("metric", each)) for each in wanted]
    taken = {name.rpartition("/")[2] for name, _ in added}
    own = tuple(each for each in settings.metrics if each.type.rpartition("/")[2] not in taken)
    return [*build_metrics(registry, replace(settings, metrics=own)), *added]


def _with_section(path: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides; if they add held-out data to a run without `validation`, also that section: a config
    needs both or neither."""
    if not any(text.startswith(("data.validation=", "data.validation.")) for text in overrides):
        return list(overrides)
    stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    lacks = isinstance(stored, dict) and stored.get("validation") is None
    return [*(["validation={}"] if lacks else []), *overrides]


def _train_as_written(written: dict[str, Any], section: ComponentConfig, registry: Registry) -> str:
    """The training data as an override for a split: without the training's part of its file, which does not
    apply to another file."""
    options = without_defaults(written, section, registry)
    class_: object = registry.resolve("dataset", section.type).load_target()
    if isinstance(class_, SupportsEvaluated):
        changed = class_.evaluated(written).items()
        options |= {key: value for key, value in changed if value != written.get(key)}
    kept = {key: value for key, value in options.items() if value is not None and key not in _CUT}
    return yaml.safe_dump(kept, default_flow_style=True, sort_keys=False, width=10**6).strip()
