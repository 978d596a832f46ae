"""From a YAML file and overrides to a checked RunConfig. Every fault is reported at once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from mm_core.config.interpolation import resolve
from mm_core.config.overrides import apply_override, merge, parse_override
from mm_core.config.schema import RunConfig
from mm_core.config.yaml_nodes import read_file
from mm_core.errors import ConfigError, MMError
from mm_core.plugin.checking import FAILED, Checker, Node
from mm_core.plugin.registry import get_registry


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads, merges, resolves and checks a run's config. Imports no torch.

    Args:
        path: the YAML file. Its `include:` names files, relative to it, that are merged first.
        overrides: `key.path=value`, laid upon the file in order.

    Returns:
        The run, every default filled and every `type` a qualified name.

    Raises:
        ConfigError: `faults` lists each fault with file, line, key, what was found and what is
            accepted.
    """
    faults: list[MMError] = []
    root = _read(Path(path), faults, ())
    for text in overrides:
        try:
            root = apply_override(root, *parse_override(text))
        except ConfigError as fault:
            faults.append(fault)
    root, literals = resolve(root, faults)
    checker = Checker(get_registry(_local_plugins(root, faults)))
    config = checker.dataclass(RunConfig, root)
    # A value that was already found at fault is not reported again as missing or of a wrong type.
    places = {fault.where for fault in faults}
    faults += [fault for fault in checker.faults if fault.where not in places]
    if faults or config is FAILED:
        raise ConfigError(faults, where=str(path))
    plugins = dataclasses.replace(config.plugins, path=tuple(map(_absolute, config.plugins.path)))
    result: RunConfig = dataclasses.replace(config, plugins=plugins, literals=dict(literals))
    return result


def _read(path: Path, faults: list[MMError], above: tuple[Path, ...]) -> Node:
    """A file merged upon those that it includes; `include` itself is taken out."""
    if path.resolve() in above:
        chain = " -> ".join(p.name for p in (*above, path))
        raise ConfigError(f"files include each other: {chain}", where=str(path))
    node = read_file(path, faults)
    if not isinstance(node.value, dict):
        raise ConfigError(
            "the file holds no mapping", where=node.where, accepted="run, task, data, train, ..."
        )
    node = _anchor_plugins(node, path.parent)
    included = node.value.get("include")
    if included is None:
        return node
    rest = {key: child for key, child in node.value.items() if key != "include"}
    node = dataclasses.replace(node, value=rest)
    names = included.value if isinstance(included.value, list) else [included]
    base: Node | None = None
    for name in names:
        if not isinstance(name.value, str):
            faults.append(ConfigError("an include must be the path of a YAML file", where=name.place()))
            continue
        try:
            other = _read(path.parent / name.value, faults, (*above, path.resolve()))
        except ConfigError as fault:
            fault.hint = (
                f"{fault.hint}; included at {name.where}" if fault.hint else f"included at {name.where}"
            )
            raise ConfigError([fault], where=str(path)) if not fault.faults else fault from None
        base = other if base is None else merge(base, other)
    return node if base is None else merge(base, node)


def _anchor_plugins(root: Node, folder: Path) -> Node:
    """Paths of one-file plugins are relative to the file that names them."""
    section = root.value.get("plugins")
    paths = section.value.get("path") if section is not None and isinstance(section.value, dict) else None
    if section is None or paths is None or not isinstance(paths.value, list):
        return root
    items = [
        dataclasses.replace(item, value=os.path.normpath(folder / item.value))
        if isinstance(item.value, str) and "${" not in item.value
        else item
        for item in paths.value
    ]
    anchored = dataclasses.replace(
        section, value={**section.value, "path": dataclasses.replace(paths, value=items)}
    )
    return dataclasses.replace(root, value={**root.value, "plugins": anchored})


def _local_plugins(root: Node, faults: list[MMError]) -> tuple[str, ...]:
    """The one-file plugins that the config names: they are needed before the rest is checked."""
    section = root.value.get("plugins")
    paths = section.value.get("path") if section is not None and isinstance(section.value, dict) else None
    if paths is None or not isinstance(paths.value, list):
        return ()
    named = tuple(_absolute(item.value) for item in paths.value if isinstance(item.value, str))
    try:
        get_registry(named)
    except MMError as fault:
        faults.append(ConfigError(fault.what, where=paths.place(), accepted=fault.accepted, hint=fault.hint))
        return ()
    return named


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
