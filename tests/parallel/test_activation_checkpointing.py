"""What selective recomputation keeps: operators of attention that libraries register, beside torch's own."""

import pytest
import torch
from torch import Tensor, nn

from mm_core.builtin.configs.engines import FSDP2Config
from mm_core.parallel.activation_checkpointing import kept_by, recompute, selective

RAN: list[int] = []
PLANNED = kept_by(FSDP2Config(recompute=("attention",)))  # before the operator below is registered


@torch.library.custom_op("npu::npu_fusion_attention", mutates_args=())
def mock_npu_fusion_attention(q: Tensor) -> tuple[Tensor, int]:
    """A stand-in for Ascend's operator, which returns numbers beside tensors too."""
    RAN.append(1)
    return q.exp(), 7


mock_npu_fusion_attention.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[0]),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.npu.npu_fusion_attention(self.inner(x))[0].sin()


@pytest.mark.parametrize(
    ("kept", "times"), [("full", 2), (("matmul",), 2), (("attention",), 1), ("selective", 1)]
)
def test_attention_of_a_mock_npu_is_kept_where_its_name_is_registered(kept, times) -> None:
    block = Block()
    x = torch.ones(2, 4, requires_grad=True)
    block(x).sum().backward()
    wanted, x.grad = x.grad, None
    RAN.clear()
    operators = kept_by(FSDP2Config(recompute=kept))
    assert "attention" not in kept or operators == PLANNED
    recompute(block, use_reentrant=False, contexts=selective(operators) if operators else None)
    block(x).sum().backward()
    assert len(RAN) == times
    assert torch.equal(x.grad, wanted)
