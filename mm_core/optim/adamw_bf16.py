"""AdamW with moments in bfloat16, rounded at random so that small changes are kept on average."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mm_core.contracts import Randomness
from mm_core.modules.shards import local
from mm_core.optim.parameter_groups import Group

_CHUNK = 2**24
"""Numbers of parameters that are updated at a time: their float32 copies are what an update needs."""

_Place = tuple[torch.device, float, tuple[int, ...]]


def adamw_bf16(
    groups: Sequence[Group],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    rounding_seed: int,
) -> torch.optim.Optimizer:
    """The AdamW optimizer with moments in bfloat16, which are computed in float32 and rounded at random.

    Rounded to the nearest, a second moment that changes by less than 0.2 % in a step would stay as it is:
    with the usual betas it could hardly fall. Up or down at random, in proportion to what is lost, each is
    right on average.

    Reference: https://arxiv.org/abs/1711.05101 and, for the rounding, https://arxiv.org/abs/1502.02551

    Args:
        groups: parameter groups (`groups_of`); a group's own settings replace those below.
        lr: base learning rate, which the schedule's factors multiply.
        betas: decay of the first and the second moment, per step.
        eps: added to the root of the second moment.
        weight_decay: a step removes `lr` times this share of each parameter.
        rounding_seed: seed of the rounding, which also depends on the step and the shard.
    """
    settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
    return AdamWBF16([dict(group) for group in groups], settings, Randomness(rounding_seed))


class AdamWBF16(torch.optim.Optimizer):
    """The optimizer of `adamw_bf16`. Replicas of a shard round alike, so they stay equal."""

    def __init__(self, groups: list[Group], settings: Group, rng: Randomness) -> None:
        super().__init__(groups, settings)
        self._rng = rng

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates the parameters; `closure` recomputes the loss, as in torch."""
        loss = torch.enable_grad()(closure)() if closure is not None else None
        drawn: dict[_Place, torch.Generator] = {}
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for place, chunk in _chunks([(self._count(p), p) for p in held]):
                if place not in drawn:
                    device, step, shard = place
                    seed = self._rng.seed32("moments", int(step), *shard)
                    drawn[place] = torch.Generator(device).manual_seed(seed)
                self._update(chunk, place[1], group, drawn[place])
        return loss

    def _count(self, parameter: nn.Parameter) -> float:
        """The number of this update of a parameter."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        return float(state["step"])

    def _update(
        self, chunk: Sequence[nn.Parameter], step: float, group: Group, drawn: torch.Generator
    ) -> None:
        """Algorithm 2 of the paper, over the numbers of some parameters in one row."""
        (first, second), lr = group["betas"], group["lr"]
        stored = [[local(self.state[p][name]) for p in chunk] for name in ("exp_avg", "exp_avg_sq")]
        gradient = _row([local(p.grad) for p in chunk if p.grad is not None])
        mean, square = map(_row, stored)
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        shares = [local(p) for p in chunk]
        whole = _row(shares).mul_(1 - lr * group["weight_decay"])
        root = square.sqrt().div_((1 - second**step) ** 0.5).add_(group["eps"])
        _put(shares, whole.addcdiv_(mean, root, value=-lr / (1 - first**step)))
        for targets, moments in zip(stored, (mean, square), strict=True):
            _put(targets, _rounded(moments, drawn))


def _chunks(counted: Sequence[tuple[float, nn.Parameter]]) -> Iterator[tuple[_Place, list[nn.Parameter]]]:
    """Neighbours of one device, count and shard, with at most `_CHUNK` numbers or one parameter."""
    for place, same in groupby(counted, key=lambda pair: _place(*pair)):
        chunk: list[nn.Parameter] = []
        for _, parameter in same:
            if chunk and sum(local(p).numel() for p in (*chunk, parameter)) > _CHUNK:
                yield place, chunk
                chunk = []
            chunk.append(parameter)
        yield place, chunk


def _place(step: float, parameter: nn.Parameter) -> _Place:
    """The device, the count, and which shard of a parameter this is: () of one that is whole."""
    shard: tuple[int, ...] = ()
    if isinstance(parameter, DTensor):
        at = parameter.device_mesh.get_coordinate() or ()
        shard = tuple(c for c, placed in zip(at, parameter.placements, strict=True) if placed.is_shard())
    return local(parameter).device, step, shard


def _row(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().float() for tensor in tensors])


def _put(targets: Sequence[Tensor], row: Tensor) -> None:
    parts = torch.split(row, [target.numel() for target in targets])
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.view(target.shape))


def _rounded(row: Tensor, drawn: torch.Generator) -> Tensor:
    """Numbers of bfloat16 near those of `row`, float32 [N], which changes: the 16 bits that bfloat16 lacks
    carry into the others with the probability of what they are worth."""
    bits = row.view(torch.int32)
    bits += torch.randint(0, 1 << 16, bits.shape, generator=drawn, dtype=torch.int32, device=bits.device)
    bits &= -(1 << 16)
    return row
