"""Safetensors files written tensor by tensor: the library reads back every bit."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from mm_core.errors import MMError
from mm_core.weights import Fuse, KeyMap, Rename, Reshape, Split, Transpose, open_stored
from mm_core.weights.stored import DTYPES
from mm_core.weights.streaming import stream
from mm_core.weights.writing import TensorSpec, assemble, header, parse_size, plan_shards, write_shards


def bits(tensor: torch.Tensor) -> bytes:
    """Every bit, so that equal NaNs compare equal."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def draw(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Any bits at all, but for a bool, which has two values."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def write(folder: Path, tensors: dict[str, torch.Tensor], max_shard: int | None = None, **more) -> list[Path]:
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    shards = plan_shards(specs, "model", max_shard)
    return write_shards(folder, shards, tensors.__getitem__, **more)


@pytest.mark.parametrize("kind", DTYPES)
def test_the_library_reads_back_every_bit(kind, tmp_path):
    dtype = DTYPES[kind]
    tensors = {
        "matrix": draw(dtype, 5, 7),
        "turned": draw(dtype, 6, 4, seed=1).t(),
        "part": draw(dtype, 9, 3, seed=2)[2:5],
        "scalar": draw(dtype, 1, seed=3).reshape(()),
        "empty": torch.empty(0, 4, dtype=dtype),
    }
    (path,) = write(tmp_path, tensors, metadata={"format": "pt", "what": 'a "text" é'})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype and found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "what": 'a "text" é'}


def test_every_tensor_begins_at_a_multiple_of_its_item_size(tmp_path):
    """Tensors in a mapped file are aligned, so they can be used without a copy."""
    kinds = (torch.bool, torch.float32, torch.uint8, torch.float64, torch.bfloat16)
    tensors = {str(kind): draw(kind, 3) for kind in kinds}
    (path,) = write(tmp_path, tensors)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + size])
    assert (8 + size) % 8 == 0
    assert all(table[name]["data_offsets"][0] % t.dtype.itemsize == 0 for name, t in tensors.items())
    assert {name: bits(t) for name, t in load_file(path).items()} == {n: bits(t) for n, t in tensors.items()}


def test_shards_and_their_index(tmp_path):
    """20 bytes a file: a tensor that is larger has a file of its own."""
    tensors = {name: draw(torch.float32, size) for name, size in zip("abcde", (2, 3, 9, 1, 4), strict=True)}
    written = write(tmp_path, tensors, max_shard=20)
    assert [path.name for path in written] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert [sorted(load_file(path)) for path in written[:3]] == [["a", "b"], ["c"], ["d", "e"]]
    index = json.loads(written[3].read_text())
    assert index["metadata"] == {"total_size": 76}
    assert index["weight_map"]["c"] == "model-00002-of-00003.safetensors"
    stored = open_stored(tmp_path)
    assert all(bits(stored.read(name, (slice(None),))) == bits(tensor) for name, tensor in tensors.items())


def test_one_tensor_is_held_at_a_time(tmp_path):
    """Each tensor is released before the next is requested."""
    given_out: list[weakref.ref] = []

    def produce(name: str) -> torch.Tensor:
        assert all(reference() is None for reference in given_out)
        tensor = torch.ones(1000)
        given_out.append(weakref.ref(tensor))
        return tensor

    specs = [TensorSpec(f"t{i}", torch.float32, (1000,)) for i in range(5)]
    write_shards(tmp_path, plan_shards(specs, "model", 9000), produce)
    assert len(given_out) == 5


def test_nothing_is_written_over_a_file(tmp_path):
    write(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(FileExistsError):
        write(tmp_path, {"a": torch.zeros(2)})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.ones(2))


def test_a_dtype_that_such_files_do_not_have():
    with pytest.raises(MMError, match=r"a has dtype complex128, which a safetensors file cannot contain\n"):
        header([TensorSpec("a", torch.complex128, (2,))], {})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5_000_000_000),
        ("5GiB", 5 * 2**30),
        ("500MB", 500_000_000),
        ("1.5 kb", 1500),
        ("2TiB", 2**41),
        ("800", 800),
        (800, 800),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5GBs", "0", "0.0001", "5 apples", "1e9"])
def test_sizes_that_are_none(text):
    with pytest.raises(MMError, match=r"is not a file size\n  accepted: 5GB, 4.5GiB, 500MB, ..."):
        parse_size(text)


RULES = [
    Rename("a.weight", "b"),
    Transpose("a.weight", "b"),
    Transpose("conv", "b", (2, 0, 1)),
    Reshape("patch.weight", "b", (3, 2, 2)),
    Split("a.weight", ("q", "k")),
    Split("a.weight", ("q", "k", "v"), 1, (1, 2, 5)),
    Fuse(("q.weight", "k.weight", "v.weight"), "qkv"),
    Fuse(("q.weight", "k.weight"), "qk", 1),
]
SHAPES = {"a.weight": (6, 8), "conv": (2, 3, 4), "patch.weight": (5, 12)}
SHAPES |= {f"{name}.weight": (4, 6) for name in "qkv"} | {"other": (3,), "scalar": ()}


@settings(deadline=None, max_examples=60)
@given(rules=st.lists(st.sampled_from(RULES), unique=True, max_size=3), seed=st.integers(0, 2**16))
def test_what_is_assembled_reads_back_as_the_component(rules, seed, tmp_path_factory):
    """`stream` undoes `assemble`, whatever the map."""
    by_fusing = [rule.components if isinstance(rule, Fuse) else (rule.component,) for rule in rules]
    by_splitting = [rule.stored if isinstance(rule, Split) else (rule.stored,) for rule in rules]
    for sides in by_fusing, by_splitting:
        names = [name for side in sides for name in side]
        assume(len(names) == len(set(names)))
    tensors = {name: draw(torch.int32, *shape, seed=seed) for name, shape in SHAPES.items()}
    copies: dict[str, list] = {}
    for copy in KeyMap(tuple(rules)).copies(SHAPES):
        copies.setdefault(copy.stored, []).append(copy)
    folder = tmp_path_factory.mktemp("out")
    write(folder, {stored: assemble(held, tensors.__getitem__) for stored, held in copies.items()})
    stored = open_stored(folder)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    stream(targets, [(copy, stored) for held in copies.values() for copy in held])
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())
