"""The autoencoder `wan/vae`: Diffusers' AutoencoderKLWan, frozen, with latents at unit scale."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mm_core.contracts import WeightsFrom, torch_dtype
from mm_core.errors import CheckpointError, ContractError
from mm_core.weights import INDEX, only_pickled, read_mapping
from mm_wan.encoders.config import WanVAEConfig
from mm_wan.encoders.vae_files import (
    CLASS,
    FRAMES_A_LATENT,
    STEM,
    empty_model,
    is_numbers,
    layers_of,
    pipeline_part,
)

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Normalisation:
    """Latents of the autoencoder <-> latents at unit scale, in float32.

    channel_specified_shift_scale is (x - mean) / std, computed as Diffusers' Wan pipelines do, through
    the reciprocal of std. value_shift_scale is (x - shift_factor) * scaling_factor.
    """

    def __init__(self, shift: Tensor, scale: Tensor) -> None:
        self.shift = shift.float().view(1, -1, 1, 1, 1)
        self.scale = scale.float().view(1, -1, 1, 1, 1)

    def unit(self, latents: Tensor) -> Tensor:
        """latents[B,C,T,H,W] of the autoencoder -> at unit scale."""
        return (latents.float() - self.shift.to(latents.device)) * self.scale.to(latents.device)

    def own(self, latents: Tensor) -> Tensor:
        """latents[B,C,T,H,W] at unit scale -> the autoencoder's."""
        return latents.float() / self.scale.to(latents.device) + self.shift.to(latents.device)


class WanPosterior:
    """A normal distribution of each latent. Satisfies `Posterior`.

    moments: [B,2C,T,H,W], mean and log variance as the autoencoder gives them, before any normalisation:
    what a cache stores, and `WanVAE.posterior` takes back.
    """

    def __init__(self, moments: Tensor, normalisation: Normalisation | None) -> None:
        self.moments = moments
        self._normalisation = normalisation

    def sample(self, generators: Sequence[torch.Generator]) -> Tensor:
        """latents[B,C,T,H,W] float32; row i has the noise of generators[i]."""
        if len(generators) != len(self.moments):
            raise ContractError(f"{len(generators)} generators are given for {len(self.moments)} clips")
        return self._unit(self._distribution().sample(list(generators)))

    def mode(self) -> Tensor:
        """latents[B,C,T,H,W] float32, the most likely ones."""
        return self._unit(self._distribution().mode())

    def _distribution(self) -> DiagonalGaussianDistribution:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        return DiagonalGaussianDistribution(self.moments.float())

    def _unit(self, latents: Tensor) -> Tensor:
        return latents if self._normalisation is None else self._normalisation.unit(latents)


