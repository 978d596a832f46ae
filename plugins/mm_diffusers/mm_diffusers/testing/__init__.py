"""Tiny pipelines by the real classes, in their real layout on disk, for tests and `mm plugins test`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import pre_tokenizers
from torch import nn

from mm_diffusers.text import DiffusersText

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _letters(end: str = "") -> dict[str, int]:
    """A vocabulary of bytes, as the tokenizers of GPT write them, each also with an end of a word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}{end}" for letter in letters)] if end else letters
    return {token: place for place, token in enumerate(tokens)}


def qwen_tokenizer() -> Any:
    """Qwen's tokenizer of bytes, with its special tokens and a template of conversations."""
    marks = ["im_start", "im_end", "vision_start", "image_pad", "vision_end", "video_pad"]
    special = {"additional_special_tokens": [f"<|{mark}|>" for mark in marks]}
    kind = transformers.Qwen2TokenizerFast
    return kind(
        _letters(), [], eos_token="<|im_end|>", chat_template=CHATML, model_max_length=2048, **special
    )


def clip_tokenizer() -> Any:
    """CLIP's tokenizer of letters."""
    tokens = [*_letters("</w>"), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocabulary, [], model_max_length=77)


def t5_tokenizer() -> Any:
    """T5's tokenizer of letters."""
    letters = [*map(chr, range(33, 127)), "\u2581"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *((letter, -3.0) for letter in letters)]
    return transformers.T5TokenizerFast(pieces, extra_ids=0, model_max_length=512)


