"""What of a checkpoint goes into which file of an export: planned from names and shapes, read one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import PurePath

import torch
from torch import Tensor, nn

from mm_core.errors import ContractError, MMError
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.modules.adapter_layers import adapter_of, base_name, row_lengths, without_adapters
from mm_core.modules.tying import tied_names
from mm_core.plugin.registry import Registry
from mm_core.runtime.ranks import Ranks
from mm_core.weights.adapters.files import (
    AdapterScale,
    beside_key,
    header_text,
    merge,
    peft_settings,
    stored_key,
)
from mm_core.weights.adapters.inject import BESIDE, scales_of, trained_beside
from mm_core.weights.fitting import formats_of
from mm_core.weights.formats.format import AdapterLayout, Layout, WeightFormat, divided, of_component
from mm_core.weights.formats.key_map import Copy
from mm_core.weights.writing import Shard, TensorSpec, assemble, plan_shards

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Scales = Mapping[str, Mapping[str, AdapterScale]]
"""Adapter -> adapted module -> how it counts."""


@dataclass(frozen=True)
class Part:
    """The files of one component, or of one adapter of it.

    root: the component. part: path of its sub-module, "" for all of it. folder, stem: of the files.
    produce: gives each tensor of `shards` by its stored name. texts: further files in `folder`. library,
    loading: as the layout says. adapters: those that the files hold, or that were merged into what they
    hold.
    """

    root: str
    folder: str
    stem: str
    shards: Sequence[Shard]
    produce: Callable[[str], Tensor]
    metadata: Mapping[str, str]
    texts: Mapping[str, str]
    library: str
    loading: str
    part: str = ""
    adapters: Scales = field(default_factory=dict)

    @property
    def tensors(self) -> list[TensorSpec]:
        """All that is written."""
        return [spec for shard in self.shards for spec in shard.tensors]

    @property
    def nbytes(self) -> int:
        """Of all its files, without their headers."""
        return sum(spec.nbytes for spec in self.tensors)


def own_state(component: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; one that several names share, by the first, as its library saves it."""
    tied = tied_names(component)
    return {name: tensor for name, tensor in component.state_dict().items() if name not in tied}


