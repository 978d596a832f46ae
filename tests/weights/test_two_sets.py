"""Of several sets of weights in one folder, the one that the model's own library loads is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mm_core.config.sections import InitFromSection
from mm_core.diffusion import ModelFolder
from mm_core.errors import CheckpointError
from mm_core.interchange.inspect import open_weights
from mm_core.loading.matching import WeightMatch
from mm_core.plugin.registry import get_registry
from mm_core.weights.fitting import formats_of
from mm_core.weights.formats.format import StoredTensors
from mm_core.weights.stored import missing_at
from support.tiny_models import Task

WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
WAN |= {"num_layers": 2, "freq_dim": 16, "ffn_dim": 32, "text_dim": 16}
QWEN = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
QWEN |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
MAKE: dict[str, Callable[[], nn.Module]] = {
    "transformers": lambda: Qwen3ForCausalLM(Qwen3Config(**QWEN)),
    "diffusers": lambda: WanTransformer3DModel(**WAN),
}
STEM = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}
LOAD = {
    "transformers": AutoModelForCausalLM.from_pretrained,
    "diffusers": WanTransformer3DModel.from_pretrained,
}
NAME = {"transformers": "lm_head.weight", "diffusers": "proj_out.weight"}
SETS = [  # what a folder contains
    ("one", "index"),
    ("one", "one.fp16"),
    ("index", "index.fp16"),
    ("one", "index", "index.fp16"),
    ("index", "one.fp16"),
    ("one", "consolidated"),
]


def made(folder: Path, library: str, sets: tuple[str, ...]) -> Path:
    """A folder with sets of weights; each set contains other numbers."""
    for number, kind in enumerate(sets):
        model, variant = MAKE[library](), kind.partition(".")[2]
        nn.init.constant_(model.get_parameter(NAME[library]), number + 1.0)
        if kind == "consolidated":
            save_file(dict(model.state_dict()), folder / "consolidated.safetensors")
            continue
        size = "20KB" if kind.startswith("index") else "1GB"
        held = [(path, path.read_bytes()) for path in folder.glob("*.safetensors*")]
        model.save_pretrained(folder, variant=variant or None, max_shard_size=size)
        for path, content in held:  # both libraries remove what an earlier save left
            path.write_bytes(content)
    return folder


def without_shards(folder: Path) -> Path:
    for shard in folder.glob("*-of-*"):
        shard.unlink()
    return folder


def first(tensor: torch.Tensor) -> float:
    return float(tensor.detach().flatten()[0])


def value(stored: StoredTensors, name: str) -> float:
    return first(stored.read(name, (slice(0, 1), slice(0, 1))))


def started(library: str, path: Path, **fields: object) -> float:
    """The number with which a run begins from a folder."""
    with torch.device("meta"):
        task = Task(predictor=MAKE[library]())
    init = InitFromSection(path=str(path), **fields)
    formats = formats_of(get_registry(()), fields.get("format"))
    match = WeightMatch(init, task.state_dict(), {"predictor": task.predictor}, formats)
    task.to_empty(device="cpu")
    match.fill(task.state_dict())
    return first(task.predictor.get_parameter(NAME[library]))


@pytest.mark.parametrize("library", MAKE)
@pytest.mark.parametrize("sets", SETS, ids=" and ".join)
def test_every_reader_takes_the_set_that_the_library_takes(library, sets, tmp_path):
    folder, name = made(tmp_path, library, sets), NAME[library]
    expected = first(LOAD[library](folder).get_parameter(name))
    form = formats_of(get_registry(()))[f"core/{library}"]
    assert value(form.open(folder), name) == expected
    assert started(library, folder) == expected
    assert started(library, folder, format=f"core/{library}") == expected
    [(_, stored)] = open_weights(folder, get_registry(()))
    assert value(stored, name) == expected
    if sets == ("one", "index"):  # no other names tell which files belong together
        assert started(library, folder, format="core/safetensors") == expected


def test_shards_that_the_library_does_not_read_may_be_missing(tmp_path):
    folder = without_shards(made(tmp_path, "transformers", ("one", "index")))
    assert first(LOAD["transformers"](folder).lm_head.weight) == 1.0
    assert missing_at(folder) == ModelFolder(folder, "text encoder").missing_files() == []
    assert started("transformers", folder) == 1.0


def test_shards_that_the_library_reads_are_missed(tmp_path):
    folder = without_shards(made(tmp_path, "diffusers", ("one", "index")))
    with pytest.raises(OSError, match="does not appear to have a file named"):
        LOAD["diffusers"](folder)
    assert all("-of-" in path for path in missing_at(folder)) and missing_at(folder)
    with pytest.raises(CheckpointError, match="files listed in this index are missing"):
        started("diffusers", folder)
