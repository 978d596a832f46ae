"""Planning which tensors of a checkpoint go into which file of an export, from names and shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import torch
from torch import Tensor, nn

from mm_core.config.sections import RunConfig
from mm_core.contracts import TaskModule, WeightPlan
from mm_core.errors import ContractError, MMError
from mm_core.interchange.export_computed import Computed, alphas, joined_loras
from mm_core.interchange.export_values import Reader, addition_of, dora_scale_of, fetched
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.modules.adapter_layers import adapter_of, base_name, part_name, without_adapters
from mm_core.modules.tying import tied_names
from mm_core.plugin.registry import Registry
from mm_core.weights.adapters.beside import BESIDE, trained_beside
from mm_core.weights.adapters.files import AdapterScale
from mm_core.weights.adapters.inject import scales_of
from mm_core.weights.adapters.pissa import joined, side_by_side, start_of
from mm_core.weights.adapters.stored_names import (
    Share,
    addition_key,
    beside_key,
    shares_in,
    stored_key,
)
from mm_core.weights.adapters.written import adapter_files
from mm_core.weights.fitting import formats_of
from mm_core.weights.formats.format import (
    AdapterLayout,
    Companions,
    Layout,
    WeightFormat,
    divided,
    of_component,
)
from mm_core.weights.formats.key_map import Copy, whole
from mm_core.weights.writing import Shard, TensorSpec, assemble, plan_shards

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Scales = Mapping[str, Mapping[str, AdapterScale]]
"""Adapter -> adapted module -> its rank and scale."""


@dataclass(frozen=True)
class ExportPlan:
    """The plan of an export: all files that it writes.

    Attributes:
        planner: reads the checkpoint, and knows the weight format.
        config: the run's config.
        task: the run's task.
        parts: the files of each component or adapter.
        adapters_alone: whether only adapters are written, without the base weights.
        whole: whether the weights of all trained components are written.
        companions: further files beside the parts.
    """

    planner: Planner
    config: RunConfig
    task: TaskModule
    parts: Sequence[Part]
    adapters_alone: bool
    whole: bool
    companions: Companions = field(default_factory=Companions)


@dataclass(frozen=True)
class Part:
    """The exported files of one component, or of one of its adapters.

    Attributes:
        root: the component.
        layout: the layout of the files.
        shards: the files and their tensors.
        produce: returns each tensor of `shards` by its stored name.
        adapters: adapters in these files, or merged into their weights.
        computed: stored name of a tensor that is computed from the checkpoint's and the base's -> the name of
            the component's.
    """

    root: str
    layout: Layout
    shards: Sequence[Shard]
    produce: Callable[[str], Tensor]
    adapters: Scales
    computed: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> list[TensorSpec]:
        """All tensors in the exported files."""
        return [spec for shard in self.shards for spec in shard.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all exported files, without their headers."""
        return sum(spec.nbytes for spec in self.tensors)


def own_state(component: nn.Module) -> dict[str, Tensor]:
    """A component's parameters and buffers to export, by name; a shared one by its first name only."""
    tied = tied_names(component)
    return {name: tensor for name, tensor in component.state_dict().items() if name not in tied}


