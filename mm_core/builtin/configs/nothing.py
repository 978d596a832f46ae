"""The config of built-in components without settings, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NothingConfig:
    """Config without fields: without any config, checking a YAML would import the component."""
