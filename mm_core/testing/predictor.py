"""Conformance checks of predictors (`mm_core.contracts.Predictor`), on the CPU, with small models."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mm_core.contracts import CLIP_CONDITIONS, Randomness, SupportsModuleFlops
from mm_core.errors import ContractError, MMError, first_line, plural
from mm_core.modules.flops import step_flops
from mm_core.tasks.text_to_video.conditions import Conditions, cast_condition
from mm_core.testing.predictor_probe import Build, PredictorProbe


def check_predictor(
    build: Build,
    *,
    patches: tuple[int, int, int] | None = None,
    text_length: int = 6,
    conditions: Mapping[str, Sequence[int] | Tensor] | None = None,
) -> None:
    """Runs every conformance check of PREDICTOR_CHECKS on a predictor.

    It gets the conditions that its forward names: `fps`, `size` and `guidance`, and those with known shapes.

    Args:
        build: creates the predictor with a small config: a function, a component's name, or a mapping with
            `type` as in a YAML.
        patches: tokens of the test clips along (t, h, w); None: (2, 3, 2), with one frame for a predictor
            whose `max_frames` is 1.
        text_length: tokens of the test captions.
        conditions: name -> shape of one sample's tensor, without the batch, or such a tensor; for conditions
            that the predictor does not declare in `condition_shapes`.

    Raises:
        ContractError: lists every check that failed.
    """
    probe = PredictorProbe(build, patches, text_length, conditions)
    faults = []
    for name, check in PREDICTOR_CHECKS.items():
        try:
            check(probe)
        except MMError as fault:
            faults.append(f"{name}: {fault.render()}")
        except Exception as fault:  # any exception of the model is a failed check
            place = traceback.extract_tb(fault.__traceback__)[-1]
            faults.append(f"{name}: {type(fault).__name__}: {fault} ({place.filename}:{place.lineno})")
    if faults:
        raise ContractError(
            "\n".join([f"the predictor fails {len(faults)} of {len(PREDICTOR_CHECKS)} checks:", *faults])
        )


def attributes(probe: PredictorProbe) -> None:
    """Conformance check: the predictor has patch_size, in_channels, text_dim, text_padding, ..."""
    module: Any = probe.on_meta()
    names = ("patch_size", "in_channels", "out_channels", "text_dim", "text_padding", "init_weights")
    if missing := [name for name in names if not hasattr(module, name)]:
        raise ContractError(
            f"the predictor lacks the attributes {', '.join(missing)}",
            hint="set them in its class or constructor",
        )
    if len(module.patch_size) != 3 or not all(isinstance(size, int) for size in module.patch_size):
        raise ContractError(f"patch_size is {module.patch_size!r}", accepted="three integers (t, h, w)")
    if unknown := Conditions(module).unknown:
        raise ContractError(
            f"condition_shapes names `{unknown[0]}`, but the predictor's forward does not",
            where=probe.place,
            hint="add it to the parameters of forward, or remove it from condition_shapes",
        )
    padding = module.text_padding
    fixed = isinstance(padding, tuple) and len(padding) == 2 and padding[0] == "fixed"
    if padding != "masked" and not fixed:
        raise ContractError(f"text_padding is {padding!r}", accepted="'masked', or ('fixed', n)")


def meta_build(probe: PredictorProbe) -> None:
    """Conformance check: the predictor's constructor allocates nothing on the meta device."""
    module = probe.on_meta()
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if off := [name for name, tensor in tensors if tensor.device.type != "meta"]:
        raise ContractError(
            f"the predictor was built on the meta device, but these tensors are not: {', '.join(off[:8])}",
            accepted="tensors created on the default device; init_weights fills them",
        )


def initialisation(probe: PredictorProbe) -> None:
    """Conformance check: init_weights fills all of the predictor, and equal seeds give equal weights."""
    first, second, other = probe.initialised(), probe.initialised(), probe.initialised(seed=1)
    if different := _differing(first, second):
        raise ContractError(
            f"equal seeds give different weights: {', '.join(different[:8])}",
            accepted="random numbers from torch.nn.init and in-place methods of complete parameters",
        )
    if not _differing(first, other):
        raise ContractError(
            "different seeds give the same weights",
            hint="init_weights must draw from torch's default generator",
        )


