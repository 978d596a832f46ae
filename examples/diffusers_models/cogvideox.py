"""CogVideoX 1.0 and 1.5, text to video, as a predictor: Diffusers' own class with mm_core's arguments."""

from functools import wraps

from diffusers import CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

from mm_core import Component, hookimpl
from mm_core.contracts import empty_parameters, reset_parameters


class CogVideoX(CogVideoXTransformer3DModel):
    """CogVideoX's transformer: predicts from timesteps 0 .. 999; published weights predict v."""

    @wraps(CogVideoXTransformer3DModel.__init__)
    def __init__(self, **fields):
        super().__init__(**fields)
        self.patch_size = (self.config.patch_size_t or 1, self.config.patch_size, self.config.patch_size)
        self.in_channels, self.out_channels = self.config.in_channels, self.config.out_channels
        self.text_dim = self.config.text_embed_dim
        self.text_padding = ("fixed", self.config.max_text_seq_length)

    def forward(self, latents, timestep, text, text_mask):
        """Predicts [B,C,T,H,W]. The mask is not used, as in Diffusers' pipeline, which has frames first."""
        rotary = self.config.use_rotary_positional_embeddings
        (predicted,) = super().forward(
            hidden_states=latents.transpose(1, 2),
            timestep=timestep,
            encoder_hidden_states=text,
            image_rotary_emb=self.positions(latents) if rotary else None,
            return_dict=False,
        )
        return predicted.transpose(1, 2).clone()

    def positions(self, latents):
        """Rotary positions, cosines and sines [N,D]: in 1.0 scaled to the trained size."""
        frames, *grid = (n // p for n, p in zip(latents.shape[2:], self.patch_size, strict=True))
        base = [n // self.config.patch_size for n in (self.config.sample_height, self.config.sample_width)]
        kind = {"crops_coords": None, "grid_type": "slice", "max_size": tuple(grid)}
        if self.config.patch_size_t is None:
            kind = {"crops_coords": get_resize_crop_region_for_grid(tuple(grid), base[1], base[0])}
        sizes = {"grid_size": tuple(grid), "temporal_size": frames, "device": latents.device}
        return get_3d_rotary_pos_embed(self.config.attention_head_dim, **sizes, **kind)

    def init_weights(self):
        """Initialises the layers and the table of positions, which a model of rotary positions lacks."""
        reset_parameters(self)
        with empty_parameters():
            tables = CogVideoXTransformer3DModel.from_config(self.config)
        for name, table in tables.named_buffers():
            self.get_buffer(name).copy_(table)


@hookimpl
def mm_predictors():
    tiny = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "time_embed_dim": 8}
    tiny |= {"in_channels": 4, "out_channels": 4, "text_embed_dim": 12, "max_text_seq_length": 8}
    sizes = {"sample_width": 8, "sample_height": 8, "sample_frames": 9}
    return [Component(name="cogvideox", target="cogvideox:CogVideoX", tiny={**tiny, **sizes})]
