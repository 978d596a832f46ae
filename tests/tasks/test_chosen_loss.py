"""`task.loss: auto` is chosen before the first step, also for models whose logits cannot wait for chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.contracts import Randomness, SampleKey, TextBatch
from mm_core.errors import ContractError
from mm_core.modules.initialise import initialise
from mm_core.tasks.pretrained.task import PretrainedTask
from mm_core.weights.adapters.inject import add_adapters
from support import pretrained_models as models

BART = {"vocab_size": 48, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
BART |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "forced_eos_token_id": 2, **models.ENDS}
ALL = "task.loss: auto computes the logits of all tokens at once: "


def bart(folder: Path) -> tuple[str, str]:
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))
    model.final_logits_bias.copy_(torch.linspace(-1, 1, 48)[None])
    model.save_pretrained(folder)
    return str(folder), "AutoModelForSeq2SeqLM"


def qwen(folder: Path) -> tuple[str, str]:
    return str(models.save_model("qwen3", folder)), "AutoModelForCausalLM"


def task_of(place: tuple[str, str], *adapters: AdapterConfig, **options) -> PretrainedTask:
    with torch.device("meta"):
        task = PretrainedTask(*place, weights="random", **options)
    add_adapters(task, adapters, {})
    return task


def stepped(task: PretrainedTask) -> float:
    task.model.to_empty(device="cpu")
    initialise(task.model, "model", Randomness(0), ())
    ids = torch.arange(12).view(2, 6) + 4
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    batch = TextBatch([SampleKey(0, i) for i in range(2)], torch.ones(2), ["a", "b"], inputs)
    loss = task.loss(task.prepare(batch, Randomness(0)))
    loss.total.backward()
    return loss.total.item() / loss.weight


def test_bart_adds_a_bias_to_its_logits_which_the_plan_shows(tmp_path):
    place = bart(tmp_path)
    task = task_of(place)
    (note,) = task.notes()
    assert note.startswith(ALL + "the model applies `") and "to its logits before the loss" in note
    assert stepped(task) == stepped(task_of(place, loss="plain"))


def test_an_adapter_on_the_output_embedding_is_reported_too(tmp_path):
    place, adapter = qwen(tmp_path), AdapterConfig(targets=("lm_head", "q_proj"), rank=2)
    task = task_of(place, adapter)
    why = "the output embedding has an adapter, which a chunked loss does not support"
    assert task.notes() == [ALL + why]
    assert task.notes() == [ALL + why], "once"
    assert stepped(task) == stepped(task_of(place, adapter, loss="plain"))
    with pytest.raises(ContractError) as fault:
        task_of(place, adapter, loss="chunked").notes()
    assert str(fault.value) == (
        f"task.loss: {why}\n  accepted: auto, plain\n"
        "  hint: or remove the output embedding from the adapter's targets"
    )


@pytest.mark.parametrize("targets", [(), ("q_proj",)])
def test_what_can_be_chunked_is_chunked_without_a_note(tmp_path, targets):
    adapters = [AdapterConfig(targets=targets, rank=2)] if targets else []
    task = task_of(qwen(tmp_path), *adapters)
    assert task.notes() == [] and task._head == (task.model.get_output_embeddings(),)
    assert stepped(task) == pytest.approx(stepped(task_of(qwen(tmp_path), *adapters, loss="plain")), rel=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "qwen3_tied", "qwen3_vl"])
def test_caps_and_scales_of_logits_are_no_obstacle(name, tmp_path):
    task = task_of((str(models.save_model(name, tmp_path)), models.MODELS[name][3]))
    assert task.notes() == [] and task._head is not None


def test_the_trial_leaves_no_trace(tmp_path):
    place = bart(tmp_path)
    state = torch.get_rng_state()
    task = task_of(place)
    assert torch.equal(state, torch.get_rng_state())
    assert {p.device.type for p in task.parameters()} == {"meta"}


PEGASUS = BART | {"attention_type": "block_sparse", "pad_token_id": 0}
PROPHET = {"vocab_size": 48, "hidden_size": 16, "num_encoder_layers": 1, "num_decoder_layers": 1, "ngram": 2}
PROPHET |= {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "pad_token_id": 0}
PROPHET |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32, "dropout": 0.0}


def test_a_bias_that_no_trial_finds_is_expected_of_text_decoders(tmp_path):
    """Its sparse attention looks at values, which there are none of."""
    transformers.BigBirdPegasusConfig(**PEGASUS).save_pretrained(tmp_path)
    place = str(tmp_path), "AutoModelForSeq2SeqLM"
    task = task_of(place)
    (note,) = task.notes()
    assert note.startswith(ALL)
    assert stepped(task) == stepped(task_of(place, loss="plain"))


def test_a_loss_that_is_none_is_reported_without_the_hint_of_another_choice(tmp_path):
    transformers.ProphetNetConfig(**PROPHET).save_pretrained(tmp_path)
    task = task_of((str(tmp_path), "AutoModelForSeq2SeqLM"))
    (note,) = task.notes()
    assert note.startswith(ALL) and "is_contiguous" not in note


def test_a_trial_is_as_good_where_the_attention_is_set_by_the_config(tmp_path, monkeypatch):
    """As with Transformers 4.53."""
    monkeypatch.delattr(transformers.PreTrainedModel, "set_attn_implementation", raising=False)
    (note,) = task_of(bart(tmp_path)).notes()
    assert "the model applies `" in note
