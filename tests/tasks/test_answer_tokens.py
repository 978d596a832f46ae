"""Prompts of one generation: laid side by side as the library takes them, drawn as it draws, and apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers.generation import logits_process

from mm_core.builtin.configs.pretrained import PretrainedConfig
from mm_core.contracts import Decoding, TextBatch
from mm_core.errors import DataError
from mm_core.tasks.pretrained.answer_tokens import SeededTokenSampler, joined
from mm_core.tasks.pretrained.answers import Answers
from support import pretrained_models as models
from support.ranks import run_ranks

HERE = Path(__file__).parent


def test_rows_are_padded_where_they_are_not_gone_on_from():
    rows = [
        {"input_ids": torch.tensor([[4, 5, 6]]), "pixel_values": torch.zeros(2, 3, 1, 1)},
        {"input_ids": torch.tensor([[7]]), "pixel_values": torch.ones(1, 3, 1, 1)},
    ]
    left = joined(rows, pad=9)
    assert left["input_ids"].tolist() == [[4, 5, 6], [9, 9, 7]]
    assert left["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]  # without one, padding would be read
    assert left["pixel_values"].flatten(1).sum(1).tolist() == [0, 0, 3]
    right = joined(rows, pad=9, left=False)
    assert right["input_ids"].tolist() == [[4, 5, 6], [7, 9, 9]]
    assert right["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert joined(rows[:1], pad=9) == rows[0]


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_tokens_are_drawn_with_the_probabilities_of_the_library(top_p):
    """20,000 rows with the same scores, each with a generator of its own."""
    count = 20_000
    scores = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    scores[0, 3] = -torch.inf
    drawn = SeededTokenSampler(Decoding(temperature=0.7, top_p=top_p, seed=5), range(count))
    chosen = drawn(torch.zeros(count, 1), scores.expand(count, -1))
    assert torch.equal(chosen.isfinite().sum(1), torch.ones(count, dtype=torch.int64))
    found = torch.bincount(chosen.argmax(1), minlength=12) / count
    theirs = logits_process.TemperatureLogitsWarper(0.7)(None, scores)
    theirs = logits_process.TopPLogitsWarper(top_p)(None, theirs).softmax(-1)[0]
    assert torch.equal(found > 0, theirs > 0)
    # Four standard deviations of a share.
    assert bool(((found - theirs).abs() <= 4 * (theirs * (1 - theirs) / count).sqrt()).all())


def test_a_row_is_drawn_by_its_number_whatever_stands_beside_it():
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    together = SeededTokenSampler(Decoding(temperature=1.0, seed=2), [4, 5, 6])
    alone = SeededTokenSampler(Decoding(temperature=1.0, seed=2), [5])
    for _ in range(5):  # token after token
        assert torch.equal(together(None, scores)[1:2], alone(None, scores[1:2]))
    decodings = [Decoding(temperature=1.0, seed=seed) for seed in range(20)]
    others = [SeededTokenSampler(decoding, [5])(None, scores[1:2]) for decoding in decodings]
    assert len({int(other.argmax()) for other in others}) > 5


@pytest.mark.parametrize("temperature", [1e-320, 1e-3])
def test_hardly_any_temperature_is_greedy(temperature):
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    drawn = SeededTokenSampler(Decoding(temperature=temperature), range(4))(None, scores)
    assert torch.equal(drawn.argmax(1), scores.argmax(1))


BART = {"vocab_size": 48, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
BART |= {
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


@pytest.mark.parametrize("name", ["qwen3", "t5", "bart"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_prompts_of_a_batch_are_answered_as_alone(tmp_path, name, temperature):
    """BART's positions are numbers: an encoder's rows are padded on the right."""
    if name == "bart":
        torch.manual_seed(0)
        model = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART, **models.ENDS))
        folder = tmp_path / "bart"
        model.save_pretrained(folder)
    else:
        folder = models.save_model(name, tmp_path)
        model = getattr(transformers, models.MODELS[name][1]).from_pretrained(folder)
    models.save_words(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that answers differ
    answers = answers_of(model.eval(), folder, 6)
    prompts = [[5, 9, 12], [7, 7, 30, 31, 8, 20, 40], [11]]
    rows = [{"input_ids": torch.tensor([each])} for each in prompts]
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    decoding = Decoding(temperature=temperature, seed=3)
    together = answers.to(rows, decoding, [0, 1, 2])
    assert together == [answers.to([row], decoding, [n])[0] for n, row in enumerate(rows)]
    assert len(set(together)) > 1 and any(together)


GPT2 = {"vocab_size": 48, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}


def row(length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(5, 5 + length)[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def answers_of(model: transformers.PreTrainedModel, folder: Path, max_new_tokens: int) -> Answers:
    wanted = PretrainedConfig(str(folder), "AutoModelForCausalLM")
    return Answers(model, wanted, max_new_tokens, "task.max_new_tokens")


def with_a_table(folder: Path) -> Answers:
    """Of a model of 16 positions, which ends no answer by itself."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **models.ENDS)).eval()
    model.generation_config.suppress_tokens = [0, 1, 2]
    model.save_pretrained(folder)
    models.save_words(folder)
    return answers_of(model, folder, 20)


