"""The YAML files that installed plugins ship: in the folder `configs` of a plugin's package."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_core.config.sections import RunConfig
from mm_core.config.yaml_nodes import read_file
from mm_core.errors import ConfigError, did_you_mean, plain_reason, some
from mm_core.files import replacing
from mm_core.plugin.checks.locate import find_module
from mm_core.plugin.records import PluginRecord, not_installed
from mm_core.schema.nodes import keys_of

INCLUDING = tuple(name for name in keys_of(RunConfig) if name != "init_from")
"""Sections with the key `include`; that of `init_from` names parameters."""

SHIPPED = "config:"
"""What begins the name of a plugin's YAML file in `include`: `config:wan/t2v_1_3b`."""

FOLDER = "configs"
"""Name of the folder of YAML files beside a plugin's module, as its wheel carries it."""

_SENTENCE = re.compile(r"(.+?\.)(?:\s|\Z)")


@dataclass(frozen=True)
class ShippedConfig:
    """A YAML file that an installed plugin ships.

    Attributes:
        name: the plugin's namespace and the path in its folder without suffix: `wan/t2v_1_3b`.
        file: the installed file.
        distribution: the plugin's Python distribution.
        version: the distribution's version.
        description: the first sentence of the comment that the file starts with.
    """

    name: str
    file: Path
    distribution: str
    version: str
    description: str


def shipped_configs(plugins: Iterable[PluginRecord]) -> tuple[ShippedConfig, ...]:
    """The YAML files of the plugins that loaded, by plugin and name."""
    found = []
    for plugin in plugins:
        if plugin.status != "ok" or plugin.file is not None:
            continue
        for folder in _folders(plugin.module):
            for file in sorted(folder.rglob("[!.]*.y*ml")):
                name = f"{plugin.namespace}/{file.relative_to(folder).with_suffix('').as_posix()}"
                about = _description(file)
                found.append(ShippedConfig(name, file, plugin.distribution, plugin.version, about))
    return tuple(found)


def find_shipped(name: str, plugins: Sequence[PluginRecord]) -> ShippedConfig:
    """The YAML file of a name that the loaded of some plugins ship; `.yaml` at its end is accepted.

    Raises:
        ConfigError: there is none; the error names similar ones.
    """
    named = {config.name: config for config in shipped_configs(plugins)}
    wanted = re.sub(r"\.ya?ml\Z", "", name)
    if wanted in named:
        return named[wanted]
    absent = not_installed(wanted.partition("/")[0], plugins)
    raise ConfigError(
        f"no installed plugin ships a config named {name!r}",
        accepted=some([*named]) or "nothing: no installed plugin ships a config",
        hint=absent or did_you_mean(wanted, named) or "`mm config list` shows all of them",
    )


def copy_shipped(config: ShippedConfig, destination: Path | None = None) -> Path:
    """Copies a shipped YAML file byte for byte; an existing file is never replaced.

    Args:
        config: what to copy.
        destination: the new file, or an existing folder; None: the working directory.

    Returns:
        The new file.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    path = Path() if destination is None else destination
    path = path / config.file.name if path.is_dir() else path
    if path.exists():
        what, hint = "this file exists, and is not replaced", "name another file, or remove this one first"
        raise ConfigError(what, where=str(path), hint=hint)
    try:
        with replacing(path, named=True) as staged:
            staged.write_bytes(config.file.read_bytes())
    except FileNotFoundError:
        what = f"the folder {path.parent} does not exist"
        raise ConfigError(what, where=str(path), hint=f"create it first: mkdir -p {path.parent}") from None
    except OSError as error:
        what = f"the config cannot be copied: {plain_reason(error)}"
        raise ConfigError(what, where=str(path), hint="check the path and its permissions") from None
    return path


def relative_references(config: ShippedConfig) -> tuple[str, ...]:
    """The files that a YAML names relative to itself (`include`, `plugins.path`): a copy needs them too."""
    root = read_file(config.file, [])
    places = [root, *(section for section in root.children if section.path in INCLUDING)]
    included = [found for place in places if (found := place.at("include"))]
    named = [name for found in included for name in found.children or [found]]
    nodes = [*named, *root.items("plugins", "path")]
    names = [node.value for node in nodes if isinstance(node.value, str)]
    return tuple(n for n in names if not n.startswith(SHIPPED) and not Path(n).is_absolute())


def _folders(module: str) -> list[Path]:
    """The folder of configs in the package of a plugin's module; [] if it has none."""
    spec = find_module(module)
    if spec is not None and not spec.submodule_search_locations:
        spec = find_module(spec.parent) if spec.parent else None
    locations = spec.submodule_search_locations if spec is not None else None
    return [folder for place in locations or () if (folder := Path(place, FOLDER)).is_dir()]


def _description(file: Path) -> str:
    """The first sentence of the comment that a YAML file starts with, or else the comment's first line."""
    lines: list[str] = []
    with file.open(encoding="utf-8", errors="replace") as text:
        for line in text:
            if not line.startswith("#"):
                break
            lines.append(line.lstrip("#").strip())
    whole = " ".join(lines)
    sentence = _SENTENCE.match(whole)
    return sentence[1] if sentence else next(iter(lines), "")
