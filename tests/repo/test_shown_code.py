"""The code that pages show is the code that runs."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs/generate_code.py"
sys.path.insert(0, str(SCRIPT.parent))  # as Python does for a script
CODE = runpy.run_path(str(SCRIPT))

SOURCE = '''\
class Engine:
    """An engine."""

    @property
    def name(self) -> str:
        """Its name."""
        first = 1  # why
        return "x" * first
'''


def test_the_blocks_of_code_are_what_the_sources_hold() -> None:
    result = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_block_is_a_definition_without_its_docstring_at_the_margin() -> None:
    assert CODE["code_of"](SOURCE, "Engine.name") == [
        "@property",
        "def name(self) -> str:",
        "    first = 1  # why",
        '    return "x" * first',
    ]
    assert CODE["code_of"](SOURCE, "Engine.name", "first", "return") == [
        "first = 1  # why",
        'return "x" * first',
    ]


@pytest.mark.parametrize(("name", "first"), [("Engine.title", None), ("Engine.name", "second")])
def test_a_block_whose_code_is_gone_is_an_error(name: str, first: str | None) -> None:
    with pytest.raises(SystemExit, match=r"Engine\.(title|name)"):
        CODE["code_of"](SOURCE, name, first, first)


def test_a_changed_source_changes_the_page() -> None:
    page = (ROOT / "docs/loop.md").read_text(encoding="utf-8")
    assert CODE["filled"](page) == page
    stale = page.replace("grad_norm = engine.grad_norm()", "grad_norm = 0.0")
    assert stale != page and CODE["filled"](stale) == page


def test_the_annotated_loop_shows_every_line_of_the_loop() -> None:
    page = (ROOT / "docs/loop.md").read_text(encoding="utf-8")
    source = (ROOT / "mm_core/training/loop.py").read_text(encoding="utf-8")
    shown = {line.strip() for line in page.splitlines()}
    assert [line for line in CODE["code_of"](source, "run_steps") if line.strip() not in shown] == []
