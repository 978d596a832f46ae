"""Each check of tasks fails for a good task with one wrong line, and names the author's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_core.plugin.registry import survey
from mm_core.testing.data.capabilities import questions
from mm_core.testing.data.reading import DatasetProbe
from mm_core.testing.kit import Probe
from mm_core.testing.training.tasks.checks import KIT
from mm_core.testing.training.tasks.probe import TaskProbe
from mm_core.testing.training.tasks.reports import answers
from support import pretrained_models as models
from support.conformance import edited, failed, shortcomings

GOOD = Path(__file__).with_name("good_task.py")
CONTRASTIVE = Path(__file__).with_name("contrastive_task.py")
ALONE = [name for name in KIT.checks if name not in KIT.ranks]

FAULTS = {
    "modules": (
        "        self.net = Net(width)",
        "        self.net = Net(width).to_empty(device='cpu')",
        "net.scale has memory, though the task was built on the meta device",
    ),
    "initialisation": (
        "        nn.init.ones_(self.scale)",
        "        pass",
        "scale",
    ),
    "accepts_its_data": (
        'batch_spec["size"] < 1',
        'batch_spec["size"] < 10',
        "check raises ContractError: more than 9 pictures are needed; accepted: the dataset that the task is",
    ),
    "transforms": (
        "        return count_letters",
        "        return lambda batch: batch",
        "what batch_transform returns cannot be sent to data workers",
    ),
    "loss": (
        "torch.stack([losses.detach(), batch.sample_weights])",
        "torch.stack([losses, batch.sample_weights])",
        "`bins` of the loss is no tensor, or holds the graph of the forward; accepted: a detached tensor",
    ),
    "weights": (
        "return Loss(losses.sum(), self.weight(batch), bins=bins,",
        "return Loss(losses.sum(), float(len(batch)), bins=bins,",
        "weight(batch) is 0.5, and the weight of the batch's loss is 2.0; accepted: the same number",
    ),
    "sums": (
        "return Loss(losses.sum(), self.weight(batch), bins=bins,",
        "bins = bins * torch.tensor([[1 / len(batch)], [1]])\n"
        "        return Loss(losses.mean(), self.weight(batch), bins=bins,",
        ", the mean; those of each alone are ",
    ),
    "determinism": (
        '        pictures, share = batch["picture"], self.hidden(batch, rng)',
        "        self.seen = getattr(self, 'seen', 0) + 1\n"
        '        pictures, share = batch["picture"] * self.seen, self.hidden(batch, rng)',
        " after another; accepted: the same bits",
    ),
    "inputs_unchanged": (
        "mixed = pictures + share",
        "mixed = pictures.mul_(0.5) + share",
        "the loss changes `values` of the batch; accepted: an unchanged batch",
    ),
    "gradients": (
        "        return self.last(self.dropout(hidden)",
        "        return self.last(self.dropout(hidden.detach())",
        "the loss does not depend on net.first.bias, net.first.weight; accepted: a gradient for each",
    ),
    "sharded_modules": (
        "(self.net(mixed, length) - pictures)",
        "(self.net.forward(mixed, length) - pictures)",
        "with its modules sharded, the loss raises RuntimeError: aten.",
    ),
    "bins": (
        "torch.stack([losses.detach(), batch.sample_weights])",
        "torch.stack([losses.detach() / len(batch), batch.sample_weights])",
        "the losses in the bins add up to ",
    ),
    "evaluation": (
        '        return Evaluation({"loss": losses}, torch.ones(len(batch)))',
        '        return Evaluation({"loss": losses.mean().expand(len(batch))}, torch.ones(len(batch)))',
        "alone; accepted: the same value: batches of an evaluation depend on the number of ranks",
    ),
    "answers": (
        '.at("answer", number)',
        '.at("answer", place)',
        "the answer to question 1 is ",
    ),
    "notes": (
        'return ["pictures are small"]',
        'return "pictures are small"',
        "notes returned 'pictures are small'; accepted: a list of strings",
    ),
    "sample_flops": (
        "return StepFlops(40.0, 60.0, ",
        "return StepFlops(30.0, 60.0, ",
        "sample_flops returned 90 operations, but the loss counts 100 a sample",
    ),
    "sample_forward": (
        'return "net", {',
        'return "lengths", {',
        "sample_forward names the component 'lengths'; accepted: 'net'",
    ),
    "cached_features": (
        '"length": length}',
        '"length": length * 2}',
        " from its cached features; hint: `prepare` must compute the same from a FeatureBatch",
    ),
    "clips": (
        '"clip", row) for row in rows',
        '"clip", row - request.first) for row in rows',
        "is sampled alone, as number 1; accepted: the same clip: ranks share a list of prompts",
    ),
}

ALSO = {
    "initialisation": {*KIT.checks} - {"initialisation"},
    "determinism": {"sums", "evaluation", "cached_features"},
    "inputs_unchanged": {"evaluation"},
}
"""Check -> checks that cannot pass either with its fault."""


def test_the_good_task_passes(tmp_path: Path) -> None:
    of = edited(GOOD, tmp_path, "task")
    assert [
        (outcome.check, outcome.status, outcome.reason) for outcome in of if outcome.status == "failed"
    ] == []
    assert {outcome.status for outcome in map(of.run, ALONE)} == {"passed"}
    assert of.run("over_ranks").reason.startswith("samples are not compared: the loss is the sum over them")


@pytest.mark.parametrize("check", FAULTS)
def test_a_wrong_line_fails_the_check_that_is_for_it(check: str, tmp_path: Path) -> None:
    old, new, sentence = FAULTS[check]
    found = failed(edited(GOOD, tmp_path, "task", old, new), list(KIT.checks))
    assert sentence in found[check].reason
    assert str(tmp_path / GOOD.name) in found[check].reason, "the author's file"
    assert set(found) - ALSO.get(check, set()) == {check}


FURTHER = {
    "stops": (
        "if stopped and stopped():",
        "if stopped and stopped() and step == 4:",
        "goes on after `stopped`",
    ),
    "pieces": ("on_text(piece)", "on_text(words)", "but the answer is"),
    "one answer": (
        "        return found\n\n    def check_request",
        "        return found[:1]\n\n    def check_request",
        "to 2 questions; accepted: a list with one string for each question",
    ),
    "a question": (
        'assert question["codes"].numel()',
        "raise ValueError('too long')",
        "check_question raises ValueError",
    ),
    "recomputed": (
        "40.0 if recomputed else 0.0",
        "0.0",
        "with the trained modules recomputed, sample_flops returned",
    ),
    "backward": ("StepFlops(40.0, 60.0,", "StepFlops(100.0, 0.0,", "accepted: forward and backward above 0"),
    "notes": (
        'return ["pictures are small"]',
        "import time\n        return [str(time.perf_counter_ns())]",
        "notes returns other lines when it is called again",
    ),
}


@pytest.mark.parametrize("name", FURTHER)
def test_further_wrong_lines_are_found(name: str, tmp_path: Path) -> None:
    old, new, sentence = FURTHER[name]
    found = failed(edited(GOOD, tmp_path, "task", old, new), ["answers", "notes", "sample_flops"])
    (outcome,) = found.values()
    assert sentence in outcome.reason and str(tmp_path / GOOD.name) in outcome.reason


@pytest.mark.slow
def test_the_answers_of_a_model_of_transformers_keep_the_contract(tmp_path: Path) -> None:
    """A tiny Qwen3, asked by `text_rows` about texts of its tokenizer's words."""
    model = models.save_model("qwen3", tmp_path)
    models.save_words(model)
    (tmp_path / "rows.jsonl").write_text('{"text": "w3 w4 w5"}\n{"text": "w6 w7"}\n')
    registry = survey()
    rows = {"file": str(tmp_path / "rows.jsonl"), "tokenizer": str(model), "max_length": 32}
    task = TaskProbe(
        Probe(
            registry.resolve("task", "pretrained"),
            registry,
            tmp_path,
            {"from_pretrained": str(model), "auto_class": "AutoModelForCausalLM"},
        )
    )
    task.data = DatasetProbe(Probe(registry.resolve("dataset", "text_rows"), registry, tmp_path, rows))
    answers(task)
    questions(task.data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("", "", ""),
        (
            "counted = gather_samples(right), gather_samples(batch.sample_weights) > 0",
            "counted, first = right, batch.sample_weights > 0, 0",
            "on 2 ranks with a sample each, other gradients than on one come out for towers.left.weight, ",
        ),
        (
            "        logits =",
            "        others = gather_samples(right.detach())\n"
            "        others[first : first + len(batch)] = right\n"
            "        logits =",
            "on 2 ranks with a sample each, other gradients than on one come out for towers.right.weight, ",
        ),
        (
            "first + torch.arange(len(batch))",
            "torch.arange(len(batch))",
            "accepted: those of one rank with both samples",
        ),
    ],
)
def test_samples_are_compared_with_those_of_all_ranks(
    old: str, new: str, sentence: str, tmp_path: Path
) -> None:
    of = edited(CONTRASTIVE, tmp_path, "task", old, new)
    found = failed(of, KIT.checks)
    assert found.keys() == ({"over_ranks"} if old else set()), found
    if old:
        assert sentence in found["over_ranks"].reason
        assert str(tmp_path / CONTRASTIVE.name) in found["over_ranks"].reason, "the author's file"


def test_every_check_has_a_fault() -> None:
    assert {*FAULTS} == {*ALONE}


def test_shipped_tasks_pass() -> None:
    assert shortcomings("core/text_to_video") == shortcomings("core/pretrained") == []
