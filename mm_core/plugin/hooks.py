"""Checks of a plugin module: its hooks, their arguments, what they return."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FunctionType, ModuleType

from mm_core.errors import did_you_mean
from mm_core.plugin.checks.calls import call_fault
from mm_core.plugin.component import Component
from mm_core.plugin.hookspecs import KINDS

_HOOKS = tuple(KINDS.values())
_MARK = "mm_core_impl"  # the attribute that pluggy's hookimpl marker sets


class HookFault(Exception):
    """An error in a plugin's hooks.

    Args:
        sentence: what is wrong.
        refused: the hooks would work but are not allowed.
        line: where the first of the wrong hooks begins in the plugin's module; None: not known.
    """

    def __init__(self, sentence: str, refused: bool = False, line: int | None = None) -> None:
        super().__init__(sentence)
        self.refused, self.line = refused, line


def check_hooks(module: ModuleType) -> None:
    """Checks the hooks of a plugin module without calling them.

    Raises:
        HookFault: lists every error in the hooks.
    """
    faults: list[str] = []
    wrappers, line = False, None
    for name, value in vars(module).items():
        if not inspect.isroutine(value):
            continue
        if not faults:
            line = getattr(getattr(value, "__code__", None), "co_firstlineno", None)
        options = getattr(value, _MARK, None)
        if options is None:
            own = isinstance(value, FunctionType) and value.__module__ == module.__name__
            faults += [_unmarked(name)] if own and name.startswith("mm_") else []
            continue
        hook = options.get("specname") or name
        if options.get("wrapper") or options.get("hookwrapper"):
            wrappers = True
            faults.append(
                f"hook {name!r} is a wrapper, which could change the components of other plugins: make it a"
                " plain hook"
            )
        elif hook not in _HOOKS:
            if not options.get("optionalhook"):
                hint = did_you_mean(hook, _HOOKS) or f"the hooks are {', '.join(_HOOKS)}"
                faults.append(f"there is no hook {hook!r}: {hint}")
        elif fault := call_fault(value, (), {}):
            faults.append(f"hook {hook!r} takes no arguments: {fault[1]}")
    if faults:
        raise HookFault("; ".join(faults), refused=wrappers, line=line)


def _unmarked(name: str) -> str:
    if name in _HOOKS:
        return f"function {name!r} is not marked as a hook: put @hookimpl above it"
    hint = did_you_mean(name, _HOOKS) or "names that start with mm_ are reserved for hooks"
    return f"function {name!r} is not a hook: {hint}"


def checked_components(hook: str, returned: object) -> list[Component]:
    """Checks what a plugin's hook returned, and returns it as a list of components.

    Raises:
        HookFault: it is not an iterable of Component.
    """
    if isinstance(returned, Component | str | bytes) or not isinstance(returned, Iterable):
        raise HookFault(
            f"hook {hook!r} returned {_described(returned)} instead of a list of Component: return"
            " [Component(...), ...]"
        )
    components = [*returned]
    for item in components:
        if not isinstance(item, Component):
            raise HookFault(
                f"hook {hook!r} returned a list that contains {_described(item)} instead of a Component:"
                " write Component(name=..., target=...)"
            )
    return components


def _described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def check_names(offered: Iterable[tuple[str, Component]]) -> None:
    """Checks that a plugin's components of one kind have different names and aliases.

    Raises:
        HookFault: two of them have the same name.
    """
    owners: dict[tuple[str, str], str] = {}
    for kind, component in offered:
        for name in (component.name, *component.aliases):
            if (owner := owners.get((kind, name))) is not None:
                both = f"{owner!r} and {component.name!r}"
                raise HookFault(
                    f"two components of kind {kind} have the name or alias {name!r} ({both}): rename one"
                )
            owners[kind, name] = component.name
