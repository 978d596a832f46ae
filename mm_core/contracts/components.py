"""Protocols of model-side components: predictor, autoencoder, text encoder, noise scheduler.

Letters: B batch; C,T,H,W latent channels, frames, height, width; F,Y,X pixel frames, height, width;
L,D text length and width. An image has F = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

VelocityField = Callable[[Tensor, Tensor], Tensor]
"""(latents[B,C,T,H,W], timestep[B]) -> model output[B,C,T,H,W]."""


@runtime_checkable
class Predictor(Protocol):
    """A `torch.nn.Module` that predicts the scheduler's target from noisy latents.

    Built on the meta device by its constructor; `init_weights` then fills every parameter and
    buffer (non-persistent tables included) in place through `torch.nn.init` and in-place methods.
    `text_padding` is "masked" (text behind the mask changes nothing) or `("fixed", n)` (text is
    padded to n tokens with zeros and the mask is ignored). `patch_size` is (t, h, w) in latent
    units: T, H and W must be divisible by it.
    """

    text_padding: str | tuple[str, int]
    patch_size: tuple[int, int, int]
    in_channels: int
    out_channels: int
    text_dim: int

    def __call__(
        self, latents: Tensor, timestep: Tensor, text: Tensor, text_mask: Tensor, **conditions: Tensor
    ) -> Tensor:
        """latents[B,C,T,H,W], timestep[B] (or [B,N] per token) in scheduler units, text[B,L,D],
        text_mask[B,L] bool -> [B,C,T,H,W] in the dtype of the latents."""

    def init_weights(self) -> None:
        """Fills every parameter and buffer."""


@dataclass(frozen=True)
class WeightsFrom:
    """Files that hold a component's weights.

    path: file or folder. format: name of the weight format; None takes the one that fits best. part: the
    files may hold a larger model; what lies outside of the component's own top-level modules is passed over.
    unused: of a frozen component, its sub-modules that no result depends on (a pooler): they are not read,
    and zero. new: of a trained one, the parameters that the files lack (a head): they begin at random.
    """

    path: str
    format: str | None = None
    part: bool = False
    unused: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


@runtime_checkable
class SupportsWeightsFrom(Protocol):
    """A component with weights of its own that is built from settings alone: the core streams the weights
    into it, each rank what it keeps."""

    weights_from: WeightsFrom | None


class Posterior(Protocol):
    """The distribution that an autoencoder encodes pixels into; latents are at unit scale."""

    moments: Tensor

    def sample(self, generators: Sequence[torch.Generator]) -> Tensor:
        """latents[B,C,T,H,W]; one generator a batch row."""

    def mode(self) -> Tensor:
        """latents[B,C,T,H,W], the most likely ones."""


@runtime_checkable
class Frozen(Protocol):
    """A component that is never trained. Its constructor is cheap and reads no file. Its weights are read
    by the core (`Streamed`) or by itself (`SelfLoading`)."""

    def missing_files(self) -> list[str]:
        """Paths that it will need and that do not exist (for `--dry-run`); [] when all is there."""


@runtime_checkable
class SelfLoading(Frozen, Protocol):
    """A frozen component that reads its weights itself: the same on every rank."""

    def load(self, device: torch.device) -> None:
        """Reads the weights onto `device`. Calling it again does nothing."""


@runtime_checkable
class Streamed(Frozen, SupportsWeightsFrom, Protocol):
    """A frozen `torch.nn.Module` that the core fills: `engine.frozen` says whether each rank keeps all of
    it, a shard, or keeps it in host memory.

    entry_points: names of the methods that compute with the weights. Every rank calls them equally often,
    in the same order. block_patterns: modules, by their path below the component, that may be gathered or
    moved one at a time, because a call of an entry point runs each of them once; "auto" finds its lists of
    like modules, () takes it whole.
    """

    entry_points: tuple[str, ...]
    block_patterns: Literal["auto"] | tuple[str, ...]

    def build_empty(self) -> None:
        """Makes the modules as its files describe them, in evaluation mode, parameters on the meta device in
        the dtype that they are kept in, buffers computed (see `empty_parameters`). CheckpointError for files
        that are missing, or of another model. Calling it again does nothing."""


@runtime_checkable
class Autoencoder(Frozen, Protocol):
    """Pixels <-> latents. stride (t,y,x) pixels a latent; frames F must satisfy `latent_shape`."""

    stride: tuple[int, int, int]
    latent_channels: int

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C,T,H,W) for a clip of F,Y,X pixels; ContractError naming valid sizes near it if none."""

    def encode(self, pixels: Tensor) -> Posterior:
        """pixels[B,3,F,Y,X] in [-1,1] -> posterior over latents[B,C,T,H,W]."""

    def decode(self, latents: Tensor) -> Tensor:
        """latents[B,C,T,H,W] -> pixels[B,3,F,Y,X] in [-1,1]."""


@runtime_checkable
class SupportsDoSample(Protocol):
    """An autoencoder whose own options say which latents are trained on, where the task's say nothing.

    do_sample: true: samples of the posterior; false: its mode; None: it does not say.
    """

    do_sample: bool | None


Tokenizer = Callable[[Sequence[str]], tuple[Tensor, Tensor]]
"""captions -> ids[B,L] int64, mask[B,L] bool. Picklable: it runs in data workers."""


@runtime_checkable
class TextEncoder(Frozen, Protocol):
    """Captions -> hidden states, in two halves: tokenize in data workers, encode on the device."""

    hidden_size: int
    max_length: int

    def tokenizer(self) -> Tokenizer:
        """The half that runs in data workers, holding no weights. Rows are padded to the longest of
        the batch or to `max_length`; the mask says which tokens are real."""

    def encode(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """ids[B,L], mask[B,L] -> hidden[B,L,D], mask[B,L]."""


@runtime_checkable
class NoiseScheduler(Protocol):
    """Noise, targets and weights of a diffusion process. Timesteps are float32, in model units
    (0 .. num_train_timesteps); all functions are pure. `add_noise` and `target` are linear in the
    latents and the noise, with factors that follow from the timestep alone."""

    def sample_timesteps(self, generators: Sequence[torch.Generator]) -> Tensor:
        """timestep[B] float32 on CPU, row i drawn from generators[i]."""

    def timestep_quantile(self, u: Tensor) -> Tensor:
        """timestep[B] float32 below which a share u[B] (in (0, 1), on CPU) of `sample_timesteps`
        falls: the inverse of their cumulative distribution. It rises with the noise."""

    def add_noise(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """x_t[B,C,T,H,W] from clean latents, standard normal noise and timestep[B]."""

    def target(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """What the predictor should output at x_t."""

    def loss_weight(self, timestep: Tensor) -> Tensor:
        """[B] float32 factor of each sample's squared error."""

    def model_timestep(self, timestep: Tensor) -> Tensor:
        """The timestep as the predictor expects it."""

    def sigmas(self, steps: int) -> Tensor:
        """sigmas[steps+1] float32 from 1 (noise) to 0 (clean) that sampling visits."""

    def integrate(self, velocity: VelocityField, noise: Tensor, steps: int) -> Tensor:
        """Solves from noise[B,C,T,H,W] to clean latents, calling `velocity(latents, timestep[B])`. A timestep
        on the CPU tells which expert of a predictor is meant without waiting for the device."""
