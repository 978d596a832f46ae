"""The config of what has nothing to set: torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NothingConfig:
    """No fields: without a config, checking would import the component."""
