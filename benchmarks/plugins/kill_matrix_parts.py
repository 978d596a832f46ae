"""A one-file plugin for kill_matrix.py: delays a run at one moment, so that a kill hits this moment.

KILL_MOMENT names the moment; a file in KILL_FOLDER signals that it is reached. Without them nothing is
delayed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from mm_core import Component, hookimpl
from mm_core.contracts import Callback

SECONDS = {"before the first save": 2.0, "in a step": 2.0, "in a save": 3.0, "in validation": 0.4}
MOMENT_WITHOUT = "before the first save"
STEPS = {"before the first save": 2, "in a step": 6}
"""Step, counted from 1, in which each rank waits."""


def hold(moment: str) -> None:
    """Delays the process: once in a step or a save, at each batch of a validation."""
    if os.environ.get("KILL_MOMENT") == moment:
        first = Path(os.environ["KILL_FOLDER"], "run/checkpoints/step_00000004")
        while moment != MOMENT_WITHOUT and not first.is_dir():  # the save runs in the background
            time.sleep(0.02)
        Path(os.environ["KILL_FOLDER"], f"rank_{os.environ['RANK']}").touch()
        time.sleep(SECONDS[moment])


@dataclass(frozen=True)
class NoSettings:
    """A config without fields."""


@hookimpl
def mm_metrics():
    return [Component(name="held", target="kill_matrix_parts:Held", config="kill_matrix_parts:NoSettings")]


@hookimpl
def mm_callbacks():
    return [
        Component(name="holding", target="kill_matrix_parts:Holding", config="kill_matrix_parts:NoSettings")
    ]


class Held:
    """A metric that delays the validation."""

    def reset(self):
        pass

    def batch(self, batch, evaluation):
        hold("in validation")

    def sampled(self, clips):
        pass

    def sums(self):
        import torch

        return torch.zeros(1, dtype=torch.float64)

    def result(self, sums):
        return {}


class Holding(Callback):
    """A callback that delays the second save, or the backward pass of a step."""

    def run_started(self, run_dir, step, last_step):
        import torch

        fsync, backward = os.fsync, torch.autograd.backward
        self.taken, held = step, set()

        def slow_fsync(descriptor):
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if (
                path.suffix == ".distcp"
                and path.parent.name.startswith("step_00000008")
                and "save" not in held
            ):
                held.add("save")
                hold("in a save")
            fsync(descriptor)

        def slow_backward(*arguments, **named):
            for moment, at in STEPS.items():
                if self.taken + 1 == at and moment not in held:
                    held.add(moment)
                    hold(moment)
            return backward(*arguments, **named)

        os.fsync, torch.autograd.backward = slow_fsync, slow_backward

    def step_ended(self, step, metrics):
        self.taken = step
