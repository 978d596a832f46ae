"""Muon for matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mm_core.errors import PlanError, PluginError
from mm_core.modules.patterns import select_parameters
from mm_core.modules.shards import like
from mm_core.optim.adamw import adamw
from mm_core.optim.parameter_groups import Group
from mm_core.weights.streaming import shard_of


def muon(
    groups: Sequence[Group],
    lr: float,
    weight_decay: float,
    adamw_for: Sequence[str],
    adamw_lr: float | None,
    betas: tuple[float, float],
    eps: float,
    **own: float | str,
) -> MuonWithAdamW:
    """The Muon optimizer for parameters with two or more dimensions, with AdamW for the others.

    Args:
        groups: parameter groups.
        lr: learning rate.
        weight_decay: weight decay.
        adamw_for: patterns of parameters that AdamW updates although they are matrices.
        adamw_lr: AdamW's learning rate; None for `lr`.
        betas: AdamW's betas.
        eps: AdamW's eps.
        own: Muon's own settings: momentum, nesterov, ns_steps, adjust_lr.

    Raises:
        PluginError: this torch has no Muon.
        PlanError: a pattern in `adamw_for` matches nothing, or there is no matrix to train.
    """
    try:
        from torch.optim import Muon  # noqa: F401
    except ImportError:
        raise PluginError(
            f"muon needs torch.optim.Muon, which torch {torch.__version__} does not have",
            where="optimizer",
            accepted="torch >= 2.9",
            hint="install a newer torch, or set optimizer.type to adamw",
        ) from None
    names = [name for group in groups for name in group["names"]]
    spared = set(select_parameters(adamw_for, names, "optimizer.adamw_for"))
    matrices = [_part(group, lambda name, p: p.dim() >= 2 and name not in spared) for group in groups]
    others = [_part(group, lambda name, p: p.dim() < 2 or name in spared) for group in groups]
    if not any(group["params"] for group in matrices):
        raise PlanError(
            "muon has no matrix to train",
            where="optimizer",
            accepted="parameters with two or more dimensions that optimizer.adamw_for does not match",
            hint="narrow optimizer.adamw_for, or set optimizer.type to adamw",
        )
    settings = {"lr": lr, "weight_decay": weight_decay, **own}
    rest = [group for group in others if group["params"]]
    second = adamw(rest, lr if adamw_lr is None else adamw_lr, betas, eps, weight_decay) if rest else None
    return MuonWithAdamW([group for group in matrices if group["params"]], settings, second)


def _part(group: Group, wanted: Callable[[str, Tensor], bool]) -> Group:
    """The group with only the wanted parameters."""
    pairs = [(n, p) for n, p in zip(group["names"], group["params"], strict=True) if wanted(n, p)]
    return {**group, "names": [name for name, _ in pairs], "params": [p for _, p in pairs]}


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer: the first parameter groups are Muon's, the others AdamW's.

    Muon's update is that of `torch.optim.Muon`. The momentum is sharded like the parameter; the matrix to
    orthogonalise is gathered in full on every rank. torch's own accepts DTensors too, but then splits its
    bfloat16 products by rank: two ranks differed from one by 4 % of a step (torch 2.13, gloo).

    References: https://kellerjordan.github.io/posts/muon/ and https://arxiv.org/abs/2502.16982 (the factor
    `match_rms_adamw`). Tensors with more than two dimensions are used as matrices (first, all others).
    """

    def __init__(self, matrices: list[Group], settings: Group, rest: torch.optim.Optimizer | None) -> None:
        super().__init__(matrices, settings)
        self._matrix_groups = len(self.param_groups)
        self._rest = rest
        if rest is not None:
            self.param_groups.extend(rest.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates the parameters with Muon and AdamW; `closure` recomputes the loss, as in torch."""
        loss = torch.enable_grad()(closure)() if closure is not None else None
        for group in self.param_groups[: self._matrix_groups]:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        if self._rest is not None:
            # Set again each time: torch's load_state_dict replaces both.
            self._rest.param_groups = self.param_groups[self._matrix_groups :]
            self._rest.state = self.state
            self._rest.step()
        return loss

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(_orthogonal_step(direction, group))


def _orthogonal_step(direction: Tensor, group: Group) -> Tensor:
    """The change of a parameter along `direction`, with the same sharding. Collective for DTensors."""
    whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
    # Without momentum and decay, and from zero, torch's Muon leaves just its step in the parameter.
    scratch = nn.Parameter(torch.zeros_like(whole).flatten(1))
    scratch.grad = whole.flatten(1)
    once: torch.optim.Optimizer = torch.optim.Muon(
        [scratch],
        lr=group["lr"],
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        ns_steps=group["ns_steps"],
        adjust_lr_fn=group["adjust_lr"],
    )
    once.step()
    step = scratch.detach().view(whole.shape)
    if not isinstance(direction, DTensor):
        return step
    _, place = shard_of(direction)
    share: Tensor = like(direction, step[place].contiguous())
    return share
