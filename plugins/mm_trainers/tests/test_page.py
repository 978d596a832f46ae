"""The page on other trainers: its commands work, and its tables hold what they say."""

import re
import shlex

import pytest
from mm_trainers import testing
from mm_trainers.tables import TABLES

from mm_core.cli.main import main
from mm_core.interchange import Default, Differs, Drop, Key
from support.pages import ROOT

PAGE = "docs/coming-from-other-trainers.md"


@pytest.mark.parametrize("page", [PAGE, "plugins/mm_trainers/README.md"])
def test_commands_of_the_pages_work(page, tmp_path):
    for name in ("ai_toolkit", "musubi_tuner", "llama_factory", "training_arguments"):
        getattr(testing, name)(tmp_path)
    (tmp_path / "lora_wan22.yaml").write_text((tmp_path / "style.yaml").read_text())
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if not line.startswith("pip ")]
    assert lines
    for line in lines:
        program, *arguments = shlex.split(line, comments=True)
        assert (program, main(arguments)) == ("mm", 0), line


def test_the_table_of_silent_changes_names_keys_that_are_written(tmp_path):
    from mm_trainers.aitoolkit import AiToolkit
    from mm_trainers.language import LlamaFactory
    from mm_trainers.musubi import MusubiTuner

    written = {"train.freeze"}  # of whole models, which these examples do not train
    for name, tool in (
        ("ai_toolkit", AiToolkit),
        ("musubi_tuner", MusubiTuner),
        ("llama_factory", LlamaFactory),
    ):
        for run in tool().migrate(getattr(testing, name)(tmp_path)):
            written |= run.lines.keys()
    silent = (ROOT / PAGE).read_text().partition("without a word")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:task|train|data)\.[\w.]+)", silent))
    assert len(named) >= 5 and named <= written


def test_every_row_says_why_or_where():
    for title, rows in TABLES.items():
        assert len(rows) > 2, title
        for row in rows:
            assert row.why if isinstance(row, (Drop, Differs)) else row.ours or row.note, row
            assert isinstance(row, (Drop, Differs, Key, Default))
