"""`wan/umt5`: equal to what WanPipeline makes of prompts."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from mm_wan.encoders.umt5 import WanUMT5, clean_prompt
from mm_wan.testing import TEXT_WIDTH, make_tiny_checkpoint
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, UMT5EncoderModel

import mm_core
from mm_core.contracts import CountingTokenizer, TextEncoder
from mm_core.errors import CheckpointError

CPU = torch.device("cpu")

PROMPTS = [
    "a red circle moves left",
    "",
    "  Tom &amp;amp; Jerry\u00e2\u20ac\u2122s \n\n\u00a0 kitchen\t",  # escaped twice, mojibake, spaces
    "zebra \u4e00\u53ea\u732b \U0001f408 caf\u00e9",  # letters that no token has
    "a yellow square moves up and down " * 200,  # longer than 512 tokens
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("t2v"))


@pytest.fixture
def copied(checkpoint, tmp_path) -> Path:
    """A pipeline's folder that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "pipeline"))


def loaded(folder: Path, **options) -> WanUMT5:
    encoder = WanUMT5(str(folder), **{"dtype": "fp32", **options})
    mm_core.load_frozen(encoder, CPU)
    return encoder


# -- golden --------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("length", [512, 16])
def test_hidden_states_are_bit_equal_to_the_pipelines(checkpoint, length):
    pipeline = WanPipeline.from_pretrained(checkpoint)
    encoder = loaded(checkpoint, max_length=length)
    for prompts in (*[[prompt] for prompt in PROMPTS], PROMPTS):
        expected, unguided = pipeline.encode_prompt(prompts, max_sequence_length=length)
        hidden, mask = encoder.encode(*encoder.tokenizer()(prompts))
        assert torch.equal(hidden, expected)
        assert hidden.shape == (len(prompts), length, TEXT_WIDTH) and mask.dtype == torch.bool
        empty, _ = encoder.encode(*encoder.tokenizer()([""] * len(prompts)))
        assert torch.equal(empty, unguided)


@torch.no_grad()
def test_in_bf16_too(checkpoint):
    pipeline = WanPipeline.from_pretrained(checkpoint, torch_dtype=torch.bfloat16)
    encoder = loaded(checkpoint, dtype="bf16")
    expected, _ = pipeline.encode_prompt(PROMPTS, max_sequence_length=512)
    hidden, _ = encoder.encode(*encoder.tokenizer()(PROMPTS))
    assert hidden.dtype == torch.bfloat16 and torch.equal(hidden, expected)


@pytest.mark.parametrize(
    "text",
    [
        *PROMPTS,
        "&lt;b&gt;bold&lt;/b&gt;",
        "\u2018quoted\u2019 \uff21\uff22",
        "a\x1cb\x85c\u200bd\u3000e",
        "\ufb01re",
    ],
)
def test_prompts_are_cleaned_as_the_pipelines_do(text):
    assert clean_prompt(text) == prompt_clean(text)


def test_behind_the_mask_there_is_nothing(checkpoint):
    encoder = loaded(checkpoint, max_length=20)
    hidden, mask = encoder.encode(*encoder.tokenizer()(PROMPTS))
    assert mask.sum(1).tolist() == [6, 1, *mask.sum(1).tolist()[2:4], 20]
    assert (hidden[~mask] == 0).all() and (hidden[mask] != 0).any(-1).all()


# -- the contract --------------------------------------------------------------------------------


def test_a_config_names_it_by_both_ids(checkpoint):
    for name in ("wan/umt5", "UMT5"):
        built = mm_core.build(
            "text_encoder", {"type": name, "from_pretrained": str(checkpoint / "text_encoder")}
        )
        assert isinstance(built, TextEncoder)
        assert (built.hidden_size, built.max_length, built.missing_files()) == (TEXT_WIDTH, 512, [])


def test_the_tokenizer_travels_to_workers(checkpoint):
    tokenizer = loaded(checkpoint).tokenizer()
    expected = tokenizer(PROMPTS)
    sent = pickle.dumps(tokenizer)
    assert len(sent) < 1000
    assert all(torch.equal(a, b) for a, b in zip(pickle.loads(sent)(PROMPTS), expected, strict=True))


