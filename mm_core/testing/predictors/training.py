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
from mm_core.runtime.ranks import Ranks
from mm_core.testing.kit import NotApplicable, sentence_of
from mm_core.testing.predictors.forward import Inputs, distance
from mm_core.testing.predictors.probe import PredictorProbe
from mm_core.testing.training.engines.task import Values


class Training(TaskModule):
    """A task that trains a predictor on fixed targets, with one squared error for each row."""

    def __init__(self, predictor: nn.Module) -> None:
        super().__init__()
        self.predictor = predictor

    def losses(self, inputs: Inputs, rng: Randomness) -> Tensor:
        """The predictor's squared error [B] for inputs of `PredictorProbe.inputs`."""
        with seeded(rng):
            predicted = self.predictor(**inputs)
        targets = torch.linspace(-1, 1, predicted[0].numel(), device=predicted.device).view_as(predicted[0])
        errors: Tensor = (predicted.float() - targets).square().flatten(1).mean(1)
        return errors

    def summed(self, inputs: Inputs, rng: Randomness) -> Loss:
        """The sum of `losses`, with the number of rows as its weight."""
        return Loss(self.losses(inputs, rng).sum(), float(len(inputs["timestep"])))


def prepared(probe: PredictorProbe, **fields: Any) -> tuple[Training, FSDP2Engine]:
    """The probe's predictor in an engine, with the weights of `PredictorProbe.trained`, on the group's ranks.

    Args:
        probe: builds the predictor.
        fields: of the engine.
    """
    task, engine = Training(probe.on_meta()), FSDP2Engine(**fields)
    plan = engine.plan(task, Ranks.current().count, 1.0)
    values = Values({f"predictor.{name}": t for name, t in probe.trained().state_dict().items()})

    def optimizer(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(named.values(), lr=0.05, momentum=0.9)

    engine.prepare(task, plan, optimizer, Randomness(0), values)
    return task, engine


def gradients(probe: PredictorProbe) -> None:
    """Conformance check: every trained parameter of the predictor has a finite gradient."""
    module = probe.trained()
    module(**probe.inputs(module)).square().mean().backward()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    lost = [name for name, parameter in trained.items() if parameter.grad is None]
    probe.expect(
        trained and not lost,
        f"the output does not depend on {', '.join(lost[:8])}" if trained else "no parameter is trained",
        accepted="a gradient for each parameter with requires_grad",
        hint="compute the output from the parameters by differentiable functions (no `.data`, `.detach()`, "
        "`.item()`), and make no parameters that the forward does not use",
    )
    bad = [name for name, p in trained.items() if p.grad is None or not p.grad.isfinite().all()]
    probe.expect(
        not bad,
        f"gradients are not finite: {', '.join(bad[:8])}",
        hint="mind square roots and norms of zero, and divisions, in forward",
    )


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
        loss = task.losses(probe.inputs(task.predictor), Randomness(4)).sum()
        torch.autograd.backward(loss)
        results.append((loss.detach(), {name: p.grad for name, p in task.named_parameters()}))
    (loss, first), (other, second) = results
    differing = [name for name, grad in first.items() if not _close(grad, second[name])]
    blocks = f"with {layout.recomputed[0].partition('.')[2]} and the like recomputed"
    hint = "a block must compute the same twice: no counters, caches, or random numbers from outside torch"
    probe.expect(
        torch.equal(loss, other), f"{blocks}, the loss is {other:.6g} instead of {loss:.6g}", hint=hint
    )
    probe.expect(
        not differing,
        f"{blocks}, other gradients come out for {', '.join(n.partition('.')[2] for n in differing[:4])}",
        hint=hint,
    )


def _close(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return distance(first, second) <= 1e-6


def mixed_precision(probe: PredictorProbe) -> None:
    """Conformance check: the predictor trains in bf16; casting its inputs itself, if the engine does not."""
    task = Training(probe.trained().train())
    exact = float(task.losses(probe.inputs(task.predictor), Randomness(4)).detach().sum())
    where = "with engine.param_dtype: bf16"
    with process_group():
        try:
            found, _ = _loss_of(probe)
            _expect_near(probe, found, exact, where)
            where += " and engine.cast_forward_inputs: false"
            found, dtype = _loss_of(probe, cast_forward_inputs=False)
        except PlanError as fault:
            raise NotApplicable(f"the engine cannot plan it: {fault.what}") from fault
        except NotApplicable:
            raise
        except ContractError as fault:
            if fault.where == "engine.cast_forward_inputs":
                return  # the engine's sentence: the model leaves casting to it
            raise
        except Exception as fault:
            raise ContractError(
                f"{where}, the predictor fails: {sentence_of(fault)}",
                where=probe.place,
                hint="compute in the dtype of the weights, to which buffers and inputs may have to be cast",
            ) from fault
    _expect_near(probe, found, exact, where)
    probe.expect(
        dtype == torch.float32,
        f"{where}, the output has the dtype {dtype}",
        accepted="torch.float32, the dtype of the latents",
        hint="return output.to(latents.dtype) from forward",
    )


def _loss_of(probe: PredictorProbe, **fields: Any) -> tuple[float, torch.dtype]:
    """The loss of a training step in bf16, and the dtype of the predictor's output."""
    dtypes: list[torch.dtype] = []
    task, engine = prepared(probe, param_dtype="bf16", **fields)
    task.predictor.register_forward_hook(lambda _, __, out: dtypes.append(out.dtype))
    inputs = {name: t.to(engine.device) for name, t in probe.inputs(task.predictor).items()}
    loss = engine.micro_step(lambda: task.summed(inputs, Randomness(4)), last=True, scale=0.5)
    if not engine.grad_norm() < float("inf"):
        bad = _not_finite(task.predictor)
        _excuse_torch(probe, engine.device)
        probe.expect(False, f"in bf16, gradients are not finite: {', '.join(bad[:8])}")
    return float(loss.total), dtypes[-1]


def _not_finite(module: nn.Module) -> list[str]:
    """The parameters with gradients that are not finite."""
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return [name for name, grad in grads.items() if not gathered(grad).isfinite().all()]


def _excuse_torch(probe: PredictorProbe, device: torch.device) -> None:
    """Raises NotApplicable if oneDNN makes such gradients for the module alone, without an engine: its bf16
    backward of convolutions reads memory that nothing has set, on some CPUs and once in many runs."""

    def fails() -> bool:
        module = probe.trained().train()
        for parameter in module.parameters():
            parameter.data = parameter.to(torch.bfloat16)
        inputs = probe.inputs(module)
        inputs |= {n: t.bfloat16() for n, t in inputs.items() if t.is_floating_point() and n != "timestep"}
        unset = [torch.full((1 << size,), float("nan")) for size in range(8, 20)]
        del unset  # what the next tensors that nothing sets are likely to hold
        torch.autograd.backward(Training(module).losses(inputs, Randomness(4)).sum())
        return bool(_not_finite(module))

    onednn: Any = torch.backends.mkldnn
    if device.type != "cpu" or not onednn.enabled or not any(fails() for _ in range(40)):
        return
    with warnings.catch_warnings(action="ignore"), onednn.flags(enabled=False):
        if any(fails() for _ in range(40)):
            return
    raise NotApplicable(
        "torch's oneDNN makes gradients that are not finite in bf16 on this CPU, also for the module alone,"
        " and not without oneDNN: the check may work with ONEDNN_MAX_CPU_ISA=AVX2"
    )


def _expect_near(probe: PredictorProbe, found: float, exact: float, when: str) -> None:
    probe.expect(
        abs(found - exact) <= 0.1 * exact,
        f"{when}, the loss is {found:.4g}, but {exact:.4g} in float32",
        accepted="a difference of at most 10%",
        hint="compute norms, softmax and embeddings of timesteps in float32",
    )


def routed(module: nn.Module, step: int) -> dict[str, Any]:
    """The arguments that choose the expert of a step, equal on all ranks; none without experts."""
    if not isinstance(module, SupportsExperts):
        return {}
    trained = [expert.name for expert in module.experts if expert.trained]
    return {"expert": trained[step % len(trained)]}
