"""The text encoder `diffusers/text`: all text encoders of a pipeline, by the pipeline's `encode_prompt`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import torch
import transformers
from diffusers.configuration_utils import FrozenDict
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mm_core.contracts import (
    ConditionShapes,
    EncodedText,
    Tokenizer,
    WeightsFrom,
    empty_parameters,
    torch_dtype,
)
from mm_core.errors import CheckpointError
from mm_core.plugin import DType
from mm_diffusers.call import bare, quiet
from mm_diffusers.config import TextConfig
from mm_diffusers.families import Family
from mm_diffusers.folder import INDEX, PipelineFolder
from mm_diffusers.pictures import encode_with, open_processor


class DiffusersText(nn.Module):
    """The text encoders of a pipeline. Satisfies `TextEncoder`, `SupportsCaptions`, `SupportsReads` and
    `Streamed`.

    Args:
        from_pretrained: folder of the pipeline.
        dtype: of the weights.
        max_length: most tokens of a caption; None: as in the pipeline.
        family: recipe of the pipeline; None: a known one.
    """

    entry_points = ("encode_captions",)
    block_patterns = "auto"

    def __init__(
        self,
        from_pretrained: str,
        dtype: DType = TextConfig.dtype,
        max_length: int | None = TextConfig.max_length,
        family: Family | None = None,
    ) -> None:
        super().__init__()
        self.folder = PipelineFolder(Path(from_pretrained), family)
        self.dtype = torch_dtype(dtype)
        self._most = max_length
        self.weights_from = WeightsFrom(str(self.folder.path), "diffusers/encoders")

    @property
    def max_length(self) -> int:
        """Most tokens of a caption; without files that of most pipelines."""
        if self._most is not None or not self.folder.exists:
            return self._most or 512
        return self.folder.family.length

    @property
    def encoders(self) -> list[str]:
        """Names of the pipeline's text encoders."""
        return [name for name in self.folder.parts if name.startswith("text_encoder")]

    @property
    def _tokenizers(self) -> list[str]:
        return [name for name in self.folder.parts if name.startswith(("tokenizer", "processor"))]

    @property
    def _known(self) -> bool:
        """Whether the files with the widths are there."""
        return self.folder.exists and (self.folder.path / "transformer/config.json").is_file()

    @property
    def _config(self) -> Any:
        return self.folder.config("transformer")

    @property
    def hidden_size(self) -> int:
        """Width of the text states."""
        return self.folder.family.text_width(self._config)

    @property
    def condition_shapes(self) -> ConditionShapes:
        """What is encoded beside the text states; without files nothing is known."""
        return self.folder.family.condition_shapes(self._config) if self._known else {}

    @property
    def reads(self) -> tuple[str, ...]:
        """The field of the pictures that the text encoder sees."""
        return ("references",) if self.folder.exists and self.folder.family.areas else ()

    def missing_files(self) -> list[str]:
        """Files of the text encoders that do not exist."""
        if not self.folder.exists:
            return [str(self.folder.path / INDEX)]
        others = ["vae/config.json", "transformer/config.json", "scheduler/scheduler_config.json"]
        others += ["processor/preprocessor_config.json"] if self.reads else []
        found = [str(self.folder.path / name) for name in others if not (self.folder.path / name).is_file()]
        for name in self.encoders:
            path = self.folder.path / name
            if not (path / "config.json").is_file():
                found.append(str(path / "config.json"))
            elif not any(path.glob("*.safetensors")):
                found.append(str(path / "*.safetensors"))
        for name in self._tokenizers:
            if not any((self.folder.path / name).glob("*.json")):
                found.append(str(self.folder.path / name / "*.json"))
        return found

    def files(self) -> list[Path]:
        """Files on which the text states depend."""
        parts = ("text_enc", "token", "process")
        found = (path for part in parts for path in self.folder.path.glob(f"{part}*/*"))
        return sorted(path for path in found if path.is_file())

    def build_empty(self) -> None:
        """Builds the text encoders without memory for their weights, and loads their tokenizers.

        Raises:
            CheckpointError: a class is unknown.
        """
        for name in self.encoders:
            if not hasattr(self, name):
                self.register_module(name, self._empty(name))
        _ = self._pipe

    def _empty(self, name: str) -> nn.Module:
        library, kind = self.folder.parts[name]
        class_ = getattr(transformers, kind, None) or getattr(diffusers, kind, None)
        if class_ is None:
            raise CheckpointError(
                f"the text encoder is a {kind}, which this Transformers does not have",
                where=str(self.folder.path / name),
                hint=f"upgrade {library}",
            )
        config = class_.config_class.from_pretrained(self.folder.path / name, local_files_only=True)
        with empty_parameters():
            model: nn.Module = class_._from_config(config, dtype=self.dtype)
        return model.eval().requires_grad_(False)

    @cached_property
    def _pipe(self) -> Any:
        parts: dict[str, Any] = {}
        for name in self._tokenizers:
            place = self.folder.path / name
            if name.startswith("processor"):
                parts[name] = open_processor(place)
            else:
                kind = getattr(transformers, self.folder.parts[name][1])
                parts[name] = kind.from_pretrained(place, local_files_only=True)
        parts |= {name: getattr(self, name) for name in self.encoders}
        return bare(self.folder, self.folder.kind, **parts, transformer=_Sizes(self._config))

    def tokenizer(self) -> Tokenizer:
        """Never called: see `SupportsCaptions`."""
        raise NotImplementedError

    def encode(self, ids: Tensor, mask: Tensor) -> EncodedText:
        """Never called: see `SupportsCaptions`."""
        raise NotImplementedError

    @torch.no_grad()
    def encode_captions(
        self,
        captions: Sequence[str],
        device: torch.device,
        fields: Mapping[str, Sequence[Sequence[Tensor]]] = MappingProxyType({}),
    ) -> EncodedText:
        """The text states of captions as the pipeline encodes them, by name."""
        pipe = self._pipe
        type(pipe).where = device
        taken = inspect.signature(pipe.encode_prompt).parameters
        _, *others = taken.values()
        given: dict[str, Any] = {each.name: None for each in others if each.default is each.empty}
        more = {
            "device": device,
            "max_sequence_length": self.max_length,
            "do_classifier_free_guidance": False,
            "batch_size": len(captions),
        }
        given |= {name: value for name, value in more.items() if name in taken}
        with quiet(type(pipe)):
            if self.reads:
                found = encode_with(self.folder, pipe, captions, fields["references"], **given)
            else:
                found = pipe.encode_prompt(list(captions), **given)
        states: dict[str, Any] = {}
        name = "text"
        for place, (each, value) in enumerate(zip(self.folder.family.encoded, found, strict=False)):
            if each.kind == "mask":
                full = torch.ones(states[name].shape[:2], dtype=torch.bool, device=device)
                states[name] = _compact(states[name], full if value is None else value.bool())
            elif each.name:
                name = each.name if place else "text"
                states[name] = _padded(value) if isinstance(value, list) else _flat(value)
        if isinstance(states["text"], Tensor):
            states["text"] = (states["text"], None)
        return states

    def train(self, mode: bool = True) -> DiffusersText:
        """Stays in evaluation mode."""
        return super().train(False)


class _Sizes:
    """Takes the transformer's place: without one of its encoders, Stable Diffusion 3 reads a width there."""

    def __init__(self, config: Any) -> None:
        self.config = FrozenDict(config)


def _flat(states: Tensor) -> Tensor:
    """States of several layers [B,L,n,D] as [B,L,nD]; others as they are."""
    return states.flatten(2) if states.dim() > 3 else states


def _compact(states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """States [B,L,D] and mask [B,L] with padding behind what is real (Krea 2 pads in the middle), and no more
    of it than the longest row needs. Text has no positions there, or those of its real tokens."""
    order = torch.argsort(~mask, dim=1, stable=True)
    order = order[:, : max(1, int(mask.sum(dim=1).max()))]
    return states.take_along_dim(order[..., None], dim=1), mask.take_along_dim(order, dim=1)


def _padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """States [B,L,D] of rows [L,D], and mask [B,L] on the host."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    return pad_sequence(list(rows), batch_first=True), mask
