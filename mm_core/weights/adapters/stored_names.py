"""The names of an adapter's tensors in adapter files."""

from __future__ import annotations

from mm_core.errors import ContractError
from mm_core.weights.formats.format import AdapterLayout


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
    stored = stored_module(layout, module)
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
