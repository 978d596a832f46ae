"""Ring attention: keys and values of the tokens go round the ranks of a context group.

Equations: https://arxiv.org/abs/2310.01889. Letters as in `mm_core.parallel.context.exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mm_core.device import attend_part, attend_part_backward
from mm_core.parallel.context.exchange import Peers


def ring(q: Tensor, k: Tensor, v: Tensor, tokens: Sequence[int], to: Peers, scale: float | None) -> Tensor:
    """Attention in which each rank computes all heads of its own tokens' queries.

    Args:
        q: [B,H,n,D].
        k: as q.
        v: as q.
        tokens: tokens of each rank.
        to: the ranks.
        scale: factor of the scores; None for D**-0.5.

    Returns:
        [B,H,n,D].
    """
    out: Tensor = _Ring.apply(q, k, v, tokens, to, scale)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tokens: Sequence[int], to: Peers, scale: float | None
    ) -> Tensor:
        out = torch.zeros_like(q, dtype=torch.float32)
        sums = torch.full(q.shape[:3], float("-inf"), device=q.device)
        kept = []
        pair, shape = torch.cat([k.flatten(), v.flatten()]), k.shape
        for turn in range(to.count):
            part = _shape(shape, tokens, to.rank - turn)
            k_i, v_i = (each.view(part) for each in pair.chunk(2))
            if last := turn == to.count - 1:
                following, work = pair, None
            else:  # on its way while this part is computed
                following, work = _pass_on(pair, _shape(shape, tokens, to.rank - turn - 1), to)
            out_i, sums_i, more = attend_part(q, k_i, v_i, scale)
            kept.append(more)
            both = torch.logaddexp(sums, sums_i)
            out = out * (sums - both).exp()[..., None] + out_i.float() * (sums_i - both).exp()[..., None]
            sums = both
            if not last and work is not None:
                work.wait()
            pair = following
        whole = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, whole, sums)
        ctx.rest = kept, tokens, to, scale
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        kept, tokens, to, scale = ctx.rest
        grad = gradients[0].contiguous()
        dq = torch.zeros_like(q, dtype=torch.float32)
        pair, shape = torch.cat([k.flatten(), v.flatten()]), k.shape
        theirs = torch.zeros_like(pair, dtype=torch.float32)  # gradients of `pair`, which travel with it
        for turn in range(to.count):
            part = _shape(shape, tokens, to.rank - turn)
            following = _shape(shape, tokens, to.rank - turn - 1)
            k_i, v_i = (each.view(part) for each in pair.chunk(2))
            pair, work = _pass_on(pair, following, to) if turn < to.count - 1 else (pair, None)
            dq_i, dk_i, dv_i = attend_part_backward(grad, q, k_i, v_i, out, sums, kept[turn], scale)
            dq += dq_i
            theirs += torch.cat([dk_i.flatten(), dv_i.flatten()])
            arrived, sent = _pass_on(theirs, following, to)  # after the last turn they are at home
            for each in (work, sent):
                if each is not None:
                    each.wait()
            theirs = arrived
        dk, dv = (each.view(shape).to(k.dtype) for each in theirs.chunk(2))
        return dq.to(q.dtype), dk, dv, None, None, None


def _shape(shape: torch.Size, tokens: Sequence[int], rank: int) -> tuple[int, ...]:
    """The shape of another rank's keys."""
    return (*shape[:2], tokens[rank % len(tokens)], shape[3])


def _pass_on(mine: Tensor, shape: Sequence[int], to: Peers) -> tuple[Tensor, Any]:
    """Sends a flat tensor to the next rank, and receives that of the rank before: two of a shape."""
    sent, received = [0] * to.count, [0] * to.count
    sent[(to.rank + 1) % to.count] = mine.numel()
    received[(to.rank - 1) % to.count] = 2 * prod(shape)
    return to.send(mine, sent, received)
