"""HunyuanVideo as a predictor: Diffusers' own class with mm_core's arguments."""

from functools import wraps

import torch
from diffusers import HunyuanVideoTransformer3DModel
from diffusers.models.normalization import RMSNorm
from torch import nn

from mm_core import Component, hookimpl
from mm_core.contracts import reset_parameters


class HunyuanVideo(HunyuanVideoTransformer3DModel):
    """HunyuanVideo's transformer: predicts the velocity from timesteps 0 .. 1000.

    The text is Llama's; the condition `pooled` [B,P] is CLIP's, `guidance` [B] the embedded scale.
    """

    text_padding = "masked"

    @wraps(HunyuanVideoTransformer3DModel.__init__)
    def __init__(self, **fields):
        super().__init__(**fields)
        self.patch_size = (self.config.patch_size_t, self.config.patch_size, self.config.patch_size)
        self.in_channels, self.text_dim = self.config.in_channels, self.config.text_embed_dim
        self.out_channels = self.config.out_channels or self.in_channels
        guidance = {"guidance": ()} if self.config.guidance_embeds else {}
        self.condition_shapes = {"pooled": (self.config.pooled_projection_dim,), **guidance}

    def forward(self, latents, timestep, text, text_mask, pooled, guidance=None):
        """Predicts the velocity [B,C,T,H,W]; an empty caption counts as one token: else 0/0."""
        first = torch.arange(text.shape[1], device=text.device) == 0
        (velocity,) = super().forward(
            **{"hidden_states": latents, "timestep": timestep, "encoder_hidden_states": text},
            encoder_attention_mask=text_mask | first,
            pooled_projections=pooled,
            guidance=None if guidance is None else 1000 * guidance,
            return_dict=False,
        )
        return velocity.clone()

    def init_weights(self):
        """Initialises the layers, and the norms of queries and keys."""
        reset_parameters(self)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)


@hookimpl
def mm_predictors():
    sizes = {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 2}
    more = {"in_channels": 4, "out_channels": 4, "text_embed_dim": 12, "pooled_projection_dim": 10}
    tiny = {**sizes, **more, "attention_head_dim": 12, "rope_axes_dim": (4, 4, 4)}
    return [Component(name="hunyuan_video", target="hunyuan_video:HunyuanVideo", tiny=tiny)]
