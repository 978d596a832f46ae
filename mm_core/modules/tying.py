"""Parameters that several modules share (tied weights), kept one through materialisation."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from mm_core.contracts import TaskModule


def tied_names(module: nn.Module) -> dict[str, str]:
    """Further name of a parameter -> the name that `named_parameters` gives it."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
    return tied


def tie(module: nn.Module, tied: Mapping[str, str]) -> None:
    """Makes the names of `tied_names` share again: `to_empty` gives each module a tensor of its own."""
    for name, first in tied.items():
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, module.get_parameter(first))


def state_of(module: nn.Module, path: str, tied: Collection[str]) -> dict[str, Tensor]:
    """Parameters (a shared one once) and buffers of the module at `path` in the task, by their own paths
    there.

    tied: names of the module that share another's parameter, by `tied_names`.
    """
    return {f"{path}.{key}": tensor for key, tensor in module.state_dict().items() if key not in tied}


def trained_state(task: TaskModule) -> dict[str, Tensor]:
    """The same of all trained components."""
    parts = {name: task.get_submodule(name) for name in task.trainable}
    return {k: t for name, part in parts.items() for k, t in state_of(part, name, tied_names(part)).items()}
