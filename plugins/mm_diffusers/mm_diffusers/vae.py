"""The autoencoder `diffusers/vae`: that of a pipeline, frozen, with latents at unit scale."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from mm_core.contracts import WeightsFrom, torch_dtype
from mm_core.errors import ContractError
from mm_core.plugin import DType
from mm_core.weights import open_stored
from mm_diffusers.call import empty_model
from mm_diffusers.config import VaeConfig
from mm_diffusers.families import Family
from mm_diffusers.folder import PipelineFolder

PART = "vae"


class DiffusersPosterior:
    """The distribution of latents of an autoencoder of Diffusers. Satisfies `Posterior`.

    Args:
        moments: [B,2C,...], mean and log variance, or [B,C,...] without a variance.
        owner: the autoencoder.
    """

    def __init__(self, moments: Tensor, owner: DiffusersVAE) -> None:
        self.moments, self._owner = moments, owner

    def sample(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Latents [B,C,T,H,W] float32, row i with generators[i]."""
        return self._owner.unit(self._distribution().sample(list(generators)))

    def mode(self) -> Tensor:
        """The most likely latents [B,C,T,H,W] float32."""
        return self._owner.unit(self._distribution().mode())

    def _distribution(self) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        return DiagonalGaussianDistribution(self.moments.float())


