"""The names of an adapter's tensors in adapter files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mm_core.errors import ContractError
from mm_core.weights.formats.format import AdapterLayout
from mm_core.weights.formats.key_map import Fuse, Template


@dataclass(frozen=True)
class Share:
    """A module that is a part of a stored one, as q of a module `qkv`.

    Attributes:
        stored: path of the stored module.
        rows: its rows in the stored weight.
        total: rows of the stored weight.
    """

    stored: str
    rows: range
    total: int


def shares_in(layout: AdapterLayout, shapes: Mapping[str, Sequence[int]]) -> dict[str, Share]:
    """The modules of a component that a layout's names join to larger ones: path -> its share.

    Args:
        layout: a format's layout of the component's adapters.
        shapes: shapes of the component's tensors, by name.

    Raises:
        ContractError: the component lacks a part of a joined module.
    """
    rules = (rule for rule in layout.keys.rules if isinstance(rule, Fuse) and rule.dim == 0)
    sides = [Template(side) for rule in rules for side in rule.components]
    bare = {n: n.removeprefix(layout.keys.prefix) for n, s in shapes.items() if len(s) == 2}
    weights = {n: shapes[n] for n, name in bare.items() if any(side.match(name) for side in sides)}
    return {
        copy.component.removesuffix(".weight"): Share(
            copy.stored.removesuffix(".weight"),
            range(copy.stored_start[0], copy.stored_start[0] + copy.size[0]),
            copy.stored_shape[0],
        )
        for copy in layout.keys.copies(weights)
    }


def stored_module(layout: AdapterLayout, module: str) -> str:
    """The path of an adapted module in the model's own library.

    Raises:
        ContractError: the format stores the module's weight in a different form, so an adapter cannot apply.
    """
    stored = layout.keys.renamed(f"{module}.weight")
    if stored is None or not stored.endswith(".weight"):
        raise ContractError(
            f"the adapter of {module} cannot be written: the model's own library splits, reshapes or joins"
            " its weight, and an adapter belongs to a whole one",
            hint="export merged weights (--merge-lora), or leave the module out of the adapter's targets",
        )
    return stored.removesuffix(".weight")


def stored_key(layout: AdapterLayout, module: str, part: str) -> str:
    """The name of an adapter's tensor in an adapter file."""
    if part == "lora_magnitude_vector":
        if layout.additions:
            return f"{module_key(layout, module)}.dora_scale"
        if layout.alphas:
            raise ContractError(
                f"the adapter of {module} is a DoRA, which this layout does not store",
                accepted="lora/comfyui, lora/diffusers, lora/peft",
                hint="export in one of these, or merged weights (--merge-lora)",
            )
        return f"{layout.module_prefix}{stored_module(layout, module)}.{part}"
    if part not in ("lora_A", "lora_B"):
        if layout.metadata_key is not None:
            raise ContractError(
                f"the adapter of {module} is a LoKr or LoHa, which Diffusers does not load",
                accepted="lora/comfyui, lora/kohya, lora/peft",
                hint="export in one of these, or merged weights (--merge-lora)",
            )
        return f"{module_key(layout, module)}.{part}"
    name = layout.factors[part == "lora_B"]
    return f"{module_key(layout, module)}.{name}.weight"


def module_key(layout: AdapterLayout, module: str) -> str:
    """The name of an adapted module in an adapter file, at the start of its tensors' names."""
    return path_key(layout, stored_module(layout, module))


def path_key(layout: AdapterLayout, stored: str) -> str:
    """The name in an adapter file of a module with this stored path."""
    return f"{layout.module_prefix}{stored.replace('.', '_') if layout.flat else stored}"


def beside_key(layout: AdapterLayout, module: str, name: str) -> str:
    """The name in an adapter file of a tensor that is trained in full beside the adapter.

    Raises:
        ContractError: the format stores the tensor in a different form.
    """
    stored = layout.keys.renamed(name)
    if stored != f"{stored_module(layout, module)}{name.removeprefix(module)}":
        raise ContractError(
            f"{name} cannot be written beside an adapter: this format stores it in a different form",
            hint="export merged weights (--merge-lora)",
        )
    return f"{layout.module_prefix}{stored}"


def addition_key(layout: AdapterLayout, name: str) -> str:
    """The name in ComfyUI's file of an addition to a tensor of a component.

    Raises:
        ContractError: the format stores the tensor in a different form.
    """
    stored = layout.keys.renamed(name)
    if stored is None:
        raise ContractError(
            f"an addition to {name} cannot be written: the model's own library splits, reshapes or joins it",
            hint="export merged weights (--merge-lora)",
        )
    for end, part in ((".weight", ".diff"), (".bias", ".diff_b")):
        if stored.endswith(end):
            return f"{layout.module_prefix}{stored.removesuffix(end)}{part}"
    return f"{layout.module_prefix}{stored}.diff"
