"""The names of the contracts for plugins follow one pattern."""

from __future__ import annotations

import re

import pytest

from mm_core import contracts

CAPABILITIES = [name for name in contracts.__all__ if name.startswith("Supports")]


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_capability_is_named_by_a_member_and_can_be_asked_for(name: str) -> None:
    capability = getattr(contracts, name)
    member = re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("Supports")).lower()
    members = {
        one for base in capability.__mro__ for one in (*vars(base), *getattr(base, "__annotations__", ()))
    }
    assert any(member in one for one in members), (name, member)
    assert capability._is_runtime_protocol
    assert not isinstance(object(), capability)


def test_there_are_capabilities() -> None:
    assert {"SupportsBeginStep", "SupportsLengths", "SupportsExperts"} <= {*CAPABILITIES}
