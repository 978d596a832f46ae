"""The result of discovery: records of plugins and their components, before any target is imported."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mm_core.errors import ForeignExit, MMError, PluginError, foreign_code
from mm_core.plugin.checks.locate import fault_of
from mm_core.plugin.component import Component
from mm_core.plugin.signatures import signature_config

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Status = Literal["ok", "failed", "disabled", "refused"]


_HERE = str(Path(__file__).parent / "_")[:-1]  # the core's own frames do not help the author of a plugin


def one_line(error: BaseException) -> str:
    """An exception raised by plugin code as one line: its type, its message, and the line that raised it.

    An MMError is printed as it is, joined into one line.
    """
    if isinstance(error, ForeignExit) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, MMError):
        return "; ".join(line.strip() for line in error.render().splitlines())
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen ", _HERE)) and "importlib" not in frame.filename
    ]
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text


@dataclass(frozen=True)
class Registered:
    """A component together with the plugin that provides it.

    Attributes:
        kind: the kind of component.
        component: the description that the plugin's hook returned.
        namespace: the plugin's namespace.
        distribution: the plugin's Python distribution.
        version: the distribution's version.
        modules: module name in targets -> name it is imported under. A one-file plugin `my_dit.py` is
            imported under a unique name, while its targets are written `my_dit:MyDiT`.
    """

    kind: str
    component: Component
    namespace: str
    distribution: str
    version: str
    modules: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def qualified(self) -> str:
        """The component's qualified name `namespace/name`, which is always unique."""
        return f"{self.namespace}/{self.component.name}"

    @property
    def names(self) -> tuple[str, ...]:
        """The component's bare name and its aliases."""
        return (self.component.name, *self.component.aliases)

    def module_of(self, path: str) -> str:
        """The name under which the module of a component's target `module:Name` is imported."""
        module = path.partition(":")[0]
        return self.modules.get(module, module)

    def load_target(self) -> Callable[..., Any]:
        """Imports and returns the component's target.

        Raises:
            PluginError: the target cannot be imported or called; names plugin and target.
        """
        target = self._load("target", self.component.target)
        if not callable(target):
            kind = type(target).__name__
            what = f"the target {self.component.target!r} is not callable: it is {kind}"
            raise self._fault(what, "set target= of the component to a class or function")
        return target

    def config_class(self) -> type[DataclassInstance]:
        """The dataclass of the component's config fields.

        Without `config=`, it is created from the target's signature, which imports the target.
        """
        if self.component.config is None:
            target = self.load_target()
            try:
                return signature_config(target, self.kind)
            except (TypeError, ValueError) as error:
                raise PluginError(
                    f"the signature of {self.component.target!r} cannot be used as its config: {error}",
                    where=self.short_place,
                    hint="write a config dataclass, and register it: Component(..., config=...)",
                ) from error
        cls = self._load("config", self.component.config)
        if not isinstance(cls, type) or "__dataclass_fields__" not in vars(cls) or not is_dataclass(cls):
            what = f"the config {self.component.config!r} is not a dataclass"
            raise self._fault(what, "decorate it with @dataclass(frozen=True)")
        return cls

    def tiny_fields(self, folder: Path) -> dict[str, object]:
        """The fields of the component's small instance for tests.

        Args:
            folder: an empty folder for the files that the instance needs.
        """
        tiny = self.component.tiny
        if not isinstance(tiny, str):
            return dict(tiny)
        make: Any = self._load("tiny", tiny)
        fields = make(folder)
        if not isinstance(fields, Mapping):
            kind = type(fields).__name__
            what = f"{tiny!r} returned a {kind}, not a mapping"
            raise self._fault(what, "return the fields of a small instance: {name: value}")
        return dict(fields)

    def load_examples(self, folder: Path) -> Any:
        """What the component's author declares to test it with; None if nothing is declared.

        Args:
            folder: a folder for the files of the examples.
        """
        if self.component.examples is None:
            return None
        make: Any = self._load("examples", self.component.examples)
        return make(folder)

    def option_faults(self, options: Mapping[str, object]) -> list[MMError]:
        """Faults of checked options that the component's own `check` finds outside the YAML.

        Args:
            options: the fields of the config.
        """
        if self.component.check is None:
            return []
        check: Any = self._load("check", self.component.check)
        return list(check(options))

    @property
    def place(self) -> str:
        """The plugin and component as error messages name them when loading fails."""
        return (
            f"plugin {self.namespace!r} ({self.distribution} {self.version}), {self.kind} {self.qualified!r}"
        )

    @property
    def short_place(self) -> str:
        """The plugin and component as error messages name them when building fails."""
        return f"plugin {self.namespace!r}, {self.kind} {self.qualified!r}"

    def _fault(self, what: str, hint: str | None = None) -> PluginError:
        return PluginError(what, where=self.place, hint=hint)

    def path_fault(self, role: str, path: str) -> PluginError | None:
        """Why a `module:Name` of the component cannot be imported, judging by files alone.

        Args:
            role: the argument of `Component`.
            path: its value.
        """
        fault = fault_of(self.module_of(path), path.partition(":")[2])
        if fault is None:
            return None
        broken = fault.startswith("cannot")
        hint = "fix this error in the plugin's code" if broken else f"correct {role}= of the component"
        return self._fault(f"the {role} {path!r} {fault}", hint)

    def _load(self, role: str, path: str) -> object:
        module = self.module_of(path)
        try:
            with foreign_code():
                return resolve_name(f"{module}:{path.partition(':')[2]}")
        except MMError:
            raise
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            fault = None
            if isinstance(error, AttributeError) or f"{module}.".startswith(f"{missing}."):
                fault = self.path_fault(role, path)
            hint = "fix this error in the plugin's code, or install another version of the plugin"
            if missing is not None:
                hint = f"is the package of {missing!r} installed?"
            what = f"the {role} {path!r} cannot be imported: {one_line(error)}"
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            if isinstance(error, AttributeError) and last == resolve_name.__code__.co_filename:
                what, hint = (
                    f"the {role} {path!r} does not exist: {error}",
                    f"correct {role}= of the component",
                )
            raise fault or self._fault(what, hint) from error


