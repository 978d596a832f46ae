"""Losses and gradients over ranks and micro-batches against Transformers' own, on the whole batch at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from support import pretrained_models as models
from support.ranks import run_ranks
from support.token_rows import TokenRows

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


CASES = {name: (name, {}) for name in models.MODELS} | {
    "qwen3_plain": ("qwen3", {"task": {"loss": "plain"}}),
    "qwen3_recomputed": ("qwen3", {"engine": {"recompute_modules": "auto"}}),
    "qwen3_tied_eager": ("qwen3_tied", {"task": {"attn_implementation": "eager"}}),
    "qwen3_vl_recomputed": ("qwen3_vl", {"engine": {"recompute_modules": "auto"}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every model, saved."""
    found = tmp_path_factory.mktemp("pretrained")
    for name in models.MODELS:
        models.save_model(name, found)
    return found


@pytest.fixture(scope="module")
def found(folder):
    """2 ranks x 3 micro-batches of 2 rows of uneven lengths, the last of weight 0."""
    configs = []
    for case, (name, changes) in CASES.items():
        chunks = {"chunk_tokens": 5} if "loss" not in changes.get("task", {}) else {}
        changes = {**changes, "task": {**changes.get("task", {}), **chunks}}
        configs.append(models.run_config(name, folder / name, folder, case, **changes))
    run_ranks(HERE / "pretrained_ranks.py", 2, folder / "found.pt", *configs)
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_with_accumulation_are_one_forward_of_the_whole_batch(case, folder, found):
    name = CASES[case][0]
    _, _, _, auto_class, kind = models.MODELS[name]
    theirs = getattr(transformers, auto_class).from_pretrained(folder / name).train()
    batch = models.batch_of(TokenRows(kind=kind), range(11))
    loss = theirs(**batch.inputs).loss
    loss.backward()
    assert found[case]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    gradients = {f"model.{n}": p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert found[case]["gradients"].keys() == gradients.keys()
    for path, gradient in gradients.items():
        gap = float((found[case]["gradients"][path] - gradient).norm())
        assert gap <= 1e-5 * float(gradient.norm()) + 1e-8, path


@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_separates_the_rows(case, folder, found):
    name = CASES[case][0]
    _, _, _, auto_class, kind = models.MODELS[name]
    theirs = getattr(transformers, auto_class).from_pretrained(folder / name).eval()
    sums, weights = found[case]["rows"]
    data = TokenRows(kind=kind)
    for row in range(11):
        with torch.no_grad():
            alone = float(theirs(**models.batch_of(data, range(row, row + 1)).inputs).loss)
        assert float(sums[row] / weights[row]) == pytest.approx(alone, rel=2e-5)


def test_blocks_are_sharded_one_by_one_and_tied_ones_with_what_they_are_tied_to(found):
    assert "model.model.layers.1" in found["qwen3_tied"]["wrapped"]
    assert "model.bert.embeddings" in found["bert_classes"]["wrapped"]
    assert found["bert_masked"]["wrapped"] == ("model.bert.encoder.layer.0", "model.bert.encoder.layer.1")
    assert len([path for path in found["qwen3_vl"]["wrapped"] if ".visual." in path]) == 2
