"""Faults in the components that `mm plugins new` writes, and what the conformance kit reports for each."""

from __future__ import annotations

import gc
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from string import Template

import torch

from mm_core.errors import MMError
from mm_core.plugin.checks.inspection import component_faults
from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.plugin.registry import Registry, get_registry, survey
from mm_core.plugin.scaffold.new_plugin import new_plugin, template_of
from mm_core.testing.kit import Examination
from support.sites import clear_cache


@dataclass(frozen=True)
class Mutant:
    """A good component with a fault.

    Attributes:
        name: names the mutant.
        kind: kind of the component; its module is the template of `mm plugins new`.
        old: what is replaced in the template; it occurs once.
        new: what takes its place.
        fault: what is wrong.
        check: the check of the kit that is for it; "" if none finds it.
        seen: where it shows first: `check`, `check --import` or `test` of `mm plugins`.
        escapes: why no check finds it.
    """

    name: str
    kind: str
    old: str
    new: str
    fault: str
    check: str = ""
    seen: str = "test"
    escapes: str = ""

    @property
    def text(self) -> str:
        """The template with the fault."""
        good = template_of(self.kind)
        assert good.count(self.old) == 1, f"{self.name}: {self.old!r} occurs {good.count(self.old)} times"
        return good.replace(self.old, self.new)


def read_mutants(file: Path) -> tuple[Mutant, ...]:
    """The mutants of a TOML file."""
    return tuple(Mutant(**row) for row in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"])


@dataclass(frozen=True)
class Findings:
    """Where the fault of a mutant shows.

    Attributes:
        static: errors of `mm plugins check`, which imports nothing.
        imported: errors of `mm plugins check --import`.
        checks: failed check -> its error.
        folder: of the mutant's files.
    """

    static: tuple[str, ...]
    imported: tuple[str, ...]
    checks: dict[str, str]
    folder: Path


@contextmanager
def installed(folder: Path, name: str, kind: str, text: str | None) -> Iterator[tuple[Registry, str]]:
    """A new plugin with one component, on sys.path within the block; yields the plugins and its namespace.

    Args:
        folder: an empty folder.
        name: of the plugin.
        kind: of the component.
        text: of its module; None: the template.
    """
    package = name.replace("-", "_")
    filled = "" if text is None else Template(text).substitute(package=package, name=name)
    new_plugin(name, {kind: replace(COMPONENT_KINDS[kind], text=filled)}, survey(), folder)
    info = folder / name / f"{package}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[mm_core.plugins]\n{package} = {package}.plugin\n")
    sys.path.insert(0, str(folder / name))
    clear_cache()
    dtype = torch.get_default_dtype()
    try:
        yield get_registry(), package
    finally:
        torch.set_default_dtype(dtype)
        sys.path.remove(str(folder / name))
        for module in [each for each in sys.modules if each.partition(".")[0] == package]:
            del sys.modules[module]
        clear_cache()


def findings(folder: Path, mutant: Mutant | None, kind: str, ranks: bool = False) -> Findings:
    """Examines a mutant, or the good component of a kind.

    Args:
        folder: an empty folder.
        mutant: None: the good component.
        kind: of the component.
        ranks: also the checks that start several processes.
    """
    digest = sha256(f"{kind}/{mutant and mutant.name}".encode()).hexdigest()[:8]
    name = f"mutant-{digest}"
    with installed(folder, name, kind, mutant and mutant.text) as (registry, package):
        (registered,) = [c for c in registry.components(kind) if c.namespace == package]
        static = tuple(component_faults(registered, import_targets=False))
        try:
            imported = tuple(component_faults(registered, import_targets=True))
        except MMError as error:
            imported = (str(error),)
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            outcomes = list(Examination(registered, registry, ranks))
            gc.collect()  # a tracker that does not close its file
        return Findings(
            static, imported, {o.check: o.reason for o in outcomes if o.status == "failed"}, folder
        )
