"""What holds whenever weights are compared with a task: each name is in one list, and prefixes are undone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mm_core.config.sections import InitFromSection
from mm_core.errors import CheckpointError
from mm_core.loading.matching import WeightMatch, renamed
from mm_core.loading.mismatch import likely_prefix

NAMES = st.from_regex(r"[a-z]{1,3}(\.[a-z0-9]{1,3}){0,3}", fullmatch=True)
SHAPES = st.sampled_from([(2,), (3,), (2, 3), ()])
WEIGHTS = st.dictionaries(NAMES, SHAPES, min_size=1, max_size=8)


def tensors(shapes, start=0.0):
    return {name: torch.full(shape, start + place) for place, (name, shape) in enumerate(shapes.items())}


@settings(max_examples=60)
@given(WEIGHTS, WEIGHTS, st.booleans())
def test_every_name_is_loaded_missing_or_unexpected_and_nothing_else_is_touched(task, stored, strict):
    both = task.keys() & stored.keys()
    wrong = {name for name in both if task[name] != stored[name]}
    into, held = tensors(task, 100.0), tensors(stored)
    fits = bool(both) and not wrong and not (strict and task.keys() != stored.keys())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_file(held, path)
        init = InitFromSection(path=str(path), strict=strict)
        if not fits:
            with pytest.raises(CheckpointError) as caught:
                WeightMatch(init, into)
            if wrong:
                assert all(f"{name} (" in str(caught.value) for name in sorted(wrong)[:1])
            assert all(torch.equal(into[name], tensor) for name, tensor in tensors(task, 100.0).items())
            return
        report = WeightMatch(init, into)
        report.fill(into)
    assert set(report.loaded) == both == set(report.names)
    assert set(report.missing) == task.keys() - stored.keys()
    assert set(report.unexpected) == stored.keys() - task.keys()
    untouched = tensors(task, 100.0)
    assert all(torch.equal(into[name], (held if name in both else untouched)[name]) for name in task)


@settings(max_examples=60)
@given(st.lists(NAMES.map("w.{}".format), unique=True, min_size=1, max_size=8), NAMES, NAMES)
def test_a_prefix_that_was_put_before_every_name_is_found_and_undoes_it(names, start, path):
    missing = [f"{path}.{name}" for name in names]
    unexpected = [f"{start}.{name}" for name in names]
    if set(missing) & set(unexpected):
        return
    found = likely_prefix(missing, unexpected)
    assert found is not None
    head, target, count = found
    back = renamed(unexpected, InitFromSection(path="x", prefixes={head: target}))
    assert len(set(missing) & back.keys()) >= 1
    if len(names) == 1 or count == len(names):
        assert set(missing) <= back.keys() and all(back[f"{path}.{n}"] == f"{start}.{n}" for n in names)


@settings(max_examples=60)
@given(st.lists(NAMES, unique=True, max_size=8))
def test_without_prefixes_every_name_is_its_own(names):
    assert renamed(names, InitFromSection(path="x")) == {name: name for name in names}
