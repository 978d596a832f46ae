"""Descriptions of config fields, for `mm plugins show`, `mm config` and the documentation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from mm_core.schema.annotations import annotations_of
from mm_core.schema.fields import ComponentConfig, Kind, Range
from mm_core.schema.nodes import default_of, inside, is_list, is_mapping, keys_of, unwrap

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class FieldInfo:
    """The description of one field of a typed dataclass."""

    name: str
    type: str  # in words
    default: str | None  # as a YAML would write it; None: required
    comment: str


def describe_nested(cls: type[DataclassInstance]) -> tuple[FieldInfo, ...]:
    """Describes the fields of a typed dataclass, each followed by those of the dataclasses in it.

    Their names are paths as in `mm config explain`: `inner.key`; `items.0.key` of a list, `table.KEY.key` of
    a mapping. A dataclass within itself is described once.
    """
    return tuple(_nested(cls, "", ()))


def _nested(cls: type[DataclassInstance], prefix: str, above: tuple[type, ...]) -> Iterator[FieldInfo]:
    for key, info in describe_keys(cls).items():
        yield replace(info.field, name=prefix + key)
        for steps, inner in _dataclasses_in(info.hint):
            if inner not in (cls, *above):
                yield from _nested(inner, f"{prefix}{key}.{steps}", (cls, *above))


def _dataclasses_in(hint: object) -> Iterator[tuple[str, type[DataclassInstance]]]:
    """The dataclasses in an annotation, with the steps of the path to them."""
    hint = unwrap(hint)
    arguments = get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint is not ComponentConfig:
        yield "", hint
    elif get_origin(hint) in (Union, UnionType):
        for option in arguments:
            yield from _dataclasses_in(option)
    elif (is_list(hint) or is_mapping(hint)) and arguments:
        step, item = ("0", arguments[0]) if is_list(hint) else ("KEY", arguments[-1])
        yield from ((f"{step}.{rest}", inner) for rest, inner in _dataclasses_in(item))


@dataclass(frozen=True)
class KeyInfo:
    """One key that a mapping may set, from a field of a typed dataclass.

    Attributes:
        field: the field in words.
        hint: the field's type annotation.
        default: the field's default; MISSING if it has none.
        aliases: former names of the key, still accepted.
    """

    field: FieldInfo
    hint: object
    default: object
    aliases: tuple[str, ...]


def describe_keys(cls: type[DataclassInstance]) -> dict[str, KeyInfo]:
    """Describes the keys of a mapping that is checked against a typed dataclass, by key and in order.

    Raises:
        PluginError: an annotation cannot be resolved.
    """
    hints = annotations_of(cls)
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            comments |= _comments(base)
    found = {}
    for key, f in keys_of(cls).items():
        hint, default = hints[f.name], default_of(f)
        text = None if default is dataclasses.MISSING else value_text(default)
        info = FieldInfo(f.name, type_text(hint), text, comments.get(f.name) or f.metadata.get("doc", ""))
        found[key] = KeyInfo(info, hint, default, tuple(f.metadata.get("aliases", ())))
    return found


def summary_of(cls: type[DataclassInstance]) -> str:
    """The first paragraph of a typed dataclass's own docstring in one line; empty if it has none."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    if text.startswith(f"{cls.__name__}("):  # written by `dataclass`
        return ""
    return " ".join(text.partition("\n\n")[0].split())


def type_text(hint: object) -> str:
    """A type annotation in words: `int >= 1`, `'a' or 'b'`, `predictor`, `list of str`, `null`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kinds = [extra.name for extra in arguments[1:] if isinstance(extra, Kind)]
        ranges = [str(extra) for extra in arguments[1:] if isinstance(extra, Range)]
        return " ".join([kinds[0] if kinds else type_text(arguments[0]), *ranges])
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (Union, UnionType):
        return " or ".join(type_text(argument) for argument in arguments)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return f"[{', '.join(map(type_text, arguments))}]"
    if origin in (tuple, list):
        return f"list of {type_text(arguments[0])}"
    if hint is NoneType:
        return "null"
    if hint is Any:
        return "any"
    if isinstance(hint, type) and origin is None:
        return hint.__name__
    return str(hint).replace("typing.", "").replace("collections.abc.", "")


def value_text(value: object) -> str:
    """A value in one line, as YAML would write it."""
    if isinstance(value, ComponentConfig):
        return f"{{type: {value.type}}}"
    held = inside(value)
    if isinstance(held, dict):
        return f"{{{', '.join(f'{key}: {value_text(item)}' for key, item in held.items())}}}"
    if isinstance(held, list):
        return f"[{', '.join(map(value_text, held))}]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return repr(value).lower()
    return value if isinstance(value, str) and value else repr(value)


def parameter_docs(target: Callable[..., object]) -> Mapping[str, str]:
    """The documentation of the parameters of a class or function, from its source: parameter -> text.

    It is the comment on the parameter's line, or else its entry under `Args:` of a docstring; for a dataclass
    the comment on the field's line.
    """
    if isinstance(target, type) and dataclasses.is_dataclass(target):
        return _comments(target)
    maker = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
    found = {**_arguments(target), **_arguments(maker)}
    definition, by_line = _source_of(maker)
    if isinstance(definition, ast.FunctionDef):
        given = definition.args
        lines = [(each.arg, each.lineno) for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        alone = Counter(line for _, line in lines)
        found |= {name: by_line[line] for name, line in lines if line in by_line and alone[line] == 1}
    return found


def _arguments(documented: object) -> dict[str, str]:
    """The entries under `Args:` of a docstring, each on one line."""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)+)", inspect.getdoc(documented) or "", re.M)
    entries = re.split(r"\n(?=[ ]{4}\w)", section[1]) if section else []
    pairs = (entry.partition(":") for entry in entries)
    return {name.partition("(")[0].strip(): " ".join(text.split()) for name, _, text in pairs}


def _source_of(defined: Any) -> tuple[ast.stmt | None, dict[int, str]]:
    """The definition of a class or function, and the comments in it by line; None without source."""
    try:
        source = inspect.getsource(defined)
    except (OSError, TypeError):  # it was created at run time
        return None, {}
    source = inspect.cleandoc("\n" + source) if source[:1].isspace() else source
    by_line = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:"))
    }
    return ast.parse(source).body[0], by_line


@cache
def _comments(cls: type[DataclassInstance]) -> dict[str, str]:
    """Field -> the comment on its line, or the string below it; {} if there is no source."""
    definition, by_line = _source_of(cls)
    if not isinstance(definition, ast.ClassDef):
        return {}
    found: dict[str, str] = {}
    body = definition.body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        text = " ".join(by_line[line] for line in lines if line in by_line)
        if not text and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        found[statement.target.id] = text
    return found
