"""Finding the component of a task that an adapter on disk fits, and the file with each of its modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
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
    share_name,
    start_of_keys,
)
from mm_core.weights.adapters.settings import plain_name
from mm_core.weights.adapters.stored_names import module_key, path_key, shares_in
from mm_core.weights.fitting import Formats
from mm_core.weights.formats.format import AdapterLayout, of_component
from mm_core.weights.formats.libraries import PEFT_ADAPTER
from mm_core.weights.stored import SafetensorsFiles

Placed = tuple[AdapterLayout, Path, str]
"""A format's layout of an adapter of a component or its part, the file or folder in that layout, and the
start of the part's keys in a file of several parts."""

Held = dict[str, tuple[AdapterFile, str]]
"""Module or tensor of a component -> the file with its adapter or an addition to it, and the name there."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


@dataclass(frozen=True)
class Located:
    """The component that an adapter on disk fits.

    Attributes:
        root: the component's name in the task.
        modules: path in the component -> the file that contains its adapter, and the path there.
        added: name of a tensor of the component -> the file that adds to it, and the stored name.
    """

    root: str
    modules: Held
    added: Held = field(default_factory=dict)

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
    alike: dict[str, str] = {}  # parts -> what other programs call them
    files: list[AdapterFile] = []
    opened: dict[tuple[Path, str], AdapterFile] = {}
    for root, chosen in _candidates(task, Path(path), linear, formats):
        found: Held = {}
        added: Held = {}
        read: list[AdapterFile] = []
        for layout, place, within in chosen:
            if (place, within) not in opened:
                opened[place, within] = open_adapter(place, within=within)
            own = _named(layout, task.get_submodule(root))
            read.append(_cut(layout, own, opened[place, within]))
            here, there = _fit(layout, linear[root], own, read[-1])
            found |= here
            added |= there
        parts = " and ".join(f"{root}.{layout.part}".rstrip(".") for layout, *_ in chosen)
        called = " and ".join(one for layout, *_ in chosen for one in layout.names.get(layout.part, ())[:1])
        count, most = len(found) + len(added), len(best.modules) + len(best.added)
        if count > most:
            best, alike = Located(root, found, added), {parts: called}
            files = read
        same = (root, found.keys(), added.keys()) == (best.root, best.modules.keys(), best.added.keys())
        if count and count == most and not same:  # the same by another format
            alike[parts] = called
    files = files or [*opened.values()] or [open_adapter(Path(path))]
    _check_complete(best, files, linear, path)
    if len(alike) > 1:
        names = f", a file whose name contains {' or '.join(filter(None, alike.values()))}" * any(
            alike.values()
        )
        raise CheckpointError(
            f"this adapter fits several components equally well: {', '.join(alike)}",
            where=path,
            accepted=f"a file that fits only one of them{names}, or a folder of files named as by mm export",
        )
    return best


def _check_complete(
    best: Located, files: Sequence[AdapterFile], linear: Mapping[str, Sequence[str]], path: str
) -> None:
    """CheckpointError for modules and additions in files that no component has."""
    root = best.root or " or ".join(linear)
    held = {(id(file), stored) for file, stored in best.modules.values()}
    modules = [(id(file), name) for file in files for name in file.scales]
    if absent := [name for file, name in modules if (file, name) not in held]:
        hint = "the adapter is for a different model: use one trained for this model"
        if all(name.startswith(TEXT_ENCODER) for name in absent):
            hint = "these are of a text encoder: write the file again without them"
        elif not best.modules:
            own = next((name for names in linear.values() for name in names), "none")
            hint = f"the adapter is for a different model, or gives modules names unlike those here ({own})"
        raise CheckpointError(
            f"{len(absent)} of the {plural(len(modules), 'module')} in this adapter match no linear layer of"
            f" {root}: {', '.join(absent[:3])}",
            where=path,
            hint=hint,
        )
    added_to = {(id(file), key) for file, key in best.added.values()}
    if left := [key for file in files for key in file.added.values() if (id(file), key) not in added_to]:
        raise CheckpointError(
            f"this file also changes {plural(len(left), 'full tensor')} of another shape or form than"
            f" {root}'s: {', '.join(left[:3])}",
            where=path,
            accepted="additions (diff, diff_b, diff_m) to tensors of the model, of the same shape",
            hint="merge it into the weights with the program it was made for, and start from the result",
        )


def _check_names(layouts: Iterable[AdapterLayout], folder: Path, known: Sequence[Placed] = ()) -> None:
    """CheckpointError for files in a folder of which none shows that it is for a part that lacks one.

    Args:
        layouts: of the component's parts.
        folder: with a file for each part.
        known: the parts whose files were found.
    """
    named = dict.fromkeys(one.part for one in layouts if one.part).keys() - {one.part for one, *_ in known}
    found = {place for _, place, _ in known}
    left = sorted(file.name for file in folder.glob("*.safetensors") if file not in found)
    if named and left and not is_adapter(folder):
        raise CheckpointError(
            f"the names of the files here do not show which is for {' and which for '.join(sorted(named))}:"
            f" {', '.join(left[:4])}",
            where=str(folder),
            accepted="one file for each, with the word in its name: "
            + ", ".join(f"style_{part}.safetensors" for part in sorted(named)),
            hint="rename the files, or move those of one adapter into a folder of their own",
        )


def _candidates(
    task: TaskModule, path: Path, linear: Iterable[str], formats: Formats
) -> list[tuple[str, list[Placed]]]:
    """(component, parts to read together): all files of its parts, or one file as any or as all of them.

    Of a part that is trained alone, the folder or file may hold the other too.
    """
    together: list[tuple[str, list[Placed]]] = []
    alone: list[tuple[str, list[Placed]]] = []
    for root in linear:
        component = task.get_submodule(root)
        for form in formats.values():
            layouts = of_component(form.adapter(root, component))
            held = [
                (layout, place, "") for layout in layouts if (place := _file_of(layout, path)) is not None
            ]
            if held and held[0][0].part:
                _check_names(layouts, path, held)
                together.append((root, held))
                continue
            if starts := _starts_of_parts(layouts, path):
                within = [(layout, path, starts[layout.part]) for layout in layouts if layout.part in starts]
                together.append((root, within))
                continue
            named = [layout for layout in layouts if _is_of(layout, path)]
            alone += [(root, [(layout, path, "")]) for layout in (named if len(named) == 1 else layouts)]
    if not together:
        _check_names((layout for _, tried in alone for layout, *_ in tried), path)
    sure = {root for root, _ in together}
    alone = [one for one in alone if one[0] not in sure]  # a file that has the part's name is no guess
    return together + alone if is_adapter(path) or not together else together


def _file_of(layout: AdapterLayout, folder: Path) -> Path | None:
    """The file of a layout in a folder: by its name there, its part's name at the end, or PEFT's folder; else
    by what other programs call the part, or the part's name as a word if each part has one such file.

    Raises:
        CheckpointError: several files have such names.
    """
    if (folder / layout.file).is_file():
        return folder / layout.file
    if not layout.part:
        return None
    held = [*folder.glob(f"*_{layout.part}.safetensors"), *folder.glob(f"{layout.part}/{PEFT_ADAPTER}")]
    if not held:
        named = {file: file.stem for file in folder.glob("*.safetensors")}
        named |= {file: file.parent.name for file in folder.glob(f"*/{PEFT_ADAPTER}")}
        held = [file for file, name in named.items() if _part_called(layout, name) == layout.part]
        words = {file: _part_as_word(layout, name) for file, name in named.items()}
        if not held and sorted(filter(None, words.values())) == sorted(layout.names):
            held = [file for file, part in words.items() if part == layout.part]
    if len(held) > 1 and not is_adapter(folder):
        raise CheckpointError(
            f"several files here are for {layout.part} by their names:"
            f" {', '.join(sorted(str(file.relative_to(folder)) for file in held)[:4])}",
            where=str(folder),
            hint="move those of one adapter into a folder of their own",
        )
    return held[0] if len(held) == 1 else None


def _part_called(layout: AdapterLayout, name: str) -> str | None:
    """The part that other programs name in a file's name (`high_noise`); None without one, or for two."""
    plain = "".join(_WORDS.findall(name)).lower()
    found = {
        part
        for part, names in layout.names.items()
        if any(part in one and one.replace("_", "") in plain for one in names)
    }
    return found.pop() if len(found) == 1 else None


