"""Text encoders: `bytes`, which needs no weights, and `hf_text`, any Transformers encoder folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mm_core.builtin.configs.diffusion import ByteTextConfig, HFTextConfig
from mm_core.contracts import Randomness, Tokenizer, WeightsFrom, torch_dtype
from mm_core.device import copied_to
from mm_core.diffusion.encoders.hf_folder import ModelFolder
from mm_core.errors import CheckpointError
from mm_core.schema.fields import DType
from mm_core.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from transformers import AutoModel, PretrainedConfig, PreTrainedTokenizerBase

END, PAD = 256, 257
"""Tokens after the 256 bytes: the end of every caption, and padding."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.txt", "vocab.json")


@dataclass(frozen=True)
class ByteTokenizer:
    """The tokenizer of the text encoder `bytes`: UTF-8 bytes, cut to max_length - 1, and an end token."""

    max_length: int

    def __call__(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokenizes captions: ids [B,L] int64 and mask [B,L] bool, padded to the longest caption."""
        rows = [[*caption.encode()[: self.max_length - 1], END] for caption in captions]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
        return ids, ids != PAD

    def token_counts(self, captions: Sequence[str]) -> list[int]:
        """See `CountingTokenizer`."""
        return [len(caption.encode()) + 1 for caption in captions]


class ByteTextEncoder(nn.Module):
    """The text encoder `bytes`: hidden states from fixed random tables, the same on every machine.

    A token's state is the sum of a vector for its byte, a vector for the word up to it (so that the last byte
    identifies the word), and sinusoidal positions (Vaswani et al. 2017). Satisfies `TextEncoder`.
    """

    _WORDS = 4096  # number of vectors for words; two words share one with probability 1 / 4096
    _SEED = 20240229

    table: Tensor | None
    words: Tensor | None

    def __init__(
        self, hidden_size: int = ByteTextConfig.hidden_size, max_length: int = ByteTextConfig.max_length
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.max_length = max_length
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("words", None, persistent=False)

    def load(self, device: torch.device) -> None:
        """Draws the text encoder's tables; reads no files."""
        if self.table is None:
            rng = Randomness(self._SEED)
            self.table = rng.normal((PAD + 1, self.hidden_size), "bytes")
            self.words = rng.normal((self._WORDS, self.hidden_size), "words")
        assert self.words is not None
        self.table, self.words = self.table.to(device), self.words.to(device)

    def missing_files(self) -> list[str]:
        """Missing files of the text encoder: none, since it needs no files."""
        return []

    def tokenizer(self) -> Tokenizer:
        """The text encoder's tokenizer, for data workers."""
        return ByteTokenizer(self.max_length)

    def encode(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes captions: ids [B,L] -> hidden states [B,L,D] in float32 at unit scale, and mask [B,L]."""
        assert self.table is not None and self.words is not None, "load() comes first"
        positions = copied_to(ids.device, sinusoids(ids.shape[1], self.hidden_size))
        hidden = F.embedding(ids, self.table) + self.words[self._word_so_far(ids)] + positions
        return hidden / 3**0.5, mask

    def _word_so_far(self, ids: Tensor) -> Tensor:
        """[B,L]: a hash of the bytes since the last space, including the current byte."""
        state = torch.zeros_like(ids[:, 0])
        states = []
        for column in ids.unbind(1):
            state = torch.where(column == ord(" "), 0, (state * 31 + column + 1) % 1_000_003)
            states.append(state)
        return torch.stack(states, dim=1) % self._WORDS


def sinusoids(length: int, width: int) -> Tensor:
    """Sinusoidal positions of text tokens, [L,D] at unit scale: sin and cos of position / 10000^(2i/D).

    Vaswani et al. 2017, section 3.5.
    """
    position = torch.arange(length, dtype=torch.float64)[:, None]
    angles = position / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    table = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :width]
    return (table * 2**0.5).float()


@dataclass
class HFTokenizer:
    """The tokenizer of a Transformers text encoder, opened at its first use (in the data worker).

    Attributes:
        folder: of the tokenizer.
        max_length: maximum number of tokens.
        padding: to the longest caption, or always to max_length.
    """

    folder: str
    max_length: int
    padding: Literal["longest", "max_length"] = "longest"

    @cached_property
    def _opened(self) -> PreTrainedTokenizerBase:
        return open_tokenizer(self.folder)

    def __call__(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokenizes captions: ids [B,L] int64 and mask [B,L] bool, padded on the right."""
        rows = self._opened(
            list(captions),
            padding="longest",
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=True,
            return_tensors="pt",
        )
        ids, mask = rows["input_ids"].long(), rows["attention_mask"].bool()
        # The library makes tensors of lists, number by number: six times the time for 512 of them.
        missing = self.max_length - ids.shape[1] if self.padding == "max_length" else 0
        ends = (missing, 0) if self._opened.padding_side == "left" else (0, missing)
        return F.pad(ids, ends, value=self._opened.pad_token_id), F.pad(mask, ends)

    def token_counts(self, captions: Sequence[str]) -> list[int]:
        """See `CountingTokenizer`."""
        return [len(ids) for ids in self._opened(list(captions), verbose=False)["input_ids"]]

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}


