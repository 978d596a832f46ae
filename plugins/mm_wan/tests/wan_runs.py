"""A tiny pipeline as Diffusers saves it, and runs without data that train its transformer."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from support import runs

WORDS = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", "a", "red", "circle"])}
CHANNELS = {"in_channels": 12, "out_channels": 12, "text_dim": 32}
"""Latents of the built-in pixel autoencoder, hidden states of the built-in text encoder."""


def pipeline_at(folder: Path, transformer: nn.Module, second: nn.Module | None = None) -> Path:
    """WanPipeline with these transformers, saved."""
    torch.manual_seed(5)
    words = Tokenizer(WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=6, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=12, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 12,
        latents_std=[1.0] * 12,
    )  # fmt: skip
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder.eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer,
        transformer_2=second,
        boundary_ratio=0.875 if second is not None else None,
    ).save_pretrained(folder)
    return folder


def clip(pipeline: WanPipeline) -> torch.Tensor:
    """Two steps from fixed noise, in latents."""
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 12, 2, 2, 4, generator=torch.Generator().manual_seed(2))
    return pipeline(
        "a red circle", num_frames=5, height=16, width=32, num_inference_steps=2, latents=noise,
        output_type="latent",
    ).frames  # fmt: skip


def config_of(
    folder: Path, predictor: dict, name: str = "tuned", image_encoder: dict | None = None, **sections
):
    """A run without data."""
    task = {
        "type": "text_to_video",
        "predictor": {"type": "wan/transformer", **predictor},
        "autoencoder": {"type": "pixel", "spatial": 2},
        "text_encoder": {"type": "bytes", "hidden_size": 32},
        "scheduler": {"type": "core/flow_match"},
        **({"image_encoder": image_encoder} if image_encoder else {}),
    }
    return runs.config_of(folder, task, name, **sections)
