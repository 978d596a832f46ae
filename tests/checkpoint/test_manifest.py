"""A run's manifest: what it was made of, in plain values, without what the environment keeps to itself."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from mm_core.builtin.configs.data import MediaSource
from mm_core.checkpoint.resume_check import check_resume, differences_of
from mm_core.checkpoint.run_manifest import (
    environment_traces,
    fingerprint,
    fingerprints,
    library_versions,
    run_manifest,
)
from mm_core.config.dump import to_mapping
from mm_core.config.load import load_config
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.loading.bucketed import BucketedSamples
from mm_core.errors import CheckpointError
from mm_core.plan import make_plan
from mm_core.runtime.ranks import Ranks
from mm_core.schema.fields import ComponentConfig
from support.archives import archive
from support.ranks import run_ranks

CAPTION = '[{"path": "a.mp4", "cap": "a red circle"}, {"path": "b.mp4", "cap": "a blue square"}]'


@pytest.fixture
def yaml(tmp_path, monkeypatch) -> Path:
    """A run whose learning rate, folder and text encoder's width come from the environment."""
    (tmp_path / "data.json").write_text(CAPTION)
    monkeypatch.setenv("SECRET_FOLDER", "s3cr3t-folder")
    monkeypatch.setenv("RATE", "1e-3")
    monkeypatch.setenv("WIDTH", "32")
    sizes = "num_layers: 2, num_heads: 2, head_dim: 12, patch_size: [2, 2, 2], in_channels: 12"
    widths = "out_channels: 12, text_dim: 32, freq_dim: 32, ffn_dim: 48, rope_max_seq_len: 64"
    predictor = f"{{type: custom_dit, {sizes}, {widths}}}"
    path = tmp_path / "run.yaml"
    path.write_text(
        "run: {name: a, dir: '${oc.env:SECRET_FOLDER}/runs'}\n"
        f"task:\n  type: text_to_video\n  predictor: {predictor}\n"
        "  autoencoder: {type: pixel, spatial: 2}\n"
        "  text_encoder: {type: bytes, hidden_size: '${oc.env:WIDTH}'}\n"
        "  scheduler: {type: flow_match}\n"
        f"data:\n  train: {{type: video_text, annotations: {tmp_path / 'data.json'}, num_frames: 8,"
        " height: 16, width: 16}\n"
        "optimizer: {type: adamw, lr: '${oc.env:RATE}'}\n"
        "train: {steps: 2}\n"
    )
    return path


def manifest_of(yaml: Path) -> dict:
    config = load_config(yaml)
    dataset = config.registry.build("dataset", config.data.train)
    data = fingerprints(config.data.splits, {"train": dataset}, Ranks.current())
    return run_manifest(config, make_plan(config, 1, train=dataset), data)


def test_the_manifest_lists_what_the_run_is_made_of(yaml):
    found = manifest_of(yaml)
    assert found == json.loads(json.dumps(found, allow_nan=False))
    assert found["config"]["train"]["steps"] == 2 and found["config"]["train"]["clip_grad_norm"] == 1.0
    assert found["data"]["train"] == {
        "type": "core/video_text",
        "rows": 2,
        "files": {"annotations": hashlib.sha256(CAPTION.encode()).hexdigest()},
    }
    assert {"mm-core", "mm-custom-dit"} <= {row["distribution"] for row in found["plugins"]}
    assert found["devices"]["torch"] and found["versions"]["python"] and found["world"] == 1


def test_what_comes_from_the_environment_is_not_shown(yaml):
    found = manifest_of(yaml)
    assert found["config"]["run"]["dir"] == "${oc.env:SECRET_FOLDER}/runs"
    assert "s3cr3t" not in json.dumps(found)
    assert found["environment"].keys() == {"run.dir", "optimizer.lr", "task.text_encoder.hidden_size"}
    assert all(len(trace) == 4 for trace in found["environment"].values())


def test_another_value_in_the_environment_is_noticed_at_a_resume(yaml, monkeypatch):
    before = manifest_of(yaml)
    assert differences_of(before, manifest_of(yaml)) == []
    monkeypatch.setenv("RATE", "2e-3")
    (difference,) = differences_of(before, manifest_of(yaml))
    assert (difference.key, difference.verdict) == ("optimizer.lr", "allow")


def test_a_place_in_a_list_has_a_trace_of_its_own(yaml, monkeypatch):
    freeze = "train.freeze=['predictor.head', '${oc.env:MODULE}']"
    traces = []
    for module in ("predictor.blocks.0", "predictor.blocks.1"):
        monkeypatch.setenv("MODULE", module)
        config = load_config(yaml, [freeze])
        traces.append(environment_traces(to_mapping(replace(config, literals={})), config.literals))
    assert [key for key in traces[0] if traces[0][key] != traces[1][key]] == ["train.freeze.1"]


def test_other_captions_are_another_fingerprint_and_a_moved_file_is_the_same(yaml, tmp_path):
    dataset = [0, 1]

    def of(path: Path) -> dict:
        options = {"annotations": str(path), "folder": str(tmp_path), "num_frames": 8}
        return fingerprint(ComponentConfig("dataset", "core/video_text", options), dataset, Ranks.current())

    moved = tmp_path / "moved.json"
    moved.write_text(CAPTION)
    other = tmp_path / "other.json"
    other.write_text(CAPTION.replace("blue", "green"))
    assert of(moved) == of(tmp_path / "data.json")
    assert of(other)["files"] != of(moved)["files"]
    assert of(tmp_path / "nowhere.json") == {"type": "core/video_text", "rows": 2, "files": {}}


