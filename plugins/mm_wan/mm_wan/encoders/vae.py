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
from mm_core.errors import CheckpointError, ContractError, plain_reason, plural
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
from mm_wan.single_file import FORMAT, is_single, vae_config

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Normalisation:
    """Converts latents between the autoencoder's scale and unit scale, in float32.

    channel_specified_shift_scale is (x - mean) / std, computed with the reciprocal of std as in Diffusers'
    Wan pipelines. value_shift_scale is (x - shift_factor) * scaling_factor.
    """

    def __init__(self, shift: Tensor, scale: Tensor) -> None:
        self.shift = shift.float().view(1, -1, 1, 1, 1)
        self.scale = scale.float().view(1, -1, 1, 1, 1)

    def unit(self, latents: Tensor) -> Tensor:
        """Scales the autoencoder's latents [B,C,T,H,W] to unit scale."""
        self._move(latents.device)
        return (latents.float() - self.shift) * self.scale

    def own(self, latents: Tensor) -> Tensor:
        """Scales latents [B,C,T,H,W] from unit scale back to the autoencoder's scale."""
        self._move(latents.device)
        return latents.float() / self.scale + self.shift

    def _move(self, device: torch.device) -> None:
        """Keeps the numbers on the device of the latents: a copy in each step would wait for it."""
        self.shift, self.scale = self.shift.to(device), self.scale.to(device)


