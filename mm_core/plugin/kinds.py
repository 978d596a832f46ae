"""What the core knows of a kind of component; `hookspecs` has the record of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import pluggy

Hook = TypeVar("Hook", bound=Callable[..., object])
hookspec = pluggy.HookspecMarker("mm_core")
RECORD = "mm_core_kind"
"""The attribute of a hook's specification that is its kind's record, beside pluggy's own."""


def title_of(kind: str) -> str:
    """The title of a kind's page."""
    words = kind.replace("_", " ").replace("lr ", "learning-rate ")
    return words[:1].upper() + words[1:]


@dataclass(frozen=True)
class Contract:
    """What a component must have, or what gives it a capability.

    Attributes:
        protocol: `module:Name` of the protocol or base class.
        base: `module:Name` of the class from which objects must derive.
        by_name: methods whose arguments the core passes by name.
        events: methods may be absent; other names that resemble one are misspelt.
        optional: `module:Name` of capabilities. A component with all members of one is checked against it.
    """

    protocol: str
    base: str | None = None
    by_name: tuple[str, ...] = ()
    events: bool = False
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ComponentKind(Contract):
    """The record of a kind: its contract, its conformance checks, and the example in a new plugin.

    The example's module is `scaffold/templates/kinds/<kind>.py.txt`. Above a function, the record makes it
    the specification of the hook that lists components of the kind.

    Attributes:
        kit: `module:NAME` of the checks in `mm_core.testing`, imported when they run.
        leading: arguments that the core passes to targets by position, before the fields.
        target: name of the class in the example.
        text: of the example's module; empty: the template's.
        modules: further modules of the example's package: file name -> text.
        words: what the example contains, for the README; empty: the kind's name.
        tiny: fields of the small instance for tests.
        declaration: further arguments of its Component, as Python.
        run: keys of the config, with dots, and their values as YAML; $type is the component's name.
        steps: length of the run of its config.
        about: description of the run in its config.
        then: the command that uses the component after the run.
        requires: packages that the example imports besides mm_core's own.
    """

    kit: str
    leading: int = 0
    target: str
    text: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    tiny: Mapping[str, object] = field(default_factory=dict)
    declaration: str = ""
    run: Mapping[str, str] = field(default_factory=dict)
    steps: int = 300
    about: str = "on clips of moving shapes that need no download"
    then: str = ""
    requires: tuple[str, ...] = ()

    def __call__(self, hook: Hook) -> Hook:
        """Makes a function the specification of this kind's hook."""
        vars(hook)[RECORD] = self
        return hookspec(hook)
