"""The contract of a weight format: a layout of one or several models on disk."""

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
    """Tensors in weights files, by name; each is read from disk only when used."""

    where: Path
    """The file or folder, for error messages."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor in the weights files, by stored name."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of every tensor in the weights files, by stored name."""

    @property
    def others(self) -> Sequence[str]:
        """Names in the weights files whose values are not tensors."""

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Reads a box of a tensor from weights files, on CPU and in its stored dtype.

        The result is often a view of mapped memory: do not write to it.

        Raises:
            CheckpointError: the file cannot be read.
        """


@dataclass(frozen=True)
class Layout:
    """How a weight format stores one component, or a part of it.

    Attributes:
        keys: map from the part's own names to stored names.
        folder: folder of its files below the top ("" for the top itself).
        stem: file name before `.safetensors`, or before `-00001-of-00003.safetensors` and
            `.safetensors.index.json`.
        texts: further files in `folder`, by name (config.json).
        metadata: texts in the header of each file.
        library: the library that reads it, by its name on model hubs.
        loading: Python that loads it, with `{folder}` for its place. `library` and `loading` go into the
            model card of an export.
        part: path of the sub-module that this layout covers; "" for the complete component.
        optional: files may lack the part, which then keeps its initial values.
        reading: returns the map for files that `keys` do not fit, as other versions of a library wrote them;
            used for reading only. Its prefix is that of `keys`. Raises ContractError for files it cannot map.
        refusal: returns why the library could not load files written in this layout, or "" if it can;
            called before anything is written.
        read_only: no export is written in this layout.
        nested: an export is one torch.save file `<stem>.pt` with the tensors below this key, for programs that
            read nothing else; all of them are in memory at once. "": safetensors.
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
    read_only: bool = False
    nested: str = ""


@dataclass(frozen=True)
class AdapterLayout:
    """How a weight format stores an adapter of a component or of its part, for the model's own library.

    Attributes:
        file: file of the tensors, below the top.
        module_prefix: text before a module's stored path in a key.
        keys: map from the component's names to stored names; it renames the adapted modules.
        config: name of the file with the adapter's settings in PEFT's form; None if they go into the header
            of `file` as text under `metadata_key`.
        metadata_key: see `config`.
        library: see `Layout`.
        loading: see `Layout`.
        part: see `Layout`.
        others: further maps for the names that other programs use. The first names modules as the model's
            publisher does; ComfyUI and kohya's scripts use those names.
        factors: names of the two matrices in a key.
        flat: whether module paths in keys have underscores in place of dots.
        alphas: whether the file has a tensor `alpha` for each module, which sets its scale.
        additions: whether the file is ComfyUI's: it may add to tensors of the model (`diff`, `diff_b`), and a
            DoRA has `dora_scale`.
        texts: texts in the header of `file`.
        programs: name of a layout of LoRA files (`lora/comfyui`) -> text before a module's path there, and
            the map of names, where they differ from the usual ones.
        names: every part of the component, built or not -> what other programs call it: at the start of keys
            where one file contains several parts. Names that contain the part's mark its file as well.
        reading: returns a further map for files, of the shapes of the weights that they change by stored
            name; used for reading only. Its prefix is that of `keys`. Raises ContractError for files it
            cannot map.
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
    factors: tuple[str, str] = ("lora_A", "lora_B")
    flat: bool = False
    alphas: bool = False
    additions: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, tuple[str, KeyMap]] = field(default_factory=dict)
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    reading: Callable[[Mapping[str, Shape]], KeyMap] | None = None


@dataclass(frozen=True)
class Written:
    """What an export writes for a component in a weight format.

    Attributes:
        component: the component's name in the task.
        part: see `Layout`.
        folder: see `Layout`.
        texts: see `Layout`.
        sources: files and folders that its initial weights came from, the most recent first; some may no
            longer exist.
    """

    component: str
    part: str
    folder: str
    texts: Mapping[str, str]
    sources: Sequence[Path] = ()


@dataclass(frozen=True)
class Companions:
    """Files that a weight format needs at the top of an export, beside the components.

    Attributes:
        texts: text files, by name.
        copies: files or folders to copy unchanged, by their place below the top.
        places: (component, part) -> its folder below the top, where that differs from its layout's.
        loading: Python that loads everything together, with `{folder}` for its place; "" if each part is
            loaded by its own layout's `loading`.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    places: Mapping[tuple[str, str], str] = field(default_factory=dict)
    loading: str = ""