class Planner:
    """Plans the parts of components in one format.

    Args:
        registry: for the formats that could do what this one can not.
        label, form: the format and its qualified name.
        saved: the checkpoint.
        dtype: of all floating-point parameters; None keeps the checkpoint's.
        limit: most bytes of a file.
        tables: paths in the task of tensors that keep their dtype: buffers, which a component holds in the
            precision that it needs them in.
    """

    def __init__(
        self,
        registry: Registry,
        label: str,
        form: WeightFormat,
        saved: CheckpointSource,
        dtype: torch.dtype | None,
        limit: int,
        tables: Collection[str] = (),
    ) -> None:
        self._tables = tables
        self._registry, self._label, self._form = registry, label, form
        self._saved, self._dtype, self._limit = saved, dtype, limit

    def weights(self, root: str, module: nn.Module) -> list[Part]:
        """A component's weights, with its adapters in them: a part for each folder."""
        with without_adapters(module):
            layouts = of_component(self._form.layout(root, module))
            asked = (layout.refusal() for layout in layouts if layout.refusal is not None)
            refusal = next(filter(None, asked), "")
        if not layouts:
            raise self._cannot_hold(root, module)
        if refusal:
            raise MMError(
                f"{root}: {refusal}",
                where=f"--to {self._label}",
                accepted="core/safetensors, which holds any component under its own names",
            )
        own = {base_name(name): name for name in own_state(module) if adapter_of(name) is None}
        shares = divided(layouts, own)
        return [
            self._part(root, layout, {name: own[name] for name in names}, scales_of(module))
            for layout, names in zip(layouts, shares, strict=True)
        ]

    def _part(self, root: str, layout: Layout, own: Mapping[str, str], scales: Scales) -> Part:
        """own: a tensor's name in the component -> with its adapters."""
        shapes = {name: self._saved.shapes[f"{root}.{path}"] for name, path in own.items()}
        dtypes = {name: self._cast(f"{root}.{path}") for name, path in own.items()}
        copies: dict[str, list[Copy]] = {}
        for copy in layout.keys.copies(shapes):
            copies.setdefault(copy.stored, []).append(copy)
        # What is stored as one has one dtype: the widest of its parts.
        for held in copies.values():
            widest = reduce(torch.promote_types, (dtypes[copy.component] for copy in held))
            dtypes |= {copy.component: widest for copy in held}
        specs = [TensorSpec(n, dtypes[held[0].component], held[0].stored_shape) for n, held in copies.items()]
        read = _Reader(self._saved, root, own, dtypes, scales)
        return Part(
            root=root,
            part=layout.part,
            folder=layout.folder,
            stem=layout.stem,
            shards=plan_shards(specs, layout.stem, self._limit),
            produce=lambda stored: assemble(copies[stored], read),
            metadata=layout.metadata,
            texts=layout.texts,
            library=layout.library,
            loading=layout.loading,
            adapters=_within(scales, own),
        )

    def adapters(self, root: str, module: nn.Module) -> list[Part]:
        """A component's adapters alone, a part for each file; each adapter in a folder of its name where
        there are several."""
        scales = scales_of(module)
        with without_adapters(module):
            layouts = of_component(self._form.adapter(root, module))
        if not layouts:
            raise self._cannot_hold(root, module, adapter=True)
        beside = trained_beside(module)
        if beside and (len(scales) > 1 or any(layout.config is None for layout in layouts)):
            raise MMError(
                f"{root}.{next(iter(beside))} is trained beside the adapters, and"
                f" {'this format' if len(scales) == 1 else 'one of several'} can not hold it",
                where="--to",
                hint="export merged weights (--merge-lora)",
            )
        return [
            part
            for name, held in scales.items()
            for part in self._adapter_parts(
                root, module, layouts, name, held, name if len(scales) > 1 else "", beside
            )
        ]

    def check_nothing_beside(self, root: str, module: nn.Module) -> None:
        """MMError for a component without adapters that is trained in full beside those of another."""
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise MMError(
                f"{root} is trained ({BESIDE}) and has no adapter, so that no file of adapters holds it",
                where="--to",
                hint="export merged weights (--merge-lora)",
            )

    def _adapter_parts(
        self,
        root: str,
        module: nn.Module,
        layouts: Sequence[AdapterLayout],
        adapter: str,
        scales: Mapping[str, AdapterScale],
        folder: str,
        beside: Mapping[str, Sequence[str]],
    ) -> Iterator[Part]:
        """The files of one adapter: none for a part of the component in which nothing is adapted."""
        tensors: dict[str, list[str]] = {}
        for name in own_state(module):
            place = adapter_of(name)
            if place is not None and place[2] == adapter:
                tensors.setdefault(place[0], []).append(name)
        modules, whole = divided(layouts, scales), divided(layouts, beside)
        for layout, adapted, held in zip(layouts, modules, whole, strict=True):
            if held and not adapted:
                raise MMError(
                    f"{root}.{held[0]} is trained beside the adapter, and {root}.{layout.part}, whose file"
                    " would hold it, has none",
                    where="--to",
                    hint="export merged weights (--merge-lora)",
                )
            if adapted:
                names = {beside_key(layout, path, name): name for path in held for name in beside[path]}
                for path in adapted:
                    names |= {stored_key(layout, path, _adapter_place(n)): n for n in tensors[path]}
                own = {path: scales[path] for path in adapted}
                yield self._adapter(root, layout, adapter, own, folder, names, held)

    def _adapter(
        self,
        root: str,
        layout: AdapterLayout,
        adapter: str,
        scales: Mapping[str, AdapterScale],
        folder: str,
        names: Mapping[str, str],
        beside: Sequence[str],
    ) -> Part:
        """names: stored -> of the component."""
        paths = {stored: f"{root}.{name}" for stored, name in names.items()}
        dtypes = {name: self._cast(paths[stored]) for stored, name in names.items()}
        read = _Reader(self._saved, root, {name: name for name in dtypes}, dtypes, {})
        stem = PurePath(layout.file).name.removesuffix(".safetensors")
        specs = [
            TensorSpec(stored, dtypes[name], self._saved.shapes[paths[stored]])
            for stored, name in names.items()
        ]
        metadata, texts = {"format": "pt"}, {}
        if layout.metadata_key is not None:
            metadata[layout.metadata_key] = header_text(layout, scales)
        if layout.config is not None:
            texts[layout.config] = json.dumps(peft_settings(layout, scales, beside), indent=2) + "\n"
        return Part(
            root=root,
            part=layout.part,
            folder=str(PurePath(folder) / PurePath(layout.file).parent),
            stem=stem,
            shards=plan_shards(specs, stem),
            produce=lambda stored: read(names[stored]),
            metadata=metadata,
            texts=texts,
            library=layout.library,
            loading=layout.loading,
            adapters={adapter: scales},
        )

    def _cast(self, path: str) -> torch.dtype:
        kind = self._saved.dtypes[path]
        cast = self._dtype is not None and kind in _CASTABLE and path not in self._tables
        return self._dtype if cast else kind  # type: ignore[return-value]

    def _cannot_hold(self, root: str, module: nn.Module, adapter: bool = False) -> MMError:
        with without_adapters(module):
            forms = formats_of(self._registry).items()
            able = [name for name, form in forms if _holds(form, root, module, adapter)]
            merged = adapter and _holds(self._form, root, module, adapter=False)
        return MMError(
            f"the format {self._label} can not hold {'an adapter of ' * adapter}{root!r},"
            f" of class {type(module).__name__}",
            where="--to",
            accepted=", ".join(sorted(able)) or "no installed format can: a plugin offers one",
            hint="export merged weights (--merge-lora)" if merged else None,
        )


