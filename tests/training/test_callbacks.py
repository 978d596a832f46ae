"""Callbacks are called in order, end the run by name when they fail, and may run a program."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mm_core.contracts import Callback
from mm_core.errors import MMError
from mm_core.plugin.registry import build
from mm_core.runtime.launch.signals import StopFlag
from mm_core.training.callback_list import CallbackList
from mm_core.training.optional import exporting


class Noting(Callback):
    def __init__(self, name: str, heard: list) -> None:
        self.name, self.heard = name, heard

    def step_ended(self, step, metrics):
        self.heard.append((self.name, step, metrics))

    def saved(self, step, path):
        raise KeyError("gone")


def test_callbacks_are_called_in_the_order_of_the_list():
    heard: list = []
    callbacks = CallbackList([("b", Noting("b", heard)), ("a", Noting("a", heard))])
    callbacks.call("step_ended", 3, {"loss": 1.0})
    callbacks.call("run_started", Path("x"), 0, 9)
    assert heard == [("b", 3, {"loss": 1.0}), ("a", 3, {"loss": 1.0})]


def test_a_callback_that_raises_is_named():
    with pytest.raises(MMError) as caught:
        CallbackList([("my/noting", Noting("x", []))]).call("saved", 4, Path("p"))
    assert str(caught.value) == (
        "callbacks: callback my/noting raised KeyError at saved: 'gone'\n"
        "  hint: fix the callback or remove it from `callbacks`; MM_DEBUG=1 shows the traceback"
    )
    assert isinstance(caught.value.__cause__, KeyError)


def command(tmp_path: Path, script: str, *events: str, **options) -> Callback:
    mapping = {"type": "command", "run": [sys.executable, "-c", script, str(tmp_path / "out")], **options}
    return build("callback", {**mapping, **({"events": list(events)} if events else {})})


WRITE = """
import json, os, sys
row = {k: v for k, v in os.environ.items() if k.startswith("MM_")}
open(sys.argv[1], "a").write(json.dumps(row) + "\\n")
"""


def test_a_command_receives_the_event(tmp_path):
    callback = command(tmp_path, WRITE, "saved", "run_ended")
    callback.run_started(tmp_path / "run", 0, 9)
    callback.step_ended(1, {"loss": 0.25})
    callback.validated(2, {"validation/loss": 0.5})
    callback.saved(2, tmp_path / "run/checkpoints/step_00000002")
    callback.run_ended(2, MMError("it broke"))
    saved, ended = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert (saved["MM_EVENT"], saved["MM_STEP"], saved["MM_METRIC_LOSS"]) == ("saved", "2", "0.25")
    assert saved["MM_PATH"].endswith("step_00000002") and saved["MM_METRIC_VALIDATION_LOSS"] == "0.5"
    assert (ended["MM_EVENT"], ended["MM_ERROR"]) == ("run_ended", "it broke")
    assert ended["MM_RUN_DIR"] == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("import sys; sys.exit('no route')", {}, "command at run_ended ended with exit code 1: no route"),
        ("import time; time.sleep(9)", {"timeout": 0.3}, "timed out after 0.3 seconds"),
    ],
)
def test_a_command_that_fails_is_a_warning(script, options, words, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        command(tmp_path, script, **options).run_ended(1, None)
    assert words in caplog.text


def test_what_a_command_has_started_ends_with_its_time(tmp_path, caplog):
    """A shell's child holds the output open: it would be waited for."""
    shell = ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"]
    build("callback", {"type": "command", "run": shell, "timeout": 1.0}).run_ended(1, None)
    assert "timed out after 1.0 seconds" in caplog.text
    child = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    until = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_command_is_no_rank_of_the_run_and_receives_none_of_its_signals(tmp_path, monkeypatch):
    """`mm eval` at every checkpoint would else wait for the other ranks of the run."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "MM_LAUNCH_DIR"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("MM_PLUGINS", "custom_dit")
    script = (
        "import json, os, sys\n"
        "seen = {'environment': sorted(os.environ), 'group': os.getpgid(0), 'input': sys.stdin.read()}\n"
        "open(sys.argv[1], 'w').write(json.dumps(seen))"
    )
    command(tmp_path, script).run_ended(1, None)
    seen = json.loads((tmp_path / "out").read_text())
    assert "MM_PLUGINS" in seen["environment"] and "MM_EVENT" in seen["environment"]
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "MM_LAUNCH_DIR"} & set(
        seen["environment"]
    )
    assert seen["group"] != os.getpgid(0) and seen["input"] == ""


def test_a_program_that_is_not_there_is_a_warning(caplog):
    build("callback", {"type": "command", "run": ["no-such-program-here"]}).run_ended(1, None)
    assert "no-such-program-here" in caplog.text


def test_an_empty_command_is_a_fault_of_the_config():
    with pytest.raises(MMError, match="run is empty: set it to a program"):
        build("callback", {"type": "command", "run": []})


def test_exports_follow_the_saves_and_hold_up_no_end(tmp_path, monkeypatch):
    """A failure is a note; of waiting saves the newest two are kept; a stopped run waits for none."""
    notes: list[str] = []
    flag, free, begun = StopFlag(), threading.Event(), threading.Semaphore(0)
    free.set()

    def stand_in(command: Sequence[str], *_: object) -> tuple[int, str]:
        begun.release()
        free.wait(60)
        name = Path(command[command.index("--run") + 1]).name
        return (1, "no space left") if name == "step_2" else (0, f"made\n{name} as lora/peft")

    monkeypatch.setattr(exporting, "execute", stand_in)
    export = exporting.ExportAtSaves("lora/peft", averaged=True, stop=flag, note=notes.append)
    for step in (1, 2):
        export.saved(step, tmp_path / f"step_{step}")
        begun.acquire()
    export.run_ended(2, None)
    assert notes == ["step_1 as lora/peft", "warning: step_2 was not exported: no space left"]
    free.clear()
    export.saved(3, tmp_path / "step_3")
    begun.acquire()
    for step in (4, 5, 6):
        export.saved(step, tmp_path / f"step_{step}")
    flag.requested = "SIGTERM"
    export.run_ended(6, None)  # while the export of step 3 waits for what comes next
    free.set()
    assert notes[2:4] == [
        "step_4 is not exported: saves are faster than exports",
        "warning: the run ends before its last export is complete; `mm export` makes the file",
    ]


def test_only_callbacks_of_steps_need_the_outcome_of_each_step():
    export = exporting.ExportAtSaves("lora/peft", averaged=False, stop=StopFlag(), note=print)
    assert not CallbackList([("checkpoint.export", export)]).follow_steps
    assert CallbackList([("checkpoint.export", export), ("a", Noting("a", []))]).follow_steps
