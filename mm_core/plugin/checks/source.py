"""Checks the source of a component's class against its contract: importing it could import torch.

Only what is certain is a fault. A class is judged for what it lacks if all its bases are in view: those of
its own package, those of mm_core, and a few of libraries that have no member of any contract. Methods that
its own package defines are judged by their arguments.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from importlib.util import resolve_name
from pathlib import Path
from types import MappingProxyType

from mm_core.plugin.checks.calls import method_fault
from mm_core.plugin.checks.contract import (
    SPECIAL,
    Member,
    asked_members,
    capabilities_of,
    lacking,
    method_name,
    misspelt,
)
from mm_core.plugin.checks.locate import bound_names, find_module
from mm_core.plugin.checks.optional import optional_faults, uses
from mm_core.plugin.checks.places import line_of
from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.plugin.kinds import Contract

PLAIN_BASES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(("object", "abc.ABC", "typing.Generic", "typing.Protocol"), frozenset()),
        "torch.nn.Module": frozenset({"__call__", "named_parameters", "state_dict", "load_state_dict"}),
        "torch.utils.data.Dataset": frozenset(),
    }
)
"""Bases in libraries -> what they have of any contract, but for methods that only raise."""

_DATACLASS = frozenset({"dataclass", "dataclasses.dataclass"})
_HARMLESS = frozenset({"final", "override", "typing.final", *_DATACLASS})
_READS_SELF = frozenset({"super", "type", "isinstance", "id", "len", "repr", "str", "hasattr", "getattr"})
_DYNAMIC = frozenset({"__getattr__", "__getattribute__", "__new__", "__init_subclass__", "__dict__", "vars"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class _Module:
    name: str
    file: str
    tree: ast.Module
    bound: Mapping[str, ast.stmt | None]
    """Name -> the only statement that binds it at the top level; None: it is bound otherwise."""


@dataclass(frozen=True)
class _Class:
    module: _Module
    node: ast.ClassDef


@dataclass
class _View:
    """What is known of a class and its bases.

    Attributes:
        names: everything that the classes or their objects have, as far as it is in view.
        methods: those with a known signature, of the author's classes, with their files.
        bases: dotted names or classes of all ancestors.
        complete: whether there are no further names.
    """

    names: set[str]
    methods: dict[str, list[tuple[Function, str]]]
    bases: list[str | tuple[str, str]]
    complete: bool


def source_faults(kind: str, module: str, name: str) -> tuple[str, list[str]]:
    """What a component's class lacks, judging by files alone.

    Args:
        kind: kind of the component.
        module: module of its target, as it is imported.
        name: name of its target in the module.

    Returns:
        File and line of the class, and the faults; empty for functions and what is not in view.
    """
    own = module.partition(".")[0]
    try:
        found = _find(module, name, own)
        if isinstance(found, str):
            return "", []
        return f"{found.module.file}, line {found.node.lineno}", [*_faults(kind, found, own)]
    except (RecursionError, ImportError):  # classes or imports that name each other, or no package
        return "", []


def source_members(contract: Contract) -> dict[str, Member]:
    """The members that a contract requires, as `members_of` finds them, without an import."""
    found = _find(*contract.protocol.split(":"), "mm_core")  # type: ignore[call-arg]
    if isinstance(found, str) or (contract.base == contract.protocol and not contract.events):
        return {}
    members: dict[str, Member] = {}
    for cls in reversed([found, *_ancestors(found, "mm_core")]):
        if isinstance(cls, str):
            continue
        for node in cls.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                members[node.target.id] = Member(node.target.id, type=ast.unparse(node.annotation))
            elif isinstance(node, Function) and (not node.name.startswith("_") or node.name in SPECIAL):
                if _decorators(node) == ["property"]:
                    members[node.name] = Member(node.name, type="Any")
                elif _decorators(node) in ([], ["classmethod"]):
                    members[node.name] = Member(node.name, signature=_signature(node, bound=True))
    return members


def _faults(kind: str, cls: _Class, own: str) -> Iterator[str]:
    contract = COMPONENT_KINDS[kind]
    protocol = _find(*contract.protocol.split(":"), "mm_core")  # type: ignore[call-arg]
    named = _identity(protocol) if isinstance(protocol, _Class) else contract.protocol.replace(":", ".")
    view = _viewed(cls, own, None if contract.events else named)
    base = (contract.base or "object").replace(":", ".")
    known = {base} if contract.base != contract.protocol else {base, named}
    if view.complete and contract.base is not None and known.isdisjoint(view.bases):
        yield f"it does not derive from {base}"
        return
    members = asked_members(contract, source_members, view.names.__contains__)
    methods: list[str] = []
    attributes: list[str] = []
    wrong: list[str] = []
    for member in members.values():
        name = method_name(contract, member)
        if name not in view.names:
            (attributes if member.signature is None else methods).append(
                str(member).replace("__call__", name)
            )
        elif member.signature is not None and len(view.methods.get(name, ())) == 1:
            ((node, file),) = view.methods[name]
            static = _decorators(node) == ["staticmethod"]
            takes = _standing_for(node, file)
            fault = method_fault(
                name, takes, member.signature, name in contract.by_name, static, cls.module.file
            )
            wrong += [fault] if fault else []
    if view.complete and not contract.events:
        yield from lacking("method", methods)
        yield from lacking("attribute", attributes)
    yield from wrong
    if contract.events:
        events = {name: _standing_for(*found[0]) for name, found in view.methods.items() if found}
        yield from misspelt(events, view.methods if view.complete else members, members, cls.module.file)
    else:
        yield from _unused(cls, own, members, view)
        capabilities, shared = capabilities_of(contract, source_members)
        written = _written(cls, own, view)
        used = partial(uses, cls.module.file, cls.module.name)
        # What a base that is not in view may have is not missing.
        has = view.names.__contains__ if view.complete else lambda name: True
        yield from optional_faults(capabilities, shared, written, has, used, cls.module.file)


def _unused(cls: _Class, own: str, members: Mapping[str, Member], view: _View) -> Iterator[str]:
    """Methods that nothing in the module uses and that resemble one which the class only inherits."""
    inherited = {
        node.name: _signature(node, bound=not _decorators(node))
        for each in _ancestors(cls, own)
        if isinstance(each, _Class) and each.module.name.partition(".")[0] == "mm_core"
        for node in each.node.body
        if isinstance(node, Function) and not node.name.startswith("_")
    }
    known = inherited | {name: member.signature for name, member in members.items()}
    used = {node.attr for node in ast.walk(cls.module.tree) if isinstance(node, ast.Attribute)}
    for name, nodes in view.methods.items():
        if name.startswith("_") or name in known.keys() | used or not nodes:
            continue
        near = get_close_matches(name, known.keys() - view.methods.keys(), 1, 0.8)
        wanted = known[near[0]] if near else None
        # A helper that takes other arguments is no misspelt member.
        takes = _standing_for(*nodes[0])
        if wanted and method_fault(name, takes, wanted, False, False, None) is None:
            line = line_of(takes, cls.module.file)
            yield f"its method {name} ({line}) is never called: did you mean {near[0]}?"


def _written(cls: _Class, own: str, view: _View) -> dict[str, object]:
    """The public methods and attributes that an author has written; a value in view is not known."""
    found: dict[str, object] = {
        name: _standing_for(*nodes[0]) if nodes else None for name, nodes in view.methods.items()
    }
    for each in [cls, *_ancestors(cls, own)]:
        if isinstance(each, str) or each.module.name.partition(".")[0] != own:
            continue
        for node in ast.walk(each.node):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and _dotted(node.value) == "self"
            ):
                found.setdefault(node.attr, None)
        for node in each.node.body:
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, None)
    return {name: value for name, value in found.items() if not name.startswith("_")}


def _viewed(cls: _Class, own: str, skipped: str | tuple[str, str] | None) -> _View:
    view = _View(set(), {}, [], True)
    for each in [cls, *_ancestors(cls, own)]:
        if isinstance(each, str):
            view.bases.append(each)
            view.names.update(PLAIN_BASES.get(each, ()))
            view.complete &= each in PLAIN_BASES
            continue
        view.bases.append(_identity(each))
        ours = each.module.name.partition(".")[0] == "mm_core" != own
        if _identity(each) == skipped:  # its methods do nothing; its properties may have no value yet
            view.names.update(n.name for n in each.node.body if isinstance(n, Function) and n.decorator_list)
            continue
        view.names.update(_names(each.node))
        view.complete &= ours or not _is_open(each)
        for node in each.node.body:
            if isinstance(node, Function) and not ours:
                view.methods.setdefault(node.name, []).append((node, each.module.file))
    for name, nodes in view.methods.items():
        if nodes[0][0] in cls.node.body and not cls.node.decorator_list:
            del nodes[1:]
        if any(_decorators(node) not in ([], ["staticmethod"], ["classmethod"]) for node, _ in nodes):
            view.methods[name] = []
    return view


def _ancestors(cls: _Class, own: str) -> list[_Class | str]:
    """All bases of a class, direct and inherited; dotted names of those whose source is not available."""
    found: list[_Class | str] = []
    for base in cls.node.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        name = _dotted(inner)
        each = _find(cls.module.name, name, own) if name else "?"
        found += [each] if isinstance(each, str) else [each, *_ancestors(each, own)]
    return found


def _identity(cls: _Class) -> tuple[str, str]:
    return cls.module.file, cls.node.name


def _names(cls: ast.ClassDef) -> Iterator[str]:
    """All names that a class may give itself or its objects, rather too many than too few."""
    nodes = [*ast.walk(cls)]
    bare: set[ast.expr] = set()
    if _DATACLASS.isdisjoint(_decorators(cls)):  # elsewhere `width: int` declares a type and sets nothing
        bare = {node.target for node in nodes if isinstance(node, ast.AnnAssign) and node.value is None}
    for node in nodes:
        if isinstance(node, ast.ClassDef | Function) and node is not cls:
            yield node.name
        elif node in bare:
            continue
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # setattr, register_buffer
            yield node.value


def _is_open(cls: _Class) -> bool:
    """Whether a class or its objects may get names that its source does not show."""
    node, nodes = cls.node, [*ast.walk(cls.node)]
    named = [getattr(each, "name", getattr(each, "id", getattr(each, "attr", None))) for each in nodes]
    if node.keywords or not _HARMLESS.issuperset(_decorators(node)) or not _DYNAMIC.isdisjoint(named):
        return True
    read = {id(each.value) for each in nodes if isinstance(each, ast.Attribute)}
    for each in nodes:
        if isinstance(each, ast.Call) and _dotted(each.func) in _READS_SELF:
            read.update(map(id, each.args))
    selves = [each for each in nodes if isinstance(each, ast.Name) and each.id in ("self", "cls")]
    if any(id(each) not in read for each in selves):  # given to code that may set attributes
        return True
    others = [one for one in cls.module.tree.body if not isinstance(one, ast.ClassDef | Function)]
    return any(
        isinstance(each, ast.Name) and each.id == node.name for one in others for each in ast.walk(one)
    )


def _find(module: str, name: str, own: str) -> _Class | str:
    """The class of a name in a module, through imports; its dotted name if it is not in view."""
    source = _source(module) if module.partition(".")[0] in (own, "mm_core") else None
    first, _, rest = name.partition(".")
    if source is None:
        return f"{module}.{name}"
    if first not in source.bound:
        return name if first == "object" else f"{module}.{name}"
    node = source.bound[first]
    if isinstance(node, ast.ClassDef) and not rest:
        return _Class(source, node)
    if isinstance(node, ast.Import):
        alias = next(a for a in node.names if (a.asname or a.name.partition(".")[0]) == first)
        return _find(alias.name if alias.asname else first, rest, own) if rest else alias.name
    if isinstance(node, ast.ImportFrom):
        alias = next(a for a in node.names if (a.asname or a.name) == first)
        package = module if Path(source.file).name == "__init__.py" else module.rpartition(".")[0]
        parent = resolve_name("." * node.level + (node.module or ""), package)
        return _find(f"{parent}.{alias.name}", rest, own) if rest else _find(parent, alias.name, own)
    return f"{module}.{name}"


def _source(module: str) -> _Module | None:
    spec = find_module(module)
    if spec is None or not spec.origin or not Path(spec.origin).is_file() or not spec.origin.endswith(".py"):
        return None
    return _parsed(module, spec.origin, Path(spec.origin).stat().st_mtime_ns)


@cache
def _parsed(module: str, file: str, _written: int) -> _Module | None:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError):
        return None
    bound: dict[str, ast.stmt | None] = {}
    for node in tree.body:
        for name in bound_names(node):
            bound[name] = None if name in bound else node
    return _Module(module, file, tree, bound)


def _decorators(node: ast.ClassDef | Function) -> list[str]:
    return [_dotted(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression of names; empty for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def _signature(node: Function, *, bound: bool = False) -> inspect.Signature:
    found = inspect.signature(_standing_for(node))
    return found.replace(parameters=[*found.parameters.values()][1 if bound else 0 :])


def _standing_for(node: Function, file: str = "") -> Callable[..., object]:
    """A function with the name, parameters and place of a method in view, which does nothing."""
    bare, bare.args = copy(node), copy(node.args)
    bare.decorator_list, bare.body = [], [ast.Pass()]
    bare.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
    bare.args.kw_defaults = [each and ast.Constant(None) for each in node.args.kw_defaults]
    made: dict[str, Callable[..., object]] = {}
    # As in this module, annotations are not evaluated.
    exec(compile(ast.fix_missing_locations(ast.Module([bare], [])), file, "exec"), made)
    return made[node.name]