class Components(Protocol):
    """The components of the plugins that loaded; a `Registry` has them."""

    def resolve(self, kind: str, name: str) -> Registered:
        """Finds the component of a kind by a name; a PluginError if there is none, or more than one."""

    def components(self, kind: str | None = None) -> Sequence[Registered]:
        """All components, or those of one kind."""


@dataclass(frozen=True)
class PluginRecord:
    """A plugin that was found, loaded or not.

    Attributes:
        namespace: prefix of its components' qualified names.
        module: the module with its hooks.
        distribution: its Python distribution.
        version: the distribution's version.
        status: `ok`; `failed` (its import or a hook raised an error); `refused` (it must not be loaded: API
            range, namespace taken twice or reserved, hook wrappers); `disabled` (by MM_PLUGINS or
            MM_PLUGINS_DISABLE).
        error: one sentence, for every status except `ok`.
        components: its components.
        imports_torch: importing the plugin imported torch (not detected if torch was imported before).
        requirement: its requirement of mm-core, which is its API range; None if it declares none.
        file: the path of a one-file plugin.
    """

    namespace: str
    module: str
    distribution: str
    version: str
    status: Status = "ok"
    error: str | None = None
    components: tuple[Registered, ...] = ()
    imports_torch: bool = False
    requirement: str | None = None
    file: str | None = None

    @property
    def label(self) -> str:
        """The plugin as messages name it."""
        return f"plugin {self.namespace!r} ({self.distribution} {self.version})"

    @property
    def broken(self) -> bool:
        """Whether the plugin should have loaded but did not."""
        return self.status in ("failed", "refused")


MIGRATIONS = ("mindspeed", "trainers")
_REPOSITORY = ("custom_dit", "deepspeed", "diffusers", "internvl", *MIGRATIONS, "wan")
"""Namespaces of the plugins in the repository of mm-core; `MIGRATIONS` are those that read other tools."""


def not_installed(namespace: str, plugins: Iterable[PluginRecord]) -> str | None:
    """The hint for a plugin of the repository of mm-core that is not installed; None for any other."""
    if namespace not in _REPOSITORY or any(plugin.namespace == namespace for plugin in plugins):
        return None
    where = f"pip install ./plugins/mm_{namespace}, in mm-core's repository"
    return f"the plugin mm-{namespace.replace('_', '-')} is not installed: {where}"
