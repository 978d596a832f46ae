"""Parameters that several modules share (tied weights), kept one through materialisation."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


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
