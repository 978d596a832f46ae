"""What a weight format is: a layout of one or several models on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from mm_core.contracts import TaskModule
from mm_core.errors import ContractError
from mm_core.weights.formats.key_map import KeyMap, Shape


class StoredTensors(Protocol):
    """Tensors in files, by name. Nothing is read before it is asked for."""

    where: Path
    """The file or folder, for errors."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every stored tensor."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of every stored tensor."""

    @property
    def others(self) -> Sequence[str]:
        """Names of what is stored and is no tensor."""

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a stored tensor, on CPU in its dtype; often a view of mapped memory: not to be
        written to. CheckpointError when the file cannot give it."""


@dataclass(frozen=True)
class Layout:
    """How one component, or a part of it, lies in a format.

    part: path of the sub-module that this layout covers; "" for the whole component. optional: files may
    lack the part, which then stays as it began. keys: names there of the part's own names. folder: where
    its files lie below the top ("" for the top itself). stem: the files' name before `.safetensors`, or
    before `-00001-of-00003.safetensors` and `.safetensors.index.json`. texts: further files in `folder` by
    name (config.json). metadata: texts in the header of each file. library: that reads it, as hubs call it.
    loading: Python that loads it, with `{folder}` for where it lies; both go into the card of an export.
    reading: the map for files that `keys` do not fit, as other versions of a library wrote them; never
    written by. Its prefix is that of `keys`. ContractError where it can make nothing of them. refusal: why
    files that are written so would not be loaded, asked before any is; "" where they would.
    """

    keys: KeyMap = field(default_factory=KeyMap)
    folder: str = ""
    stem: str = "model"
    texts: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    library: str = ""
    loading: str = ""
    part: str = ""
    optional: bool = False
    reading: Callable[[StoredTensors], KeyMap] | None = None
    refusal: Callable[[], str] | None = None


@dataclass(frozen=True)
class AdapterLayout:
    """How an adapter of one component, or of a part of it, lies in a format, so that the model's own
    library loads it.

    file: of the tensors, below the top. module_prefix: what stands before a module's stored path in a
    key. keys: the component's names in the format, by which adapted modules are renamed. config: name of
    the file that holds the adapter's settings in PEFT's form, or None where they go into the header of
    `file` as text under `metadata_key`. library, loading, part: as of `Layout`. others: further maps by
    which files of other programs name the modules; such files are read, never written.
    """

    file: str
    module_prefix: str = ""
    keys: KeyMap = field(default_factory=KeyMap)
    config: str | None = None
    metadata_key: str | None = None
    library: str = ""
    loading: str = ""
    part: str = ""
    others: Sequence[KeyMap] = ()


@dataclass(frozen=True)
class Written:
    """What an export writes of a component. component: its name in the task. part, folder, texts: as of
    its `Layout`. origins: files and folders that its weights began with, those that counted last first;
    they may be gone."""

    component: str
    part: str
    folder: str
    texts: Mapping[str, str]
    origins: Sequence[Path] = ()


@dataclass(frozen=True)
class Companions:
    """What lies at the top of a format beside the components. texts: files by name. copies: files or
    folders that are taken over as they are, by their place below the top. places: (component, part) -> the
    folder below the top that it goes to, where that is not its layout's. loading: Python that loads the
    whole, with `{folder}` for where it lies; "" where each part is loaded as its layout says."""

    texts: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    places: Mapping[tuple[str, str], str] = field(default_factory=dict)
    loading: str = ""


@runtime_checkable
class WeightFormat(Protocol):
    """A layout of weights on disk. Its target is built with no options and holds no state."""

    def recognises(self, path: Path) -> bool:
        """Whether the file or folder is laid out so; by names and JSON alone. Never raises for what a
        hostile folder may hold: then it is not recognised."""

    def folders(self, path: Path) -> Sequence[str]:
        """Below `path`, the folders that hold a model's weights; [""] for a lone model."""

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """The tensors of one model. CheckpointError for damaged or hostile files."""

    def layout(self, name: str, component: nn.Module) -> Layout | Sequence[Layout] | None:
        """How the task's sub-module `name` lies in this format; None where it cannot hold it. Where it
        lies in several folders, a layout for each: their parts cover the component, and do not overlap.
        `component` may be on the meta device: it is asked for names and settings alone."""

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | Sequence[AdapterLayout] | None:
        """How an adapter of that component lies in this format; None where it has none. Where it lies in
        several files, a layout for each: a part that is not adapted has no file."""

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """What a finished export also needs: tokenizers, schedulers, an index of the pipeline.

        written: what is written of the task's components, all of them. CheckpointError for an origin that
        cannot be made sense of."""


AnyLayout = TypeVar("AnyLayout", Layout, AdapterLayout)


def of_component(found: AnyLayout | Sequence[AnyLayout] | None) -> tuple[AnyLayout, ...]:
    """What a format says of a component as layouts whose key maps take the component's own names; () where
    it cannot hold it. ContractError for two layouts of one part, or in one place."""
    given = (found,) if isinstance(found, Layout | AdapterLayout) else tuple(found or ())
    places = [one.folder if isinstance(one, Layout) else one.file for one in given]
    parts = [f"{one.part}." if one.part else "" for one in given]
    inside = any(a.startswith(b) for i, a in enumerate(parts) for j, b in enumerate(parts) if i != j)
    if inside or len(set(places)) != len(places):
        raise ContractError(
            f"a weight format gives layouts of the parts {', '.join(repr(one.part) for one in given)}"
            f" in {', '.join(map(repr, places))}",
            accepted="parts that do not overlap, each in a place of its own",
        )
    return tuple(
        replace(one, keys=replace(one.keys, prefix=start + one.keys.prefix))
        for one, start in zip(given, parts, strict=True)
    )


def divided(layouts: Sequence[AnyLayout], names: Iterable[str]) -> list[list[str]]:
    """The names of a component that each layout covers. ContractError for one that none does."""
    found: list[list[str]] = [[] for _ in layouts]
    for name in names:
        for layout, covered in zip(layouts, found, strict=True):
            if not layout.part or name.startswith(f"{layout.part}."):
                covered.append(name)
                break
        else:
            raise ContractError(
                f"the weight format has no place for {name!r}",
                accepted=f"names below {', '.join(layout.part for layout in layouts) or 'no part at all'}",
            )
    return found
