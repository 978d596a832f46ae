"""Checks of what a plugin module says: its hooks, their arguments, what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType

from mm_core.errors import nearest
from mm_core.plugin.component import Component
from mm_core.plugin.hookspecs import KINDS

_HOOKS = frozenset(KINDS.values())
_MARK = "mm_core_impl"  # the attribute that pluggy's hookimpl marker sets


class HookFault(Exception):
    """Why a plugin's hooks cannot be used. `refused`: they must not be, rather than do not work."""

    def __init__(self, sentence: str, refused: bool = False) -> None:
        super().__init__(sentence)
        self.refused = refused


def check_hooks(module: ModuleType) -> None:
    """HookFault naming every fault of the hooks in `module`. None is called."""
    faults: list[str] = []
    wrappers = False
    for name, value in vars(module).items():
        if not inspect.isroutine(value):
            continue
        options = getattr(value, _MARK, None)
        if options is None:
            own = isinstance(value, FunctionType) and value.__module__ == module.__name__
            faults += [_unmarked(name)] if own and name.startswith("mm_") else []
            continue
        hook = options.get("specname") or name
        if options.get("wrapper") or options.get("hookwrapper"):
            wrappers = True
            faults.append(f"hook {name!r} is a wrapper, which could rewrite the components of others")
        elif hook not in _HOOKS:
            if not options.get("optionalhook"):
                faults.append(_unknown(hook))
        else:
            faults += _argument_faults(hook, value)
    if faults:
        raise HookFault("; ".join(faults), refused=wrappers)


def _unknown(hook: str) -> str:
    hint = _near(hook) or f"the hooks are {', '.join(sorted(_HOOKS))}"
    return f"there is no hook {hook!r}: {hint}"


def _near(name: str) -> str | None:
    found = nearest(name, sorted(_HOOKS), 1)
    return f"did you mean {found[0]!r}?" if found else None


def _unmarked(name: str) -> str:
    if name in _HOOKS:
        return f"function {name!r} is not marked as a hook: put @hookimpl above it"
    hint = _near(name)
    return f"function {name!r} is no hook: {hint or 'names that begin with mm_ are for hooks'}"


def _argument_faults(hook: str, function: Callable[..., object]) -> list[str]:
    """The hooks take no arguments, so every one without a default is wrong."""
    wrong = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if not wrong:
        return []
    return [f"hook {hook!r} takes no arguments, and this one asks for {', '.join(map(repr, wrong))}"]


def checked_components(hook: str, returned: object) -> list[Component]:
    """What a hook returned, as a list. HookFault when it is not an iterable of Component."""
    if isinstance(returned, Component):
        raise HookFault(f"hook {hook!r} returned one Component: put it in a list")
    if isinstance(returned, (str, bytes)) or not isinstance(returned, Iterable):
        raise HookFault(f"hook {hook!r} returned {_described(returned)} instead of a list of Component")
    components = []
    for item in returned:
        if not isinstance(item, Component):
            raise HookFault(
                f"hook {hook!r} returned a list with {_described(item)} in it instead of a Component"
            )
        components.append(item)
    return components


def _described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def check_names(offered: Iterable[tuple[str, Component]]) -> None:
    """HookFault when two components of a kind claim one name or alias."""
    owners: dict[tuple[str, str], str] = {}
    for kind, component in offered:
        for name in (component.name, *component.aliases):
            if (owner := owners.get((kind, name))) is not None:
                raise HookFault(f"{kind} {component.name!r} claims the name {name!r} of {kind} {owner!r}")
            owners[kind, name] = component.name
