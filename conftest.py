"""Tests that run in several processes (`-n 2`) take one thread each, set before torch is imported. What they
train with is not recorded in the home of whoever runs them. The cases that run at night are those of
tests/README.md."""

import os
import re
from pathlib import Path

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


AT_NIGHT = re.compile(r"^\| `([^`|]+::[^`|]+)` \|", re.MULTILINE)
"""The cases in the table of tests/README.md."""


def pytest_collection_modifyitems(config, items):
    cases = set(AT_NIGHT.findall((Path(__file__).parent / "tests/README.md").read_text(encoding="utf-8")))
    found = [item for item in items if item.nodeid in cases]
    for item in found:
        item.add_marker(pytest.mark.nightly)
    files = {item.nodeid.partition("::")[0] for item in items}
    chosen = any("::" in argument for argument in config.args)  # else files are collected whole
    gone = {case for case in cases - {item.nodeid for item in found} if case.partition("::")[0] in files}
    if gone and not chosen:
        raise pytest.UsageError(f"tests/README.md lists cases that are not there: {', '.join(sorted(gone))}")
