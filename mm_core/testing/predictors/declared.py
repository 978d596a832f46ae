"""Conformance checks of what a predictor declares: attributes, weights, conditions, FLOPs, sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mm_core.contracts import CLIP_CONDITIONS, SupportsModuleFlops, SupportsShardPlan
from mm_core.errors import ContractError, MMError, PlanError
from mm_core.modules.flops import products_of, step_flops
from mm_core.parallel.layout import decide_layout
from mm_core.tasks.text_to_video.conditions import Conditions
from mm_core.testing.kit import NotApplicable, sentence_of
from mm_core.testing.predictors.forward import expect_output
from mm_core.testing.predictors.probe import PredictorProbe
from mm_core.testing.predictors.training import Training
from mm_core.testing.tensors import differing, expect_close, names, tensors_of

_ALWAYS_GIVEN = CLIP_CONDITIONS.keys() - {"fps"}
"""Conditions that no task leaves out; the frame rate of a clip may be unknown."""


def attributes(probe: PredictorProbe) -> None:
    """Conformance check: the predictor has patch_size, in_channels, ..., and names its conditions."""
    unknown = Conditions(probe.on_meta()).unknown
    probe.expect(
        not unknown,
        f"condition_shapes names `{', '.join(unknown[:1])}`, but the predictor's forward does not",
        hint="add it to the parameters of forward, or remove it from condition_shapes",
    )


def meta_build(probe: PredictorProbe) -> None:
    """Conformance check: the predictor's constructor allocates nothing on the meta device."""
    off = [name for name, tensor in tensors_of(probe.on_meta()).items() if not tensor.is_meta]
    probe.expect(
        not off,
        f"the predictor was built on the meta device, but these tensors are not: {names(off)}",
        accepted="tensors created on the default device; init_weights fills them",
    )


def initialisation(probe: PredictorProbe) -> None:
    """Conformance check: init_weights fills all of the predictor, and equal seeds give equal weights."""
    first, second, other = probe.initialised(), probe.initialised(), probe.initialised(seed=1)
    kept = [
        f"{path}.{name}".strip(".")
        for path, each in first.named_modules()
        for name, value in vars(each).items()
        if name not in ("_parameters", "_buffers", "_modules") and _holds_meta(value)
    ]
    probe.expect(
        not kept or not _fails_on_meta(probe, first),
        f"tensors of {', '.join(kept[:8])} are neither parameters nor buffers, and stay on the meta device",
        hint="compute them in init_weights",
    )
    different = differing(tensors_of(first), tensors_of(second))
    probe.expect(
        not different,
        f"equal seeds give different weights: {names(different)}",
        accepted="random numbers from torch.nn.init and in-place methods of complete parameters",
    )
    probe.expect(
        differing(tensors_of(first), tensors_of(other)),
        "different seeds give the same weights",
        hint="init_weights must draw from torch's default generator",
    )
    probe.initialised(times=2)  # init_weights may run twice: each time over NaN


def _fails_on_meta(probe: PredictorProbe, module: Any) -> bool:
    """Whether the forward uses tensors on the meta device: one may also make them again, where it is."""
    try:
        with torch.no_grad():
            return bool(module(**probe.inputs(module)).is_meta)
    except Exception as error:
        return "meta" in str(error)


def _holds_meta(value: object, seen: tuple[int, ...] = ()) -> bool:
    """Whether an attribute is a tensor on the meta device, or holds one: a list, a dict, a plain object."""
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, nn.Module | type) or id(value) in seen:
        return False
    held: Iterable[object] = (
        value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    )
    held = value.values() if isinstance(value, Mapping) else held
    return any(_holds_meta(each, (*seen, id(value))) for each in held)


