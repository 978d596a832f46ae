"""FLUX.1 as a predictor: Diffusers' own class with mm_core's arguments."""

from functools import wraps

import torch
from diffusers import FluxTransformer2DModel

from mm_core import Component, hookimpl
from mm_core.contracts import reset_parameters


class Flux(FluxTransformer2DModel):
    """FLUX.1's transformer, of images: predicts the velocity from 2x2 latents a token, timesteps 0 .. 1000.

    The text is T5's; the condition `pooled` [B,P] is CLIP's pooled vector, `guidance` [B] the embedded scale.
    """

    text_padding = ("fixed", 512)
    max_frames = 1
    patch_size = (1, 2, 2)

    @wraps(FluxTransformer2DModel.__init__)
    def __init__(self, **fields):
        super().__init__(**fields)
        self.in_channels, self.out_channels = self.config.in_channels // 4, self.out_channels // 4
        self.text_dim = self.config.joint_attention_dim
        guidance = {"guidance": ()} if self.config.guidance_embeds else {}
        self.condition_shapes = {"pooled": (self.config.pooled_projection_dim,), **guidance}

    def forward(self, latents, timestep, text, text_mask, pooled, guidance=None):
        """Predicts the velocity [B,C,1,H,W]. The mask is not used, as in Diffusers' pipeline."""
        rows, columns = latents.shape[3] // 2, latents.shape[4] // 2
        patches = latents[:, :, 0].unflatten(3, (columns, 2)).unflatten(2, (rows, 2))
        places = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns))
        times = [timestep / 1000] + ([] if guidance is None else [guidance])
        exact = [1000 * time for time in times]  # float32: Diffusers rounds them to the latents' dtype
        with self.time_text_embed.register_forward_pre_hook(lambda _, given: (*exact, given[-1])):
            (tokens,) = super().forward(
                **{"hidden_states": patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)},
                **{"encoder_hidden_states": text, "pooled_projections": pooled},
                **dict(zip(("timestep", "guidance"), times, strict=False)),
                **{
                    "img_ids": places.to(text.device),
                    "txt_ids": places.new_zeros(text.shape[1], 3).to(text.device),
                },
                return_dict=False,
            )
        patches = tokens.unflatten(2, (-1, 2, 2)).unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
        return patches.flatten(4).flatten(2, 3)[:, :, None].clone()

    init_weights = reset_parameters


@hookimpl
def mm_predictors():
    sizes = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12}
    more = {"in_channels": 16, "joint_attention_dim": 12, "pooled_projection_dim": 10}
    tiny = {**sizes, **more, "guidance_embeds": True, "axes_dims_rope": (4, 4, 4)}
    return [Component(name="flux", target="flux:Flux", tiny=tiny)]