def test_files_that_stand_deeper_in_the_options_are_in_the_fingerprint(yaml, tmp_path):
    first, second = (
        {"file": str(tmp_path / "data.json"), "weight": 2.0},
        {"file": str(tmp_path / "none.json")},
    )
    options = {"sources": (first, second), "reader": ComponentConfig("video_reader", "core/pyav", {})}
    found = fingerprint(ComponentConfig("dataset", "core/video_text", options), [0], Ranks.current())["files"]
    assert list(found) == ["sources.0.file"]


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "folder of archives"])
def test_other_captions_or_names_in_a_folder_are_noticed_at_a_resume(tmp_path, packed):
    def of(place: str, **texts: str) -> dict:
        folder = tmp_path / place
        folder.mkdir()
        members = {f"{stem}.png": b"" for stem in texts} | {f"{s}.txt": t.encode() for s, t in texts.items()}
        if packed:
            archive(folder / "0.tar", members)
        for name, content in {} if packed else members.items():
            (folder / name).write_bytes(content)
        sources = (MediaSource(str(folder)), MediaSource(str(tmp_path / "rows.jsonl")))
        (tmp_path / "rows.jsonl").write_text('{"path": "x.png", "cap": "x"}')
        section = ComponentConfig("dataset", "core/media_text", {"sources": sources})
        dataset = BucketedSamples(MediaTextDataset(sources), (), torch.zeros(3))
        return {"data": {"train": fingerprint(section, dataset, Ranks.current())}}

    before = of("before", a="a cat", b="a dog")
    assert [*before["data"]["train"]["files"]] == ["sources.1.annotations", "sources.0.annotations"]
    assert check_resume(before, of("moved", a="a cat", b="a dog")) == []
    for place, texts in (("texts", {"a": "a cat", "b": "a cow"}), ("names", {"a": "a cat", "c": "a dog"})):
        with pytest.raises(CheckpointError, match=r"data.train.files.sources.0.annotations"):
            check_resume(before, of(place, **texts))


def test_a_tokenizer_that_was_changed_in_place_is_noticed_at_a_resume(tmp_path):
    words = tmp_path / "words"
    words.mkdir()
    tokens = words / "tokenizer.json"
    tokens.write_text('{"model": {"vocab": {"glad": 3, "sad": 4}}}')
    (words / "model.safetensors").write_bytes(b"before")

    def of() -> dict:
        options = {"file": str(tmp_path / "absent.csv"), "tokenizer": str(words), "folder": str(tmp_path)}
        section = ComponentConfig("dataset", "core/text_rows", options)
        return {"data": {"train": fingerprint(section, [0], Ranks.current())}}

    before = of()
    assert before["data"]["train"]["files"].keys() == {"tokenizer"}, "a folder without words is not read"
    (words / "model.safetensors").write_bytes(b"after")
    assert differences_of(before, of()) == [], "weights are not read"
    tokens.write_text('{"model": {"vocab": {"glad": 4, "sad": 3}}}')
    (difference,) = differences_of(before, of())
    assert (difference.key, difference.verdict) == ("data.train.files.tokenizer", "allow")


# -- libraries -------------------------------------------------------------------------------------


def test_the_libraries_that_models_are_made_of_are_listed(yaml):
    found = manifest_of(yaml)["libraries"]
    for name in ("transformers", "diffusers", "peft", "accelerate", "tokenizers", "safetensors"):
        assert found[name] == version(name)
    assert "torch" not in found and "mm-core" not in found  # they are listed elsewhere
    assert "ftfy" in library_versions({"mm-wan"}) and "ftfy" not in library_versions()
    assert library_versions({"no-such-distribution", ""}) == library_versions()


def test_another_version_of_a_library_is_reported_at_a_resume_and_stops_nothing(yaml):
    after = manifest_of(yaml)
    before = after | {"libraries": after["libraries"] | {"diffusers": "0.35.0"}}
    lines = check_resume(before, after)
    assert lines[0] == "changed since the checkpoint:" and len(lines) == 2
    assert (
        lines[1].split()
        == (
            f"libraries.diffusers 0.35.0 -> {version('diffusers')} safe"
            " may compute different results: see its changelog"
        ).split()
    )
    old = {key: value for key, value in before.items() if key != "libraries"}
    assert check_resume(old, after) == [], "manifests of earlier versions have no such key"


@pytest.mark.slow
def test_ranks_with_another_version_of_a_library_are_named(tmp_path):
    folder = tmp_path / "site" / "diffusers-0.1.2.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: diffusers\nVersion: 0.1.2\n")
    out = run_ranks(Path(__file__).with_name("library_ranks.py"), 2, folder.parent)
    assert out[0] == out[1]
    assert out[0].strip() == (
        "rank 1 of 2 has different libraries from the rest: "
        f"diffusers: {version('diffusers')} on rank 0; 0.1.2 on rank 1\n"
        "  accepted: the same libraries in the same versions on all ranks\n"
        "  hint: compare `pip list` on the machines of these ranks"
    )
