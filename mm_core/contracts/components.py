"""Protocols of model-side components: predictor, autoencoder, text encoder, noise scheduler.

Letters: B batch; C,T,H,W latent channels, frames, height, width; F,Y,X pixel frames, height, width;
L,D text length and width. An image has F = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

VelocityField = Callable[[Tensor, Tensor], Tensor]
"""(latents[B,C,T,H,W], timestep[B]) -> model output[B,C,T,H,W]."""


@runtime_checkable
class Predictor(Protocol):
    """A predictor: a `torch.nn.Module` that predicts the scheduler's target from noisy latents.

    Its constructor builds it on the meta device; `init_weights` then fills every parameter and buffer
    (including non-persistent tables) in place, with `torch.nn.init` and in-place methods. A row's prediction
    does not depend on the other rows of its batch.

    Attributes:
        text_padding: "masked" (masked text does not change the output) or `("fixed", n)` (text is padded to n
            tokens with zeros and the mask is ignored).
        patch_size: (t, h, w) in latent units: T, H and W must be divisible by it.
        in_channels: channels of the input latents.
        out_channels: channels of the output.
        text_dim: width D of the text's hidden states.
    """

    text_padding: Literal["masked"] | tuple[Literal["fixed"], int]
    patch_size: tuple[int, int, int]
    in_channels: int
    out_channels: int
    text_dim: int

    def __call__(
        self, latents: Tensor, timestep: Tensor, text: Tensor, text_mask: Tensor, **conditions: Tensor
    ) -> Tensor:
        """Predicts from noisy latents: returns [B,C,T,H,W] in the dtype of the latents.

        Args:
            latents: [B,C,T,H,W].
            timestep: [B], or [B,N] per token, in scheduler units.
            text: [B,L,D].
            text_mask: [B,L] bool, false for padding.
                A forward that names `text_lengths` also gets the tokens of each caption, a list of B integers
                on the host: masks of a device make it wait. The default is None.
            conditions: further tensors, each a parameter of the predictor's own forward. A parameter without
                a default is needed: a plan in which nothing gives it is an error. `fps`, `size` and
                `guidance` come from the task (`CLIP_CONDITIONS`), others from the text encoder, under the
                names that it declares (`SupportsConditionShapes`), and from the predictor's own
                `with_frames`.
        """

    def init_weights(self) -> None:
        """Initialises every parameter and buffer of the predictor in place."""


@dataclass(frozen=True)
class WeightsFrom:
    """The files that contain a component's weights.

    Attributes:
        path: file or folder.
        format: name of the weight format; None: the one that matches best.
        part: the files may contain a larger model; tensors outside the component's top-level modules are
            skipped.
        unused: sub-modules of a frozen component that no result depends on (a pooler): they are not read, and
            stay zero.
        new: parameters of a trained component that the files lack (a head): they start at random.
    """

    path: str
    format: str | None = None
    part: bool = False
    unused: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


@runtime_checkable
class SupportsWeightsFrom(Protocol):
    """Capability of a component with weights in files: the core streams them into it.

    The component is built from its settings alone; each rank receives only the weights that it keeps.
    """

    weights_from: WeightsFrom | None


@runtime_checkable
class SupportsFiles(Protocol):
    """Capability of a frozen component that lists the files on which its results depend.

    Without it, they are those of its `weights_from` and those that its config's texts name.
    """

    def files(self) -> list[Path]:
        """Config, weights, tokenizer: all that exist, in any order. Opens none of them."""


class Posterior(Protocol):
    """The distribution of latents that an autoencoder encodes pixels into; latents are at unit scale."""

    moments: Tensor

    def sample(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Samples latents[B,C,T,H,W] from the posterior, with one generator per batch row."""

    def mode(self) -> Tensor:
        """The most likely latents[B,C,T,H,W] of the posterior."""


@runtime_checkable
class Frozen(Protocol):
    """A component that is never trained.

    Its constructor is cheap and reads no file. Its weights are read by the core (`Streamed`) or by itself
    (`SelfLoading`).
    """

    def missing_files(self) -> list[str]:
        """Paths that the frozen component needs and that do not exist (for `--dry-run`)."""


