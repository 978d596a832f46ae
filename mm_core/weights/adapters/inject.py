"""LoRA and DoRA in a component, by PEFT: added on the meta device, filled from files, listed for exports.

LoRA: Hu et al. 2021, https://arxiv.org/abs/2106.09685. DoRA: Liu et al. 2024,
https://arxiv.org/abs/2402.09353. The layers are PEFT's own.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.contracts import TaskModule
from mm_core.errors import CheckpointError, ContractError, PlanError, plural
from mm_core.modules.adapter_layers import (
    PARTS,
    adapted_layers,
    adapter_of,
    base_name,
    part_name,
    row_lengths,
)
from mm_core.modules.patterns import select_parameters
from mm_core.modules.tying import tied_names
from mm_core.weights.adapters.beside import BESIDE
from mm_core.weights.adapters.files import AdapterFile, AdapterScale
from mm_core.weights.adapters.kinds import Blocks
from mm_core.weights.adapters.locate import locate
from mm_core.weights.adapters.pissa import fill_start, start_of, starts_as_part, starts_in
from mm_core.weights.adapters.targets import KEY, scales_by_layer
from mm_core.weights.adapters.written import scale_settings
from mm_core.weights.fitting import Formats
from mm_core.weights.formats.format import StoredTensors
from mm_core.weights.formats.key_map import Copy, whole
from mm_core.weights.streaming import shard_of, stream

Structure = Mapping[str, Mapping[str, AdapterScale]]
"""Adapter -> path of a module in the task -> rank and scale."""


def add_adapters(
    task: TaskModule,
    adapters: Sequence[AdapterConfig],
    formats: Formats,
    beside: Sequence[str] = (),
    known: Structure | None = None,
) -> None:
    """Adds adapters (LoRA, DoRA) to a task's trained components, on the meta device, and freezes the rest.

    The component objects stay the same.

    Args:
        task: built, not yet planned.
        adapters: adapter sections of the config, in order; without any, nothing happens.
        formats: weight formats, for the names of the components' modules in adapter files.
        beside: patterns of modules or parameters that are trained in full.
        known: adapters of a resumed run, from its checkpoint: their initial files are not read again.

    Raises:
        PlanError: PEFT is not installed; targets or `beside` match nothing that can be trained so.
        CheckpointError: an initial adapter file cannot be read or does not fit.
    """
    if not adapters:
        return
    if reserved := [adapter.name for adapter in adapters if hasattr(nn.ModuleDict, adapter.name)]:
        raise PlanError(
            f"an adapter cannot be called {reserved[0]!r}: torch's modules use this name themselves",
            where=KEY,
            hint="choose a different name",
        )
    roots = task.trainable
    wanted: dict[str, list[tuple[AdapterConfig, dict[str, AdapterScale]]]] = {root: [] for root in roots}
    linear = {root: linear_layers(task.get_submodule(root)) for root in roots}
    layers = {f"{root}.{module}": (root, module) for root, modules in linear.items() for module in modules}
    for adapter in adapters:
        begun = (known or {}).get(adapter.name)
        if adapter.from_ is None:
            scales: Mapping[str, AdapterScale] = scales_by_layer(task, adapter, layers)
        elif begun is not None:
            _check_begun(adapter.name, begun, layers)
            scales = begun
        else:
            found = locate(task, adapter.from_, linear, formats)
            scales = {f"{found.root}.{n}": file.scales[stored] for n, (file, stored) in found.modules.items()}
        for root in roots:
            if held := {layers[path][1]: scales[path] for path in scales if layers[path][0] == root}:
                wanted[root].append((adapter, held))
    _check_kinds(scale for given in wanted.values() for _, held in given for scale in held.values())
    trained = {adapter.name for adapter in adapters if adapter.train}
    for root, given in wanted.items():
        component = task.get_submodule(root)
        _check_tied(root, component, {name: adapter.name for adapter, held in given for name in held})
        for adapter, held in given:
            _add(root, component, adapter, held)
        for layer in adapted_layers(component).values():
            layer.set_adapter(list(layer.adapter_scales))
        for name, parameter in component.named_parameters():
            place = adapter_of(name)
            parameter.requires_grad_(place is not None and place[2] in trained)
    _train_beside(task, beside)


def _check_kinds(scales: Iterable[AdapterScale]) -> None:
    """PlanError for adapters of several kinds: PEFT's layers of two kinds do not stack."""
    kinds = {scale.kind for scale in scales}
    if len(kinds) > 1:
        raise PlanError(
            f"this run has adapters of several kinds: {', '.join(sorted(kinds))}",
            where=KEY,
            accepted="one kind for all adapters of a run",
        )


