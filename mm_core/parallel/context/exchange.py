"""Exchanges of tokens between the ranks of a context group, with gradients.

Letters: B batch, H heads, N tokens of a sample, n tokens of a rank, h heads of a rank, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Peers:
    """The ranks of a context group, as seen by one of them.

    Attributes:
        rank: this process's number in the group.
        count: ranks of the group.
        group: their process group; None: nothing is sent, and what would be received has only a shape, for
            planning.
    """

    rank: int
    count: int
    group: dist.ProcessGroup | None = None

    def shares(self, total: int) -> list[int]:
        """How many of `total` tokens or heads each rank has: contiguous parts that differ by one at most."""
        return [total // self.count + (rank < total % self.count) for rank in range(self.count)]

    def send(self, mine: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Any]:
        """Begins an exchange of numbers with all ranks of the group.

        Args:
            mine: flat, what this rank sends, in the order of the ranks.
            sent: numbers for each rank.
            received: numbers from each rank.

        Returns:
            What is received, in the order of the ranks, once `wait()` of the second has been called.
        """
        out = mine.new_empty(sum(received))
        work = None
        if self.group is not None:
            work = dist.all_to_all_single(
                out, mine, list(received), list(sent), group=self.group, async_op=True
            )
        return out, work

    def swap(self, mine: Tensor, sent: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Exchanges tensors with all ranks of the group, and waits for theirs.

        Args:
            mine: flat, what this rank sends, in the order of the ranks.
            sent: numbers for each rank.
            shapes: of what each rank sends here.
        """
        received = [prod(shape) for shape in shapes]
        out, work = self.send(mine, sent, received)
        if work is not None:
            work.wait()
        return [part.view(*shape) for part, shape in zip(torch.split(out, received), shapes, strict=True)]


def exchange(
    x: Tensor, give: int, gives: Sequence[int], take: int, takes: Sequence[int], to: Peers
) -> Tensor:
    """Sends each rank its part of a dimension, and receives this rank's parts of another one.

    Args:
        x: any shape.
        give: dimension that is cut.
        gives: its size on each rank afterwards.
        take: dimension that is put together.
        takes: its size on each rank before.
        to: the ranks.
    """
    shape = [*x.shape]
    shape[give] = gives[to.rank]
    shapes = [(*shape[:take], size, *shape[take + 1 :]) for size in takes]
    sent = [x.numel() // x.shape[give] * size for size in gives]
    return torch.cat(to.swap(_packed(x, give, gives, sent), sent, shapes), take)


def _packed(x: Tensor, dim: int, sizes: Sequence[int], counts: Sequence[int]) -> Tensor:
    """The parts of a dimension one after another, with `counts` numbers each."""
    packed = x.new_empty(x.numel())
    for target, part in zip(torch.split(packed, [*counts]), torch.split(x, [*sizes], dim), strict=True):
        target.view(part.shape).copy_(part)
    return packed


class _Exchange(torch.autograd.Function):
    """`exchange`; its backward is the opposite one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, give: int, gives: Sequence[int], take: int, takes: Sequence[int], to: Peers
    ) -> Tensor:
        ctx.opposite = take, takes, give, gives, to
        return exchange(x, give, gives, take, takes, to)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(gradients[0], *ctx.opposite), None, None, None, None, None


def ulysses(q: Tensor, k: Tensor, v: Tensor, tokens: Sequence[int], to: Peers, **options: Any) -> Tensor:
    """Attention in which each rank computes some heads over all tokens (https://arxiv.org/abs/2309.14509).

    Args:
        q: [B,H,n,D].
        k: [B,K,n,D]; the heads H are a multiple of the heads K.
        v: as k.
        tokens: tokens of each rank.
        to: the ranks.
        options: further arguments of `scaled_dot_product_attention`, which hold for all tokens.

    Returns:
        [B,H,n,D].
    """
    groups = to.shares(k.shape[1])
    heads = [q.shape[1] // k.shape[1] * size for size in groups]

    def whole(x: Tensor, own: Sequence[int]) -> Tensor:
        out: Tensor = _Exchange.apply(x, 1, own, 2, tokens, to)  # type: ignore[no-untyped-call]
        return out

    attended = scaled_dot_product_attention(whole(q, heads), whole(k, groups), whole(v, groups), **options)
    mine: Tensor = _Exchange.apply(attended, 2, tokens, 1, heads, to)  # type: ignore[no-untyped-call]
    return mine


class _Split(torch.autograd.Function):
    """This rank's part of the tokens, in memory of its own; its gradient is 0 for the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, to: Peers) -> Tensor:
        sizes = to.shares(x.shape[dim])
        ctx.place = dim, sum(sizes[: to.rank]), x.shape
        return x.narrow(dim, ctx.place[1], sizes[to.rank]).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dim, first, shape = ctx.place
        whole = gradients[0].new_zeros(shape)
        whole.narrow(dim, first, gradients[0].shape[dim]).copy_(gradients[0])
        return whole, None, None


def split(x: Tensor, dim: int, to: Peers) -> Tensor:
    """This rank's part of tokens that all ranks have; the gradient of the others' parts is 0.

    Args:
        x: equal on all ranks.
        dim: dimension of the tokens.
        to: the ranks.
    """
    out: Tensor = _Split.apply(x, dim, to)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    """All tokens on all ranks, which compute the same loss of them.

    The engine averages the gradients of all ranks. Before the gather, those of a parameter are partial sums,
    so the gradient is multiplied by the number of ranks here; after it, each rank has the whole already.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], to: Peers) -> Tensor:
        ctx.place = dim, sum(sizes[: to.rank]), sizes[to.rank], to.count
        shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]
        return torch.cat(to.swap(x.flatten().repeat(to.count), [x.numel()] * to.count, shapes), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dim, first, size, count = ctx.place
        return gradients[0].narrow(dim, first, size) * count, None, None, None


def gather(x: Tensor, dim: int, sizes: Sequence[int], to: Peers) -> Tensor:
    """All ranks' tokens, on each rank.

    Args:
        x: this rank's tokens.
        dim: dimension of the tokens.
        sizes: tokens of each rank.
        to: the ranks.
    """
    out: Tensor = _Gather.apply(x, dim, sizes, to)  # type: ignore[no-untyped-call]
    return out
