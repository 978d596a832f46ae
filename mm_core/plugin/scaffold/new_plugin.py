"""Writes the files of a new plugin."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from textwrap import fill, indent
from types import MappingProxyType
from typing import Any

from mm_core import __version__
from mm_core.errors import PluginError
from mm_core.files import staged_folder, write_durably
from mm_core.plugin.checks.locate import find_module
from mm_core.plugin.hookspecs import KINDS
from mm_core.plugin.kinds import ComponentKind
from mm_core.plugin.local import NAMESPACE
from mm_core.plugin.registry import Registry
from mm_core.plugin.scaffold.runs import GUIDED, RUN

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_HEADER = '"""The components of $name, by name only: listing them imports no torch."""\n'
_COMMENT: Mapping[str, Any] = MappingProxyType({"initial_indent": "# ", "subsequent_indent": "# "})
_STEPS = "{{steps: {steps}, micro_batch_size: 8, global_batch_size: 16, clip_grad_norm: 1.0}}"


def template_of(kind: str) -> str:
    """The text of a kind's module, with $$package where the name of the package belongs."""
    return _read(f"kinds/{kind}.py")


def new_plugin(name: str, kinds: Mapping[str, ComponentKind], registry: Registry, parent: Path) -> list[Path]:
    """Writes a new plugin into a folder of its name.

    Args:
        name: name of its distribution, such as `my-dit`; its package and namespace is `my_dit`.
        kinds: kinds of its components, and their records.
        registry: the installed plugins, whose names are taken.
        parent: the folder in which the plugin's folder is made.

    Returns:
        The files, relative to `parent`.

    Raises:
        PluginError: the name is not possible or taken, or the folder exists.
        MMError: the folder cannot be written.
    """
    package = name.replace("-", "_")
    _check(name, package, kinds, registry, parent)
    words = {"name": name, "package": package, **_words(kinds, package)}
    made = {
        "pyproject.toml": _filled("pyproject.toml", words),
        "README.md": _filled("README.md", words),
        ".github/workflows/test.yml": _filled("test.yml", words),
        "tests/test_conformance.py": _filled("test_conformance.py", words),
        f"{package}/__init__.py": "",
        f"{package}/plugin.py": _plugin(kinds, words),
    }
    for kind, record in kinds.items():
        made[f"{package}/{kind}.py"] = record.text or Template(template_of(kind)).substitute(words)
        made[f"{package}/configs/{kind}.yaml"] = config_of(kind, package, kinds)
        made |= {f"{package}/{name}": text for name, text in record.modules.items()}
    with staged_folder(parent / name) as stage:
        for path, text in made.items():
            file = stage / path
            file.parent.mkdir(parents=True, exist_ok=True)
            write_durably(file, text)
    return [Path(name) / path for path in made]


def config_of(kind: str, package: str, kinds: Mapping[str, ComponentKind]) -> str:
    """The YAML of a run with a new plugin's component.

    Args:
        kind: of the component.
        package: the plugin's package, and the component's name.
        kinds: all kinds of the plugin and their records: its own predictor takes the place of a shipped one.
    """
    record, own = kinds[kind], kinds["predictor"].run if "predictor" in kinds else {}
    keys = {**RUN, **own, **record.run, **GUIDED}
    if "task" in record.run:
        keys = {key: value for key, value in keys.items() if not key.startswith("task.")}
    keys["train"] = _STEPS.format(steps=record.steps)
    lines = [
        fill(f"A run with {_described(kind, record)} of {package}, {record.about}.", 110, **_COMMENT),
        *([f"# Then: {Template(record.then).substitute(type=package)}"] if record.then else []),
        f"run: {{name: {package}_{kind}, dir: runs, seed: 1234}}",
    ]
    first = ("task", "data")
    for key in sorted(keys, key=lambda key: (*first, key.partition(".")[0]).index(key.partition(".")[0])):
        section, _, rest = key.partition(".")
        value = Template(keys[key]).substitute(type=package)
        if rest and f"{section}:" not in lines:
            lines.append(f"{section}:")
        depth = "  " * bool(rest)
        value = indent(value, depth + "  ") if value.startswith("\n") else f" {value}"
        lines.append(f"{depth}{rest or section}:{value}")
    return "\n".join(lines) + "\n"


def _described(kind: str, record: ComponentKind) -> str:
    return record.words or f"a{'n' * (kind[0] in 'aeiou')} {kind.replace('_', ' ')}"


