"""A one-file plugin for tests: clips that rank 1 never gets from some sample on."""

import time
from dataclasses import dataclass

from mm_core import Component, hookimpl
from mm_core.builtin.configs.data import VideoTextConfig


@dataclass(frozen=True)
class SleepyConfig(VideoTextConfig):
    after: int = 8  # samples that rank 1 still gets


@hookimpl
def mm_datasets():
    return [Component(name="sleepy", target="sleepy_data:build", config="sleepy_data:SleepyConfig")]


def build(after, **fields):
    import torch.distributed as dist

    from mm_core.data.datasets.video_text import VideoTextDataset

    class Sleepy(VideoTextDataset):
        taken = 0

        def sample_at(self, index, rng):
            self.taken += 1
            if dist.get_rank() == 1 and self.taken > after:
                time.sleep(600)  # the line that is to be named
            return super().sample_at(index, rng)

    return Sleepy(**fields)
