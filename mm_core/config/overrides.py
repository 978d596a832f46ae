"""`key=value` overrides of a config: the value is YAML, and braces in module patterns need no quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from mm_core.config.yaml_nodes import MAX_DEPTH, read_plain, read_quoted
from mm_core.errors import ConfigError, MMError, plural
from mm_core.hub import PREFIX
from mm_core.schema.nodes import Node, unwritable

_KEY = re.compile(r"[A-Za-z_][\w\-]*(\.[\w\-]+)*\Z")
_PATHS = (PREFIX, "/", ".", "~")
"""How a string begins that names no component: a mapping over it replaces it."""


class _Places(dict[str, Node]):
    """Values that overrides set at positions of a list, by index: `log.trackers.0=...`."""


def apply_overrides(root: Node, overrides: Sequence[str], faults: list[MMError]) -> Node:
    """Applies `key=value` overrides to a config.

    Later overrides win over earlier ones. Within one component the order does not matter: an override of its
    type keeps the options that other overrides set.

    Args:
        root: the tree of the config.
        overrides: `key.path=value` texts.
        faults: receives an error for each override that does not parse.
    """
    tree = Node({}, "command line", "")
    for text in overrides:
        try:
            keys, value = parse_override(text)
            tree = _put(tree, keys, value)
        except ConfigError as fault:
            faults.append(fault)
    return _settled(merge(root, tree, faults))


def parse_override(text: str) -> tuple[list[str], Node]:
    """Parses one config override: `a.b=3` -> (["a", "b"], the value's tree).

    Raises:
        ConfigError: the text is not of the form `key.path=value`.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not _KEY.match(key) or key.count(".") >= MAX_DEPTH:
        what, accepted = f"{text!r} is not a config override", "key.path=value, e.g. train.steps=10"
        raise ConfigError(what, where="command line", accepted=accepted)
    where = f"override {text if len(text) <= 200 else text[:197] + '...'!r}"
    return key.split("."), _value(value.strip(), where, key)


def _value(text: str, where: str, path: str) -> Node:
    """Splits lists and mappings itself: YAML would read `{*}` and `{0-3,5}` as mappings."""
    if path.count(".") > MAX_DEPTH:
        raise ConfigError(
            "this value is nested too deeply", where=where, accepted=f"at most {MAX_DEPTH} levels"
        )
    if text.startswith("[") and text.endswith("]"):
        parts = _split(text[1:-1])
        return Node([_value(part, where, f"{path}.{i}") for i, part in enumerate(parts)], where, path)
    if text.startswith("{") and text.endswith("}") and (":" in text or not text[1:-1].strip()):
        items: dict[str, Node] = {}
        for part in _split(text[1:-1]):
            cut = (_cuts(part, ":") or [len(part)])[0]
            name, inner = part[:cut].strip(), part[cut + 1 :]
            name = (read_quoted(name) if name[:1] in ("'", '"') else None) or name
            if what := unwritable(name):
                what = f"the key {name!r} cannot be used: {what}"
                raise ConfigError(what, where=f"{where}: {path}", hint="use a key of plain text")
            if name in items:
                what = f"the key {name!r} is set twice"
                raise ConfigError(what, where=f"{where}: {path}", hint="remove one of the two")
            items[name] = replace(_value(inner.strip(), where, f"{path}.{name}"), key_where=where)
        return Node(items, where, path)
    quoted = read_quoted(text) if text[:1] in ("'", '"') else None
    value = read_plain(text) if quoted is None else quoted
    if isinstance(value, str) and (what := unwritable(value)):
        raise ConfigError(
            f"the value cannot be used: {what}", where=f"{where}: {path}", hint="use plain text"
        )
    return Node(value, where, path)


def _cuts(text: str, separator: str) -> list[int]:
    """Positions of the separator outside brackets and quotes."""
    found, depth, quote = [], 0, ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and text[:index].rstrip()[-1:] in ("", "[", "{", ":", ","):
            quote = character  # only at the start of a value: an apostrophe within a word opens no quote
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == separator and not depth:
            found.append(index)
    return found


def _split(text: str) -> list[str]:
    """The parts between commas; nothing follows a trailing comma."""
    edges = [-1, *_cuts(text, ","), len(text)]
    parts = [text[start + 1 : end].strip() for start, end in pairwise(edges)]
    return parts if parts[-1] else parts[:-1]


def merge(base: Node, over: Node, faults: list[MMError]) -> Node:
    """Merges one config tree over another: mappings merge, any other value replaces the old one.

    A component with a different `type` replaces the old component completely, whose keys it does not have.

    Args:
        base: the lower tree.
        over: the tree whose values win.
        faults: receives an error for each list index out of range.
    """
    if isinstance(base.value, list) and isinstance(over.value, _Places):
        return _merge_places(base, over, faults)
    if isinstance(over.value, str) and isinstance(base.value, dict) and "type" in base.value:
        over = _mapping_of(over)
    elif isinstance(base.value, str) and isinstance(over.value, dict) and not isinstance(over.value, _Places):
        base = base if base.value.startswith(_PATHS) else _mapping_of(base)
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    old, new = base.value.get("type"), over.value.get("type")
    if old is not None and new is not None and not _same_type(old.value, new.value):
        return over
    merged = type(base.value)(base.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child, faults) if key in merged else child
    return base.holding(merged)


def _mapping_of(name: Node) -> Node:
    """A component given by its bare name as a mapping with `type`."""
    return name.holding({"type": Node(name.value, name.where, name.child_path("type"), name.key_where)})


def _merge_places(base: Node, over: Node, faults: list[MMError]) -> Node:
    items = list(base.value)
    for key, child in sorted(over.value.items(), key=lambda item: int(item[0])):
        index = int(key)
        if index < len(items):
            items[index] = merge(items[index], child, faults)
        elif index == len(items):
            items.append(child)
        else:
            size = len(base.value)
            what = f"index {key} is out of range: the list has {plural(size, 'item')}"
            accepted = f"0 to {size} ({size} appends)"
            faults.append(ConfigError(what, where=child.place(), accepted=accepted))
    return base.holding(items)


def _same_type(old: object, new: object) -> bool:
    """Whether two names can mean the same component, such as `adamw` and `core/adamw`."""
    a, b = str(old), str(new)
    return a == b or (("/" in a) != ("/" in b) and a.rsplit("/", 1)[-1] == b.rsplit("/", 1)[-1])


def _put(tree: Node, keys: list[str], value: Node) -> Node:
    """The tree of overrides with one more override added."""
    there = tree.at(*keys)
    if there is not None and isinstance(there.value, dict) and isinstance(value.value, str):
        value = _mapping_of(value)  # `optimizer.lr=1 optimizer=adamw`: the name joins the options
    for depth in range(len(keys) - 1, -1, -1):
        path = ".".join(keys[:depth])
        child = {keys[depth]: replace(value, key_where=value.where)}
        items = _Places(child) if keys[depth].isdigit() else child
        value = Node(items, value.where, path)
    faults: list[MMError] = []
    merged = merge(tree, value, faults)
    if faults:
        raise ConfigError(faults[0].what, where=faults[0].where, accepted=faults[0].accepted)
    return merged


def _settled(node: Node) -> Node:
    """Turns positions of a list that the file does not have into a list, when they are consecutive from 0."""
    settled = node.mapped(_settled)
    if isinstance(node.value, _Places) and node.value.keys() == {str(i) for i in range(len(node.value))}:
        return settled.holding([settled.value[str(i)] for i in range(len(node.value))])
    return settled
