"""Conformance checks of a predictor's forward: what it returns, and on what this depends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import Randomness
from mm_core.errors import ContractError, MMError, first_line, plural
from mm_core.tasks.text_to_video.conditions import cast_condition
from mm_core.testing.kit import NotApplicable, sentence_of
from mm_core.testing.predictors.probe import PredictorProbe
from mm_core.testing.tensors import distance, expect_close

Inputs = dict[str, Tensor]


def output(probe: PredictorProbe) -> None:
    """Conformance check: the predictor's output has the latents' size and dtype, is finite, is not a view."""
    module = probe.trained()
    for batch in (1, 3):
        inputs = probe.inputs(module, batch)
        with torch.no_grad(), _hint_of_images(probe, module, inputs):
            predicted = module(**inputs)
        expect_output(probe, module, inputs, predicted)


def expect_output(probe: PredictorProbe, module: Any, inputs: Inputs, predicted: Tensor) -> None:
    """Expects an output of the predictor to have the latents' size and dtype, be finite, and not be a view.

    Args:
        probe: the predictor under test.
        module: the predictor.
        inputs: what its forward was called with, by argument; `latents` is [B,C,T,H,W].
        predicted: the output.
    """
    latents = inputs["latents"]
    wanted = (len(latents), module.out_channels, *latents.shape[2:])
    probe.expect(
        isinstance(predicted, Tensor),
        f"the predictor returns a {type(predicted).__name__}",
        accepted="a tensor",
    )
    probe.expect(
        tuple(predicted.shape) == wanted,
        f"the predictor's output has the shape {tuple(predicted.shape)}",
        accepted=str(wanted),
        hint="return a prediction of the same shape as the latents",
    )
    probe.expect(
        predicted.dtype == latents.dtype,
        f"the predictor's output has the dtype {predicted.dtype}",
        accepted=str(latents.dtype),
        hint="return output.to(latents.dtype) from forward",
    )
    probe.expect(
        predicted.isfinite().all(),
        "the predictor's output contains NaN or infinity",
        hint="check that init_weights fills all parameters, and that forward does not divide by zero",
    )
    probe.expect(
        not predicted._is_view(),
        "the predictor's output is a view of another tensor: FSDP2 may then drop its backward hook",
        hint="return output.clone() from forward",
    )


def odd_sizes(probe: PredictorProbe) -> None:
    """Conformance check: the predictor takes every number of patches: the plan refuses no other sizes."""
    _expect_sizes(probe, (3, 5, 1))


def one_frame(probe: PredictorProbe) -> None:
    """Conformance check: the predictor takes latents of one patch of frames, such as those of an image."""
    _expect_sizes(probe, (1, 3, 2))


def _expect_sizes(probe: PredictorProbe, patches: tuple[int, int, int]) -> None:
    if probe.patches is not None:
        raise NotApplicable(f"only clips of {probe.patches} patches are tried")
    module: Any = probe.trained()
    inputs = probe.inputs(module, patches=patches)
    try:
        with torch.no_grad():
            predicted = module(**inputs)
    except Exception as fault:
        raise ContractError(
            f"the predictor fails for latents of (T, H, W) = {tuple(inputs['latents'].shape[2:])}: "
            f"{first_line(fault) if isinstance(fault, MMError) else sentence_of(fault)}",
            where=probe.place,
            accepted=f"all multiples of its patch_size {tuple(module.patch_size)}",
            hint="declare in patch_size what T, H and W must be multiples of, or max_frames if T is limited",
        ) from fault
    expect_output(probe, module, inputs, predicted)


def determinism(probe: PredictorProbe) -> None:
    """Conformance check: the predictor gives equal outputs for equal inputs, in evaluation mode."""
    module = probe.trained()
    inputs = probe.inputs(module)
    _expect_equal(probe, module, inputs, inputs, "equal inputs give different outputs", 0.0)


def independence(probe: PredictorProbe) -> None:
    """Conformance check: the predictor's output for a sample is independent of the rest of the batch."""
    module = probe.trained()
    inputs = probe.inputs(module, batch=3)
    with torch.no_grad():
        together = module(**inputs)
    for row in range(3):
        at = slice(row, row + 1)
        with torch.no_grad():
            single = module(**{name: tensor[at] for name, tensor in inputs.items()})
        what = f"the outputs for a sample alone and as row {row} of a batch differ"
        hint = "compute each row from its own latents, timestep, text and conditions"
        expect_close(probe, single, together[at], what, hint, 1e-5)


