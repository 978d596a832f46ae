"""What holds for every checkpoint: whatever its tensors, its metrics and the byte that was damaged."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_core.checkpoint.files import layout
from mm_core.checkpoint.retention import Retention, complete_steps
from mm_core.checkpoint.store import CheckpointStore
from mm_core.errors import CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
NAMES = st.from_regex(r"[a-z][a-z_]{0,6}(\.[a-z0-9]{1,4}){0,3}", fullmatch=True)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any small tensor, also one without elements, one of a single number, and one that is not contiguous."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    found = torch.randint(0, 2, shape, generator=generator).to(draw(st.sampled_from(DTYPES)))
    if found.is_floating_point():
        found = torch.randn(shape, generator=generator, dtype=torch.float64).to(found.dtype)
    return found.t() if found.dim() == 2 and draw(st.booleans()) else found


STATES = st.fixed_dictionaries(
    {
        "model": st.dictionaries(NAMES, tensors(), min_size=1, max_size=5),
        "optimizer": st.dictionaries(NAMES, tensors(), max_size=3),
    }
)


@settings(max_examples=15)
@given(STATES, st.integers(0, 10**7))
def test_every_state_is_loaded_bit_for_bit(state, step):
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder) / "run", keep=1)
        path = store.save(step, state, {}, "run: {name: test}\n")
        into = {
            part: {name: torch.ones_like(tensor) for name, tensor in named.items()}
            for part, named in state.items()
        }
        store.load(path, into)
        store.close()
    for part, named in state.items():
        for name, tensor in named.items():
            assert into[part][name].dtype == tensor.dtype
            assert torch.equal(into[part][name], tensor)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, and its files' bytes."""
    store = CheckpointStore(tmp_path_factory.mktemp("properties") / "run", keep=1)
    state = {"model": {"weight": torch.arange(60.0).view(6, 10)}, "optimizer": {"step": torch.tensor(3)}}
    path = store.save(3, state, {"seed": 1}, "run: {name: test}\n")
    return store, path, state, {file: file.read_bytes() for file in sorted(path.iterdir()) if file.is_file()}


@settings(max_examples=80)
@given(st.data())
def test_every_changed_byte_is_noticed_before_a_tensor_is_touched(saved, data):
    store, path, state, contents = saved
    file = data.draw(st.sampled_from([file for file in contents if file.name != layout.CHECKSUMS]))
    place = data.draw(st.integers(0, len(contents[file]) - 1))
    change = data.draw(st.integers(1, 255))
    cut = data.draw(st.booleans())
    damaged = bytearray(contents[file])
    damaged[place] ^= change
    into = {part: {k: torch.full_like(v, 7) for k, v in named.items()} for part, named in state.items()}
    try:
        file.write_bytes(contents[file][:place] if cut else bytes(damaged))
        with pytest.raises(CheckpointError) as caught:
            store.load(path, into)
        assert file.name in str(caught.value)
    finally:
        file.write_bytes(contents[file])
    assert all((tensor == 7).all() for named in into.values() for tensor in named.values())


def stays(steps, values, keep, every, mode):
    """What stays after all saves, one after another, by the words of the documentation alone."""
    kept: list[int] = []
    for step in steps:
        kept = sorted([*kept, step])
        valued = [s for s in kept if values[s] is not None]
        best = None
        for s in valued:
            if best is None or (values[s] < values[best] if mode == "min" else values[s] > values[best]):
                best = s
        kept = [s for s in kept if s in kept[-keep:] or s == best or (every and s % every == 0)]
    return set(kept)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 40), unique=True, min_size=1, max_size=10).map(sorted),
    st.lists(st.one_of(st.none(), st.integers(-3, 3).map(float)), min_size=10, max_size=10),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from(["min", "max"]),
)
def test_what_stays_is_what_the_config_asks_for(steps, values, keep, every, mode):
    value = dict(zip(steps, values, strict=False))
    retention = Retention(keep, every, "loss", mode)
    with tempfile.TemporaryDirectory() as folder:
        for step in steps:
            path = Path(folder) / f"step_{step:08d}"
            path.mkdir()
            metrics = "{}" if value[step] is None else f'{{"loss": {value[step]}}}'
            (path / layout.FACTS).write_text(f'{{"step": {step}, "metrics": {metrics}}}')
            (path / layout.CHECKSUMS).write_text("{}")
            retention.remove(path, retention.name_best(path))
        assert set(complete_steps(Path(folder))) == stays(steps, value, keep, every, mode)