class DiffusersVAE(nn.Module):
    """The autoencoder of a pipeline. Satisfies `Autoencoder`, `Streamed` and `SupportsPosterior`.

    Args:
        from_pretrained: folder of the pipeline.
        dtype: of its weights.
        family: recipe of the pipeline; None: a known one.
    """

    entry_points = ("encode", "decode")
    block_patterns = ()
    model: Any

    def __init__(
        self, from_pretrained: str, dtype: DType = VaeConfig.dtype, family: Family | None = None
    ) -> None:
        super().__init__()
        self.folder = PipelineFolder(Path(from_pretrained), family)
        self.path = self.folder.path / PART
        self.weights_from = WeightsFrom(str(self.path), "core/diffusers")
        self.dtype = torch_dtype(dtype)
        self.register_module("model", None)

    # -- sizes ----------------------------------------------------------------------------------

    @cached_property
    def _facts(self) -> tuple[int, tuple[int, int, int], bool]:
        """Channels, stride, and whether the model takes clips, found with pixels of meta."""
        model = empty_model(self.folder, PART).to("meta")
        clips = any(isinstance(module, nn.Conv3d) for module in model.modules())
        size, fold = 64, 2 if self.folder.family.folded else 1
        more = 16 if self.folder.family.strides[0] else 0
        with torch.no_grad():
            pixels = torch.empty(1, 3, *([1 + more] if clips else []), size, size, device="meta")
            shape = model.encode(pixels).latent_dist.mean.shape
        space = size // shape[-1] * fold
        time = more // (shape[2] - 1) if more else 1
        return shape[1] * fold**2, (time, space, space), clips

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""
        return self._facts[0]

    @property
    def stride(self) -> tuple[int, int, int]:
        """Frames, rows and columns of pixels a latent."""
        return self._facts[1]

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Shape (C,T,H,W) of the latents of a picture or clip.

        Raises:
            ContractError: it is a clip for a model of pictures, or the size does not divide.
        """
        channels, (t, y, x), _ = self._facts
        video = bool(self.folder.family.strides[0])
        odd = (num_frames - 1) % t if video else num_frames - 1
        if num_frames < 1 or odd or min(height, width) < 1 or height % y or width % x:
            frames = f"1 more than a multiple of {t}" if video else "1"
            raise ContractError(
                f"the autoencoder of {self.folder.kind} cannot encode num_frames {num_frames},"
                f" height {height}, width {width}",
                accepted=f"num_frames {frames}, height a multiple of {y}, width a multiple of {x}",
            )
        return channels, (num_frames - 1) // t + 1, height // y, width // x

    # -- weights --------------------------------------------------------------------------------

    def missing_files(self) -> list[str]:
        """Files of the autoencoder that do not exist."""
        if not (self.path / "config.json").is_file():
            return [str(self.path / "config.json")]
        return [] if any(self.path.glob("*.safetensors")) else [str(self.path / "*.safetensors")]

    def files(self) -> list[Path]:
        """Files on which the latents depend."""
        return sorted([*self.path.glob("config.json"), *self.path.glob("*.safetensors*")])

    def build_empty(self) -> None:
        """Builds the autoencoder without memory for its weights."""
        if self.model is None:
            model = empty_model(self.folder, PART).requires_grad_(False)
            nn.Module.to(model, self.dtype)  # the library's own `to` warns of modules that it keeps
            model.use_slicing = bool(self.folder.family.strides[0])  # HunyuanVideo's takes one clip alone
            self.model = model

    # -- pixels <-> latents -----------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> DiffusersPosterior:
        """The distribution over latents of pixels [B,3,F,Y,X] in [-1,1]."""
        given = pixels.to(self.dtype)
        return self.posterior(
            self.model.encode(given if self._facts[2] else given[:, :, 0]).latent_dist.parameters
        )

    def posterior(self, moments: Tensor) -> DiffusersPosterior:
        """The distribution over latents from moments of an earlier `encode`."""
        return DiffusersPosterior(moments, self)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B,3,F,Y,X] of latents [B,C,T,H,W]."""
        found = self._own(latents).to(self.dtype)
        found = found if self._facts[2] else found[:, :, 0]
        # LTX's decoder may take a time, 0 where no noise is added to its latents.
        conditioned = self.model.config.get("timestep_conditioning")
        more = {"temb": found.new_zeros(len(found))} if conditioned else {}
        pixels: Tensor = self.model.decode(found, **more, return_dict=False)[0]
        return (pixels if pixels.dim() == 5 else pixels[:, :, None]).float().clamp(-1, 1)

    def unit(self, latents: Tensor) -> Tensor:
        """Latents of the model at unit scale, [B,C,T,H,W] float32."""
        latents = latents.float()
        latents = latents if latents.dim() == 5 else latents[:, :, None]
        if self.folder.family.folded:
            latents = rearrange(latents, "b c t (h ph) (w pw) -> b (c ph pw) t h w", ph=2, pw=2)
        shift, scale = self._normalisation(latents.device)
        return (latents - shift) / scale

    def _own(self, latents: Tensor) -> Tensor:
        shift, scale = self._normalisation(latents.device)
        latents = latents.float() * scale + shift
        if self.folder.family.folded:
            latents = rearrange(latents, "b (c ph pw) t h w -> b c t (h ph) (w pw)", ph=2, pw=2)
        return latents

    def _normalisation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the model's latents, as the pipelines use them."""
        shift, scale = self._numbers
        self._numbers = shift.to(device), scale.to(device)
        return self._numbers

    @cached_property
    def _numbers(self) -> tuple[Tensor, Tensor]:
        """Of config.json or of the weights' files: with cached moments no model is built."""
        config = self.folder.config(PART)
        if self.folder.family.folded:
            mean, variance = (self._stored(f"bn.running_{name}") for name in ("mean", "var"))
            std = torch.sqrt(variance + config["batch_norm_eps"])
        elif config.get("latents_mean") is not None:
            mean, std = torch.tensor(config["latents_mean"]), torch.tensor(config["latents_std"])
        elif "latents_mean" in self._file.shapes:
            mean, std = self._stored("latents_mean"), self._stored("latents_std") / config["scaling_factor"]
        else:
            mean = torch.tensor([config.get("shift_factor") or 0.0])
            std = torch.tensor([1 / config["scaling_factor"]])
        return mean.float().view(1, -1, 1, 1, 1), std.float().view(1, -1, 1, 1, 1)

    @property
    def _file(self) -> Any:
        return open_stored(self.path, "diffusion_pytorch_model")

    def _stored(self, name: str) -> Tensor:
        stored = self._file
        return stored.read(name, tuple(slice(0, size) for size in stored.shapes[name])).clone()

    def train(self, mode: bool = True) -> DiffusersVAE:
        """Stays in evaluation mode."""
        return super().train(False)