@runtime_checkable
class SelfLoading(Frozen, Protocol):
    """A frozen component that reads its own weights, complete on every rank."""

    def load(self, device: torch.device) -> None:
        """Reads the frozen component's weights onto a device. Calling it again does nothing."""


@runtime_checkable
class Streamed(Frozen, SupportsWeightsFrom, Protocol):
    """A frozen `torch.nn.Module` that the core fills with weights.

    The config key `engine.frozen` sets whether each rank keeps all weights, a shard, or keeps them in host
    memory.

    Attributes:
        entry_points: names of the methods that compute with the weights. Every rank calls them equally often
            and in the same order.
        block_patterns: modules, by their path in the component, that can be gathered or moved one at a time
            because a call of an entry point runs each of them once; "auto" finds lists of equal modules, ()
            gathers the component as one.
    """

    entry_points: tuple[str, ...]
    block_patterns: Literal["auto"] | tuple[str, ...]

    def build_empty(self) -> None:
        """Builds the frozen component's modules from its files, without memory for parameters.

        The modules are in evaluation mode, their parameters on the meta device in their final dtype, their
        buffers computed (see `empty_parameters`). Calling it again does nothing.

        Raises:
            CheckpointError: files are missing, or belong to another model.
        """


@runtime_checkable
class Autoencoder(Frozen, Protocol):
    """An autoencoder, which encodes pixels into latents and decodes them.

    A clip's result does not depend on the other clips of its batch: batches differ between world sizes.

    Attributes:
        stride: pixels per latent along (t, y, x).
        latent_channels: channels C of the latents.
    """

    stride: tuple[int, int, int]
    latent_channels: int

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """The latent shape (C,T,H,W) of a clip of F frames and Y x X pixels.

        Raises:
            ContractError: the size cannot be encoded; names valid sizes near it.
        """

    def encode(self, pixels: Tensor) -> Posterior:
        """Encodes pixels[B,3,F,Y,X] in [-1,1] into a posterior over latents[B,C,T,H,W]."""

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents[B,C,T,H,W] into finite pixels[B,3,F,Y,X], clamped to [-1,1]."""


@runtime_checkable
class SupportsPosterior(Protocol):
    """Capability of an autoencoder whose moments can be stored and used in place of clips."""

    def posterior(self, moments: Tensor) -> Posterior:
        """The posterior of an earlier `encode`, from its moments[B,...] on any device. Needs no weights."""


@runtime_checkable
class SupportsDoSample(Protocol):
    """Capability of an autoencoder whose options set the latents to train on, if the task's options do not.

    Attributes:
        do_sample: true: samples of the posterior; false: its mode; None: not set.
    """

    do_sample: bool | None


Tokens = tuple[Tensor, Tensor] | Mapping[str, Tensor]
"""ids[B,L] int64 and mask[B,L] bool; or tensors [B,...] by the names of the parameters of `encode`, such as
the tokens of two encoders. What has a length is padded at its end with zeros."""

Tokenizer = Callable[..., Tokens]
"""captions -> tokens; of an encoder that `SupportsReads`, captions and fields -> tokens. Must be picklable:
it runs in data workers."""


@runtime_checkable
class CountingTokenizer(Protocol):
    """A tokenizer whose cut captions are counted.

    Attributes:
        max_length: most tokens per caption.
    """

    max_length: int

    def __call__(self, captions: Sequence[str]) -> Tokens:
        """See `Tokenizer`."""

    def token_counts(self, captions: Sequence[str]) -> list[int]:
        """The tokens of each caption before it is cut, with those that are added to it."""


States = Mapping[str, tuple[Tensor, Tensor | None] | Tensor]
"""Named states of captions: `text` (hidden[B,L,D], mask[B,L]), and others, which reach the predictor by their
names: vectors [B,D], or (states[B,L,D], mask[B,L]), whose mask is `NAME_mask`. None in the place of a mask:
padding is as real as tokens, and is kept."""

EncodedText = States | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""Named states; or hidden states [B,L,D], mask [B,L], and conditions for the predictor by name, if any."""