def _part_as_word(layout: AdapterLayout, name: str) -> str | None:
    """The part whose own name is a word of a file's name (`style-HIGH-v2`); None without one, or for two."""
    found = layout.names.keys() & {word.lower() for word in _WORDS.findall(name)}
    return found.pop() if len(found) == 1 else None


def _tensors_file(path: Path) -> SafetensorsFiles | None:
    """The tensors of a file, or of that in a PEFT folder; None for anything else."""
    file = path / PEFT_ADAPTER if path.is_dir() else path
    return SafetensorsFiles(file, [file]) if file.suffix == ".safetensors" and file.is_file() else None


def _starts_of_parts(layouts: Sequence[AdapterLayout], path: Path) -> dict[str, str]:
    """Part -> the start of its keys in a file that has several parts and nothing else; {} for any other."""
    known = {name: part for one in layouts[:1] for part, more in one.names.items() for name in (part, *more)}
    if not known or (file := _tensors_file(path)) is None:
        return {}
    names = [plain_name(name) for name in file.shapes]
    start = start_of_keys(names)
    found = {name: known[name] for name in known if any(n.startswith(f"{start}{name}.") for n in names)}
    starts = {part: f"{start}{name}." for name, part in found.items()}
    whole = all(name.startswith(tuple(starts.values())) for name in names)
    return starts if whole and len(found) == len(starts) > 1 else {}


