"""`mm plugins new --from-class`: a user's class, read from its source. Nothing of its file is run."""

from __future__ import annotations

import ast
import io
import keyword
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import packages_distributions
from pathlib import Path

from mm_core.errors import PluginError, did_you_mean, plain_reason

MARK = "CHECK: "
"""Marks what the source of a class does not show."""
CHECK = f"# {MARK}"

_TYPES = frozenset({"int", "float", "str", "bool", "tuple", "list", "dict", "None"})
TYPING = frozenset({"Any", "Dict", "List", "Literal", "Optional", "Sequence", "Tuple", "Union"})
_METHODS: Mapping[str, str] = {"forward": "predictor", "__getitem__": "dataset"}
"""Method that a class has -> the kind of component it becomes."""


@dataclass(frozen=True)
class Argument:
    """An argument of a method.

    Attributes:
        name: its name.
        annotation: its type; None: it has none, or one that no YAML value has.
        default: the source of its default; None: it is required.
        foreign: the source of a type or default that no YAML value has, if it has one.
        comment: on its line.
    """

    name: str
    annotation: str | None = None
    default: str | None = None
    foreign: str | None = None
    comment: str = ""

    @property
    def is_key(self) -> bool:
        """Whether a YAML can set it: what is foreign and has a default keeps it."""
        return self.foreign is None or self.default is None

    @property
    def value(self) -> object:
        """The value of its default; None: it has none, or one that is computed."""
        try:
            return None if self.default is None else ast.literal_eval(self.default)
        except ValueError:
            return None


@dataclass(frozen=True)
class OwnClass:
    """A class in a user's file.

    Attributes:
        file: the user's file.
        name: of the class.
        kind: of the component that it becomes.
        body: its definition, and those of its base classes in the file, the nearest first.
        comments: of the file, by line.
        notes: what a user must look at where the class is imported.
        modules: file name in the plugin's package -> text: the user's file, and those that it imports from
            its own folder.
    """

    file: Path
    name: str
    kind: str
    body: tuple[ast.ClassDef, ...]
    comments: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The name of the file's copy in the plugin's package."""
        return next(iter(self.modules)).removesuffix(".py")

    @property
    def requires(self) -> tuple[str, ...]:
        """The distributions that the files import, but for torch and the standard library."""
        known = packages_distributions()
        tops = {top for text in self.modules.values() for top in _imported(ast.parse(text))}
        tops -= {"torch", "mm_core", *sys.stdlib_module_names}
        return tuple(sorted({known[top][0] for top in tops if top in known}))

    def method(self, name: str) -> ast.FunctionDef | None:
        """The definition of a method; None: neither the class nor a base of the file has it."""
        return _method(self.body, name)

    def arguments(self, name: str) -> list[Argument]:
        """The arguments of a method that have names, without `self`."""
        method = self.method(name)
        if method is None:
            return []
        given = method.args
        places = [*given.posonlyargs, *given.args]
        defaults = [*(None for _ in range(len(places) - len(given.defaults))), *given.defaults]
        pairs = [*zip(places, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
        lines = Counter(arg.lineno for arg, _ in pairs)
        comments = {line: self.comments.get(line, "") for line in lines if lines[line] == 1}
        return [self._argument(arg, default, comments.get(arg.lineno, "")) for arg, default in pairs[1:]]

    def _argument(self, arg: ast.arg, default: ast.expr | None, comment: str) -> Argument:
        annotation = None if arg.annotation is None else ast.unparse(arg.annotation).strip("'\"")
        plain = annotation if annotation and _names(annotation) <= _TYPES | TYPING else None
        text = None if default is None else ast.unparse(default)
        given = Argument(arg.arg, plain, text, comment=comment)
        if given.value is None:
            computed = text not in (None, "None")
            return replace(given, foreign=text if computed else annotation if plain is None else None)
        return given if plain else replace(given, annotation=_type_of(given.value))

    def open_arguments(self, name: str) -> bool:
        """Whether a method takes `*args` or `**kwargs`."""
        method = self.method(name)
        return method is not None and bool(method.args.vararg or method.args.kwarg)


def read_class(named: str, taken: Collection[str]) -> OwnClass:
    """Reads a class from a file.

    Args:
        named: `file.py:CLASS`.
        taken: names that no copied module can have in the plugin's package.

    Raises:
        PluginError: the file cannot be read or is not Python, or the class is not there or neither a model
            nor a dataset.
    """
    path, _, name = named.rpartition(":")
    if not path or not name.isidentifier():
        raise _fault(f"{named!r} names no class", accepted="a file and a class in it: model.py:CustomDiT")
    file = Path(path)
    text, tree = _parsed(file)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    if name not in classes:
        what = f"{file} has no class {name!r}"
        raise _fault(what, accepted=", ".join(classes) or None, hint=did_you_mean(name, classes))
    body = tuple(_lineage(classes[name], classes))
    kinds = [kind for method, kind in _METHODS.items() if _method(body, method) is not None]
    if len(kinds) != 1:
        has = "both forward and __getitem__" if kinds else "neither forward nor __getitem__"
        raise PluginError(
            f"{name} has {has}",
            where=f"{file}:{body[0].lineno}",
            accepted="a torch.nn.Module with a forward, or a map-style Dataset with __len__ and __getitem__",
            hint=None if kinds else "write the methods in this file: those of an imported base are not read",
        )
    stem = re.sub(r"\W", "_", file.stem)
    stem = f"own_{stem}" if stem in taken or not stem.isidentifier() or keyword.iskeyword(stem) else stem
    modules, notes = {f"{stem}.py": text}, list[str]()
    _add_neighbours(tree, file.parent, modules, notes, taken)
    return OwnClass(file, name, kinds[0], body, _comments(text), tuple(notes), modules)


def marked(files: Iterable[Path]) -> Iterator[str]:
    """The marked lines of written files, each with its place."""
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if MARK in line:
                text = re.split(r'"[,}]', line.partition(MARK)[2])[0]  # in `tiny` it is a value
                yield f"{file}:{number}: {text}"


def _parsed(file: Path) -> tuple[str, ast.Module]:
    try:
        text = file.read_text(encoding="utf-8-sig")
        return text, ast.parse(text)
    except SyntaxError as fault:
        where = f"{file}:{fault.lineno}"
        raise PluginError(f"this is not Python: {fault.msg}", where=where, hint="correct the line") from None
    except (OSError, ValueError, RecursionError) as fault:
        raise _fault(f"{file} cannot be read: {plain_reason(fault)}", hint="check the path") from None


def _fault(what: str, *, accepted: str | None = None, hint: str | None = None) -> PluginError:
    return PluginError(what, where="--from-class", accepted=accepted, hint=hint)


def _method(body: tuple[ast.ClassDef, ...], name: str) -> ast.FunctionDef | None:
    found = (each for node in body for each in node.body if isinstance(each, ast.FunctionDef))
    return next((each for each in found if each.name == name), None)


def _lineage(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    yield node
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes and base.id != node.name:
            yield from _lineage(classes[base.id], {k: v for k, v in classes.items() if k != node.name})


def _comments(text: str) -> dict[int, str]:
    """The comments of a file, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokens
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:"))
    }


