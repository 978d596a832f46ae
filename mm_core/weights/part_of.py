"""One model out of the files of a larger one: the encoder of an encoder-decoder, a body without its heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mm_core.weights.format import (
    AdapterLayout,
    Companions,
    Layout,
    StoredTensors,
    WeightFormat,
    Written,
    of_component,
)
from mm_core.weights.key_map import Shape


class PartOf:
    """The stored tensors that may belong to a model, by the names that it knows them under.

    Args:
        stored: of the larger model.
        wanted: stored names that the model asks for.
        computed: stored names of tables that the model computes, which older files hold.

    A larger model stores its parts below a name (`bert.`), or at the top: where more of `wanted` is found
    counts. What then lies outside of the model's own top-level names is the larger model's.
    """

    def __init__(self, stored: StoredTensors, wanted: Collection[str], computed: Collection[str]) -> None:
        self.where = stored.where
        self._stored = stored
        tops = {name.partition(".")[0] for name in wanted}
        found = Counter({"": sum(name in wanted for name in stored.shapes)})
        for name in stored.shapes:
            first, dot, rest = name.partition(".")
            if rest in wanted:
                found[first + dot] += 1
        self._prefix = found.most_common(1)[0][0]
        names = (name[len(self._prefix) :] for name in stored.shapes if name.startswith(self._prefix))
        kept = [name for name in names if name.partition(".")[0] in tops and name not in computed]
        self.shapes: Mapping[str, Shape] = {name: stored.shapes[self._prefix + name] for name in kept}
        self.dtypes: Mapping[str, torch.dtype] = {name: stored.dtypes[self._prefix + name] for name in kept}
        self.others: Sequence[str] = ()

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a stored tensor."""
        return self._stored.read(self._prefix + name, box)


class FormatOfPart:
    """A weight format whose files may hold more than the component that is read. Satisfies `WeightFormat`."""

    def __init__(self, whole: WeightFormat, name: str, component: nn.Module) -> None:
        self._whole = whole
        layouts = of_component(whole.layout(name, component))
        shapes = {key: tuple(tensor.shape) for key, tensor in component.state_dict().items()}
        tables = {key: tuple(t.shape) for key, t in component.named_buffers() if key not in shapes}
        self._wanted = {stored for one in layouts for stored in one.keys.stored_shapes(shapes)}
        self._computed = {stored for one in layouts for stored in one.keys.stored_shapes(tables)}

    def recognises(self, path: Path) -> bool:
        """As the format does."""
        return self._whole.recognises(path)

    def folders(self, path: Path) -> Sequence[str]:
        """As the format has them."""
        return self._whole.folders(path)

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """The component's tensors alone."""
        return PartOf(self._whole.open(path, folder), self._wanted, self._computed)

    def layout(self, name: str, component: nn.Module) -> Layout | Sequence[Layout] | None:
        """As the format has it."""
        return self._whole.layout(name, component)

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | Sequence[AdapterLayout] | None:
        """As the format has it."""
        return self._whole.adapter(name, component)

    def companions(self, task: nn.Module, written: Sequence[Written]) -> Companions:
        """As the format has them."""
        return self._whole.companions(task, written)
