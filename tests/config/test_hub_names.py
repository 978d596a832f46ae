"""Names on the hub in a config: what they stand for, and what is kept of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from mm_core.checkpoint.run_manifest import commits_read
from mm_core.cli.main import main
from mm_core.config.dump import to_mapping, to_yaml
from mm_core.config.load import load_config
from mm_core.errors import ConfigError, MMError, RunWarning
from mm_core.hub import HubName, decide, hint_for

COMMIT = "0123456789" * 4


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of the hub with a text model, fetched by another tool, and nothing else."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MM_HUB_REVISIONS", "{}")
    store = tmp_path / "cache/models--org--text"
    (store / "refs").mkdir(parents=True)
    (store / "refs/main").write_text(COMMIT)
    (store / f"snapshots/{COMMIT}").mkdir(parents=True)
    (store / f"snapshots/{COMMIT}/config.json").write_text("{}")
    return tmp_path / "cache"


def run_of(folder: Path, model: str = "hub:org/text", **sections: object) -> Path:
    document = {
        "run": {"name": "named", "dir": str(folder / "runs")},
        "task": {"type": "pretrained", "from_pretrained": model, "auto_class": "AutoModelForCausalLM"},
        "data": {"train": {"type": "text_rows", "file": "rows/rows.jsonl", "tokenizer": "hub:org/text"}},
        "train": {"steps": 1},
        **sections,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hub:org/name", ("org/name", "main", "")),
        ("hub:org/name/", ("org/name", "main", "")),
        ("hub:org/na.me-2@v1.0/transformer", ("org/na.me-2", "v1.0", "transformer")),
        (f"hub:org/name@{COMMIT}/a/b.safetensors", ("org/name", COMMIT, "a/b.safetensors")),
        ("hub:org/name@refs/pr/7/vae", ("org/name", "refs/pr/7", "vae")),
    ],
)
def test_a_name_is_a_repository_a_revision_and_a_place_in_it(text, parts):
    name = HubName.of(text)
    assert (name.repo, name.revision, name.inside) == parts
    assert HubName.of(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "hub:",
        "hub:name",
        "hub:org/name@",
        "hub:org/name/../other",
        "hub:o/n@a b",
        "hub:o/n//x",
        "hub:o/n@..",
        "hub:../..",
    ],
)
def test_what_is_no_name_is_refused_where_it_is_written(text, tmp_path):
    with pytest.raises(
        ConfigError, match=r"run\.yaml:\d+: task\.from_pretrained: .* names nothing"
    ) as caught:
        load_config(run_of(tmp_path, text))
    assert "accepted: hub:org/name, hub:org/name@revision" in caught.value.render()


def test_a_name_is_read_as_its_folder_and_kept_with_its_commit(tmp_path, cache):
    config = load_config(run_of(tmp_path))
    folder = cache / f"models--org--text/snapshots/{COMMIT}"
    assert Path(config.task.options["from_pretrained"]) == folder
    assert Path(config.data.train.options["tokenizer"]) == folder
    assert {key: use.weights for key, use in config.hub.items()} == {
        "task.from_pretrained": True,
        "data.train.tokenizer": False,
    }
    assert to_mapping(config)["task"]["from_pretrained"] == f"hub:org/text@{COMMIT}"
    assert commits_read(config) == {"org/text@main": COMMIT}
    stored = tmp_path / "config.yaml"
    stored.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(stored).task == config.task


def test_a_name_that_is_not_fetched_is_a_place_where_nothing_is(tmp_path, cache):
    config = load_config(run_of(tmp_path, "hub:org/other@v2/part"))
    assert config.task.options["from_pretrained"] == str(cache / "models--org--other/snapshots/v2/part")
    assert to_mapping(config)["task"]["from_pretrained"] == "hub:org/other@v2/part"


def test_a_name_from_the_environment_stays_there(tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL", "hub:org/text")
    config = load_config(run_of(tmp_path, "${oc.env:MODEL}"))
    assert to_mapping(config)["task"]["from_pretrained"] == "${oc.env:MODEL}"
    assert "task.from_pretrained" in config.hub


def test_ranks_read_the_commit_that_was_decided(tmp_path):
    decide({"org/text@main": "f" * 40})
    assert HubName.of("hub:org/text").path.name == "f" * 40
    assert HubName.of(f"hub:org/text@{COMMIT}").path.name == COMMIT


def test_random_weights_need_the_small_files_only(tmp_path):
    document = yaml.safe_load(run_of(tmp_path).read_text())
    document["task"] |= {"weights": "random", "trust_remote_code": True}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    use = load_config(tmp_path / "run.yaml").hub["task.from_pretrained"]
    assert not use.weights and use.code


def test_a_plan_goes_on_without_a_hub_and_a_run_does_not(tmp_path):
    path = run_of(tmp_path, "hub:org/other")
    with pytest.warns(
        RunWarning, match="hub:org/other: it is not in the cache, and the hub cannot be reached"
    ):
        load_config(path, fetch="configs")
    with pytest.raises(MMError, match="hf download org/other --revision main"):
        load_config(path, fetch=True)


def test_a_resume_reads_the_commit_of_its_run(tmp_path, cache):
    (cache / "models--org--text/refs/main").write_text("f" * 40)
    run = tmp_path / "runs/named"
    (run / "checkpoints/step_00000002").mkdir(parents=True)
    (run / "manifest.json").write_text(json.dumps({"hub": {"org/text@main": COMMIT}}))
    (cache / f"models--org--text/snapshots/{COMMIT}/model.safetensors").write_bytes(b"weights")
    config = load_config(run_of(tmp_path), fetch=True)
    assert commits_read(config) == {"org/text@main": COMMIT}


def test_a_bare_name_gets_the_hint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(RunWarning, match=r"there is no folder org/text; .* write hub:org/text"):
        load_config(run_of(tmp_path, "org/text"), fetch="configs")
    assert main(["validate", str(run_of(tmp_path, "org/text"))]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "missing: org/text (needed to train)",
        "  hint: for a model on the hub, write hub:org/text",
        "missing: rows/rows.jsonl (needed to train)",
    ]
    (tmp_path / "org").mkdir()
    assert hint_for("org/text") is None, "the folder's parent is there: it is a path"
    assert hint_for("/org/text") is hint_for("./org/text") is hint_for("text") is None
