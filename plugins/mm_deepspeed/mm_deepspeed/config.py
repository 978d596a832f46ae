"""Config of the engine `deepspeed`, without torch and deepspeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from mm_core.plugin import Resume


@dataclass(frozen=True)
class DeepSpeedConfig:
    """Config of the engine `deepspeed`: a DeepSpeed JSON file as it is, or the same keys under `settings`."""

    config: str | None = None  # a DeepSpeed JSON file (hjson); its keys become `settings`
    settings: Annotated[
        Mapping[str, Any], Resume("allow", "changes sharding, memory or precision")
    ] = field(
        default_factory=dict  # the keys of a DeepSpeed JSON file
    )
