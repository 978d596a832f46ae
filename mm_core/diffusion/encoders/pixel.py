"""The autoencoder `pixel`: its latents are rearranged pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn

from mm_core.builtin.configs.diffusion import PixelConfig
from mm_core.errors import ContractError


@dataclass
class PixelPosterior:
    """The posterior of the `pixel` autoencoder: latents [B,C,T,H,W] without any spread."""

    moments: Tensor

    def sample(self, generators: Sequence[torch.Generator]) -> Tensor:
        return self.moments

    def mode(self) -> Tensor:
        return self.moments


class PixelAutoencoder(nn.Module):
    """The autoencoder `pixel`: a block of temporal x spatial x spatial pixels becomes one latent.

    Latents have 3 * temporal * spatial^2 channels (space-to-depth and time-to-depth), in [-1, 1]. Lossless.
    Satisfies `Autoencoder`.
    """

    def __init__(self, spatial: int = PixelConfig.spatial, temporal: int = PixelConfig.temporal) -> None:
        super().__init__()
        self.stride = (temporal, spatial, spatial)
        self.latent_channels = 3 * temporal * spatial * spatial

    def load(self, device: torch.device) -> None:
        """Does nothing: this autoencoder has no weights."""

    def missing_files(self) -> list[str]:
        """Missing weight files of the autoencoder: none, since it needs no files."""
        return []

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Shape (C,T,H,W) of the autoencoder's latents for a clip.

        Raises:
            ContractError: a size is not a multiple of the stride.
        """
        sizes = {"num_frames": num_frames, "height": height, "width": width}
        faults = [
            f"{name} {size} (nearest: {', '.join(map(str, _multiples_near(size, stride)))})"
            for (name, size), stride in zip(sizes.items(), self.stride, strict=True)
            if size < 1 or size % stride
        ]
        if faults:
            raise ContractError(
                f"the autoencoder 'pixel' cannot encode clips with {' and '.join(faults)}",
                accepted="num_frames, height and width that are multiples of "
                + ", ".join(map(str, self.stride)),
            )
        t, y, x = self.stride
        return self.latent_channels, num_frames // t, height // y, width // x

    def posterior(self, moments: Tensor) -> PixelPosterior:
        """The posterior of an earlier `encode`, from its moments [B,C,T,H,W]."""
        return PixelPosterior(moments)

    def encode(self, pixels: Tensor) -> PixelPosterior:
        """Encodes clips: pixels [B,3,F,Y,X] -> latents [B,C,T,H,W]."""
        self.latent_shape(*pixels.shape[2:])
        t, y, x = self.stride
        return PixelPosterior(
            rearrange(pixels, "b c (t pt) (h ph) (w pw) -> b (c pt ph pw) t h w", pt=t, ph=y, pw=x)
        )

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents [B,C,T,H,W] -> pixels [B,3,F,Y,X] of clips, clamped to [-1,1]."""
        t, y, x = self.stride
        pixels = rearrange(latents, "b (c pt ph pw) t h w -> b c (t pt) (h ph) (w pw)", pt=t, ph=y, pw=x)
        return pixels.clamp(-1, 1)


def _multiples_near(size: int, stride: int) -> list[int]:
    below = size // stride * stride
    return [multiple for multiple in (below, below + stride) if multiple > 0] or [stride]
