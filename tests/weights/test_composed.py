"""Composed key maps equal their two steps, for any box and in both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mm_core.errors import ContractError
from mm_core.weights import Fuse, KeyMap, Rename, Reshape, Split, Stack, Transpose, composed
from mm_core.weights.formats.key_map import Copy
from mm_core.weights.streaming import overlap, read_box
from mm_core.weights.writing import assemble

SHAPES = {"m.a.q": (4, 6), "m.a.k": (4, 6), "m.b.cube": (2, 6, 4), "m.b.plain": (4,), "m.scale": ()}


class Held:
    """Stored tensors in memory."""

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


def written(copies: list[Copy], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    held: dict[str, list[Copy]] = {}
    for copy in copies:
        held.setdefault(copy.stored, []).append(copy)
    return {name: assemble(of, tensors.__getitem__) for name, of in held.items()}


def rules(data, shapes: Mapping[str, tuple[int, ...]], mark: str) -> list:
    """Any rule for each tensor, with unique names."""
    found, left = [], dict(shapes)
    for name, shape in shapes.items():
        if name not in left:
            continue
        del left[name]
        alike = [other for other in left if left[other] == shape and shape]
        kinds = ["none", "rename"] + ["fuse"] * bool(alike)
        kinds += ["turn", "stack", "reshape"] * (len(shape) > 1)
        kinds += ["split"] * any(size % 2 == 0 for size in shape)
        kind = data.draw(st.sampled_from(kinds), label=f"{mark} {name}")
        goal = f"{mark}.{name}"
        if kind == "rename":
            found.append(Rename(name, goal))
        elif kind == "turn":
            found.append(Transpose(name, goal, tuple(data.draw(st.permutations(range(len(shape)))))))
        elif kind == "split":
            dim = data.draw(st.sampled_from([dim for dim, size in enumerate(shape) if size % 2 == 0]))
            found.append(Split(name, (f"{goal}.1", f"{goal}.2"), dim))
        elif kind == "stack":
            found.append(Stack(name, (f"{goal}.{{e}}",)))
        elif kind == "reshape":
            flat = prod(shape[1:])
            found.append(Reshape(name, goal, (2, flat // 2) if flat % 2 == 0 else (flat, 1)))
        elif kind == "fuse":
            other = data.draw(st.sampled_from(alike))
            del left[other]
            found.append(Fuse((name, other), goal, data.draw(st.integers(0, len(shape) - 1))))
    return found


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_two_maps_are_what_they_do_one_after_another(data):
    own = component()
    bare = {name.removeprefix("m."): shape for name, shape in SHAPES.items()}
    first = KeyMap(tuple(rules(data, bare, "x")), prefix="m.")
    between = first.stored_shapes(SHAPES)
    second = KeyMap(tuple(rules(data, between, "y")))
    both = composed(first, second)
    file = written(second.copies(between), written(first.copies(SHAPES), own))
    try:
        copies = both.copies(SHAPES)
    except ContractError as fault:
        assert "two key maps cannot be composed: the first reshapes" in str(fault)
        assert any(isinstance(rule, Reshape) for rule in first.rules)
        event("not a box")
        return
    event("composed")
    out = written(copies, own)
    assert out.keys() == file.keys()
    assert all(torch.equal(out[name], file[name]) for name in file)
    name = data.draw(st.sampled_from([name for name, shape in SHAPES.items() if shape]))
    place = []
    for size in SHAPES[name]:
        start = data.draw(st.integers(0, size - 1))
        place.append(slice(start, data.draw(st.integers(start + 1, size))))
    read = torch.full_like(own[name], float("nan"))
    for copy in copies:
        if copy.component == name and (region := overlap(copy, tuple(place))) is not None:
            assert read[region].isnan().all(), "every number once"
            read[region] = read_box(copy, Held(file), region)
    assert torch.equal(read[tuple(place)], own[name][tuple(place)])
    assert int(read.isnan().logical_not().sum()) == own[name][tuple(place)].numel(), "nothing else is read"
    for one in SHAPES:
        if (stored := both.renamed(one)) is not None:
            assert torch.equal(file[stored], own[one])


def test_slices_that_are_reshaped():
    """A dimension of length 1 before a different view."""
    both = composed(KeyMap((Stack("w", ("w.{e}",)),)), KeyMap((Reshape("w.{e}", "v.{e}", (2, 2)),)))
    shapes, own = {"w": (2, 3, 4)}, {"w": torch.arange(24.0).reshape(2, 3, 4)}
    copies = both.copies(shapes)
    file = written(copies, own)
    assert torch.equal(file["v.1"], own["w"][1].reshape(3, 2, 2))
    place = (slice(1, 2), slice(1, 3), slice(1, 4))
    (copy,) = (copy for copy in copies if copy.start[0] == 1)
    assert torch.equal(read_box(copy, Held(file), place), own["w"][place])


def test_three_maps_in_either_order():
    one = KeyMap((Rename("a.{i}", "b.{i}"), Fuse(("q", "k"), "qk")), prefix="m.")
    two = KeyMap((Rename("b.{i}", "c.{i}"), Transpose("qk", "kq")))
    three = KeyMap((Rename("c.{i}", "d.{i}"), Split("kq", ("l", "r"), dim=1)))
    shapes = {"m.a.0": (2,), "m.q": (2, 3), "m.k": (2, 3)}
    left = composed(composed(one, two), three).copies(shapes)
    assert left == composed(one, composed(two, three)).copies(shapes)
    assert {copy.stored for copy in left} == {"d.0", "l", "r"}
    assert composed(composed(one, two), three).renamed("m.a.7") == "d.7"


def test_what_either_ignores_is_ignored():
    first = KeyMap((Rename("w", "v"),), ignored=("rope.{t}", "fixed"))
    second = KeyMap((Rename("top.rope.{t}", "freqs.{t}"),), prefix="", ignored=("old",))
    both = composed(KeyMap(first.rules, ignored=("top.rope.{t}", "fixed")), second)
    assert all(both.ignores(name) for name in ("freqs.cos", "fixed", "old"))
    assert not any(both.ignores(name) for name in ("top.rope.cos", "v", "freqs"))


@pytest.mark.parametrize(
    ("rule", "work"),
    [
        (Transpose("v", "v", (1, 0, 2)), "permutes the dimensions of"),
        (Split("v", ("a", "b"), dim=1), "splits along a dimension other than its first"),
    ],
)
def test_what_cannot_be_composed_is_a_readable_error(rule, work):
    both = composed(KeyMap((Reshape("w", "v", (2, 3)),)), KeyMap((rule,)))
    what = f"two key maps cannot be composed: the first reshapes 'w' to 'v', which the second {work}"
    with pytest.raises(ContractError, match=re.escape(what)):
        both.copies({"w": (4, 6)})
