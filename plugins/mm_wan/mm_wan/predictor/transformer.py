"""Predictor `wan/transformer`: Diffusers' `WanTransformer3DModel` under the core's contract.

Architecture: Wan (https://arxiv.org/abs/2503.20314). The class is a subclass: parameters, blocks
(`blocks.{*}`) and state dicts have Diffusers' names, and the forward is Diffusers' own, bit for bit.

Letters: B batch; C,T,H,W latents; L,D text; N tokens; K image tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import (
    WanImageEmbedding,
    WanRotaryPosEmbed,
    WanTransformerBlock,
)
from torch import Tensor, nn

from mm_core.contracts import ContextPlan, FrameNames, GivenFrames, ModuleFlops, PredictorInputs, WeightsFrom
from mm_core.errors import ContractError, did_you_mean, plural
from mm_wan.predictor.architecture import CLASS, resolve
from mm_wan.predictor.flops import module_flops
from mm_wan.predictor.frames import beside, frame_choices, in_place, padded_clip
from mm_wan.presets import Architecture

TEXT_LENGTH = 512
"""Text tokens that every Wan model was trained with. Its image-to-video models rely on this number: image
tokens follow them in one sequence."""


class WanTransformer(WanTransformer3DModel):  # type: ignore[misc]  # Diffusers has no types
    """Wan's video transformer: predicts the velocity of noisy latents. Satisfies `Predictor`,
    `SupportsWeightsFrom` and `SupportsFrames` of `mm_core.contracts`.

    `WanTransformerConfig` describes the fields. Text is padded with zeros to 512 tokens; the mask is ignored,
    as in Diffusers' pipelines.

    Raises:
        CheckpointError: the folder holds no Wan transformer, or one different from the preset.
        ConfigError: fields contradict the folder or the preset.
        ContractError: a head is too small for rotary positions of three axes.
    """

    text_padding = ("fixed", TEXT_LENGTH)

    def __init__(self, from_pretrained: str | None = None, preset: str | None = None, **fields: Any) -> None:
        built, weights = resolve(from_pretrained, preset, fields)
        head = built.attention_head_dim
        if head % 2 or head < 6:
            raise ContractError(
                f"attention_head_dim {head} cannot hold rotary positions of three axes",
                where="wan/transformer",
                accepted="an even number, 6 or more",
            )
        super().__init__(**built.fields)
        self.architecture: Architecture = built
        self.weights_from: WeightsFrom | None = weights
        self.patch_size: tuple[int, int, int] = built.patch_size
        self.out_channels: int = built.out_channels
        # Image-to-video models take the noisy latents and the given frames in one tensor.
        self.image_channels: int = max(0, built.in_channels - self.out_channels)
        self.in_channels: int = built.in_channels - self.image_channels
        self.text_dim: int = built.text_dim
        self.image_dim: int | None = built.image_dim
        self.frame_choices: tuple[FrameNames, ...] = frame_choices(built)
        self.token_timesteps = nn.Identity()  # where context parallelism splits timesteps of tokens
        if self.patch_embedding.weight.device.type != "meta":
            with torch.no_grad():
                self.init_weights()

    def forward(
        self, latents: Tensor, timestep: Tensor, text: Tensor, text_mask: Tensor, **conditions: Tensor
    ) -> Tensor:
        """Predicts the velocity [B,C,T,H,W] of noisy latents with Wan's transformer, in the latents' dtype.

        Args:
            latents: [B,C,T,H,W]; T, H and W are multiples of patch_size.
            timestep: [B], or [B,N] with one per token; float32 in 0 .. 1000.
            text: hidden states [B,512,D], zeros after the caption.
            text_mask: bool [B,512]; ignored.
            conditions: exactly those of `needed_conditions`.

        Raises:
            ContractError: latents do not divide into patches or exceed the rotary tables, text has another
                length, or a condition is missing or unknown.
        """
        self._check(latents, timestep, text, conditions)
        # Diffusers' model takes inputs in the dtype of its weights. Under mixed precision the weights have
        # this dtype only during the call, so the caller cannot cast beforehand.
        given, dtype = latents.dtype, self.patch_embedding.weight.dtype
        latents, text = latents.to(dtype), text.to(dtype)
        conditions = {name: tensor.to(dtype) for name, tensor in conditions.items()}
        if (image_latents := conditions.get("image_latents")) is not None:
            latents = torch.cat([latents, image_latents], dim=1)
        image_embeds = conditions.get("image_embeds")
        if image_embeds is not None and self.architecture.pos_embed_seq_len is not None:
            # Diffusers takes the first and the last frame as separate rows, and joins them itself.
            batch, tokens, width = image_embeds.shape
            image_embeds = image_embeds.reshape(2 * batch, tokens // 2, width)
        (predicted,) = super().forward(
            hidden_states=latents,
            timestep=self.token_timesteps(timestep),
            encoder_hidden_states=text,
            encoder_hidden_states_image=image_embeds,
            return_dict=False,
        )
        # A fresh tensor: FSDP2 may drop its backward hook when its root returns a view.
        fresh: Tensor = predicted.to(given).clone(memory_format=torch.contiguous_format)
        return fresh

    @property
    def needed_conditions(self) -> dict[str, str]:
        """Conditions that this variant of Wan's transformer needs, each with its shape; empty for
        text-to-video.

        Possible keys: `image_latents`, a mask of the given frames and their latents; `image_embeds`, hidden
        states of CLIP's image encoder.
        """
        needed = {"image_latents": f"[B,{self.image_channels},T,H,W]"} if self.image_channels else {}
        if self.image_dim is not None:
            tokens = self.architecture.pos_embed_seq_len or "K"
            needed["image_embeds"] = f"[B,{tokens},{self.image_dim}]"
        return needed

    def module_flops(
        self,
        latents: Sequence[int],
        timestep: Sequence[int],
        text: Sequence[int],
        **conditions: Sequence[int],
    ) -> Sequence[ModuleFlops]:
        """FLOPs of each module of Wan's transformer for inputs of these shapes: see
        `mm_wan.predictor.flops`."""
        images = conditions.get("image_embeds")
        return module_flops(
            self.architecture, latents, text[1], 0 if images is None else images[1], len(timestep) == 2
        )

    def context_plan(self) -> ContextPlan:
        """Where Wan's transformer has its tokens, for context parallelism. Cross-attention mixes none."""
        return ContextPlan(
            heads=self.architecture.num_attention_heads,
            attention=("blocks.{*}.attn1",),
            split={"token_timesteps": {0: 1}, "rope": {0: 1, 1: 1}, "blocks.0": {"hidden_states": 1}},
            gather={"proj_out": 1},
        )

    # -- given frames ------------------------------------------------------------------------------

    def frames_clip(self, frames: Sequence[Tensor], num_frames: int) -> Tensor:
        """Builds the clip that Wan's autoencoder encodes for given frames: see `mm_wan.predictor.frames`.

        Args:
            frames: given frames, each [B,3,Y,X].
            num_frames: frames of the clip.
        """
        return padded_clip(frames, num_frames) if self.image_channels else frames[0][:, :, None]

    def with_frames(self, latents: Tensor, timestep: Tensor, given: GivenFrames) -> PredictorInputs:
        """Inputs of Wan's transformer for noisy latents and given frames: see `mm_wan.predictor.frames`.

        Args:
            latents: noisy latents [B,C,T,H,W].
            timestep: [B].
            given: the given frames.
        """
        if self.image_channels:
            return beside(latents, timestep, given, self.image_channels - self.out_channels)
        return in_place(latents, timestep, given, self.patch_size)

    # -- weights -----------------------------------------------------------------------------------

    def init_weights(self) -> None:
        """Initialises all parameters and buffers of Wan's transformer as `WanModel.init_weights` does
        (https://github.com/Wan-Video/Wan2.1, wan/modules/model.py): Xavier for matrices, standard deviation
        0.02 for the embedders of text and time, zeros for the head."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.elementwise_affine:
                nn.init.ones_(module.weight)
                if isinstance(module, nn.LayerNorm):
                    nn.init.zeros_(module.bias)
            elif isinstance(module, WanImageEmbedding) and module.pos_embed is not None:
                nn.init.zeros_(module.pos_embed)
            elif isinstance(module, WanTransformer | WanTransformerBlock):
                nn.init.normal_(module.scale_shift_table, std=module.scale_shift_table.shape[-1] ** -0.5)
        embedder = self.condition_embedder
        for pair in (embedder.text_embedder, embedder.time_embedder):
            for layer in (pair.linear_1, pair.linear_2):
                nn.init.normal_(layer.weight, std=0.02)
        # Xavier for this convolution as a matrix [M, C*t*h*w].
        weight = self.patch_embedding.weight
        bound = math.sqrt(6 / (weight.shape[0] + math.prod(weight.shape[1:])))
        nn.init.uniform_(weight, -bound, bound)
        nn.init.zeros_(self.patch_embedding.bias)
        nn.init.zeros_(self.proj_out.weight)
        self.init_tables()

    def init_tables(self) -> None:
        """Fills the rotary tables of Wan's transformer, which no weights file contains."""
        with torch.device("cpu"):
            tables = WanRotaryPosEmbed(
                self.architecture.attention_head_dim, self.patch_size, self.architecture.rope_max_seq_len
            )
        for name, table in tables.named_buffers():
            self.rope.get_buffer(name).copy_(table)

    def to_json_string(self) -> str:
        """config.json of the Wan transformer, with the name of Diffusers' class. Sharding renames this
        class, and the weights are those of Diffusers'."""
        named = {"_class_name": CLASS, "_diffusers_version": diffusers.__version__}
        fields = {**self.architecture.fields, **named}
        return json.dumps(fields, indent=2, sort_keys=True) + "\n"

    # -- checks ------------------------------------------------------------------------------------

    def _check(
        self, latents: Tensor, timestep: Tensor, text: Tensor, conditions: Mapping[str, Tensor]
    ) -> None:
        sizes = tuple(latents.shape[2:])
        if any(size % patch for size, patch in zip(sizes, self.patch_size, strict=True)):
            raise ContractError(
                f"latents of (T, H, W) = {sizes} do not divide into patches of {self.patch_size}",
                where="wan/transformer",
                accepted=f"multiples of {self.patch_size}",
            )
        grid = [size // patch for size, patch in zip(sizes, self.patch_size, strict=True)]
        reach = self.architecture.rope_max_seq_len
        if max(grid) > reach:
            raise ContractError(
                f"a clip of {' x '.join(map(str, grid))} tokens exceeds the rotary tables, which have "
                f"{plural(reach, 'position')}",
                where="wan/transformer",
                accepted=f"at most {plural(reach, 'token')} along an axis",
            )
        if timestep.dim() == 2 and timestep.shape[1] != math.prod(grid):
            raise ContractError(
                f"each sample has {plural(timestep.shape[1], 'timestep')} but"
                f" {plural(math.prod(grid), 'token')}",
                where="wan/transformer",
                accepted=f"one timestep per sample or per token: [B] or [B,{math.prod(grid)}]",
            )
        if text.shape[1] != TEXT_LENGTH:
            raise ContractError(
                f"the text has {plural(text.shape[1], 'token')}",
                where="wan/transformer",
                accepted=f"{TEXT_LENGTH} tokens, padded with zeros",
            )
        self._check_conditions(conditions)

    def _check_conditions(self, conditions: Mapping[str, Tensor]) -> None:
        needed = self.needed_conditions
        described = ", ".join(f"{name} {shape}" for name, shape in needed.items()) or "none"
        if strange := [name for name in conditions if name not in needed]:
            raise ContractError(
                f"this model takes no condition {strange[0]!r}",
                where="wan/transformer",
                accepted=described,
                hint=did_you_mean(strange[0], needed),
            )
        if missing := [name for name in needed if name not in conditions]:
            raise ContractError(
                f"the condition {missing[0]!r}, which this model needs, is missing",
                where="wan/transformer",
                accepted=described,
            )
