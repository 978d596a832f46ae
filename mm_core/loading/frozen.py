"""Loading the weights of frozen components, sharded or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mm_core.config.sections import InitFromSection
from mm_core.contracts import (
    EnginePlan,
    FrozenPlan,
    InitialWeights,
    SelfLoading,
    Streamed,
    TaskModule,
    WeightPlan,
)
from mm_core.device import current_device
from mm_core.errors import ContractError
from mm_core.loading.left_out import ExternalWeights
from mm_core.loading.matching import WeightMatch
from mm_core.parallel.frozen_placement import place
from mm_core.plugin.registry import Registry, get_registry
from mm_core.weights.fitting import Formats, formats_of
from mm_core.weights.formats.part_of import FormatOfPart


class FrozenFiles:
    """The weights files of frozen components. Satisfies `InitialWeights`, for one component at a time.

    Args:
        components: `Streamed` components by their name in the task, built empty.
        registry: the components of the run's plugins.
        above: config key that contains the components, for hints.
    """

    def __init__(self, components: Mapping[str, nn.Module], registry: Registry, above: str = "task.") -> None:
        self._components, self._registry, self._above = components, registry, above

    def covers(self, state: Mapping[str, Tensor]) -> WeightPlan:
        """Finds the weights of a frozen component in its files, except unused tensors.

        Raises:
            CheckpointError: lists every name that does not fit.
        """
        name = next(iter(state), "").partition(".")[0]
        component: Any = self._components.get(name)
        if component is None or (given := component.weights_from) is None:
            return ExternalWeights()
        formats: Formats = formats_of(self._registry, given.format)
        if given.part:
            formats = {key: FormatOfPart(one, name, component) for key, one in formats.items()}
        exclude = tuple(f"{name}.{path}" for path in given.unused)
        wanted = InitFromSection(given.path, format=given.format, include=(name,), exclude=exclude)
        hint = f"{self._above}{name} (or its config.json)"
        return WeightMatch(wanted, state, {name: component}, formats, hint)


class FrozenPlacer(Protocol):
    """The parts of an engine that load frozen components."""

    device: torch.device

    def place_frozen(self, task: TaskModule, plan: EnginePlan, weights: InitialWeights) -> None: ...


def load_frozen_of(task: TaskModule, engine: FrozenPlacer, plan: EnginePlan, registry: Registry) -> None:
    """Loads the weights of a run's frozen components, placed by its engine. Call it on all ranks.

    Args:
        task: the run's task.
        engine: the run's engine, which gives the device and places the components.
        plan: the engine's plan, which contains the placement of each component.
        registry: the components of the run's plugins.
    """
    streamed = _prepared(task, engine.device)
    files = FrozenFiles(streamed, registry)
    engine.place_frozen(task, plan, files)


def load_frozen(
    component: nn.Module, device: torch.device | str | None = None, registry: Registry | None = None
) -> nn.Module:
    """Loads the full weights of a frozen component made by `build` onto a device; returns the component.

    Args:
        component: an autoencoder, text encoder or another frozen component; a loaded one is left unchanged.
        device: None for the device of this process.
        registry: the plugins, for formats of weights; None: the installed ones.

    Raises:
        CheckpointError: files that are missing, damaged, hostile or from a different model.
        ContractError: the component is not a frozen one.
    """
    where = current_device() if device is None else torch.device(device)
    if isinstance(component, SelfLoading) and not isinstance(component, Streamed):
        component.load(where)
        return component
    if not isinstance(component, Streamed):
        raise ContractError(
            f"{type(component).__name__} is not a frozen component",
            accepted="a component with the method load or build_empty",
        )
    if _is_loaded(component):
        return component
    component.build_empty()
    name = type(component).__name__
    files = FrozenFiles({name: component}, registry or get_registry(), above="")
    place(component, FrozenPlan(name, "replicated", (), 0, 0, 0), where, files)
    return component


def _prepared(task: TaskModule, device: torch.device) -> dict[str, nn.Module]:
    """Builds the components that mm_core fills and returns them; all others load their own weights."""
    streamed: dict[str, nn.Module] = {}
    for name in task.frozen:
        component = getattr(task, name)
        if isinstance(component, Streamed):
            component.build_empty()
            streamed[name] = component  # type: ignore[assignment]
        elif isinstance(component, SelfLoading):
            component.load(device)
    return streamed


def _is_loaded(component: nn.Module) -> bool:
    tensors = [*component.parameters(), *component.buffers()]
    return bool(tensors) and not any(tensor.is_meta for tensor in tensors)
