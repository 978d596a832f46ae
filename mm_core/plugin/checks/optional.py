"""Optional members that the core would never use: misspelt ones, and capabilities that are there in part."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.plugin.checks.calls import method_fault
from mm_core.plugin.checks.places import line_of
from mm_core.plugin.checks.values import fits

if TYPE_CHECKING:
    from mm_core.plugin.checks.contract import Member

_NEAR = 0.8
"""Least similarity of a name and the one that its author meant."""


def optional_faults(
    capabilities: Mapping[str, Mapping[str, Member]],
    shared: Callable[[], Collection[str]],
    own: Mapping[str, object],
    has: Callable[[str], bool],
    used: Callable[[str], bool],
    beside: str | None,
) -> Iterator[str]:
    """What a component has of its kind's capabilities without having one.

    An author's own members are no faults: those that the author's code uses, those that take other arguments
    than a member of a capability, and those of another type.

    Args:
        capabilities: name of each -> its members.
        shared: finds members of several capabilities, which one may have without the others.
        own: public members that the author has written: methods, and attributes with their values; None for
            a value that is not known.
        has: whether the component has a member.
        used: whether the author's code uses a name.
        beside: the file of the component's class.
    """
    known = {name: member for members in capabilities.values() for name, member in members.items()}
    for name, value in own.items():
        alike = [each for each in known if each not in own and _serves(value, known[each])]
        near = get_close_matches(name, alike, 1, _NEAR)
        if near and name not in known and not has(near[0]) and not used(name):
            line = line_of(value, beside) if callable(value) else ""
            place, what = f" ({line})" if line else "", "method" if callable(value) else "attribute"
            meant = f"did you mean {near[0]}? Else begin its name with _"
            yield f"its {what} {name}{place} is never used: {meant}"
    for capability, members in capabilities.items():
        found = [name for name, member in members.items() if name in own and _serves(own[name], member)]
        missing = [str(member) for name, member in members.items() if not has(name)]
        if found and missing:
            found = [name for name in found if name not in shared()]
        if found and missing and (len(found) > 1 or not used(found[0])):
            verb = "is" if len(found) == 1 else "are"
            yield f"its {' and '.join(found)} {verb} never used: {capability} also needs {', '.join(missing)}"


def _serves(value: object, member: Member) -> bool:
    """Whether what an author has written could be a member of a capability."""
    if inspect.isroutine(value) and callable(value):
        bound, called = not inspect.isfunction(value), member.signature
        return called is not None and method_fault("", value, called, False, bound, None) is None
    known = not (value is None or isinstance(member.type, str) or inspect.isdatadescriptor(value))
    return member.signature is None and (not known or fits(value, member.type))


def authored(cls: type, parents: Sequence[type], values: Mapping[str, object]) -> dict[str, object]:
    """The public members that a component's author has written, by name.

    Args:
        cls: the component's class.
        parents: the protocol and base class of its kind.
        values: attributes of the component itself, if it is built.
    """
    package, found = cls.__module__.partition(".")[0], dict[str, object]()
    for each in reversed(cls.__mro__):
        if each.__module__.partition(".")[0] == package and each not in parents:
            found |= {name: getattr(cls, name, None) for name in vars(each)}
    theirs = {name for parent in parents for name in dir(parent)}
    return {n: value for n, value in (found | {**values}).items() if n[0] != "_" and n not in theirs}


def uses(file: str | None, module: str, name: str) -> bool:
    """Whether the code of a class's package uses a member of an object.

    Args:
        file: of the class.
        module: its module; one without a package is alone.
        name: of the member.
    """
    if file is None or not Path(file).is_file():
        return False
    read, depth = re.compile(rf"[\w)\]]\.{name}\b(?!\s*=[^=])"), module.count(".")
    files = sorted(Path(file).parents[depth - 1].rglob("*.py")) if depth else [Path(file)]
    return any(read.search(each.read_text(encoding="utf-8", errors="replace")) for each in files)