def _names(annotation: str) -> set[str]:
    """The names in the source of a type; those with dots (torch.dtype) as `.`."""
    try:
        nodes = [*ast.walk(ast.parse(annotation, mode="eval"))]
    except SyntaxError:  # words in quotes
        return {"."}
    dotted = {"." for node in nodes if isinstance(node, ast.Attribute)}
    return dotted | {node.id for node in nodes if isinstance(node, ast.Name)}


def _type_of(value: object) -> str | None:
    """The type of a default, as an annotation."""
    if isinstance(value, tuple) and value and len(kinds := {type(each).__name__ for each in value}) == 1:
        return f"tuple[{', '.join([*kinds] * len(value))}]"
    return type(value).__name__ if isinstance(value, bool | int | float | str) else None


def _imported(tree: ast.Module) -> Iterator[str]:
    """The top-level names of absolute imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def _add_neighbours(
    tree: ast.Module, folder: Path, modules: dict[str, str], notes: list[str], taken: Collection[str]
) -> None:
    """Adds the modules of the user's folder that relative imports name; notes those that cannot be added."""
    for top in _imported(tree):
        if (folder / f"{top}.py").exists() or (folder / top / "__init__.py").exists():
            notes.append(
                f"it imports {top}, which is beside your file: copy it into this folder, and import .{top}"
            )
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        for name in [node.module] if node.module else [each.name for each in node.names]:
            file = folder / f"{name}.py"
            if node.level > 1 or not file.is_file() or "." in name or name in taken:
                notes.append(f"it imports {'.' * node.level}{name}, which is not copied: copy it yourself")
            elif file.name not in modules:
                modules[file.name], inner = _parsed(file)
                _add_neighbours(inner, folder, modules, notes, taken)
