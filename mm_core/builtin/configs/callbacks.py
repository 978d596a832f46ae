"""Config of the built-in callback, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_core.schema.fields import Range

Event = Literal["run_started", "validated", "sampled", "saved", "run_ended"]


@dataclass(frozen=True)
class CommandConfig:
    """Config of the callback `command`: a program that rank 0 runs on run events."""

    run: tuple[str, ...]  # program and arguments; no shell interprets them
    events: tuple[Event, ...] = ("run_ended",)  # events that start the program
    timeout: Annotated[float, Range(gt=0)] = 60.0  # most seconds that the program may take

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("run is empty: set it to a program and its arguments")
