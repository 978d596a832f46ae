"""What the tests of all tools use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_core.config.load import load_config
from mm_core.interchange import Migrated, to_yaml


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def lists(tmp_path) -> Callable[[Migrated], tuple[dict[str, Any], dict[str, str], dict[str, str]]]:
    """Our values, and the reasons of what is dropped and of what differs, of a run whose config is valid."""

    def of(run: Migrated):
        (tmp_path / "migrated.yaml").write_text(to_yaml(run))
        load_config(tmp_path / "migrated.yaml")
        values = {key: line.value for key, line in run.lines.items()}
        return (
            values,
            {left.key: left.why for left in run.dropped},
            {left.key: left.why for left in run.differs},
        )

    return of


@pytest.fixture
def written(tmp_path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write
