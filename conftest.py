"""Tests that run in several processes (`-n 2`) take one thread each, set before torch is imported. What they
train with is not recorded in the home of whoever runs them."""

import os

import pytest

pytest.register_assert_rewrite("support")  # what its asserts say is shown as a test's

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory):
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before
