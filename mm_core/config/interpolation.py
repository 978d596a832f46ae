"""`${...}` within a config, resolved by OmegaConf; `oc.env` is the only resolver."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mm_core.errors import ConfigError, MMError, did_you_mean
from mm_core.plugin.nodes import FAILED, Node, from_python

_ENVIRONMENT = "oc.env"
_ACCEPTED = "${key.path}, ${oc.env:NAME} or ${oc.env:NAME,default}"
_UNSET = re.compile(r"Environment variable '(.*)' not found")
_BEFORE = re.compile(r"(\\*)\$\{")


@dataclass(frozen=True)
class _Reading:
    """What a text refers to: names of resolvers, key paths (None: one that is itself computed)."""

    resolvers: tuple[str, ...]
    references: tuple[str | None, ...]


def escape(text: str) -> str:
    """A text that OmegaConf reads as `text`, whatever interpolations it seems to hold."""
    return _BEFORE.sub(lambda match: f"{match[1] * 2}\\${{", text)


def resolve(
    root: Node, faults: list[MMError], unset: list[MMError] | None = None
) -> tuple[Node, Mapping[str, str]]:
    """The tree without interpolations, and the texts of those that depend on the environment.

    One that can not be resolved is a fault and becomes FAILED. `unset`, where it is another list than
    `faults`, takes those of variables that are not set: their texts stay as they are written.
    """
    unset = faults if unset is None else unset
    nodes = [node for node in _leaves(root) if isinstance(node.value, str) and "${" in node.value]
    if not nodes:
        return root, {}
    from omegaconf import OmegaConf  # 70 ms, which configs without interpolations need not pay

    readings: dict[int, _Reading] = {}
    for node in nodes:
        reading = _read(node, faults)
        if reading is not None:
            readings[id(node)] = reading
    wrong = {id(node) for node in nodes} - readings.keys()
    config = OmegaConf.create(_plain(root, wrong))
    literals = _from_environment({n.path: (n.value, readings[id(n)]) for n in nodes if id(n) in readings})

    def walk(node: Node, holder: Any, key: Any) -> Node:
        if isinstance(node.value, (dict, list)):
            within = holder if key is None else holder._get_node(key)
            if isinstance(node.value, dict):
                return replace(
                    node, value={name: walk(child, within, name) for name, child in node.value.items()}
                )
            return replace(node, value=[walk(child, within, i) for i, child in enumerate(node.value)])
        if id(node) in wrong:
            return replace(node, value=FAILED)
        return _resolved(node, holder, key, faults, unset) if id(node) in readings else node

    return walk(root, config, None), literals


def _leaves(node: Node) -> Iterator[Node]:
    if isinstance(node.value, (dict, list)):
        for child in node.value.values() if isinstance(node.value, dict) else node.value:
            yield from _leaves(child)
    else:
        yield node


def _plain(node: Node, wrong: set[int]) -> Any:
    if isinstance(node.value, dict):
        return {key: _plain(child, wrong) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [_plain(child, wrong) for child in node.value]
    return None if node.value is FAILED or id(node) in wrong else node.value


def _read(node: Node, faults: list[MMError]) -> _Reading | None:
    """What OmegaConf's own grammar finds in a text; None when it is a fault."""
    from omegaconf.errors import GrammarParseError
    from omegaconf.grammar_parser import parse

    try:
        reading = _walked(parse(node.value))
    except (GrammarParseError, RecursionError):
        faults.append(
            ConfigError(
                f"{node.value!r} is no interpolation",
                where=node.place(),
                accepted=_ACCEPTED,
                hint=r"write \${ for a text that holds ${",
            )
        )
        return None
    unknown = [name for name in reading.resolvers if name != _ENVIRONMENT]
    if not unknown:
        return reading
    faults.append(
        ConfigError(
            f"there is no resolver {unknown[0]!r} in {node.value!r}",
            where=node.place(),
            accepted=_ACCEPTED,
            hint=did_you_mean(unknown[0], [_ENVIRONMENT]),
        )
    )
    return None


def _walked(tree: Any) -> _Reading:
    """Resolvers and references of a tree that OmegaConf's parser returns."""
    resolvers: list[str] = []
    references: list[str | None] = []
    pending = [tree]
    while pending:
        context = pending.pop(0)
        name = type(context).__name__
        if name == "InterpolationResolverContext":
            resolvers.append(context.resolverName().getText())
        elif name == "InterpolationNodeContext":
            text = context.getText()[2:-1].strip()
            references.append(None if "$" in text else re.sub(r"\[([^\]]*)\]", r".\1", text))
        pending += [context.getChild(i) for i in range(context.getChildCount())]
    return _Reading(tuple(resolvers), tuple(references))


def _resolved(node: Node, holder: Any, key: Any, faults: list[MMError], unset: list[MMError]) -> Node:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = holder[key]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        quoted = re.search(r'raised while resolving interpolation: "?(.*?)"?$', first)
        cause = quoted[1] if quoted else first
        fault = ConfigError(
            f"{node.value!r} can not be resolved: {cause}", where=node.place(), hint=_remedy(cause)
        )
        missing = _UNSET.search(cause) is not None
        (unset if missing else faults).append(fault)
        return node if missing and unset is not faults else replace(node, value=FAILED)
    return replace(from_python(value, node.where, node.path, loose=True), key_where=node.key_where)


def _remedy(cause: str) -> str | None:
    if missing := _UNSET.search(cause):
        return f"set {missing[1]}, or give a default: ${{oc.env:{missing[1]},default}}"
    if "Interpolation key" in cause:
        return "it can refer to keys that the files or overrides write, not to defaults"
    return None


def _from_environment(texts: Mapping[str, tuple[str, _Reading]]) -> dict[str, str]:
    """The texts that read the environment, themselves or through what they refer to."""
    found = {path for path, (_, reading) in texts.items() if reading.resolvers}
    grown = bool(found)
    while grown:
        grown = False
        for path, (_, reading) in texts.items():
            if path not in found and any(_touches(ref, path, found) for ref in reading.references):
                found.add(path)
                grown = True
    return {path: text for path, (text, _) in texts.items() if path in found}


def _touches(reference: str | None, path: str, found: set[str]) -> bool:
    """Whether a reference leads to, into or through one of the found paths. One that is computed may."""
    if reference is None:
        return True
    target = _absolute(reference, path)
    return any(
        f"{target}.".startswith(f"{other}.") or f"{other}.".startswith(f"{target}.") for other in found
    )


def _absolute(reference: str, path: str) -> str:
    """OmegaConf's relative references: one dot is the mapping around, each further one its parent."""
    dots = len(reference) - len(reference.lstrip("."))
    return ".".join([*path.split(".")[:-dots], reference[dots:]]) if dots else reference
