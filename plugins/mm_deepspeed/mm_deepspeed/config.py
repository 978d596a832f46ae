"""Config of the engine `deepspeed`, without torch and deepspeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from mm_core.errors import ConfigError
from mm_core.plugin import Resume
from mm_deepspeed.json_file import placed, read_json
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
        if self.config is not None:
            object.__setattr__(self, "settings", read_json(self.config))
            object.__setattr__(self, "config", None)
        faults = checked(self.settings)[1]
        if faults:
            raise ConfigError([ConfigError(placed(self.settings, fault)) for fault in faults])
