"""A RunConfig as YAML again: every default filled in, `${oc.env:..}` texts left as written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from mm_core.config.interpolation import escape
from mm_core.config.sections import RunConfig
from mm_core.config.yaml_nodes import FLOAT, MAX_BYTES
from mm_core.errors import ConfigError
from mm_core.plugin.registry import Registry
from mm_core.schema.fields import ComponentConfig
from mm_core.schema.nodes import default_of, inside, keys_of


class _Dumper(yaml.SafeDumper):
    """Quotes strings that our reader would read as numbers (PyYAML's would not), and writes no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # In other styles PyYAML folds these line breaks, and they are read back as spaces.
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """A run's config as a plain mapping, which `load_config` reads back into an equal config."""
    mapping = plain(config, "", texts_of(config))
    assert isinstance(mapping, dict)
    return mapping


def texts_of(config: RunConfig) -> dict[str, str]:
    """The texts that values of a config were read from: interpolations, names on the hub at their commits."""
    return {**{key: str(use.name.pinned()) for key, use in config.hub.items()}, **config.literals}


def to_yaml(config: RunConfig) -> str:
    """A run's config as YAML text, with every default filled in.

    Raises:
        ConfigError: the text is too large for `load_config`, so no command could open the run.
    """
    text: str = yaml.dump(to_mapping(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    if (size := len(text.encode())) > MAX_BYTES:
        what = f"with every default filled in, this config takes {size // 1024 + 1} KiB"
        hint = "move long lists (prompts, rows) to separate files"
        raise ConfigError(what, accepted=f"at most {MAX_BYTES // 1024} KiB", hint=hint)
    return text


def inline(value: object) -> str:
    """A plain value as YAML in one line."""
    flow, width = not isinstance(value, str), 10**9
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, allow_unicode=True, width=width)
    return text.removesuffix("\n...\n").rstrip("\n")


def plain(value: object, path: str = "", literals: Mapping[str, str] = MappingProxyType({})) -> object:
    """A checked value as plain mappings, lists and scalars, as they are written in a YAML.

    Args:
        value: a config, a component's reference, or a value in one.
        path: key path of the value, for errors.
        literals: key path -> the text with an interpolation that the value was read from.

    Raises:
        ConfigError: the value cannot be written as YAML.
    """
    if path in literals:
        return literals[path]
    held = inside(value)
    if isinstance(value, ComponentConfig) and isinstance(held, dict):
        held = {key: item for key, item in held.items() if key not in value.derived}
    if isinstance(held, dict):
        return {k: plain(item, f"{path}.{k}" if path else k, literals) for k, item in held.items()}
    if isinstance(held, list):
        return [plain(item, f"{path}.{index}", literals) for index, item in enumerate(held)]
    if isinstance(value, (str, Path)):
        return escape(str(value))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    what = f"{value!r} of type {type(value).__qualname__} cannot be written as YAML"
    raise ConfigError(what, where=path, accepted="numbers, strings, booleans, lists and mappings")


def without_defaults(written: Any, value: object, registry: Registry) -> Any:
    """A part of a config as written, without the keys that have their defaults.

    Args:
        written: the part in what `to_mapping` returns.
        value: the same part of the config: a component's reference, a section, or a value in one.
        registry: of the components.
    """
    if isinstance(value, (tuple, list)):
        return [without_defaults(*each, registry) for each in zip(written, value, strict=True)]
    if isinstance(value, ComponentConfig):
        class_ = registry.resolve(value.kind, value.type).config_class()
    elif is_dataclass(value) and not isinstance(value, type):
        class_ = type(value)
    else:
        return written
    held: Any = inside(value)
    defaults = {key: default_of(each) for key, each in keys_of(class_).items()}
    shorter = {}
    for key, part in written.items():
        if key in held and held[key] != defaults.get(key, MISSING):
            found, default = without_defaults(part, held[key], registry), defaults.get(key)
            if not isinstance(default, ComponentConfig) or found != {"type": default.type}:
                shorter[key] = found
    return shorter