class WanVAE(nn.Module):
    """Clips <-> latents by Diffusers' AutoencoderKLWan (https://arxiv.org/abs/2503.20314, section 4.1).

    Satisfies `Autoencoder`, `Streamed` and `SupportsDoSample`. F = 4k+1 frames become T = k+1 latents;
    Y and X are divided by 8 (Wan 2.1, 16 channels) or 16 (Wan 2.2 TI2V, 48 channels).
    Time is taken in pieces of four frames, so that memory does not grow with the clip.
    Fields are those of `WanVAEConfig`.

    The constructor opens no file. What config.json says is read when it is first asked for; where that file
    is not there yet, `latent_channels` tells which of the two published autoencoders is meant.

    Raises:
        ContractError: options that contradict each other.
    """

    entry_points = ("encode", "decode")
    block_patterns = ()  # a call runs its layers once for each piece of a clip: moved or gathered whole
    model: AutoencoderKLWan | None

    def __init__(self, from_pretrained: str, **others: Any) -> None:
        super().__init__()
        self.wanted = wanted = WanVAEConfig(from_pretrained, **others)
        self.folder = pipeline_part(Path(from_pretrained), "vae")
        self.weights_from: WeightsFrom | None = WeightsFrom(str(self.folder), "core/diffusers")
        self.dtype = torch_dtype(wanted.dtype)
        self.tiling = wanted.tiling_param if wanted.tiling else None
        self.do_sample = wanted.do_sample
        self.register_module("model", None)
        self._check_options()

    # -- what it is -----------------------------------------------------------------------------

    @property
    def latent_channels(self) -> int:
        """Channels of the latents. CheckpointError when config.json has other ones than were asked for."""
        return self._facts[0]

    @property
    def stride(self) -> tuple[int, int, int]:
        """Frames, rows and columns of pixels a latent; the first frame is a latent of its own."""
        return self._facts[1]

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C,T,H,W) of a clip. ContractError unless F is 4k+1 and Y and X are multiples of the stride."""
        t, y, x = self.stride
        faults = []
        for name, size, step, rest in (
            ("num_frames", num_frames, t, 1),
            ("height", height, y, 0),
            ("width", width, x, 0),
        ):
            if size < 1 or (size - rest) % step:
                below = (size - rest) // step * step + rest
                near = " or ".join(str(found) for found in (below, below + step) if found > 0)
                near = near or str(rest or step)
                faults.append(f"{name} {size} (nearest: {near})")
        if faults:
            raise ContractError(
                f"the autoencoder 'wan/vae' cannot encode clips with {' and '.join(faults)}",
                accepted=f"num_frames of {t}k+1, height a multiple of {y}, width a multiple of {x}",
            )
        return self.latent_channels, (num_frames - 1) // t + 1, height // y, width // x

    # -- weights --------------------------------------------------------------------------------

    def missing_files(self) -> list[str]:
        """Of config.json and the weights, those that do not exist."""
        names = ["config.json"]
        if not self._pickled():  # those are there, and load() says why it refuses them
            names += self._weight_files()
        return [str(self.folder / name) for name in names if not (self.folder / name).is_file()]

    def build_empty(self) -> None:
        """Makes the autoencoder. CheckpointError for a folder of another model, or of pickles alone; nothing
        in a file runs."""
        if self.model is not None:
            return
        if not (self.folder / "config.json").is_file():
            raise CheckpointError(
                "the folder of the autoencoder holds no config.json",
                where=str(self.folder),
                accepted=f"a folder as Diffusers' {CLASS}.save_pretrained writes it, or its pipeline's",
            )
        self._check_tiles(self.stride[1])
        model = empty_model(self._config, self.folder, self.dtype)
        if pickled := self._pickled():
            raise only_pickled(self.folder, pickled)
        if self.tiling is not None:
            model.enable_tiling(**asdict(self.tiling))
        model.use_slicing = self.wanted.slicing
        _ = self._normalisation  # complains now, not at the first clip
        self.model = model.eval().requires_grad_(False)

    # -- pixels <-> latents -----------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> WanPosterior:
        """pixels[B,3,F,Y,X] in [-1,1] -> posterior over latents[B,C,T,H,W]. ContractError for sizes that
        `latent_shape` refuses."""
        model = self.model
        assert model is not None, "its weights come first"
        self.latent_shape(*pixels.shape[2:])
        if self.wanted.slicing and len(pixels) > 1:
            return self.posterior(torch.cat([self._moments(model, row[None]) for row in pixels]))
        return self.posterior(self._moments(model, pixels))

    def posterior(self, moments: Tensor) -> WanPosterior:
        """The posterior whose moments[B,2C,T,H,W] were kept from an earlier `encode`. Needs no weights."""
        return WanPosterior(moments, self._normalisation)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """latents[B,C,T,H,W] -> pixels[B,3,F,Y,X] in [-1,1], in the autoencoder's dtype."""
        assert self.model is not None, "its weights come first"
        if self._normalisation is not None:
            latents = self._normalisation.own(latents)
        found: Tensor = self.model.decode(latents.to(self.dtype)).sample
        return found

    def train(self, mode: bool = True) -> WanVAE:
        """Stays in evaluation mode: it is frozen."""
        return super().train(False)

    # -- inside -----------------------------------------------------------------------------------

    def _moments(self, model: AutoencoderKLWan, pixels: Tensor) -> Tensor:
        """[B,2C,T,H,W] of pixels[B,3,F,Y,X]: what AutoencoderKLWan.encode gives. It casts and patchifies a
        whole clip at once; here each piece is, so that only the moments grow with the clip."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify

        found: Tensor
        if self.tiling is not None:
            found = model.encode(pixels.to(self.dtype)).latent_dist.parameters
            return found
        patch = model.config.patch_size
        # Each causal convolution keeps the frames that the next piece looks back at.
        kept = [None] * sum(isinstance(layer, WanCausalConv3d) for layer in model.encoder.modules())
        encoded = []
        for piece in pixels.tensor_split(tuple(range(1, pixels.shape[2], FRAMES_A_LATENT)), dim=2):
            piece = piece.to(self.dtype)
            piece = piece if patch is None else patchify(piece, patch_size=patch)
            encoded.append(model.encoder(piece, feat_cache=kept, feat_idx=[0]))
        found = torch.cat(encoded, dim=2)
        encoded.clear()
        found = model.quant_conv(found)
        return found

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        """config.json. CheckpointError when it is another model's."""
        where = self.folder / "config.json"
        try:
            found = json.loads(where.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as fault:
            raise CheckpointError(
                f"config.json cannot be read ({type(fault).__name__})", where=str(where)
            ) from None
        kind = found.get("_class_name") if isinstance(found, dict) else None
        if kind != CLASS:
            raise CheckpointError(
                f"this folder holds no Wan autoencoder: its config.json is of {kind or 'no Diffusers model'}",
                where=str(self.folder),
                accepted=f"the folder `vae` of a Wan pipeline, of class {CLASS}",
            )
        return dict(found)

    @cached_property
    def _facts(self) -> tuple[int, tuple[int, int, int]]:
        """Channels and stride, from the layers that config.json describes."""
        asked = self.wanted.latent_channels
        if not (self.folder / "config.json").is_file():
            return asked or 16, (4, 16, 16) if asked == 48 else (4, 8, 8)
        channels, stride = layers_of(self._config, self.folder)
        if asked is not None and asked != channels:
            raise CheckpointError(
                f"the autoencoder's latents have {channels} channels, but latent_channels asks for {asked}",
                where=str(self.folder),
                hint="Wan 2.1 and the 14B models of Wan 2.2 have 16 channels, Wan 2.2 TI2V-5B has 48",
            )
        return channels, stride

    @cached_property
    def _normalisation(self) -> Normalisation | None:
        if not self.wanted.norm_latents:
            return None
        if self.wanted.norm_mode == "value_shift_scale":
            assert self.wanted.scaling_factor is not None
            return Normalisation(
                torch.tensor([self.wanted.shift_factor or 0.0]), torch.tensor([self.wanted.scaling_factor])
            )
        from diffusers import AutoencoderKLWan

        defaults = signature(
            AutoencoderKLWan.__init__
        ).parameters  # the first published config has no numbers
        mean, std = (
            self._config.get(name, defaults[name].default) for name in ("latents_mean", "latents_std")
        )
        if not is_numbers(mean, std, count=self.latent_channels) or min(std) <= 0:
            raise CheckpointError(
                f"latents_mean and latents_std are not of {self.latent_channels} numbers each, one a channel",
                where=str(self.folder / "config.json"),
                accepted="finite numbers, those of latents_std above 0",
            )
        return Normalisation(torch.tensor(mean), 1.0 / torch.tensor(std))

    def _weight_files(self) -> list[str]:
        """The files that the folder's index lists, or the one file of small models."""
        index = self.folder / f"{STEM}{INDEX}"
        if not index.is_file():
            return [f"{STEM}.safetensors"]
        listed = read_mapping(index).get("weight_map")  # load() says what is wrong with a damaged one
        return sorted(set(map(str, listed.values()))) if isinstance(listed, dict) else []

    def _pickled(self) -> list[str]:
        """Names of pickled weights, where there are no others."""
        if any(self.folder.glob("*.safetensors")):
            return []
        return sorted(path.name for pattern in _PICKLED for path in self.folder.glob(pattern))

    def _check_options(self) -> None:
        wanted = self.wanted
        scalars = wanted.shift_factor is not None or wanted.scaling_factor is not None
        if wanted.norm_mode == "value_shift_scale" and wanted.scaling_factor is None:
            raise ContractError("norm_mode value_shift_scale needs a scaling_factor")
        if wanted.norm_mode != "value_shift_scale" and scalars:
            raise ContractError(
                f"shift_factor and scaling_factor are not used by norm_mode {wanted.norm_mode}",
                hint="leave them out, or set norm_mode: value_shift_scale",
            )

    def _check_tiles(self, step: int) -> None:
        """ContractError for tiles that leave gaps, or do not divide into latents."""
        if self.tiling is None:
            return
        sizes = asdict(self.tiling)
        for axis in ("height", "width"):
            tile, apart = sizes[f"tile_sample_min_{axis}"], sizes[f"tile_sample_stride_{axis}"]
            if apart > tile or tile % step or apart % step:
                raise ContractError(
                    f"tiles of {axis} {tile} that are {apart} apart do not cover a clip in whole latents",
                    where="tiling_param",
                    accepted=f"multiples of {step}, the stride at most the tile",
                )
