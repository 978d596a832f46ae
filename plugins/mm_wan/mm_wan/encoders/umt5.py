"""The text encoder `wan/umt5`: Transformers' UMT5EncoderModel, fed as Wan's pipelines feed it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mm_core.contracts import Tokenizer, WeightsFrom
from mm_core.diffusion import HFTextEncoder, HFTokenizer
from mm_core.errors import CheckpointError
from mm_core.plugin import DType
from mm_core.weights import read_mapping
from mm_wan.encoders.config import WanUMT5Config
from mm_wan.encoders.vae_files import pipeline_part


def clean_prompt(text: str) -> str:
    """A caption as Diffusers' Wan pipelines clean it: broken Unicode mended, HTML entities resolved twice,
    single spaces."""
    import ftfy
    import regex  # its \s is not that of `re`

    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return str(regex.sub(r"\s+", " ", text).strip())


@dataclass
class WanTokenizer:
    """Captions -> cleaned, cut and padded to the tokenizer's max_length, with an end token."""

    tokenizer: HFTokenizer

    def __call__(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """ids[B,max_length] int64, mask[B,max_length] bool."""
        return self.tokenizer([clean_prompt(caption) for caption in captions])


class WanUMT5(nn.Module):
    """Hidden states of captions by UMT5 (https://arxiv.org/abs/2304.09151), frozen.

    Satisfies `TextEncoder` and `Streamed`.

    Equal to `WanPipeline.encode_prompt`: rows of max_length tokens, the padding masked inside the encoder and
    zero behind it. Fields are those of `WanUMT5Config`. The constructor opens no weights.
    """

    entry_points = ("encode",)
    block_patterns = "auto"

    def __init__(
        self,
        from_pretrained: str,
        tokenizer: str | None = WanUMT5Config.tokenizer,
        max_length: int = WanUMT5Config.max_length,
        dtype: DType = WanUMT5Config.dtype,
    ) -> None:
        super().__init__()
        given = Path(from_pretrained)
        self.folder = pipeline_part(given, "text_encoder")
        self.tokenizer_folder = _tokenizer_folder(self.folder) if tokenizer is None else Path(tokenizer)
        self.max_length = max_length
        self.encoder = HFTextEncoder(str(self.folder), str(self.tokenizer_folder), max_length, dtype)

    @property
    def weights_from(self) -> WeightsFrom | None:
        """The folder's safetensors."""
        return self.encoder.weights_from

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state, as config.json says."""
        return self.encoder.hidden_size

    def missing_files(self) -> list[str]:
        """Of config.json, the weights and the tokenizer, those that do not exist."""
        return self.encoder.missing_files()

    def build_empty(self) -> None:
        """Makes the encoder. CheckpointError for a folder of another model, a tokenizer folder without a
        tokenizer, or pickles alone."""
        kind = read_mapping(self.folder / "config.json").get("model_type")
        if (self.folder / "config.json").is_file() and kind != "umt5":
            raise CheckpointError(
                "this folder holds no UMT5 encoder: its config.json "
                + (f"is of model_type {kind!r}" if kind else "names no model_type"),
                where=str(self.folder),
                accepted="the folder `text_encoder` of a Wan pipeline",
                hint="core/hf_text takes other encoders",
            )
        if not _has_tokenizer(self.tokenizer_folder):
            raise CheckpointError(
                "there is no tokenizer in this folder",
                where=str(self.tokenizer_folder),
                accepted="the folder `tokenizer` of a Wan pipeline",
                hint="set tokenizer: to the folder that holds tokenizer.json or spiece.model",
            )
        self.encoder.build_empty()

    def tokenizer(self) -> Tokenizer:
        """The half for data workers."""
        return WanTokenizer(HFTokenizer(str(self.tokenizer_folder), self.max_length, "max_length"))

    @torch.no_grad()
    def encode(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """ids[B,L], mask[B,L] -> hidden[B,L,D] in the encoder's dtype, zero behind the mask; mask[B,L]."""
        hidden, mask = self.encoder.encode(ids, mask)
        return hidden.masked_fill(~mask[..., None].bool(), 0), mask

    def train(self, mode: bool = True) -> WanUMT5:
        """Stays in evaluation mode: a frozen encoder has no dropout."""
        return super().train(False)


def _tokenizer_folder(weights: Path) -> Path:
    """Where a tokenizer is looked for: with the weights if one is there, else beside them."""
    return weights if _has_tokenizer(weights) else weights.parent / "tokenizer"


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "spiece.model"))
