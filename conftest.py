"""Tests that run in several processes (`-n 2`) take one thread each, set before torch is imported. What they
train with is not recorded in the home of whoever runs them, and none of them reaches the network. The cases
that run at night are those of tests/README.md. Slow machines draw examples slowly, and in CI every run draws
the same ones."""

import gc
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TABLES = Path(__file__).parent / "tests/README.md"

pytest.register_assert_rewrite("support")  # its asserts are shown as a test's

# No test asks a hub but its own, or reads what its user has fetched.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path(tempfile.gettempdir()) / "mm_core-no-hub")}

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_configure(config):
    """The processes of `pytest -n` share a server of warm processes, which starts while they collect."""
    from support import warm

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts with `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    several = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if several and not config.option.collectonly and warm.ADDRESS not in os.environ:
        os.environ[warm.ADDRESS] = warm.start()


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory):
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


def pytest_collection_modifyitems(config, items):
    """Marks the cases in the tables of tests/README.md: `slow`, and those of the night `nightly` too."""
    _, nights, slow = re.split(
        r"^## .*(?:night|slow tier)$", TABLES.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    rows = [re.findall(r"`([^`]+)`", line) for line in slow.splitlines() if line.startswith("| `")]
    kept = {function: {function + case for case in cases if case[0] == "["} for function, *cases in rows}
    at_night = set(re.findall(r"^\| `([^`]+)`", nights, re.MULTILINE))
    seen = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        seen |= {item.nodeid, function}
        if not at_night.isdisjoint((item.nodeid, function)):
            item.add_marker(pytest.mark.nightly)
            item.add_marker(pytest.mark.slow)
        if function in kept and item.nodeid not in kept[function]:
            item.add_marker(pytest.mark.slow)
    files = {case.partition("::")[0] for case in seen}
    listed = at_night.union(kept, *kept.values())
    gone = sorted(case for case in listed - seen if case.partition("::")[0] in files)
    if gone and not any("::" in argument for argument in config.args):  # else files are not collected whole
        raise pytest.UsageError(f"tests/README.md lists cases that are not there: {', '.join(gone)}")
    keepers = re.findall(r"^\| `([^`]+?)(?:\[[^`]*)?` .* \| ([^|]*) \|$", nights, re.MULTILINE)
    named = {function + case for function, text in keepers for case in re.findall(r"`(\[[^`]+\])`", text)}
    if lost := sorted(named & at_night):
        raise pytest.UsageError(f"tests/README.md keeps cases by others that run at night: {', '.join(lost)}")


def pytest_collection_finish(session):
    """What has been imported until here stays: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
