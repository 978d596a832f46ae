"""What is trained in full beside the adapters of a component."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from mm_core.errors import ContractError
from mm_core.modules.adapter_layers import adapter_of, base_name
from mm_core.modules.tying import tied_names

BESIDE = "train.also_train"


def trained_beside(component: nn.Module) -> dict[str, list[str]]:
    """The modules of a component trained in full beside its adapters: module -> names of its tensors.

    Raises:
        ContractError: an adapter file cannot contain it: only part of a module is trained, or it is shared.
    """
    parameters = dict(component.named_parameters())
    trained = [n for n, p in parameters.items() if p.requires_grad and adapter_of(n) is None]
    tied = tied_names(component)
    found: dict[str, list[str]] = {}
    for path in sorted({name.rpartition(".")[0] for name in trained}, key=lambda path: path.count(".")):
        if any(path.startswith(f"{above}.") for above in found):
            continue
        start = f"{path}." if path else ""
        names = [name for name in component.state_dict() if name.startswith(start)]
        if still := [name for name in names if name in parameters and name not in trained]:
            raise ContractError(
                f"{path or 'the top'} is trained beside the adapter without its {base_name(still[0])}:"
                " adapter files can only contain complete modules",
                hint=f"export merged weights (--merge-lora), or name the complete module in {BESIDE}",
            )
        _check_apart(names, {*tied, *tied.values()})
        found[path] = names
    return found


def trained_whole(component: nn.Module) -> list[str]:
    """The parameters of a component trained in full beside its adapters.

    Raises:
        ContractError: one is shared with another module.
    """
    tied = tied_names(component)
    names = [n for n, p in component.named_parameters() if p.requires_grad and adapter_of(n) is None]
    _check_apart(names, {*tied, *tied.values()})
    return names


def _check_apart(names: Iterable[str], shared: Collection[str]) -> None:
    """ContractError for a tensor trained beside an adapter that is shared."""
    if held := [name for name in names if name in shared]:
        raise ContractError(
            f"{held[0]} is trained beside the adapter and shared with another module, which an adapter"
            " file cannot express",
            hint="export merged weights (--merge-lora)",
        )
