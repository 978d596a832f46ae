"""Conformance checks of a predictor on two ranks: it trains as on one, and one loads their checkpoint."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mm_core.builtin.configs.engines import ContextParallelConfig
from mm_core.contracts import Randomness, SupportsContextPlan
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import ContractError, MMError
from mm_core.modules.shards import gathered
from mm_core.testing.kit import NotApplicable
from mm_core.testing.predictors.probe import PredictorProbe
from mm_core.testing.predictors.training import Training, prepared, routed
from mm_core.testing.ranks import on_ranks
from mm_core.testing.training.engines.probe import differing
from mm_core.testing.training.engines.sharded import loaded, saved

STEPS, RANKS, ROWS = 2, 2, 4
Tensors = dict[str, Tensor]
Kind = Literal["ulysses", "ring"]


@dataclass(frozen=True)
class _Work:
    """What each rank does: it trains a new predictor of the probe, and saves or loads a checkpoint."""

    probe: PredictorProbe
    folder: Path


def sharded_training(probe: PredictorProbe) -> None:
    """Conformance check: two ranks that share the predictor's weights train as one that has all of them."""
    one, two = _outcomes(probe)
    hint = "use parameters in the forward of the module that owns them, and no statistics of the batch"
    _expect_equal(probe, one, two, f"on {RANKS} ranks", hint)


def context_parallel(probe: PredictorProbe) -> None:
    """Conformance check: two ranks that share each sample's tokens train the predictor as one rank does."""
    predictor = probe.on_meta()
    if not isinstance(predictor, SupportsContextPlan):
        raise NotApplicable("the predictor has no context_plan")
    one, _ = _outcomes(probe)
    kinds: tuple[Kind, ...] = ("ulysses", "ring")
    for kind in kinds[predictor.context_plan().heads < RANKS :]:
        work: tuple[PredictorProbe, Kind] = (probe, kind)
        try:
            two = on_ranks(RANKS, _train_parts, work)
        except MMError as fault:
            raise ContractError(
                f"on {RANKS} ranks that share samples ({kind}), the predictor fails: {fault.what}",
                where=probe.place,
                accepted=fault.accepted,
                hint=fault.hint,
            ) from None
        hint = (
            "name in `split` every tensor with tokens that a module after it reads, and in `attention` every"
        )
        hint += " module that mixes tokens"
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
        probe.expect(
            wanted.keys() == found.keys(),
            f"{when}, other parameters have gradients than on one: {', '.join(wanted.keys() ^ found.keys())}",
            hint=hint,
        )
        largest = max(float(grad.abs().max()) for grad in wanted.values())
        for name, grad in wanted.items():
            error = float((found[name] - grad).abs().max())
            # Of gradients that cancel to zero, as that of a key's bias, only rounding is left.
            probe.expect(
                error <= 1e-5 * float(grad.abs().max()) + 1e-6 * largest,
                f"{when}, the gradient of {name} differs by {error:.1e} from that on one",
                accepted=f"at most 1e-5 of {float(grad.abs().max()):.1e}",
                hint=hint,
            )


def sharded_checkpoint(probe: PredictorProbe) -> None:
    """Conformance check: one rank loads, bit for bit, what two have saved."""
    try:
        one, two = _outcomes(probe)
    except MMError as fault:
        raise NotApplicable(f"the predictor does not train on {RANKS} ranks: see sharded_training") from fault
    first, *others = (rank["whole"] for rank in two)
    for other in others:
        different = [name for name, tensor in first.items() if not torch.equal(tensor, other[name])]
        probe.expect(
            not different,
            f"after {STEPS} steps, {', '.join(different[:4])} differs between the ranks, and a checkpoint has"
            " one value",
            accepted="buffers that are the same on all ranks",
            hint="let no buffer depend on the samples of a rank, or register it with persistent=False",
        )
    lost = differing(two[0]["state"], one[0]["loaded"])
    probe.expect(
        not lost,
        f"a checkpoint of {RANKS} ranks, loaded on one, gives other values of {', '.join(sorted(lost)[:4])}",
        hint="keep all state in parameters and buffers, and make the same ones in each constructor",
    )


def _outcomes(probe: PredictorProbe) -> tuple[list[Any], list[Any]]:
    """What one rank and what two ranks have found; of a probe, they run once.

    Raises:
        NotApplicable: the predictor cannot be built in another process.
        ContractError: a rank failed, with its message.
    """
    if probe.outcomes is None:
        with tempfile.TemporaryDirectory(prefix="mm-sharded-") as folder:
            work = _Work(probe, Path(folder))
            try:
                two = on_ranks(RANKS, _train_and_save, work)
                probe.outcomes = (on_ranks(1, _train_and_load, work), two)
            except MMError as error:
                probe.outcomes = error
    if isinstance(fault := probe.outcomes, MMError):
        raise ContractError(
            f"on {RANKS} ranks, the predictor fails: {fault.what}",
            where=probe.place,
            accepted=fault.accepted,
            hint=fault.hint
            or "use parameters in the forward of the module that owns them: elsewhere, they are shards",
        )
    one, two = probe.outcomes
    return one, two


def _train_and_save(work: _Work) -> dict[str, Any]:
    """Run by each of two ranks: trains, then saves."""
    task, engine = prepared(work.probe)
    found = _train(work.probe, task, engine)
    model = engine.state_dict()["model"]
    own = {name: t.detach() for name, t in model.items() if not isinstance(t, DTensor)}
    return {**found, "state": saved(engine, work.folder), "whole": own}


def _train_and_load(work: _Work) -> dict[str, Any]:
    """Run by one rank: trains, then loads into a new engine what the two have saved."""
    found = _train(work.probe, *prepared(work.probe))
    _, engine = prepared(work.probe)
    return {**found, "loaded": loaded(engine, work.folder)}


def _train_parts(work: tuple[PredictorProbe, Kind]) -> dict[str, Any]:
    """Run by each of two ranks that share samples: trains."""
    probe, kind = work
    return _train(probe, *prepared(probe, context_parallel=ContextParallelConfig(RANKS, kind)))


def _train(probe: PredictorProbe, task: Training, engine: FSDP2Engine) -> dict[str, Any]:
    """The losses of this rank's rows, and the averaged gradients of each step.

    Each micro-batch has the same rows and random numbers for any number of ranks.
    """
    module, share = task.predictor, engine.data_ranks
    world, rank = share.count, share.rank
    rows = ROWS // RANKS
    losses: list[float] = []
    gradients: list[Tensors] = []
    for step in range(STEPS):
        total = 0.0
        for number, micro in enumerate(range(rank, RANKS, world)):
            chosen = slice(micro * rows, (micro + 1) * rows)
            inputs = {name: tensor[chosen] for name, tensor in probe.inputs(module, ROWS).items()}
            inputs |= routed(module, step)
            rng = Randomness(5).at(step, micro)

            def compute(inputs: Any = inputs, rng: Randomness = rng) -> Any:
                return task.summed(inputs, rng)

            last = number == RANKS // world - 1
            total += float(engine.micro_step(compute, last=last, scale=world / ROWS).total)
        losses.append(total * share.leads)
        gradients.append({n: gathered(p.grad) for n, p in engine.named_parameters() if p.grad is not None})
        engine.step(engine.grad_norm(), None)
    return {"losses": losses, "gradients": gradients}