_QWEN3 = {
    **{"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 2048},
}


def qwen3(layers: int) -> Any:
    """A tiny Qwen3."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_QWEN3, num_hidden_layers=layers))


def qwen25_vl() -> Any:
    """A tiny Qwen2.5-VL."""
    text = {**_QWEN3, "num_hidden_layers": 2, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    tokens = {"image_token_id": 260, "video_token_id": 262}  # of `qwen_tokenizer`
    tokens |= {"vision_start_token_id": 259, "vision_end_token_id": 261}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def clip(width: int, projected: bool) -> Any:
    """A tiny text encoder of CLIP."""
    config = transformers.CLIPTextConfig(
        **{"vocab_size": 520, "hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "projection_dim": width, "bos_token_id": 512, "eos_token_id": 513},
        pad_token_id=513,
    )
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def t5(width: int) -> Any:
    """A tiny encoder of T5."""
    config = transformers.T5Config(
        **{"vocab_size": 384, "d_model": width, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        feed_forward_proj="gated-gelu",
    )
    return transformers.T5EncoderModel(config)


def _kl(**more: Any) -> Any:
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"block_out_channels": [8, 8], "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 32}
    return {**blocks, **sizes, **more}


def autoencoder_kl(**more: Any) -> Any:
    """A tiny AutoencoderKL, with further fields of its config."""
    return diffusers.AutoencoderKL(**_kl(**more))


def _klein() -> dict[str, Any]:
    vae = diffusers.AutoencoderKLFlux2(**_kl(latent_channels=4))
    torch.nn.init.uniform_(vae.bn.running_mean, -0.5, 0.5)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 2)
    return {
        "transformer": diffusers.Flux2Transformer2DModel(
            **{"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16},
            **{"num_attention_heads": 2, "joint_attention_dim": 48, "timestep_guidance_channels": 32},
            **{"axes_dims_rope": (4, 4, 4, 4), "guidance_embeds": False},
        ),
        "vae": vae,
        "text_encoder": qwen3(28),
        "tokenizer": qwen_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
    }


def _flux() -> dict[str, Any]:
    return {
        "transformer": diffusers.FluxTransformer2DModel(
            **{"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16},
            **{"num_attention_heads": 2, "joint_attention_dim": 24, "pooled_projection_dim": 16},
            **{"axes_dims_rope": (4, 6, 6), "guidance_embeds": True},
        ),
        "vae": diffusers.AutoencoderKL(**_kl(latent_channels=4, scaling_factor=4.0, shift_factor=0.12)),
        "text_encoder": clip(16, projected=False),
        "text_encoder_2": t5(24),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": t5_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
    }


def _sd3() -> dict[str, Any]:
    return {
        "transformer": diffusers.SD3Transformer2DModel(
            **{
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 16,
                "sample_size": 64,
            },
            **{"num_attention_heads": 2, "joint_attention_dim": 64, "caption_projection_dim": 32},
            **{"pooled_projection_dim": 40, "pos_embed_max_size": 48, "dual_attention_layers": (0,)},
            qk_norm="rms_norm",
        ),
        "vae": diffusers.AutoencoderKL(**_kl(latent_channels=4, scaling_factor=1.53, shift_factor=0.06)),
        "text_encoder": clip(16, projected=True),
        "text_encoder_2": clip(24, projected=True),
        "text_encoder_3": t5(64),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": clip_tokenizer(),
        "tokenizer_3": t5_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _qwen_vae() -> Any:
    return diffusers.AutoencoderKLQwenImage(
        **{"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1},
        **{"temperal_downsample": [False], "latents_mean": [0.1, -0.2, 0.3, 0.0]},
        latents_std=[0.2, 0.15, 0.18, 0.25],
    )


def _qwen_image() -> dict[str, Any]:
    return {
        "transformer": diffusers.QwenImageTransformer2DModel(
            **{"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16},
            **{"num_attention_heads": 2, "joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6)},
        ),
        "vae": _qwen_vae(),
        "text_encoder": qwen25_vl(),
        "tokenizer": qwen_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            **{"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192},
            **{"shift_terminal": 0.02, "time_shift_type": "exponential"},
        ),
    }


def _qwen_edit(zero_time: bool = False) -> dict[str, Any]:
    found = _qwen_image()
    config = {**found["transformer"].config, "zero_cond_t": zero_time}
    images = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
    return {
        **found,
        "transformer": diffusers.QwenImageTransformer2DModel.from_config(config),
        "processor": (images(), found["tokenizer"]),
    }


def _z_image() -> dict[str, Any]:
    return {
        "transformer": diffusers.ZImageTransformer2DModel(
            **{
                "in_channels": 4,
                "dim": 32,
                "n_layers": 2,
                "n_refiner_layers": 1,
                "n_heads": 2,
                "n_kv_heads": 2,
            },
            **{"cap_feat_dim": 16, "axes_dims": [4, 6, 6], "axes_lens": [512, 64, 64]},
        ),
        "vae": diffusers.AutoencoderKL(**_kl(latent_channels=4, scaling_factor=4.0, shift_factor=0.12)),
        "text_encoder": qwen3(2),
        "tokenizer": qwen_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _krea() -> dict[str, Any]:
    text = {
        **_QWEN3,
        "num_hidden_layers": 3,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default"},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    return {
        "transformer": diffusers.Krea2Transformer2DModel(
            **{"in_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2},
            **{"num_key_value_heads": 1, "intermediate_size": 32, "timestep_embed_dim": 16},
            **{"text_hidden_dim": 16, "num_text_layers": 2, "text_num_attention_heads": 2},
            **{"text_num_key_value_heads": 2, "text_intermediate_size": 16, "axes_dims_rope": (4, 6, 6)},
            **{"num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1},
        ),
        "vae": _qwen_vae(),
        "text_encoder": transformers.Qwen3VLModel(
            transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
        ),
        "tokenizer": qwen_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "text_encoder_select_layers": (1, 3),
    }


def _hunyuan_15(task: str = "t2v") -> dict[str, Any]:
    text = {**_QWEN3, "num_hidden_layers": 3, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    return {
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            **{"in_channels": 9, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16},
            **{
                "num_attention_heads": 2,
                "num_refiner_layers": 1,
                "text_embed_dim": 16,
                "text_embed_2_dim": 24,
            },
            **{"image_embed_dim": 16, "rope_axes_dim": (4, 6, 6), "target_size": 80, "task_type": task},
        ),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            **{"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1},
            **{"spatial_compression_ratio": 8, "temporal_compression_ratio": 4},
        ),
        "text_encoder": transformers.Qwen2_5_VLTextModel(transformers.Qwen2_5_VLTextConfig(**text)),
        "tokenizer": qwen_tokenizer(),
        "text_encoder_2": t5(24),
        "tokenizer_2": transformers.ByT5Tokenizer(extra_ids=0),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    }


def _hunyuan_15_image() -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=16)
    processor = getattr(transformers, "SiglipImageProcessorPil", None) or transformers.SiglipImageProcessor
    return {
        **_hunyuan_15("i2v"),
        "image_encoder": transformers.SiglipVisionModel(vision),
        "feature_extractor": processor(size={"height": 32, "width": 32}),
    }


def _ltx() -> dict[str, Any]:
    vae = diffusers.AutoencoderKLLTXVideo(
        **{"latent_channels": 8, "block_out_channels": (8,) * 3, "decoder_block_out_channels": (8,) * 3},
        **{"down_block_types": ("LTXVideoDownBlock3D",) * 3, "layers_per_block": (1,) * 4},
        **{"decoder_layers_per_block": (1,) * 4, "spatio_temporal_scaling": (True,) * 3},
        **{"decoder_spatio_temporal_scaling": (True,) * 3, "decoder_inject_noise": (False,) * 4},
        **{"upsample_residual": (False,) * 3, "upsample_factor": (1,) * 3, "timestep_conditioning": False},
        **{"patch_size": 4, "encoder_causal": True},
    )
    torch.nn.init.uniform_(vae.latents_mean, -0.5, 0.5)
    torch.nn.init.uniform_(vae.latents_std, 0.5, 2)
    return {
        "transformer": diffusers.LTXVideoTransformer3DModel(
            **{"in_channels": 8, "out_channels": 8, "num_layers": 2, "attention_head_dim": 16},
            **{"num_attention_heads": 2, "cross_attention_dim": 32, "caption_channels": 24},
        ),
        "vae": vae,
        "text_encoder": t5(24),
        "tokenizer": t5_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            **{
                "use_dynamic_shifting": True,
                "base_shift": 0.95,
                "max_shift": 2.05,
                "base_image_seq_len": 1024,
            },
            shift_terminal=0.1,
        ),
    }


TINY: Mapping[str, Callable[[], dict[str, Any]]] = MappingProxyType(
    {
        "Flux2KleinPipeline": _klein,
        "FluxKontextPipeline": _flux,
        "FluxPipeline": _flux,
        "HunyuanVideo15ImageToVideoPipeline": _hunyuan_15_image,
        "HunyuanVideo15Pipeline": _hunyuan_15,
        "Krea2Pipeline": _krea,
        "LTXPipeline": _ltx,
        "QwenImageEditPipeline": _qwen_edit,
        "QwenImageEditPlusPipeline": partial(_qwen_edit, zero_time=True),  # as in 2511
        "QwenImagePipeline": _qwen_image,
        "StableDiffusion3Pipeline": _sd3,
        "ZImagePipeline": _z_image,
    }
)
"""Pipelines' classes -> their tiny parts."""


def tiny_pipeline(
    path: str | Path, kind: str, seed: int = 0, parts: Callable[[], dict[str, Any]] | None = None
) -> Path:
    """Writes a tiny pipeline as `DiffusionPipeline.save_pretrained` does, with random weights.

    Args:
        path: folder that is created.
        kind: class of the pipeline.
        seed: of the weights.
        parts: makes the parts by name; None: those of `TINY`.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        made = (parts or TINY[kind])()
        for name, part in made.items():
            if name == "transformer":  # zeros at the start would hide what is left out
                for tensor in part.parameters():
                    if tensor.abs().max() == 0:
                        torch.nn.init.normal_(tensor, std=0.2)
        processor = made.pop("processor", ())
        absent = {"processor": None} if processor else {}
        pipeline = getattr(diffusers, kind)(**made, **absent)
    pipeline.save_pretrained(path)
    for part in processor:  # one of both is built with torchvision alone
        part.save_pretrained(Path(path) / "processor")
    if processor:
        index = Path(path) / "model_index.json"
        named = {**json.loads(index.read_text()), "processor": ["transformers", "Qwen2VLProcessor"]}
        index.write_text(json.dumps(named))
    return Path(path)


def tiny(folder: Path) -> dict[str, Any]:
    """Fields of a component for `mm plugins test`."""
    with torch.device("cpu"):
        return {"from_pretrained": str(tiny_pipeline(folder / "pipeline", "QwenImagePipeline"))}


def tiny_first_frame(folder: Path) -> dict[str, Any]:
    """Fields of an image encoder."""
    with torch.device("cpu"):
        return {
            "from_pretrained": str(tiny_pipeline(folder / "pipeline", "HunyuanVideo15ImageToVideoPipeline"))
        }


def tiny_static(folder: Path) -> dict[str, Any]:
    """Fields of a scheduler that makes one step too."""
    with torch.device("cpu"):
        return {"from_pretrained": str(tiny_pipeline(folder / "pipeline", "ZImagePipeline"))}


def example(folder: Path) -> nn.Module:
    """Text encoders that the format `diffusers/encoders` stores, with random weights."""
    with torch.device("cpu"):
        text = DiffusersText(str(tiny_pipeline(folder / "pipeline", "ZImagePipeline")), "fp32")
        text.build_empty()
        return text.to_empty(device="cpu")
