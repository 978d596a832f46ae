"""`key=value` overrides: the value is YAML, and braces of module patterns need no quoting."""

from __future__ import annotations

import re
from dataclasses import replace

from mm_core.config.yaml_nodes import read_text
from mm_core.errors import ConfigError, MMError
from mm_core.plugin.checking import Node

_KEY = re.compile(r"[A-Za-z_][\w\-]*(\.[\w\-]+)*\Z")


def parse_override(text: str) -> tuple[list[str], Node]:
    """`a.b=3` -> (["a", "b"], the value's tree). ConfigError for what is no override."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not _KEY.match(key):
        raise ConfigError(
            f"{text!r} is not an override",
            where="command line",
            accepted="key.path=value, such as train.steps=10",
        )
    return key.split("."), _value(value.strip(), f"override {text!r}", key)


def _value(text: str, where: str, path: str) -> Node:
    if text.startswith("[") and text.endswith("]"):
        parts = _split(text[1:-1])
        return Node([_value(part, where, f"{path}.{i}") for i, part in enumerate(parts)], where, path)
    if text.startswith("{") and text.endswith("}") and ":" in text:
        items: dict[str, Node] = {}
        for part in _split(text[1:-1]):
            name, _, inner = part.partition(":")
            name = name.strip()
            items[name] = replace(_value(inner.strip(), where, f"{path}.{name}"), key_where=where)
        return Node(items, where, path)
    if not text:
        return Node(None, where, path)
    try:
        faults: list[MMError] = []
        node = read_text(text, where, faults)
    except ConfigError:
        return Node(text, where, path)
    return Node(text if isinstance(node.value, (dict, list)) or faults else node.value, where, path)


def _split(text: str) -> list[str]:
    """The parts between commas that stand outside of brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else parts


def merge(base: Node, over: Node) -> Node:
    """`over` laid upon `base`: mappings merge, anything else replaces. A mapping that names another
    `type` replaces the whole component, for the old one's keys mean nothing to it."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    old, new = base.value.get("type"), over.value.get("type")
    if old is not None and new is not None and not _same_type(old.value, new.value):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return replace(base, value=merged)


def _same_type(old: object, new: object) -> bool:
    """Whether two names may stand for one component: `adamw` and `core/adamw` may."""
    a, b = str(old), str(new)
    return a == b or (("/" in a) != ("/" in b) and a.rsplit("/", 1)[-1] == b.rsplit("/", 1)[-1])


def apply_override(root: Node, keys: list[str], value: Node) -> Node:
    """The tree with the value set at the key path; missing mappings on the way are made."""
    if not keys:
        return merge(root, value) if isinstance(value.value, dict) else value
    head, rest = keys[0], keys[1:]
    if isinstance(root.value, list):
        if not head.isdigit() or int(head) > len(root.value):
            raise ConfigError(
                f"{root.path!r} is a list of {len(root.value)}, and {head!r} is no place in it",
                where=value.where,
            )
        items = list(root.value)
        child = items[int(head)] if int(head) < len(items) else Node({}, value.where, f"{root.path}.{head}")
        items[int(head) : int(head) + 1] = [apply_override(child, rest, value)]
        return replace(root, value=items)
    inner = root.value
    if isinstance(inner, str):  # a component by its bare name
        inner = {"type": Node(inner, root.where, root.path)}
    if not isinstance(inner, dict):
        inner = {}
    path = f"{root.path}.{head}" if root.path else head
    child = inner.get(head, Node({} if rest else None, value.where, path, value.where))
    return replace(root, value={**inner, head: apply_override(child, rest, value)})
