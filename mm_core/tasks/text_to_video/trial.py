"""A small predictor tried on drawn inputs: for the conformance checks, and for what the plan cannot see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from mm_core.contracts import PredictorModule, Randomness, SupportsMaxFrames
from mm_core.errors import ContractError, first_line, foreign_code
from mm_core.modules.initialise import initialise
from mm_core.modules.tying import tie, tied_names
from mm_core.plugin.checks.places import place_of_object
from mm_core.plugin.registry import Registry
from mm_core.schema.fields import ComponentConfig
from mm_core.tasks.text_to_video.conditions import Conditions
from mm_core.tasks.text_to_video.task import TextToVideo

PADDING_HINT = (
    'pass text_mask to the attention over text, or declare text_padding = ("fixed", n): text is then padded'
    " to n tokens, and all of it counts"
)
_SEEN = 1e-5
"""Relative change of an output from which on it is no rounding."""


def trial_inputs(
    predictor: Any,
    batch: int = 2,
    patches: tuple[int, int, int] | None = None,
    text_length: int = 6,
    conditions: Mapping[str, Sequence[int] | Tensor] | None = None,
    place: str | None = None,
) -> dict[str, Tensor]:
    """Inputs drawn for a predictor; the last caption is shorter than the others.

    Args:
        predictor: a small one.
        batch: number of rows.
        patches: tokens of the clips along (t, h, w), with fewer frames for a predictor that takes fewer;
            None: (2, 3, 2).
        text_length: tokens of the captions, unless the predictor takes a fixed number.
        conditions: name -> shape of one sample's tensor, or the tensor itself, for conditions whose shape the
            predictor does not declare.
        place: names the predictor in errors.

    Raises:
        ContractError: the shape of a needed condition is not known.
    """
    rng = Randomness(2)
    frames, height, width = patches or (2, 3, 2)
    step = predictor.patch_size[0]
    most = predictor.max_frames if isinstance(predictor, SupportsMaxFrames) else frames * step
    frames = max(1, min(frames, most // step))
    sizes = [p * n for p, n in zip(predictor.patch_size, (frames, height, width), strict=True)]
    length = text_length if predictor.text_padding == "masked" else predictor.text_padding[1]
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[-1, max(1, length // 2) :] = False
    text = rng.normal((batch, length, predictor.text_dim), "text").masked_fill(~mask[..., None], 0)
    return {
        "latents": rng.normal((batch, predictor.in_channels, *sizes), "latents"),
        "timestep": torch.linspace(998.7, 12.5, batch),
        "text": text,
        "text_mask": mask,
        **_conditions(predictor, batch, sizes, text_length, conditions or {}, place),
    }


def _conditions(
    predictor: nn.Module,
    batch: int,
    sizes: Sequence[int],
    text_length: int,
    given: Mapping[str, Sequence[int] | Tensor],
    place: str | None,
) -> dict[str, Tensor]:
    """The conditions that a predictor takes, as far as their shapes are known."""
    takes: Any = Conditions(predictor)  # type: ignore[arg-type]
    size = (8.0 * sizes[1], 8.0 * sizes[2])
    found: dict[str, Tensor] = takes.of_clips(batch, size, torch.device("cpu"), fps=24.0, guidance=3.5)
    for name, shape in {**(takes.declared or {}), **given}.items():
        if isinstance(shape, Tensor):
            found[name] = shape.expand(batch, *shape.shape).clone()
        elif name not in found:
            filled = [text_length if size is None else size for size in shape]
            found[name] = Randomness(2).normal((batch, *filled), name)
    if missing := sorted(takes.needed - set(found)):
        raise ContractError(
            f"the predictor's forward needs `{missing[0]}`, whose shape is not known",
            where=place,
            accepted="a shape in the predictor's `condition_shapes`, such as {'pooled': (768,)}",
            hint=f"declare it, or call check_predictor with conditions={{'{missing[0]}': (768,)}}",
        )
    return found


def trained_alike(module: nn.Module) -> nn.Module:
    """A module whose weights are slightly changed, as if trained: heads of zeros would hide faults."""
    rng = Randomness(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(0.05 * rng.normal(tuple(parameter.shape), name))
    return module


def text_notes(task: object, chosen: ComponentConfig, registry: Registry) -> list[str]:
    """Tries whether the predictor of a `TextToVideo` that declares `text_padding = "masked"` leaves masked
    text out.

    Args:
        task: the run's task; another one is not tried.
        chosen: its config; the small instance that the predictor's plugin declares (`tiny`) is tried.
        registry: of the run.

    Returns:
        A note if it cannot be tried, and `text_padding` is only inherited.

    Raises:
        ContractError: masked text changes the output.
    """
    if not isinstance(task, TextToVideo) or task.predictor.text_padding != "masked":
        return []
    predictor, name = task.predictor, chosen.options["predictor"].type
    reason = "its plugin declares no `tiny` to try it with"
    record = registry.resolve("predictor", name)
    if record.component.tiny:
        with TemporaryDirectory() as folder:
            try:
                with foreign_code():
                    changed = _change_by_masked_text(record.tiny_fields(Path(folder)), name, registry)
            except Exception as error:  # the run's own sizes may work all the same
                reason = f"its `tiny` cannot be tried: {first_line(error)}"
            else:
                if changed > _SEEN:
                    raise _unmasked(predictor, changed)
                return []
    owners = [cls for cls in type(predictor).__mro__ if "text_padding" in vars(cls)]
    if (owners and owners[0] is not PredictorModule) or "text_padding" in vars(predictor):
        return []
    return [
        'task.predictor: it inherits `text_padding = "masked"`: padding must not change its output. This was'
        f' not tried, since {reason}; a forward that ignores `text_mask` needs text_padding = ("fixed", n)'
    ]


def _change_by_masked_text(fields: Mapping[str, object], name: str, registry: Registry) -> float:
    """The relative change of a small predictor's output by other values of masked text."""
    with torch.device("meta"):
        small: nn.Module = registry.build("predictor", {**fields, "type": name})
    tied = tied_names(small)
    small.to_empty(device="cpu")
    tie(small, tied)
    initialise(small, "predictor", Randomness(0))
    trained_alike(small.eval())
    inputs = trial_inputs(small)
    others = torch.where(inputs["text_mask"][..., None], inputs["text"], inputs["text"] + 10.0)
    with torch.no_grad():
        one, other = small(**inputs).double(), small(**{**inputs, "text": others}).double()
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-12))


def _unmasked(predictor: object, change: float) -> ContractError:
    return ContractError(
        f'text_padding is "masked", but masked text changes the output, by {change:.1e}: the predictor would'
        " train on the padding of captions",
        where=f"task.predictor, {place_of_object(predictor)}",
        accepted="a forward whose attention leaves out the text at which text_mask is false",
        hint=PADDING_HINT,
    )
