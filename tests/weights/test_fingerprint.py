"""Fingerprints show whether a base is unchanged, without reading all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mm_core.weights import open_stored
from mm_core.weights.fingerprint import fingerprint


def of(folder: Path, *files: dict[str, Tensor]) -> str:
    folder.mkdir()
    names = []
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"part_{number}.safetensors")
        stored = open_stored(folder / f"part_{number}.safetensors")
        names += [(name, stored) for name in tensors]
    return fingerprint(sorted(names))


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(300, 700),
        "kernel": torch.randn(64, 8, 3, 3).bfloat16(),
        "scalar": torch.tensor(2.0),
        "empty": torch.zeros(0, 4),
    }


def test_files_cut_otherwise_are_the_same(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    whole = of(tmp_path / "a", tensors)
    matrix = {"matrix": tensors.pop("matrix")}
    assert of(tmp_path / "b", tensors, matrix) == whole


@pytest.mark.parametrize("place", ["matrix", "kernel", "scalar"])
def test_other_numbers_are_noticed_also_in_the_middle_alone(
    tmp_path: Path, tensors: dict[str, Tensor], place: str
) -> None:
    before = of(tmp_path / "a", tensors)
    flat = tensors[place].reshape(-1)
    third = len(flat) // 3
    flat[third : len(flat) - third] *= -1.5
    assert of(tmp_path / "b", tensors) != before


def test_another_name_dtype_or_shape_is_noticed(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    zeros = torch.zeros(6, 4)
    found = {
        of(tmp_path / "a", {"x": zeros}),
        of(tmp_path / "b", {"y": zeros}),
        of(tmp_path / "c", {"x": zeros.to(torch.int32)}),
        of(tmp_path / "d", {"x": zeros.reshape(4, 6)}),
    }
    assert len(found) == 4
