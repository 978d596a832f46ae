"""A distribution's identity and its requirement of mm-core, read without parsing what is not needed."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

_MM_CORE = re.compile(r"mm[-_.]core(?![\w.-])", re.IGNORECASE)


class Identity(NamedTuple):
    """Name, version, and the requirements of mm-core as they stand in the metadata."""

    name: str
    version: str
    requirements: tuple[str, ...]


def read_identity(metadata: str) -> Identity:
    """Reads the three headers that matter. (email.parser, behind `Distribution.metadata`, takes
    a hundred times as long on a long description.)"""
    name = version = ""
    requirements = []
    for line in metadata.splitlines():
        if not line:
            break  # the description follows
        header, _, value = line.partition(":")
        header = header.lower()
        if header == "name":
            name = value.strip()
        elif header == "version":
            version = value.strip()
        elif header == "requires-dist" and _MM_CORE.match(value.strip()):
            requirements.append(value.strip())
    return Identity(name, version, tuple(requirements))


@cache  # most plugins ask for the same
def admits(requirement: str, version: str) -> bool | None:
    """Whether a requirement of mm-core admits `version`; None when its marker does not apply here."""
    from packaging.requirements import Requirement  # 25 ms, which `mm --help` does not pay

    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
        return None
    return parsed.specifier.contains(version, prereleases=True)
