"""Tensor names of Transformers models in files, where they differ from those in memory.

From 5.0 on the library renames, fuses and permutes tensors while loading (the experts of a mixture become
one tensor, a vision-language model's parts get other names), by a table for each family, and undoes this
while saving. Before that, some classes have a table of names (`_checkpoint_conversion_mapping`). Neither is
repeated here: the library's own conversion is run on probes (`traced`), to write the files of
`save_pretrained` and to read the files that `from_pretrained` reads. Only this module handles differences
between versions of the library.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mm_core.errors import ContractError
from mm_core.weights.formats.format import StoredTensors
from mm_core.weights.formats.key_map import Copy, KeyMap, Shape, whole
from mm_core.weights.formats.traced import Probe, Untraceable, component_from, stored_from

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

# Errors of a conversion that computes with a probe, that has no inverse, or that the library itself refuses.
_FAULTS = (Untraceable, TypeError, ValueError, NotImplementedError)


def keys_as_saved(model: PreTrainedModel, prefix: str = "") -> KeyMap:
    """The key map of a Transformers model to the names and tensors that `save_pretrained` writes.

    Args:
        model: may be on the meta device.
        prefix: start of the model's names in the component.

    Raises:
        ContractError: while saving, the library does more to a tensor than slicing, joining and permuting.
    """
    own = {name: Probe.of(name, tensor.shape) for name, tensor in model.state_dict().items()}
    with _own_classes(model):
        if not (loading := _loading_room()):
            names = {name: _older_name(model, name) for name in own}
            changed = any(name != stored for name, stored in names.items())
            renamed = {name: (whole(name, stored, own[name].shape),) for name, stored in names.items()}
            return KeyMap(prefix=prefix, placed=renamed if changed else {})
        try:
            found = loading.revert_weight_conversion(model, dict(own))
        except _FAULTS as fault:
            raise _beyond(model, "tensors", fault) from None
    if all(found.get(name) is probe for name, probe in own.items()):
        return KeyMap(prefix=prefix)
    placed: dict[str, list[Copy]] = {name: [] for name in own}
    for stored, probe in found.items():
        try:
            copies = stored_from(stored, probe)
        except Untraceable as fault:
            raise _beyond(model, probe.pieces[0].source, fault) from None
        for copy in copies:
            placed[copy.component].append(copy)
    return KeyMap(prefix=prefix, placed={name: tuple(copies) for name, copies in placed.items()})


def keys_as_loaded(model: PreTrainedModel, stored: StoredTensors) -> KeyMap:
    """The key map that `from_pretrained` applies to stored tensors of a Transformers model: see `keys_of`."""
    return keys_of(model, stored.shapes)


def keys_of(model: PreTrainedModel, shapes: Mapping[str, Shape]) -> KeyMap:
    """The key map that `from_pretrained` applies to tensors of these names and shapes.

    Files of other versions of the library, and of models with the same body, have names different from those
    that the model saves. Tensors that the library does not need are not in the map.

    Raises:
        ContractError: while loading, the library does more to a tensor than slicing, joining and permuting.
    """
    own = model.state_dict()
    probes = {name: Probe.of(name, shape) for name, shape in shapes.items()}
    placed = {}
    with _own_classes(model):
        if loading := _loading_room():
            found = _converted(loading, model, own, probes)
        else:
            table = getattr(type(model), "_checkpoint_conversion_mapping", {})
            found = {_replaced(table.items(), name): probe for name, probe in reversed(probes.items())}
        for name in (name for name in own if name in found):
            try:
                placed[name] = tuple(component_from(name, found[name], shapes))
            except Untraceable as fault:
                raise _beyond(model, name, fault) from None
    return KeyMap(placed=placed)


def _converted(
    loading: ModuleType, model: PreTrainedModel, own: Mapping[str, Tensor], probes: Mapping[str, Probe]
) -> dict[str, Probe]:
    """The model's tensors by name, converted from stored ones by the library's rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, Probe] = {}
    groups: dict[str, WeightConverter] = {}
    for name in sorted(probes, key=loading.dot_natural_key):
        given = (renamings, converters, model.base_model_prefix, own)
        renamed, pattern = loading.rename_source_key(name, *given)
        if renamed not in own and name in own:
            renamed, pattern = name, None
        if renamed in own and pattern is None:
            found.setdefault(renamed, probes[name])
        elif renamed in own:
            group = groups.setdefault(renamed, deepcopy(by_pattern[pattern]))
            group.add_tensor(renamed, name, pattern, [probes[name]].pop)
    for name, group in groups.items():
        try:
            made = group.convert(name, model=model, config=model.config)
        except _FAULTS as fault:
            raise _beyond(model, name, fault) from None
        made = made[0] if isinstance(made, tuple) else made  # 5.0 to 5.2 return errors beside it
        for target, probe in made.items():
            found.setdefault(target, probe[0] if isinstance(probe, list) else probe)
    return found


@contextmanager
def _own_classes(model: PreTrainedModel) -> Iterator[None]:
    """Restores the modules' own classes: the library finds rules by class, and FSDP2 derives new ones."""
    sharded: dict[object, type] = {m: type(m) for m in model.modules() if isinstance(m, FSDPModule)}
    try:
        for module, kind in sharded.items():
            module.__class__ = next(own for own in kind.__mro__ if not issubclass(own, FSDPModule))
        yield
    finally:
        for module, kind in sharded.items():
            module.__class__ = kind


def _loading_room() -> ModuleType | None:
    """The library's module with conversions; None before 5.0."""
    try:
        from transformers import core_model_loading
    except ImportError:
        return None
    room: ModuleType = core_model_loading
    return room


def _older_name(model: PreTrainedModel, name: str) -> str:
    """The stored name before 5.0: the class's table backwards, for classes that the library saves so."""
    listed = getattr(sys.modules["transformers.modeling_utils"], "VLMS", [])
    kinds = [kind.__name__.lower() for kind in type(model).__mro__[:-1]]
    if not any(part in kind for part in listed for kind in kinds):
        return name
    table = getattr(type(model), "_checkpoint_conversion_mapping", {})
    # A pattern becomes a name: anchors and look-aheads are removed.
    return _replaced(((now, re.sub(r"\(.*\)", "", was.lstrip("^"))) for was, now in table.items()), name)


def _replaced(table: Iterable[tuple[str, str]], name: str) -> str:
    """A name changed by the first pattern that matches it."""
    for pattern, replacement in table:
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name


def _beyond(model: PreTrainedModel, name: str, fault: Exception) -> ContractError:
    """The error for a conversion that a key map cannot express."""
    how = "has no inverse" if isinstance(fault, NotImplementedError) else f"calls {fault}"
    return ContractError(
        f"{type(model).__name__} changes {name} between memory and file by a conversion that {how}",
        accepted="conversions that rename, slice, join, stack or permute tensors",
        hint="use the format safetensors, which stores the names in memory",
    )
