"""Reads logs of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def log_of(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path, key: str = "loss") -> list[float]:
    """Logged values of a key, for every step that has it."""
    return [row[key] for row in log_of(run) if key in row]