@runtime_checkable
class TextEncoder(Frozen, Protocol):
    """A text encoder, from captions to hidden states: it tokenizes in data workers and encodes on the device.

    A caption's result depends neither on the other captions of its batch nor on the padding behind it.

    Attributes:
        hidden_size: width D of a hidden state.
        max_length: most tokens per caption.
    """

    hidden_size: int
    max_length: int

    def tokenizer(self) -> Tokenizer:
        """The text encoder's tokenizer, which runs in data workers and has no weights.

        It pads rows to the longest row of the batch or to `max_length`; its mask is false for padding.
        """

    def encode(self, ids: Tensor, mask: Tensor, *args: Any, **kwargs: Any) -> EncodedText:
        """Encodes captions: ids[B,L], mask[B,L] -> hidden[B,L,D], mask[B,L], or named states.

        Where the tokenizer returns named tensors, these are the parameters, in the place of both.

        A text encoder that declares `condition_shapes` (`SupportsConditionShapes`) returns a third value: a
        mapping of these names to tensors[B,...], such as a pooled vector or the states of a second encoder.
        It returns them for the empty caption too, which stands for dropped captions and negative prompts.
        """


@runtime_checkable
class SupportsCaptions(Protocol):
    """Capability of a text encoder that is given captions in the place of tokens, such as one that calls a
    library's own code. Its `tokenizer` and `encode` are never called; tokenizing takes the step's time."""

    def encode_captions(
        self, captions: Sequence[str], device: torch.device, **read: Mapping[str, Sequence[Sequence[Any]]]
    ) -> EncodedText:
        """As `encode`, for B captions; states on the device. The mask may be on the host: see `text_lengths`
        of `Predictor`. One that reads fields (`SupportsReads`) gets them as `fields`, as a tokenizer does."""


@runtime_checkable
class NoiseScheduler(Protocol):
    """A noise scheduler: noise, targets and loss weights of a diffusion process.

    Timesteps are float32, in model units (0 .. num_train_timesteps); all functions are pure. `add_noise` and
    `target` are linear in the latents and the noise, with factors that depend on the timestep only.
    """

    def sample_timesteps(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Draws training timesteps[B] float32 on the CPU, row i from generators[i]."""

    def timestep_quantile(self, u: Tensor) -> Tensor:
        """The quantiles of the training timesteps: the inverse of their cumulative distribution.

        Args:
            u: [B] shares in (0, 1), on the CPU.

        Returns:
            timestep[B] float32, increasing with the noise.
        """

    def add_noise(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Adds noise to clean latents: x_t[B,C,T,H,W] from standard normal noise and timestep[B]."""

    def target(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """The training target: the output that the predictor should have at x_t."""

    def loss_weight(self, timestep: Tensor) -> Tensor:
        """The factor [B] float32 of each sample's squared error in the loss."""

    def model_timestep(self, timestep: Tensor) -> Tensor:
        """The diffusion timestep as the predictor expects it."""

    def sigmas(self, steps: int) -> Tensor:
        """The noise levels of sampling: sigmas[steps+1] float32 from 1 (noise) to 0 (clean)."""

    def integrate(self, velocity: VelocityField, noise: Tensor, steps: int) -> Tensor:
        """Samples: solves from noise[B,C,T,H,W] to clean latents.

        Args:
            velocity: called as `velocity(latents, timestep[B])`. If the timestep is on the CPU, the expert
                of a predictor is selected without waiting for the device.
            noise: [B,C,T,H,W].
            steps: number of solver steps.
        """


@runtime_checkable
class SupportsForTokens(NoiseScheduler, Protocol):
    """Capability of a noise scheduler whose noise levels depend on the number of tokens of a sample."""

    def for_tokens(self, tokens: int) -> NoiseScheduler:
        """The noise scheduler for samples of this size; pure, since the task keeps one for each size.

        The task uses it in training, evaluation and sampling; all samples of a micro-batch have one size.

        Args:
            tokens: number of patches of one sample's latents: T x H x W over the predictor's `patch_size`.
        """