def test_it_is_frozen_and_loads_once(checkpoint):
    encoder = loaded(checkpoint)
    model = encoder.encoder.model
    mm_core.load_frozen(encoder, CPU)
    assert encoder.encoder.model is model and isinstance(model, UMT5EncoderModel)
    assert not encoder.train().training and not any(p.requires_grad for p in encoder.parameters())


@torch.no_grad()
@pytest.mark.parametrize("names", [["shared.weight"], ["encoder.embed_tokens.weight"]])
def test_either_name_of_the_embeddings_serves(checkpoint, copied, names):
    """Checkpoints differ in which of the two tied names they hold."""
    weights = copied / "text_encoder" / "model.safetensors"
    tensors = load_file(weights)
    table = next(
        tensors.pop(name) for name in ("shared.weight", "encoder.embed_tokens.weight") if name in tensors
    )
    tensors.pop("encoder.embed_tokens.weight", None)
    save_file({**tensors, **dict.fromkeys(names, table)}, weights, metadata={"format": "pt"})
    whole, encoder = loaded(checkpoint), loaded(copied)
    ids, mask = whole.tokenizer()(PROMPTS)
    assert torch.equal(encoder.encode(ids, mask)[0], whole.encode(ids, mask)[0])


def test_tokens_of_cleaned_captions_are_counted_before_the_cut(checkpoint):
    tokenizer = loaded(checkpoint, max_length=8).tokenizer()
    assert isinstance(tokenizer, CountingTokenizer) and tokenizer.max_length == 8
    one, same, longer = tokenizer.token_counts(["two", " two\n ", "two boats " * 9])
    assert one == same == int(tokenizer(["two"])[1].sum()) and longer > 9


def test_where_the_tokenizer_is_looked_for(checkpoint, copied, tmp_path):
    assert WanUMT5(str(checkpoint / "text_encoder")).tokenizer_folder == checkpoint / "tokenizer"
    moved = copied / "text_encoder"
    for path in (checkpoint / "tokenizer").iterdir():
        shutil.copy(path, moved)
    assert WanUMT5(str(moved)).tokenizer_folder == moved
    assert WanUMT5(str(moved), tokenizer=str(tmp_path)).tokenizer_folder == tmp_path


# -- what is not there, or not right --------------------------------------------------------------


def test_missing_files_are_named(tmp_path):
    folder = tmp_path / "text_encoder"
    assert WanUMT5(str(folder)).missing_files() == [
        str(folder / "config.json"),
        str(folder / "model.safetensors"),
        str(tmp_path / "tokenizer" / "tokenizer.json"),
    ]


def test_a_tokenizer_folder_without_a_tokenizer(checkpoint, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        loaded(checkpoint, tokenizer=str(tmp_path))
    assert caught.value.what == "this folder holds no tokenizer"
    assert caught.value.where == str(tmp_path)


def test_a_damaged_tokenizer(copied):
    (copied / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="no tokenizer can be opened from this folder"):
        loaded(copied)


def test_another_models_folder(tmp_path, checkpoint):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=10, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, tokenizer=str(checkpoint / "tokenizer"))
    assert caught.value.what == "this folder holds no UMT5 encoder: its config.json is of model_type 'bert'"
    with pytest.raises(CheckpointError, match=r"holds no UMT5 encoder: its config\.json names no model_type"):
        loaded(checkpoint / "vae", tokenizer=str(checkpoint / "tokenizer"))


def test_a_truncated_file(copied):
    weights = copied / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="this is not a complete safetensors file: it is truncated"):
        loaded(copied)


def test_weights_that_lack_a_layer(copied):
    config = copied / "text_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 3}))
    with pytest.raises(CheckpointError, match=r"10 missing: .*block\.2\.layer\.0\.SelfAttention") as caught:
        loaded(copied)
    assert caught.value.hint == (
        "set the options of WanUMT5 (or its config.json) to those of the model in this folder"
    )


def test_pickles_are_refused(copied):
    (copied / "text_encoder" / "model.safetensors").unlink()
    (copied / "text_encoder" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(CheckpointError, match="the weights are pickled, so reading them could run code"):
        loaded(copied)
