"""Finding the component of a task that an adapter on disk fits, and the file with each of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from mm_core.contracts import TaskModule
from mm_core.errors import CheckpointError, ContractError, plural
from mm_core.modules.adapter_layers import adapter_of, base_name
from mm_core.weights.adapters.files import (
    PART,
    TEXT_ENCODER,
    AdapterFile,
    is_adapter,
    open_adapter,
)
from mm_core.weights.adapters.stored_names import stored_module
from mm_core.weights.fitting import Formats
from mm_core.weights.formats.format import AdapterLayout, of_component
from mm_core.weights.formats.libraries import PEFT_ADAPTER
from mm_core.weights.stored import SafetensorsFiles

Placed = tuple[AdapterLayout, Path]
"""A format's layout of an adapter of a component or its part, and the file or folder in that layout."""


@dataclass(frozen=True)
class Located:
    """The component that an adapter on disk fits.

    Attributes:
        root: the component's name in the task.
        modules: path in the component -> the file that contains its adapter, and the path there.
        added: name of a tensor of the component -> the file that adds to it, and the stored name.
    """

    root: str
    modules: Mapping[str, tuple[AdapterFile, str]]
    added: Mapping[str, tuple[AdapterFile, str]] = field(default_factory=dict)

    @property
    def files(self) -> list[AdapterFile]:
        """The files, each once."""
        held = (*self.modules.values(), *self.added.values())
        return list({id(file): file for file, _ in held}.values())


def locate(task: TaskModule, path: str, linear: Mapping[str, Sequence[str]], formats: Formats) -> Located:
    """Finds the component of a task that an adapter (LoRA) on disk fits, by the names of any weight format.

    Args:
        task: the task to train.
        path: an adapter file, or a folder with a file for each part of the component.
        linear: component -> paths of its linear layers.
        formats: weight formats to try.

    Raises:
        CheckpointError: no adapter, modules that no component has, or a file that fits several parts equally.
    """
    best = Located("", {})
    alike: dict[str, None] = {}
    opened: dict[Path, AdapterFile] = {}
    for root, chosen in _candidates(task, Path(path), linear, formats):
        found: dict[str, tuple[AdapterFile, str]] = {}
        added: dict[str, tuple[AdapterFile, str]] = {}
        for layout, place in chosen:
            if place not in opened:
                opened[place] = open_adapter(place)
            own = _named(layout, task.get_submodule(root))
            by_map = (_fit(one, linear[root], own, opened[place]) for one in _maps(layout))
            here, there = max(by_map, key=lambda fit: len(fit[0]) + len(fit[1]))
            found |= here
            added |= there
        parts = " and ".join(f"{root}.{layout.part}".rstrip(".") for layout, _ in chosen)
        count, most = len(found) + len(added), len(best.modules) + len(best.added)
        if count > most:
            best, alike = Located(root, found, added), {parts: None}
        same = (root, found.keys(), added.keys()) == (best.root, best.modules.keys(), best.added.keys())
        if count and count == most and not same:  # the same by another format
            alike[parts] = None
    files = best.files or [*opened.values()] or [open_adapter(Path(path))]
    held = {(id(file), stored) for file, stored in best.modules.values()}
    modules = [(id(file), name) for file in files for name in file.scales]
    if absent := [name for file, name in modules if (file, name) not in held]:
        texts = all(name.startswith(TEXT_ENCODER) for name in absent)
        raise CheckpointError(
            f"{len(absent)} of the {plural(len(modules), 'module')} in this adapter match no linear layer of"
            f" {best.root or ' or '.join(linear)}: {', '.join(absent[:3])}",
            where=path,
            hint="these are of a text encoder: write the file again without them"
            if texts
            else "the adapter is for a different model: use one trained for this model",
        )
    _check_added(best, files, best.root or " or ".join(linear), path)
    if len(alike) > 1:
        raise CheckpointError(
            f"this adapter fits several components equally well: {', '.join(alike)}",
            where=path,
            accepted="a file that fits only one of them, or a folder of files named as by mm export",
        )
    return best


def _check_added(best: Located, files: Iterable[AdapterFile], root: str, path: str) -> None:
    """CheckpointError for additions to no tensor of the component."""
    added_to = {key for _, key in best.added.values()}
    if left := [key for file in files for key in file.added.values() if key not in added_to]:
        raise CheckpointError(
            f"this file also changes {plural(len(left), 'full tensor')} of another shape or form than"
            f" {root}'s: {', '.join(left[:3])}",
            where=path,
            accepted="additions (diff, diff_b, diff_m) to tensors of the model, of the same shape",
            hint="merge it into the weights with the program it was made for, and start from the result",
        )


