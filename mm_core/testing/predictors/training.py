"""Conformance checks of a predictor's training: gradients, recomputation, mixed precision."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import Loss, Randomness, SupportsExperts, TaskModule, seeded
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import ContractError, PlanError
from mm_core.modules.shards import gathered
from mm_core.parallel.activation_checkpointing import recompute
from mm_core.parallel.layout import decide_layout
from mm_core.runtime.process_group import process_group
from mm_core.testing.kit import NotApplicable, sentence_of
from mm_core.testing.predictors.forward import Inputs
from mm_core.testing.predictors.probe import PredictorProbe
from mm_core.testing.tensors import distance, expect_gradients, names
from mm_core.testing.training.engines.task import ROWS, WEIGHTS, Trial


class Training(TaskModule):
    """A task that trains a predictor on fixed targets, with one squared error for each row.

    Args:
        predictor: the predictor.
        inputs: those of ROWS rows, from `PredictorProbe.inputs`, for `loss_of_rows`.
    """

    def __init__(self, predictor: nn.Module, inputs: Inputs | None = None) -> None:
        super().__init__()
        self.predictor, self.inputs = predictor, inputs or {}

    def losses(self, inputs: Inputs, rng: Randomness) -> Tensor:
        """The predictor's squared error [B] for inputs of `PredictorProbe.inputs`."""
        with seeded(rng):
            predicted = self.predictor(**inputs)
        targets = torch.linspace(-1, 1, predicted[0].numel(), device=predicted.device).view_as(predicted[0])
        errors: Tensor = (predicted.float() - targets).square().flatten(1).mean(1)
        return errors

    def loss_of_rows(self, step: int, rows: slice = slice(ROWS), device: torch.device | str = "cpu") -> Loss:
        """The weighted loss of rows of a step, the same for any number of ranks."""
        given = {name: tensor[rows].to(device) for name, tensor in self.inputs.items()}
        errors = self.losses(
            {**given, **routed(self.predictor, step)}, Randomness(5).at(step, rows.start or 0)
        )
        weights = torch.tensor(WEIGHTS[rows], device=device)
        return Loss((errors * weights).sum(), float(weights.sum()))


def prepared(probe: PredictorProbe, **fields: Any) -> Trial:
    """The probe's predictor in an engine, with the weights of `PredictorProbe.trained`, on the group's ranks.

    Args:
        probe: builds the predictor.
        fields: of the engine.
    """
    module = probe.on_meta()
    values = {f"predictor.{name}": t for name, t in probe.trained().state_dict().items()}
    task = Training(module, probe.inputs(module, ROWS))
    return Trial(FSDP2Engine(**fields), _sgd, values, task=task)


def _sgd(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.05, momentum=0.9)


def gradients(probe: PredictorProbe) -> None:
    """Conformance check: every trained parameter of the predictor has a finite gradient."""
    module = probe.trained()
    module(**probe.inputs(module)).square().mean().backward()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    expect_gradients(probe, trained, "output")


def recomputation(probe: PredictorProbe) -> None:
    """Conformance check: recomputed activations give the same loss and gradients as those that are kept."""
    kept, again = (Training(probe.trained().train()) for _ in range(2))
    try:
        layout = decide_layout(again, again.trainable, wrap="auto", recompute="auto", ignore=())
    except PlanError:  # the check sharding_plan reports a wrong plan
        raise NotApplicable(
            "the small predictor has no list of two or more equal blocks, and no plan that names some"
        ) from None
    for path in layout.recomputed:
        recompute(again.get_submodule(path), use_reentrant=False)
    results = []
    for task in (kept, again):
        torch.autograd.backward(task.losses(probe.inputs(task.predictor), Randomness(4)).sum())
        results.append({name: p.grad for name, p in task.named_parameters() if p.grad is not None})
    first, second = results
    differing = [name for name, grad in first.items() if not distance(second[name], grad) <= 1e-6]
    blocks = f"with {layout.recomputed[0].partition('.')[2]} and the like recomputed"
    probe.expect(
        not differing,
        f"{blocks}, other gradients come out for {', '.join(n.partition('.')[2] for n in differing[:4])}",
        hint="a block must compute the same twice: no counters, caches, or random numbers from outside torch",
    )


def mixed_precision(probe: PredictorProbe) -> None:
    """Conformance check: the predictor trains in bf16; casting its inputs itself, if the engine does not."""
    task = Training(probe.trained().train())
    exact = float(task.losses(probe.inputs(task.predictor), Randomness(4)).detach().sum())
    with process_group():
        for fields in ({}, {"cast_forward_inputs": False}):
            where = "with engine.param_dtype: bf16" + "".join(f" and engine.{name}: false" for name in fields)
            try:
                found, dtype = _loss_of(probe, **fields)
            except PlanError as fault:
                raise NotApplicable(f"the engine cannot plan it: {fault.what}") from fault
            except ContractError as fault:
                if fault.where == "engine.cast_forward_inputs":
                    return  # the engine's sentence: the model leaves casting to it
                raise
            except Exception as fault:
                raise ContractError(
                    f"{where}, the predictor fails: {sentence_of(fault)}",
                    where=probe.place,
                    hint="compute in the dtype of the weights: buffers and inputs may have to be cast to it",
                ) from fault
            probe.expect(
                abs(found - exact) <= 0.1 * exact,
                f"{where}, the loss is {found:.4g}, but {exact:.4g} in float32",
                accepted="a difference of at most 10%",
                hint="compute norms, softmax and embeddings of timesteps in float32",
            )
    probe.expect(
        dtype == torch.float32,
        f"{where}, the output has the dtype {dtype}",
        accepted="torch.float32, the dtype of the latents",
        hint="return output.to(latents.dtype) from forward",
    )


def _loss_of(probe: PredictorProbe, **fields: Any) -> tuple[float, torch.dtype]:
    """The loss of a training step in bf16, and the dtype of the predictor's output.

    Gradients that are not finite count if they are so without oneDNN too: its bf16 backward of convolutions
    reads memory that nothing has set, on some CPUs and once in many runs.
    """
    loss, dtype, bad = _step(probe, **fields)
    if bad:
        with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=False):
            loss, dtype, bad = _step(probe, **fields)
    probe.expect(not bad, f"in bf16, gradients are not finite: {names(bad)}")
    return loss, dtype


def _step(probe: PredictorProbe, **fields: Any) -> tuple[float, torch.dtype, list[str]]:
    """As `_loss_of`, and the parameters with gradients that are not finite."""
    dtypes: list[torch.dtype] = []
    trial = prepared(probe, param_dtype="bf16", **fields)
    task: Any = trial.task
    engine = trial.engine
    task.predictor.register_forward_hook(lambda _, __, out: dtypes.append(out.dtype))
    inputs = {name: t.to(engine.device) for name, t in probe.inputs(task.predictor).items()}
    loss = engine.micro_step(
        lambda: Loss(task.losses(inputs, Randomness(4)).sum(), 2.0), last=True, scale=0.5
    )
    grads = {name: p.grad for name, p in task.predictor.named_parameters() if p.grad is not None}
    bad = [name for name, grad in grads.items() if not gathered(grad).isfinite().all()]
    return float(loss.total), dtypes[-1], bad


def routed(module: nn.Module, step: int) -> dict[str, Any]:
    """The arguments that choose the expert of a step, equal on all ranks; none without experts."""
    if not isinstance(module, SupportsExperts):
        return {}
    trained = [expert.name for expert in module.experts if expert.trained]
    return {"expert": trained[step % len(trained)]}
