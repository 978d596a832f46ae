"""Key maps: every number has one place on each side, for any box and in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_core.errors import ContractError
from mm_core.weights import Fuse, KeyMap, Rename, Reshape, Split, Stack, Transpose
from mm_core.weights.streaming import overlap, read_box
from mm_core.weights.writing import assemble

MAP = KeyMap(
    (
        Fuse(("blocks.{i}.q.{p}", "blocks.{i}.k.{p}", "blocks.{i}.v.{p}"), "layers.{i}.qkv.{p}"),
        Split("blocks.{i}.gate_up", ("layers.{i}.gate", "layers.{i}.up")),
        Split("blocks.{i}.cut", ("layers.{i}.short", "layers.{i}.long"), dim=1, sizes=(1, 3)),
        Transpose("blocks.{i}.conv1d", "layers.{i}.conv1d"),
        Transpose("turned", "turned", dims=(2, 0, 1)),
        Reshape("patch.weight", "patch.weight", (2, 1, 2, 2)),
        Rename("head.{rest...}", "lm.head.{rest...}"),
        Stack("blocks.{i}.experts.down", ("layers.{i}.mlp.{e}.w2",)),
        Stack("blocks.{i}.experts.gate_up", ("layers.{i}.mlp.{e}.w1", "layers.{i}.mlp.{e}.w3")),
        Stack("blocks.{i}.experts.cut", ("layers.{i}.{n}.a", "layers.{i}.{n}.b"), 1, (1, 3), index="n"),
        Stack("blocks.{i}.experts.bias", ("layers.{i}.mlp.{e}.bias",)),
    ),
    prefix="model.",
    ignored=("rope.{table}",),
)
SHAPES = {
    f"model.{name}": shape
    for name, shape in {
        "blocks.0.q.weight": (4, 6),
        "blocks.0.k.weight": (2, 6),
        "blocks.0.v.weight": (2, 6),
        "blocks.0.q.bias": (4,),
        "blocks.0.k.bias": (2,),
        "blocks.0.v.bias": (2,),
        "blocks.0.gate_up": (6, 5),
        "blocks.0.cut": (3, 4),
        "blocks.0.conv1d": (3, 5),
        "turned": (2, 3, 4),
        "patch.weight": (7, 8),
        "head.a.b.weight": (2, 2),
        "blocks.0.experts.down": (3, 5, 2),
        "blocks.0.experts.gate_up": (3, 4, 5),
        "blocks.1.experts.cut": (2, 3, 4),
        "blocks.1.experts.bias": (2, 3),
        "scale": (),
        "untouched.weight": (3,),
    }.items()
}


class Held:
    """Stored tensors in memory, with the interface of files."""

    where = Path("memory")
    others = ()

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def read(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        return self.tensors[name][box]


def component() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def stored() -> dict[str, torch.Tensor]:
    """The stored tensors, written by hand without the map."""
    own = {name.removeprefix("model."): tensor for name, tensor in component().items()}
    return {
        "layers.0.qkv.weight": torch.cat([own[f"blocks.0.{x}.weight"] for x in "qkv"]),
        "layers.0.qkv.bias": torch.cat([own[f"blocks.0.{x}.bias"] for x in "qkv"]),
        "layers.0.gate": own["blocks.0.gate_up"][:3],
        "layers.0.up": own["blocks.0.gate_up"][3:],
        "layers.0.short": own["blocks.0.cut"][:, :1],
        "layers.0.long": own["blocks.0.cut"][:, 1:],
        "layers.0.conv1d": own["blocks.0.conv1d"].T,
        "turned": own["turned"].permute(1, 2, 0),  # whose permute(2, 0, 1) is the component's
        "patch.weight": own["patch.weight"].reshape(7, 2, 1, 2, 2),
        "lm.head.a.b.weight": own["head.a.b.weight"],
        **{f"layers.0.mlp.{e}.w2": own["blocks.0.experts.down"][e] for e in range(3)},
        **{f"layers.0.mlp.{e}.w1": own["blocks.0.experts.gate_up"][e, :2] for e in range(3)},
        **{f"layers.0.mlp.{e}.w3": own["blocks.0.experts.gate_up"][e, 2:] for e in range(3)},
        **{f"layers.1.{e}.a": own["blocks.1.experts.cut"][e, :, :1] for e in range(2)},
        **{f"layers.1.{e}.b": own["blocks.1.experts.cut"][e, :, 1:] for e in range(2)},
        **{f"layers.1.mlp.{e}.bias": own["blocks.1.experts.bias"][e] for e in range(2)},
        "scale": own["scale"],
        "untouched.weight": own["untouched.weight"],
    }


def test_the_shapes_in_the_file_follow_from_those_of_the_component():
    assert MAP.stored_shapes(SHAPES) == {name: tuple(tensor.shape) for name, tensor in stored().items()}


def test_every_tensor_is_put_together_from_the_file():
    file, own = Held(stored()), component()
    found = {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
    for copy in MAP.copies(SHAPES):
        box = tuple(slice(s, s + n) for s, n in zip(copy.start, copy.size, strict=True))
        found[copy.component][box] = read_box(copy, file, box)
    assert all(torch.equal(found[name], own[name]) for name in own)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_box_of_a_tensor_is_read_alone(data):
    file, own = Held(stored()), component()
    name = data.draw(st.sampled_from([name for name, shape in SHAPES.items() if shape]))
    place = []
    for size in SHAPES[name]:
        start = data.draw(st.integers(0, size - 1))
        place.append(slice(start, data.draw(st.integers(start + 1, size))))
    found = torch.full_like(own[name], float("nan"))
    for copy in MAP.copies(SHAPES):
        if copy.component == name and (region := overlap(copy, tuple(place))) is not None:
            found[region] = read_box(copy, file, region)
    assert torch.equal(found[tuple(place)], own[name][tuple(place)])
    assert int(found.isnan().logical_not().sum()) == own[name][tuple(place)].numel(), "nothing else is read"


def test_the_file_is_put_together_from_the_component():
    """The tensors that `assemble` writes, for all rules."""
    own = component()
    held: dict[str, list] = {}
    for copy in MAP.copies(SHAPES):
        held.setdefault(copy.stored, []).append(copy)
    for name, tensor in stored().items():
        assert torch.equal(assemble(held.pop(name), own.__getitem__), tensor), name
    assert not held


def test_a_map_reports_what_it_cannot_map():
    with pytest.raises(ContractError, match="do not have the same braces"):
        KeyMap((Rename("blocks.{i}.w", "layers.{j}.w"),))
    with pytest.raises(ContractError, match="do not have the same braces, or contain a name twice"):
        KeyMap((Split("a", ("b", "b")),))
    fused = KeyMap((Fuse(("q", "k"), "qk"),))
    with pytest.raises(ContractError, match="'k' is missing: it is stored together with 'q'"):
        fused.copies({"q": (2, 2)})
    with pytest.raises(ContractError, match="q, k do not fit side by side along dimension 0"):
        fused.copies({"q": (2, 2), "k": (2, 3)})
    with pytest.raises(ContractError, match="does not fit 'w' of shape"):
        KeyMap((Reshape("w", "w", (3,)),)).copies({"w": (2, 4)})
    with pytest.raises(ContractError, match="does not fit 'w' of shape"):
        KeyMap((Split("w", ("a", "b")),)).copies({"w": (3, 4)})
    with pytest.raises(ContractError, match=r"Stack\(.* does not fit 'w' of shape \[3\]"):
        KeyMap((Stack("w", ("w.{e}",)),)).copies({"w": (3,)})
    with pytest.raises(ContractError, match=r"Stack\(.* does not fit 'w' of shape \[4, 3\]"):
        KeyMap((Stack("w", ("w.{e}.a", "w.{e}.b"), dim=1),)).copies({"w": (2, 4, 3)})
    with pytest.raises(ContractError, match="do not have the same braces"):
        KeyMap((Stack("w", ("w.{n}",)),))
    with pytest.raises(ContractError, match="do not have the same braces"):
        KeyMap((Stack("w", ("w",)),))
    with pytest.raises(ContractError, match="does not fit 'w' of 3 dimensions"):
        KeyMap((Transpose("w", "w"),)).copies({"w": (3, 4, 2)})
    with pytest.raises(ContractError, match="two tensors of the component would be stored as 'b'"):
        KeyMap((Rename("a", "b"),)).copies({"a": (2,), "b": (2,)})
    with pytest.raises(ContractError, match=r"'a' cannot be renamed: only names that begin with 'model\."):
        KeyMap(prefix="model.").copies({"a": (2,)})


def test_ignored_names_are_those_of_the_file():
    assert MAP.ignores("rope.cos") and not MAP.ignores("rope.cos.x") and not MAP.ignores("scale")
