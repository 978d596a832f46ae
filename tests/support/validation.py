"""Parts of a run with validation: clips of noise, a config, and a sharded task with averaged weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from mm_core.config.load import load_config
from mm_core.contracts import Randomness, VideoTextBatch
from mm_core.errors import DataError
from mm_core.evaluation.validator import Validator
from mm_core.optim.ema import EMA
from mm_core.plan import build_task
from mm_core.plan.samples import Samples
from mm_core.plugin.registry import build
from mm_core.runtime.ranks import Ranks
from support.tiny_models import ONE_BLOCK

PROMPTS = ["a red circle moves left", "a blue square", "up"]
CONFIG = {
    "run": {"name": "tiny", "seed": 11},
    "task": {
        **ONE_BLOCK,
        "scheduler": {"type": "flow_match", "shift": 3.0},
        "caption_dropout": 0.5,
        "sample": {"steps": 3, "guidance": 2.0},
    },
    "data": {
        "train": {
            "type": "video_text",
            "annotations": "data.json",
            "num_frames": 2,
            "height": 8,
            "width": 12,
            "fps": 8,
        },
        "validation": {
            "type": "video_text",
            "annotations": "data.json",
            "num_frames": 2,
            "height": 8,
            "width": 12,
        },
        "loader": {"workers": 0},
    },
    "train": {"steps": 1, "micro_batch_size": 4},
    "validation": {"every": 1, "timesteps": [0.2, 0.5, 0.8], "samples": {"prompts": PROMPTS, "seed": 5}},
    "ema": {"decay": 0.5, "ramp": False},
}


class Clips:
    """A dataset of noise clips and captions; rows in `broken` cannot be read. Counts the rows that were
    read."""

    def __init__(self, rows: int, broken: tuple[int, ...] = ()) -> None:
        self.rows, self.broken, self.reads = rows, broken, Counter()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict:
        self.reads[index] += 1
        if index in self.broken:
            raise DataError("the file is damaged", where=f"clip {index}")
        pixels = Randomness(3).normal((3, 2, 8, 12), "pixels", index).mul(0.3).clamp(-1, 1)
        return {"pixels": pixels, "caption": f"clip {index}"}

    def collate(self, samples: list[dict]) -> VideoTextBatch:
        return VideoTextBatch(
            keys=[sample["key"] for sample in samples],
            sample_weights=torch.tensor([sample["weight"] for sample in samples]),
            ids=[sample["caption"] for sample in samples],
            pixels=torch.stack([sample["pixels"] for sample in samples]),
            captions=[sample["caption"] for sample in samples],
        )


def write_config(folder: Path, **sections) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "run": {**CONFIG["run"], "dir": str(folder)}, **sections}))
    return path


class Parts:
    """A sharded task with changed weights, its averaged weights, and a factory for its validator."""

    def __init__(self, path: Path) -> None:
        self.config = load_config(path)
        self.task = build_task(self.config)
        self.engine = self.config.registry.build("engine", self.config.engine)
        plan = self.engine.plan(self.task, dist.get_world_size(), 2)
        for name in self.task.frozen:
            getattr(self.task, name).load(self.engine.device)
        self.engine.prepare(self.task, plan, self._optimizer, Randomness(1))
        self.ema = EMA(self.engine.shards, self.config.ema)
        with torch.no_grad():
            for name, parameter in self.engine.named_parameters():
                full = 0.1 * Randomness(2).normal(tuple(parameter.shape), name)
                parameter.add_(like(full, parameter))
        self.notes: list[str] = []
        self.logged: dict[str, float] = {}
        self.shown: list = []

    def _optimizer(self, parameters) -> torch.optim.Optimizer:
        return self.config.registry.build(
            "optimizer", self.config.optimizer, [{"params": list(parameters.values())}]
        )

    def validator(self, dataset, metrics=("latent_psnr", "frame_change"), **fields) -> Validator:
        return Validator(
            self.config,
            Ranks.current(),
            self.task,
            self.engine,
            None if dataset is None else Samples(dataset),
            metrics=[(name, build("metric", {"type": name})) for name in metrics],
            run_dir=Path(self.config.run.dir) / self.config.run.name,
            note=self.notes.append,
            log=lambda step, figures: self.logged.update(figures),
            show=lambda *shown: self.shown.append(shown),
            **fields,
        )


def like(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements)


def stops_at(count: int):
    """A stop request that is visible from the `count`-th check on."""
    looks = iter(range(1, 10_000))
    return lambda: next(looks) >= count
