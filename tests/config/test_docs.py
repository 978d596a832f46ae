"""What docs/config.md shows is what happens."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from mm_core.cli.main import main
from mm_core.config.load import load_config
from mm_core.config.sections import RunConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/config.md").read_text(encoding="utf-8")


def test_the_faults_on_the_page_are_those_of_the_file_on_the_page(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```yaml\n(run: .*?)```", PAGE, re.S)
    (shown,) = re.findall(r"```text\n(mm: .*?)```", PAGE, re.S)
    monkeypatch.chdir(tmp_path)
    Path("demo.yaml").write_text(example, encoding="utf-8")
    assert main(["validate", "demo.yaml"]) == 1
    assert capsys.readouterr().err == shown


def test_the_commands_of_mm_config_on_the_page_run(tmp_path, monkeypatch, capsys):
    commands = re.findall(r"^mm config (.*?)(?: +#.*)?$", PAGE, re.M)
    assert [command.split()[0] for command in commands] == [
        *("list", "copy", "copy", "explain", "explain", "explain", "explain", "schema")
    ]
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    printed = {}
    for command in commands:
        assert main(["config", *command.split()]) == 0
        printed[command] = capsys.readouterr().out
    (explained,) = re.findall(r"```text\n(task.*?)```", PAGE, re.S)
    assert printed[commands[3]] == explained
    assert (tmp_path / "t2v_1_3b.yaml").read_bytes() == (tmp_path / "mine.yaml").read_bytes()
    assert (tmp_path / "mm.schema.json").is_file()


def test_the_page_names_every_section_and_which_are_required():
    fields = [field for field in dataclasses.fields(RunConfig) if field.metadata.get("yaml", True)]
    table = "".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert {field.name for field in fields} <= set(re.findall(r"`(\w+)`", table))
    needed = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    assert ", ".join(f"`{name}`" for name in needed[:-1]) + f" and `{needed[-1]}` are required" in PAGE


def test_the_overrides_on_the_page_check(place):
    (line,) = re.findall(r"mm-train --config x.yaml (.*?)```", PAGE, re.S)
    overrides = re.findall(r"'([^']*=[^']*)'|(\S+=\S+)", line.replace("custom_dit", "toy"))
    assert len(overrides) == 5
    config = load_config(place.run, [quoted or plain for quoted, plain in overrides])
    assert [tracker.type for tracker in config.log.trackers] == ["core/tensorboard", "core/jsonl"]
    assert config.log.trackers[0].options == {"flush_secs": 5}
    assert config.engine.options["sub_modules_to_wrap"] == ("predictor.blocks.{*}",)
