"""Tiny models of every published variant, with random weights and inputs that fit them."""

from __future__ import annotations

import torch
from diffusers import WanTransformer3DModel
from mm_wan.predictor.architecture import Architecture
from mm_wan.predictor.flops import module_flops
from mm_wan.presets import PRESETS


def forward_flops(
    architecture: Architecture, latents: tuple[int, ...], text: int = 512, image: int = 0, each: bool = False
) -> int:
    """FLOPs of a forward of all modules."""
    return sum(product.flops for product in module_flops(architecture, latents, text, image, each))


TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 40,
    "rope_max_seq_len": 32,
}
# The differences of each published model from text-to-video, made small.
VARIANTS = {
    "wan2.1-t2v-1.3b": {},
    "wan2.1-t2v-14b": {},
    "wan2.1-i2v-14b-480p": {"in_channels": 9, "image_dim": 10, "added_kv_proj_dim": 24},
    "wan2.1-i2v-14b-720p": {"in_channels": 9, "image_dim": 10, "added_kv_proj_dim": 24},
    "wan2.1-flf2v-14b-720p": {
        "in_channels": 9,
        "image_dim": 10,
        "added_kv_proj_dim": 24,
        "pos_embed_seq_len": 6,
    },
    "wan2.2-t2v-a14b": {},
    "wan2.2-i2v-a14b": {"in_channels": 9},
    "wan2.2-ti2v-5b": {"in_channels": 12, "out_channels": 12},
}
assert VARIANTS.keys() == PRESETS.keys()

DISTINCT = ("wan2.1-t2v-1.3b", "wan2.1-i2v-14b-480p", "wan2.1-flf2v-14b-720p", "wan2.2-i2v-a14b")
DISTINCT += ("wan2.2-ti2v-5b",)


def tiny(variant: str, **fields) -> dict:
    """The architecture of a tiny model."""
    return {**TINY, **VARIANTS[variant], **fields}


def published(variant: str, **fields) -> WanTransformer3DModel:
    """Diffusers' class with weights that are nowhere zero."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(**tiny(variant, **fields)).eval()
    model.load_state_dict({name: torch.randn_like(w) * 0.2 for name, w in model.state_dict().items()})
    return model


def inputs(variant: str, patch=(1, 2, 2), grid=(2, 3, 2)) -> dict[str, torch.Tensor]:
    """Two samples, by the names of the contract."""
    torch.manual_seed(1)
    fields = tiny(variant)
    sizes = [p * n for p, n in zip(patch, grid, strict=True)]
    mask = torch.arange(512)[None] < torch.tensor([7, 30])[:, None]
    given = {
        "latents": torch.randn(2, fields["out_channels"], *sizes),
        "timestep": torch.tensor([998.7, 12.5]),
        "text": torch.randn(2, 512, fields["text_dim"]).masked_fill(~mask[..., None], 0),
        "text_mask": mask,
    }
    if fields["in_channels"] > fields["out_channels"]:
        given["image_latents"] = torch.randn(2, fields["in_channels"] - fields["out_channels"], *sizes)
    if "image_dim" in fields:
        tokens, pairs = fields.get("pos_embed_seq_len", 5), 1
        given["image_embeds"] = torch.randn(2, tokens * pairs, fields["image_dim"])
    return given


def theirs(model: WanTransformer3DModel, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """What Diffusers' class computes of the same inputs, called as its pipelines call it."""
    latents = given["latents"]
    if "image_latents" in given:
        latents = torch.cat([latents, given["image_latents"]], dim=1)
    image = given.get("image_embeds")
    if image is not None and model.config.pos_embed_seq_len is not None:
        # Its pipeline gives first and last frame as rows of their own, which the model puts together.
        image = image.reshape(-1, image.shape[1] // 2, image.shape[2])
    return model(
        hidden_states=latents,
        timestep=given["timestep"],
        encoder_hidden_states=given["text"],
        encoder_hidden_states_image=image,
        return_dict=False,
    )[0]
