"""What authors may gather over ranks; the figures over ranks are in tests/contracts/test_task_ranks.py."""

from __future__ import annotations

import inspect

import pytest
import torch

from mm_core.errors import ContractError
from mm_core.parallel import gather_samples


def test_a_single_process_has_all_samples() -> None:
    mine = torch.ones(2, 3, requires_grad=True)
    assert gather_samples(mine) is mine


def test_a_sum_over_samples_cannot_be_gathered_on_any_number_of_ranks() -> None:
    with pytest.raises(ContractError) as caught:
        gather_samples(torch.ones(2).sum())
    line = inspect.getsourcelines(test_a_sum_over_samples_cannot_be_gathered_on_any_number_of_ranks)[1] + 2
    assert str(caught.value) == (
        f"{__file__}, line {line}: gather_samples was called with a tensor of the shape []\n"
        "  accepted: [B,...], what this rank has computed of each of its samples\n"
        "  hint: gather before you sum over the samples"
    )
