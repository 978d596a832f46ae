"""Checks of the predictor contract (`mm_core.contracts.Predictor`), on the CPU, with small models."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mm_core.contracts import Randomness, SupportsModuleFlops
from mm_core.errors import ContractError, MMError
from mm_core.modules.flops import step_flops
from mm_core.modules.initialise import initialise
from mm_core.plugin.registry import build as build_component

Build = Callable[[], object] | Mapping[str, object] | str
"""A function that makes a small predictor, or what `mm_core.build("predictor", ...)` takes."""


class PredictorProbe:
    """Builds the predictor anew for each check, and inputs that fit it.

    Args:
        build: makes the predictor, with a small config.
        patches: tokens of the test clips along (t, h, w).
        text_length: tokens of the test captions.
    """

    def __init__(self, build: Build, patches: tuple[int, int, int] = (2, 3, 2), text_length: int = 6) -> None:
        self.build = build if callable(build) else lambda: build_component("predictor", build)
        self.patches = patches
        self.text_length = text_length

    def on_meta(self) -> nn.Module:
        """The predictor as the core builds it."""
        with torch.device("meta"):
            module = self.build()
        if not isinstance(module, nn.Module):
            raise ContractError(f"the predictor is a {type(module).__name__}, not a torch.nn.Module")
        return module

    def initialised(self, seed: int = 0) -> nn.Module:
        """Materialised on the CPU and initialised as the engine does it, over a poison of NaN."""
        module = self.on_meta().to_empty(device="cpu")
        initialise(module, "predictor", Randomness(seed))
        return module.eval()

    def trained(self) -> nn.Module:
        """Initialised, then moved a little, as if trained: heads that start at zero would hide faults."""
        module = self.initialised()
        rng = Randomness(1)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.add_(0.05 * rng.normal(tuple(parameter.shape), name))
        return module

    def inputs(self, module: Any, batch: int = 2) -> dict[str, Tensor]:
        """Latents, timesteps, text and mask; the last row's caption is shorter than the others."""
        rng = Randomness(2)
        sizes = [p * n for p, n in zip(module.patch_size, self.patches, strict=True)]
        length = self.text_length if module.text_padding == "masked" else module.text_padding[1]
        mask = torch.ones(batch, length, dtype=torch.bool)
        mask[-1, max(1, length // 2) :] = False
        text = rng.normal((batch, length, module.text_dim), "text").masked_fill(~mask[..., None], 0)
        return {
            "latents": rng.normal((batch, module.in_channels, *sizes), "latents"),
            "timestep": torch.linspace(998.7, 12.5, batch),
            "text": text,
            "text_mask": mask,
        }


def check_predictor(build: Build, *, patches: tuple[int, int, int] = (2, 3, 2), text_length: int = 6) -> None:
    """Runs every check of PREDICTOR_CHECKS. ContractError with all that fail.

    Args:
        build: makes the predictor with a small config: a function, a component's name, or a mapping
            with `type` as a YAML holds it.
        patches: tokens of the test clips along (t, h, w).
        text_length: tokens of the test captions.
    """
    probe = PredictorProbe(build, patches, text_length)
    faults = []
    for name, check in PREDICTOR_CHECKS.items():
        try:
            check(probe)
        except MMError as fault:
            faults.append(f"{name}: {fault.render()}")
        except Exception as fault:  # whatever a model raises is a finding here
            place = traceback.extract_tb(fault.__traceback__)[-1]
            faults.append(f"{name}: {type(fault).__name__}: {fault} ({place.filename}:{place.lineno})")
    if faults:
        raise ContractError(
            "\n".join([f"the predictor fails {len(faults)} of {len(PREDICTOR_CHECKS)} checks:", *faults])
        )


def attributes(probe: PredictorProbe) -> None:
    """It says what it takes: patch_size, in_channels, out_channels, text_dim, text_padding."""
    module: Any = probe.on_meta()
    names = ("patch_size", "in_channels", "out_channels", "text_dim", "text_padding", "init_weights")
    if missing := [name for name in names if not hasattr(module, name)]:
        raise ContractError(f"attributes are missing: {', '.join(missing)}")
    if len(module.patch_size) != 3 or not all(isinstance(size, int) for size in module.patch_size):
        raise ContractError(f"patch_size is {module.patch_size!r}", accepted="three integers (t, h, w)")
    padding = module.text_padding
    fixed = isinstance(padding, tuple) and len(padding) == 2 and padding[0] == "fixed"
    if padding != "masked" and not fixed:
        raise ContractError(f"text_padding is {padding!r}", accepted="'masked', or ('fixed', n)")


def meta_build(probe: PredictorProbe) -> None:
    """On the meta device its constructor allocates nothing."""
    module = probe.on_meta()
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if off := [name for name, tensor in tensors if tensor.device.type != "meta"]:
        raise ContractError(
            f"built on meta, these tensors are elsewhere: {', '.join(off[:8])}",
            accepted="tensors made on the default device; init_weights fills them",
        )


def initialisation(probe: PredictorProbe) -> None:
    """init_weights fills every parameter and buffer, and the same seed gives the same weights."""
    first, second, other = probe.initialised(), probe.initialised(), probe.initialised(seed=1)
    if different := _differing(first, second):
        raise ContractError(
            f"the same seed initialises these differently: {', '.join(different[:8])}",
            accepted="random numbers from torch.nn.init and in-place methods of whole parameters",
        )
    if not _differing(first, other):
        raise ContractError("another seed initialises the same weights")


def output(probe: PredictorProbe) -> None:
    """The output has the latents' size and dtype, is finite, and is no view of another tensor."""
    module: Any = probe.trained()
    inputs = probe.inputs(module)
    latents = inputs["latents"]
    wanted = (len(latents), module.out_channels, *latents.shape[2:])
    with torch.no_grad():
        predicted = module(**inputs)
    if tuple(predicted.shape) != wanted:
        raise ContractError(f"the output is {tuple(predicted.shape)}", accepted=str(wanted))
    if predicted.dtype != latents.dtype:
        raise ContractError(f"the output is {predicted.dtype}", accepted=str(latents.dtype))
    if not predicted.isfinite().all():
        raise ContractError("the output is not finite")
    if predicted._is_view():
        raise ContractError(
            "the output is a view, with which FSDP2 may drop its backward hook", hint="return output.clone()"
        )


def gradients(probe: PredictorProbe) -> None:
    """Gradients are finite, and some parameter has one."""
    module = probe.trained()
    module(**probe.inputs(module)).square().mean().backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    if not found or (bad := [name for name, grad in found.items() if not grad.isfinite().all()]):
        raise ContractError(f"gradients are not finite: {', '.join(bad[:8])}" if found else "no gradient")


def determinism(probe: PredictorProbe) -> None:
    """Twice the same inputs give the same output, in evaluation mode."""
    module = probe.trained()
    inputs = probe.inputs(module)
    _expect_equal(module, inputs, inputs, "twice the same inputs give different outputs", 0.0)


def independence(probe: PredictorProbe) -> None:
    """A sample's output does not depend on the samples beside it."""
    module = probe.trained()
    inputs = probe.inputs(module, batch=3)
    alone = {name: tensor[:1] for name, tensor in inputs.items()}
    with torch.no_grad():
        together, single = module(**inputs)[:1], module(**alone)
    if (error := _distance(together, single)) > 1e-5:
        raise ContractError(f"a sample alone and in a batch differ by {error:.1e}", accepted="at most 1e-5")


def text_padding(probe: PredictorProbe) -> None:
    """Masked text: neither what stands behind the mask nor how long it is changes anything."""
    module: Any = probe.trained()
    if module.text_padding != "masked":
        return
    inputs = probe.inputs(module)
    text, mask = inputs["text"], inputs["text_mask"]
    garbage = torch.where(mask[..., None], text, 1e3 * Randomness(3).normal(tuple(text.shape), "garbage"))
    _expect_equal(module, inputs, {**inputs, "text": garbage}, "text behind the mask changes the output")
    longer = {
        **inputs,
        "text": torch.cat([garbage, 1e3 * torch.ones_like(text)], dim=1),
        "text_mask": torch.cat([mask, torch.zeros_like(mask)], dim=1),
    }
    _expect_equal(module, inputs, longer, "longer padding changes the output")
    with torch.no_grad():
        empty = module(**{**inputs, "text_mask": torch.zeros_like(mask)})
    if not empty.isfinite().all():
        raise ContractError("a caption whose mask is all false makes the output NaN")


def timestep_precision(probe: PredictorProbe) -> None:
    """Timestep 998.7 is neither 998, 999 nor 1000, in bfloat16 too."""
    for dtype in (torch.float32, torch.bfloat16):
        # A library's own `to` may warn of layers that it would keep in float32: here all are cast on purpose.
        module = nn.Module.to(probe.trained(), dtype)
        inputs = probe.inputs(module, batch=1)
        inputs |= {name: inputs[name].to(dtype) for name in ("latents", "text")}

        def at(timestep: float, module: nn.Module = module, inputs: dict[str, Tensor] = inputs) -> Tensor:
            with torch.no_grad():
                predicted: Tensor = module(**{**inputs, "timestep": torch.tensor([timestep])})
            return predicted

        exact = at(998.7)
        if same := [rounded for rounded in (998.0, 999.0, 1000.0) if torch.equal(exact, at(rounded))]:
            raise ContractError(
                f"in {dtype}, timestep 998.7 counts as {same[0]:g}",
                accepted="float32 from the argument to the sinusoids",
            )


def unknown_conditions(probe: PredictorProbe) -> None:
    """A condition that it does not name is an error."""
    module = probe.trained()
    inputs = probe.inputs(module)
    try:
        with torch.no_grad():
            module(**inputs, no_such_condition=torch.zeros(1))
    except (TypeError, MMError):
        return
    raise ContractError(
        "a condition that the predictor does not know is swallowed",
        accepted="TypeError or ContractError",
        hint="name the conditions in forward instead of taking **kwargs",
    )


def flops(probe: PredictorProbe) -> None:
    """If it says what it multiplies (`module_flops`), that is what torch counts, within a hundredth."""
    module = probe.trained()
    inputs = probe.inputs(module)
    if not isinstance(module, SupportsModuleFlops):
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items() if name != "text_mask"}
    said = step_flops(module, module.module_flops(**shapes))
    # torch has no formula for attention's own kernels on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predicted = module(**inputs)
        forward = counter.get_total_flops()
        predicted.sum().backward()
        backward = counter.get_total_flops() - forward
    for name, claimed, found in (("forward", said.forward, forward), ("backward", said.backward, backward)):
        if abs(claimed - found) > 0.01 * found:
            raise ContractError(
                f"`module_flops` makes {claimed:,.0f} operations of the {name}, and torch counts {found:,}",
                accepted="within a hundredth",
                hint="compare each product with its layer, and `after` with where its input comes from",
            )


_CHECKS = (
    *(attributes, meta_build, initialisation, output, gradients, determinism, independence),
    *(text_padding, timestep_precision, unknown_conditions, flops),
)
PREDICTOR_CHECKS: Mapping[str, Callable[[PredictorProbe], None]] = MappingProxyType(
    {check.__name__: check for check in _CHECKS}
)
"""Each check by its name, for those who would rather have one test a check."""


def _differing(first: nn.Module, second: nn.Module) -> list[str]:
    others = dict([*second.named_parameters(), *second.named_buffers()])
    named = [*first.named_parameters(), *first.named_buffers()]
    return [name for name, tensor in named if not torch.equal(tensor, others[name])]


def _distance(first: Tensor, second: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-12))


def _expect_equal(
    module: nn.Module, inputs: dict[str, Tensor], others: dict[str, Tensor], what: str, most: float = 1e-5
) -> None:
    with torch.no_grad():
        error = _distance(module(**inputs), module(**others))
    if not error <= most:  # NaN too
        raise ContractError(f"{what}, by {error:.1e}", accepted=f"at most {most:g}")
