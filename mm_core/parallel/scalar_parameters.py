"""Scalar parameters, such as the temperature of a contrastive model: `fully_shard` refuses to shard them.

They stay complete in their modules on every rank. torch takes no tensor beside a DTensor, so norms and the
optimizer get a replicated DTensor on the memory of each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


def scalars_of(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters without dimensions of modules, by path in the task (the modules' keys are paths)."""
    return {
        name: parameter
        for path, module in modules.items()
        for name, parameter in module.named_parameters(prefix=path)
        if parameter.dim() == 0
    }


class ScalarParameters:
    """The scalar parameters of trained modules, and their averaged gradients.

    Args:
        modules: the trained modules, by path in the task; they have memory.
        mesh: the mesh over which the other parameters are sharded.
        device: the device on which the modules compute; the scalars move there.
    """

    def __init__(self, modules: Mapping[str, nn.Module], mesh: DeviceMesh, device: torch.device) -> None:
        self._mesh = mesh
        self._held = scalars_of(modules)
        self.replicated: dict[str, nn.Parameter] = {}
        """A DTensor on the memory of each scalar, by path: what the optimizer writes is in the module."""
        for name, parameter in self._held.items():
            parameter.data = parameter.data.to(device)
            self.replicated[name] = nn.Parameter(self._whole(parameter.detach()), parameter.requires_grad)

    def average(self) -> None:
        """Averages the gradients of the scalars over all ranks, for the optimizer; called by all ranks.

        A scalar without a gradient on a rank counts as one with the gradient 0 there.
        """
        trained = {name: parameter for name, parameter in self._held.items() if parameter.requires_grad}
        if not trained:
            return
        zero = torch.zeros((), device=next(iter(trained.values())).device)
        mean = torch.stack([zero if p.grad is None else p.grad.float() for p in trained.values()])
        if dist.get_world_size() > 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        for (name, parameter), gradient in zip(trained.items(), mean, strict=True):
            parameter.grad = None
            self.replicated[name].grad = self._whole(gradient.to(parameter.dtype))

    def _whole(self, tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)
