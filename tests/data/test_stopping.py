"""How long work before the first step ends on a request to stop."""

from __future__ import annotations

import pytest

from mm_core.data.loading.stopping import StopRequested, check_stop, stop_on


def test_only_work_within_a_run_that_was_asked_to_stop_is_left():
    check_stop()
    told = []
    with stop_on(lambda: bool(told)):
        check_stop()
        told.append("SIGTERM")
        with pytest.raises(StopRequested):
            check_stop()
        with stop_on(lambda: False):
            check_stop()
        with pytest.raises(StopRequested):
            check_stop()
    check_stop()
