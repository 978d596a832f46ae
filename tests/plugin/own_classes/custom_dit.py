"""A transformer as users write one: of Diffusers' parts, without padding and without a mask."""

import torch
from diffusers.models.attention import Attention, FeedForward
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads, head_dim, ffn_dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn1 = Attention(query_dim=dim, heads=heads, dim_head=head_dim, qk_norm="rms_norm")
        self.norm2 = nn.LayerNorm(dim)
        self.attn2 = Attention(query_dim=dim, cross_attention_dim=dim, heads=heads, dim_head=head_dim)
        self.norm3 = nn.LayerNorm(dim, elementwise_affine=False)
        self.ffn = FeedForward(dim, inner_dim=ffn_dim, activation_fn="gelu-approximate")
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(self, x, context, temb):
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.scale_shift_table + temb).chunk(6, dim=1)
        x = x + self.attn1(self.norm1(x) * (1 + scale1) + shift1) * gate1
        x = x + self.attn2(self.norm2(x), encoder_hidden_states=context)
        return x + self.ffn(self.norm3(x) * (1 + scale2) + shift2) * gate2


class CustomDiT(nn.Module):
    def __init__(
        self,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        num_attention_heads: int = 12,
        attention_head_dim: int = 128,
        in_channels: int = 16,
        out_channels: int | None = None,  # as many as go in, if it is not set
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 8960,
        num_layers: int = 30,  # blocks
        max_tokens=1024,
        act=nn.SiLU,
    ):
        super().__init__()
        dim = num_attention_heads * attention_head_dim
        self.patch_size, self.out_channels = patch_size, out_channels or in_channels
        self.patch_embedding = nn.Conv3d(in_channels, dim, patch_size, stride=patch_size)
        self.time_proj = Timesteps(freq_dim, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time_embedder = TimestepEmbedding(freq_dim, dim)
        self.time_to_six = nn.Sequential(act(), nn.Linear(dim, 6 * dim))
        self.text_embedder = nn.Linear(text_dim, dim)
        angles = torch.arange(max_tokens)[:, None] * torch.exp(-9.2 * torch.linspace(0, 1, dim // 2))
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1), persistent=False)
        self.blocks = nn.ModuleList(
            Block(dim, num_attention_heads, attention_head_dim, ffn_dim) for _ in range(num_layers)
        )
        self.norm_out = nn.LayerNorm(dim, elementwise_affine=False)
        patch = patch_size[0] * patch_size[1] * patch_size[2]
        self.proj_out = nn.Linear(dim, patch * self.out_channels)
        nn.init.normal_(self.proj_out.weight, std=0.02)
        nn.init.zeros_(self.proj_out.bias)

    def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict=True):
        b, _, t, h, w = hidden_states.shape
        pt, ph, pw = self.patch_size
        x = self.patch_embedding(hidden_states).flatten(2).transpose(1, 2)
        x = x + self.positions[: x.shape[1]].to(x.dtype)
        time = self.time_embedder(self.time_proj(timestep).to(x.dtype))
        temb = self.time_to_six(time).unflatten(1, (6, -1))
        context = self.text_embedder(encoder_hidden_states)
        for block in self.blocks:
            x = block(x, context, temb)
        x = self.proj_out(self.norm_out(x))
        x = x.reshape(b, t // pt, h // ph, w // pw, pt, ph, pw, self.out_channels)
        x = x.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(b, self.out_channels, t, h, w)
        return {"sample": x} if return_dict else (x,)