class WanPosterior:
    """Normal distribution over a clip's latents, from Wan's autoencoder. Satisfies `Posterior`.

    Attributes:
        moments: [B,2C,T,H,W], mean and log variance from the autoencoder, before any normalisation. A cache
            stores them, and `WanVAE.posterior` accepts them.
    """

    def __init__(self, moments: Tensor, normalisation: Normalisation | None) -> None:
        self.moments = moments
        self._normalisation = normalisation

    def sample(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Draws latents [B,C,T,H,W] float32 for B clips; row i uses the noise of generators[i]."""
        if len(generators) != len(self.moments):
            raise ContractError(
                f"the number of generators ({len(generators)}) differs from the number of clips "
                f"({len(self.moments)})",
                where="generators",
                hint="give one generator per clip",
            )
        return self._unit(self._distribution().sample(list(generators)))

    def mode(self) -> Tensor:
        """The most likely latents [B,C,T,H,W] float32 of the clips."""
        return self._unit(self._distribution().mode())

    def _distribution(self) -> DiagonalGaussianDistribution:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        return DiagonalGaussianDistribution(self.moments.float())

    def _unit(self, latents: Tensor) -> Tensor:
        return latents if self._normalisation is None else self._normalisation.unit(latents)


class WanVAE(nn.Module):
    """Encodes clips into latents and decodes them with Diffusers' AutoencoderKLWan, frozen
    (https://arxiv.org/abs/2503.20314, section 4.1).

    Satisfies `Autoencoder`, `Streamed` and `SupportsDoSample`. F = 4k+1 frames become T = k+1 latents;
    Y and X are divided by 8 (Wan 2.1, 16 channels) or 16 (Wan 2.2 TI2V, 48 channels).
    Clips are encoded in pieces of four frames, so memory does not grow with their length.
    `WanVAEConfig` describes the fields.

    The constructor opens no file; config.json is read on first use. If that file does not exist yet,
    `latent_channels` selects one of the two published autoencoders.

    Raises:
        ContractError: options contradict each other.
    """

    entry_points = ("encode", "decode")
    block_patterns = ()  # a call runs its layers once per piece of a clip, so it is not split into blocks
    model: AutoencoderKLWan | None

    def __init__(self, from_pretrained: str, **others: Any) -> None:
        super().__init__()
        self.wanted = wanted = WanVAEConfig(from_pretrained, **others)
        self.folder = pipeline_part(Path(from_pretrained), "vae")  # or one file of weights
        single = is_single(self.folder)
        self.described = self.folder if single else self.folder / "config.json"
        format = FORMAT if single else "core/diffusers"
        self.weights_from: WeightsFrom | None = WeightsFrom(str(self.folder), format)
        self.dtype = torch_dtype(wanted.dtype)
        self.tiling = wanted.tiling_param if wanted.tiling else None
        self.do_sample = wanted.do_sample
        self.register_module("model", None)
        self._check_options()

    # -- sizes ----------------------------------------------------------------------------------

    @property
    def latent_channels(self) -> int:
        """Channels of the autoencoder's latents.

        Raises:
            CheckpointError: config.json has a number different from the config's `latent_channels`.
        """
        return self._facts[0]

    @property
    def stride(self) -> tuple[int, int, int]:
        """Frames, rows and columns of pixels per latent of the autoencoder. The first frame has its own
        latent."""
        return self._facts[1]

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Shape (C,T,H,W) of the latents for a clip of this size.

        Raises:
            ContractError: num_frames is not 4k+1, or height or width is not a multiple of the stride.
        """
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
        """Files of the Wan autoencoder that do not exist: config.json, weights."""
        paths = [self.described]
        if not self._pickled():  # build_empty() refuses pickled weights with an error of its own
            paths += self._weight_files()
        return [str(path) for path in paths if not path.is_file()]

    def files(self) -> list[Path]:
        """Files on which the latents depend, for the feature cache: config.json and weights."""
        return [path for path in (self.described, *self._weight_files()) if path.is_file()]

    def build_empty(self) -> None:
        """Builds the Wan autoencoder without memory for its weights. Executes no code from files.

        Raises:
            CheckpointError: the folder holds another model, or only pickled weights.
        """
        if self.model is not None:
            return
        if not self.described.is_file():
            raise CheckpointError(
                "the folder of the autoencoder holds no config.json",
                where=str(self.folder),
                accepted=f"a folder written by Diffusers' {CLASS}.save_pretrained, or its pipeline's folder",
            )
        self._check_tiles(self.stride[1])
        model = empty_model(self._config, self.described, self.dtype)
        if pickled := self._pickled():
            raise only_pickled(self.folder, pickled)
        if self.tiling is not None:
            model.enable_tiling(**asdict(self.tiling))
        model.use_slicing = self.wanted.slicing
        _ = self._normalisation  # raises its error now, not at the first clip
        self.model = model.eval().requires_grad_(False)

    # -- pixels <-> latents -----------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> WanPosterior:
        """Encodes clips [B,3,F,Y,X] with pixels in [-1,1] into a distribution over latents [B,C,T,H,W].

        Raises:
            ContractError: `latent_shape` refuses the clips' size.
        """
        model = self.model
        assert model is not None, "call build_empty and load weights first"
        self.latent_shape(*pixels.shape[2:])
        if self.wanted.slicing and len(pixels) > 1:
            return self.posterior(torch.cat([self._moments(model, row[None]) for row in pixels]))
        return self.posterior(self._moments(model, pixels))

    def posterior(self, moments: Tensor) -> WanPosterior:
        """The distribution over latents from cached moments [B,2C,T,H,W] of an earlier `encode`. Needs no
        weights."""
        return WanPosterior(moments, self._normalisation)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents [B,C,T,H,W] into clips [B,3,F,Y,X] with pixels in [-1,1], in the autoencoder's
        dtype."""
        assert self.model is not None, "call build_empty and load weights first"
        if self._normalisation is not None:
            latents = self._normalisation.own(latents)
        found: Tensor = self.model.decode(latents.to(self.dtype)).sample
        return found

    def train(self, mode: bool = True) -> WanVAE:
        """Keeps the frozen autoencoder in evaluation mode, whatever `mode` is."""
        return super().train(False)

    # -- inside -----------------------------------------------------------------------------------

    def _moments(self, model: AutoencoderKLWan, pixels: Tensor) -> Tensor:
        """Moments [B,2C,T,H,W] of pixels [B,3,F,Y,X], equal to those of AutoencoderKLWan.encode. That method
        casts and patchifies the complete clip at once; here each piece is cast alone, so only the moments
        grow with the clip."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify

        found: Tensor
        if self.tiling is not None:
            found = model.encode(pixels.to(self.dtype)).latent_dist.parameters
            return found
        patch = model.config.patch_size
        # Each causal convolution keeps the frames that it needs for the next piece.
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
        """Content of config.json. CheckpointError if it describes another model."""
        if is_single(where := self.described):
            return vae_config(where)
        try:
            found = json.loads(where.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as fault:
            raise CheckpointError(
                f"config.json cannot be read: {plain_reason(fault)}",
                where=str(where),
                hint="copy the file again, or choose another folder of a Wan autoencoder",
            ) from None
        kind = found.get("_class_name") if isinstance(found, dict) else None
        if kind != CLASS:
            raise CheckpointError(
                "this folder holds no Wan autoencoder: its config.json "
                + (f"names the class {kind}" if kind else "names no Diffusers class"),
                where=str(self.folder),
                accepted=f"the folder `vae` of a Wan pipeline, with class {CLASS}",
            )
        return dict(found)

    @cached_property
    def _facts(self) -> tuple[int, tuple[int, int, int]]:
        """Channels and stride of the layers that config.json describes."""
        asked = self.wanted.latent_channels
        if not self.described.is_file():
            return asked or 16, (4, 16, 16) if asked == 48 else (4, 8, 8)
        channels, stride = layers_of(self._config, self.described)
        if asked is not None and asked != channels:
            raise CheckpointError(
                f"the autoencoder's latents have {channels} channels, but latent_channels is {asked}",
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

        # The first published config.json has no such numbers: the class's defaults serve.
        defaults = signature(AutoencoderKLWan.__init__).parameters
        mean, std = (
            self._config.get(name, defaults[name].default) for name in ("latents_mean", "latents_std")
        )
        if not is_numbers(mean, std, count=self.latent_channels) or min(std) <= 0:
            raise CheckpointError(
                f"latents_mean and latents_std need {plural(self.latent_channels, 'number')} each,"
                " one per channel",
                where=str(self.described),
                accepted="finite numbers; those in latents_std above 0",
            )
        return Normalisation(torch.tensor(mean), 1.0 / torch.tensor(std))

    def _weight_files(self) -> list[Path]:
        """Files listed in the folder's index; without an index, the single file of a small model."""
        if self.described == self.folder:
            return []
        index = self.folder / f"{STEM}{INDEX}"
        if not index.is_file():
            return [self.folder / f"{STEM}.safetensors"]
        listed = read_mapping(index).get("weight_map")  # a damaged index is reported when weights are read
        names = sorted(set(map(str, listed.values()))) if isinstance(listed, dict) else []
        return [self.folder / name for name in names]

    def _pickled(self) -> list[str]:
        """Names of pickled weights files, if the folder has no safetensors."""
        if any(self.folder.glob("*.safetensors")):
            return []
        return sorted(path.name for pattern in _PICKLED for path in self.folder.glob(pattern))

    def _check_options(self) -> None:
        wanted = self.wanted
        scalars = wanted.shift_factor is not None or wanted.scaling_factor is not None
        if wanted.norm_mode == "value_shift_scale" and wanted.scaling_factor is None:
            raise ContractError(
                "norm_mode value_shift_scale needs a scaling_factor",
                hint="set scaling_factor to a number above 0",
            )
        if wanted.norm_mode != "value_shift_scale" and scalars:
            raise ContractError(
                f"shift_factor and scaling_factor are not used by norm_mode {wanted.norm_mode}",
                hint="leave them out, or set norm_mode: value_shift_scale",
            )

    def _check_tiles(self, step: int) -> None:
        """Raises ContractError for tiles that leave gaps or do not divide into latents."""
        if self.tiling is None:
            return
        sizes = asdict(self.tiling)
        for axis in ("height", "width"):
            tile, apart = sizes[f"tile_sample_min_{axis}"], sizes[f"tile_sample_stride_{axis}"]
            if apart > tile or tile % step or apart % step:
                raise ContractError(
                    f"tiles of {axis} {tile} with stride {apart} leave gaps or cut latents",
                    where="tiling_param",
                    accepted=f"multiples of {step}, with a stride no larger than the tile",
                )