def linear_layers(component: nn.Module) -> list[str]:
    """The paths of a component's linear layers, for adapters; an adapted one keeps its own path."""
    adapted = adapted_layers(component)
    inside = tuple(f"{path}." for path in adapted)
    return [
        path
        for path, module in component.named_modules()
        if path in adapted or (_callable(module) and not path.startswith(inside))
    ]


def _callable(module: nn.Module) -> bool:
    """Whether it is a linear layer that is called: nn.MultiheadAttention only reads the weight of its
    `out_proj`, so an adapter there would do nothing."""
    return isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)


def scales_of(component: nn.Module) -> dict[str, dict[str, AdapterScale]]:
    """The ranks and scales of a component's adapters: adapter -> adapted module -> its scale."""
    found: dict[str, dict[str, AdapterScale]] = {}
    for path, layer in adapted_layers(component).items():
        for name, scale in layer.adapter_scales.items():
            found.setdefault(name, {})[path] = scale
    return found


def _check_begun(name: str, held: Collection[str], layers: Collection[str]) -> None:
    """CheckpointError for an adapter of a resumed run in modules that are not linear layers of the task."""
    if absent := [path for path in held if path not in layers]:
        raise CheckpointError(
            f"{len(absent)} of the {plural(len(held), 'module')} that the adapter {name!r} has in the"
            f" checkpoint match no linear layer of this task: {', '.join(absent[:3])}",
            where=KEY,
            hint="configure the model with the same options as when the run started",
        )


def _train_beside(task: TaskModule, patterns: Sequence[str]) -> None:
    roots = task.trainable
    own = {
        base_name(path): (path, parameter)
        for root in roots
        for path, parameter in task.get_submodule(root).named_parameters(prefix=root)
        if adapter_of(path) is None
    }
    for name in select_parameters(patterns, own, BESIDE):
        path, parameter = own[name]
        if path != name:
            raise PlanError(
                f"{name} would be trained in full and has an adapter too",
                where=BESIDE,
                hint=f"leave it out of {BESIDE}, or out of the adapter's targets",
            )
        parameter.requires_grad_(True)


def _check_tied(root: str, component: nn.Module, adapters: Mapping[str, str]) -> None:
    """PlanError for a layer with an adapter whose weight is shared.

    Args:
        root: the component's name in the task.
        component: the component.
        adapters: module in the component -> adapter.
    """
    for name, first in tied_names(component).items():
        for one, other in ((name, first), (first, name)):
            if (module := one.removesuffix(".weight")) in adapters:
                raise PlanError(
                    f"{root}.{module} shares its weight with {root}.{other}; the adapter {adapters[module]!r}"
                    " of only one of them would make them differ",
                    where=KEY,
                    hint="leave it out of the adapter's targets, or build the model with untied weights",
                )


def _add(root: str, component: nn.Module, adapter: AdapterConfig, held: Mapping[str, AdapterScale]) -> None:
    """Adds an adapter to a component, a PiSSA with its start."""
    for dora in sorted({scale.dora for scale in held.values()}):  # a PEFT config has one setting for all
        alike = {path: scale for path, scale in held.items() if scale.dora is dora}
        _inject(component, adapter.name, alike, adapter.init, adapter.dropout)
    if starts_as_part(adapter.init):
        _check_ranks(root, component, held)
        _inject(component, start_of(adapter.name), held, adapter.init)


def _check_ranks(root: str, component: nn.Module, scales: Mapping[str, AdapterScale]) -> None:
    """PlanError for a PiSSA of a higher rank than its weight."""
    for path, scale in scales.items():
        layer: Any = component.get_submodule(path)
        if scale.rank > (most := min(layer.in_features, layer.out_features)):
            raise PlanError(
                f"{root}.{path} has {most} singular values, and the adapter's rank is {scale.rank}",
                where=KEY,
                hint="with init: pissa, set a lower rank for it (ranks), or leave it out (exclude)",
            )


