"""The API range, read from metadata. packaging is the oracle of the quick path beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from mm_core.plugin.requirements import _plain_admits, admits, read_identity

versions = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
clauses = st.tuples(st.sampled_from([">=", "<=", "==", "!=", ">", "<"]), versions).map("".join)


@given(st.lists(clauses, max_size=3), versions)
def test_plain_requirements_are_read_as_packaging_reads_them(parts: list[str], version: str) -> None:
    requirement = f"mm-core{', '.join(parts)}"
    assert _plain_admits(requirement, version) is Requirement(requirement).specifier.contains(version)


@pytest.mark.parametrize(
    ("requirement", "version", "answer"),
    [
        ("mm-core", "0.1.0", True),
        ("mm_core>=0.1,<0.2", "0.1.0", True),
        ("MM.Core (>=0.2)", "0.1.0", False),
        ("mm-core~=0.1.0", "0.1.9", True),
        ("mm-core==0.1.*", "0.2.0", False),
        ("mm-core>=0.1", "0.2.0.dev3", True),  # a development core is a core
        ("mm-core[npu]>=0.2", "0.1.0", False),
        ("mm-core>=9; python_version < '3'", "0.1.0", None),
        ("mm-core>=9; extra == 'x'", "0.1.0", None),
        ("mm-core>=9; python_version > '3'", "0.1.0", False),
    ],
)
def test_what_a_requirement_admits(requirement: str, version: str, answer: bool | None) -> None:
    assert admits(requirement, version) is answer


def test_only_headers_of_mm_core_count() -> None:
    text = (
        "Metadata-Version: 2.1\nname: mm-dit\nVersion: 1.0\nRequires-Dist: mm-core-extras>=2\n"
        "Requires-Dist: mm-core<1,>=0.1\n\nRequires-Dist: mm-core>=9\nVersion: 7\n"
    )
    assert read_identity(text) == ("mm-dit", "1.0", ("mm-core<1,>=0.1",))
