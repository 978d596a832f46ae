"""Parts of a run that validates, for tests in one process; and run by each rank, it writes what it found.

usage: validation_ranks.py CONFIG OUT (metrics ROWS | stop | samples | fault)
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from mm_core.config.load import load_config
from mm_core.contracts import Randomness, VideoTextBatch
from mm_core.device import start_process_group
from mm_core.errors import DataError, MMError
from mm_core.plan import build_task
from mm_core.plugin.registry import build
from mm_core.train.ema import EMA
from mm_core.train.failure import leave
from mm_core.train.validation import Validator

PROMPTS = ["a red circle moves left", "a blue square", "up"]
CONFIG = {
    "run": {"name": "tiny", "seed": 11},
    "task": {
        "type": "text_to_video",
        "predictor": {
            "type": "custom_dit",
            "num_layers": 1,
            "num_heads": 2,
            "head_dim": 12,
            "in_channels": 12,
            "out_channels": 12,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 32,
            "rope_max_seq_len": 16,
        },
        "autoencoder": {"type": "pixel"},
        "text_encoder": {"type": "bytes", "hidden_size": 16},
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
    """Clips of noise and captions, by row; `broken` ones can not be read. Counts what is read."""

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
            weights=torch.tensor([sample["weight"] for sample in samples]),
            ids=[sample["caption"] for sample in samples],
            pixels=torch.stack([sample["pixels"] for sample in samples]),
            captions=[sample["caption"] for sample in samples],
        )


def write_config(folder: Path, **sections) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "run": {**CONFIG["run"], "dir": str(folder)}, **sections}))
    return path


class Parts:
    """A sharded task whose weights are no longer those of its seed, its average, and a validator's maker."""

    def __init__(self, path: Path) -> None:
        self.config = load_config(path)
        self.task = build_task(self.config)
        self.engine = build("engine", self.config.engine)
        plan = self.engine.plan(self.task, dist.get_world_size(), 2)
        for name in self.task.frozen:
            getattr(self.task, name).load(self.engine.device)
        self.engine.prepare(self.task, plan, self._optimizer, Randomness(1))
        self.ema = EMA(dict(self.engine.named_parameters()), self.config.ema)
        with torch.no_grad():
            for name, parameter in self.engine.named_parameters():
                full = 0.1 * Randomness(2).normal(tuple(parameter.shape), name)
                parameter.add_(like(full, parameter))
        self.notes: list[str] = []
        self.logged: dict[str, float] = {}
        self.shown: list = []

    def _optimizer(self, parameters) -> torch.optim.Optimizer:
        return build("optimizer", self.config.optimizer, [{"params": list(parameters.values())}])

    def validator(self, dataset, metrics=("latent_psnr", "frame_change"), **fields) -> Validator:
        return Validator(
            self.config,
            self.task,
            self.engine,
            dataset,
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
    """A request to stop that is seen at the `count`-th look."""
    looks = iter(range(1, 10_000))
    return lambda: next(looks) >= count


def main(config: Path, out: Path, case: str, *details: str) -> None:
    start_process_group()
    parts, rank = Parts(config), dist.get_rank()
    found: dict = {}
    if case == "metrics":
        data = Clips(int(details[0]))
        found["figures"] = parts.validator(data, ema=parts.ema).run(4)
        found["reads"] = dict(data.reads)
    elif case == "stop":  # one rank is asked, all of them leave
        stop = stops_at(3) if rank == 1 else lambda: False
        found["run"] = parts.validator(Clips(40), stop=stop).run(4)
        stop = stops_at(2) if rank == 1 else lambda: False
        found["sample"] = parts.validator(None, stop=stop).sample(4)
        found["after"] = parts.validator(Clips(8)).run(4)["validation/loss"]
    elif case == "fault":  # a rank whose rows can not be read at all ends the others too
        try:
            parts.validator(Clips(16, broken=tuple(range(4, 16)))).run(4)
        except MMError as error:
            found["error"] = [type(error).__name__, error.what, error.where]
    else:
        found["folder"] = str(parts.validator(None, ema=parts.ema).sample(4))
        found["logged"] = parts.logged
        found["shown"] = [[clip.prompt for clip in clips] for _, clips, _ in parts.shown]
    found["notes"] = parts.notes
    (out / f"{dist.get_world_size()}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    leave(0)
