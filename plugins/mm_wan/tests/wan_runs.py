"""A tiny pipeline as Diffusers saves it, and runs without data that train its transformer."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from mm_core.config.load import load_config
from mm_core.train.checkpoint import CheckpointStore
from mm_core.train.export_parts import own_state
from mm_core.train.sampling import load_task

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
    tmp_path: Path, predictor: dict, name: str = "tuned", image_encoder: dict | None = None, **sections
):
    """A run without data: what its dataset names does not exist."""
    document = {
        "run": {"name": name, "dir": str(tmp_path / "runs")},
        "task": {
            "type": "text_to_video",
            "predictor": {"type": "wan/transformer", **predictor},
            "autoencoder": {"type": "pixel", "spatial": 2},
            "text_encoder": {"type": "bytes", "hidden_size": 32},
            "scheduler": {"type": "core/flow_match"},
            **({"image_encoder": image_encoder} if image_encoder else {}),
        },
        "data": {
            "train": {
                "type": "video_text",
                "annotations": str(tmp_path / "none.json"),
                "num_frames": 8,
                "height": 16,
                "width": 16,
            }
        },
        "train": {"epochs": 1},
        **sections,
    }
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_config(path)


def moved(tmp_path: Path, config, saved: Path, part: str) -> nn.Module:
    """The task as if trained: what `part` names is no longer as it began. Saved as step 5."""
    task = load_task(config, saved, "model")
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in task.predictor.named_parameters():
            if part in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    state = {f"predictor.{name}": tensor for name, tensor in own_state(task.predictor).items()}
    store = CheckpointStore(tmp_path / "runs" / config.run.name, 9)
    store.save(5, {"model": state}, {"seed": 1}, (saved / "config.yaml").read_text())
    store.close()
    return task
