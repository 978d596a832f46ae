"""Configs of the trackers `wandb` and `mlflow`, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import Range


@dataclass(frozen=True)
class WandbConfig:
    """Config of the tracker `wandb` (Weights & Biases)."""

    project: str = "mm_core"  # W&B project name
    entity: str | None = None  # W&B user or team; null: the logged-in user
    mode: Literal["online", "offline", "disabled"] = "online"  # offline: `wandb sync` uploads the run later
    tags: tuple[str, ...] = ()  # tags of the run
    finish_timeout: Annotated[float, Range(gt=0)] = 600.0  # seconds that the end of a run waits for uploads


@dataclass(frozen=True)
class MlflowConfig:
    """Config of the tracker `mlflow`."""

    tracking_uri: str | None = None  # server or store; null: MLFLOW_TRACKING_URI, else MLflow's default
    experiment: str = "mm_core"  # MLflow experiment name
    finish_timeout: Annotated[float, Range(gt=0)] = 600.0  # seconds that the end of a run waits for uploads
