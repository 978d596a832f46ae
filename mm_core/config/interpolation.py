"""`${...}` in a config: OmegaConf's grammar, each text evaluated once; `oc.env` is the only resolver."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mm_core.errors import ConfigError, MMError, RunWarning, did_you_mean, plural
from mm_core.plugin.trust.known import ALLOW
from mm_core.schema.nodes import FAILED, Node, from_python, to_python, unwritable

MAX_TEXTS = 2_000
"""Most different texts with interpolations in a config: OmegaConf's parser takes a millisecond for each."""
MAX_TEXT = 4_096
"""Most characters in one text with interpolations."""
MAX_TOGETHER = 65_536
"""Most characters in all different texts with interpolations: OmegaConf's parser takes 30 us for each."""
MAX_CHAIN = 20
"""Longest chain of texts that refer to each other."""
MAX_EXPANDED = 1_000_000
"""Most characters that all interpolations of a config expand to: a few lines can expand to billions."""

_ENVIRONMENT = "oc.env"
_ACCEPTED = "${key.path}, ${oc.env:NAME} or ${oc.env:NAME,default}"
_LITERAL = r"write \${ for a literal ${"
_UNSET = re.compile(r"Environment variable '(.*)' not found", re.DOTALL)
_BEFORE = re.compile(r"(\\*)\$\{")


def escape(text: str) -> str:
    """A string with `${` escaped, so that a config reads it back literally instead of interpolating."""
    return _BEFORE.sub(lambda match: f"{match[1] * 2}\\${{", text)


def resolve(
    root: Node,
    faults: list[MMError],
    unset: list[MMError] | None = None,
    withholds: Callable[[Node], bool] = lambda node: False,
) -> tuple[Node, Mapping[str, str]]:
    """Resolves the `${...}` interpolations of a config.

    Args:
        root: the tree of the config.
        faults: receives an error for each text that cannot be resolved; its value becomes FAILED.
        unset: receives the errors for environment variables that are not set; their texts stay as written.
            None: these are errors like any other.
        withholds: whether a text must not read the environment; it stays as written too.

    Returns:
        The tree without interpolations, and the original text of each value that depends on the environment,
        by key.
    """
    unset = faults if unset is None else unset
    nodes = [node for node in root.leaves() if isinstance(node.value, str) and "${" in node.value]
    if not nodes:
        return root, {}
    resolver = _Resolver(root, _parsed(nodes, faults))

    def walk(node: Node) -> Node:
        if id(node) not in resolver.trees:
            return node.mapped(walk)
        try:
            found = resolver.value(node)
            withheld = id(node) in resolver.tainted and withholds(node)
            return _withheld(node, faults, unset) if withheld else found
        except _Unresolvable as error:
            cause = str(error)
        missing = _UNSET.search(cause) is not None
        if cause:  # an empty cause: the error was reported already
            what = f"{_brief(node.value)} cannot be resolved: {cause}"
            (unset if missing else faults).append(ConfigError(what, where=node.place(), hint=_remedy(cause)))
        return node if missing and unset is not faults else node.holding(FAILED)

    whole = walk(root)
    return whole, {node.path: node.value for node in nodes if id(node) in resolver.tainted}


def _brief(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:197] + "...")


def _withheld(node: Node, faults: list[MMError], unset: list[MMError]) -> Node:
    """The text as written: an environment variable may hold a secret."""
    what = f"{node.value!r} in a stored run reads the environment, and you have not trained with it"
    unset.append(ConfigError(what, where=node.place(), hint=ALLOW))
    if unset is faults:
        return node.holding(FAILED)
    warnings.warn(f"{node.path}: {what}: it is not read ({ALLOW})", RunWarning, stacklevel=2)
    return node


def _remedy(cause: str) -> str | None:
    if missing := _UNSET.search(cause):
        return f"set {missing[1]}, or give a default: ${{oc.env:{missing[1]},default}}"
    if "Interpolation key" in cause:
        return "an interpolation can refer only to keys set in the files or overrides, not to defaults"
    return None


