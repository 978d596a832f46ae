"""What a run of Wan begins with where several folders hold weights: each weight is read from one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import wan_frames
from mm_wan.testing import make_tiny_checkpoint
from safetensors.torch import load_file, save_file

from mm_core.config.sections import InitFromSection
from mm_core.errors import CheckpointError
from mm_core.interchange.import_weights import import_weights
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.left_out import WeightSources
from mm_core.plan import build_task
from support.runs import load_task

FILE = wan_frames.FILE


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("wan")
    kinds = {"own": ("t2v", 0), "other": ("t2v", 1), "pair": ("t2v_high_low", 2)}
    return {name: make_tiny_checkpoint(top / name, kind, seed=seed) for name, (kind, seed) in kinds.items()}


def config_at(folders: dict[str, Path], tmp_path: Path, **init_from: object):
    config = wan_frames.config_at(tmp_path, folders["own"], "t2v")
    return replace(config, init_from=InitFromSection(**init_from)) if init_from else config


def read(config) -> tuple[dict[str, torch.Tensor], FileWeights]:
    """The predictor's tensors as a run begins with them."""
    task = build_task(config)
    task.predictor.to_empty(device="cpu")
    state = {f"predictor.{name}": tensor for name, tensor in task.predictor.state_dict().items()}
    files = FileWeights(WeightSources(task, config.init_from, config.registry), config.train.adapters)
    assert files.names == set(state)
    files.fill(state)
    return {name.removeprefix("predictor."): tensor for name, tensor in state.items()}, files


def test_an_import_reads_its_own_folder_alone(folders, tmp_path):
    """That of the config holds no weights any more, and is not asked for any."""
    config = config_at(folders, tmp_path)
    (folders["own"] / FILE).rename(tmp_path / "kept")
    try:
        saved, notes = import_weights(config, folders["other"])
        task = load_task(config, saved, "model")
    finally:
        (tmp_path / "kept").rename(folders["own"] / FILE)
    expected = load_file(folders["other"] / FILE)
    assert all(torch.equal(task.predictor.state_dict()[name], expected[name]) for name in expected)
    assert len(notes) == 1 and notes[0].startswith(f"{folders['other']}: {len(expected)} tensors loaded")


def test_what_init_from_brings_is_not_read_from_the_components_folder(folders, tmp_path):
    include = ("predictor.blocks.1",)
    found, files = read(config_at(folders, tmp_path, path=str(folders["other"]), include=include))
    own, other = (load_file(folders[name] / FILE) for name in ("own", "other"))
    inside = {name for name in own if name.startswith("blocks.1.")}
    assert all(torch.equal(found[name], (other if name in inside else own)[name]) for name in own)
    first, last = files.notes()
    assert first.endswith(f"; {len(inside)} of them replaced by {folders['other']}")
    assert last.startswith(f"{folders['other']}: {len(inside)} tensors loaded")


def test_init_from_takes_neither_of_two_experts_for_a_lone_transformer(folders, tmp_path):
    """As from_pretrained does: either is a model of some timesteps alone."""
    with pytest.raises(CheckpointError) as caught:
        read(config_at(folders, tmp_path, path=str(folders["pair"])))
    sentence = "the weights of 'predictor' could be in any of these folders: transformer, transformer_2"
    assert (caught.value.where, caught.value.what) == (str(folders["pair"]), sentence)
    assert caught.value.hint == "add one of these folders to the path"
    with pytest.raises(CheckpointError, match="could be in any of these folders"):
        import_weights(config_at(folders, tmp_path), folders["pair"])
    second = folders["pair"] / "transformer_2"
    found, _ = read(config_at(folders, tmp_path, path=str(second)))
    expected = load_file(second / Path(FILE).name)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("dtype", "refused"), [("int8", True), ("complex64", True), ("float8_e4m3fn", False)]
)
def test_codes_and_complex_numbers_are_not_taken_for_weights(dtype, refused, folders, tmp_path):
    name = "blocks.0.attn1.to_q.weight"
    folder = make_tiny_checkpoint(tmp_path / "odd")
    weights = load_file(folder / FILE)
    save_file(weights | {name: weights[name].to(getattr(torch, dtype))}, folder / FILE, {"format": "pt"})
    config = config_at(folders, tmp_path, path=str(folder))
    if not refused:
        assert torch.equal(read(config)[0][name], weights[name].to(torch.float8_e4m3fn).float())
        return
    with pytest.raises(CheckpointError) as caught:
        read(config)
    assert caught.value.what.startswith(f"{name} is stored as {dtype}, which is not the weight itself")
    assert "dequantise" in caught.value.hint