def _candidates(
    task: TaskModule, path: Path, linear: Iterable[str], formats: Formats
) -> list[tuple[str, list[Placed]]]:
    """(component, parts to read together): all files of its parts, or one file as any of them.

    Of a part that is trained alone, the folder may hold the other's file too.
    """
    together, alone = [], []
    for root in linear:
        component = task.get_submodule(root)
        for form in formats.values():
            layouts = of_component(form.adapter(root, component))
            held = [(layout, place) for layout in layouts if (place := _file_of(layout, path)) is not None]
            if held and held[0][0].part:
                together.append((root, held))
                continue
            named = [layout for layout in layouts if _is_of(layout, path)]
            alone += [(root, [(layout, path)]) for layout in (named if len(named) == 1 else layouts)]
    sure = {root for root, _ in together}
    alone = [one for one in alone if one[0] not in sure]  # a file that has the part's name is no guess
    return together + alone if is_adapter(path) or not together else together


def _file_of(layout: AdapterLayout, folder: Path) -> Path | None:
    """The file of a layout in a folder: by its name there, its part's name at the end, or PEFT's folder."""
    alike = sorted(folder.glob(f"*_{layout.part}.safetensors")) if layout.part else []
    if layout.part:
        alike += folder.glob(f"{layout.part}/{PEFT_ADAPTER}")
    held = [folder / layout.file] if (folder / layout.file).is_file() else alike
    return held[0] if len(held) == 1 else None


def _is_of(layout: AdapterLayout, path: Path) -> bool:
    """Whether the name or header of a file, or of that in a PEFT folder, names this layout's part."""
    file = path / PEFT_ADAPTER if path.is_dir() else path
    if file.absolute().as_posix().endswith(f"/{layout.file}"):
        return True
    if not layout.part or file.suffix != ".safetensors" or not file.is_file():
        return False
    return SafetensorsFiles(file, [file]).metadata().get(PART) == layout.part


def modules_in(
    layout: AdapterLayout, names: Iterable[str], file: AdapterFile
) -> dict[str, tuple[AdapterFile, str]]:
    """The modules of a component or its part that a file contains, by the map that finds most of them."""
    return max((_by_map(one, _own(layout, names), file) for one in _maps(layout)), key=len)


def _own(layout: AdapterLayout, names: Iterable[str]) -> list[str]:
    return [name for name in names if not layout.part or f"{name}.".startswith(f"{layout.part}.")]


def _maps(layout: AdapterLayout) -> list[AdapterLayout]:
    """The layout with each key map, of its own and other programs'."""
    return [replace(layout, keys=keys) for keys in (layout.keys, *layout.others)]


def _named(layout: AdapterLayout, component: nn.Module) -> dict[str, tuple[int, ...]]:
    """The tensors of a component or its part, without those of adapters, and their shapes."""
    own = {base_name(n): p for n, p in component.named_parameters() if adapter_of(n) is None}
    return {name: tuple(own[name].shape) for name in _own(layout, own)}


def _fit(
    layout: AdapterLayout, linear: Iterable[str], own: Mapping[str, tuple[int, ...]], file: AdapterFile
) -> tuple[dict[str, tuple[AdapterFile, str]], dict[str, tuple[AdapterFile, str]]]:
    """What a file contains of a component or its part, by one map: modules, and tensors that it adds to.

    These are the tensors that the map only renames.
    """
    added = {}
    for name, shape in own.items() if file.added else ():
        stored = layout.keys.renamed(name) or ""
        module, _, end = stored.rpartition(".")
        places = f"{module}.{end}", f"{stored}.weight"  # the second: a parameter outside of modules
        if file.flat:
            places = f"{module.replace('.', '_')}.{end}", f"{stored.replace('.', '_')}.weight"
        key = next((file.added[place] for place in places if place in file.added), None)
        if key is not None and file.added_shape(key) == shape:
            added[name] = file, key
    return _by_map(layout, _own(layout, linear), file), added


def _by_map(
    layout: AdapterLayout, names: Iterable[str], file: AdapterFile
) -> dict[str, tuple[AdapterFile, str]]:
    table: dict[str, tuple[AdapterFile, str]] = {}
    holders: dict[str, str] = {}
    for name in names:
        try:
            stored = stored_module(layout, name)
        except ContractError:
            continue
        stored = stored.replace(".", "_") if file.flat else stored
        if stored not in file.scales:
            continue
        if (other := holders.setdefault(stored, name)) != name:
            raise CheckpointError(
                f"{stored} could be {other} or {name}: this file's names have underscores in place of dots",
                where=str(file.stored.where),
                accepted="an adapter file whose module names have dots",
            )
        table[name] = (file, stored)
    return table
