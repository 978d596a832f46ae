"""Reading one model from a larger one's files: an encoder of an encoder-decoder, a body without heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor, nn

from mm_core.errors import ContractError
from mm_core.weights.formats.format import StoredTensors, WeightFormat, of_component
from mm_core.weights.formats.key_map import Shape


class Below:
    """Stored tensors whose names begin with a prefix, without it.

    Args:
        stored: all tensors.
        prefix: text before the names that are wanted.
        keep: whether a name, without the prefix, is wanted.
    """

    others: Sequence[str] = ()

    def __init__(
        self, stored: StoredTensors, prefix: str, keep: Callable[[str], bool] = lambda name: True
    ) -> None:
        self.where, self._stored, self._prefix = stored.where, stored, prefix
        names = [name[len(prefix) :] for name in stored.shapes if name.startswith(prefix)]
        self.shapes: Mapping[str, Shape] = {
            name: stored.shapes[prefix + name] for name in names if keep(name)
        }
        self.dtypes: Mapping[str, torch.dtype] = {name: stored.dtypes[prefix + name] for name in self.shapes}

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a tensor, by its name without the prefix."""
        return self._stored.read(self._prefix + name, box)


class FormatOfPart:
    """A weight format whose files may contain more than the component: `open` selects its tensors.

    Everything else is the format's own. Satisfies `WeightFormat`.
    """

    def __init__(self, whole: WeightFormat, name: str, component: nn.Module) -> None:
        self.recognises, self.folders, self.layout = whole.recognises, whole.folders, whole.layout
        self.adapter, self.companions, self._open_whole = whole.adapter, whole.companions, whole.open
        self._layouts = of_component(whole.layout(name, component))
        shapes = {key: tuple(tensor.shape) for key, tensor in component.state_dict().items()}
        tables = {key: tuple(t.shape) for key, t in component.named_buffers() if key not in shapes}
        self._wanted = {stored for one in self._layouts for stored in one.keys.stored_shapes(shapes)}
        self._computed = {stored for one in self._layouts for stored in one.keys.stored_shapes(tables)}

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """Opens only the component's tensors in the weights files of a larger model.

        They are found by the component's own names, by the format's names for other files, or by its own
        names below one of the larger model (`bert.`): whichever finds most.
        """
        stored = self._open_whole(path, folder)
        ways = [(self._wanted, ""), (self._wanted_of_others(stored), "")]
        starts = dict.fromkeys(name.partition(".")[0] for name in stored.shapes)
        ways += [(self._wanted, f"{start}.") for start in starts]
        wanted, prefix = max(ways, key=lambda way: sum(way[1] + name in stored.shapes for name in way[0]))
        columns = zip(*(name.split(".") for name in wanted), strict=False)
        depth = 1 + sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        tops = {tuple(name.split(".")[:depth]) for name in wanted}  # what is outside belongs to the larger
        ends = tuple(f".{name}" for name in self._computed)

        def keep(name: str) -> bool:
            return tuple(name.split(".")[:depth]) in tops and not f".{name}".endswith(ends)

        return Below(stored, prefix, keep)

    def _wanted_of_others(self, stored: StoredTensors) -> set[str]:
        found: set[str] = set()
        for layout in self._layouts:
            if layout.reading is not None:
                with suppress(ContractError):  # reading the files reports the reason
                    placed = layout.reading(stored).placed.values()
                    found |= {copy.stored for copies in placed for copy in copies}
        return found
