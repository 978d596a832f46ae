"""From a YAML file and overrides to a checked RunConfig. All errors are reported at once."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mm_core.config.components import with_task_values
from mm_core.config.former import without_former_values
from mm_core.config.hub_names import bare_names, commits_of, located
from mm_core.config.interpolation import resolve
from mm_core.config.overrides import apply_overrides, merge
from mm_core.config.sections import RunConfig
from mm_core.config.shipped import INCLUDING, SHIPPED, find_shipped
from mm_core.config.stored import Sources, known_only, stored_plugins, unknown_commands
from mm_core.config.yaml_nodes import Spent, read_file
from mm_core.errors import ConfigError, MMError, RunWarning, TrustError, first_line
from mm_core.fetching import UnreachableError
from mm_core.fetching import fetch as fetch_all
from mm_core.plugin.registry import Registry, get_registry
from mm_core.schema.checking import MAX_FAULTS, Checker
from mm_core.schema.nodes import FAILED, Node, keys_of, show

_LINE = re.compile(r"(.*?):(\d+)(?=: |\Z)")
MAX_INCLUDES = 200
"""Most names in the `include:` of all files of a config."""

Fetch = bool | Literal["anew", "configs"] | Path
_INCLUDE = "include"
_SECTIONS = tuple(keys_of(RunConfig))


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    spare_environment: bool = False,
    stored: bool | None = None,
    allow_code: bool = False,
    fetch: Fetch = False,
) -> RunConfig:
    """Reads, merges, resolves and checks the config of a run, without importing torch.

    Args:
        path: the YAML file. Its `include:`, and that of a section, names files, relative to it, that are
            merged first.
        overrides: `key.path=value` texts that override keys of the file.
        spare_environment: accept unset environment variables wherever the unresolved text is a valid value.
            For a run that has trained, of which not everything is needed any more.
        stored: whether the file belongs to a stored run; None: decided by its folder (see
            `mm_core.config.stored`).
        allow_code: run code named by a stored run's config, and read the environment for it, even if this
            user has not trained with it.
        fetch: fetch what its names on the hub (`hub:org/name`) stand for, once the rest is checked: at the
            commits of the run's checkpoint if it has one, with a path at those of the checkpoint there, with
            `anew` at those of now. `configs`: only small files, for a plan. False: what is in the cache.

    Returns:
        The config, with every default filled in and every `type` a qualified name.

    Raises:
        ConfigError: `faults` lists each error with file, line, key, what was found and what is accepted.
        MMError: what is on the hub cannot be fetched.
        TrustError: the stored run has one-file plugins that this user has not trained with, or a component
            that runs files of a folder without checking whether this user has trained with them.
    """

    def read() -> tuple[RunConfig, Node]:
        return load_with_places(
            path, overrides, spare_environment=spare_environment, stored=stored, allow_code=allow_code
        )

    config, root = read()
    if not fetch:
        return config
    for sentence in bare_names(root) if not stored else ():
        warnings.warn(sentence, RunWarning, stacklevel=2)
    uses = [replace(use, weights=use.weights and fetch != "configs") for use in config.hub.values()]
    try:
        origins = (fetch, fetch.parents[1]) if isinstance(fetch, Path) else (config.run.folder,)  # or a run's
        fetch_all(uses, {k: v for each in origins for k, v in commits_of(each).items() if fetch != "anew"})
    except UnreachableError as fault:
        if fetch != "configs":
            raise
        warnings.warn(f"{fault.where}: {fault.what}", RunWarning, stacklevel=2)  # a preset may be enough
        return config
    return read()[0] if uses else config  # now with what depends on the folders


def load_with_places(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    spare_environment: bool = False,
    stored: bool | None = None,
    allow_code: bool = False,
) -> tuple[RunConfig, Node]:
    """Reads and checks the config of a run as `load_config` does, and keeps where its values were written.

    Returns:
        The config, and the tree that it was checked from: files merged, interpolations resolved. Its nodes
        know their file and line, or their override. It has no defaults.

    Raises:
        ConfigError: lists each error in the config.
    """
    path, sources = Path(path), Sources(stored, allow_code)
    reader = _ConfigReader(sources)
    root = reader.read(path, ())
    faults = reader.faults
    root = apply_overrides(root, overrides, faults)
    if reader.lost:  # otherwise everything in the unreadable files would be reported as missing
        raise ConfigError(_ordered(faults), where=str(path))
    unset: list[MMError] = []
    root, literals = resolve(root, faults, unset if spare_environment else faults, sources.withholds)
    root, hub = located(root, faults)
    root = without_former_values(root, sources, faults)
    root = known_only(_anchor_plugins(root), sources)
    registry = _registry(root, faults, sources)
    checker = Checker(registry)
    config = checker.checked(lambda: checker.dataclass(RunConfig, root, further=(_INCLUDE,)))
    sources.check_accepted(checker.faults)
    faults += checker.faults
    if faults:
        faults += unset
        raise ConfigError(_ordered(faults), where=str(path))
    assert isinstance(config, RunConfig)
    config = replace(
        config,
        registry=registry,
        literals=dict(literals),
        hub=hub,
        allow_code=sources.allow_code,
        unknown_commands=unknown_commands(config, root, sources),
    )
    return with_task_values(config), root


def files_of(path: Path) -> Sequence[Path]:
    """The file of a config, and those that are included, as far as they can be read."""
    sources = Sources()
    with suppress(ConfigError):
        _ConfigReader(sources).read(path, ())
    return sources.files()


class _ConfigReader:
    """Reads the files of one config. `lost` is set when one of them cannot be read."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.faults: list[MMError] = []
        self.lost = False
        self._read: dict[tuple[Path, str], Node] = {}
        self._spent = Spent()
        self._included = 0  # number of included names so far

    def read(self, path: Path, above: tuple[Path, ...], section: str = "") -> Node:
        """The tree of a file merged over the files that it includes, without the keys `include`.

        Args:
            path: the file.
            above: the files that include it, with links resolved.
            section: the section whose keys the file has; empty: those of a run.
        """
        try:
            real = path.resolve()
        except (OSError, ValueError, RuntimeError) as error:  # links in a circle, a NUL character
            hint = "check the path, and that its links do not form a circle"
            what = f"the file cannot be read: {first_line(error)}"
            raise ConfigError(what, where=str(path), hint=hint) from None
        if real in above:
            chain = " -> ".join(p.name for p in (*above[above.index(real) :], real))
            what = f"files include each other: {chain}"
            raise ConfigError(what, where=str(path), hint="remove one of these includes")
        if (real, section) not in self._read:  # a file that is included several times is read once
            self._read[real, section] = self._merged(path, (*above, real), section)
        return self._read[real, section]

    def _merged(self, path: Path, above: tuple[Path, ...], section: str) -> Node:
        self.sources.note(path, above)
        node = read_file(path, self.faults, self._spent)
        if not isinstance(node.value, dict):
            what = f"the file is not a mapping: found {show(node)}"
            accepted = f"the keys of {section}" if section else ", ".join(_SECTIONS)
            raise ConfigError(what, where=node.where, accepted=accepted)
        if section:
            node = _moved(node, section)
        else:
            node = node.mapped(lambda each: self._over_included(each, path, above))
        return self._over_included(node, path, above)

    def _over_included(self, node: Node, path: Path, above: tuple[Path, ...]) -> Node:
        """A run's or a section's mapping over the files that its `include` names."""
        included = node.at(_INCLUDE) if node.path in ("", *INCLUDING) else None
        if included is None:
            return node
        node = node.holding({k: v for k, v in node.value.items() if k != _INCLUDE})
        base: Node | None = None
        for name in self._names(included):
            self._included += 1
            if self._included > MAX_INCLUDES:
                what = f"the config's files include more than {MAX_INCLUDES} others"
                raise ConfigError(what, where=name.place(), hint="include fewer files")
            try:
                other = self.read(_file_of(name.value, path), above, node.path)
            except ConfigError as fault:
                self.lost = True
                hint = "; ".join(filter(None, [fault.hint, f"included at {name.where}"]))
                where = fault.where or name.place()
                again = ConfigError(fault.what, where=where, accepted=fault.accepted, hint=hint)
                self.faults.append(again)
                continue
            base = other if base is None else merge(base, other, self.faults)
        return node if base is None else merge(base, node, self.faults)

    def _names(self, included: Node) -> list[Node]:
        names = included.value if isinstance(included.value, list) else [included]
        accepted = "the path of a YAML file, or a list of them"
        for name in names:
            if name.value is FAILED:
                self.lost = True  # the error was reported already
            elif not isinstance(name.value, str):
                self.faults.append(ConfigError(f"found {show(name)}", where=name.place(), accepted=accepted))
        return [name for name in names if isinstance(name.value, str)]


