"""Cross entropy without logits: the loss and the gradients of a model that has them."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.loss.loss_utils import ForCausalLMLoss

from mm_core.errors import ContractError
from mm_core.tasks.pretrained.chunked_loss import DeferredLogits, defer_logits
from mm_core.tasks.pretrained.loss import RowLosses, follow

VOCABULARY, WIDTH = 97, 16


class Language(nn.Module):
    """An embedding, a head, and something between the head and the loss."""

    def __init__(self, between=lambda logits: logits, bias=False, tied=False, older=False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.between, self.older = between, older

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.between(self.head(torch.tanh(self.embedding(ids))))
        if self.older:  # as models compute it themselves
            before, after = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            return nn.CrossEntropyLoss()(before.view(-1, VOCABULARY), after.view(-1).to(before.device))
        return ForCausalLMLoss(logits, labels, VOCABULARY)


def capped(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 3.0) * 3.0


def rows() -> tuple[Tensor, Tensor]:
    """3 rows; the second ends early, nothing of the third is learnt."""
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 4:] = -100
    labels[2] = -100
    return ids, labels


MODELS = {
    "plain": {},
    "bias": {"bias": True},
    "tied": {"tied": True},
    "capped": {"between": capped},
    "scaled": {"between": lambda logits: logits * torch.tensor(0.3)},
    "divided in float32": {"between": lambda logits: logits.float() / 8},
    "own loss": {"older": True},
    "own loss, capped": {"older": True, "between": capped},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_loss_and_gradients_are_those_of_all_logits(name, chunk):
    model = Language(**MODELS[name])
    theirs = copy.deepcopy(model)
    within = defer_logits(model.head, chunk)
    ids, labels = rows()
    count = int((labels[:, 1:] != -100).sum())
    loss = theirs(ids, labels) * count
    loss.backward()
    record = RowLosses(torch.ones(3), keep_predictions=True)
    with within():
        total = model(ids, follow(labels, record))
    (total * 0.5).backward()
    torch.testing.assert_close(total, loss, rtol=1e-6, atol=0)
    assert record.total is total and record.counted.tolist() == [8, 3, 0]
    torch.testing.assert_close(record.rows.sum(), loss, rtol=1e-6, atol=0)
    for own, their in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(2 * own.grad, their.grad, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        best = theirs.between(theirs.head(torch.tanh(theirs.embedding(ids)))).argmax(-1)
    assert torch.equal(record.predictions[:, :8], best[:, :8])


def test_rows_count_by_their_weights():
    model, (ids, labels) = Language(), rows()
    gradients = []
    for weights, keep in ((torch.tensor([0.0, 2.0, 1.0]), slice(None)), (torch.tensor([2.0]), slice(1, 2))):
        model.zero_grad()
        record = RowLosses(weights)
        with defer_logits(model.head, 4)():
            model(ids[keep], follow(labels[keep], record)).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model = copy.deepcopy(model)
        del model.head.forward
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


def test_parameters_in_bf16_give_the_loss_in_fp32():
    model = Language(bias=True).bfloat16()
    theirs = copy.deepcopy(model)
    ids, labels = rows()
    count = int((labels[:, 1:] != -100).sum())
    loss = theirs(ids, labels) * count
    loss.backward()
    record = RowLosses(torch.ones(3))
    with defer_logits(model.head, 5)():
        total = model(ids, follow(labels, record))
    total.backward()
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, loss, rtol=1e-6, atol=0)
    exact = copy.deepcopy(theirs).float()
    exact.zero_grad()
    (exact(ids, labels) * count).backward()
    for own, their, true in zip(model.parameters(), theirs.parameters(), exact.parameters(), strict=True):
        assert own.grad.dtype == torch.bfloat16
        # They are two roundings away from the gradients in fp32, where those of all logits are one.
        ours = (own.grad.float() - true.grad).norm()
        assert ours <= 2**0.5 * (their.grad.float() - true.grad).norm() + 1e-6


def test_a_frozen_head_gets_no_gradient_and_passes_one_on():
    model = Language()
    model.head.weight.requires_grad_(False)
    ids, labels = rows()
    with defer_logits(model.head, 4)():
        model(ids, follow(labels, RowLosses(torch.ones(3)))).backward()
    assert model.head.weight.grad is None and model.embedding.weight.grad.norm() > 0


def test_outside_of_its_context_a_head_is_as_it_was():
    model, (ids, labels) = Language(), rows()
    before = model(ids, labels)
    within = defer_logits(model.head, 4)
    assert torch.equal(model(ids, labels), before)
    with within():
        assert isinstance(model.head(torch.zeros(2, WIDTH)), DeferredLogits)
    assert type(model.head(torch.zeros(2, WIDTH))) is Tensor


def test_operations_are_counted_as_those_of_a_forward():
    model, (ids, labels) = Language(), rows()
    within = defer_logits(model.head, 4)
    found = []
    for context in (nullcontext, within):
        with FlopCounterMode(display=False) as mode, context():
            model(ids, follow(labels, RowLosses(torch.ones(3))))
        found.append(mode.get_total_flops())
    assert found[0] == found[1] == 2 * 27 * WIDTH * VOCABULARY


@pytest.mark.parametrize(
    ("between", "what"),
    [(lambda logits: logits.softmax(-1), "softmax"), (lambda logits: logits[..., :5], "__getitem__")],
)
def test_what_cannot_wait_for_the_chunks_is_refused(between, what):
    model, (ids, labels) = Language(between=between), rows()
    with (
        defer_logits(model.head, 4)(),
        pytest.raises(ContractError, match=f"the model applies `{what}` to its logits") as e,
    ):
        model(ids, follow(labels, RowLosses(torch.ones(3))))
    assert "accepted: scales, caps (tanh), casts and reshaping" in str(e.value)
    assert "set task.loss: plain" in str(e.value)


def test_a_scale_that_is_trained_is_refused():
    scale = nn.Parameter(torch.tensor(2.0))
    model, (ids, labels) = Language(between=lambda logits: logits * scale), rows()
    with defer_logits(model.head, 4)(), pytest.raises(ContractError, match="the model applies `mul`"):
        model(ids, follow(labels, RowLosses(torch.ones(3))))