def inputs_unchanged(probe: PredictorProbe) -> None:
    """Conformance check: the predictor changes none of the tensors that it is given."""
    module = probe.trained()
    given = probe.inputs(module)
    masked = ~given["text_mask"][..., None]
    given["text"] = given["text"].masked_fill(masked, 1.0)  # where writing zeros is seen
    for training in (False, True):
        inputs = {name: tensor.clone() for name, tensor in given.items()}
        with torch.no_grad():
            module.train(training)(**inputs)
        changed = [name for name, tensor in given.items() if not torch.equal(tensor, inputs[name])]
        probe.expect(
            not changed,
            f"the predictor changes its input `{', '.join(changed)}`",
            hint="use no in-place operation on an input, or on a view of one",
        )


def text_padding(probe: PredictorProbe) -> None:
    """Conformance check: masked text changes nothing; for text of a fixed length, the mask does not."""
    module: Any = probe.trained()
    inputs = probe.inputs(module)
    text, mask = inputs["text"], inputs["text_mask"]
    if module.text_padding != "masked":
        whole = {**inputs, "text_mask": torch.ones_like(mask)}
        what = f"text_padding is {module.text_padding!r}, but text_mask changes the output"
        _expect_equal(probe, module, inputs, whole, what)
        return
    garbage = torch.where(mask[..., None], text, 1e3 * Randomness(3).normal(tuple(text.shape), "garbage"))
    _expect_equal(probe, module, inputs, {**inputs, "text": garbage}, "masked text changes the output")
    longer = {
        **inputs,
        "text": torch.cat([garbage, 1e3 * torch.ones_like(text)], dim=1),
        "text_mask": torch.cat([mask, torch.zeros_like(mask)], dim=1),
    }
    _expect_equal(probe, module, inputs, longer, "longer padding changes the output")
    with torch.no_grad():
        empty = module(**{**inputs, "text_mask": torch.zeros_like(mask)})
    probe.expect(
        empty.isfinite().all(),
        "the output contains NaN or infinity for an empty caption (a text_mask that is all false)",
        hint="let attention over an empty text return 0: a softmax of scores that are all -inf is NaN",
    )


def timestep_precision(probe: PredictorProbe) -> None:
    """Conformance check: the predictor does not round timestep 998.7 to 998, 999 or 1000."""
    changes: dict[float, float] = {}  # of the output in float32, from 998.7 to the rounded timestep
    for dtype in (torch.float32, torch.bfloat16):
        # A library's own `to` may warn of layers that it would keep in float32: here all are cast on purpose.
        module = nn.Module.to(probe.trained(), dtype)
        inputs = probe.inputs(module, batch=1)
        inputs |= {n: cast_condition(n, t, dtype) for n, t in inputs.items() if n != "timestep"}

        def at(timestep: float, module: nn.Module = module, inputs: Inputs = inputs) -> Tensor:
            with torch.no_grad():
                predicted: Tensor = module(**{**inputs, "timestep": torch.tensor([timestep])})
            return predicted

        exact = at(998.7)
        found = {rounded: at(rounded) for rounded in (998.0, 999.0, 1000.0)}
        changes = changes or {rounded: distance(exact, output) for rounded, output in found.items()}
        visible = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
        same = [r for r, output in found.items() if torch.equal(exact, output) and changes[r] >= visible]
        probe.expect(
            not same,
            f"in {dtype}, timestep 998.7 is rounded to {same[0] if same else 0:g}",
            accepted="float32 from the argument `timestep` to its sinusoidal embedding",
        )


def _expect_equal(
    probe: PredictorProbe, module: nn.Module, inputs: Inputs, others: Inputs, what: str, most: float = 1e-5
) -> None:
    with torch.no_grad():
        expect_close(probe, module(**inputs), module(**others), f"{what},", most=most)


@contextmanager
def _hint_of_images(probe: PredictorProbe, module: nn.Module, inputs: Inputs) -> Iterator[None]:
    """A context for the forward of a clip: if it fails, but works for one frame, the error states that."""
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
            where=probe.place,
            hint=f"correct its forward, or set max_frames = {first} in its class if it takes no clips",
        ) from fault