@dataclass(frozen=True)
class Planner:
    """Plans the exported files of components in one weight format.

    Attributes:
        registry: all weight formats, for errors that suggest a different one.
        label: qualified name of the format.
        form: the format.
        saved: the checkpoint.
        dtype: dtype of all floating-point parameters; None keeps the checkpoint's, and at least float32 where
            adapters are merged.
        limit: size of the largest file in bytes.
        tables: paths in the task of tensors that keep their dtype: buffers, which have the precision that
            their component needs.
        quantised: path in the task of each weight of a quantised base -> its kind.
        averaged: whether the weights are the moving average.
        begun: the values that tensors which adapters' files add to had in the base; None without such.
    """

    registry: Registry
    label: str
    form: WeightFormat
    saved: CheckpointSource
    dtype: torch.dtype | None
    limit: int
    tables: Collection[str] = ()
    quantised: Mapping[str, str] = field(default_factory=dict)
    averaged: bool = False
    begun: WeightPlan | None = None

    def weights(self, root: str, module: nn.Module) -> list[Part]:
        """Plans the export of a component's weights with its adapters merged: a part for each folder."""
        with without_adapters(module):
            layouts = of_component(self.form.layout(root, module))
            asked = (layout.refusal() for layout in layouts if layout.refusal is not None)
            refusal = next(filter(None, asked), "")
        if not layouts or any(layout.read_only for layout in layouts):
            raise self._cannot_hold(root, module)
        if refusal:
            raise MMError(
                f"{root}: {refusal}",
                where=f"--to {self.label}",
                accepted="core/safetensors, which can store any component with its own names",
            )
        own = {base_name(name): name for name in own_state(module) if adapter_of(name) is None}
        return [
            self._part(root, layout, {name: own[name] for name in names}, scales_of(module), self.limit)
            for layout, names in zip(layouts, divided(layouts, own), strict=True)
        ]

    def _part(
        self, root: str, layout: Layout, own: Mapping[str, str], scales: Scales, limit: int | None
    ) -> Part:
        """The part of one layout.

        Args:
            root: the component.
            layout: the layout of the files.
            own: a tensor's name in the plain component -> its name in the component with adapters.
            scales: adapters to merge.
            limit: size of the largest file in bytes; None for one file.
        """
        shapes = {name: self.saved.shapes[f"{root}.{path}"] for name, path in own.items()}
        dtypes = {name: self._cast(f"{root}.{path}", merged=bool(scales)) for name, path in own.items()}
        copies: dict[str, list[Copy]] = {}
        for copy in layout.keys.copies(shapes):
            copies.setdefault(copy.stored, []).append(copy)
        # Tensors stored as one get the widest of their dtypes.
        for held in copies.values():
            widest = reduce(torch.promote_types, (dtypes[copy.component] for copy in held))
            dtypes |= {copy.component: widest for copy in held}
        specs = [TensorSpec(n, dtypes[held[0].component], held[0].stored_shape) for n, held in copies.items()]
        read = Reader(self.saved, root, own, dtypes, scales, self.quantised)
        shards = plan_shards(specs, layout.stem, limit)
        return Part(
            root, layout, shards, lambda stored: assemble(copies[stored], read), _within(joined(scales), own)
        )

    def layouts(self, root: str, module: nn.Module) -> tuple[AdapterLayout, ...]:
        """The layouts of a component's adapters.

        Raises:
            MMError: the format cannot store them.
        """
        with without_adapters(module):
            found = of_component(self.form.adapter(root, module))
        if not found:
            raise self._cannot_hold(root, module, adapter=True)
        return found

    def adapters(self, root: str, module: nn.Module, changed: Sequence[str] = ()) -> Iterator[Part]:
        """Plans the export of a component's adapters without its weights: a part for each non-empty file.

        With several adapters, each has a folder of its name.

        Args:
            root: the component.
            module: the component, with its adapters.
            changed: its tensors that differ from the base, for layouts with additions.

        Raises:
            MMError: the format cannot store the adapters, or a module trained in full beside them.
        """
        adapters = joined(scales_of(module))
        layouts = self.layouts(root, module)
        beside = {} if layouts[0].additions else trained_beside(module)
        able = all(layout.additions or layout.config is not None for layout in layouts)
        if (beside or changed) and (len(adapters) > 1 or not able):
            raise _only_merged(
                f"{root}.{next(iter((*beside, *changed)))} is trained beside the adapters, but"
                f" {'this format' if len(adapters) == 1 else 'one of several adapters'} cannot contain it"
            )
        tensors: dict[tuple[str, str], dict[str, str]] = {}
        for name in own_state(module):
            if (place := adapter_of(name)) is not None:
                tensors.setdefault((place[2], place[0]), {})[place[1]] = name
        entire, apart = divided(layouts, beside), divided(layouts, changed)
        for adapter, scales in adapters.items():
            for layout, adapted, held, added in zip(
                layouts, divided(layouts, scales), entire, apart, strict=True
            ):
                if (held or added) and not adapted:
                    raise _only_merged(
                        f"{root}.{(held or added)[0]} is trained beside the adapter, but its file is not"
                        f" written since {root}.{layout.part} has no adapter"
                    )
                keys = {name: beside_key(layout, path, name) for path in held for name in beside[path]}
                starts: dict[str, str] = {}
                shares = _shares(layout, module)
                for path in (one for one in adapted if one not in shares):
                    computed = {"lora_magnitude_vector"} if layout.additions else set()
                    parts = [one for one in tensors[adapter, path].items() if one[0] not in computed]
                    keys |= {name: stored_key(layout, path, part) for part, name in parts}
                    begun = tensors.get((start_of(adapter), path), {})
                    starts |= {name: begun[part] for part, name in parts if part in begun}
                own = {path: scales[path] for path in adapted}
                shapes = {name: self.saved.shapes[f"{root}.{name}"] for name in keys}
                copies: dict[str, tuple[Copy, ...]] = {
                    name: (whole(name, key, shapes[name]),) for name, key in keys.items()
                }
                for name, start in starts.items():
                    copies |= side_by_side(name, start, keys[name], shapes[name])
                if adapted:
                    files = adapter_files(layout, copies, own, held, adapter if len(adapters) > 1 else "")
                    part = self._part(root, files, {name: name for name in copies}, {}, None)
                    more = alphas(part.tensors, layout, {p: s for p, s in own.items() if p not in shares})
                    more |= self._computed(root, layout, adapter, own, added, shares)
                    yield replace(_with(part, more), adapters={adapter: own})

    def _computed(
        self,
        root: str,
        layout: AdapterLayout,
        adapter: str,
        scales: Mapping[str, AdapterScale],
        added: Sequence[str],
        shares: Mapping[str, Share],
    ) -> dict[str, Computed]:
        """LoRAs of joined modules, and what is computed with the base's tensors: `dora_scale`, additions."""
        first, read = partial(self._first, root, adapter), partial(self._matrix, root, adapter)
        found = joined_loras(layout, scales, shares, first, read)
        for path, scale in scales.items() if layout.additions else ():
            if scale.dora:
                lengths = part_name(f"{root}.{path}", "lora_magnitude_vector", adapter)
                shape = (self.saved.shapes[lengths][0], 1)
                make = partial(dora_scale_of, self.saved, f"{root}.{path}", adapter, scale)
                key = stored_key(layout, path, "lora_magnitude_vector")
                found[key] = Computed(TensorSpec(key, self._cast(lengths), shape), make, path)
        for name in added:
            assert self.begun is not None
            path, key = f"{root}.{name}", addition_key(layout, base_name(name))
            spec = TensorSpec(key, self._cast(path), self.saved.shapes[path])
            found[key] = Computed(spec, partial(addition_of, self.saved, self.begun, path), name)
        return found

    def _matrix(self, root: str, adapter: str, module: str, part: str) -> Tensor:
        found = self.adapter(f"{root}.{module}", part, adapter)
        assert found is not None
        return found

    def _first(self, root: str, adapter: str, module: str) -> TensorSpec:
        """The first matrix of a LoRA, by its path in the task."""
        path = part_name(f"{root}.{module}", "lora_A", adapter)
        return TensorSpec(path, self._cast(path), self.saved.shapes[path])

    def check_nothing_beside(self, root: str, module: nn.Module) -> None:
        """Refuses to export only adapters if a component without adapters is trained in full.

        Raises:
            MMError: the component has a trained parameter.
        """
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise _only_merged(
                f"{root} is trained ({BESIDE}) but has no adapter, so no adapter file would contain it"
            )

    def adapter(self, module: str, part: str, name: str) -> Tensor | None:
        """An adapter's matrix in a module (path in the task), with the start of a PiSSA; None if absent."""
        own = self.read(part_name(module, part, name))
        start = self.read(part_name(module, part, start_of(name)))
        return own if own is None or start is None else torch.cat([own, start], int(part == "lora_B"))

    def read(self, path: str) -> Tensor | None:
        """A checkpoint's tensor by its path in the task, in the dtype to write; None if it has none."""
        if path not in self.saved.shapes:
            return None
        return fetched(self.saved, path, self._cast(path))

    def _cast(self, path: str, merged: bool = False) -> torch.dtype:
        kind = self.saved.dtypes[path]
        if kind not in _CASTABLE or path in self.tables:
            return kind
        # A merged weight is not a number of the base's dtype.
        return self.dtype or (torch.promote_types(kind, torch.float32) if merged else kind)

    def _cannot_hold(self, root: str, module: nn.Module, adapter: bool = False) -> MMError:
        with without_adapters(module):
            forms = formats_of(self.registry).items()
            able = [name for name, form in forms if _holds(form, root, module, adapter)]
            merged = adapter and _holds(self.form, root, module, adapter=False)
        return MMError(
            f"the format {self.label} cannot store {'an adapter of ' * adapter}{root!r},"
            f" of class {type(module).__name__}",
            where="--to",
            accepted=", ".join(sorted(able)) or "no installed format: install a plugin with one",
            hint="export merged weights (--merge-lora)" if merged else None,
        )