def _parsed(nodes: list[Node], faults: list[MMError]) -> dict[int, Any]:
    """The parse tree of each text, by the id of its node; None if the text does not parse."""
    first: dict[str, Node] = {}
    for node in nodes:
        first.setdefault(node.value, node)
    _check_amount(list(first.values()))
    found = {text: _parse(text) for text in first}
    trees = {}
    for node in nodes:
        tree = found[node.value]
        if isinstance(tree, ConfigError):
            faults.append(ConfigError(tree.what, where=node.place(), accepted=tree.accepted, hint=tree.hint))
        trees[id(node)] = None if isinstance(tree, ConfigError) else tree
    return trees


def _check_amount(different: list[Node]) -> None:
    """Raises ConfigError for more texts than a config can need, before any of them is parsed."""
    together = 0
    for count, node in enumerate(different, 1):
        together += len(node.value) if len(node.value) <= MAX_TEXT else 0  # others are refused one by one
        if count > MAX_TEXTS:
            what = f"more than {MAX_TEXTS:,} different strings contain interpolations"
        elif together > MAX_TOGETHER:
            what = f"the strings with interpolations contain more than {MAX_TOGETHER:,} characters in total"
        else:
            continue
        raise ConfigError(what, where=node.place(), hint=_LITERAL)


def _parse(text: str) -> Any:
    """The parse tree of a text by OmegaConf's grammar; a ConfigError without a place if it does not parse."""
    if len(text) > MAX_TEXT:
        what = f"a string of {plural(len(text), 'character')} contains interpolations"
        return ConfigError(what, accepted=f"at most {MAX_TEXT:,} characters", hint=_LITERAL)
    from omegaconf.errors import GrammarParseError  # takes 70 ms: only where there are interpolations
    from omegaconf.grammar_parser import parse

    try:
        tree = parse(text)
        unknown = [name for name in _resolvers(tree) if name != _ENVIRONMENT]
    except (GrammarParseError, RecursionError):
        return ConfigError(f"{_brief(text)} is not a valid interpolation", accepted=_ACCEPTED, hint=_LITERAL)
    if not unknown:
        return tree
    what = f"unknown resolver {unknown[0]!r} in {_brief(text)}"
    return ConfigError(what, accepted=_ACCEPTED, hint=did_you_mean(unknown[0], [_ENVIRONMENT]))


def _resolvers(tree: Any) -> list[str]:
    """The names of resolvers in a tree that OmegaConf's parser returns."""
    found: list[str] = []
    pending = [tree]
    while pending:
        context = pending.pop()
        if type(context).__name__ == "InterpolationResolverContext":
            found.append(context.resolverName().getText())
        pending += [context.getChild(i) for i in range(context.getChildCount())]
    return found


class _Unresolvable(Exception):
    """Why a text has no value; empty if the error was reported already."""


