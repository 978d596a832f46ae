"""The shapes that components return: one that does not fit is named where it arises, not where it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mm_core.contracts import Autoencoder, NoiseScheduler
from mm_core.errors import ContractError, MMError, first_line


def expect(found: Tensor, shape: Sequence[int], component: str, what: str) -> Tensor:
    """The tensor itself; ContractError where it has another shape. what: that returned it."""
    if tuple(found.shape) != tuple(shape):
        raise _wrong_shape(component, what, found, shape)
    return found


def encoded(
    autoencoder: Autoencoder, pixels: Tensor, generators: Sequence[torch.Generator] | None = None
) -> Tensor:
    """latents[B,C,T,H,W] float32 of pixels[B,3,F,Y,X]: a sample, or without generators the mode."""
    posterior = autoencoder.encode(pixels)
    latents = posterior.mode() if generators is None else posterior.sample(generators)
    frames, height, width = pixels.shape[2:]
    shape = (len(pixels), *autoencoder.latent_shape(frames, height, width))
    return expect(latents, shape, "autoencoder", "encode").float()


def check_text(text: Tensor, mask: Tensor, rows: int) -> None:
    """ContractError for what is no text[B,L,D] with its mask[B,L] of so many rows."""
    if text.dim() != 3 or len(text) != rows:
        raise _wrong_shape("text_encoder", "encode", text, f"hidden states [{rows}, L, D]")
    expect(mask, text.shape[:2], "text_encoder", "the mask of encode")


def scheduler_faults(scheduler: NoiseScheduler, channels: int) -> Iterator[ContractError]:
    """What a scheduler answers to three tiny rows of latents whose sizes are all different, so that what fits
    there by chance fits everywhere. None of its functions is called twice for one fault."""
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
            found = expect(call(), wanted, "scheduler", name)
            if name == "sample_timesteps":
                timestep = found
            continue
        except MMError as fault:
            yield fault if isinstance(fault, ContractError) else ContractError(str(fault))
        except RuntimeError as fault:  # torch's answer to shapes that do not broadcast
            yield ContractError(
                f"{name} does not take timesteps [{rows}] with latents {[*shape]}: {first_line(fault)}",
                where="task.scheduler",
                hint="give factors of a timestep the shape [B, 1, 1, 1, 1]",
            )
        if name == "sample_timesteps":
            return  # the others are functions of these


def _wrong_shape(component: str, what: str, found: Tensor, wanted: Sequence[int] | str) -> ContractError:
    needed = wanted if isinstance(wanted, str) else [*wanted]
    broadcast = component == "scheduler" and isinstance(wanted, Sequence) and len(wanted) == 5
    return ContractError(
        f"{what} returned {list(found.shape)} where {needed} is needed",
        where=f"task.{component}",
        hint="give factors of a timestep the shape [B, 1, 1, 1, 1]" if broadcast else None,
    )
