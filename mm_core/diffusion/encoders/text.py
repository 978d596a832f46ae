"""Text encoders: `bytes`, which needs no weights, and `hf_text`, any Transformers encoder directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from mm_core.builtin.configs.diffusion import ByteTextConfig, HFTextConfig
from mm_core.contracts import Randomness, Tokenizer, WeightsFrom, torch_dtype
from mm_core.diffusion.encoders.hf_folder import ModelFolder
from mm_core.errors import CheckpointError
from mm_core.schema.fields import DType
from mm_core.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from transformers import AutoModel, PretrainedConfig, PreTrainedTokenizerBase

END, PAD = 256, 257
"""Tokens beside the 256 bytes: the end of every caption, and padding."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.txt", "vocab.json")


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes, cut to max_length - 1, and an end token. Rows are padded to the longest."""

    max_length: int

    def __call__(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """ids[B,L] int64, mask[B,L] bool."""
        rows = [[*caption.encode()[: self.max_length - 1], END] for caption in captions]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
        return ids, ids != PAD


class ByteTextEncoder(nn.Module):
    """Hidden states from fixed random tables, the same on every machine. Satisfies `TextEncoder`.

    A token's state is the sum of its byte's vector, of a vector for the word up to it (so that a
    word can be told by its last byte), and of sinusoidal positions (Vaswani et al. 2017).
    """

    _WORDS = 4096  # vectors for words; two words in 4096 share one by chance
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
        """Draws the tables; nothing is read."""
        if self.table is None:
            rng = Randomness(self._SEED)
            self.table = rng.normal((PAD + 1, self.hidden_size), "bytes")
            self.words = rng.normal((self._WORDS, self.hidden_size), "words")
        assert self.words is not None
        self.table, self.words = self.table.to(device), self.words.to(device)

    def missing_files(self) -> list[str]:
        """None are needed."""
        return []

    def tokenizer(self) -> Tokenizer:
        """The half for data workers."""
        return ByteTokenizer(self.max_length)

    def encode(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """ids[B,L], mask[B,L] -> hidden[B,L,D] float32 of unit scale, mask[B,L]."""
        assert self.table is not None and self.words is not None, "load() comes first"
        positions = sinusoids(ids.shape[1], self.hidden_size).to(ids.device)
        hidden = self.table[ids] + self.words[self._word_so_far(ids)] + positions
        return hidden / 3**0.5, mask

    def _word_so_far(self, ids: Tensor) -> Tensor:
        """[B,L]: a hash of the bytes since the last space, this one included."""
        state = torch.zeros_like(ids[:, 0])
        states = []
        for column in ids.unbind(1):
            state = torch.where(column == ord(" "), 0, (state * 31 + column + 1) % 1_000_003)
            states.append(state)
        return torch.stack(states, dim=1) % self._WORDS


def sinusoids(length: int, width: int) -> Tensor:
    """[L,D]: sin and cos of position / 10000^(2i/D) (Vaswani et al. 2017, section 3.5), at unit scale."""
    position = torch.arange(length, dtype=torch.float64)[:, None]
    angles = position / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    table = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :width]
    return (table * 2**0.5).float()


@dataclass
class HFTokenizer:
    """A Transformers tokenizer of a folder, opened where it is first used (in the data worker). padding: to
    the longest row, or always to max_length."""

    folder: str
    max_length: int
    padding: Literal["longest", "max_length"] = "longest"
    _opened: PreTrainedTokenizerBase | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """ids[B,L] int64, mask[B,L] bool; rows are padded on the right."""
        if self._opened is None:
            self._opened = open_tokenizer(self.folder)
        rows = self._opened(
            list(captions),
            padding=self.padding,
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return rows["input_ids"].long(), rows["attention_mask"].bool()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": None}


class HFTextEncoder(nn.Module):
    """The last hidden states of a Transformers text encoder. Satisfies `TextEncoder` and `Streamed`.

    Of encoder-decoder families (T5, UMT5) the encoder alone is read. Nothing is ever downloaded, and
    weights are read from safetensors only. Fields are those of `HFTextConfig`.
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
        self._files = ModelFolder(self.folder, "text encoder")
        self.weights_from: WeightsFrom | None = self._files.weights
        self.tokenizer_folder = Path(tokenizer) if tokenizer is not None else self.folder
        self.max_length = max_length
        self.dtype = torch_dtype(dtype)
        self.register_module("model", None)

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state, as config.json says. CheckpointError when it says nothing."""
        return int(self._config().hidden_size)

    def missing_files(self) -> list[str]:
        """Of config.json, the weights and the tokenizer, those that do not exist."""
        missing = self._files.missing_files()
        if not any((self.tokenizer_folder / name).is_file() for name in _TOKENIZER_FILES):
            missing.append(str(self.tokenizer_folder / _TOKENIZER_FILES[0]))
        return missing

    def build_empty(self) -> None:
        """Makes the encoder of config.json. CheckpointError for a folder that holds no such model, or pickles
        alone, and for a tokenizer that cannot be opened."""
        if self.model is not None:
            return
        config = self._config()
        self._files.check()
        if missing := self.missing_files():
            raise CheckpointError(f"files are missing: {', '.join(missing)}", where=str(self.folder))
        open_tokenizer(str(self.tokenizer_folder))
        self.model = self._files.empty(_kind(config, self.folder), config, self.dtype)
        named = (name for name, _ in self.named_parameters() if ".pooler." in name)
        poolers = dict.fromkeys(name.partition(".pooler.")[0] + ".pooler" for name in named)
        self.weights_from = replace(self._files.weights, unused=tuple(poolers))

    def tokenizer(self) -> Tokenizer:
        """The half for data workers."""
        return HFTokenizer(str(self.tokenizer_folder), self.max_length)

    @torch.no_grad()
    def encode(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """ids[B,L], mask[B,L] -> hidden[B,L,D] in the encoder's dtype, mask[B,L]."""
        assert self.model is not None, "its weights come first"
        return self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state, mask

    def train(self, mode: bool = True) -> HFTextEncoder:
        """Stays in evaluation mode: a frozen encoder has no dropout."""
        return super().train(False)

    def _config(self) -> PretrainedConfig:
        """The model's config, of the text part where there are several. CheckpointError for none."""
        config = self._files.config()
        if not hasattr(config, "vocab_size") or not hasattr(config, "hidden_size"):
            raise CheckpointError(
                f"a model of type {config.model_type!r} is no text encoder: it has no vocabulary",
                where=str(self.folder),
                accepted="T5, UMT5, BERT, CLIP's text model and other Transformers encoders of text",
            )
        return config


def _kind(config: PretrainedConfig, folder: Path) -> type[AutoModel]:
    """The Transformers class that makes the encoder alone."""
    from transformers import AutoModel, AutoModelForTextEncoding
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

    known = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
    if config.is_encoder_decoder and not known:
        raise CheckpointError(
            f"Transformers has no encoder on its own for the encoder-decoder type {config.model_type!r}",
            where=str(folder),
            accepted="T5, MT5, UMT5, T5Gemma, or a model that is an encoder only",
        )
    kind: type[AutoModel] = AutoModelForTextEncoding if known else AutoModel
    return kind
