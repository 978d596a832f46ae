"""Functions that read values of tensors are called on tensors without numbers too."""

from __future__ import annotations

import torch

from mm_core.device import with_numbers
from mm_core.device.torch_private import FakeTensorMode


def shortest(x: torch.Tensor, more: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """The rows of x up to the true values of a mask."""
    lengths = more["mask"].sum(1).tolist()
    return [row[:length] for row, length in zip(x, lengths, strict=True)], min(lengths)


def test_tensors_with_numbers_are_handed_over_as_they_are():
    x, mask = torch.randn(2, 3), torch.tensor([[True, False, False], [True, True, False]])
    rows, least = with_numbers(shortest, x, {"mask": mask})
    assert torch.equal(rows[1], x[1, :2]) and least == 1


def test_without_numbers_masks_are_full_and_the_result_has_none():
    x, mask = torch.empty(2, 3, device="meta"), torch.empty(2, 3, dtype=torch.bool, device="meta")
    rows, least = with_numbers(shortest, x, {"mask": mask})
    assert least == 3 and [(row.shape, row.device.type) for row in rows] == [((3,), "meta")] * 2
    with FakeTensorMode():
        rows, _ = with_numbers(shortest, torch.ones(2, 3), {"mask": torch.zeros(2, 3, dtype=torch.bool)})
        assert (rows[0] + torch.ones(3)).shape == (3,)
