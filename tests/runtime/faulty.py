"""A one-file plugin whose dataset fails on one rank only, or whose task misbehaves, as variables set it."""

from __future__ import annotations

import os
import signal
import time

from mm_core import Component, hookimpl
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.errors import DataError
from mm_core.tasks.text_to_video.task import TextToVideo


def told(what: str) -> bool:
    """Whether this rank is to do `what`."""
    return os.environ.get("FAULT") == what and os.environ.get("RANK", "0") == os.environ.get(
        "FAULT_RANK", "1"
    )


class FaultyDataset(VideoTextDataset):
    """video_text that cannot read anything on one rank."""

    def __getitem__(self, index):
        if told("data"):
            raise DataError("nothing can be read here", where=f"clip {index}")
        return super().__getitem__(index)

    def sample_at(self, index, rng):
        if told("data"):
            raise DataError("nothing can be read here", where=f"clip {index}")
        if told("slow data"):
            time.sleep(0.015)
        return super().sample_at(index, rng)


class FaultyTask(TextToVideo):
    """text_to_video that dies or gives no number on one rank, or takes its time on all."""

    def loss(self, inputs):
        if told("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if told("nan"):
            loss = super().loss(inputs)
            loss.total = loss.total * float("nan")
            return loss
        if os.environ.get("FAULT") == "slow":
            time.sleep(0.2)
        again = {"SLURM_RESTART_COUNT", "MM_RESTART"} & os.environ.keys()
        if os.environ.get("FAULT") == "slow at first" and not again:
            time.sleep(2)
        if told("slow forward"):
            time.sleep(0.03)
        return super().loss(inputs)


@hookimpl
def mm_datasets():
    return [
        Component(
            name="faulty_data",
            target="faulty:FaultyDataset",
            config="mm_core.builtin.configs.data:VideoTextConfig",
        )
    ]


@hookimpl
def mm_tasks():
    config = "mm_core.builtin.configs.text_to_video:TextToVideoConfig"
    return [Component(name="faulty_task", target="faulty:FaultyTask", config=config)]