def _inject(
    component: nn.Module, adapter: str, scales: Mapping[str, AdapterScale], init: str, dropout: float = 0.0
) -> None:
    """Replaces the modules in `scales` with PEFT's layers."""
    peft = _peft()
    # PEFT matches one text against complete paths, and a list against the ends of paths.
    kind = next(iter(scales.values())).kind
    given = scale_settings(scales) | {"target_modules": "|".join(map(re.escape, scales))}
    config = {"lora": peft.LoraConfig, "lokr": peft.LoKrConfig, "loha": peft.LoHaConfig}[kind](
        **given, **({"lora_dropout": dropout} if kind == "lora" else {})
    )
    with warnings.catch_warnings():
        # The config may set several adapters.
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
        peft.inject_adapter_in_model(config, component, adapter, low_cpu_mem_usage=True)
    layers = adapted_layers(component)
    for name, scale in scales.items():
        layer = layers[name]
        if scale.blocks is not None:
            _split(name, layer, adapter, scale.rank, scale.blocks)
        if layer.scaling[adapter] != scale.factor or layer.r[adapter] != scale.rank:
            raise ContractError(
                f"PEFT has given the adapter of {name} rank {layer.r[adapter]} and scale"
                f" {layer.scaling[adapter]:g}, but the config sets rank {scale.rank} and scale"
                f" {scale.factor:g}",
                where=f"adapter {adapter!r}",
                hint="install another version of PEFT: this one computes adapters differently",
            )
        known = dict(layer.__dict__)
        layer.adapter_scales = {**known.get("adapter_scales", {}), adapter: scale}
        layer.adapter_inits = {**known.get("adapter_inits", {}), adapter: init}


def _split(module: str, layer: Any, adapter: str, rank: int, blocks: Blocks) -> None:
    """Gives a LoKr in PEFT's layer matrices of other sizes than those of PEFT's one factor for all layers."""
    a, b, c, d = blocks
    if (layer.out_features, layer.in_features) != (a * c, b * d):
        raise CheckpointError(
            f"the LoKr of {module} is for a weight of {a * c} x {b * d}, but this one has"
            f" {layer.out_features} x {layer.in_features}",
            where=f"{KEY}: {adapter}",
            hint="the adapter is for a different model: use one trained for this model",
        )
    for held in (layer.get_submodule(part) for part in PARTS if part.startswith("lokr_")):
        if adapter in held:
            del held[adapter]
    with torch.device("meta"):
        layer.create_adapter_parameters(adapter, rank, ((a, c), (b, d)), True, rank >= max(c, d) / 2, False)


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as fault:
        raise PlanError(
            f"adapters need PEFT, which cannot be imported ({fault})",
            where=KEY,
            hint='pip install "mm-core[lora]"',
        ) from None
    return peft


# -- from files ----------------------------------------------------------------------------------


