"""The values of an exported tensor: a checkpoint's, with adapters merged into them, or against its base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mm_core.contracts import WeightPlan
from mm_core.errors import MMError
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.modules.adapter_layers import PARTS, part_name
from mm_core.modules.quantised import rounded
from mm_core.weights.adapters.comfyui import dora_scale
from mm_core.weights.adapters.files import AdapterScale, merge
from mm_core.weights.adapters.kinds import change_of


@dataclass
class Reader:
    """Reads a component's tensors from a checkpoint, one at a time, in the dtype to write.

    Attributes:
        paths: name -> the name in the component with its adapters.
        scales: adapters to merge.
        quantised: see `Planner`.
    """

    saved: CheckpointSource
    root: str
    paths: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]
    scales: Mapping[str, Mapping[str, AdapterScale]]
    quantised: Mapping[str, str]
    held: tuple[str, Tensor] | None = None

    def __call__(self, name: str) -> Tensor:
        """Keeps the last tensor, so that one stored in several pieces is read once."""
        if self.held is None or self.held[0] != name:
            self.held = None  # freed before the next is allocated
            self.held = (name, self._read(name))
        return self.held[1]

    def _read(self, name: str) -> Tensor:
        path, dtype = self.paths[name], self.dtypes[name]
        module = name.removesuffix(".weight")
        merged = [(a, held[module]) for a, held in self.scales.items() if module in held and module != name]
        whole = f"{self.root}.{path}"
        kind = self.quantised.get(whole)
        # In the run's own dtype first: its base may be rounded.
        tensor = fetched(self.saved, whole, torch.float32 if kind else self.saved.dtypes[whole])
        if kind is not None:
            tensor = rounded(tensor, kind)
        if merged:
            place = f"{self.root}.{module}"
            adapters = ((scale, adapter_parts(self.saved, place, adapter)) for adapter, scale in merged)
            tensor = merge(tensor, adapters)
        tensor = tensor.to(dtype)
        if dtype == torch.float16 and not bool(torch.isfinite(tensor).all()):
            raise MMError(
                f"{self.root}.{name} contains values outside the range of fp16",
                where="--dtype",
                accepted="bf16, fp32",
            )
        return tensor


def dora_scale_of(saved: CheckpointSource, module: str, adapter: str, scale: AdapterScale) -> Tensor:
    """ComfyUI's `dora_scale` of a module (path in the task) with a DoRA, by its weight in the run's dtype."""
    parts, path = adapter_parts(saved, module, adapter), f"{module}.base_layer.weight"
    weight = fetched(saved, path, saved.dtypes[path])
    return dora_scale(parts.pop("lora_magnitude_vector"), weight, scale.factor * change_of(parts))


def addition_of(saved: CheckpointSource, begun: WeightPlan, path: str) -> Tensor:
    """What a checkpoint's tensor (path in the task) has more than the base as the run read it."""
    start = torch.empty(saved.shapes[path], dtype=saved.dtypes[path])
    begun.fill({path: start})
    return fetched(saved, path, torch.float32) - start.float()


def adapter_parts(saved: CheckpointSource, module: str, adapter: str) -> dict[str, Tensor]:
    """The tensors of an adapter in a module (path in the task), by part."""
    paths = {part: part_name(module, part, adapter) for part in PARTS}
    held = {part: path for part, path in paths.items() if path in saved.shapes}
    return {part: fetched(saved, path, torch.float32) for part, path in held.items()}


def fetched(saved: CheckpointSource, path: str, dtype: torch.dtype) -> Tensor:
    """A tensor of a checkpoint by its path in the task. Call it on all ranks."""
    target = torch.empty(saved.shapes[path], dtype=dtype)
    saved.ranks.agree(f"reading {path}", lambda: saved.fill({path: target}))
    return target