def _file_of(name: str, beside: Path) -> Path:
    """The file that an `include` in the file `beside` names."""
    if name.startswith(SHIPPED):
        return find_shipped(name.removeprefix(SHIPPED), get_registry().plugins).file
    return beside.parent / name


def _moved(node: Node, section: str) -> Node:
    """The tree of a section's file at the section's key path."""
    return replace(
        node.mapped(lambda child: _moved(child, section)), path=f"{section}.{node.path}".rstrip(".")
    )


def _anchor_plugins(root: Node) -> Node:
    """Makes paths of one-file plugins absolute: they are relative to the file that names them, or to the
    working directory in an override. Done after interpolation, which may yield an absolute path."""
    section, paths = root.at("plugins"), root.at("plugins", "path")
    if section is None or paths is None or not isinstance(paths.value, list):
        return root
    paths = paths.mapped(lambda item: _anchored(item) if isinstance(item.value, str) else item)
    return root.put("plugins", section.put("path", paths))


def _anchored(item: Node) -> Node:
    written = _LINE.fullmatch(item.where)
    folder = Path(written[1]).parent if written else Path()
    # os.path also removes `..`, and leaves `~name` of an unknown user as it is.
    return item.holding(os.path.abspath(folder / os.path.expanduser(item.value)))  # noqa: PTH100, PTH111


def _registry(root: Node, faults: list[MMError], sources: Sources) -> Registry:
    """The installed plugins and those that the config names, which are needed to check the rest."""
    paths = root.at("plugins", "path")
    if paths is None or not isinstance(paths.value, list):
        return get_registry()
    named = tuple(item.value for item in paths.value if isinstance(item.value, str))
    try:
        return get_registry(named, stored_plugins(root, sources))
    except TrustError as fault:
        raise TrustError(fault.what, where=paths.place(), accepted=fault.accepted, hint=fault.hint) from fault
    except MMError as fault:
        faults.append(ConfigError(fault.what, where=paths.place(), accepted=fault.accepted, hint=fault.hint))
        return get_registry()


def _ordered(faults: Sequence[MMError]) -> list[MMError]:
    """The errors grouped by file, each file's from its first line to its last."""
    files: dict[str, int] = {}

    def key(fault: MMError) -> tuple[int, int]:
        where = fault.where or ""
        line = _LINE.match(where)
        name = line[1] if line else where
        return files.setdefault(name, len(files)), int(line[2]) if line else 0

    listed = sorted(faults, key=key)
    if len(listed) > MAX_FAULTS:
        more = f"and more: only the first {MAX_FAULTS} errors are listed"
        listed[MAX_FAULTS:] = [ConfigError(more, hint="fix these first, then check the config again")]
    return listed
