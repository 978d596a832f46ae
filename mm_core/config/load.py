"""From a YAML file and overrides to a checked RunConfig. Every fault is reported at once."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mm_core.config.interpolation import resolve
from mm_core.config.overrides import lay, merge
from mm_core.config.schema import RunConfig
from mm_core.config.yaml_nodes import read_file
from mm_core.errors import ConfigError, MMError
from mm_core.plugin.checking import Checker
from mm_core.plugin.nodes import Node, show
from mm_core.plugin.registry import get_registry

_LINE = re.compile(r"(.*?):(\d+)(?=: |\Z)")
_INCLUDE = "include"
_SECTIONS = tuple(f.name for f in dataclasses.fields(RunConfig) if f.metadata.get("yaml", True))


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, spare_environment: bool = False
) -> RunConfig:
    """Reads, merges, resolves and checks a run's config. Imports no torch.

    Args:
        path: the YAML file. Its `include:` names files, relative to it, that are merged first.
        overrides: `key.path=value`, laid upon the file.
        spare_environment: a variable that is not set is a fault only where the text that asks for it can not
            stand for its value; for a run that has trained, of which not all is needed any more.

    Returns:
        The run, every default filled and every `type` a qualified name.

    Raises:
        ConfigError: `faults` lists each fault with file, line, key, what was found and what is
            accepted.
    """
    sources = _Sources()
    root = sources.read(Path(path), ())
    faults = sources.faults
    root = lay(root, overrides, faults)
    if sources.lost:  # without them, everything that they hold would be reported as missing
        raise ConfigError(_ordered(faults), where=str(path))
    unset: list[MMError] = []
    root, literals = resolve(root, faults, unset if spare_environment else faults)
    root = _anchor_plugins(root)
    checker = Checker(get_registry(_local_plugins(root, faults)))
    config = checker.dataclass(RunConfig, root, further=(_INCLUDE,))
    faults += checker.faults
    if faults:
        faults += unset
        raise ConfigError(_ordered(faults), where=str(path))
    assert isinstance(config, RunConfig)
    return dataclasses.replace(config, literals=dict(literals))


class _Sources:
    """The files of one config. `lost` says that one of them could not be read."""

    def __init__(self) -> None:
        self.faults: list[MMError] = []
        self.lost = False
        self._read: dict[Path, Node] = {}

    def read(self, path: Path, above: tuple[Path, ...]) -> Node:
        """A file merged upon those that it includes; `include` itself is taken out."""
        real = path.resolve()
        if real in above:
            chain = " -> ".join(p.name for p in (*above[above.index(real) :], real))
            raise ConfigError(f"files include each other: {chain}", where=str(path))
        if real not in self._read:  # a file that is included along many ways is read once
            self._read[real] = self._merged(path, (*above, real))
        return self._read[real]

    def _merged(self, path: Path, above: tuple[Path, ...]) -> Node:
        node = read_file(path, self.faults)
        if not isinstance(node.value, dict):
            raise ConfigError(
                f"the file holds no mapping: found {show(node)}",
                where=node.where,
                accepted=", ".join(_SECTIONS),
            )
        included = node.value.get(_INCLUDE)
        node = dataclasses.replace(node, value={k: v for k, v in node.value.items() if k != _INCLUDE})
        base: Node | None = None
        for name in self._names(included):
            try:
                other = self.read(path.parent / name.value, above)
            except ConfigError as fault:
                self.lost = True
                hints = [fault.hint, f"included at {name.where}"]
                self.faults.append(
                    ConfigError(
                        fault.what,
                        where=fault.where,
                        accepted=fault.accepted,
                        hint="; ".join(hint for hint in hints if hint),
                    )
                )
                continue
            base = other if base is None else merge(base, other, self.faults)
        return node if base is None else merge(base, node, self.faults)

    def _names(self, included: Node | None) -> list[Node]:
        if included is None:
            return []
        names = included.value if isinstance(included.value, list) else [included]
        for name in names:
            if not isinstance(name.value, str):
                fault = ConfigError(
                    f"found {show(name)}",
                    where=name.place(),
                    accepted="the path of a YAML file, or a list of them",
                )
                self.faults.append(fault)
        return [name for name in names if isinstance(name.value, str)]


def _anchor_plugins(root: Node) -> Node:
    """Paths of one-file plugins are relative to the file that names them, or to the working directory
    in an override. Done after interpolation, which may bring an absolute path."""
    section = root.value.get("plugins")
    paths = section.value.get("path") if section is not None and isinstance(section.value, dict) else None
    if section is None or paths is None or not isinstance(paths.value, list):
        return root
    items = [_anchored(item) if isinstance(item.value, str) else item for item in paths.value]
    paths = dataclasses.replace(paths, value=items)
    section = dataclasses.replace(section, value={**section.value, "path": paths})
    return dataclasses.replace(root, value={**root.value, "plugins": section})


def _anchored(item: Node) -> Node:
    written = _LINE.fullmatch(item.where)
    folder = Path(written[1]).parent if written else Path()
    path = folder / Path(item.value).expanduser()
    return dataclasses.replace(item, value=os.path.abspath(path))  # noqa: PTH100 - also takes `..` out


def _local_plugins(root: Node, faults: list[MMError]) -> tuple[str, ...]:
    """The one-file plugins that the config names: they are needed before the rest is checked."""
    section = root.value.get("plugins")
    paths = section.value.get("path") if section is not None and isinstance(section.value, dict) else None
    if paths is None or not isinstance(paths.value, list):
        return ()
    named = tuple(item.value for item in paths.value if isinstance(item.value, str))
    if not named:
        return ()
    try:
        get_registry(named)
    except MMError as fault:
        faults.append(ConfigError(fault.what, where=paths.place(), accepted=fault.accepted, hint=fault.hint))
        return ()
    return named


def _ordered(faults: Sequence[MMError]) -> list[MMError]:
    """Faults of one file together, from its first line to its last."""
    files: dict[str, int] = {}

    def key(fault: MMError) -> tuple[int, int]:
        where = fault.where or ""
        line = _LINE.match(where)
        name = line[1] if line else where
        return files.setdefault(name, len(files)), int(line[2]) if line else 0

    return sorted(faults, key=key)
