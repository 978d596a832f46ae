"""Parameters shared by several modules (tied weights), which stay shared when memory is allocated."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from mm_core.contracts import TaskModule


def tied_names(module: nn.Module) -> dict[str, str]:
    """The tied weights of a module: further name of a parameter -> its name in `named_parameters`."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
    return tied


def tie(module: nn.Module, tied: Mapping[str, str]) -> None:
    """Ties the weights of a module again (`tied_names`): `to_empty` gives each module its own tensor."""
    for name, first in tied.items():
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, module.get_parameter(first))


def state_of(module: nn.Module, path: str, tied: Collection[str]) -> dict[str, Tensor]:
    """The parameters (a shared one once) and buffers of a task's module, by path in the task.

    Args:
        module: the module.
        path: its path in the task.
        tied: names in the module that share another name's parameter (`tied_names`).
    """
    return {f"{path}.{key}": tensor for key, tensor in module.state_dict().items() if key not in tied}


def trained_state(task: TaskModule) -> dict[str, Tensor]:
    """The parameters (a shared one once) and buffers of a task's trained components, by path in the task."""
    parts = {name: task.get_submodule(name) for name in task.trainable}
    return {k: t for name, part in parts.items() for k, t in state_of(part, name, tied_names(part)).items()}
