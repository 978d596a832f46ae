"""The words of messages."""

from __future__ import annotations

import pytest

from mm_core.errors import plural


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "rank", "0 ranks"),
        (1, "rank", "1 rank"),
        (2, "rank", "2 ranks"),
        (1, "entry", "1 entry"),
        (3, "entry", "3 entries"),
        (3, "key", "3 keys"),
    ],
)
def test_a_count_has_its_noun_in_the_right_number(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text
