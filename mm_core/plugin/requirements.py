"""A plugin's distribution, version and requirement of mm-core, read quickly from its metadata."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import NamedTuple

_MM_CORE = re.compile(r"mm[-_.]core(?![\w.-])", re.IGNORECASE)


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


def admits(requirement: str, version: str) -> bool:
    """Whether a plugin's requirement of mm-core accepts a version, or does not apply here; an invalid
    requirement accepts none."""
    from packaging.requirements import InvalidRequirement, Requirement  # takes 20 ms

    try:
        parsed = Requirement(requirement)
    except InvalidRequirement:
        return False
    applies = parsed.marker is None or parsed.marker.evaluate({"extra": ""})
    return not applies or parsed.specifier.contains(version, prereleases=True)