class _Resolver:
    """Evaluates each text once. OmegaConf evaluates a text each time it is referred to: with 30 lines of two
    references each, that is 2^30 times.

    Args:
        root: the tree that keys refer to.
        trees: parse tree of each text with interpolations, by the id of its node.
    """

    def __init__(self, root: Node, trees: Mapping[int, Any]) -> None:
        self.root, self.trees = root, trees
        self.open: list[Node] = []
        self.tainted: set[int] = set()  # ids of nodes whose value depends on the environment
        self._done: dict[int, Node | _Unresolvable] = {}
        self._sizes: dict[int, int] = {}  # characters in each finished node
        self._spent = 0
        self._above: dict[int, Node] = {}
        self._note_parents(root)

    def _note_parents(self, node: Node) -> None:
        for child in node.children:
            self._above[id(child)] = node
            self._note_parents(child)

    def value(self, node: Node) -> Node:
        """The node with its interpolations resolved. Raises _Unresolvable when it has no value."""
        done = self._done.get(id(node))
        if done is None:
            if any(node is other for other in self.open):
                raise _Unresolvable("Recursive interpolation detected")
            self.open.append(node)
            try:
                done = self._evaluated(node)
            except _Unresolvable as fault:
                done = fault
            finally:
                self.open.pop()
            self._done[id(node)] = done
        if id(node) in self.tainted and self.open:
            self.tainted.add(id(self.open[-1]))
        if isinstance(done, _Unresolvable):
            raise _Unresolvable(str(done))
        return done

    def _evaluated(self, node: Node) -> Node:
        if isinstance(node.value, (dict, list)):
            return self._container(node)
        if id(node) not in self.trees:
            self._sizes[id(node)] = len(node.value) if isinstance(node.value, str) else 8
            return node
        if self.trees[id(node)] is None:
            raise _Unresolvable("")
        if sum(id(other) in self.trees for other in self.open) > MAX_CHAIN:
            raise _Unresolvable(f"it refers to another key over more than {MAX_CHAIN} steps")
        before = self._spent
        value = self._visited(self.trees[id(node)])
        if isinstance(value, str) and (what := unwritable(value)):
            raise _Unresolvable(what)
        self._sizes[id(node)] = self._spent - before + len(node.value)
        resolved = from_python(value, node.where, node.path, loose=True)
        return replace(resolved, key_where=node.key_where)

    def _container(self, node: Node) -> Node:
        whole = node.mapped(self.value)
        self._sizes[id(node)] = 8 + sum(self._sizes[id(child)] for child in node.children)
        return whole

    def _visited(self, tree: Any) -> Any:
        from omegaconf.errors import OmegaConfBaseException
        from omegaconf.grammar_visitor import GrammarVisitor

        try:
            value = GrammarVisitor(self._referred, self._from_environment, memo=set()).visit(tree)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            raise _Unresolvable((str(error).splitlines() or [type(error).__name__])[0]) from None
        return str(value) if isinstance(value, str) else value  # OmegaConf has its own string class

    # -- called by OmegaConf's visitor ---------------------------------------------------------

    def _referred(self, key: Any, memo: Any) -> Any:
        """The plain value of `${key}`. (The key is a string before OmegaConf 2.4, then an object.)"""
        raw = str(getattr(key, "raw", key))
        dots = len(raw) - len(raw.lstrip("."))
        parts = getattr(key, "parts", None)
        target = self._found(dots, re.findall(r"[^.\[\]]+", raw) if parts is None else list(parts))
        if target is None:
            raise _Unresolvable(f"Interpolation key '{raw}' not found")
        resolved = self.value(target)
        self._spent += self._sizes.get(id(target), 8)
        if self._spent > MAX_EXPANDED:
            raise _Unresolvable(
                f"the config's interpolations expand to more than {MAX_EXPANDED:,} characters"
            )
        if resolved.value is FAILED:
            raise _Unresolvable("")
        return to_python(resolved)

    def _found(self, dots: int, parts: list[str]) -> Node | None:
        """The node at a path. One leading dot is the enclosing mapping or list, each further dot a parent."""
        current: Node | None = self.root if not dots else self.open[-1]
        for _ in range(dots):
            current = self._above.get(id(current))
        for part in parts:
            if current is not None and id(current) in self.trees:
                current = self.value(current)
            holder = current.value if current is not None else None
            if isinstance(holder, dict):
                current = holder.get(part)
            elif isinstance(holder, list):
                index = int(part) if re.fullmatch(r"\d{1,6}", part) else len(holder)
                current = holder[index] if index < len(holder) else None
            else:
                return None
        return current

    def _from_environment(self, name: str, args: tuple[Any, ...], args_str: tuple[str, ...]) -> Any:
        self.tainted.add(id(self.open[-1]))
        if not 1 <= len(args) <= 2 or not isinstance(args[0], str):
            raise _Unresolvable(f"oc.env takes the name of a variable and an optional default: {_ACCEPTED}")
        found = os.environ.get(args[0]) if "\0" not in args[0] else None
        if found is None and len(args) == 1:
            raise _Unresolvable(f"Environment variable '{args[0]}' not found")
        if found is None:
            return None if args[1] is None else str(args[1])
        self._spent += len(found)
        return found
