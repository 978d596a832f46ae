"""Conformance checks of a predictor on two ranks: it trains as on one, and one loads their checkpoint."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mm_core.builtin.configs.engines import ContextParallelConfig
from mm_core.contracts import SupportsContextPlan, SupportsInputs
from mm_core.modules.shards import gathered
from mm_core.testing.predictors.probe import PredictorProbe
from mm_core.testing.predictors.training import prepared
from mm_core.testing.ranks import ranks_of
from mm_core.testing.tensors import differing, names
from mm_core.testing.training.engines.sharded import (
    RANKS,
    STEPS,
    Outcomes,
    Work,
    expect_loaded,
    loaded,
    outcomes_of,
    saved,
)
from mm_core.testing.training.engines.task import Trial

Kind = Literal["ulysses", "ring"]


def sharded_training(probe: PredictorProbe) -> None:
    """Conformance check: two ranks that share the predictor's weights train as one that has all of them."""
    one, two = _outcomes(probe)
    hint = "use parameters in the forward of the module that owns them, and no statistics of the batch"
    _expect_equal(probe, one, two, f"on {RANKS} ranks", hint)


def context_parallel(probe: PredictorProbe) -> None:
    """Conformance check: two ranks that share each sample's tokens train the predictor as one rank does."""
    predictor = probe.on_meta()
    probe.require(predictor, SupportsContextPlan)
    one, _ = _outcomes(probe)
    hint = "name in `split` every tensor with tokens that a module after it reads, and in `attention` every"
    hint += " module that mixes tokens"
    plan = predictor.context_plan()
    kinds: dict[Kind, bool] = {"ulysses": plan.heads >= RANKS, "ring": plan.ring}
    for kind in [name for name, works in kinds.items() if works]:
        work: tuple[PredictorProbe, Kind] = (probe, kind)
        two = ranks_of(probe, f" that share samples ({kind}), the predictor", RANKS, _train_parts, work)
        _expect_equal(probe, one, two, f"on {RANKS} ranks that share samples ({kind})", hint)


def _expect_equal(probe: PredictorProbe, one: list[Any], two: list[Any], where: str, hint: str) -> None:
    """Compares the losses and gradients of each step with those of one rank."""
    for step in range(STEPS):
        losses = [sum(rank["losses"][step] for rank in ranks) for ranks in (one, two)]
        when = f"in step {step + 1} {where}"
        probe.expect(
            abs(losses[1] - losses[0]) <= 1e-5 * abs(losses[0]),
            f"{when}, the loss is {losses[1]:.7g}, and {losses[0]:.7g} on one",
            accepted="a difference of at most 1e-5",
            hint=hint,
        )
        wanted, found = one[0]["gradients"][step], two[0]["gradients"][step]
        largest = max(float(grad.abs().max()) for grad in wanted.values())
        # Of gradients that cancel to zero, as that of a key's bias, only rounding is left.
        wrong = [
            name
            for name, grad in wanted.items()
            if name not in found
            or not (found[name] - grad).abs().max() <= 1e-5 * float(grad.abs().max()) + 1e-6 * largest
        ]
        probe.expect(not wrong, f"{when}, other gradients than on one come out for {names(wrong)}", hint=hint)


def sharded_checkpoint(probe: PredictorProbe) -> None:
    """Conformance check: one rank loads, bit for bit, what two have saved."""
    _, two = found = _outcomes(probe)
    different = differing(two[0]["whole"], two[1]["whole"])
    probe.expect(
        not different,
        f"after {STEPS} steps, {names(different)} differs between the ranks, and a checkpoint has one value",
        accepted="buffers that are the same on all ranks",
        hint="let no buffer depend on the samples of a rank, or register it with persistent=False",
    )
    hint = "keep all state in parameters and buffers, and make the same ones in each constructor"
    expect_loaded(probe, found, hint)


def _outcomes(probe: PredictorProbe) -> Outcomes:
    """What one rank and what two ranks have found.

    Raises:
        NotApplicable: the predictor cannot be built in another process, or its inputs are not known.
        ContractError: a rank failed, with its message.
    """
    hint = "use parameters in the forward of the module that owns them: elsewhere, they are shards"
    with torch.device("meta"):
        predictor = probe.build()
    if isinstance(predictor, SupportsInputs):
        probe.inputs(predictor)
    return outcomes_of(probe, ", the predictor", probe, _train_and_save, _train_and_load, hint)


def _train_and_save(work: Work) -> dict[str, Any]:
    """Run by each of two ranks: trains, then saves."""
    trial = prepared(work.subject)
    found = _train(trial)
    model = trial.engine.state_dict()["model"]
    own = {name: t.detach() for name, t in model.items() if not isinstance(t, DTensor)}
    return {**found, "state": saved(trial.engine, work.folder), "whole": own}


def _train_and_load(work: Work) -> dict[str, Any]:
    """Run by one rank: trains, then loads into a new engine what the two have saved."""
    found = _train(prepared(work.subject))
    return {**found, "loaded": loaded(prepared(work.subject).engine, work.folder)}


def _train_parts(work: tuple[PredictorProbe, Kind]) -> dict[str, Any]:
    """Run by each of two ranks that share samples: trains."""
    probe, kind = work
    return _train(prepared(probe, context_parallel=ContextParallelConfig(RANKS, kind)))


def _train(trial: Trial) -> dict[str, Any]:
    """The losses of this rank's rows, and the averaged gradients of each step."""
    engine = trial.engine
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        losses.append(trial.backward(step, RANKS) * engine.data_ranks.leads)
        gradients.append({n: gathered(p.grad) for n, p in engine.named_parameters() if p.grad is not None})
        engine.step(engine.grad_norm(), None)
    return {"losses": losses, "gradients": gradients}
