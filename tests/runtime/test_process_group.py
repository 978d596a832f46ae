"""A process group ends, also where one follows the other."""

from __future__ import annotations

import pytest

from support import warm

MANY = (
    "from mm_core.runtime.process_group import process_group\n"
    "for _ in range(200):\n"
    "    with process_group(None): pass\n"
)


@pytest.mark.slow
def test_a_group_that_ends_waits_for_no_thread_that_waits_for_it():
    """torch 2.7's gloo did, within the first few hundred."""
    assert warm.run(["-c", MANY], timeout=120).returncode == 0
