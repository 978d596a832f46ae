"""What components of each kind must have: the members of the kind's protocol in `mm_core.contracts`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from inspect import getattr_static
from pkgutil import resolve_name
from typing import Any, Protocol, get_type_hints

from mm_core.errors import ContractError, plural
from mm_core.plugin.checks.calls import method_fault
from mm_core.plugin.checks.optional import authored, optional_faults, uses
from mm_core.plugin.checks.places import file_of, line_of, place_of
from mm_core.plugin.checks.values import fits, type_text
from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.plugin.kinds import Contract, title_of

SPECIAL = {"__len__", "__getitem__", "__call__"}
"""Special methods that a contract may ask for."""


@dataclass(frozen=True)
class Member:
    """A member that a contract requires.

    Attributes:
        name: its name.
        type: the type of an attribute, or its text; None for methods.
        signature: parameters of a method, without `self`; None for attributes.
        returns: what a method returns, as it is annotated.
    """

    name: str
    type: Any = None
    signature: inspect.Signature | None = None
    returns: str = ""

    def __str__(self) -> str:
        if self.signature is None:
            return f"{self.name} ({type_text(self.type)})"
        return f"{self.name}({', '.join(self.signature.parameters)})"


def members_of(contract: Contract) -> dict[str, Member]:
    """The members that a contract requires, by name."""
    protocol = resolve_name(contract.protocol)
    if contract.base == contract.protocol and not contract.events:
        return {}  # deriving from the base class is the contract
    found: dict[str, Member] = {}
    for cls in reversed(protocol.__mro__):
        if cls in (object, Protocol) or cls.__module__ == "typing":
            continue
        hints = get_type_hints(cls) if vars(cls).get("__annotations__") else {}
        for name in vars(cls).get("__annotations__", {}):
            found[name] = Member(name, type=hints[name])
        for name, value in vars(cls).items():
            if isinstance(value, property):
                found[name] = Member(name, type=Any)
            method = value.__func__ if isinstance(value, classmethod) else value
            if inspect.isfunction(method) and (not name.startswith("_") or name in SPECIAL):
                parameters = [*inspect.signature(method).parameters.values()][1:]
                returns = type_text(method.__annotations__.get("return", "Any"))
                found[name] = Member(name, signature=inspect.Signature(parameters), returns=returns)
    return found


def asked_members(
    contract: Contract, members_of: Callable[[Contract], dict[str, Member]], has: Callable[[str], bool]
) -> dict[str, Member]:
    """The members that a contract asks of a class or object, with those of the capabilities that it has.

    A capability may ask for a member with more arguments than the contract does.

    Args:
        contract: the contract.
        members_of: the members that a contract requires.
        has: whether the class or object has a member.
    """
    members = members_of(contract)
    for path in contract.optional:
        asked = members_of(Contract(path))
        if all(map(has, asked.keys() - members.keys())):
            members |= asked
    return members


def class_faults(kind: str, cls: type) -> list[str]:
    """What a component's class lacks, as far as it is known before an object is made."""
    contract = COMPONENT_KINDS[kind]
    if fault := _base_fault(kind, cls):
        return fault
    members = asked_members(contract, members_of, partial(hasattr, cls))
    return [*_method_faults(contract, members, cls), *_author_faults(cls), *_unused(contract, cls)]


def object_faults(kind: str, found: object) -> list[str]:
    """What a component lacks. Methods may be the object's own, as those of a wrapper are."""
    contract = COMPONENT_KINDS[kind]
    if fault := _base_fault(kind, type(found)):
        return fault
    members = asked_members(contract, members_of, partial(hasattr, found))
    faults = [*_method_faults(contract, members, type(found), found), *_author_faults(type(found))]
    missing, wrong = [], []
    for member in members.values():
        if member.signature is not None or isinstance(getattr(type(found), member.name, None), property):
            continue  # a property may have no value before the run begins
        if not hasattr(found, member.name):
            missing.append(str(member))
        elif not fits(value := getattr(found, member.name), member.type):
            wrong.append(f"its {member.name} is {value!r}, not {type_text(member.type)}")
    if "__len__" in members and not faults:
        try:
            len(found)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            wrong.append(f"its length is no whole number of 0 or more: {error}")
    return [*faults, *lacking("attribute", missing), *wrong, *_unused(contract, type(found), found)]


def _unused(contract: Contract, cls: type, found: object | None = None) -> Iterator[str]:
    """What a class, or an object of it, has of the kind's capabilities without having one."""
    parents = [resolve_name(path) for path in (contract.protocol, contract.base) if path is not None]
    capabilities, shared = capabilities_of(contract, members_of)
    # What an object is given when it is made is not known before.
    given = {n for each in capabilities.values() for n, one in each.items() if one.signature is None}
    own, file = authored(cls, parents, getattr(found, "__dict__", {})), file_of(cls)

    def has(name: str) -> bool:
        return hasattr(cls, name) or (name in given if found is None else hasattr(found, name))

    used = partial(uses, file, cls.__module__)
    yield from optional_faults(capabilities, shared, own, has, used, file)


