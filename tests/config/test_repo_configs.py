"""Every YAML under `configs/` is valid; its folders are links into the plugins' packages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mm_core.config.dump import to_yaml
from mm_core.config.load import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def found() -> list[Path]:
    """Every YAML, links followed (which `Path.rglob` does not before Python 3.13)."""
    folders = os.walk(CONFIGS, followlinks=True)
    return sorted(
        Path(folder, name)
        for folder, _, names in folders
        for name in names
        if name.endswith((".yaml", ".yml"))
    )


def test_there_are_configs():
    assert found(), f"no YAML under {CONFIGS}: is the link to the plugin's configs broken?"


@pytest.mark.parametrize("path", found(), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_it_checks_and_survives_being_written(path, tmp_path):
    config = load_config(path)
    again = tmp_path / "config.yaml"
    again.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(again) == config
