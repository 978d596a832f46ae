"""A one-file plugin for tests: a metric that takes its time, and a disk that does."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from mm_core import Component, hookimpl
from mm_core.contracts import Callback


@dataclass(frozen=True)
class SlowConfig:
    folder: str
    seconds: float


@hookimpl
def mm_metrics():
    return [Component(name="slow_metric", target="slow_parts:SlowMetric", config="slow_parts:SlowConfig")]


@hookimpl
def mm_callbacks():
    return [Component(name="slow_disk", target="slow_parts:SlowDisk", config="slow_parts:SlowConfig")]


class SlowMetric:
    def __init__(self, folder, seconds):
        self.folder, self.seconds = Path(folder), seconds

    def reset(self):
        pass

    def batch(self, batch, evaluation):
        (self.folder / "evaluating").touch()
        time.sleep(self.seconds)

    def sampled(self, clips):
        pass

    def sums(self):
        import torch

        return torch.zeros(1, dtype=torch.float64)

    def result(self, sums):
        return {}


class SlowDisk(Callback):
    """The disk takes `seconds` for the shard of each rank."""

    def __init__(self, folder, seconds):
        self.seconds = seconds

    def run_started(self, run_dir, step, last_step):
        quick = os.fsync

        def slow(descriptor):
            if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".distcp":
                time.sleep(self.seconds)
            quick(descriptor)

        os.fsync = slow

    def run_ended(self, step, error):
        pass
