"""A rank's log: what was written and how it ended, and never a reason to end."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from mm_core.runtime.launch.rank_logs import RankLog, current_log, latest_log, log_path, rank_log
from mm_core.telemetry.progress import LiveProgress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def lines(run_dir: Path, rank: int = 0) -> list[str]:
    """The log's lines after the one that names the writer, without their times."""
    stamped = log_path(run_dir, rank).read_text().splitlines()
    texts = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)", line)[1] for line in stamped]
    return [text for text in texts if not text.startswith("--- ")]


@contextmanager
def streams() -> Iterator[tuple[StringIO, StringIO]]:
    """Standard streams whose text can be read; within a test, since pytest sets its own between fixtures."""
    out, err = StringIO(), Terminal()
    with redirect_stdout(out), redirect_stderr(err):
        yield out, err
        assert (sys.stdout, sys.stderr) == (out, err), "what stood there before is back"


@pytest.mark.parametrize("handler", ["", "logging.basicConfig(format='%(message)s')"])
def test_what_is_printed_logged_and_warned_of_is_there_and_where_it_was_going(handler, tmp_path):
    """In a process of its own: pytest takes warnings and logging for itself."""
    (tmp_path / "rank.py").write_text(
        "import logging, sys, warnings\n"
        "from pathlib import Path\n"
        "from mm_core.runtime.launch.rank_logs import rank_log\n"
        f"{handler}\n"
        "with rank_log(Path(sys.argv[1]), 1, 2):\n"
        "    print('one', end=' ')\n"
        "    print('line')\n"
        "    logging.getLogger('a.library').error('a record')\n"
        "    warnings.warn('take care')\n"
    )
    done = subprocess.run([sys.executable, "rank.py", "run"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "one line\n", done.stderr
    found = lines(tmp_path / "run", 1)
    assert found[:2] == ["one line", "a record"] and "UserWarning: take care" in found[2]
    assert done.stderr.count("a record") == done.stderr.count("UserWarning: take care") == 1


def test_the_log_of_this_process_is_known_and_remembered(tmp_path):
    with rank_log(tmp_path, 3, 4) as log:
        assert current_log() is log
    assert current_log() is None and latest_log() == tmp_path / "logs/rank_3.log"


def test_a_resume_appends_and_records_who_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bin/mm-train", "--config", "a.yaml"])
    for _ in range(2):
        with rank_log(tmp_path, 0, 1):
            print("again")
    text = log_path(tmp_path, 0).read_text()
    assert lines(tmp_path) == ["again", "again"]
    assert len(re.findall(r"--- rank 0 of 1, pid \d+ on \S+: .*mm-train --config a\.yaml", text)) == 2


def test_of_a_live_bar_the_notes_and_its_last_state_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    figures = {"loss": 1.0, "lr": 0.1, "step_time": 0.1, "data_wait": 0.0, "samples_per_second": 3.0}
    with streams() as (_, terminal), rank_log(tmp_path, 0, 1):
        progress = LiveProgress(50, 0, sys.stderr)
        for step in range(1, 51):
            progress.update(step, {**figures, "memory": 1e9})
            if step == 20:
                progress.note("step 20 was skipped")
        progress.close()
    assert terminal.getvalue().count("\x1b[2K") >= 50, "the terminal got all of it"
    first, last = lines(tmp_path)
    assert first == "step 20 was skipped"
    assert last.startswith("step 50/50 ") and "\x1b" not in last


@pytest.mark.parametrize(
    "pieces", [["10%\r", "20%\r", "done\n"], ["10%\r20%\rdo", "ne\r", "\n"], ["done\r\n"]]
)
def test_what_is_drawn_over_is_left_out_however_it_is_cut(pieces, tmp_path):
    with rank_log(tmp_path, 0, 1):
        for piece in pieces:
            sys.stdout.write(piece)
    assert lines(tmp_path) == ["done"]


def test_an_error_is_there_with_its_traceback(tmp_path):
    with pytest.raises(KeyError), rank_log(tmp_path, 0, 1):
        raise KeyError("gone")
    found = lines(tmp_path)
    assert found[:2] == ["ended by KeyError: 'gone'", "Traceback (most recent call last):"]
    assert any("test_rank_logs.py" in line for line in found)


def test_the_streams_stay_what_they_were_for_those_who_ask(tmp_path):
    with (tmp_path / "out").open("w", encoding="latin-1", errors="replace") as file:
        before, sys.stdout = sys.stdout, file
        try:
            with rank_log(tmp_path, 0, 1):
                assert (sys.stdout.encoding, sys.stdout.errors) == ("latin-1", "replace")
                assert sys.stdout.fileno() == file.fileno() and sys.stdout.buffer is file.buffer
        finally:
            sys.stdout = before


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path):
    full = tmp_path / "logs/rank_0.log"
    full.parent.mkdir()
    full.symlink_to("/dev/full")
    with streams() as (out, _), rank_log(tmp_path, 0, 1):
        print("seen")
    assert out.getvalue() == "seen\n"


def test_a_folder_that_cannot_be_made_is_no_fault_of_the_run(tmp_path):
    (tmp_path / "logs").write_text("a file stands there")
    with streams() as (out, _), rank_log(tmp_path, 0, 1) as log:
        print("seen")
        assert log.descriptor is None
    assert out.getvalue() == "seen\n"


def test_lines_after_the_end_are_lost_quietly(tmp_path):
    log = RankLog(tmp_path / "x.log")
    log.close()
    log.write("late")
    assert (tmp_path / "x.log").read_text() == ""