def _is_of(layout: AdapterLayout, path: Path) -> bool:
    """Whether the name or header of a file, or of that in a PEFT folder, names this layout's part."""
    file = path / PEFT_ADAPTER if path.is_dir() else path
    if file.absolute().as_posix().endswith(f"/{layout.file}"):
        return True
    if not layout.part or (stored := _tensors_file(path)) is None:
        return False
    part = stored.metadata().get(PART)
    named = path.parent.name if path.name == PEFT_ADAPTER else path.stem
    return (part or _part_called(layout, named)) == layout.part


def modules_in(layout: AdapterLayout, names: Iterable[str], component: nn.Module, file: AdapterFile) -> Held:
    """The modules of a component or its part that a file contains, by the map that finds most of them.

    Args:
        layout: of the component or its part.
        names: paths of the component's linear layers.
        component: the component.
        file: the adapter.
    """
    own = _named(layout, component)
    return _fit(layout, names, own, _cut(layout, own, file))[0]


def _own(layout: AdapterLayout, names: Iterable[str]) -> list[str]:
    return [name for name in names if not layout.part or f"{name}.".startswith(f"{layout.part}.")]


def _named(layout: AdapterLayout, component: nn.Module) -> dict[str, tuple[int, ...]]:
    """The tensors of a component or its part, without those of adapters, and their shapes."""
    own = {base_name(n): p for n, p in component.named_parameters() if adapter_of(n) is None}
    return {name: tuple(own[name].shape) for name in _own(layout, own)}


def _fit(
    layout: AdapterLayout, linear: Iterable[str], tensors: Mapping[str, tuple[int, ...]], file: AdapterFile
) -> tuple[Held, Held]:
    """What a file contains of a component or its part, by the map that finds most: modules, and tensors that
    it adds to."""
    own, most = _own(layout, linear), 0
    best: tuple[Held, Held] = {}, {}
    for one in _maps(layout, file):
        found = _by_map(one, own, tensors, file), _added_by_map(one, tensors, file)
        if (count := len(found[0]) + len(found[1])) > most:
            best, most = found, count
        if most == len(file.scales) + len(file.added):
            break
    return best


def _maps(layout: AdapterLayout, file: AdapterFile) -> Iterator[AdapterLayout]:
    """The layout with each key map of its own and of other programs.

    `module_prefix` is what a module of another program around the model adds to all paths (`module.`).
    """
    sep = "_" if file.flat else "."
    paths = zip(*(module.split(sep) for module in file.scales or file.added), strict=False)
    common = [pieces[0] for pieces in takewhile(lambda pieces: len(set(pieces)) == 1, paths)]
    weights = {} if file.flat or layout.reading is None else file.weights()
    layout = replace(layout, flat=file.flat)
    for count in range(len(common) + 1):
        start = "".join(f"{piece}{sep}" for piece in common[:count])
        for keys in (layout.keys, *layout.others):
            yield replace(layout, keys=keys, module_prefix=start)
        if weights and layout.reading is not None:
            with suppress(ContractError):
                keys = layout.reading({name.removeprefix(start): shape for name, shape in weights.items()})
                yield replace(layout, keys=replace(keys, prefix=layout.keys.prefix), module_prefix=start)


def _added_by_map(layout: AdapterLayout, tensors: Mapping[str, tuple[int, ...]], file: AdapterFile) -> Held:
    """The tensors of a component that a file adds to: those that the map only renames."""
    added = {}
    for name, shape in tensors.items() if file.added else ():
        stored = layout.keys.renamed(name) or ""
        module, _, end = stored.rpartition(".")
        whole = stored  # its own path is that of a module if it is a parameter outside of modules
        if file.flat:
            module, whole = module.replace(".", "_"), stored.replace(".", "_")
        places = (f"{layout.module_prefix}{place}" for place in (f"{module}.{end}", f"{whole}.weight"))
        key = next((file.added[place] for place in places if place in file.added), None)
        if key is not None and file.added_shape(key) == shape:
            added[name] = file, key
    return added


def _shares(layout: AdapterLayout, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, range]]:
    """The modules that a map joins to larger ones: path -> path of the larger one in a file, and its rows."""
    with suppress(ContractError):
        found = shares_in(layout, tensors)
        return {name: (path_key(layout, share.stored), share.rows) for name, share in found.items()}
    return {}


def _cut(layout: AdapterLayout, tensors: Mapping[str, tuple[int, ...]], file: AdapterFile) -> AdapterFile:
    """A file whose LoRAs of modules that are several of the component's are one for each of those."""
    plain = {module for module, scale in file.scales.items() if scale.kind == "lora" and not scale.dora}
    for one in _maps(layout, file):
        if found := {share for share in _shares(one, tensors).values() if share[0] in plain}:
            return file.cut(found)
    return file


def _by_map(
    layout: AdapterLayout, names: Iterable[str], tensors: Mapping[str, tuple[int, ...]], file: AdapterFile
) -> Held:
    table: Held = {}
    holders: dict[str, str] = {}
    shares = _shares(layout, tensors)
    for name in names:
        try:
            stored = share_name(*shares[name]) if name in shares else module_key(layout, name)
        except ContractError:
            continue
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
