"""`mm config`: explains, writes the schema, lists and copies the YAML files of installed plugins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_core.cli.main import main
from mm_core.config.dump import to_yaml
from mm_core.config.load import load_config
from mm_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs/custom_dit/quickstart.yaml"
YAML = "# Trains a small one of 1.5 layers, on\n# clips. More about it.\ninclude: [base.yaml]\n"
YAML += "log: {include: log.yaml}\n"


@pytest.fixture
def small(site: Any) -> Any:
    """A third party's plugin, installed as a wheel is, whose package carries YAML files."""
    site.good("alpha")
    folder = site.folder / "mm_alpha/configs"
    (folder / "parts").mkdir(parents=True)
    (folder / "small.yaml").write_bytes(YAML.encode() + b"run: {name: \xc3\xa4}\r\n")
    (folder / "parts/base.yml").write_text("run: {name: x}\n")
    site.registry()  # this process finds it
    return site


def test_explain_prints_a_line_a_fact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "task.predictor.ffn_dim", "--config", str(QUICKSTART)]) == 0
    assert capsys.readouterr().out == (
        "task.predictor.ffn_dim\n"
        "  doc       inner width of the feed-forward\n"
        "  type      int >= 1\n"
        "  accepted  an integer >= 1\n"
        "  default   13824\n"
        "  value     512\n"
        f"  set at    {QUICKSTART}:16\n"
        "  of        predictor custom_dit/custom_dit\n"
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 2, 0, 3), (0, 3, 1, 2)])
def test_explain_takes_overrides_between_options(
    capsys: pytest.CaptureFixture[str], order: tuple[int, ...]
) -> None:
    words = ["task.predictor.ffn_dim", "--config", str(QUICKSTART), "task.predictor.ffn_dim=256"]
    assert main(["config", "explain", *(words[place] for place in order)]) == 0
    out = capsys.readouterr().out
    assert "  value     256\n" in out
    assert "  set at    override 'task.predictor.ffn_dim=256'\n" in out


def test_overrides_need_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "train", "train.steps=3"]) == 1
    assert capsys.readouterr().err == (
        "mm: error: there is no config for train.steps=3 to override\n"
        "  hint: name the config: --config FILE; one key is explained at a time\n"
    )


def test_overrides_without_a_key_explain_the_whole_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "--config", str(QUICKSTART), "train.steps=3"]) == 0
    assert capsys.readouterr().out.startswith("keys\n")


def test_explain_prints_the_keys_of_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "checkpoint"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "checkpoint"
    assert "async: true" in next(line for line in lines if line.startswith("  default"))
    (row,) = (line for line in lines if line.startswith("    keep "))
    assert row.split() == [
        "keep",
        "int",
        ">=",
        "1",
        "3",
        "#",
        "number",
        "of",
        "newest",
        "complete",
        "checkpoints",
        "to",
        "keep",
    ]


def test_explain_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "train.steps", "--config", str(QUICKSTART), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["explained"]
    assert found == {
        "key": "train.steps",
        "owner": "",
        "type": "int >= 0 or null",
        "accepted": "an integer >= 0 or null",
        "default": "null",
        "doc": "optimizer steps in total; or set epochs",
        "value": 1500,
        "origin": f"{QUICKSTART}:38",
        "keys": [],
    }


def test_a_misspelt_key_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "ema.dcay"]) == 1
    assert capsys.readouterr().err == (
        "mm: error: ema: unknown key 'dcay'\n"
        "  accepted: decay, ramp, every, device\n"
        "  hint: did you mean 'decay'?\n"
    )


def test_a_one_file_plugin_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom mm_core import Component, hookimpl\n\n"
        "@dataclass(frozen=True)\nclass Config:\n    depth: int = 3  # blocks\n\n"
        "@hookimpl\ndef mm_predictors():\n"
        "    return [Component(name='mine', target='mine:Config', config='mine:Config')]\n"
    )
    assert main(["config", "explain", "local/mine.depth", "--path", str(tmp_path / "mine.py")]) == 0
    assert "doc       blocks\n" in capsys.readouterr().out


def test_the_schema_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    assert main(["config", "schema", "--out", str(file)]) == 0
    out = capsys.readouterr().out
    assert out == f"{file}: for editors, begin a YAML with `# yaml-language-server: $schema={file}`\n"
    assert json.loads(file.read_text())["$defs"]["run"]["properties"].keys() >= {"run", "task", "train"}
    assert main(["config", "schema", "--out", str(tmp_path / "none/schema.json")]) == 1
    assert capsys.readouterr().err == (
        f"mm: error: {tmp_path}/none/schema.json: the file cannot be written: No such file or directory\n"
        "  hint: choose another file with --out\n"
    )


def test_the_schema_has_the_components_of_every_plugin(
    small: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "schema"]) == 0
    names = json.loads(capsys.readouterr().out)["$defs"]["predictor.names"]["anyOf"][0]["enum"]
    assert {"dit", "old_dit", "alpha/dit", "alpha/old_dit"} <= set(names)


