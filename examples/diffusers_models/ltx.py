"""LTX-Video as a predictor: Diffusers' own class with mm_core's arguments."""

from functools import wraps

from diffusers import LTXVideoTransformer3DModel
from torch import nn

from mm_core import Component, hookimpl
from mm_core.contracts import reset_parameters

STRIDE = (8, 32, 32)  # frames and pixels a latent, of LTX-Video's autoencoder


class LTX(LTXVideoTransformer3DModel):
    """LTX-Video's transformer: predicts the velocity from timesteps 0 .. 1000, and from the frame rate."""

    text_padding = "masked"

    @wraps(LTXVideoTransformer3DModel.__init__)
    def __init__(self, **fields):
        super().__init__(**fields)
        self.patch_size = (self.config.patch_size_t, self.config.patch_size, self.config.patch_size)
        patch = self.config.patch_size_t * self.config.patch_size**2
        self.in_channels = self.config.in_channels // patch
        self.out_channels = (self.config.out_channels or self.config.in_channels) // patch
        self.text_dim = self.config.caption_channels

    def forward(self, latents, timestep, text, text_mask, fps):
        """Predicts the velocity [B,C,T,H,W]; timestep [B] or [B,N], with one per token; fps [B]."""
        t, h, w = self.patch_size
        frames, rows, columns = (n // p for n, p in zip(latents.shape[2:], self.patch_size, strict=True))
        patches = latents.unflatten(4, (columns, w)).unflatten(3, (rows, h)).unflatten(2, (frames, t))
        (tokens,) = super().forward(
            hidden_states=patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3),
            **{"timestep": timestep, "num_frames": frames, "height": rows, "width": columns},
            **{"encoder_hidden_states": text, "encoder_attention_mask": text_mask},
            rope_interpolation_scale=(STRIDE[0] / fps.view(-1, 1, 1, 1, 1), *STRIDE[1:]),
            return_dict=False,
        )
        patches = tokens.unflatten(2, (-1, t, h, w)).unflatten(1, (frames, rows, columns))
        clip = patches.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6).flatten(4, 5).flatten(2, 3)
        return clip.clone()

    def init_weights(self):
        """Initialises the layers, and the tables of shifts and scales."""
        reset_parameters(self)
        for name, parameter in self.named_parameters():
            if name.endswith("scale_shift_table"):
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


@hookimpl
def mm_predictors():
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16}
    more = {"in_channels": 4, "out_channels": 4, "caption_channels": 12}
    return [Component(name="ltx", target="ltx:LTX", tiny={**sizes, **more})]
