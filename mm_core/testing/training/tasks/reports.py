"""Conformance checks of what a task reports and answers: notes, FLOPs for the plan, answers to questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mm_core.contracts import (
    Decoding,
    FeatureBatch,
    Features,
    Randomness,
    SupportsAnswer,
    SupportsCache,
    SupportsConversing,
    SupportsNotes,
    SupportsSampleFlops,
    SupportsSampleForward,
    Turn,
    seeded,
)
from mm_core.data.cache.samples import stacked
from mm_core.errors import MMError, first_line, plural
from mm_core.testing.data.reading import SEED
from mm_core.testing.kit import NotApplicable
from mm_core.testing.training.tasks.probe import TaskProbe

_GREEDY = Decoding(max_new_tokens=6)
_DRAWN = Decoding(max_new_tokens=6, temperature=1.0, seed=3)


def notes(probe: TaskProbe) -> None:
    """notes returns lines of text, the same each time, for a task that the plan accepts."""
    probe.require(probe.task, SupportsNotes)
    found, again = probe.task.notes(), probe.task.notes()
    probe.expect(
        isinstance(found, list | tuple) and all(isinstance(n, str) and n and "\n" not in n for n in found),
        f"notes returned {found!r}",
        accepted="a list of strings, one line each; [] if there is nothing to report",
    )
    probe.expect(found == again, "notes returns other lines when it is called again")


def cached_features(probe: TaskProbe) -> None:
    """The loss of a batch of cached features is that of the batch itself, without the frozen components."""
    task: Any = probe.task
    probe.require(probe.task, SupportsCache)
    parts, rows = task.cache_parts(), list(probe.pair)
    probe.expect(
        len({part.name for part in parts}) == len(parts) > 0 and sum(p.of == "text" for p in parts) <= 1,
        f"cache_parts returned {parts!r}"[:200],
        accepted="parts of different names, at most one of them of texts",
    )
    batch = probe.batch(rows)
    found: list[dict[str, Features]] = [{} for _ in rows]
    texts: dict[str, dict[str, object]] = {}
    for part in parts:
        given = getattr(batch, "captions", None) if part.of == "text" else batch
        if given is None:
            raise NotApplicable("the batch has no captions")
        for row, features in zip(found, task.features(part.name, given), strict=True):
            row[part.name] = features
        for text in part.texts:
            texts[text] = stacked([{part.name: task.features(part.name, [text])[0]}])
    cached = FeatureBatch(batch.keys, batch.sample_weights, batch.ids, stacked(found), texts)
    rng = Randomness(SEED)
    with torch.no_grad():
        own, other = (float(task.loss(task.prepare(each, rng)).total) for each in (batch, cached))
    probe.expect(
        abs(own - other) <= 1e-4 * max(1.0, abs(own)),
        f"the loss of a batch is {own}, and {other} from its cached features",
        hint="`prepare` must compute the same from a FeatureBatch",
    )
    task.use_texts(lambda text: None)  # as if nothing was cached


def sample_flops(probe: TaskProbe) -> None:
    """sample_flops is at least what the loss counts for a sample, and adds what is recomputed."""
    task = probe.task
    probe.require(task, SupportsSampleFlops)
    options = probe.data.probe.config.options
    found, again = task.sample_flops(options, ()), task.sample_flops(options, tuple(probe.task.trainable))
    if found is None:
        raise NotApplicable("sample_flops returned None for the dataset that the task is tested with")
    probe.expect(
        found.forward > 0 and found.backward > 0 and found.recomputed == 0,
        f"without recomputation, sample_flops returned {found}",
        accepted="forward and backward above 0, recomputed 0",
    )
    probe.expect(
        again is not None and again.recomputed > 0 and again.useful == found.useful,
        f"with the trained modules recomputed, sample_flops returned {again}, and {found} without",
        accepted="the same forward and backward, and recomputed above 0",
    )
    rows = range(min(2, probe.data.rows))
    counted = probe.loss(probe.batch(rows)).flops / len(rows)
    probe.expect(
        counted <= 1.01 * found.useful,
        f"sample_flops returned {found.useful:,.0f} operations, but the loss counts {counted:,.0f} a sample",
        accepted="at least as many: the plan is for samples of the largest size",
    )


def sample_forward(probe: TaskProbe) -> None:
    """sample_forward names a trained component and arguments that its forward takes."""
    task = probe.task
    probe.require(task, SupportsSampleForward)
    found = task.sample_forward(probe.data.probe.config.options)
    if found is None:
        raise NotApplicable("sample_forward returned None for the dataset that the task is tested with")
    path, given = found
    probe.expect(
        path in probe.task.trainable,
        f"sample_forward names the component {path!r}",
        accepted=" or ".join(map(repr, probe.task.trainable)),
    )
    drawn = tree_map_only(Tensor, lambda tensor: torch.zeros_like(tensor, device="cpu"), given)
    with torch.no_grad():
        probe.task.get_submodule(path)(**drawn)


def answers(probe: TaskProbe) -> None:
    """Answers depend on their question, its number and the seed alone, and stop when they are stopped."""
    task = probe.task
    probe.require(task, SupportsAnswer)
    cls: object = type(probe.data.dataset)
    if not isinstance(cls, SupportsConversing):
        raise NotApplicable("the dataset that the task is tested with lays out no questions")
    try:
        task.check_answers()
        conversing = cls.conversing(**probe.data.probe.config.options)
    except MMError as refusal:
        raise NotApplicable(f"it answers no questions: {first_line(refusal)}") from refusal
    questions = [conversing.prompt([Turn("user", text)]) for text in ("a red circle", "blue")]
    for question in questions:
        probe.expect_no_error("check_question", "a short question", task.check_question, question)
    for decoding in (_GREEDY, _DRAWN):
        both = _answered(probe, questions, decoding, (0, 1))
        (alone,) = _answered(probe, questions[1:], decoding, (1,))
        probe.expect(
            alone == both[1],
            f"at temperature {decoding.temperature:g}, the answer to question 1 is {both[1]!r} beside"
            f" another question, and {alone!r} alone",
            accepted="the same answer, drawn from (seed, number of the question)",
        )
    pieces: list[str] = []
    whole = _answered(probe, questions[:1], _GREEDY, (0,), pieces.append)
    probe.expect(
        "".join(pieces) == whole[0],
        f"on_text got {''.join(pieces)!r}, but the answer is {whole[0]!r}",
        accepted="the pieces of the first answer, in order",
    )
    calls = iter(range(99))
    _answered(probe, questions[:1], _GREEDY, (0,), None, lambda: next(calls) >= 0)
    probe.expect(
        next(calls) <= 2, "answer goes on after `stopped` has returned true", hint="call it after each token"
    )


def _answered(probe: TaskProbe, questions: Sequence[Mapping[str, Tensor]], *given: object) -> list[str]:
    """Answers to questions; `given` are the further arguments of `answer`."""
    with torch.no_grad(), seeded(Randomness(SEED)):
        found: list[str] = probe.task.answer(questions, *given)
    probe.expect(
        isinstance(found, list) and len(found) == len(questions) and all(isinstance(t, str) for t in found),
        f"answer returned {found!r} to {plural(len(questions), 'question')}",
        accepted="a list with one string for each question, in order",
    )
    return found
