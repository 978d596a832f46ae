"""Configs that train a tiny InternVL by the task `pretrained`."""

from __future__ import annotations

from pathlib import Path

import yaml

from mm_core.config.load import load_config

AUTO_CLASS = "mm_internvl.model:InternVLForConditionalGeneration"


def config_of(tmp_path: Path, folder: Path, rows: Path | None = None, name: str = "tuned", **sections):
    """A run that begins with a folder; without rows, one that could not train."""
    document = {
        "run": {"name": name, "dir": str(tmp_path / "runs")},
        "task": {"type": "pretrained", "from_pretrained": str(folder), "auto_class": AUTO_CLASS},
        "data": {
            "train": {
                "type": "internvl/conversations",
                "processor": str(folder),
                "sources": [{"annotations": str(rows or tmp_path / "none.jsonl")}],
                "max_length": 128,
                "max_tiles": 2,
            },
            "loader": {"workers": 0},
        },
        "engine": {"type": "fsdp2"},
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "train": {"steps": 5, "micro_batch_size": 2, "global_batch_size": 4},
        "checkpoint": {"every": 5, "async": False},
    }
    for section, options in sections.items():
        document[section] = {**document.get(section, {}), **options}
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_config(file)