@runtime_checkable
class WeightFormat(Protocol):
    """A layout of weights on disk. Its target is built with no options and holds no state."""

    def recognises(self, path: Path) -> bool:
        """Whether a file or folder is in this weight format, found from file names and JSON only.

        Never raises, also for a hostile folder: that is not recognised.
        """

    def folders(self, path: Path) -> Sequence[str]:
        """The folders below a path that contain a model's weights; [""] for a single model."""

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """Opens the stored tensors of one model.

        Raises:
            CheckpointError: damaged or hostile files.
        """

    def layout(self, name: str, component: nn.Module) -> Layout | Sequence[Layout] | None:
        """How this weight format stores a component of a task; None where it cannot.

        Args:
            name: the component's name in the task.
            component: may be on the meta device; only its names and settings are read.

        Returns:
            One layout; or, for a component stored in several folders, a layout for each. Their parts cover
            the component and do not overlap.
        """

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | Sequence[AdapterLayout] | None:
        """How this weight format stores an adapter of a component; None where it cannot.

        For an adapter in several files, returns a layout for each; a part without adapter has no file.
        """

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """The further files of an export in this weight format: tokenizers, schedulers, a pipeline's index.

        Args:
            task: the task that is exported.
            written: what the export writes for each of the task's components.

        Raises:
            CheckpointError: an origin in `written` that cannot be read.
        """


AnyLayout = TypeVar("AnyLayout", Layout, AdapterLayout)


def of_component(found: AnyLayout | Sequence[AnyLayout] | None) -> tuple[AnyLayout, ...]:
    """A weight format's layouts of a component, with key maps that take the component's own names.

    Returns () where the format cannot store the component.

    Raises:
        ContractError: two layouts of one part, or in one place.
    """
    given = (found,) if isinstance(found, Layout | AdapterLayout) else tuple(found or ())
    places = [one.folder if isinstance(one, Layout) else one.file for one in given]
    parts = [f"{one.part}." if one.part else "" for one in given]
    inside = any(a.startswith(b) for i, a in enumerate(parts) for j, b in enumerate(parts) if i != j)
    if inside or len(set(places)) != len(places):
        raise ContractError(
            f"the layouts of a weight format overlap: parts {', '.join(repr(one.part) for one in given)}"
            f" in {', '.join(map(repr, places))}",
            accepted="parts that do not overlap, each in its own folder or file",
        )
    return tuple(_below(start, one) for start, one in zip(parts, given, strict=True))


def _below(start: str, one: AnyLayout) -> AnyLayout:
    """A layout whose key maps take names that begin with `start`."""
    keys = replace(one.keys, prefix=start + one.keys.prefix)
    if isinstance(one, Layout):
        return replace(one, keys=keys)
    others = tuple(replace(other, prefix=start + other.prefix) for other in one.others)
    programs = {n: (text, replace(own, prefix=start + own.prefix)) for n, (text, own) in one.programs.items()}
    return replace(one, keys=keys, others=others, programs=programs)


def divided(layouts: Sequence[AnyLayout], names: Iterable[str]) -> list[list[str]]:
    """The tensor names of a component that each layout of a weight format covers.

    Raises:
        ContractError: a name that no layout covers.
    """
    found: list[list[str]] = [[] for _ in layouts]
    for name in names:
        for layout, covered in zip(layouts, found, strict=True):
            if not layout.part or name.startswith(f"{layout.part}."):
                covered.append(name)
                break
        else:
            raise ContractError(
                f"no layout of the weight format covers {name!r}",
                accepted=f"names below {', '.join(layout.part for layout in layouts) or 'no part at all'}",
            )
    return found
