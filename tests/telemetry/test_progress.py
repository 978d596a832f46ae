"""Progress: the line that log files get, the bar that terminals get, the silence of other ranks."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from mm_core.telemetry.progress import LiveProgress, duration, make_progress, short

METRICS = {
    "loss": 0.12341,
    "lr": 2e-3,
    "step_time": 0.08,
    "samples_per_second": 200.0,
    "data_wait": 0.0024,
    "memory": 1.2e9,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_of_a_logged_step():
    stream = io.StringIO()
    progress = make_progress(160, rank=0, stream=stream)
    progress.update(10, METRICS)
    progress.note("saved runs/x/checkpoints/step_00000010")
    progress.close()
    assert stream.getvalue() == (
        "step 10/160  loss 0.1234  lr 2.0e-03  0.08 s/step  200 samples/s  data 3%  mem 1.2 GB  eta 0:12\n"
        "saved runs/x/checkpoints/step_00000010\n"
    )


def test_other_ranks_are_quiet():
    stream = Terminal()
    progress = make_progress(100, rank=1, stream=stream)
    progress.update(10, METRICS)
    progress.note("saved")
    progress.close()
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_with_notes_above(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = make_progress(160, rank=0, start=5, stream=stream)
    assert isinstance(progress, LiveProgress)
    progress.update(10, METRICS)
    progress.note("saved [bold]here[/bold]")
    progress.update(160, METRICS | {"loss": 0.01})
    progress.close()
    progress.close()
    shown = stream.getvalue()
    assert "loss 0.1234  lr 2.0e-03  0.08 s/step  200 samples/s  data 3%  mem 1.2 GB  eta 0:12" in shown
    assert " 10/160" in shown and "160/160" in shown
    assert "saved [bold]here[/bold]" in shown
    assert "loss 0.0100" in shown and shown.rstrip("\n").rfind("loss 0.0100") > shown.find("saved")
    assert shown.endswith("\x1b[?25h"), "the cursor is shown again"


def test_the_time_left_follows_a_running_mean():
    stream = io.StringIO()
    progress = make_progress(101, rank=0, stream=stream)
    progress.update(1, METRICS | {"step_time": 1.0})
    progress.update(1, METRICS | {"step_time": 11.0})
    assert [line.split("eta ")[1] for line in stream.getvalue().splitlines()] == ["1:40", "3:20"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (-3, "0:00"), (12.4, "0:12"), (3599.6, "1:00:00"), (93780, "26:03:00")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1234"), (200.0, "200"), (12.34, "12.3"), (0.08, "0.08"), (0.0042, "0.0042")]
)
def test_numbers_in_three_figures(value, text):
    assert short(value) == text


def test_log_files_do_not_pay_for_rich():
    script = (
        "import io, sys\n"
        "from mm_core.telemetry.progress import make_progress\n"
        f"make_progress(10, 0, stream=io.StringIO()).update(1, {METRICS!r})\n"
        "assert 'rich' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
