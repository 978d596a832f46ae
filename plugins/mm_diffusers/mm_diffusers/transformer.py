"""The predictor `diffusers/transformer`: the transformer of a pipeline, called as the pipeline calls it.

Letters: B batch; C,T,H,W latents; L,D text; N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from mm_core.contracts import ConditionShapes, Input, PredictorInputs, WeightsFrom, empty_parameters
from mm_core.device import with_numbers
from mm_core.errors import CheckpointError, ContractError, first_line
from mm_diffusers.call import PipelineCall, context_plan
from mm_diffusers.config import TransformerConfig
from mm_diffusers.families import Family, check_references
from mm_diffusers.folder import PipelineFolder
from mm_diffusers.pictures import for_autoencoder

PART = "transformer"


class DiffusersTransformer(nn.Module):
    """A transformer of Diffusers: predicts the velocity of noisy latents.

    Satisfies `Predictor`, `SupportsWeightsFrom`, `SupportsConditionShapes`, `SupportsInputs`,
    `SupportsGuided` of `mm_core.contracts`; of pictures `SupportsMaxFrames`.

    Args:
        from_pretrained: folder of the pipeline.
        references: most reference pictures of a sample.
        family: recipe of the pipeline; None: a known one.

    Raises:
        CheckpointError: the folder is no pipeline with a recipe, or its config.json does not fit its class.
    """

    text_padding = "masked"

    def __init__(
        self,
        from_pretrained: str,
        references: int = TransformerConfig.references,
        family: Family | None = None,
    ) -> None:
        super().__init__()
        self.folder = folder = PipelineFolder(Path(from_pretrained), family)
        self.family = family = folder.family
        config = folder.config(PART)
        try:
            # Tables that are neither parameters nor buffers (Qwen-Image's) would be lost on meta.
            with empty_parameters() if torch.empty(0).is_meta else nullcontext():
                self.transformer = getattr(diffusers, folder.parts[PART][1]).from_config(dict(config))
                self._tables = {name: table.clone() for name, table in self.transformer.named_buffers()}
        except (TypeError, ValueError, AttributeError, KeyError) as fault:
            raise CheckpointError(
                f"no transformer can be built from config.json: {first_line(fault)}",
                where=str(folder.path / PART),
                hint="copy config.json again, or install the version of Diffusers that wrote it",
            ) from fault
        blocks = self.transformer._no_split_modules or getattr(self.transformer, "_repeated_blocks", None)
        self._no_split_modules = blocks  # what the engine gathers, recomputes and compiles one at a time
        self._times: list[Tensor] = []
        for name, module in self.transformer.named_modules():
            if family.time_factor and name.endswith("time_proj"):  # sinusoidal
                module.register_forward_pre_hook(self._exact)
        self.weights_from = WeightsFrom(str(folder.path / PART), "core/diffusers")
        self.patch_size = family.patch
        self.in_channels = self.out_channels = int(self.transformer.config.in_channels) // family.channels
        self.text_dim = family.text_width(config)
        if not family.strides[0]:
            self.max_frames = 1
        check_references(folder.kind, family, references)
        self.inputs: tuple[Input, ...] = ()
        if references or family.areas:
            make = partial(for_autoencoder, folder) if family.areas else whole
            self.inputs = (Input("references", make=make, encoder="autoencoder", most=references or 1),)
        if family.first_frame:
            self.inputs = (
                Input("first_frame", ("first",), encoder="autoencoder"),
                Input("image_embeds", ("first",), encoder="image_encoder"),
            )
        if family.text_tokens is not None and self.transformer._cp_plan and not references:
            self.context_plan = partial(context_plan, self.transformer, family.text_tokens)

    @cached_property
    def call(self) -> PipelineCall:
        """The pipeline that prepares the call."""
        return PipelineCall(self.folder, self.transformer)

    def with_inputs(self, latents: Tensor, timestep: Tensor, given: Mapping[str, Tensor]) -> PredictorInputs:
        """Reference pictures and first frames are conditions of the forward."""
        shown = by_picture(given["references"], given["references_sizes"]) if self._pictures else given
        return PredictorInputs(latents, timestep, shown)

    @property
    def _pictures(self) -> list[str]:
        """Conditions of pictures to edit, each of its size."""
        return [f"reference_{n}" for n in range(self.inputs[0].most)] if self.family.areas else []

    @cached_property
    def condition_shapes(self) -> ConditionShapes:
        """What the forward takes beside the text states."""
        found = self.family.condition_shapes(self.folder.config(PART))
        found |= dict.fromkeys(self.family.clip_conditions, ())
        if self.transformer.config.get("guidance_embeds"):
            found["guidance"] = ()
        if self.family.first_frame:
            width = int(self.transformer.config.image_embed_dim)
            found |= {"first_frame": (self.in_channels, 1, None, None), "image_embeds": (None, width)}
        elif self.family.areas:
            found |= dict.fromkeys(self._pictures, (self.in_channels, 1, None, None))
        elif self.inputs:
            size: tuple[int | None, ...] = (self.inputs[0].most, self.in_channels, 1, None, None)
            found |= {"references": size, "references_sizes": (self.inputs[0].most, 3)}
        return found

    def forward(
        self,
        latents: Tensor,
        timestep: Tensor,
        text: Tensor,
        text_mask: Tensor,
        text_lengths: list[int] | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """Predicts the velocity [B,C,T,H,W] of noisy latents, in their dtype.

        Args:
            latents: [B,C,T,H,W].
            timestep: [B] float32 in 0 .. 1000.
            text: [B,L,D].
            text_mask: [B,L] bool, false for padding.
            text_lengths: tokens of each caption; None: they are counted.
            conditions: those of `condition_shapes`.
        """
        family = self.family
        if strange := [name for name in conditions if name not in self.condition_shapes]:
            raise ContractError(
                f"this model takes no condition {strange[0]!r}",
                where="diffusers/transformer",
                accepted=", ".join(self.condition_shapes) or "none",
            )
        with torch.no_grad():
            named = with_numbers(
                self._arguments, latents, timestep, text, text_mask, text_lengths, conditions
            )
        dtype = latents.dtype
        if family.time_factor:
            exact = {"timestep": family.time_factor, "guidance": 1000.0}
            self._times = [named[n] * by for n, by in exact.items() if named.get(n) is not None]
            if self.transformer.config.get("zero_cond_t"):  # reference pictures have the time 0
                self._times[0] = torch.cat([self._times[0], torch.zeros_like(self._times[0])])
        kept = IDS if family.time_factor else IDS | TIMES
        named = {n: v if n in kept else cast(v, dtype) for n, v in named.items()}
        (found, *_) = self.transformer(**named, return_dict=False)
        predicted = torch.stack(list(found)) if isinstance(found, (list, tuple)) else found
        velocity = unpacked(predicted, family, latents.shape)
        velocity = (-velocity if family.negated else velocity).to(latents.dtype).contiguous()
        if not torch.compiler.is_compiling() and velocity._is_view():  # on which FSDP2 may drop its hook
            return velocity.clone()
        return velocity

    def _arguments(
        self,
        latents: Tensor,
        timestep: Tensor,
        text: Tensor,
        text_mask: Tensor,
        lengths: list[int] | None,
        conditions: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        """Arguments of the transformer's forward, in float32."""
        family = self.family
        given = family.arguments(self.transformer.config, text.float(), text_mask, conditions, lengths)
        given |= self.call.sizes(latents.shape)
        # A number for the call, whose arithmetic a tensor takes too.
        given |= {name: conditions[own].view(-1, 1, 1, 1, 1) for own, name in family.clip_conditions.items()}
        named = self.call.prepare(packed(latents.float(), family), timestep.float(), given)
        if "guidance" in conditions:
            named["guidance"] = conditions["guidance"].float()
        if family.first_frame:
            return with_first_frame(named, conditions)
        if family.areas:
            named |= {"encoder_hidden_states": text.float(), "encoder_hidden_states_mask": text_mask}
            return with_pictures(named, family, [conditions[name] for name in self._pictures])
        return with_references(named, family, conditions) if self.inputs else named

    def _exact(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook of sinusoidal embeddings: times, then guidance, as they were before rounding."""
        exact = self._times.pop(0) if len(self._times) > 1 else self._times[0]
        return (exact, *args[1:])

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """The pipeline's formula of guidance [B,C,T,H,W]."""
        if self.guidance_off == math.inf:
            return conditional
        added = self.family.guidance == "added"
        found = (conditional if added else unconditional) + scale * (conditional - unconditional)
        if self.family.guidance != "rescaled":
            return found
        own, new = (packed(each, self.family) for each in (conditional, found))
        new = new * (own.norm(dim=-1, keepdim=True) / new.norm(dim=-1, keepdim=True))
        return unpacked(new, self.family, found.shape)

    @property
    def guidance_off(self) -> float:
        """The scale up to which guidance has no effect."""
        if self.folder.settings.get(self.family.distilled):
            return math.inf
        return 0.0 if self.family.guidance == "added" else 1.0

    def init_weights(self) -> None:
        """Initialises parameters as torch's layers do, others with a standard deviation of 0.02, and fills
        the tables of the class. Pipelines are fine-tuned: it is for tests and for what files lack."""
        for parameter in self.transformer.parameters():
            nn.init.normal_(parameter, std=0.02)
        for module in self.transformer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name, table in self._tables.items():
            self.transformer.get_buffer(name).copy_(table)


MOST_PIXELS = 1024 * 1024
"""Pixels of a reference picture: the pipelines shrink larger ones."""


def whole(fields: Mapping[str, Tensor], size: Any) -> Tensor:
    """A reference picture [1,3,1,Y,X] of at most `MOST_PIXELS`, cut to sides that 16 divides."""
    (picture,) = fields.values()
    height, width = picture.shape[-2:]
    if min(height, width) < 16:
        raise ContractError(
            f"a reference picture is {height} high and {width} wide",
            where="references",
            accepted="pictures of at least 16 x 16 pixels",
        )
    if height * width > MOST_PIXELS:
        by = (MOST_PIXELS / (height * width)) ** 0.5
        height, width = max(16, int(height * by)), max(16, int(width * by))
        picture = F.interpolate(
            picture[:, :, 0], (height, width), mode="bicubic", antialias=True, align_corners=False
        ).clamp(-1, 1)[:, :, None]
    y, x = height % 16 // 2, width % 16 // 2
    return picture[..., y : y + height // 16 * 16, x : x + width // 16 * 16]


def with_references(
    named: Mapping[str, Any], family: Family, conditions: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Arguments of the transformer with the tokens of reference pictures behind those of the latents.

    Pictures of a batch differ in number and size: what fills them up is masked in attention.
    """
    given, sizes = conditions["references"].float(), conditions["references_sizes"]
    (_, ph, pw), (first, step) = family.patch, family.references or (0, 0)
    tokens = rearrange(given, "b n c 1 (h ph) (w pw) -> b (n h w) (c ph pw)", ph=ph, pw=pw)
    count, height, width = given.shape[1], given.shape[4] // ph, given.shape[5] // pw
    device = given.device
    steps = (
        torch.arange(count, device=device),
        torch.arange(height, device=device),
        torch.arange(width, device=device),
    )
    n, h, w = torch.meshgrid(*steps, indexing="ij")
    own = named["img_ids"]
    ids = torch.zeros(count * height * width, own.shape[-1], device=device, dtype=own.dtype)
    for column, values in enumerate((first + step * n, h, w)):
        ids[:, column] = values.flatten()
    real = (h[None] < sizes[:, :, 1, None, None] // ph) & (w[None] < sizes[:, :, 2, None, None] // pw)
    others = named["encoder_hidden_states"].shape[1] + named["hidden_states"].shape[1]
    mask = torch.cat([real.new_ones(len(real), others), real.flatten(1)], dim=1)[:, None, None]
    ids = ids.expand(len(own), -1, -1) if own.dim() == 3 else ids
    return {
        **named,
        "hidden_states": torch.cat([named["hidden_states"], tokens], dim=1),
        "img_ids": torch.cat([own, ids], dim=-2),
        "joint_attention_kwargs": {**(named.get("joint_attention_kwargs") or {}), "attention_mask": mask},
    }


def by_picture(pictures: Tensor, sizes: Tensor) -> dict[str, Tensor]:
    """Conditions of each picture to edit, [B,C,1,H,W], empty where there are fewer.

    Args:
        pictures: [B,n,C,1,H,W] with zeros behind smaller ones.
        sizes: [B,n,3], on the host.

    Raises:
        ContractError: rows have pictures of other numbers or sizes. The transformer has one table of
            positions for all rows, and masks no tokens of pictures.
    """
    rows = [[pictures.shape[3:]] * sizes.shape[1]] if sizes.is_meta else sizes.tolist()
    if any(row != rows[0] for row in rows):
        raise ContractError(
            "the samples of a batch have reference pictures of other numbers or sizes",
            where="task.predictor",
            accepted="in each sample of a batch as many pictures of the same sizes",
            hint="set train.micro_batch_size to 1, and task.sample.batch_size and that of validation too",
        )
    return {f"reference_{n}": pictures[:, n, ..., :h, :w] for n, (_, h, w) in enumerate(rows[0])}


def with_pictures(named: Mapping[str, Any], family: Family, pictures: Sequence[Tensor]) -> dict[str, Any]:
    """Arguments of the transformer with the tokens of pictures to edit behind those of the latents."""
    shapes = [(1, one.shape[3] // family.patch[1], one.shape[4] // family.patch[2]) for one in pictures]
    tokens = [packed(one.float(), family) for one in pictures]
    return {
        **named,
        "hidden_states": torch.cat([named["hidden_states"], *tokens], dim=1),
        "img_shapes": [[*own, *(shape for shape in shapes if shape[1])] for own in named["img_shapes"]],
    }


def with_first_frame(named: Mapping[str, Any], conditions: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of the transformer with the first frame's latents and mask behind the clip's."""
    hidden = named["hidden_states"]  # which the call has just joined
    first = conditions["first_frame"].float()
    channels = first.shape[1]
    hidden[:, channels : 2 * channels, :1] = first
    hidden[:, 2 * channels :, :1] = 1
    return {**named, "image_embeds": conditions["image_embeds"].float()}


TIMES = frozenset({"timestep", "t", "guidance"})
"""Arguments of transformers whose precision is not lowered where the embedding reads them as they are."""

IDS = frozenset({"img_ids", "txt_ids", "position_ids", "rope_interpolation_scale"})
"""Arguments whose precision is never lowered."""


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in a dtype, in lists and tuples too."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)(cast(each, dtype) for each in value) if isinstance(value, (list, tuple)) else value


def packed(latents: Tensor, family: Family) -> Tensor:
    """Latents [B,C,T,H,W] as the pipeline's call takes them."""
    if family.latents == "tokens":
        t, h, w = family.patch
        return rearrange(latents, "b c (t pt) (h ph) (w pw) -> b (t h w) (c pt ph pw)", pt=t, ph=h, pw=w)
    return latents[:, :, 0] if family.latents == "image" else latents


def unpacked(found: Tensor, family: Family, shape: torch.Size) -> Tensor:
    """The inverse of `packed`: [B,C,T,H,W]."""
    if family.latents == "tokens" or found.dim() == 3:
        pt, ph, pw = family.patch
        t, h, w = (size // patch for size, patch in zip(shape[2:], family.patch, strict=True))
        found = found[:, : t * h * w]
        where = {"t": t, "h": h, "pt": pt, "ph": ph, "pw": pw}
        return rearrange(found, "b (t h w) (c pt ph pw) -> b c (t pt) (h ph) (w pw)", **where)
    return found[:, :, None] if found.dim() == 4 else found
