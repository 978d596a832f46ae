"""The predictor `diffusers/transformer`: the transformer of a pipeline, called as the pipeline calls it.

Letters: B batch; C,T,H,W latents; L,D text; N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
from einops import rearrange
from torch import Tensor, nn

from mm_core.contracts import ConditionShapes, WeightsFrom, empty_parameters
from mm_core.errors import CheckpointError, first_line
from mm_diffusers.call import PipelineCall
from mm_diffusers.folder import PipelineFolder

PART = "transformer"


class DiffusersTransformer(nn.Module):
    """A transformer of Diffusers: predicts the velocity of noisy latents. Satisfies `Predictor`,
    `SupportsWeightsFrom`, `SupportsConditionShapes` and `SupportsGuided` of `mm_core.contracts`.

    Args:
        from_pretrained: folder of the pipeline.

    Raises:
        CheckpointError: the folder is no pipeline with a recipe, or its config.json does not fit its class.
    """

    text_padding = "masked"

    def __init__(self, from_pretrained: str) -> None:
        super().__init__()
        self.folder = folder = PipelineFolder(Path(from_pretrained))
        self.family = family = folder.family
        config = folder.config(PART)
        try:
            # Tables that are neither parameters nor buffers (Qwen-Image's) would be lost on meta.
            with empty_parameters() if torch.empty(0).is_meta else nullcontext():
                self.transformer = getattr(diffusers, folder.parts[PART][1]).from_config(dict(config))
        except (TypeError, ValueError, AttributeError, KeyError) as fault:
            raise CheckpointError(
                f"no transformer can be built from config.json: {first_line(fault)}",
                where=str(folder.path / PART),
                hint="copy config.json again, or install the version of Diffusers that wrote it",
            ) from fault
        self.weights_from = WeightsFrom(str(folder.path / PART), "core/diffusers")
        self.patch_size = family.patch
        self.in_channels = self.out_channels = int(self.transformer.config.in_channels) // family.channels
        self.text_dim = family.widths(config)[0]

    @cached_property
    def call(self) -> PipelineCall:
        """The pipeline that prepares the call."""
        return PipelineCall(self.folder, self.transformer)

    @property
    def condition_shapes(self) -> ConditionShapes:
        """What the forward takes beside the text states."""
        return self.family.condition_shapes(self.folder.config(PART))

    def forward(
        self, latents: Tensor, timestep: Tensor, text: Tensor, text_mask: Tensor, **conditions: Tensor
    ) -> Tensor:
        """Predicts the velocity [B,C,T,H,W] of noisy latents, in their dtype.

        Args:
            latents: [B,C,T,H,W].
            timestep: [B] float32 in 0 .. 1000.
            text: [B,L,D].
            text_mask: [B,L] bool, false for padding.
            conditions: those of `condition_shapes`.
        """
        family = self.family
        with torch.no_grad():
            encoded = family.arguments(text.float(), text_mask, conditions)
            args, named = self.call.prepare(
                packed(latents.float(), family), timestep.float(), encoded, self._sizes(latents)
            )
        dtype = latents.dtype
        args, named = cast(args, dtype), {n: v if n in KEPT else cast(v, dtype) for n, v in named.items()}
        (found, *_) = self.transformer(*args, **named, return_dict=False)
        predicted = torch.stack(list(found)) if isinstance(found, (list, tuple)) else found
        velocity = unpacked(predicted, family, latents.shape)
        return (-velocity if family.negated else velocity).to(latents.dtype).contiguous()

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """The pipeline's formula of guidance [B,C,T,H,W]."""
        added = self.family.guidance == "added"
        found = (conditional if added else unconditional) + scale * (conditional - unconditional)
        if self.family.guidance != "rescaled":
            return found
        own, new = (packed(each, self.family) for each in (conditional, found))
        new = new * (own.norm(dim=-1, keepdim=True) / new.norm(dim=-1, keepdim=True))
        return unpacked(new, self.family, found.shape)

    @property
    def guidance_off(self) -> float:
        """The scale at which guidance has no effect."""
        return 0.0 if self.family.guidance == "added" else 1.0

    def init_weights(self) -> None:
        """Initialises the transformer as its class does in its constructor."""
        for module in self.transformer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def _sizes(self, latents: Tensor) -> dict[str, int]:
        return self.family.sizes(latents.shape, self.call.pipe.vae_scale_factor)


KEPT = frozenset({"timestep", "t", "guidance", "img_ids", "txt_ids"})
"""Arguments of transformers whose precision is never lowered."""


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in a dtype, in lists and tuples too."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)(cast(each, dtype) for each in value) if isinstance(value, (list, tuple)) else value


def packed(latents: Tensor, family: Any) -> Tensor:
    """Latents [B,C,T,H,W] as the pipeline's call takes them."""
    if family.latents == "tokens":
        t, h, w = family.patch
        return rearrange(latents, "b c (t pt) (h ph) (w pw) -> b (t h w) (c pt ph pw)", pt=t, ph=h, pw=w)
    return latents[:, :, 0] if family.latents == "image" else latents


def unpacked(found: Tensor, family: Any, shape: torch.Size) -> Tensor:
    """The inverse of `packed`: [B,C,T,H,W]."""
    if family.latents == "tokens" or found.dim() == 3:
        pt, ph, pw = family.patch
        t, h, w = (size // patch for size, patch in zip(shape[2:], family.patch, strict=True))
        found = found[:, : t * h * w]
        where = {"t": t, "h": h, "pt": pt, "ph": ph, "pw": pw}
        return rearrange(found, "b (t h w) (c pt ph pw) -> b c (t pt) (h ph) (w pw)", **where)
    return found[:, :, None] if found.dim() == 4 else found
