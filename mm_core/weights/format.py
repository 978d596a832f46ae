"""What a weight format is: a layout of one or several models on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mm_core.weights.key_map import KeyMap, Shape


class StoredTensors(Protocol):
    """Tensors in files, by name. Nothing is read before it is asked for."""

    where: Path
    """The file or folder, for errors."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every stored tensor."""
        ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of every stored tensor."""
        ...

    @property
    def others(self) -> Sequence[str]:
        """Names of what is stored and is no tensor."""
        ...

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a stored tensor, on CPU in its dtype; often a view of mapped memory: not to be
        written to. CheckpointError when the file can not give it."""
        ...


@dataclass(frozen=True)
class Layout:
    """How one component lies in a format.

    keys: its names there. folder: where its files lie below the top ("" for the top itself). stem: the
    files' name before `.safetensors`, or before `-00001-of-00003.safetensors` and
    `.safetensors.index.json`. texts: further files in `folder` by name (config.json). metadata: texts in
    the header of each file. library: that reads it, as hubs call it. loading: Python that loads it, with
    `{folder}` for where it lies; both go into the card of an export.
    """

    keys: KeyMap = field(default_factory=KeyMap)
    folder: str = ""
    stem: str = "model"
    texts: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    library: str = ""
    loading: str = ""


@dataclass(frozen=True)
class AdapterLayout:
    """How an adapter of one component lies in a format, so that the model's own library loads it.

    file: of the tensors, below the top. module_prefix: what stands before a module's stored path in a
    key. keys: the component's names in the format, by which adapted modules are renamed. config: name of
    the file that holds the adapter's settings in PEFT's form, or None where they go into the header of
    `file` as text under `metadata_key`. library, loading: as of `Layout`.
    """

    file: str
    module_prefix: str = ""
    keys: KeyMap = field(default_factory=KeyMap)
    config: str | None = None
    metadata_key: str | None = None
    library: str = ""
    loading: str = ""


@dataclass(frozen=True)
class Companions:
    """What lies at the top of a format beside the components. texts: files by name. copies: files or
    folders that are taken over as they are, by their place below the top."""

    texts: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)


@runtime_checkable
class WeightFormat(Protocol):
    """A layout of weights on disk. Its target is built with no options and holds no state."""

    def recognises(self, path: Path) -> bool:
        """Whether the file or folder is laid out so; by names and JSON alone. Never raises for what a
        hostile folder may hold: then it is not recognised."""
        ...

    def folders(self, path: Path) -> Sequence[str]:
        """Below `path`, the folders that hold a model's weights; [""] for a lone model."""
        ...

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """The tensors of one model. CheckpointError for damaged or hostile files."""
        ...

    def layout(self, name: str, component: nn.Module) -> Layout | None:
        """How the task's sub-module `name` lies in this format; None where it can not hold it.
        `component` may be on the meta device: it is asked for names and settings alone."""
        ...

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | None:
        """How an adapter of that component lies in this format; None where it has none."""
        ...

    def companions(self, task: nn.Module) -> Companions:
        """What a finished export also needs: tokenizers, schedulers, an index of the pipeline."""
        ...
