"""The folder of a frozen Transformers model: what it lacks, and reading it without running anything in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mm_core.errors import CheckpointError

_PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class ModelFolder:
    """A folder as Transformers' `save_pretrained` writes it. role: what the model is, in sentences."""

    path: Path
    role: str

    def has(self, name: str) -> bool:
        """Whether a file of that name is there."""
        return (self.path / name).is_file()

    def missing_files(self) -> list[str]:
        """Of config.json and the weights, those that do not exist."""
        names = ["config.json"]
        if not self.pickled_only():  # those are there, and reading says why it refuses them
            names += self._weight_files()
        return [str(self.path / name) for name in names if not self.has(name)]

    def pickled_only(self) -> bool:
        """Whether the weights are there as pickles and not otherwise."""
        pickled = any(path for pattern in _PICKLED for path in self.path.glob(pattern))
        return pickled and not any(self.path.glob("*.safetensors"))

    def config(self) -> Any:
        """The model's config. CheckpointError for none, or one that Transformers does not know."""
        from transformers import AutoConfig

        if not self.has("config.json"):
            raise CheckpointError(
                f"the folder of the {self.role} holds no config.json",
                where=str(self.path),
                accepted="a folder as Transformers' save_pretrained writes it",
                hint=f"in Diffusers' layout that is the sub-folder {self.role.replace(' ', '_')}",
            )
        try:
            return AutoConfig.from_pretrained(self.path, local_files_only=True)
        except (OSError, ValueError, KeyError) as fault:
            raise CheckpointError(
                f"config.json describes no model that Transformers knows: {first_line(fault)}",
                where=str(self.path),
            ) from fault

    def check(self) -> None:
        """CheckpointError for pickled weights, or weights that are not all there."""
        if self.pickled_only():
            raise CheckpointError(
                "the weights are pickled, which can run code when they are read",
                where=str(self.path),
                accepted="safetensors",
                hint="convert them: load the model where you trust it and call "
                "save_pretrained(..., safe_serialization=True)",
            )
        if missing := self.missing_files():
            raise CheckpointError(f"files are missing: {', '.join(missing)}", where=str(self.path))

    def read(self, loader: Any, dtype: torch.dtype) -> nn.Module:
        """The model by `loader.from_pretrained`, in evaluation mode, on the CPU. CheckpointError unless its
        weights are whole."""
        import transformers
        from packaging.version import Version
        from safetensors import SafetensorError

        # Transformers renamed the argument; the old name is gone in later versions.
        key = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
        try:
            model, report = loader.from_pretrained(
                self.path,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **{key: dtype},
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as fault:
            raise CheckpointError(
                f"the {self.role} can not be read: {first_line(fault)}", where=str(self.path)
            ) from fault
        # Transformers fills what a file lacks with random numbers. Poolers come after the hidden states.
        if lacking := sorted(name for name in report["missing_keys"] if "pooler" not in name):
            raise CheckpointError(
                f"the weights lack {len(lacking)} tensors of the {self.role}: {', '.join(lacking[:4])}",
                where=str(self.path),
            )
        assert isinstance(model, nn.Module)
        return model.eval().requires_grad_(False)

    def _weight_files(self) -> list[str]:
        """The safetensors files that the folder's index lists, or the one file of small models."""
        index = self.path / "model.safetensors.index.json"
        if not index.is_file():
            return ["model.safetensors"]
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as fault:
            raise CheckpointError(
                f"the index of the weights is damaged: {type(fault).__name__}: {fault}",
                where=str(index),
                accepted="JSON with a weight_map from tensor to file",
                hint="copy the file again",
            ) from None


def first_line(fault: BaseException) -> str:
    """Of a library's message: the rest of it is advice for its own users."""
    return next(iter(str(fault).splitlines()), type(fault).__name__)
