"""Configs of the built-in callbacks: torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import Range

Event = Literal["run_started", "validated", "sampled", "saved", "run_ended"]


@dataclass(frozen=True)
class CommandConfig:
    """A command that is run at events of a run, on rank 0."""

    run: tuple[str, ...]  # program and arguments; no shell reads them
    events: tuple[Event, ...] = ("run_ended",)  # events that it is run at
    timeout: Annotated[float, Range(gt=0)] = 60.0  # seconds that it may take

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("run is empty: a program, and its arguments")