class AdapterWeights:
    """The initial weights of a task's adapters: read from their files, or computed from the base.

    Computed are magnitudes of new DoRAs (row lengths of the weights) and PiSSAs. Satisfies `WeightPlan`.

    Args:
        task: with its adapters in place.
        adapters: see `add_adapters`.
        formats: see `add_adapters`.

    Raises:
        CheckpointError: a stored tensor of a different shape.
    """

    def __init__(self, task: TaskModule, adapters: Sequence[AdapterConfig], formats: Formats) -> None:
        self.adapters = [adapter for adapter in adapters if adapter.from_ is not None]
        self._task = task
        self._pieces: list[tuple[Copy, StoredTensors]] = []
        self._computed: dict[str, tuple[AdapterFile, str]] = {}
        """What files hold in another form (ComfyUI's `dora_scale`, a first matrix of a LoKr as a product), by
        path in the task -> file and module there."""
        self.notes: list[str] = []
        """Sentences for the log on what is not applied as its name suggests."""
        self.added: dict[str, list[tuple[AdapterFile, str]]] = {}
        """Tensors of the base, by path in the task without adapters, and what adapters' files add to them."""
        roots = task.trainable
        linear = {root: linear_layers(task.get_submodule(root)) for root in roots} if self.adapters else {}
        for adapter in self.adapters:
            assert adapter.from_ is not None
            found = locate(task, adapter.from_, linear, formats)
            for tensor, (file, addition) in found.added.items():
                self.added.setdefault(f"{found.root}.{tensor}", []).append((file, addition))
            self.notes += [f"{adapter.from_}: {note}" for file in found.files for note in file.notes]
            for module, (file, stored) in found.modules.items():
                for part in PARTS:
                    key = file.keys.get((stored, part))
                    if key is not None and not part.startswith("lokr_w1_"):
                        name = part_name(f"{found.root}.{module}", part, adapter.name)
                        shape = tuple(file.stored.shapes[key])
                        self._pieces.append((whole(name, key, shape), file.stored))
                for key, part in (("dora_scale", "lora_magnitude_vector"), ("lokr_w1_b", "lokr_w1")):
                    if (stored, key) in file.keys:
                        name = part_name(f"{found.root}.{module}", part, adapter.name)
                        self._computed[name] = file, stored
        self.names = {copy.component for copy, _ in self._pieces}.union(self._computed)
        """The adapters' tensors that are in files, by path in the task."""
        known = {name: list(parameter.shape) for name, parameter in task.named_parameters()}
        given = [(copy.component, copy.stored, copy.stored_shape, held) for copy, held in self._pieces]
        for name, (file, module) in self._computed.items():
            given.append((name, module, file.computed_shape(module), file.stored))
        for name, key, shape, held in given:
            own = known.get(name)  # None: a LoKr of two factors and so high a rank is whole
            if own != list(shape):
                raise CheckpointError(
                    f"{key} has shape {list(shape)}, but {name} has {own or 'none'}",
                    where=str(held.where),
                    hint="the adapter is for a different model: use one trained for this model",
                )

    def fill(self, state: Mapping[str, Tensor], known: Collection[str] = ()) -> None:
        """Fills a task's adapters, after its other weights.

        Adds to the base what the files add; computes new PiSSAs and magnitudes of new DoRAs; then reads
        tensors from files.

        Args:
            state: tensors by path in the task.
            known: names filled before by other means; what is computed stays if it is among them.

        Raises:
            CheckpointError: a row of a weight under a new DoRA is zero.
        """
        begun = self.names.union(known)
        read = begun.difference(self._computed)
        with torch.no_grad():
            for name, tensor in state.items():
                share, box = shard_of(tensor) if base_name(name) in self.added else (tensor, ())
                for file, key in self.added.get(base_name(name), ()):
                    share += file.read_added(key, box).to(share)
            for module, adapter in starts_in(state):
                if part_name(module, "lora_A", start_of(adapter)) not in begun:
                    layer: Any = self._task.get_submodule(module)
                    fill_start(
                        state, module, adapter, layer.adapter_scales[adapter], layer.adapter_inits[adapter]
                    )
            for name, tensor in state.items():
                place = adapter_of(name)
                if place is not None and place[1] == "lora_magnitude_vector" and name not in read:
                    length, weight = shard_of(tensor)[0], shard_of(state[f"{place[0]}.base_layer.weight"])[0]
                    length.copy_(row_lengths(weight))
                    if bool((length == 0).any()):
                        raise CheckpointError(
                            f"some rows of {place[0]} are all zero, so they have no direction for DoRA",
                            where=KEY,
                            hint="leave the module out of the adapter's targets, or set dora: false",
                        )
            pieces = [(copy, held) for copy, held in self._pieces if copy.component in state]
            stream({copy.component: state[copy.component] for copy, _ in pieces}, pieces)
            for name, (file, module) in self._computed.items():
                if name in state:
                    _compute(state, name, file, module)


def _compute(state: Mapping[str, Tensor], name: str, file: AdapterFile, module: str) -> None:
    """Fills a tensor that is computed from a file's, and from the weight below it."""
    place = adapter_of(name)
    assert place is not None
    share, box = shard_of(state[name])
    if place[1] == "lokr_w1":
        share.copy_((file.read(module, "lokr_w1_a") @ file.read(module, "lokr_w1_b"))[box])
        return
    weight = shard_of(state[f"{place[0]}.base_layer.weight"])[0].cpu()  # some devices have no float64
    share.copy_(file.magnitude(module, weight, box[0]))
