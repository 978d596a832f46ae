"""The components that a config names, with their keys."""

from __future__ import annotations

from mm_core.schema.fields import ComponentConfig
from mm_core.schema.nodes import inside


def walk_components(value: object, key: str = "") -> list[tuple[str, ComponentConfig]]:
    """Every component in a config value with its key path, outer components first."""
    found = [(key, value)] if isinstance(value, ComponentConfig) else []
    held = inside(value)
    items = held.items() if isinstance(held, dict) else enumerate(held or ())
    for name, item in items:
        found += walk_components(item, f"{key}.{name}" if key else str(name))
    return found
