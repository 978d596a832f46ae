"""Stable Diffusion 3 and 3.5 as a predictor: Diffusers' own class with mm_core's arguments."""

from functools import wraps

from diffusers import SD3Transformer2DModel
from diffusers.models.normalization import RMSNorm
from torch import nn

from mm_core import Component, hookimpl
from mm_core.contracts import empty_parameters, reset_parameters


class SD3(SD3Transformer2DModel):
    """SD3's transformer, of images: predicts the velocity from timesteps 0 .. 1000.

    The text is CLIP's 77 tokens and T5's 256, joined; the condition `pooled` [B,P] are CLIP's pooled vectors.
    """

    text_padding = ("fixed", 333)
    max_frames = 1

    @wraps(SD3Transformer2DModel.__init__)
    def __init__(self, **fields):
        super().__init__(**fields)
        self.patch_size = (1, self.config.patch_size, self.config.patch_size)
        self.in_channels = self.config.in_channels
        self.text_dim = self.config.joint_attention_dim
        self.condition_shapes = {"pooled": (self.config.pooled_projection_dim,)}

    def forward(self, latents, timestep, text, text_mask, pooled):
        """Predicts the velocity [B,C,1,H,W]. The mask is not used, as in Diffusers' pipeline."""
        (velocity,) = super().forward(
            hidden_states=latents[:, :, 0],
            timestep=timestep,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            return_dict=False,
        )
        return velocity[:, :, None].clone()

    def init_weights(self):
        """Initialises the layers, the norms of SD3.5's queries and keys, and the table of positions."""
        reset_parameters(self)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        with empty_parameters():
            tables = SD3Transformer2DModel.from_config(self.config)
        self.pos_embed.pos_embed.copy_(tables.pos_embed.pos_embed)


@hookimpl
def mm_predictors():
    sizes = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "caption_projection_dim": 16}
    more = {"in_channels": 4, "out_channels": 4, "joint_attention_dim": 12, "pooled_projection_dim": 10}
    return [Component(name="sd3", target="sd3:SD3", tiny={**sizes, **more, "pos_embed_max_size": 16})]
