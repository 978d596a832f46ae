"""Runs without data, for what goes into checkpoints and comes out of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from mm_core.checkpoint.reading import Weights, open_checkpoint
from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.load import load_config
from mm_core.config.sections import RunConfig
from mm_core.contracts import TaskModule
from mm_core.inference.sample import load_as_rank
from mm_core.interchange.export_plan import own_state
from mm_core.interchange.import_weights import import_weights
from mm_core.plan import build_task
from mm_core.runtime.ranks import Ranks
from support import out_parts

DIT = {"num_layers": 2, "num_heads": 2, "head_dim": 12, "in_channels": 12, "out_channels": 12}
DIT |= {"text_dim": 32, "freq_dim": 32, "ffn_dim": 48, "patch_size": [2, 2, 2], "rope_max_seq_len": 64}
CLIPS = {"num_frames": 8, "height": 16, "width": 16}
VIDEO = {
    "type": "text_to_video",
    "predictor": {"type": "custom_dit", **DIT},
    "autoencoder": {"type": "pixel", "spatial": 2},
    "text_encoder": {"type": "bytes", "hidden_size": 32},
    "scheduler": {"type": "flow_match"},
}


def config_of(
    folder: Path,
    task: dict[str, Any],
    name: str = "tuned",
    *,
    plugin: str | None = None,
    clips: Mapping[str, int] = CLIPS,
    **sections: Any,
) -> RunConfig:
    """A run without data, in `folder/runs`: what its dataset names does not exist.

    Args:
        folder: where the config and the run are.
        task: the config's task.
        name: the run's name.
        plugin: a one-file plugin that the config names.
        clips: sizes of the clips.
        sections: further sections of the config.
    """
    document = {
        "run": {"name": name, "dir": str(folder / "runs")},
        **({"plugins": {"path": [plugin]}} if plugin else {}),
        "task": task,
        "data": {"train": {"type": "video_text", "annotations": str(folder / "none.json"), **clips}},
        "train": {"epochs": 1},
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_config(path)


def language(folder: Path, kind: str = "bert", name: str = "tuned", **sections: Any) -> RunConfig:
    """A run of a model of out_parts.py.

    Args:
        folder: where the config and the run are.
        kind: the model.
        name: the run's name.
        sections: further sections of the config, and `options`: fields of the task.
    """
    task = {"type": "local/parts", "model": kind, **sections.pop("options", {})}
    return config_of(folder, task, name, plugin=out_parts.__file__, **sections)


def published(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """A model of out_parts.py as its library saves it."""
    torch.manual_seed(3)
    saved = folder / f"published-{kind}"
    model = out_parts.model_of(kind)
    torch.nn.Module.to(model, dtype)  # a library's own `to` may warn
    model.save_pretrained(saved)
    return saved


def load_task(config: RunConfig, checkpoint: Path, weights: Weights = "auto") -> TaskModule:
    """The complete task of a run with the weights of a checkpoint, on this process's device."""
    opened = open_checkpoint(checkpoint)
    task = build_task(config, opened.adapters)
    load_as_rank(task, config, Ranks.current(), opened, weights)
    return task


def trained(config: RunConfig, origin: Path) -> torch.nn.Module:
    """The task of a run that began with `origin` and has trained: its adapters are no longer as they began
    (checkpoint 5)."""
    saved, _ = import_weights(config, origin)
    task = load_task(config, saved, "model")
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for root in task.trainable:
            for parameter in task.get_submodule(root).parameters():
                if parameter.requires_grad:
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    state = {f"{r}.{k}": t for r in task.trainable for k, t in own_state(task.get_submodule(r)).items()}
    _save(config, saved, state, {"seed": 1})
    return task


def moved(config: RunConfig, saved: Path, part: str, **facts: Any) -> torch.nn.Module:
    """The task of checkpoint `saved` as if trained: what `part` names in the predictor is no longer as it
    began (checkpoint 5)."""
    task = load_task(config, saved, "model")
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in task.predictor.named_parameters():
            if part in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    state = {f"predictor.{name}": tensor for name, tensor in own_state(task.predictor).items()}
    _save(config, saved, state, {"seed": 1, **facts})
    return task


def _save(config: RunConfig, saved: Path, model: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    store = CheckpointStore(Path(config.run.dir) / config.run.name, 9)
    store.save(5, {"model": model}, facts, (saved / "config.yaml").read_text())
    store.close()
