"""Probes are sliced, joined and permuted like tensors, and record the place of every number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_core.weights.formats.traced import Probe, Untraceable, component_from, stored_from
from mm_core.weights.writing import assemble

DIMS = st.integers(0, 2)


def one_step(data, tensors: list, probes: list) -> None:
    """The same call on one of the tensors and its probe; the results are added to the rest."""
    place = data.draw(st.integers(0, len(tensors) - 1))
    tensor, probe = tensors[place], probes[place]
    dim = data.draw(st.integers(-tensor.dim(), tensor.dim() - 1)) if tensor.dim() else 0
    call = data.draw(st.sampled_from(["chunk", "unbind", "transpose", "split", "permute", "index", "cat"]))
    if not tensor.dim():
        return
    if call == "chunk":
        count = data.draw(st.integers(1, 3))
        made = [torch.chunk(x, count, dim=dim) for x in (tensor, probe)]
    elif call == "unbind":
        made = [x.unbind(dim) for x in (tensor, probe)]
    elif call == "split":
        length = data.draw(st.integers(1, tensor.shape[dim]))
        if length == tensor.shape[dim]:
            return
        made = [torch.split(x, [length, tensor.shape[dim] - length], dim=dim) for x in (tensor, probe)]
    elif call == "transpose":
        made = [[x.transpose(dim, 0).contiguous()] for x in (tensor, probe)]
    elif call == "permute":
        order = data.draw(st.permutations(range(tensor.dim())))
        made = [[x.permute(*order)] for x in (tensor, probe)]
    elif call == "index":
        number = data.draw(st.integers(0, tensor.shape[0] - 1))
        stop = data.draw(st.integers(1, 4))
        key = (number - tensor.shape[0], ..., slice(stop)) if tensor.dim() > 1 else number
        made = [[x[key]] for x in (tensor, probe)]
    else:
        other = data.draw(st.integers(0, len(tensors) - 1))
        if tensors[other].shape != tensor.shape or other == place:
            return
        made = [[torch.cat([held[place], held[other]], dim=dim)] for held in (tensors, probes)]
        tensors[place : place + 1], probes[place : place + 1] = made
        tensors.pop(other), probes.pop(other)
        return
    tensors[place : place + 1], probes[place : place + 1] = list(made[0]), list(made[1])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_is_made_of_a_component_is_found_in_it(data):
    """As a library saves: the recorded copies build the same tensors."""
    shapes = {f"t{i}": tuple(data.draw(st.tuples(*[st.integers(1, 4)] * 3))) for i in range(2)}
    own = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors, probes = list(own.values()), [Probe.of(name, shape) for name, shape in shapes.items()]
    for _ in range(data.draw(st.integers(0, 5))):
        one_step(data, tensors, probes)
    for tensor, probe in zip(tensors, probes, strict=True):
        assert probe.shape == tuple(tensor.shape)
        copies = stored_from("made", probe)
        assert {copy.stored_shape for copy in copies} == {tuple(tensor.shape)}
        assert torch.equal(assemble(copies, own.__getitem__), tensor)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_component_that_is_made_of_stored_tensors_is_found_in_them(data):
    """As a library loads: parts side by side, stacked, permuted."""
    count, parts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    size, dim, turn = data.draw(st.tuples(*[st.integers(1, 3)] * 2)), data.draw(DIMS), data.draw(DIMS)
    stored = {f"e{e}.{p}": torch.randn(size) for e in range(count) for p in range(parts)}

    def build(held):
        rows = [torch.stack([held[f"e{e}.{p}"] for e in range(count)], dim=dim) for p in range(parts)]
        return torch.transpose(torch.cat(rows, dim=1), turn, 0)

    made = build(stored)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    probe = build({name: Probe.of(name, shape) for name, shape in shapes.items()})
    assert probe.shape == tuple(made.shape)
    by_stored: dict[str, list] = {}
    for copy in component_from("own", probe, shapes):
        by_stored.setdefault(copy.stored, []).append(copy)
    found = {name: assemble(copies, lambda _: made) for name, copies in by_stored.items()}
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name].reshape(shapes[name]), stored[name]) for name in stored)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: x.reshape(6), "reshape"),
        (lambda x: x + 1, r"unsupported operand"),
        (lambda x: torch.add(x, x), "add"),
        (lambda x: x[::2], r"indexing by slice\(None, None, 2\)"),
        (lambda x: x[None], "indexing by None"),
        (lambda x: torch.cat([x, x[:, :1]]), r"cat of \[2, 3\], \[2, 1\] along 0"),
        (lambda x: x.chunk(2, 2), r"dimension 2 of \[2, 3\]"),
        (lambda x: x.narrow(1, 2, 2), "narrow of 2 from 2 of 3"),
        (lambda x: x.permute(0, 0), r"permute of \[2, 3\] by \(0, 0\)"),
        (lambda x: stored_from("x", torch.stack([x, x])), "stack"),
        (lambda x: component_from("x", x[0], {"t": (2, 3)}), "unbind"),
    ],
)
def test_what_has_no_place_is_named(call, says):
    with pytest.raises((Untraceable, TypeError), match=says):
        call(Probe.of("t", (2, 3)))
