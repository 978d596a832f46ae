"""Config of the engine `deepspeed`, without torch and deepspeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from mm_core.errors import ConfigError
from mm_core.plugin import Resume
from mm_deepspeed.keys import checked


@dataclass(frozen=True)
class DeepSpeedConfig:
    """Config of the engine `deepspeed`: a DeepSpeed JSON file as it is, or the same keys under `settings`.

    The file's keys become `settings`, so that a stored run does not depend on the file.
    """

    config: str | None = None  # a DeepSpeed JSON file (hjson); its keys become `settings`
    settings: Annotated[Mapping[str, Any], Resume("safe", "changes sharding, memory or precision")] = field(
        default_factory=dict  # the keys of a DeepSpeed JSON file
    )

    def __post_init__(self) -> None:
        if self.config is not None and self.settings:
            raise ValueError("config and settings are both set: name the file, or write its keys, not both")
        place = "settings" if self.config is None else f"config {self.config}:"
        if self.config is not None:
            object.__setattr__(self, "settings", _read(self.config))
            object.__setattr__(self, "config", None)
        faults = checked(self.settings)[1]
        if faults:
            raise ConfigError([ConfigError(f"{place} {fault}") for fault in faults])


def _read(file: str) -> dict[str, Any]:
    import hjson

    try:
        found = hjson.loads(Path(file).read_text("utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        what = f"config {file} cannot be read: {error.strerror}"
        raise ValueError(f"{what}; a relative path is from where the command starts") from None
    except ValueError as error:
        raise ValueError(f"config {file} is not a DeepSpeed JSON file: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"config {file} is not a DeepSpeed JSON file: it has no keys")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return found