def capabilities_of(
    contract: Contract, members_of: Callable[[Contract], dict[str, Member]]
) -> tuple[dict[str, dict[str, Member]], Callable[[], set[str]]]:
    """The capabilities of a kind with the members that its contract lacks, and what finds those of several.

    Args:
        contract: of the kind.
        members_of: the members that a contract requires.
    """

    def shared() -> set[str]:
        paths = {path for each in COMPONENT_KINDS.values() for path in each.optional}
        times = Counter(name for path in paths for name in members_of(Contract(path)))
        return {name for name, count in times.items() if count > 1}

    required = members_of(contract)
    found = {path.partition(":")[2]: members_of(Contract(path)) for path in contract.optional}
    own = {path: {n: each for n, each in all_.items() if n not in required} for path, all_ in found.items()}
    return own, shared


def lacking(what: str, missing: Sequence[str]) -> list[str]:
    """The fault of a component that lacks members: one sentence, or none."""
    return [f"it lacks {plural(len(missing), what)}: {', '.join(missing)}"] if missing else []


def method_name(contract: Contract, member: Member) -> str:
    """The name under which an author writes a member: `forward` for the call of a module."""
    return "forward" if member.name == "__call__" and contract.base == "torch.nn:Module" else member.name


def _base_fault(kind: str, cls: type) -> list[str]:
    base = COMPONENT_KINDS[kind].base
    if base is None or issubclass(cls, resolve_name(base)):
        return []
    return [f"it does not derive from {base.replace(':', '.')}"]


def _method_faults(
    contract: Contract, members: Mapping[str, Member], cls: type, found: object | None = None
) -> Iterator[str]:
    """What is wrong with the methods of a class, or of an object of it."""
    missing, wrong = [], []
    file = file_of(cls)
    for member in members.values():
        if member.signature is None:
            continue
        name = method_name(contract, member)
        method = getattr(cls if found is None else found, name, None)
        if not callable(method) or (not contract.events and _is_inherited(contract, name, cls, found)):
            missing.append(str(member).replace("__call__", name))
            continue
        static = isinstance(getattr_static(cls, name, None), staticmethod | classmethod)
        bound = static or found is not None
        if fault := method_fault(name, method, member.signature, name in contract.by_name, bound, file):
            wrong.append(fault)
    yield from lacking("method", missing)
    yield from wrong
    if contract.events:
        methods = {name: getattr(cls, name) for name in dir(cls) if callable(getattr(cls, name))}
        own = {name for name in methods if not _is_inherited(contract, name, cls, found)}
        yield from misspelt(methods, own, members, file)


def _author_faults(cls: type) -> list[str]:
    """What a class lacks of what its base class leaves to the author (see `TaskModule`)."""
    asked: Callable[[], list[str]] | None = getattr(cls, "author_faults", None)
    return asked() if asked is not None else []


def _is_inherited(contract: Contract, name: str, cls: type, found: object | None) -> bool:
    """Whether a method is only that of the protocol or base class, which does nothing."""
    parents = [resolve_name(path) for path in (contract.protocol, contract.base) if path is not None]
    method = getattr(cls, name, None)
    own = name in getattr(found, "__dict__", {})
    # Torch wraps the `step` of an optimizer's class when the first object is made.
    inherited = (inspect.unwrap(each) for parent in parents if (each := getattr(parent, name, None)))
    return not own and method is not None and inspect.unwrap(method) in inherited


def check_object(kind: str, found: object, target: Callable[..., object], where: str) -> None:
    """Checks a built component against the contract of its kind.

    Args:
        kind: kind of the component.
        found: the component.
        target: what has built it.
        where: the plugin and component, for the error.

    Raises:
        ContractError: lists all that the component lacks, with the file and line of its class.
    """
    if faults := object_faults(kind, found):
        raise ContractError(
            sentence(type(found).__name__, faults),
            where=f"{where}, {place_of(type(found), target)}",
            accepted=COMPONENT_KINDS[kind].protocol.replace(":", "."),
            hint=hint_of(kind),
        )


def sentence(name: str, faults: Sequence[str]) -> str:
    """The faults of a class as one message."""
    return f"{name} does not keep its contract: {'; '.join(faults)}"


def hint_of(kind: str) -> str:
    """Where an author reads what a component of a kind must have."""
    protocol = COMPONENT_KINDS[kind].protocol.replace(":", ".")
    plain = "; data.loader.mode: base reads torch's own as it is" if kind == "dataset" else ""
    return f'`python -m pydoc {protocol}` or the page "{title_of(kind)}" explains each member{plain}'


def misspelt(
    methods: Mapping[str, Callable[..., object]],
    own: Collection[str],
    members: Mapping[str, Member],
    beside: str | None,
) -> Iterator[str]:
    """Methods that resemble an event and are none, which are never called; a class that has no event.

    Args:
        methods: all methods by name.
        own: those that the base class has not.
        members: the events.
        beside: the file of their class.
    """
    faults = []
    for name, method in methods.items():
        if name.startswith("_") or name in members:
            continue
        foreign = name.startswith("on_")  # as the events of other libraries are called
        near = get_close_matches(name.removeprefix("on_"), members, 1, 0.6 if foreign else 0.75)
        if near or foreign:
            meant = f"did you mean {near[0]}?" if near else f"the events are {', '.join(members)}"
            place = f" ({line})" if (line := line_of(method, beside)) else ""
            faults.append(f"its method {name}{place} is not an event and is never called: {meant}")
    if not faults and members.keys().isdisjoint(own):
        faults.append(f"none of its methods is an event: the events are {', '.join(members)}")
    yield from faults
