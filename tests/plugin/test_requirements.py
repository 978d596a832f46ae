"""The API range, read from metadata."""

from __future__ import annotations

import pytest

from mm_core.plugin.requirements import admits, read_identity


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
        ("mm-core>=9; python_version < '3'", "0.1.0", True),
        ("mm-core>=9; extra == 'x'", "0.1.0", True),
        ("mm-core>=9; python_version > '3'", "0.1.0", False),
        ("mm-core >=>= 0.1", "0.1.0", False),
    ],
)
def test_what_a_requirement_admits(requirement: str, version: str, answer: bool) -> None:
    assert admits(requirement, version) is answer


def test_only_headers_of_mm_core_count() -> None:
    text = (
        "Metadata-Version: 2.1\nname: mm-dit\nVersion: 1.0\nRequires-Dist: mm-core-extras>=2\n"
        "Requires-Dist: mm-core<1,>=0.1\n\nRequires-Dist: mm-core>=9\nVersion: 7\n"
    )
    assert read_identity(text) == ("mm-dit", "1.0", ("mm-core<1,>=0.1",))
