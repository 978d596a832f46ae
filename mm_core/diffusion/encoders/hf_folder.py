"""The folder of a frozen Transformers model: what it lacks, and the model that it describes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from mm_core.contracts import WeightsFrom, empty_parameters
from mm_core.errors import CheckpointError, MMError, first_line
from mm_core.plugin.trust.remote_code import RemoteCode

if TYPE_CHECKING:
    from transformers import AutoModel, PretrainedConfig, PreTrainedModel

_PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class ModelFolder:
    """A folder as Transformers' `save_pretrained` writes it. role: what the model is, in sentences.
    trust_remote_code: Python files of the folder may run; `known` ones come as a copy (see `code_folder`)."""

    path: Path
    role: str
    trust_remote_code: RemoteCode = False

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

    def config(self) -> PretrainedConfig:
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
            return AutoConfig.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=bool(self.trust_remote_code)
            )
        except MMError:  # of a plugin that reads its own kind of config.json
            raise
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

    @property
    def weights(self) -> WeightsFrom:
        """Where the core finds the weights; the folder may hold a larger model."""
        return WeightsFrom(str(self.path), "core/transformers", part=True)

    def empty(self, kind: type[AutoModel], config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
        """The model that `kind.from_config` makes, in evaluation mode, without memory for its parameters.
        They have the dtype that `from_pretrained` would keep them in. CheckpointError for pickled weights,
        weights that are not all there, or a config.json that nothing can be made of."""
        self.check()
        try:
            with empty_parameters():
                model: nn.Module = kind.from_config(config, **{dtype_key(): dtype})
        except (OSError, ValueError, TypeError, AttributeError, LookupError, RuntimeError) as fault:
            raise CheckpointError(
                f"no {self.role} can be made of config.json: {first_line(fault)}", where=str(self.path)
            ) from fault
        for name in _kept_in_fp32(model, dtype):
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.float()
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


def dtype_key() -> str:
    """Transformers renamed the argument; the old name is gone in later versions."""
    import transformers
    from packaging.version import Version

    return "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


def _kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Names of the parameters that Transformers leaves in fp32 in a model of this dtype."""
    parts: set[str] = set()
    if dtype is torch.float16:
        parts |= set(model._keep_in_fp32_modules or ())
    if dtype in (torch.float16, torch.bfloat16):
        parts |= set(model._keep_in_fp32_modules_strict or ())
    kept = [re.compile(rf"(^|\.){part}(\.|$)") for part in parts]
    return [name for name, _ in model.named_parameters() if any(one.search(name) for one in kept)]
