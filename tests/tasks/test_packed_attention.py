"""`packed_sdpa`: the results of `sdpa`, without a mask of the whole row where pieces share it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import transformers

from mm_core.contracts import Randomness, SampleKey, TextBatch
from mm_core.device import attention_of_any_length
from mm_core.errors import ContractError, RunWarning
from mm_core.modules.initialise import initialise
from mm_core.tasks.pretrained import packed_attention
from mm_core.tasks.pretrained.task import PretrainedTask
from support import pretrained_models as models

TINY = {**models.QWEN, **models.ENDS, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS = {
    "Qwen2": TINY,
    "Qwen3": TINY,
    "Qwen3Moe": {**TINY, **EXPERTS, "experts_implementation": "eager"},  # grouped products know no float64
    "Llama": TINY,
    "Mistral": {**TINY, "sliding_window": None},
}
PIECES = [5, 11, 1, 8]


def model_of(name: str, attention: str, **changes):
    """A tiny decoder in float64, the same for every implementation of attention."""
    packed_attention.register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**MODELS[name], **changes})
    kind = getattr(transformers, f"{name}ForCausalLM")
    return kind._from_config(config, attn_implementation=attention).double()


def row(lengths=PIECES) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 40, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}


@pytest.fixture
def attended(monkeypatch):
    """(queries, keys, whether there is a mask) of each call of torch's attention."""
    calls = []
    torchs = torch.nn.functional.scaled_dot_product_attention

    def seen(query, key, *others, attn_mask=None, **options):
        calls.append((query.shape[2], key.shape[2], attn_mask is not None))
        return torchs(query, key, *others, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    return calls


def learnt(model, **inputs):
    """Logits, and gradients of their squares."""
    logits = model(**inputs, use_cache=False).logits
    model.zero_grad()
    logits.square().sum().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters()}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        error = (found[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-12)
        assert error < 1e-10, name


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_row_predicts_and_learns_what_sdpa_does_piece_by_piece(name, attended):
    wanted = learnt(model_of(name, "sdpa"), **row())
    assert attended == 2 * [(25, 25, True)], "two layers, over all of the row"
    attended.clear()
    found = learnt(model_of(name, "packed_sdpa"), **row())
    assert attended == 2 * [(n, n, False) for n in PIECES]
    assert_equal(found, wanted)


def test_pieces_do_not_see_each_other():
    model = model_of("Qwen3", "packed_sdpa")
    first = row()
    other = {**first, "input_ids": first["input_ids"].clone()}
    other["input_ids"][0, 7] += 1  # of the second piece
    with torch.no_grad():
        said = [model(**inputs, use_cache=False).logits for inputs in (first, other)]
    change = (said[0] - said[1]).abs().amax(-1)[0] > 0
    assert change.tolist() == [False] * 7 + [True] * 9 + [False] * 9


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_attend_to_the_same_pieces(reentrant, attended):
    from mm_core.parallel.activation_checkpointing import recompute

    wanted = learnt(model_of("Qwen3", "sdpa"), **row())
    model = model_of("Qwen3", "packed_sdpa")
    for layer in model.model.layers:
        recompute(layer, use_reentrant=reentrant)
    attended.clear()
    assert_equal(learnt(model, **row()), wanted)
    assert attended == 4 * [(n, n, False) for n in PIECES]


def padded():
    ids, mask = row([6, 6])["input_ids"].view(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


CASES = {
    "one piece": (row([9]), {}),
    "no positions": ({"input_ids": row([9])["input_ids"]}, {}),
    "padded": (padded(), {}),
    "two packed rows": ({name: whole.view(2, 6) for name, whole in row([3, 3, 2, 4]).items()}, {}),
    "a window shorter than the row": (row(), {"sliding_window": 4, "use_sliding_window": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_anything_else_is_left_to_sdpa(case, attended):
    inputs, changes = CASES[case]
    changes = {**changes, "max_window_layers": 1} if changes else {}
    wanted = learnt(model_of("Qwen3", "sdpa", **changes), **inputs)
    there = list(attended)
    attended.clear()
    found = learnt(model_of("Qwen3", "packed_sdpa", **changes), **inputs)
    if changes:  # one layer is of each kind
        assert attended == [*((n, n, False) for n in PIECES), (25, 25, True)]
    else:
        assert attended == there
    assert_equal(found, wanted)


def test_a_mask_that_is_more_than_causal_is_sdpas():
    """A caller may add conditions of its own, which Transformers hands on as one function."""
    from transformers.masking_utils import create_causal_mask

    def masks(attention, **more):
        config = model_of("Qwen3", attention).config
        embeds = torch.zeros(1, 25, 4)
        given = {"attention_mask": None, "past_key_values": None, **row(), **more}
        del given["input_ids"]
        return create_causal_mask(config=config, inputs_embeds=embeds, **given)

    assert masks("packed_sdpa") == packed_attention.CausalPieces(tuple(PIECES))
    blocks = torch.full((1, 25), -1)
    blocks[0, 6:9] = 0  # tokens of an image, which see each other both ways

    def near(batch, head, query, key):
        return query - key < 3

    for more in (
        {"block_sequence_ids": blocks},
        {"and_mask_function": near},
        {"or_mask_function": near},
        {"attention_mask": torch.ones(1, 25, dtype=torch.int64)},
    ):
        found, wanted = masks("packed_sdpa", **more), masks("sdpa", **more)
        assert found is wanted is None or torch.equal(found, wanted)


def test_answers_are_those_of_sdpa():
    prompt = row([7])["input_ids"]
    said = [
        model_of("Qwen3", attention).generate(prompt, max_new_tokens=12, do_sample=False)
        for attention in ("sdpa", "packed_sdpa")
    ]
    assert torch.equal(*said)


# -- in a run ---------------------------------------------------------------------------------------


def task_of(folder: Path, **options) -> PretrainedTask:
    with torch.device("meta"):
        task = PretrainedTask(str(folder), "AutoModelForCausalLM", **options)
    task.model.to_empty(device="cpu")
    task.model.tie_weights()
    initialise(task.model, "model", Randomness(1))
    return task.train()


def batch(**inputs) -> TextBatch:
    inputs["labels"] = inputs["input_ids"].clone()
    return TextBatch([SampleKey(0, 0)], torch.ones(1), ["a"], inputs=inputs)


def test_the_task_takes_it_by_name_and_no_folder_keeps_the_name(tmp_path, attended):
    folder = models.save_model("qwen3", tmp_path)
    losses = {}
    for attention in ("sdpa", "packed_sdpa"):
        task = task_of(folder, attn_implementation=attention)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RunWarning)
            losses[attention] = task.loss(task.prepare(batch(**row()), Randomness(1))).total
    torch.testing.assert_close(losses["packed_sdpa"], losses["sdpa"], rtol=1e-6, atol=0)
    assert attended[2:] == 2 * [(n, n, False) for n in PIECES]
    task.model.save_pretrained(tmp_path / "kept")
    for file in (tmp_path / "kept").glob("*.json"):
        assert packed_attention.NAME not in file.read_text(), file.name


def test_packed_rows_under_a_dense_mask_are_warned_of(tmp_path):
    folder = models.save_model("qwen3", tmp_path)
    task = task_of(folder)
    with pytest.warns(
        RunWarning, match=r"rows are packed, but sdpa computes attention over .* \(25 x 25\); "
    ):
        task.prepare(batch(**row()), Randomness(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task_of(folder, attn_implementation="packed_sdpa").prepare(batch(**row()), Randomness(1))
        task_of(folder).prepare(batch(**row([25])), Randomness(1))
        task.eval().prepare(batch(**row()), Randomness(1))


SENTENCES = {
    "Bloom": "AutoModelForCausalLM cannot build a model from this folder: BloomForCausalLM does not support",
    "Jamba": "JambaForCausalLM computes attention in its own code, which packed_sdpa cannot replace",
    "Falcon": "the model of this folder does not support attention 'packed_sdpa'",
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_a_model_with_attention_of_its_own_is_refused(kind, tmp_path):
    """Bloom has no sdpa, Falcon only its own; Jamba's other layers would mix the pieces."""
    options = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**options, n_layer=1, n_head=2)
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ContractError) as fault, torch.device("meta"):
        PretrainedTask(str(tmp_path), "AutoModelForCausalLM", attn_implementation="packed_sdpa")
    assert fault.value.what.startswith(SENTENCES[kind])


def test_pieces_of_any_length_are_not_given_to_cudnn():
    """Its plans are made for one length each. The flag is torch's, also where there is no accelerator."""
    flag = torch.backends.cuda.cudnn_sdp_enabled
    assert flag()
    with attention_of_any_length(torch.device("cuda")):
        assert not flag()
    assert flag()
    with attention_of_any_length(torch.device("cpu")):
        assert flag()
