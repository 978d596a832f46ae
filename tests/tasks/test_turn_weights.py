"""Weights of turns: a loss is the sum of weight times loss of each label, over the sum of their weights."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch.nn import functional

from mm_core.builtin.configs.conversations import ConversationSource
from mm_core.contracts import IGNORED_LABEL, Randomness
from mm_core.errors import ContractError
from mm_core.tasks import Conversations
from mm_core.tasks.pretrained.loss import RowLosses
from support.packed_chats import AUTO, batch_of, task_of

pytestmark = pytest.mark.filterwarnings("ignore:rows are packed")
WEIGHTS = (0.25, 2, 0, 1, 3.5)
RNG = Randomness(0)


@pytest.fixture
def rows(chat_rows):
    """Six conversations whose answers have weights in turn; beside their pictures."""
    found, number = [json.loads(line) for line in chat_rows.read_text().splitlines()[:12:2]], 0
    for row in found:
        for turn in row.get("messages") or row["conversations"]:
            if (turn.get("role") or turn["from"]) in ("assistant", "gpt"):
                turn["weight"], number = WEIGHTS[number % len(WEIGHTS)], number + 1
    assert number > len(WEIGHTS)
    return [row for row in found if any(_weights(row))]


def _weights(row):
    return [turn["weight"] for turn in row.get("messages") or row["conversations"] if "weight" in turn]


def dataset(chat_rows, model, rows, **options):
    file = chat_rows.parent / "weighted.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Conversations([ConversationSource(str(file))], str(model), max_length=2048, **options)


def by_hand(chat_rows, model, rows):
    """Loss, weight and gradients of the library's model, by the labels of each turn alone and its weight."""
    library = getattr(transformers, AUTO).from_pretrained(model).train()
    total, count = torch.zeros(()), 0.0
    for row in rows:
        given = _weights(row)
        for turn, weight in enumerate(given):
            if not weight:
                continue
            alone = json.loads(json.dumps(row))
            places = (t for t in alone.get("messages") or alone["conversations"] if "weight" in t)
            for place, each in enumerate(places):
                each["weight"] = int(place == turn)
            (sample,) = dataset(chat_rows, model, [alone])
            batch = batch_of(dataset(chat_rows, model, [alone]), [sample])
            assert batch.label_weights is None
            labels = batch.inputs.pop("labels")[0, 1:]
            logits = library(**batch.inputs, use_cache=False).logits[0, :-1]
            total = total + weight * functional.cross_entropy(logits.float(), labels, reduction="sum")
            count += weight * int((labels != IGNORED_LABEL).sum())
    total.backward()
    return float(total.detach()), count, {n: p.grad for n, p in library.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_a_loss_is_the_weighted_mean_packed_and_apart_chunked_and_plain(name, chat_model, chat_rows, rows):
    model = chat_model(name)
    total, count, gradients = by_hand(chat_rows, model, rows)
    norm = torch.cat([grad.flatten() for grad in gradients.values() if grad is not None]).norm()
    for packing in (False, True):
        found = dataset(chat_rows, model, rows, packing=packing)
        samples = [found[index] for index in range(len(found))]
        batches = [batch_of(found, [each]) for each in samples] if packing else [batch_of(found, samples)]
        for kind in ("chunked", "plain"):
            task, summed, weight = task_of(model, loss=kind), 0.0, 0.0
            for batch in batches:
                ready = task.batch_transform()(batch)
                loss = task.loss(task.prepare(ready, RNG))
                loss.total.backward()
                assert loss.weight == task.weight(ready)
                summed, weight = summed + float(loss.total.detach()), weight + loss.weight
            assert (summed, weight) == pytest.approx((total, count), rel=1e-6)
            for path, parameter in task.model.named_parameters():
                if parameter.grad is not None:
                    wanted = 0 if gradients[path] is None else gradients[path]
                    assert (parameter.grad - wanted).norm() <= 1e-6 * norm, path


def test_an_evaluation_has_the_weighted_loss_of_each_row(chat_model, chat_rows, rows):
    model = chat_model("qwen3_vl")
    found, task = dataset(chat_rows, model, rows), task_of(model).eval()
    batch = task.batch_transform()(batch_of(found, [found[index] for index in range(3)]))
    evaluation = task.evaluate(batch, RNG, ())
    wanted = [by_hand(chat_rows, model, [row])[:2] for row in rows[:3]]
    made = zip(evaluation.sums["loss"].tolist(), evaluation.weights.tolist(), strict=True)
    for each, expected in zip(made, wanted, strict=True):
        assert each == pytest.approx(expected, rel=1e-5)


def test_rows_whose_weights_are_one_carry_none(chat_model, chat_rows):
    rows = [json.loads(line) for line in chat_rows.read_text().splitlines()[:3]]
    found = dataset(chat_rows, chat_model("qwen3_vl"), rows)
    assert batch_of(found, [found[0], found[1]]).label_weights is None


def test_labels_that_a_model_drops_cannot_have_weights():
    record = RowLosses(torch.ones(1), torch.ones(1, 4))
    logits, labels = torch.zeros(3, 5), torch.tensor([1, 2, 3])
    with pytest.raises(ContractError, match="it drops labels before the loss, so they cannot have weights"):
        record.of_model(functional.cross_entropy, (logits, labels), {})