def test_an_answer_ends_where_the_model_has_no_more_positions(tmp_path):
    answers = with_a_table(tmp_path)
    model = answers.model
    (said,) = answers.to([row(10)], Decoding(), [0])
    theirs = model.generate(**row(10), max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 10:]
    assert said == answers.tokenizer.decode(theirs) and len(said.split()) == 6
    with pytest.raises(DataError, match="16 tokens, but GPT2LMHeadModel has only 16 positions") as fault:
        answers.check(row(16))
    assert fault.value.hint == "lower max_length of the dataset"


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_long_prompt_shortens_no_answer_beside_it(tmp_path, temperature):
    answers, decoding = with_a_table(tmp_path), Decoding(temperature=temperature)
    rows = [row(length) for length in (4, 14, 4, 9)]
    alone = [answers.to([each], decoding, [n])[0] for n, each in enumerate(rows)]
    assert [len(each.split()) for each in alone] == [12, 2, 12, 7]
    assert answers.to(rows, decoding, [0, 1, 2, 3]) == alone
    # Of few words there is room for behind all but one.
    shorter = Decoding(3, temperature)
    assert [len(each.split()) for each in answers.to(rows, shorter, [0, 1, 2, 3])] == [3, 2, 3, 3]


@pytest.mark.slow
def test_ranks_with_rows_of_other_lengths_answer_as_alone(tmp_path):
    """They share the model's weights, so that each takes part in the other's generations."""
    answers = with_a_table(tmp_path)
    lengths = [[4, 14], [9, 15]]
    said = run_ranks(HERE / "answer_ranks.py", 2, tmp_path, json.dumps(lengths))
    for own, output in zip(lengths, said, strict=True):
        alone = [answers.to([row(length)], Decoding(), [0])[0] for length in own]
        assert json.loads(output.splitlines()[-1]) == alone


def test_rows_of_a_batch_are_answered_as_alone_where_positions_are_few(tmp_path):
    answers = with_a_table(tmp_path)
    batch = {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
    batch["attention_mask"], batch["labels"] = batch["input_ids"].clone(), torch.full((2, 16), -100)
    for number, length in enumerate((4, 14)):
        batch["input_ids"][number, : length + 2] = torch.arange(5, 7 + length)
        batch["attention_mask"][number, : length + 2] = 1
        batch["labels"][number, length : length + 2] = batch["input_ids"][number, length : length + 2]
    found, wanted = answers.of(TextBatch(keys=[], sample_weights=torch.ones(2), ids=["a", "b"], inputs=batch))
    assert found == [answers.to([row(length)], Decoding(), [0])[0] for length in (4, 14)]
    assert [len(each.split()) for each in found] == [12, 2]
    assert wanted == [
        (answers.tokenizer.decode(batch["input_ids"][n, k : k + 2]),) for n, k in ((0, 4), (1, 14))
    ]


def test_an_answer_that_is_stopped_ends_at_that_token(tmp_path):
    folder = models.save_model("qwen3", tmp_path)
    models.save_words(folder)
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()
    model.generation_config.suppress_tokens = [0, 1, 2]  # words alone
    answers, asked = answers_of(model, folder, 20), iter([False, False, True])
    heard: list[str] = []
    rows = [{"input_ids": torch.tensor([[5, 9, 12]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}]
    (stopped,) = answers.to(rows, Decoding(), [0], heard.append, lambda: next(asked))
    (whole,) = answers.to(rows, Decoding(), [0])
    assert len(stopped.split()) == 3 and whole.startswith(stopped + " ") and "".join(heard) == stopped