def output(probe: PredictorProbe) -> None:
    """Conformance check: the predictor's output has the latents' size and dtype, is finite, is no view."""
    module: Any = probe.trained()
    inputs = probe.inputs(module)
    latents = inputs["latents"]
    wanted = (len(latents), module.out_channels, *latents.shape[2:])
    with torch.no_grad(), _hint_of_images(module, inputs):
        predicted = module(**inputs)
    if tuple(predicted.shape) != wanted:
        raise ContractError(
            f"the predictor's output has the shape {tuple(predicted.shape)}",
            where=probe.place,
            accepted=str(wanted),
            hint="return a prediction of the same shape as the latents",
        )
    if predicted.dtype != latents.dtype:
        raise ContractError(
            f"the predictor's output has the dtype {predicted.dtype}",
            where=probe.place,
            accepted=str(latents.dtype),
            hint="return output.to(latents.dtype) from forward",
        )
    if not predicted.isfinite().all():
        raise ContractError(
            "the predictor's output contains NaN or infinity",
            where=probe.place,
            hint="check that init_weights fills all parameters, and that forward does not divide by zero",
        )
    if predicted._is_view():
        raise ContractError(
            "the predictor's output is a view of another tensor: FSDP2 may then drop its backward hook",
            where=probe.place,
            hint="return output.clone() from forward",
        )


def gradients(probe: PredictorProbe) -> None:
    """Conformance check: the predictor's gradients are finite, and at least one parameter has one."""
    module = probe.trained()
    module(**probe.inputs(module)).square().mean().backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    if not found or (bad := [name for name, grad in found.items() if not grad.isfinite().all()]):
        what = f"gradients are not finite: {', '.join(bad[:8])}" if found else "no parameter has a gradient"
        hint = "return an output that is computed from the parameters, by differentiable functions"
        raise ContractError(what, where=probe.place, hint=hint)


def determinism(probe: PredictorProbe) -> None:
    """Conformance check: the predictor gives equal outputs for equal inputs, in evaluation mode."""
    module = probe.trained()
    inputs = probe.inputs(module)
    _expect_equal(module, inputs, inputs, "equal inputs give different outputs", 0.0)


def independence(probe: PredictorProbe) -> None:
    """Conformance check: the predictor's output for a sample is independent of the rest of the batch."""
    module = probe.trained()
    inputs = probe.inputs(module, batch=3)
    alone = {name: tensor[:1] for name, tensor in inputs.items()}
    with torch.no_grad():
        together, single = module(**inputs)[:1], module(**alone)
    if (error := _distance(together, single)) > 1e-5:
        raise ContractError(
            f"the outputs for a sample alone and in a batch differ by {error:.1e}", accepted="at most 1e-5"
        )


def text_padding(probe: PredictorProbe) -> None:
    """Conformance check: masked text, and its length, does not change the predictor's output."""
    module: Any = probe.trained()
    if module.text_padding != "masked":
        return
    inputs = probe.inputs(module)
    text, mask = inputs["text"], inputs["text_mask"]
    garbage = torch.where(mask[..., None], text, 1e3 * Randomness(3).normal(tuple(text.shape), "garbage"))
    _expect_equal(module, inputs, {**inputs, "text": garbage}, "masked text changes the output")
    longer = {
        **inputs,
        "text": torch.cat([garbage, 1e3 * torch.ones_like(text)], dim=1),
        "text_mask": torch.cat([mask, torch.zeros_like(mask)], dim=1),
    }
    _expect_equal(module, inputs, longer, "longer padding changes the output")
    with torch.no_grad():
        empty = module(**{**inputs, "text_mask": torch.zeros_like(mask)})
    if not empty.isfinite().all():
        raise ContractError(
            "the output contains NaN or infinity for an empty caption (a text_mask that is all false)",
            where=probe.place,
            hint="let attention over an empty text return 0: a softmax of scores that are all -inf is NaN",
        )


