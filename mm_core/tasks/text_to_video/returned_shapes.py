"""Checks of the shapes that components return: an error names the component that made the wrong shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mm_core.contracts import (
    Autoencoder,
    ImageEncoder,
    NoiseScheduler,
    Posterior,
    PredictorInputs,
    SupportsForTokens,
    TextEncoder,
    Tokens,
)
from mm_core.errors import ContractError, MMError, first_line
from mm_core.plugin.checks.places import place_of_method, place_of_object
from mm_core.tasks.text_to_video.conditions import Conditions

_POSTERIOR = "an mm_core.contracts.Posterior: mode(), sample(generators) and moments"
_STATES = "(hidden[B,L,D], mask[B,L]), and perhaps a mapping of further tensors [B,...]"
_TOKENS = "(ids[B,L], mask[B,L]), or tensors [B,...] by the names of the parameters of encode"
_FALSE_IN_PADDING = "a bool mask, false for padding"
_INPUTS = "an mm_core.contracts.PredictorInputs: latents, timestep, conditions and counts"
_SCHEDULER = "a noise scheduler: this one, or another for samples of that size"


def expect(found: Tensor, shape: Sequence[int], component: str, what: str, owner: object) -> Tensor:
    """Returns a component's tensor unchanged if it has the expected shape.

    Args:
        found: the tensor.
        shape: the shape it must have.
        component: the component's key under `task`.
        what: the method that returned it.
        owner: the component.

    Raises:
        ContractError: the shape is different, or it is not a tensor.
    """
    if not isinstance(found, Tensor) or tuple(found.shape) != tuple(shape):
        raise _wrong_shape(component, what, found, shape, owner)
    return found


def expect_latents(
    found: Posterior,
    shape: Sequence[int],
    owner: Autoencoder,
    generators: Sequence[torch.Generator] | None = None,
) -> Tensor:
    """Latents [B,C,T,H,W] in float32 of what an autoencoder returned for clips: a sample of the posterior
    with one generator for each clip; without generators its mode.

    Raises:
        ContractError: the latents are not of this shape, or this is not a posterior.
    """
    # A tensor has a `mode` of its own.
    if not hasattr(found, "moments" if generators is None else "sample"):
        raise wrong_type("autoencoder", "encode", found, _POSTERIOR, owner)
    latents = found.mode() if generators is None else found.sample(generators)
    return expect(latents, shape, "autoencoder", "encode", owner).float()


def expect_tokens(found: Any, rows: int, tokenizer: object) -> Tokens:
    """Returns a tokenizer's tokens unchanged if they are tensors with a row for each caption.

    Raises:
        ContractError: they are not.
    """
    named = {"ids": found[0], "mask": found[1]} if isinstance(found, tuple) and len(found) == 2 else found
    if not isinstance(named, Mapping) or not named:
        raise wrong_type("text_encoder", "the tokenizer", found, _TOKENS, tokenizer)
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) != rows:
            raise _wrong_shape(
                "text_encoder", f"`{name}` of the tokenizer", tensor, f"[{rows}, ...]", tokenizer
            )
    tokens: Tokens = found
    return tokens


def expect_text(found: Any, rows: int, encoder: TextEncoder) -> tuple[Any, ...]:
    """A text encoder's text [rows,L,D], mask [rows,L] and, if it returned any, other tensors by name.

    Raises:
        ContractError: a shape is different, or it is something else.
    """
    if isinstance(found, Mapping) and "text" in found:
        found = of_named(found)
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[0], Tensor):
        raise wrong_type("text_encoder", "encode", found, _STATES, encoder)
    _expect_states(found[0], rows, "text_encoder", encoder)
    expect(found[1], found[0].shape[:2], "text_encoder", "the mask of encode", encoder)
    if found[1].dtype != torch.bool:
        raise wrong_type("text_encoder", "encode", found[1], _FALSE_IN_PADDING, encoder)
    return found


def of_named(found: Mapping[str, Any]) -> tuple[Any, ...]:
    """Named states as text, mask and other tensors; a mask that is None is true everywhere."""
    flat: dict[str, Any] = {}
    for name, value in found.items():
        flat[name], mask = value if isinstance(value, tuple) else (value, None)
        if mask is not None:
            flat[f"{name}_mask"] = mask
    text = flat.pop("text")
    mask = flat.pop("text_mask", None)
    if mask is None and isinstance(text, Tensor):
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    return text, mask, flat


def expect_features(found: Any, rows: int, encoder: ImageEncoder) -> Tensor:
    """Returns an image encoder's features [rows,N,D] in float32.

    Raises:
        ContractError: the shape is different, or it is not a tensor.
    """
    _expect_states(found, rows, "image_encoder", encoder)
    features: Tensor = found
    return features.float()


def expect_inputs(
    found: object, latents: Tensor, conditions: Conditions, predictor: object, given: str
) -> None:
    """Checks what `with_inputs` or `with_frames` returned.

    Args:
        found: what it returned.
        latents: [B,C,T,H,W] that it was called with.
        conditions: of the predictor.
        predictor: the component.
        given: inputs or frames.

    Raises:
        ContractError: it is something else, of another shape, or a condition that forward does not take.
    """
    method = f"with_{given}"
    if not isinstance(found, PredictorInputs):
        raise wrong_type("predictor", method, found, _INPUTS, predictor)
    (rows, _, *ends), times, counts = latents.shape, found.timestep, found.counts
    fault = None
    if found.latents.shape != latents.shape:
        fault = f"latents {[*found.latents.shape]}", f"{[*latents.shape]}: further channels are a condition"
    elif times.dim() not in (1, 2) or len(times) != rows:
        fault = f"a timestep {[*times.shape]}", f"[{rows}], or one for each token: [{rows}, N]"
    elif counts is not None and (
        counts.dtype != torch.bool or tuple(counts.shape) not in ((1, 1, *ends), (rows, 1, *ends))
    ):
        fault = (
            f"counts {[*counts.shape]} of {counts.dtype}",
            f"bool [1 or B, 1, {', '.join(map(str, ends))}]",
        )
    elif names := conditions.refused(found.conditions):
        fault = f"the condition `{names[0]}`, which forward does not take", conditions.listed
    if fault is not None:
        where = f"task.predictor, {place_of_method(predictor, method)}"
        raise ContractError(f"{method} returned {fault[0]}", where=where, accepted=fault[1])


def _expect_states(found: object, rows: int, component: str, encoder: object) -> None:
    if not isinstance(found, Tensor) or found.dim() != 3 or len(found) != rows:
        raise _wrong_shape(component, "encode", found, f"hidden states [{rows}, L, D]", encoder)


def scheduler_faults(scheduler: NoiseScheduler, channels: int) -> Iterator[ContractError]:
    """Errors in the shapes that a noise scheduler returns, tested on three tiny rows of latents.

    All sizes are different, so that no wrong shape passes by chance. Each method is called once.
    """
    if isinstance(scheduler, SupportsForTokens):
        found: object = scheduler.for_tokens(70)
        if not isinstance(found, NoiseScheduler):
            yield wrong_type("scheduler", "for_tokens(70)", found, _SCHEDULER, scheduler)
    rows, shape = 3, (3, channels, 2, 5, 7)
    latents = torch.zeros(shape, device="cpu")
    timestep, half = torch.zeros(rows, device="cpu"), torch.full((rows,), 0.5, device="cpu")
    generators = [torch.Generator().manual_seed(row) for row in range(rows)]
    calls: dict[str, tuple[Callable[[], Tensor], tuple[int, ...]]] = {
        "sample_timesteps": (lambda: scheduler.sample_timesteps(generators), (rows,)),
        "timestep_quantile": (lambda: scheduler.timestep_quantile(half), (rows,)),
        "add_noise": (lambda: scheduler.add_noise(latents, latents, timestep), shape),
        "target": (lambda: scheduler.target(latents, latents, timestep), shape),
        "loss_weight": (lambda: scheduler.loss_weight(timestep), (rows,)),
        "model_timestep": (lambda: scheduler.model_timestep(timestep), (rows,)),
    }
    for name, (call, wanted) in calls.items():
        try:
            found = expect(call(), wanted, "scheduler", name, scheduler)
            if name == "sample_timesteps":
                timestep = found
            continue
        except MMError as fault:
            yield fault if isinstance(fault, ContractError) else ContractError(str(fault))
        except RuntimeError as fault:  # torch raises it for shapes that do not broadcast
            yield ContractError(
                f"{name} fails for timesteps of shape [{rows}] and latents of shape {[*shape]}:"
                f" {first_line(fault)}",
                where=f"task.scheduler, {place_of_object(scheduler)}",
                hint="reshape factors that depend on the timestep (sigma, alpha) to [B, 1, 1, 1, 1]",
            )
        if name == "sample_timesteps":
            return  # the other methods need valid timesteps


def wrong_type(component: str, what: str, found: object, accepted: str, owner: object) -> ContractError:
    """The error for what a component returned in place of something else; see `expect`."""
    named = f"tensor of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
    return ContractError(
        f"{what} returned a {named}",
        where=f"task.{component}, {place_of_object(owner)}",
        accepted=accepted,
    )


def _wrong_shape(
    component: str, what: str, found: object, wanted: Sequence[int] | str, owner: object
) -> ContractError:
    needed = wanted if isinstance(wanted, str) else [*wanted]
    returned = list(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
    broadcast = component == "scheduler" and isinstance(wanted, Sequence) and len(wanted) == 5
    return ContractError(
        f"{what} returned {returned} where {needed} is needed",
        where=f"task.{component}, {place_of_object(owner)}",
        hint="reshape factors that depend on the timestep (sigma, alpha) to [B, 1, 1, 1, 1]"
        if broadcast
        else None,
    )
