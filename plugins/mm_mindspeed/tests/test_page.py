"""The pages on migration: their commands work, and the tables hold what they say."""

import re
import shlex

import pytest
from folders import CLIPS, WAN, write
from mm_mindspeed.tables import TABLES

from mm_core.cli.main import main
from mm_core.interchange import Default, Differs, Drop, Key
from support.pages import ROOT

PAGES = ("docs/migrate.md", "docs/coming-from-mindspeed-mm.md", "plugins/mm_mindspeed/README.md")


def commands_of(page: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if not line.startswith("pip ")]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_pages_work(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in ("vae", "text_encoder"):
        (tmp_path / "Wan" / part).mkdir(parents=True)
    write(tmp_path / "examples/wan2.1/1.3b/t2v", WAN, CLIPS)
    commands = commands_of(page)
    assert commands
    for line in commands:
        program, *arguments = shlex.split(line, comments=True)
        arguments = ["train", *arguments, "--dry-run"] if program == "mm-train" else arguments
        assert main(arguments) == 0, line


def test_the_table_of_silent_changes_names_what_the_tables_write_out():
    rows = [row for rows in TABLES.values() for row in rows]
    written = {row.ours for row in rows if isinstance(row, (Key, Default)) and row.ours}
    page = (ROOT / PAGES[1]).read_text().partition("## Flags")[0]
    named = re.findall(r"`((?:task|train|lr_schedule|data\.train)\.[\w.]+)", page)
    assert len(named) >= 6 and set(named) <= written


def test_every_row_says_why_or_where():
    for rows in TABLES.values():
        assert len(rows) > 10
        for row in rows:
            said = row.why if isinstance(row, (Drop, Differs)) else row.ours or row.note
            assert said or row.theirs in ("--recompute-method", "--recompute-num-layers"), row
