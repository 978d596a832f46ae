"""`${key.path}` and `${oc.env:NAME,default}` in a config, with the values of OmegaConf."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mm_core.errors import ConfigError, MMError, RunWarning, did_you_mean
from mm_core.plugin.trust.known import ALLOW
from mm_core.schema.nodes import FAILED, Node, from_python, to_python, unwritable

MAX_CHAIN = 20
"""Longest chain of texts that refer to each other, and most interpolations inside each other."""
MAX_EXPANDED = 1_000_000
"""Most characters that all interpolations of a config expand to: a few lines can expand to billions."""

_ENVIRONMENT = "oc.env"
_ACCEPTED = "${key.path}, ${oc.env:NAME} or ${oc.env:NAME,default}"
_UNSET = re.compile(r"Environment variable '(.*)' not found", re.DOTALL)
_BEFORE = re.compile(r"(\\*)\$\{")
_NEXT = re.compile(r"(\\*)\$\{|\}")
_PART = r"[^\s.\[\]{}:,$\\'\"]+"
_KEY = re.compile(rf"(\.*)((?:{_PART}|\[{_PART}\])(?:\.{_PART}|\[{_PART}\])*)")
_RESOLVER = re.compile(r"((?:\$\{[^}]*\}|[^:$])*):")
"""`oc.env` of `oc.env:NAME`; a colon in nested braces does not count."""


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
    resolver = _Resolver(root, {id(node): _parsed(node, faults) for node in nodes})

    def walk(node: Node) -> Node:
        if id(node) not in resolver.texts:
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


# -- texts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reference:
    """One `${...}`: what is between the braces, with the interpolations in it parsed."""

    inside: _Text
    environment: bool


_Text = list["str | _Reference"]


class _Invalid(Exception):
    """The text is no valid interpolation; its message names an unknown resolver, if there is one."""


def _parsed(node: Node, faults: list[MMError]) -> _Text | None:
    """A text's parts; None, with an error recorded, if it is not valid."""
    try:
        return _parts(node.value, 0, 0)[0]
    except _Invalid as fault:
        what = f"{_brief(node.value)} is not a valid interpolation"
        hint: str | None = r"write \${ for a literal ${"
        if name := str(fault):
            what = f"unknown resolver {name!r} in {_brief(node.value)}"
            hint = did_you_mean(name, [_ENVIRONMENT])
        faults.append(ConfigError(what, where=node.place(), accepted=_ACCEPTED, hint=hint))
        return None


