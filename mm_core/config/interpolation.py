"""`${...}` within a config, resolved by OmegaConf; `oc.env` is the only resolver."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mm_core.errors import ConfigError, MMError, did_you_mean
from mm_core.plugin.checking import Node, from_python, to_python

_RESOLVER = re.compile(r"(?<!\\)\$\{\s*([^${}:]*?)\s*:")
_REFERENCE = re.compile(r"(?<!\\)\$\{\s*([^${}:]+?)\s*\}")


def leaves(node: Node) -> Iterator[Node]:
    """Every scalar of a tree."""
    children = node.value.values() if isinstance(node.value, dict) else node.value
    if isinstance(node.value, (dict, list)):
        for child in children:
            yield from leaves(child)
    else:
        yield node


def resolve(root: Node, faults: list[MMError]) -> tuple[Node, Mapping[str, str]]:
    """The tree without interpolations, and the texts of those that depend on the environment."""
    texts = {n.path: n.value for n in leaves(root) if isinstance(n.value, str) and "${" in n.value}
    if not texts:
        return root, {}
    from omegaconf import OmegaConf  # 70 ms, which configs without interpolations need not pay

    config = OmegaConf.create(to_python(root))
    literals = {path: text for path, text in texts.items() if _from_environment(path, texts, ())}

    def walk(node: Node) -> Node:
        if isinstance(node.value, dict):
            return replace(node, value={key: walk(child) for key, child in node.value.items()})
        if isinstance(node.value, list):
            return replace(node, value=[walk(child) for child in node.value])
        if node.path not in texts or node.value is not texts[node.path]:
            return node
        return _resolve_leaf(node, config, faults)

    return walk(root), literals


def _resolve_leaf(node: Node, config: Any, faults: list[MMError]) -> Node:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    unknown = [name for name in _RESOLVER.findall(node.value) if name != "oc.env"]
    if unknown:
        faults.append(
            ConfigError(
                f"there is no resolver {unknown[0]!r} in {node.value!r}",
                where=node.place(),
                accepted="${key.path} and ${oc.env:NAME} or ${oc.env:NAME,default}",
                hint=did_you_mean(unknown[0], ["oc.env"]),
            )
        )
        return replace(node, value=None, loose=True)
    try:
        value = OmegaConf.select(config, node.path, throw_on_missing=True)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        cause = " ".join(str(error).splitlines()[:1]) or type(error).__name__
        faults.append(ConfigError(f"{node.value!r} can not be resolved: {cause}", where=node.place()))
        return replace(node, value=None)
    return replace(from_python(value, node.where, node.path, loose=True), key_where=node.key_where)


def _from_environment(path: str, texts: Mapping[str, str], above: tuple[str, ...]) -> bool:
    """Whether a text reads the environment, itself or through what it refers to."""
    text = texts[path]
    if "oc.env" in text:
        return True
    for reference in _REFERENCE.findall(text):
        target = _absolute(reference, path)
        for other in texts:
            below = other == target or other.startswith(target + ".") or target.startswith(other + ".")
            if (
                below
                and other != path
                and other not in above
                and _from_environment(other, texts, (*above, path))
            ):
                return True
    return False


def _absolute(reference: str, path: str) -> str:
    """OmegaConf's relative references: one dot is the mapping around, each further one its parent."""
    dots = len(reference) - len(reference.lstrip("."))
    if not dots:
        return reference
    return ".".join([*path.split(".")[:-dots], reference[dots:]])
