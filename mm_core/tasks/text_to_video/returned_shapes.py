"""Checks of the shapes that components return: an error names the component that made the wrong shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mm_core.contracts import Autoencoder, NoiseScheduler
from mm_core.errors import ContractError, MMError, first_line


def expect(found: Tensor, shape: Sequence[int], component: str, what: str) -> Tensor:
    """Returns a component's tensor unchanged if it has the expected shape.

    Args:
        found: the tensor.
        shape: the shape it must have.
        component: the component's key under `task`.
        what: the method that returned it.

    Raises:
        ContractError: the shape is different.
    """
    if tuple(found.shape) != tuple(shape):
        raise _wrong_shape(component, what, found, shape)
    return found


def encoded(
    autoencoder: Autoencoder, pixels: Tensor, generators: Sequence[torch.Generator] | None = None
) -> Tensor:
    """Clips encoded by the autoencoder, with their shape checked: latents [B,C,T,H,W] in float32.

    Args:
        autoencoder: the task's autoencoder.
        pixels: [B,3,F,Y,X].
        generators: one for each clip, to draw a sample of the posterior; None takes its mode.
    """
    posterior = autoencoder.encode(pixels)
    latents = posterior.mode() if generators is None else posterior.sample(generators)
    frames, height, width = pixels.shape[2:]
    shape = (len(pixels), *autoencoder.latent_shape(frames, height, width))
    return expect(latents, shape, "autoencoder", "encode").float()


def check_text(text: Tensor, mask: Tensor, rows: int) -> None:
    """Checks the shapes that a text encoder returned: text [rows,L,D] and mask [rows,L].

    Raises:
        ContractError: a shape is different.
    """
    if text.dim() != 3 or len(text) != rows:
        raise _wrong_shape("text_encoder", "encode", text, f"hidden states [{rows}, L, D]")
    expect(mask, text.shape[:2], "text_encoder", "the mask of encode")


def scheduler_faults(scheduler: NoiseScheduler, channels: int) -> Iterator[ContractError]:
    """Errors in the shapes that a noise scheduler returns, tested on three tiny rows of latents.

    All sizes are different, so that no wrong shape passes by chance. Each method is called once.
    """
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
        except RuntimeError as fault:  # torch raises it for shapes that do not broadcast
            yield ContractError(
                f"{name} fails for timesteps of shape [{rows}] and latents of shape {[*shape]}:"
                f" {first_line(fault)}",
                where="task.scheduler",
                hint="reshape factors that depend on the timestep (sigma, alpha) to [B, 1, 1, 1, 1]",
            )
        if name == "sample_timesteps":
            return  # the other methods need valid timesteps


def _wrong_shape(component: str, what: str, found: Tensor, wanted: Sequence[int] | str) -> ContractError:
    needed = wanted if isinstance(wanted, str) else [*wanted]
    broadcast = component == "scheduler" and isinstance(wanted, Sequence) and len(wanted) == 5
    return ContractError(
        f"{what} returned {list(found.shape)} where {needed} is needed",
        where=f"task.{component}",
        hint="reshape factors that depend on the timestep (sigma, alpha) to [B, 1, 1, 1, 1]"
        if broadcast
        else None,
    )
