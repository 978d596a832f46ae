"""A one-file plugin for tests: figures that are not finite, and an evaluation that a signal comes into."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from mm_core import Component, hookimpl


@dataclass(frozen=True)
class FiguresConfig:
    figures: tuple[str, ...] = ()  # of the evaluations, in turn; numbers as text, because JSON has no inf


@dataclass(frozen=True)
class SignalledConfig:
    folder: str  # where evaluations are counted
    at: tuple[int, ...] = ()  # those, from 1, that SIGTERM comes into


@hookimpl
def mm_metrics():
    return [
        Component(name="figures", target="odd_metrics:Figures", config="odd_metrics:FiguresConfig"),
        Component(name="signalled", target="odd_metrics:Signalled", config="odd_metrics:SignalledConfig"),
    ]


class Figures:
    def __init__(self, figures):
        self.figures = list(figures)

    def reset(self):
        pass

    def batch(self, batch, evaluation):
        pass

    def sampled(self, clips):
        pass

    def sums(self):
        import torch

        return torch.zeros(1, dtype=torch.float64)

    def result(self, sums):
        return {"figure": float(self.figures.pop(0))}


class Signalled(Figures):
    def __init__(self, folder, at):
        self.marks, self.at = Path(folder), at
        self.signals = False

    def reset(self):
        number = len(list(self.marks.glob("evaluation_*"))) + 1
        (self.marks / f"evaluation_{number}").touch()
        self.signals = number in self.at

    def batch(self, batch, evaluation):
        if self.signals:
            os.kill(os.getpid(), signal.SIGTERM)

    def result(self, sums):
        return {}
