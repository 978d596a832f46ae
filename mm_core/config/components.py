"""The components that a config names, with their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from mm_core.errors import ContractError, MMError
from mm_core.files import absent
from mm_core.plugin.checks.inspection import component_faults, file_fault
from mm_core.schema.annotations import annotations_of
from mm_core.schema.fields import ComponentConfig, FromTask, Reads, Resume, yaml_key
from mm_core.schema.nodes import inside

if TYPE_CHECKING:
    from mm_core.config.sections import RunConfig
    from mm_core.plugin.registry import Registry


Mark = TypeVar("Mark", Resume, Reads, FromTask)


def walk_components(value: object, key: str = "") -> list[tuple[str, ComponentConfig]]:
    """Every component in a config value with its key path, outer components first."""
    found = [(key, value)] if isinstance(value, ComponentConfig) else []
    held = inside(value)
    items = held.items() if isinstance(held, dict) else enumerate(held or ())
    for name, item in items:
        found += walk_components(item, f"{key}.{name}" if key else str(name))
    return found


def resume_marks(config: RunConfig) -> dict[str, Resume]:
    """The mark of each key of a run's config whose field has one, by key path: `engine.param_dtype`."""
    return {key: mark for key, mark, _ in _marks(config, config.registry, "", Resume)}


def inputs_of(config: RunConfig) -> dict[str, list[str]]:
    """The paths that the dataset of each split reads, as its fields with a mark `Reads` name them; only of
    datasets with such fields."""
    found = {
        split: [path for _, _, value in _marks(section, config.registry, "", Reads) for path in _texts(value)]
        for split, section in config.data.splits.items()
    }
    return {split: paths for split, paths in found.items() if paths}


def with_task_values(config: RunConfig) -> RunConfig:
    """The config with datasets whose fields with a mark `FromTask`, where left out, have the task's value."""
    splits: dict[str, Any] = {}
    for split, dataset in config.data.splits.items():
        found = {
            key: config.task.options[mark.key]
            for key, mark, value in _marks(dataset, config.registry, "", FromTask)
            if value is None and mark.key in config.task.options
        }
        derived = (*dataset.derived, *found)
        splits[split] = replace(dataset, options={**dataset.options, **found}, derived=derived)
    return replace(config, data=replace(config.data, **splits))


def _texts(value: object) -> list[str]:
    """The texts and paths in a value, which may be a list or a mapping of them."""
    if isinstance(value, (str, Path)):
        return [str(value)]
    held = inside(value)
    items = held.values() if isinstance(held, dict) else held or ()
    return [text for item in items for text in _texts(item)]


def absent_inputs(config: RunConfig) -> dict[str, list[str]]:
    """Those paths of `inputs_of` at which nothing is, by split; only splits with some."""
    found = {split: [p for p in paths if absent(Path(p))] for split, paths in inputs_of(config).items()}
    return {split: paths for split, paths in found.items() if paths}


def absent_paths(config: RunConfig) -> list[str]:
    """The paths of all fields of a run's config with a mark `Reads` at which nothing is, without those of
    names on the hub: they are fetched."""
    marked = _marks(config, config.registry, "", Reads)
    paths = dict.fromkeys(path for _, _, value in marked for path in _texts(value))
    fetched = {str(use.name.path) for use in config.hub.values()}
    return [path for path in paths if path not in fetched and absent(Path(path))]


def _marks(
    value: object, registry: Registry, prefix: str, kind: type[Mark]
) -> Iterator[tuple[str, Mark, object]]:
    """The marks of a kind in a config value: the key of each, and the value that is marked."""
    cls: type = type(value)
    if isinstance(value, ComponentConfig):
        cls = registry.resolve(value.kind, value.type).config_class()
    held = inside(value)
    items = held if isinstance(held, dict) else {str(place): item for place, item in enumerate(held or ())}
    hints: dict[str, Any] = annotations_of(cls) if is_dataclass(cls) else {}
    marked = [(yaml_key(name), mark) for name, hint in hints.items() for mark in _of_hint(hint)]
    for key, mark in marked:
        if isinstance(mark, kind):
            yield prefix + key, mark, items.get(key)
    for name, item in items.items():
        yield from _marks(item, registry, f"{prefix}{name}.", kind)


def _of_hint(hint: Any) -> Iterator[object]:
    """All marks in a type: of itself, of the options of a union, of the items of a list or mapping."""
    for part in get_args(hint):
        yield part
        yield from _of_hint(part)


def option_faults(config: RunConfig) -> list[MMError]:
    """Errors outside the YAML that the checks of a config's components find, such as missing files."""
    found: list[MMError] = []
    for _, each in walk_components(config):
        found += config.registry.resolve(each.kind, each.type).option_faults(each.options)
    return found


def target_faults(config: RunConfig, *, import_targets: bool = False) -> list[MMError]:
    """Errors of the targets of a config's components: missing ones, members, arguments.

    The core's own components are left out: its tests check them. With the loader's mode `base` a dataset
    need not keep the contract.

    Args:
        config: the run's config.
        import_targets: import the targets, which finds more than their files show.
    """
    named = dict.fromkeys((each.kind, each.type) for _, each in walk_components(config))
    chosen = [each for each in (config.registry.resolve(*one) for one in named) if each.namespace != "core"]
    free = [each for each in chosen if each.kind == "dataset" and config.data.loader.mode == "base"]
    faults = [(each, file_fault(each)) for each in chosen]
    found = [
        fault for each, fault in faults if fault and not (each in free and isinstance(fault, ContractError))
    ]
    if found or not import_targets:
        return found
    return [
        ContractError(text)
        for each in chosen
        if each not in free
        for text in component_faults(each, import_targets=True)
    ]