def _holds(form: WeightFormat, root: str, module: nn.Module, adapter: bool) -> bool:
    try:
        if adapter:
            return bool(of_component(form.adapter(root, module)))
        return bool(of_component(form.layout(root, module)))
    except ContractError:  # a model that the format has no map for
        return False


def _within(scales: Scales, names: Collection[str]) -> Scales:
    """Of the adapters, what changes a component's tensors of these names."""
    kept = {
        adapter: {module: scale for module, scale in held.items() if f"{module}.weight" in names}
        for adapter, held in scales.items()
    }
    return {adapter: held for adapter, held in kept.items() if held}


def _adapter_place(name: str) -> str:
    place = adapter_of(name)
    assert place is not None
    return place[1]


class _Reader:
    """A component's tensors from a checkpoint, one at a time, in the dtype that they are written in.

    paths: name -> the name in the component with its adapters. scales: of the adapters to merge.
    """

    def __init__(
        self,
        saved: CheckpointSource,
        root: str,
        paths: Mapping[str, str],
        dtypes: Mapping[str, torch.dtype],
        scales: Scales,
    ) -> None:
        self._saved, self._root, self._paths, self._dtypes, self._scales = saved, root, paths, dtypes, scales
        self._held: tuple[str, Tensor] | None = None

    def __call__(self, name: str) -> Tensor:
        """Keeps the last one: what is stored in several pieces is read once."""
        if self._held is None or self._held[0] != name:
            self._held = None  # freed before the next is allocated
            self._held = (name, self._read(name))
        return self._held[1]

    def _read(self, name: str) -> Tensor:
        path, dtype = self._paths[name], self._dtypes[name]
        module = name.removesuffix(".weight")
        merged = [(a, held[module]) for a, held in self._scales.items() if module in held and module != name]
        tensor = self._merged(module, path, merged).to(dtype) if merged else self._fetch(path, dtype)
        if dtype == torch.float16 and not bool(torch.isfinite(tensor).all()):
            raise MMError(
                f"{self._root}.{name} holds values that fp16 has no numbers for",
                where="--dtype",
                accepted="bf16, fp32",
            )
        return tensor

    def _merged(self, module: str, path: str, adapters: Sequence[tuple[str, AdapterScale]]) -> Tensor:
        """The weight in fp32 with its adapters in it, as PEFT's layer computes with all of them: a DoRA
        scales what came before it by lengths of the weight and its own change alone."""
        weight = total = self._fetch(path, torch.float32)
        for adapter, scale in adapters:
            first, second = (
                self._fetch(f"{module}.{part}.{adapter}.weight", torch.float32)
                for part in ("lora_A", "lora_B")
            )
            changed = merge(weight, first, second, scale)
            total = changed if total is weight else total + (changed - weight)
            if scale.dora:
                length = self._fetch(f"{module}.lora_magnitude_vector.{adapter}.weight", torch.float32)
                total = total * (length / row_lengths(changed))[:, None]
        return total

    def _fetch(self, name: str, dtype: torch.dtype) -> Tensor:
        path = f"{self._root}.{name}"
        target = torch.empty(self._saved.shapes[path], dtype=dtype)
        Ranks.current().agree(f"reading {path}", lambda: self._saved.fill({path: target}))
        return target