def timestep_precision(probe: PredictorProbe) -> None:
    """Conformance check: the predictor does not round timestep 998.7 to 998, 999 or 1000."""
    for dtype in (torch.float32, torch.bfloat16):
        # A library's own `to` may warn of layers that it would keep in float32: here all are cast on purpose.
        module = nn.Module.to(probe.trained(), dtype)
        inputs = probe.inputs(module, batch=1)
        inputs |= {n: cast_condition(n, t, dtype) for n, t in inputs.items() if n != "timestep"}

        def at(timestep: float, module: nn.Module = module, inputs: dict[str, Tensor] = inputs) -> Tensor:
            with torch.no_grad():
                predicted: Tensor = module(**{**inputs, "timestep": torch.tensor([timestep])})
            return predicted

        exact = at(998.7)
        if same := [rounded for rounded in (998.0, 999.0, 1000.0) if torch.equal(exact, at(rounded))]:
            raise ContractError(
                f"in {dtype}, timestep 998.7 is rounded to {same[0]:g}",
                accepted="float32 from the argument `timestep` to its sinusoidal embedding",
            )


def unknown_conditions(probe: PredictorProbe) -> None:
    """Conformance check: the predictor raises an error for an unknown condition."""
    module = probe.trained()
    inputs = probe.inputs(module)
    try:
        with torch.no_grad():
            module(**inputs, no_such_condition=torch.zeros(1))
    except (TypeError, MMError):
        return
    raise ContractError(
        "the predictor silently ignores an unknown condition",
        accepted="TypeError or ContractError",
        hint="name the conditions in forward instead of taking **kwargs",
    )


def flops(probe: PredictorProbe) -> None:
    """Conformance check: the predictor's `module_flops` agree with torch's count of FLOPs within 1%."""
    module = probe.trained()
    inputs = probe.inputs(module)
    if not isinstance(module, SupportsModuleFlops):
        return
    skipped = ("text_mask", *CLIP_CONDITIONS)
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items() if name not in skipped}
    declared = step_flops(module, module.module_flops(**shapes))
    # torch has no formula for attention's own kernels on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predicted = module(**inputs)
        forward = counter.get_total_flops()
        predicted.sum().backward()
        backward = counter.get_total_flops() - forward
    both = (("forward", declared.forward, forward), ("backward", declared.backward, backward))
    for name, claimed, found in both:
        if abs(claimed - found) > 0.01 * found:
            raise ContractError(
                f"`module_flops` gives {claimed:,.0f} operations for the {name}, but torch counts {found:,}",
                accepted="a difference of at most 1%",
                hint="compare each product with its layer, and `after` with what its input depends on",
            )


_CHECKS = (
    *(attributes, meta_build, initialisation, output, gradients, determinism, independence),
    *(text_padding, timestep_precision, unknown_conditions, flops),
)
PREDICTOR_CHECKS: Mapping[str, Callable[[PredictorProbe], None]] = MappingProxyType(
    {check.__name__: check for check in _CHECKS}
)
"""Each conformance check by its name, to run one test per check."""


@contextmanager
def _hint_of_images(module: nn.Module, inputs: dict[str, Tensor]) -> Iterator[None]:
    """A context for the forward of a clip: if it fails, but works for one frame, the error says so."""
    try:
        yield
    except Exception as fault:
        frames, first = inputs["latents"].shape[2], int(module.patch_size[0])  # type: ignore[index]
        try:
            if frames <= first:
                raise fault
            module(**{**inputs, "latents": inputs["latents"][:, :, :first]})
        except Exception:
            raise fault from None
        raise ContractError(
            f"the predictor takes {plural(first, 'latent frame')}, but not {frames}: "
            f"{type(fault).__name__}: {first_line(fault)}",
            hint=f"correct its forward, or set max_frames = {first} in its class if it takes no clips",
        ) from fault


def _differing(first: nn.Module, second: nn.Module) -> list[str]:
    others = dict([*second.named_parameters(), *second.named_buffers()])
    named = [*first.named_parameters(), *first.named_buffers()]
    return [name for name, tensor in named if not torch.equal(tensor, others[name])]


def _distance(first: Tensor, second: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-12))


def _expect_equal(
    module: nn.Module, inputs: dict[str, Tensor], others: dict[str, Tensor], what: str, most: float = 1e-5
) -> None:
    with torch.no_grad():
        error = _distance(module(**inputs), module(**others))
    if not error <= most:  # NaN too
        raise ContractError(f"{what}, by {error:.1e}", accepted=f"at most {most:g}")