class HFTextEncoder(nn.Module):
    """The text encoder `hf_text`: last hidden states of a Transformers text encoder.

    Of encoder-decoder families (T5, UMT5) only the encoder is read. Nothing is ever downloaded, and weights
    are read from safetensors only. The arguments are the fields of `HFTextConfig`. Satisfies `TextEncoder`
    and `Streamed`.
    """

    entry_points = ("encode",)
    block_patterns = "auto"
    model: nn.Module | None

    def __init__(
        self,
        from_pretrained: str,
        tokenizer: str | None = HFTextConfig.tokenizer,
        max_length: int = HFTextConfig.max_length,
        dtype: DType = HFTextConfig.dtype,
    ) -> None:
        super().__init__()
        self.folder = Path(from_pretrained)
        self.read_from(ModelFolder(self.folder, "text encoder"))
        self.tokenizer_folder = Path(tokenizer) if tokenizer is not None else self.folder
        self.max_length = max_length
        self.dtype = torch_dtype(dtype)
        self.register_module("model", None)

    def read_from(self, files: ModelFolder) -> None:
        """Reads config and weights from `files`, such as another layout than Transformers'."""
        self._files = files
        self.weights_from: WeightsFrom | None = files.weights

    @property
    def hidden_size(self) -> int:
        """Width of the text encoder's hidden states, from config.json.

        Raises:
            CheckpointError: config.json is missing or is not that of a text encoder.
        """
        return int(self._config().hidden_size)

    def missing_files(self) -> list[str]:
        """Missing files of the text encoder: config.json, weights, tokenizer."""
        missing = self._files.missing_files()
        if not any((self.tokenizer_folder / name).is_file() for name in _TOKENIZER_FILES):
            missing.append(str(self.tokenizer_folder / _TOKENIZER_FILES[0]))
        return missing

    def files(self) -> list[Path]:
        """The text encoder's files: config.json, weights, and all of its tokenizer's folder but weights."""
        return [*self._files.files(), *tokenizer_files(self.tokenizer_folder)]

    def build_empty(self) -> None:
        """Builds the text encoder from config.json, without memory for its parameters.

        Raises:
            CheckpointError: files are missing, the weights are pickled, or the tokenizer cannot be opened.
        """
        if self.model is not None:
            return
        config = self._config()
        model = self._files.empty(_kind(config, self.folder), config, self.dtype)
        open_tokenizer(str(self.tokenizer_folder))
        self.model = model
        named = (name for name, _ in self.named_parameters() if ".pooler." in name)
        poolers = dict.fromkeys(name.partition(".pooler.")[0] + ".pooler" for name in named)
        self.weights_from = replace(self._files.weights, unused=tuple(poolers))

    def tokenizer(self) -> Tokenizer:
        """The text encoder's tokenizer, for data workers."""
        return HFTokenizer(str(self.tokenizer_folder), self.max_length)

    @torch.no_grad()
    def encode(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes captions: ids [B,L] -> hidden states [B,L,D] in the encoder's dtype, and mask [B,L]."""
        assert self.model is not None, "the weights must be loaded first"
        return self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state, mask

    def train(self, mode: bool = True) -> HFTextEncoder:
        """Keeps the text encoder in evaluation mode: a frozen encoder uses no dropout."""
        return super().train(False)

    def _config(self) -> PretrainedConfig:
        """The model's config, checked to be that of a text encoder. CheckpointError otherwise."""
        config = self._files.config()
        if not hasattr(config, "vocab_size") or not hasattr(config, "hidden_size"):
            raise CheckpointError(
                f"a model of type {config.model_type!r} is not a text encoder: it has no vocabulary",
                where=str(self.folder),
                accepted="T5, UMT5, BERT, CLIP's text model and other text encoders of Transformers",
            )
        return config


def tokenizer_files(folder: Path) -> list[Path]:
    """The files that decide what a tokenizer does: those of its folder by their names, without weights."""
    patterns = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.spm")
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in found if not file.name.endswith(".safetensors.index.json"))


def _kind(config: PretrainedConfig, folder: Path) -> type[AutoModel]:
    """The Transformers class that builds only the encoder."""
    from transformers import AutoModel, AutoModelForTextEncoding
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

    known = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
    if config.is_encoder_decoder and not known:
        raise CheckpointError(
            f"Transformers has no separate encoder for the encoder-decoder type {config.model_type!r}",
            where=str(folder),
            accepted="T5, MT5, UMT5, T5Gemma, or an encoder-only model",
        )
    kind: type[AutoModel] = AutoModelForTextEncoding if known else AutoModel
    return kind