def _holds(form: WeightFormat, root: str, module: nn.Module, adapter: bool) -> bool:
    try:
        if adapter:
            return bool(form.adapter(root, module))
        layouts = of_component(form.layout(root, module))
        return bool(layouts) and not any(layout.read_only for layout in layouts)
    except ContractError:  # the format has no map for this model
        return False


def _only_merged(what: str) -> MMError:
    """The error for a module that no adapter file can contain."""
    return MMError(what, where="--to", hint="export merged weights (--merge-lora)")


def _shares(layout: AdapterLayout, component: nn.Module) -> Mapping[str, Share]:
    """The modules of a component that another program joins, in the layouts that can express it."""
    own = {base_name(n): p.shape for n, p in component.named_parameters() if adapter_of(n) is None}
    return shares_in(layout, own) if layout.alphas else {}


def _with(part: Part, computed: Mapping[str, Computed]) -> Part:
    """An adapter's part with further tensors."""
    (shard,) = part.shards
    specs = sorted(
        [*(one.spec for one in computed.values()), *shard.tensors], key=lambda s: -s.dtype.itemsize
    )

    def produce(name: str) -> Tensor:
        one = computed.get(name)
        return part.produce(name) if one is None else one.make().to(one.spec.dtype)

    names = {key: one.name for key, one in computed.items() if one.name}
    return replace(part, shards=[replace(shard, tensors=tuple(specs))], produce=produce, computed=names)


def _within(scales: Scales, names: Collection[str]) -> Scales:
    """The adapters that change a component's tensors with these names."""
    kept = {
        adapter: {module: scale for module, scale in held.items() if f"{module}.weight" in names}
        for adapter, held in scales.items()
    }
    return {adapter: held for adapter, held in kept.items() if held}
