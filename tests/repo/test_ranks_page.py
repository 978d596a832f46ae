"""The page on ranks shows what a run really prints, and its commands run."""

from __future__ import annotations

import ast
import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import mm_core.cli.main
from mm_core.cli.ranks import READER_LEFT
from mm_core.errors import TrainingError
from mm_core.runtime.launch.rank_logs import RankLog
from mm_core.runtime.launch.signals import STOPPED
from mm_core.runtime.launch.watchdog import Heartbeat, Watchdog
from support import pages

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/ranks.md"
BLOCKS = {block.marker: block.text for block in pages.blocks(PAGE) if block.marker}
OTHER = Heartbeat(1, 7, "data", 3, 0.0, "my_clips.py:12 in sample_at", False, "process 4711 on host7")


def plain(text: str) -> str:
    """The text on one line, with every number as 0: times differ."""
    return re.sub(r"\d+", "0", " ".join(text.split()))


def hang(run_dir: Path, silent: bool) -> tuple[TrainingError, str]:
    """What a watchdog reports, and what it logs, where rank 1 stands still in the data of step 7."""
    said: list[TrainingError] = []
    log = RankLog(run_dir / "logs/rank_0.log")
    dog = Watchdog(run_dir, 0, 2, 0.4, log=log, end=said.append)
    beat = run_dir / "logs/heartbeat_1.json"
    beat.write_text(json.dumps(asdict(OTHER)))
    dog.start()
    dog.step(7)
    dog.enter("data")
    dog.enter("wait")
    end = time.monotonic() + 20
    while not said and time.monotonic() < end:
        if not silent:
            beat.touch()
        time.sleep(0.02)
    dog.close()
    log.close()
    return said[0], log.path.read_text()


@pytest.mark.parametrize(("name", "silent"), [("behind", False), ("silent", True)])
def test_the_messages_about_a_hang_are_the_watchdog_s(
    name: str, silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if silent:
        monkeypatch.setattr(Watchdog, "_silence", lambda self, rank: 1805.0 if rank else 0.0)
    error, log = hang(tmp_path, silent)
    printed = f"mm: error: rank 0: {error.render()}".replace(str(tmp_path), "runs/shapes")
    assert plain(BLOCKS[f"the watchdog prints: {name}"]) == plain(printed)
    first = BLOCKS["the watchdog logs: stacks"].splitlines()[0]
    assert plain(first.replace("data", "wait")) in plain(log)


def test_the_lines_of_the_stacks_are_in_their_functions() -> None:
    frames = re.findall(r'File "(mm_core/[^"]+)", line (\d+) in (\w+)', BLOCKS["the watchdog logs: stacks"])
    assert len(frames) == 3
    for file, line, function in frames:
        nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        own = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == function]
        assert any(n.lineno < int(line) <= n.end_lineno for n in own), f"{file}: {function} moved"


def test_the_table_of_exit_codes_has_those_of_the_source() -> None:
    section = PAGE.read_text().partition("## Exit codes\n")[2].partition("\n## ")[0]
    table = dict(re.findall(r"^\| ([\w+ ]+) \| (.*?[^\\]) \|", section, re.M))
    own = (mm_core.cli.main.__doc__ or "").partition("Exit codes:")[2]
    codes = set(re.findall(r"\b\d{1,3}\b", own))
    assert {"0", "1", "2", str(STOPPED), "130", str(READER_LEFT)} <= codes
    assert codes | {"128 + n", "other"} == set(table) - {"code"}
    assert "saved and stopped" in table[str(STOPPED)] and "output" in table[str(READER_LEFT)]


SHORT = " train.steps=1 lr_schedule.warmup_steps=0"


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [line for block in pages.blocks(PAGE) if block.language == "bash" for line in [block.text]]
)
def test_the_commands_of_the_page_run(line: str, run: Any, workspace: Path) -> None:
    (plugin,) = [block.text for block in pages.blocks(PAGE) if block.language == "python"]
    (workspace / "debug_clips.py").write_text(plugin)
    short = line.replace("quickstart.yaml", f"quickstart.yaml{SHORT}")
    if "debug_clips" not in line:
        run(short)
        return
    # One rank without workers: the debugger reads what is typed, and `q` ends the run.
    done = run(f"printf 'p 6 * index\\nq\\n' | {{ {short.strip()}; }}", 1)
    assert "-> return super().sample_at(index, rng)" in done.stdout and "BdbQuit" in done.stderr
