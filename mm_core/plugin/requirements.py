"""A plugin's distribution, version and requirement of mm-core, read quickly from its metadata."""

from __future__ import annotations

import operator
import re
from itertools import takewhile
from typing import NamedTuple

_MM_CORE = re.compile(r"mm[-_.]core(?![\w.-])", re.IGNORECASE)
_PLAIN = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)\s*\Z")
_RELEASE = re.compile(r"\d+(?:\.\d+)*\Z")
_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


class Identity(NamedTuple):
    """A plugin's distribution name, version, and requirements of mm-core as written in its metadata."""

    name: str
    version: str
    requirements: tuple[str, ...]


def read_identity(metadata: str) -> Identity:
    """Reads a plugin's name, version and requirements of mm-core from its distribution's metadata.

    (email.parser, used by `Distribution.metadata`, takes a hundred times as long for a long description.)
    """
    lines = takewhile(bool, metadata.splitlines())  # an empty line precedes the description
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    last = dict(headers)
    required = (value for name, value in headers if name == "requires-dist")
    return Identity(last.get("name", ""), last.get("version", ""), tuple(filter(_MM_CORE.match, required)))


def admits(requirement: str, version: str) -> bool | None:
    """Whether a plugin's requirement of mm-core accepts a version; None if its marker does not apply here."""
    plain = _plain_admits(requirement, version)
    if plain is not None:
        return plain
    from packaging.requirements import Requirement  # takes 25 ms: only for unusual requirements

    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
        return None
    return parsed.specifier.contains(version, prereleases=True)


def _plain_admits(requirement: str, version: str) -> bool | None:
    """The answer for simple requirements such as `mm-core>=0.1,<0.2`; None for any other."""
    clauses = [
        _PLAIN.match(part) for part in _MM_CORE.sub("", requirement, count=1).split(",") if part.strip()
    ]
    if not _RELEASE.match(version) or None in clauses:
        return None
    here = _release(version)
    return all(_COMPARE[m[1]](here, _release(m[2])) for m in clauses if m)


def _release(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.sub(r"(\.0+)+\Z", "", text).split(".")))  # 0.1 equals 0.1.0
