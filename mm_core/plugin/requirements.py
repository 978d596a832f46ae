"""A distribution's identity and its requirement of mm-core, read without parsing what is not needed."""

from __future__ import annotations

import re
from typing import NamedTuple

_MM_CORE = re.compile(r"mm[-_.]core(?![\w.-])", re.IGNORECASE)
_PLAIN = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)\Z")
_RELEASE = re.compile(r"\d+(?:\.\d+)*\Z")


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


def admits(requirement: str, version: str) -> bool | None:
    """Whether a requirement of mm-core admits `version`; None when its marker does not apply here."""
    plain = _plain_admits(requirement, version)
    if plain is not None:
        return plain
    from packaging.requirements import Requirement  # 25 ms; only unusual requirements come here

    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
        return None
    return parsed.specifier.contains(version, prereleases=True)


def _plain_admits(requirement: str, version: str) -> bool | None:
    """The answer for `mm-core>=0.1,<0.2` and its like; None for anything less plain."""
    if not _RELEASE.match(version):
        return None
    rest = _MM_CORE.sub("", requirement, count=1).strip()
    if rest.startswith("(") and rest.endswith(")"):  # how old metadata wrote it
        rest = rest[1:-1]
    here = _release(version)
    answer = True
    for clause in filter(None, (part.strip() for part in rest.split(","))):
        match = _PLAIN.match(clause)
        if match is None:
            return None
        there = _release(match[2])
        answer = (
            answer
            and {
                ">=": here >= there,
                "<=": here <= there,
                "==": here == there,
                "!=": here != there,
                ">": here > there,
                "<": here < there,
            }[match[1]]
        )
    return answer


def _release(text: str) -> tuple[int, ...]:
    numbers = [int(part) for part in text.split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:  # 0.1 equals 0.1.0
        numbers.pop()
    return tuple(numbers)
