"""What other programs call the modules of transformers in LoRA files: data, a few lines a class.

ComfyUI (https://github.com/comfyanonymous/ComfyUI: comfy/lora.py at 17358c8, comfy/utils.py at 09708ea) knows
most by Diffusers' names behind a prefix of its own for each class, and skips others without an error. kohya's
scripts (https://github.com/kohya-ss/musubi-tuner at 30c658c, https://github.com/kohya-ss/sd-scripts at
48d368f) use the publishers' names, in which q, k and v are often one module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import nn

from mm_core.weights import AdapterLayout, Diffusers, Fuse, KeyMap, Rename
from mm_diffusers.transformer import DiffusersTransformer


@dataclass(frozen=True)
class LoraNames:
    """The names of one class of transformers.

    Attributes:
        comfyui: what ComfyUI has before Diffusers' names; "": it knows `native` only.
        native: the publisher's names, which kohya's scripts use; they know Diffusers' without.
    """

    comfyui: str = "diffusion_model."
    native: KeyMap = field(default_factory=KeyMap)


def _map(*blocks: tuple[str, str, Mapping[str, str]]) -> KeyMap:
    """A map of names.

    Args:
        blocks: path of a block here and elsewhere; modules here -> the module elsewhere, with a `+` between
            those that are one there.
    """
    rules = []
    for ours, theirs, names in blocks:
        for modules, module in names.items():
            held = tuple(f"{ours}.{each}.{{end}}" for each in modules.split("+"))
            stored = f"{theirs}.{module}.{{end}}"
            rules.append(Fuse(held, stored) if len(held) > 1 else Rename(held[0], stored))
    return KeyMap(tuple(rules))


_QKV, _ADDED = "attn.to_q+attn.to_k+attn.to_v", "attn.add_q_proj+attn.add_k_proj+attn.add_v_proj"
_OUT = {"attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj"}
_JOINED = {_QKV: "img_attn.qkv", _ADDED: "txt_attn.qkv", **_OUT}
_DOUBLE, _SINGLE = "transformer_blocks.{i}", "single_transformer_blocks.{i}"
_KREA = {f"attn.to_{ours}": f"attn.{theirs}" for ours, theirs in {"q": "wq", "k": "wk", "v": "wv"}.items()}
_KREA |= {"attn.to_out.0": "attn.wo", "attn.to_gate": "attn.gate"}
_KREA |= {f"ff.{name}": f"mlp.{name}" for name in ("gate", "up", "down")}
_HUNYUAN = {f"attn.to_{name}": f"img_attn_{name}" for name in "qkv"}
_HUNYUAN |= {f"attn.add_{name}_proj": f"txt_attn_{name}" for name in "qkv"}
_HUNYUAN |= {"attn.to_out.0": "img_attn_proj", "attn.to_add_out": "txt_attn_proj"}
_HUNYUAN |= {"ff.net.0.proj": "img_mlp.fc1", "ff.net.2": "img_mlp.fc2"}
_HUNYUAN |= {"ff_context.net.0.proj": "txt_mlp.fc1", "ff_context.net.2": "txt_mlp.fc2"}
_X, _CONTEXT = "joint_blocks.{i}.x_block", "joint_blocks.{i}.context_block"

NAMES: Mapping[str, LoraNames] = MappingProxyType(
    {
        "Flux2Transformer2DModel": LoraNames(
            "transformer.",
            _map(
                (_DOUBLE, "double_blocks.{i}", _JOINED),
                (_DOUBLE, "double_blocks.{i}", {"ff.linear_in": "img_mlp.0", "ff.linear_out": "img_mlp.2"}),
                (
                    _DOUBLE,
                    "double_blocks.{i}",
                    {"ff_context.linear_in": "txt_mlp.0", "ff_context.linear_out": "txt_mlp.2"},
                ),
                (_SINGLE, "single_blocks.{i}", {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}),
            ),
        ),
        "FluxTransformer2DModel": LoraNames(
            "transformer.",
            _map(
                (_DOUBLE, "double_blocks.{i}", _JOINED),
                (_DOUBLE, "double_blocks.{i}", {"ff.net.0.proj": "img_mlp.0", "ff.net.2": "img_mlp.2"}),
                (
                    _DOUBLE,
                    "double_blocks.{i}",
                    {"ff_context.net.0.proj": "txt_mlp.0", "ff_context.net.2": "txt_mlp.2"},
                ),
                (_SINGLE, "single_blocks.{i}", {f"{_QKV}+proj_mlp": "linear1", "proj_out": "linear2"}),
            ),
        ),
        "HunyuanVideo15Transformer3DModel": LoraNames("", _map((_DOUBLE, "double_blocks.{i}", _HUNYUAN))),
        "Krea2Transformer2DModel": LoraNames(
            native=_map(
                (_DOUBLE, "blocks.{i}", _KREA),
                ("text_fusion.{kind}.{i}", "txtfusion.{kind}.{i}", _KREA),
            )
        ),
        "SD3Transformer2DModel": LoraNames(
            "transformer.",
            _map(
                (_DOUBLE, _X, {_QKV: "attn.qkv", "attn.to_out.0": "attn.proj"}),
                (_DOUBLE, _X, {_QKV.replace("attn", "attn2"): "attn2.qkv", "attn2.to_out.0": "attn2.proj"}),
                (_DOUBLE, _X, {"ff.net.0.proj": "mlp.fc1", "ff.net.2": "mlp.fc2"}),
                (_DOUBLE, _CONTEXT, {_ADDED: "attn.qkv", "attn.to_add_out": "attn.proj"}),
                (_DOUBLE, _CONTEXT, {"ff_context.net.0.proj": "mlp.fc1", "ff_context.net.2": "mlp.fc2"}),
            ),
        ),
    }
)
"""Classes of transformers that some program does not know by Diffusers' names in its usual prefix."""


def lora_layout(name: str, component: nn.Module) -> AdapterLayout | None:
    """How LoRA files store a component: as Diffusers does, and with other programs' names.

    Args:
        name: the component's name in the task.
        component: None for other classes than `DiffusersTransformer`.
    """
    own = Diffusers().adapter(name, component) if isinstance(component, DiffusersTransformer) else None
    if own is None:
        return None
    assert isinstance(component, DiffusersTransformer)
    names = NAMES.get(type(component.transformer).__name__, LoraNames())
    native = replace(names.native, prefix=own.keys.prefix)
    comfyui = (names.comfyui, own.keys) if names.comfyui else ("diffusion_model.", native)
    programs = {"lora/comfyui": comfyui, "lora/kohya": ("lora_unet_", native)}
    return replace(own, others=(native,), programs=programs)