def _parts(text: str, start: int, depth: int) -> tuple[_Text, int]:
    """The parts of a text, or of the inside of braces (depth > 0), and where these end."""
    if depth > MAX_CHAIN:
        raise _Invalid
    parts: _Text = []
    while (match := _NEXT.search(text, start)) is not None:
        if match[0] == "}" and depth:
            return [*parts, text[start : match.start()]], match.end()
        written = text[start : match.start()]
        if match[0] == "}":
            parts.append(written + "}")
            start = match.end()
            continue
        slashes = len(match[1])
        parts.append(written + "\\" * (slashes // 2) + "${" * (slashes % 2))
        start = match.end()
        if slashes % 2 == 0:
            inside, end = _parts(text, start, depth + 1)
            parts.append(_reference(inside, text[start : end - 1]))
            start = end
    if depth:
        raise _Invalid
    return [*parts, text[start:]], len(text)


def _reference(inside: _Text, written: str) -> _Reference:
    resolver = _RESOLVER.match(written)
    if resolver is None:
        plain = re.sub(r"\$\{.*\}", "x", written, flags=re.DOTALL)  # nested ones stand for a part of a key
        if _KEY.fullmatch(plain) is None:
            raise _Invalid
        return _Reference(inside, environment=False)
    if (name := resolver[1]) != _ENVIRONMENT:
        raise _Invalid(name if re.fullmatch(r"[\w.${}]+", name) else "")
    first = inside[0]
    assert isinstance(first, str)
    return _Reference([first.partition(":")[2], *inside[1:]], environment=True)


# -- values ----------------------------------------------------------------------------------------


def _size(node: Node) -> int:
    """Characters of a resolved value; other values than strings count as 8."""
    own = len(node.value) if isinstance(node.value, str) else 8
    return own + sum(map(_size, node.children))


class _Unresolvable(Exception):
    """Why a text has no value; empty if the error was reported already."""


class _Resolver:
    """Evaluates each text once: with 30 lines of two references each, each time would be 2^30 times.

    Args:
        root: the tree that keys refer to.
        texts: parts of each text with interpolations, by the id of its node.
    """

    def __init__(self, root: Node, texts: Mapping[int, _Text | None]) -> None:
        self.root, self.texts = root, texts
        self.open: list[Node] = []
        self.tainted: set[int] = set()  # ids of nodes whose value depends on the environment
        self._done: dict[int, Node | _Unresolvable] = {}
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
        if id(node) not in self.texts:
            return node.mapped(self.value)
        if (text := self.texts[id(node)]) is None:
            raise _Unresolvable("")
        if sum(id(other) in self.texts for other in self.open) > MAX_CHAIN:
            raise _Unresolvable(f"it refers to another key over more than {MAX_CHAIN} steps")
        value = self._joined(text)
        if isinstance(value, str) and (what := unwritable(value)):
            raise _Unresolvable(what)
        resolved = from_python(value, node.where, node.path, loose=True)
        return replace(resolved, key_where=node.key_where)

    def _joined(self, text: _Text) -> Any:
        """A text's value: that of a lone reference as it is, else the string of all parts."""
        parts = [part for part in text if part != ""]
        values = [part if isinstance(part, str) else self._referred(part) for part in parts]
        return values[0] if len(values) == 1 else "".join(map(str, values))

    def _referred(self, reference: _Reference) -> Any:
        if reference.environment:
            return self._from_environment(reference.inside)
        key = str(self._joined(reference.inside))
        match = _KEY.fullmatch(key)
        target = self._found(len(match[1]), re.findall(r"[^.\[\]]+", match[2])) if match else None
        if target is None:
            raise _Unresolvable(f"Interpolation key '{key}' not found")
        resolved = self.value(target)
        self._spend(resolved)
        if resolved.value is FAILED:
            raise _Unresolvable("")
        return to_python(resolved)

    def _found(self, dots: int, parts: list[str]) -> Node | None:
        """The node at a path. One leading dot is the enclosing mapping or list, each further dot a parent."""
        current: Node | None = self.root if not dots else self.open[-1]
        for _ in range(dots):
            current = self._above.get(id(current))
        for part in parts:
            if current is not None and id(current) in self.texts:
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

    def _from_environment(self, inside: _Text) -> Any:
        self.tainted.add(id(self.open[-1]))
        at = next((i for i, part in enumerate(inside) if isinstance(part, str) and "," in part), None)
        default: _Text | None = None
        if at is not None:
            before, _, after = str(inside[at]).partition(",")
            inside, default = [*inside[:at], before], [after.lstrip(), *inside[at + 1 :]]
        name = str(self._joined(inside)).strip().strip("'\"")
        if not name:
            raise _Unresolvable(f"oc.env takes the name of a variable and an optional default: {_ACCEPTED}")
        from omegaconf.resolvers import oc  # takes 70 ms: only where the environment is read

        try:
            found = str(oc.env(name))
        except (KeyError, ValueError):  # ValueError: a NUL character
            if default is None:
                raise _Unresolvable(f"Environment variable '{name}' not found") from None
        else:
            self._spend(Node(found, "", ""))
            return found
        value = self._joined(default) if any(default) else ""
        text = str(value).strip()
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else None if value is None or text == "null" else text

    def _spend(self, found: Node) -> None:
        if self._spent <= MAX_EXPANDED:  # else one after the other would be counted for nothing
            self._spent += _size(found)
        if self._spent > MAX_EXPANDED:
            raise _Unresolvable(
                f"the config's interpolations expand to more than {MAX_EXPANDED:,} characters"
            )
