"""The folder of a frozen Transformers model: its missing files, its config, and the empty model."""

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
    """The folder of a frozen encoder model, as written by Transformers' `save_pretrained`.

    Attributes:
        path: of the folder.
        role: noun for the model in error messages, such as "text encoder".
        trust_remote_code: whether Python files of the folder may run; `known` ones are used from a copy (see
            `code_folder`).
    """

    path: Path
    role: str
    trust_remote_code: RemoteCode = False

    def has(self, name: str) -> bool:
        """Whether the encoder's model folder contains a file of this name."""
        return (self.path / name).is_file()

    def missing_files(self) -> list[str]:
        """Missing files of the encoder's model folder: config.json and weights."""
        names = ["config.json"]
        if not self.pickled_only():  # pickled weights are refused when they are read
            names += self._weight_files()
        return [str(self.path / name) for name in names if not self.has(name)]

    def files(self) -> list[Path]:
        """The encoder's files that exist: config.json and weights, for the feature cache."""
        return [self.path / name for name in ("config.json", *self._weight_files()) if self.has(name)]

    def pickled_only(self) -> bool:
        """Whether the model folder contains its weights only as pickles."""
        pickled = any(path for pattern in _PICKLED for path in self.path.glob(pattern))
        return pickled and not any(self.path.glob("*.safetensors"))

    def config(self) -> PretrainedConfig:
        """Reads the config of the encoder's model folder.

        Raises:
            CheckpointError: config.json is missing, or Transformers does not support it.
        """
        from transformers import AutoConfig

        if not self.has("config.json"):
            raise CheckpointError(
                f"the folder of the {self.role} contains no config.json",
                where=str(self.path),
                accepted="a model folder as written by Transformers' save_pretrained",
                hint=f"in a Diffusers pipeline, use its sub-folder {self.role.replace(' ', '_')}",
            )
        try:
            return AutoConfig.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=bool(self.trust_remote_code)
            )
        except MMError:  # raised by a plugin with its own kind of config.json
            raise
        except (OSError, ValueError, KeyError) as fault:
            raise CheckpointError(
                f"Transformers cannot read config.json: {first_line(fault)}",
                where=str(self.path),
                hint="check the file, or upgrade transformers if the model is newer",
            ) from fault

    def check(self) -> None:
        """Raises CheckpointError if the weights in the model folder are pickles."""
        if self.pickled_only():
            raise CheckpointError(
                "the weights are pickled, so reading them could run code",
                where=str(self.path),
                accepted="safetensors",
                hint="convert them: load the model where you trust it and call "
                "save_pretrained(..., safe_serialization=True)",
            )

    @property
    def weights(self) -> WeightsFrom:
        """The source of the encoder's weights; the folder may contain a larger model."""
        return WeightsFrom(str(self.path), "core/transformers", part=True)

    def empty(self, kind: type[AutoModel], config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
        """Builds the encoder model of a folder in evaluation mode, without memory for its parameters.

        Parameters have the dtype that `from_pretrained` would give them.

        Args:
            kind: auto class, whose `from_config` is called.
            config: of the model.
            dtype: of most parameters.

        Raises:
            CheckpointError: weights are pickled, or no model can be built from the config.
        """
        self.check()
        try:
            with empty_parameters():
                model: nn.Module = kind.from_config(config, **{dtype_key(): dtype})
        except (OSError, ValueError, TypeError, AttributeError, LookupError, RuntimeError) as fault:
            raise CheckpointError(
                f"the {self.role} cannot be built from config.json: {first_line(fault)}",
                where=str(self.path),
                hint="copy config.json again from where the weights came from, or choose another folder",
            ) from fault
        for name in _kept_in_fp32(model, dtype):
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.float()
        return model.eval().requires_grad_(False)

    def _weight_files(self) -> list[str]:
        """The single safetensors file of a small model, which Transformers prefers, or those in the index."""
        index = self.path / "model.safetensors.index.json"
        if self.has("model.safetensors") or not index.is_file():
            return ["model.safetensors"]
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as fault:
            raise CheckpointError(
                f"the index of the weights is damaged: {type(fault).__name__}: {fault}",
                where=str(index),
                accepted="JSON with a weight_map from tensor to file",
                hint="copy or download the file again",
            ) from None


def dtype_key() -> str:
    """Name of the dtype argument of Transformers models: `dtype`, or `torch_dtype` before version 4.56."""
    import transformers
    from packaging.version import Version

    return "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


def _kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Names of the parameters that Transformers keeps in fp32 in a model of this dtype."""
    parts: set[str] = set()
    if dtype is torch.float16:
        parts |= set(model._keep_in_fp32_modules or ())
    if dtype in (torch.float16, torch.bfloat16):
        parts |= set(model._keep_in_fp32_modules_strict or ())
    kept = [re.compile(rf"(^|\.){part}(\.|$)") for part in parts]
    return [name for name, _ in model.named_parameters() if any(one.search(name) for one in kept)]
