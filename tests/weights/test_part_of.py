"""An encoder is read from the files of a larger model as Transformers itself reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import mm_core
from mm_core.contracts import empty_parameters
from mm_core.diffusion.encoders.text import HFTextEncoder
from mm_core.errors import CheckpointError
from mm_core.weights.fitting import best_layout, candidate_layouts
from mm_core.weights.formats.libraries import Transformers
from mm_core.weights.formats.part_of import FormatOfPart

TINY = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"intermediate_size": 24}
IDS, MASK = torch.arange(1, 9).view(1, 8), torch.ones(1, 8, dtype=torch.bool)


def saved(model: nn.Module, folder: Path) -> Path:
    """Its folder, with a tokenizer of three words."""
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def bert(tmp_path) -> Path:
    torch.manual_seed(0)
    return saved(BertForMaskedLM(BertConfig(**TINY)), tmp_path / "bert")


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Adds stored tensors; None takes one away. Dots are written as `__`."""
    stored = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        stored[key.replace("__", ".")] = tensor
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def read(folder: Path, **options: str) -> HFTextEncoder:
    encoder = mm_core.load_frozen(HFTextEncoder(str(folder), **{"dtype": "fp32", **options}), "cpu")
    assert isinstance(encoder, HFTextEncoder)
    return encoder


@torch.no_grad()
def test_a_body_is_read_from_below_the_heads_of_a_larger_model(bert):
    theirs = BertForMaskedLM.from_pretrained(bert).eval().bert(IDS, attention_mask=MASK.long())
    encoder = read(bert)
    assert torch.equal(encoder.encode(IDS, MASK)[0], theirs.last_hidden_state)
    # No file contains a pooler, and no hidden state depends on it: it exists, without random values.
    assert not any(tensor.any() for tensor in encoder.model.pooler.parameters())


def test_tables_that_older_files_hold_are_passed_over(bert):
    change(bert, bert__embeddings__position_ids=torch.arange(512)[None])
    assert torch.equal(read(bert).model.embeddings.position_ids, torch.arange(512)[None])


def test_what_lies_in_the_body_and_belongs_to_none_of_its_layers_is_an_error(bert):
    """config.json of a smaller model would otherwise silently truncate the larger one."""
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"16 unexpected: .*encoder\.layer\.1\.attention"):
        read(bert)


def test_a_missing_tensor_is_an_error(bert):
    change(bert, bert__encoder__layer__1__output__dense__weight=None)
    with pytest.raises(CheckpointError, match=r"1 missing: .*encoder\.layer\.1\.output\.dense\.weight"):
        read(bert)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "kept"), [("fp16", torch.float32), ("bf16", torch.bfloat16)])
def test_parameters_are_kept_in_the_dtypes_that_the_library_keeps_them_in(tmp_path, dtype, kept):
    """T5's `wo` overflows in fp16."""
    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    folder = saved(T5ForConditionalGeneration(config), tmp_path / "t5")
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    theirs, ours = T5EncoderModel.from_pretrained(folder, torch_dtype=half), read(folder, dtype=dtype).model
    expected = theirs.state_dict()
    assert ours.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == kept
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@torch.no_grad()
def test_one_tower_of_two_is_read_by_the_librarys_own_names(tmp_path):
    towers = {"image_size": 32, "patch_size": 16}
    config = CLIPConfig(text_config=TINY, vision_config={**TINY, **towers}, projection_dim=16)
    both = CLIPModel(config).eval()
    both.save_pretrained(tmp_path)
    with empty_parameters():
        tower = nn.ModuleDict({"text": CLIPTextModel(config.text_config)})
    shapes = {name: tuple(tensor.shape) for name, tensor in tower.state_dict().items()}
    known = {"core/transformers": FormatOfPart(Transformers(), "tower", tower)}
    way = best_layout(candidate_layouts(tmp_path, "tower", tower, shapes, known), tmp_path, "tower")
    assert way.whole and len(way.pieces) == len(shapes)
    assert all(copy.stored.startswith("text_model.") for copy, _ in way.pieces)


@torch.no_grad()
def test_an_encoder_saved_alone_is_read_as_ever(tmp_path):
    config = BertConfig(**TINY)
    folder = saved(AutoModel.from_config(config), tmp_path / "alone")
    theirs = AutoModel.from_pretrained(folder).eval()(IDS, attention_mask=MASK.long())
    assert torch.equal(read(folder).encode(IDS, MASK)[0], theirs.last_hidden_state)