def _words(kinds: Mapping[str, ComponentKind], package: str) -> dict[str, str]:
    """Descriptions of the components, for the texts of a new plugin."""
    major, minor = __version__.split(".")[:2]
    described = {kind: _described(kind, record) for kind, record in kinds.items()}
    known = [*described.values()]
    listed = " and ".join(filter(None, [", ".join(known[:-1]), known[-1]]))
    rows = [
        (f"{package}/plugin.py", "the components, by name"),
        *((f"{package}/{kind}.py", what) for kind, what in described.items()),
        *dict.fromkeys(
            (f"{package}/{name}", "your file") for each in kinds.values() for name in each.modules
        ),
        *((f"{package}/configs/{kind}.yaml", "a run with it, in the wheel") for kind in kinds),
        ("tests/test_conformance.py", "the tests"),
    ]
    versions = f">={major}.{minor},<{major}.{int(minor) + 1}"
    needed = dict.fromkeys(each for record in kinds.values() for each in record.requires)
    runs = "".join(config_of(kind, package, kinds) for kind in kinds)
    shipped = [d for d, used in (("mm-custom-dit", "custom_dit  #"), ("mm-wan", "wan/")) if used in runs]
    return {
        "kinds": listed[:1].upper() + listed[1:],
        "listed": listed,
        "first": next(iter(kinds)),
        "files": "\n".join(f"| `{file}` | {what} |" for file, what in rows),
        "requires": ", ".join(f'"{each}"' for each in (f"mm-core{versions}", *needed)),
        "dev": ", ".join(['"pytest>=8"', *(f'"{name}{versions}"' for name in shipped)]),
    }


def _plugin(kinds: Mapping[str, ComponentKind], words: Mapping[str, str]) -> str:
    """The text of plugin.py."""
    lines = [Template(_HEADER).substitute(words), "from mm_core import Component, hookimpl"]
    for kind, record in kinds.items():
        given = [
            f'"{words["package"]}"',
            f'"{words["package"]}.{kind}:{record.target}"',
            *([f"tiny={_python(record.tiny)}"] if record.tiny else []),
            *([Template(record.declaration).substitute(words)] if record.declaration else []),
        ]
        line = f"    return [Component({', '.join(given)})]"
        if len(line) > 100:
            more = fill(", ".join(given[2:]), 90, break_long_words=False, break_on_hyphens=False)
            line = f"    return [\n        Component({', '.join(given[:2])},\n"
            line += indent(f"{more})", " " * 18) + "\n    ]"
        lines += ["", "", "@hookimpl", f"def {KINDS[kind]}():", line.replace("\0", " ")]
    return "\n".join(lines) + "\n"


def _python(value: Mapping[str, object]) -> str:
    """A dict as Python, with NUL for a space at which no line is broken."""
    items = (f"{key!r}:\0{each!r}".replace("'", '"').replace(", ", ",\0") for key, each in value.items())
    return "{" + ", ".join(items) + "}"


def _check(name: str, package: str, kinds: Iterable[str], registry: Registry, parent: Path) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(package):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        raise PluginError(
            f"{name!r} cannot be the name of a plugin",
            accepted="lower-case letters, digits and single hyphens, beginning with a letter: my-dit",
            hint=f"`mm plugins new {near}`" if _NAME.fullmatch(near) and near != name else None,
        )
    plugins = [plugin.label for plugin in registry.plugins if plugin.namespace == package]
    others = [each for kind in kinds for each in registry.components(kind) if package in each.names]
    owners = [*plugins, *(f"the {other.kind} {other.qualified}" for other in others)]
    what = None
    if package == NAMESPACE:
        what = f"the name {package!r} is reserved for one-file plugins"
    elif owners:
        what = f"the name {package!r} is taken by {owners[0]}"
    elif find_module(package) is not None:
        what = f"a Python module named {package!r} is installed already: the plugin's package would hide it"
    if what is not None:
        raise PluginError(what, hint="choose another name")
    if (parent / name).exists():
        raise PluginError(
            f"{parent / name} exists already",
            hint="choose another name, remove the folder, or begin in another one: nothing is replaced",
        )


def _filled(path: str, words: Mapping[str, str]) -> str:
    return Template(_read(path)).substitute(words)


def _read(path: str) -> str:
    """The text of a template."""
    return (files("mm_core.plugin.scaffold") / "templates" / f"{path}.txt").read_text(encoding="utf-8")