def compiles(probe: PredictorProbe) -> None:
    """Conformance check: torch.compile takes the predictor's forward as one graph, if it declares so."""
    if not probe.compiles:
        raise NotApplicable("its Component does not declare it: capabilities={'compiles': True}")
    module = probe.trained()
    inputs = probe.inputs(module)
    with torch.no_grad():
        plain = module(**inputs)
        try:
            compiled = torch.compile(module, backend="eager", fullgraph=True)(**inputs)
        except Exception as fault:
            raise ContractError(
                f"torch.compile does not take forward as one graph: {sentence_of(fault)}",
                where=probe.place,
                hint="branch on shapes and options alone, not on values of tensors; or do not declare it",
            ) from fault
        finally:
            torch.compiler.reset()
    expect_close(probe, compiled, plain, "the compiled output differs", most=1e-5)


def unknown_conditions(probe: PredictorProbe) -> None:
    """Conformance check: the predictor raises an error for an unknown condition."""
    module = probe.trained()
    inputs = probe.inputs(module)
    try:
        with torch.no_grad():
            module(**inputs, no_such_condition=torch.zeros(1))
    except (TypeError, MMError):
        return
    probe.expect(
        False,
        "the predictor silently ignores an unknown condition",
        accepted="TypeError or ContractError",
        hint="name the conditions in forward instead of taking **kwargs",
    )


def missing_conditions(probe: PredictorProbe) -> None:
    """Conformance check: the predictor works without a condition, or raises an error that names it."""
    module: Any = probe.trained()
    takes, inputs = Conditions(module), probe.inputs(module)
    given = [name for name in inputs if name in takes.taken and name not in _ALWAYS_GIVEN]
    if not given:
        raise NotApplicable("the predictor takes no conditions that can be missing")
    for name in given:
        fewer = {key: tensor for key, tensor in inputs.items() if key != name}
        try:
            with torch.no_grad():
                predicted = module(**fewer)
        except Exception as fault:
            named = isinstance(fault, TypeError | ValueError) and name in str(fault)
            probe.expect(
                name in takes.needed and named,
                f"the predictor fails without `{name}`: {sentence_of(fault)}",
                accepted=f"an error that names `{name}` if it is needed, and an output if it has a default",
                hint=f"make `{name}` a parameter of forward without a default if it is needed",
            )
            continue
        probe.expect(
            name not in takes.needed,
            f"the predictor declares `{name}` in condition_shapes, and does not notice that it is missing",
            accepted=f"an error that names `{name}`",
            hint=f"make `{name}` a parameter of forward: without a default if it is needed, or with one",
        )
        expect_output(probe, module, fewer, predicted)


def flops(probe: PredictorProbe) -> None:
    """Conformance check: the predictor's `module_flops` agree with torch's count of FLOPs within 1%."""
    module: Any = probe.trained()
    probe.require(module, SupportsModuleFlops)
    inputs = probe.inputs(module)
    skipped = ("text_mask", *CLIP_CONDITIONS)
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items() if name not in skipped}
    declared = step_flops(module, products_of(module, shapes))
    # torch has no formula for attention's own kernels on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predicted = module(**inputs)
        forward = counter.get_total_flops()
        predicted.sum().backward()
        backward = counter.get_total_flops() - forward
    both = (("forward", declared.forward, forward), ("backward", declared.backward, backward))
    for name, claimed, found in both:
        probe.expect(
            abs(claimed - found) <= 0.01 * found,
            f"`module_flops` gives {claimed:,.0f} operations for the {name}, but torch counts {found:,}",
            accepted="a difference of at most 1%",
            hint="compare each product with its layer, and `after` with what its input depends on",
        )


def sharding_plan(probe: PredictorProbe) -> None:
    """Conformance check: the modules of the predictor's `shard_plan` exist, and are not containers."""
    task = Training(probe.trained())
    probe.require(task.predictor, SupportsShardPlan)
    try:
        decide_layout(task, task.trainable, wrap="auto", recompute=None, ignore=())
    except (PlanError, ContractError) as fault:
        raise ContractError(
            f"{fault.where}: {fault.what}", where=probe.place, accepted=fault.accepted, hint=fault.hint
        ) from None
