"""What ComfyUI makes of a LoRA file, in float64, from its rules.

https://github.com/comfyanonymous/ComfyUI: comfy/lora.py (`load_lora`, `calculate_weight`; commit 17358c8) and
comfy/weight_adapter: base.py (`weight_decompose`; commit 9c0cf36), lora.py (0323d87), loha.py (17adbb5),
lokr.py (179c2d3).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_START = "diffusion_model."
_ENDS = {".weight": ".diff", ".bias": ".diff_b"}


def applied(state: Mapping[str, Tensor], file: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model, by ComfyUI's names, that a file changes; all of the file's must be used."""
    left, found = dict(file), {}
    for name, tensor in state.items():
        end = next((end for end in _ENDS if name.endswith(end)), "")
        module = f"{_START}{name.removesuffix(end)}"
        parts = {
            key.removeprefix(f"{module}."): left.pop(key).double()
            for key in list(left)
            if end == ".weight" and key.startswith(f"{module}.") and ".diff" not in key
        }
        added = left.pop(f"{module}{_ENDS.get(end, '.diff')}", None)
        if added is not None:  # comes after the factors, in whose place it is put
            found[name] = tensor.double() + added.double()
        elif parts:
            found[name] = _adapted(tensor.double(), parts)
    assert not left, list(left)
    return found


def _adapted(weight: Tensor, parts: dict[str, Tensor]) -> Tensor:
    alpha = parts.get("alpha")
    if "lora_A.weight" in parts:
        down, up = parts["lora_A.weight"], parts["lora_B.weight"]
        change, rank = (up.flatten(1) @ down.flatten(1)).reshape(weight.shape), len(down)
    elif "hada_w1_a" in parts:
        one, two = (parts[f"hada_w{n}_a"] @ parts[f"hada_w{n}_b"] for n in (1, 2))
        change, rank = one * two, len(parts["hada_w1_b"])
    else:
        one, two = (
            parts[name] if name in parts else parts[f"{name}_a"] @ parts[f"{name}_b"]
            for name in ("lokr_w1", "lokr_w2")
        )
        held = [len(parts[f"{name}_b"]) for name in ("lokr_w2", "lokr_w1") if f"{name}_b" in parts]
        change, rank = torch.kron(one, two), held[0] if held else None
    if alpha is not None and rank is not None:
        change = change * float(alpha) / rank
    if "dora_scale" not in parts:
        return weight + change
    scale = parts["dora_scale"]
    assert scale.shape == (len(weight), 1)  # else by columns
    eps = torch.finfo(torch.float32).eps
    return (weight + change) * scale / (weight.flatten(1).norm(dim=1, keepdim=True) + eps)
