"""The weight format `diffusers/encoders`: text encoders, each in its folder; and names in LoRA files.

What other programs call the modules of transformers is data, a few lines a class. ComfyUI
(https://github.com/comfyanonymous/ComfyUI: comfy/lora.py at 17358c8, comfy/utils.py at 09708ea) knows most by
Diffusers' names behind a prefix of its own for each class, and skips others without an error. kohya's scripts
(https://github.com/kohya-ss/musubi-tuner at 30c658c, https://github.com/kohya-ss/sd-scripts at 48d368f) use
the publishers' names, in which q, k and v are often one module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from torch import nn

from mm_core.contracts import TaskModule
from mm_core.weights import (
    AdapterLayout,
    Companions,
    Diffusers,
    Fuse,
    KeyMap,
    Layout,
    Rename,
    Transformers,
    Written,
)
from mm_diffusers.text import DiffusersText
from mm_diffusers.transformer import DiffusersTransformer


class PipelineText(Transformers):
    """The weight format `diffusers/encoders`: the folder of a pipeline, of which encoders are read."""

    def recognises(self, path: Path) -> bool:
        """Whether a path is a pipeline with text encoders."""
        return bool(self.folders(path))

    def folders(self, path: Path) -> Sequence[str]:
        """The folders of the text encoders."""
        return sorted(found.name for found in path.glob("text_encoder*") if found.is_dir())

    def layout(self, name: str, component: nn.Module) -> Sequence[Layout] | None:  # type: ignore[override]
        """A layout for each text encoder."""
        if not isinstance(component, DiffusersText):
            return None
        found = []
        for part in component.encoders:
            own = super().layout(part, getattr(component, part))
            assert own is not None
            found.append(replace(own, part=part, folder=part))
        return found

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | None:
        """The transformer's LoRA files: Diffusers', with the names of other programs; None for others."""
        if not isinstance(component, DiffusersTransformer):
            return None
        own = Diffusers().adapter(name, component)
        return own and with_names(own, type(component.transformer).__name__)

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """None: text encoders are not exported."""
        return Companions()


@dataclass(frozen=True)
class LoraNames:
    """The names of one class of transformers.

    Attributes:
        comfyui: what ComfyUI has before Diffusers' names.
        native: the publisher's names, which kohya's scripts use; without, they use Diffusers'.
        own: ComfyUI's names, where it does not know Diffusers'.
    """

    comfyui: str = "diffusion_model."
    native: KeyMap = field(default_factory=KeyMap)
    own: KeyMap = field(default_factory=KeyMap)


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
_JOINED = {_QKV: "img_attn.qkv", _ADDED: "txt_attn.qkv"}
_JOINED |= {"attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj"}
_MLP = {"ff.net.0.proj": "img_mlp.0", "ff.net.2": "img_mlp.2"}
_MLP |= {"ff_context.net.0.proj": "txt_mlp.0", "ff_context.net.2": "txt_mlp.2"}
_MLP_2 = {"ff.linear_in": "img_mlp.0", "ff.linear_out": "img_mlp.2"}
_MLP_2 |= {"ff_context.linear_in": "txt_mlp.0", "ff_context.linear_out": "txt_mlp.2"}
_APART = {f"attn.to_{name}": f"img_attn_{name}" for name in "qkv"}
_APART |= {f"attn.add_{name}_proj": f"txt_attn_{name}" for name in "qkv"}
_APART |= {"attn.to_out.0": "img_attn_proj", "attn.to_add_out": "txt_attn_proj"}
_APART |= {ours: theirs.replace(".0", ".fc1").replace(".2", ".fc2") for ours, theirs in _MLP.items()}
_X = {_QKV: "attn.qkv", "attn.to_out.0": "attn.proj", "ff.net.0.proj": "mlp.fc1", "ff.net.2": "mlp.fc2"}
_X |= {_QKV.replace("attn", "attn2"): "attn2.qkv", "attn2.to_out.0": "attn2.proj"}
_CONTEXT = {_ADDED: "attn.qkv", "attn.to_add_out": "attn.proj"}
_CONTEXT |= {"ff_context.net.0.proj": "mlp.fc1", "ff_context.net.2": "mlp.fc2"}
_GATED = {"attn.to_q": "attn.wq", "attn.to_k": "attn.wk", "attn.to_v": "attn.wv", "attn.to_out.0": "attn.wo"}
_GATED |= {"attn.to_gate": "attn.gate", "ff.gate": "mlp.gate", "ff.up": "mlp.up", "ff.down": "mlp.down"}
_BLOCKS, _SINGLE = "transformer_blocks.{i}", "single_transformer_blocks.{i}"

NAMES: Mapping[str, LoraNames] = MappingProxyType(
    {
        "Flux2Transformer2DModel": LoraNames(
            "transformer.",
            _map(
                (_BLOCKS, "double_blocks.{i}", _JOINED | _MLP_2),
                (_SINGLE, "single_blocks.{i}", {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}),
            ),
        ),
        "FluxTransformer2DModel": LoraNames(
            "transformer.",
            _map(
                (_BLOCKS, "double_blocks.{i}", _JOINED | _MLP),
                (_SINGLE, "single_blocks.{i}", {f"{_QKV}+proj_mlp": "linear1", "proj_out": "linear2"}),
            ),
        ),
        "HunyuanVideo15Transformer3DModel": LoraNames(
            native=_map((_BLOCKS, "double_blocks.{i}", _APART)),
            own=_map((_BLOCKS, "double_blocks.{i}", _JOINED | _MLP)),
        ),
        "Krea2Transformer2DModel": LoraNames(
            native=_map(
                (_BLOCKS, "blocks.{i}", _GATED), ("text_fusion.{kind}.{i}", "txtfusion.{kind}.{i}", _GATED)
            )
        ),
        "SD3Transformer2DModel": LoraNames(
            "transformer.",
            _map(
                (_BLOCKS, "joint_blocks.{i}.x_block", _X),
                (_BLOCKS, "joint_blocks.{i}.context_block", _CONTEXT),
            ),
        ),
    }
)
"""Classes of transformers that some program does not know by Diffusers' names in its usual prefix."""


def with_names(own: AdapterLayout, kind: str) -> AdapterLayout:
    """Diffusers' layout of an adapter of a class (`kind`), with other programs' names."""
    names = NAMES.get(kind, LoraNames())
    native, comfyui = (replace(keys, prefix=own.keys.prefix) for keys in (names.native, names.own))
    programs = {"lora/comfyui": (names.comfyui, comfyui), "lora/kohya": ("lora_unet_", native)}
    return replace(own, others=(native, comfyui), programs=programs)
