"""The text encoder `wan/umt5`: Transformers' UMT5EncoderModel, with inputs as in Wan's pipelines."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mm_core.contracts import Tokenizer, WeightsFrom
from mm_core.diffusion import HFTextEncoder, HFTokenizer, ModelFolder
from mm_core.errors import CheckpointError
from mm_core.plugin import DType
from mm_core.weights import read_mapping
from mm_wan.encoders.config import WanUMT5Config
from mm_wan.encoders.vae_files import pipeline_part
from mm_wan.single_file import FORMAT, is_single, umt5_config

if TYPE_CHECKING:
    from transformers import UMT5Config


def clean_prompt(text: str) -> str:
    """Cleans a caption or prompt as Diffusers' Wan pipelines do: fixes broken Unicode, resolves HTML entities
    twice, and reduces white space to single spaces."""
    import ftfy
    import regex  # its \s differs from that of `re`

    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return str(regex.sub(r"\s+", " ", text).strip())


@dataclass
class WanTokenizer:
    """Tokenizer for Wan's captions: cleans them, adds an end token, cuts or pads to max_length."""

    tokenizer: HFTokenizer

    def __call__(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Turns captions into token ids [B,max_length] int64 and their mask [B,max_length] bool."""
        return self.tokenizer([clean_prompt(caption) for caption in captions])

    @property
    def max_length(self) -> int:
        """See `CountingTokenizer`."""
        return self.tokenizer.max_length

    def token_counts(self, captions: Sequence[str]) -> list[int]:
        """See `CountingTokenizer`."""
        return self.tokenizer.token_counts([clean_prompt(caption) for caption in captions])


@dataclass(frozen=True)
class UMT5File(ModelFolder):
    """One file of a UMT5 encoder's weights, in place of its folder."""

    def missing_files(self) -> list[str]:
        """The file, if it does not exist."""
        return [] if self.path.is_file() else [str(self.path)]

    def files(self) -> list[Path]:
        """The file, if it exists."""
        return [self.path] if self.path.is_file() else []

    def pickled_only(self) -> bool:
        """False: opening the file refuses pickles."""
        return False

    def config(self) -> UMT5Config:
        """The encoder's config, from the shapes of its tensors."""
        from transformers import UMT5Config

        if not self.path.is_file():
            raise CheckpointError("there is no such file", where=str(self.path))
        return UMT5Config(**umt5_config(self.path))

    @property
    def weights(self) -> WeightsFrom:
        """The source of the encoder's weights."""
        return WeightsFrom(str(self.path), FORMAT)


class WanUMT5(nn.Module):
    """UMT5 text encoder for Wan's captions (https://arxiv.org/abs/2304.09151), frozen.

    Satisfies `TextEncoder` and `Streamed`.

    The output equals `WanPipeline.encode_prompt`: rows of max_length tokens; padding is masked inside the
    encoder, and its hidden states are zero. `WanUMT5Config` describes the fields. The constructor opens no
    weights.
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
        if is_single(self.folder):
            self.encoder.read_from(UMT5File(self.folder, "text encoder"))

    @property
    def weights_from(self) -> WeightsFrom | None:
        """Folder and format of the text encoder's weights."""
        return self.encoder.weights_from

    @property
    def hidden_size(self) -> int:
        """Width of the text encoder's hidden states, from config.json."""
        return self.encoder.hidden_size

    def missing_files(self) -> list[str]:
        """Files of the UMT5 text encoder that do not exist: config.json, weights, tokenizer."""
        return self.encoder.missing_files()

    def files(self) -> list[Path]:
        """Files on which the hidden states depend, for the feature cache."""
        return self.encoder.files()

    def build_empty(self) -> None:
        """Builds the UMT5 text encoder without memory for its weights.

        Raises:
            CheckpointError: the folder holds another model or only pickled weights, or no tokenizer exists.
        """
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
                "this folder holds no tokenizer",
                where=str(self.tokenizer_folder),
                accepted="the folder `tokenizer` of a Wan pipeline",
                hint="set tokenizer: to the folder that holds tokenizer.json or spiece.model, such as"
                " hub:google/umt5-xxl",
            )
        self.encoder.build_empty()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of this text encoder, for use in data workers."""
        return WanTokenizer(HFTokenizer(str(self.tokenizer_folder), self.max_length, "max_length"))

    @torch.no_grad()
    def encode(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes captions with UMT5.

        Args:
            ids: token ids [B,L].
            mask: [B,L]; False for padding.

        Returns:
            Hidden states [B,L,D] in the encoder's dtype, zero for padding; and the mask [B,L].
        """
        hidden, mask = self.encoder.encode(ids, mask)
        return hidden.masked_fill(~mask[..., None].bool(), 0), mask

    def train(self, mode: bool = True) -> WanUMT5:
        """Keeps the frozen text encoder in evaluation mode, without dropout, whatever `mode` is."""
        return super().train(False)


def _tokenizer_folder(weights: Path) -> Path:
    """The tokenizer's folder: that of the weights if it holds one, else a neighbour."""
    beside = (weights.parent / name for name in ("tokenizer", "google/umt5-xxl"))  # of a pipeline, of Wan-AI
    found = (folder for folder in (weights, *beside) if _has_tokenizer(folder))
    return next(found, weights.parent / "tokenizer")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "spiece.model"))
