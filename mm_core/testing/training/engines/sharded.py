"""Conformance checks of an engine on two ranks: it trains as on one, and one loads their checkpoint."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_core.checkpoint.store import CheckpointStore
from mm_core.errors import MMError
from mm_core.testing.kit import NotApplicable, sentence_of
from mm_core.testing.ranks import ComponentBuild, ranks_of
from mm_core.testing.tensors import differing, names
from mm_core.testing.training.engines.probe import EngineProbe
from mm_core.testing.training.engines.task import ROWS, Tensors, Trial, poisoned, task_on_meta, whole

STEPS, RANKS, CLIP = 2, 2, 0.5
_HINT = "initial weights and updates must not depend on the number of ranks"


@dataclass(frozen=True)
class Work:
    """What each rank does with a new component.

    Attributes:
        subject: what builds it.
        folder: where two ranks save a checkpoint, and one loads it.
    """

    subject: Any
    folder: Path


Outcomes = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""What one rank has found, and what each of two ranks has."""


def outcomes_of(
    probe: Any,
    what: str,
    subject: object,
    save: Callable[[Work], dict[str, Any]],
    load: Callable[[Work], dict[str, Any]],
    hint: str | None = None,
) -> Outcomes:
    """What two ranks find that train and save a checkpoint, and one that trains and loads it.

    Of a probe, they run once.

    Args:
        probe: the component's.
        what: what fails, for the error.
        subject: for `Work`.
        save: run by each of two ranks.
        load: run by one rank after that.
        hint: of an error that has none.
    """
    if probe.outcomes is None:
        with tempfile.TemporaryDirectory(prefix="mm-sharded-") as folder:
            work = Work(subject, Path(folder))
            two = ranks_of(probe, what, RANKS, save, work, hint)
            probe.outcomes = ranks_of(probe, what, 1, load, work, hint), two
    found: Outcomes = probe.outcomes
    return found


def expect_loaded(probe: Any, found: Outcomes, hint: str) -> None:
    """Expects that one rank has loaded, bit for bit, what two have saved."""
    one, two = found
    lost = differing(two[0]["state"], one[0]["loaded"])
    probe.expect(
        not lost,
        f"a checkpoint of {RANKS} ranks, loaded on one, gives other values of {names(lost)}",
        hint=hint,
    )


def sharded_training(probe: EngineProbe) -> None:
    """Two ranks train as one from the same seed, and no rank skips a step alone."""
    (one,), two = _outcomes(probe)
    when = f"after {STEPS} steps on {RANKS} ranks"
    for number, rank in enumerate(two):
        for what, wanted in one["numbers"].items():
            probe.expect_number(f"{what} of rank {number}", rank["numbers"][what], wanted, "on one")
        probe.expect_weights(rank["weights"], one["weights"], when, _HINT, "one")
    finite = [f"rank {number}" for number, rank in enumerate(two) if math.isfinite(rank["poisoned"])]
    what = f"the loss is NaN on one of {RANKS} ranks, but grad_norm is finite on {{}}"
    hint = "ranks must agree that a step is skipped: reduce the gradients of such a loss too"
    probe.expect_none(finite, what, hint)


def sharded_checkpoint(probe: EngineProbe) -> None:
    """One rank loads what two have saved, and goes on as they do."""
    (one,), two = found = _outcomes(probe)
    hint = "let state_dict and state_template return tensors of the full shape (DTensors)"
    fault = one.get("fault")
    probe.expect(not fault, f"one rank cannot load a checkpoint of {RANKS}: {fault}", hint=hint)
    expect_loaded(probe, found, hint)
    when = f"after a step from a checkpoint of {RANKS} ranks"
    probe.expect_weights(one["resumed"], two[0]["resumed"], when, _HINT, "these")


def _outcomes(probe: EngineProbe) -> Outcomes:
    """What one rank and what two ranks have found.

    Raises:
        NotApplicable: the engine declares that it cannot run so.
        ContractError: a rank failed, with its message.
    """
    probe.require_device(torch.device("cpu"))
    if probe.build().plan(task_on_meta(), RANKS, 2.0).data_parallel != RANKS:
        raise NotApplicable(f"the small instance does not give each of {RANKS} ranks samples of its own")
    return outcomes_of(probe, ", the engine", ComponentBuild(probe), _train_and_save, _train_and_load)


def _train_and_save(work: Work) -> dict[str, Any]:
    """Run by each of two ranks: trains, saves, and goes on."""
    trial, found = _trained(work)
    found["state"] = saved(trial.engine, work.folder)
    trial.step(STEPS, ROWS, clip=CLIP)
    return {**found, "resumed": trial.weights()}


def _train_and_load(work: Work) -> dict[str, Any]:
    """Run by one rank: trains, then loads into a new engine what the two have saved, and goes on."""
    _, found = _trained(work)
    try:
        trial = Trial(work.subject(), seed=9)
        state = loaded(trial.engine, work.folder)
        trial.step(STEPS, ROWS, clip=CLIP)
    except Exception as fault:  # of the checkpoint, not of the training
        return {**found, "fault": fault.what if isinstance(fault, MMError) else sentence_of(fault)}
    return {**found, "loaded": state, "resumed": trial.weights()}


def _trained(work: Work) -> tuple[Trial, dict[str, Any]]:
    """The task after some steps, each row a micro-batch; a step that one rank would skip is discarded."""
    trial = Trial(work.subject())
    numbers = {f"before a step on {RANKS} ranks, the evaluated loss": trial.loss(STEPS)}
    for step in range(STEPS):
        what = f"in step {step + 1} on {RANKS} ranks, grad_norm"
        _, numbers[what] = trial.step(step, ROWS, clip=CLIP)
    numbers[f"after {STEPS} steps on {RANKS} ranks, the evaluated loss"] = trial.loss(STEPS)
    trial.backward(STEPS, ROWS, poisoned(trial.ranks.count - 1))
    norm = trial.engine.grad_norm()
    trial.engine.discard()
    return trial, {"numbers": numbers, "weights": trial.weights(), "poisoned": norm}


def saved(engine: Any, folder: Path) -> Tensors:
    """Saves a checkpoint of an engine; returns its tensors by name. Called by all ranks."""
    state = engine.state_dict()
    store = CheckpointStore(folder, keep=1)
    store.begin(0)
    store.save(STEPS, state, {}, "run: {}\n")
    store.close()
    return _named(state)


def loaded(engine: Any, folder: Path) -> Tensors:
    """Loads what `saved` has saved; returns the template's tensors by name."""
    store = CheckpointStore(folder, keep=1)
    checkpoint, _ = store.open("auto")
    assert checkpoint is not None
    state = engine.state_template({n.rpartition(".")[0] for n in checkpoint.names("optimizer")})
    store.load(checkpoint, state, verified=True)
    return _named(state)


def _named(state: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
    return whole(
        (f"{part}.{name}", tensor) for part, named in state.items() for name, tensor in named.items()
    )
