"""Configs of the trackers that report to other programs: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import Range


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases."""

    project: str = "mm_core"  # that the run belongs to
    entity: str | None = None  # user or team; none: that of the login
    mode: Literal["online", "offline", "disabled"] = "online"  # offline: `wandb sync` uploads it later
    tags: tuple[str, ...] = ()  # of the run
    finish_timeout: Annotated[float, Range(gt=0)] = 600.0  # seconds that the end of a run waits for uploads


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow."""

    tracking_uri: str | None = None  # server or store; none: MLFLOW_TRACKING_URI, else MLflow's own default
    experiment: str = "mm_core"  # that the run belongs to
    finish_timeout: Annotated[float, Range(gt=0)] = 600.0  # seconds that the end of a run waits for uploads
