"""What a run changed in its base beside its adapters, for files that contain additions to the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from mm_core.checkpoint.reading import StoredRun
from mm_core.contracts import TaskModule
from mm_core.errors import MMError, plural
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.loading.left_out import ExternalWeights, WeightSources, frozen_names
from mm_core.modules.adapter_layers import base_name
from mm_core.weights.adapters.beside import trained_whole
from mm_core.weights.adapters.inject import scales_of


def any_dora(modules: Mapping[str, nn.Module]) -> bool:
    """Whether an adapter in these components is a DoRA."""
    held = (scales for module in modules.values() for scales in scales_of(module).values())
    return any(scale.dora for scales in held for scale in scales.values())


def changed_in(run: StoredRun, task: TaskModule, adapted: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """The tensors of components with adapters that differ from the base: those trained in full, and those to
    which an adapter's file added.

    Raises:
        MMError: one of these is a weight with an adapter, of which ComfyUI would apply only one.
    """
    held = _added_to_base(run, task)
    if any(name.endswith(".base_layer.weight") for name in held):
        check_base_in_files(run, task)
    found = {}
    for root, module in adapted.items():
        added = sorted(name for name in held if name.startswith(f"{root}."))
        found[root] = [*trained_whole(module), *(name.removeprefix(f"{root}.") for name in added)]
    return found


def check_base_in_files(run: StoredRun, task: TaskModule) -> None:
    """MMError for adapters from a file with additions to the base, which their own file would lack."""
    if held := _added_to_base(run, task):
        raise MMError(
            f"the file that an adapter of this run started from also adds to {plural(len(held), 'weight')} of"
            f" the base, such as {base_name(min(held))}, and an adapter's file does not contain those",
            where="--to",
            hint="export merged weights (--merge-lora)",
        )


def begun_in(
    sources: WeightSources,
    saved: CheckpointSource,
    base: ExternalWeights,
    changed: Mapping[str, Sequence[str]],
) -> ExternalWeights:
    """The values that changed tensors have in the files that the run started from.

    Raises:
        MMError: no file has one of them.
    """
    names = {f"{root}.{name}" for root, held in changed.items() for name in held}
    begun = sources.started(saved, base, names)
    if lost := sorted(names - begun.names):
        raise MMError(
            f"{base_name(lost[0])} is trained beside the adapters, but no file that the run started from has"
            " it, so there is nothing that this file could add to",
            where="--to",
            hint="export merged weights (--merge-lora)",
        )
    return begun


def _added_to_base(run: StoredRun, task: TaskModule) -> set[str]:
    """The tensors of the base that differ from its files by additions in the file of an adapter."""
    if not run.checkpoint.external or all(a.from_ is None for a in run.config.train.adapters):
        return set()
    return frozen_names(task) & set(run.checkpoint.names("model"))
