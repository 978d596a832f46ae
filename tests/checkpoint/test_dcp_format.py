"""Folders that other FSDP2 trainers saved by torch.distributed.checkpoint, as weights."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from mm_core.checkpoint.dcp_format import Dcp, DcpTensors
from mm_core.errors import CheckpointError
from mm_core.interchange.export import export
from mm_core.interchange.import_weights import import_weights
from mm_core.plan import build_task
from support.ranks import run_ranks
from support.runs import VIDEO, config_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
RANKS = Path(__file__).with_name("foreign_ranks.py")


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    config = config_of(folder, VIDEO)
    rng = torch.Generator().manual_seed(3)
    state = build_task(config).predictor.state_dict()
    drawn = {name: torch.randn(tensor.shape, generator=rng) for name, tensor in state.items()}
    save_file(drawn, folder / "drawn.safetensors")
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize(("world", "prefix"), [(3, "predictor."), (2, "")])
def test_shards_of_any_ranks_are_imported_and_exported_bit_equal(tmp_path, world, prefix):
    drawn = weights_in(tmp_path)
    run_ranks(RANKS, world, tmp_path / "drawn.safetensors", tmp_path / "saved", prefix)
    checkpoint, _ = import_weights(config_of(tmp_path, VIDEO), tmp_path / "saved")
    export(checkpoint, tmp_path / "out", "safetensors")
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == drawn.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in drawn.items())


@pytest.mark.slow
def test_a_box_is_read_from_the_pieces_that_reach_into_it(tmp_path):
    drawn = weights_in(tmp_path)
    run_ranks(RANKS, 3, tmp_path / "drawn.safetensors", tmp_path / "saved", "net.")
    stored = Dcp().open(tmp_path / "saved", "model.net")
    assert {name: tuple(tensor.shape) for name, tensor in drawn.items()} == dict(stored.shapes)
    for name, tensor in drawn.items():
        box = tuple(slice(size // 3, max(size // 3 + 1, size - 1)) for size in tensor.shape)
        assert torch.equal(stored.read(name, box), tensor[box]), name


def saved_alone(folder: Path) -> Path:
    dcp.save(
        {"model": {"weight": torch.ones(3, 2), "scale": torch.tensor(2.0)}},
        checkpoint_id=folder,
        no_dist=True,
    )
    return folder


def test_names_may_begin_with_any_words(tmp_path):
    folder = saved_alone(tmp_path / "saved")
    assert Dcp().recognises(folder) and Dcp().folders(folder) == [".", "model"]
    assert Dcp().open(folder, "model").read("scale", ()).item() == 2.0
    assert not Dcp().recognises(tmp_path)


class Bomb:
    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self):
        return os.mkdir, (str(self.sign),)


def test_nothing_in_a_strangers_folder_runs(tmp_path):
    folder, sign = saved_alone(tmp_path / "saved"), tmp_path / "code-has-run"
    (file,) = folder.glob("*.distcp")
    length = file.stat().st_size
    bomb = pickle.dumps(Bomb(sign))
    file.write_bytes(bomb + bytes(length - len(bomb)))
    with pytest.raises(CheckpointError, match=r"holds no tensor for model\.weight"):
        Dcp().open(folder, "model").read("weight", (slice(0, 3), slice(0, 2)))
    (folder / ".metadata").write_bytes(bomb)
    with pytest.raises(CheckpointError, match="does not describe a checkpoint"):
        DcpTensors(folder)
    assert not sign.exists()


@pytest.mark.parametrize(
    ("size", "chunks", "dtype", "words"),
    [
        ([3, 2], [([0, 0], [2, 2]), ([0, 0], [1, 2])], torch.float32, "does not list where all values"),
        ([3, 2], [([0, 0], [1, 2]), ([2, 0], [2, 2])], torch.float32, "does not list where all values"),
        ([9, 2], [([0, 0], [9, 2])], torch.float32, "no tensor of the shape and dtype"),
        ([1, 2], [([0, 0], [1, 2])], torch.float32, "no tensor of the shape and dtype"),
        ([3, 2], [([0, 0], [3, 2])], torch.int8, "no tensor of the shape and dtype"),
        ([3, 2], [([0, 0], [1, 2]), ([1, 0], [2, 2])], torch.float32, "no tensor of the shape and dtype"),
    ],
)
def test_pieces_that_are_not_as_listed_are_refused(tmp_path, size, chunks, dtype, words):
    folder = saved_alone(tmp_path / "saved")
    held = pickle.loads((folder / ".metadata").read_bytes())
    entry = held.state_dict_metadata["model.weight"]
    entry.size, entry.properties.dtype = torch.Size(size), dtype
    entry.chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in chunks]
    (folder / ".metadata").write_bytes(pickle.dumps(held))
    with pytest.raises(CheckpointError, match=words):
        Dcp().open(folder, "model").read("weight", ())


def test_a_folder_that_lacks_a_ranks_file_is_refused(tmp_path):
    folder = saved_alone(tmp_path / "saved")
    (file,) = folder.glob("*.distcp")
    file.rename(folder / "other.distcp")
    with pytest.raises(CheckpointError, match="points outside the files") as caught:
        DcpTensors(folder)
    assert "convert it with the program" in caught.value.render()
