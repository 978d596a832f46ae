"""A RunConfig as YAML again: every default filled, what came from the environment left as written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_core.config.schema import RunConfig
from mm_core.plugin.fields import ComponentConfig


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """Plain values that `load_config` reads back into an equal config."""
    plain = _plain(config, "", config.literals)
    assert isinstance(plain, dict)
    return plain


def to_yaml(config: RunConfig) -> str:
    """`to_mapping` as a YAML text."""
    import yaml

    return yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True, width=100)


def _plain(value: Any, path: str, literals: Mapping[str, str]) -> Any:
    if path in literals:
        return literals[path]
    if isinstance(value, ComponentConfig):
        return {"type": value.type, **_items(value.options, path, literals)}
    if dataclasses.is_dataclass(value):
        fields = [f for f in dataclasses.fields(value) if f.metadata.get("yaml", True)]
        return _items({f.name: getattr(value, f.name) for f in fields}, path, literals)
    if isinstance(value, Mapping):
        return _items(value, path, literals)
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}.{index}", literals) for index, item in enumerate(value)]
    return str(value) if isinstance(value, Path) else value


def _items(values: Mapping[str, Any], path: str, literals: Mapping[str, str]) -> dict[str, Any]:
    return {key: _plain(item, f"{path}.{key}" if path else key, literals) for key, item in values.items()}