def test_list_finds_the_files_of_every_plugin(small: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "list"]) == 0
    printed = capsys.readouterr().out
    rows = {row[0]: " ".join(row[1:]) for row in map(str.split, printed.splitlines())}
    assert rows["alpha/small"] == "Trains a small one of 1.5 layers, on clips."
    assert rows["wan/t2v_1_3b"].startswith("Fine-tunes all of Wan 2.1 T2V 1.3B on 5 seconds of 480p.")
    assert rows["alpha/parts/base"] == ""
    assert main(["config", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["configs"]
    (own,) = (each for each in found if each["name"] == "alpha/small")
    assert own == {
        "name": "alpha/small",
        "file": str(small.folder / "mm_alpha/configs/small.yaml"),
        "distribution": "mm-alpha",
        "version": "1.0",
        "description": "Trains a small one of 1.5 layers, on clips.",
    }


def test_every_yaml_of_the_repository_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "list", "--json"]) == 0
    listed = {Path(each["file"]).resolve() for each in json.loads(capsys.readouterr().out)["configs"]}
    assert listed >= {path.resolve() for path in ROOT.glob("plugins/*/mm_*/configs/*.yaml")}


def test_a_plugin_that_is_disabled_lists_nothing(
    small: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MM_PLUGINS_DISABLE", "alpha")
    assert main(["config", "list"]) == 0
    assert "alpha/" not in capsys.readouterr().out


def test_copy_writes_the_same_bytes_and_names_what_it_left(
    small: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = small.folder / "mm_alpha/configs/small.yaml"
    monkeypatch.chdir(tmp_path)
    assert main(["config", "copy", "alpha/small"]) == 0
    assert capsys.readouterr().out == (
        "small.yaml: copied from mm-alpha 1.0; check it: mm validate small.yaml\n"
        "It names files relative to itself, which were not copied: base.yaml, log.yaml\n"
    )
    assert (tmp_path / "small.yaml").read_bytes() == source.read_bytes()
    (tmp_path / "folder").mkdir()
    assert main(["config", "copy", "alpha/small.yaml", "folder"]) == 0
    assert (tmp_path / "folder/small.yaml").read_bytes() == source.read_bytes()
    capsys.readouterr()
    assert main(["config", "copy", "alpha/small", "mine.yaml", "--json"]) == 0
    copied = {"name": "alpha/small", "file": "mine.yaml", "relative": ["base.yaml", "log.yaml"]}
    assert json.loads(capsys.readouterr().out) == copied


def test_copy_replaces_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").write_text("mine")
    assert main(["config", "copy", "custom_dit/quickstart"]) == 1
    assert capsys.readouterr().err == (
        "mm: error: quickstart.yaml: this file exists, and is not replaced\n"
        "  hint: name another file, or remove this one first\n"
    )
    assert (tmp_path / "quickstart.yaml").read_text() == "mine"
    assert main(["config", "copy", "custom_dit/quickstart", "none/x.yaml"]) == 1
    assert capsys.readouterr().err == (
        "mm: error: none/x.yaml: the folder none does not exist\n  hint: create it first: mkdir -p none\n"
    )
    assert main(["config", "copy", "custom_dit/quickstrat"]) == 1
    assert "hint: did you mean 'custom_dit/quickstart' or" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["explain", "task.predictor", "--config", str(QUICKSTART)], ["schema"], ["list"]]
)
def test_no_command_imports_torch(site: Any, arguments: list[str]) -> None:
    code = (
        "import sys; from mm_core.cli.main import main; code = main(['config', *sys.argv[1:]]);"
        "heavy = {'torch', 'numpy', 'transformers', 'diffusers'} & set(sys.modules);"
        "print(code, sorted(heavy), file=sys.stderr)"
    )
    assert site.run("-c", code, *arguments).stderr.splitlines()[-1] == "0 []"


def test_a_config_includes_one_that_a_plugin_ships(tmp_path: Path) -> None:
    """A name that no plugin ships is an error with its line."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("include: config:custom_dit/quickstart\nrun: {name: mine}\ntrain: {steps: 7}\n")
    given, base = (
        load_config(mine),
        load_config("configs/custom_dit/quickstart.yaml", ["run.name=mine", "train.steps=7"]),
    )
    assert to_yaml(given) == to_yaml(base)
    lora = tmp_path / "lora.yaml"
    lora.write_text("include: config:wan/t2v_1_3b_lora.yaml\n")
    assert load_config(lora).train.adapters
    mine.write_text("include:\n- config:wan/t2v_1_3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(mine)
    (fault,) = caught.value.faults
    assert fault.what == "no installed plugin ships a config named 'wan/t2v_1_3'"
    assert "mine.yaml:2" in fault.where and "did you mean" in fault.hint
