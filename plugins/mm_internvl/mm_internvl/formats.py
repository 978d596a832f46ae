"""The weight format `internvl/original`: OpenGVLab's own layout of InternVL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from mm_core.contracts import SupportsWeightsFrom, TaskModule
from mm_core.weights import (
    AdapterLayout,
    Companions,
    Fuse,
    KeyMap,
    Layout,
    Rename,
    StoredTensors,
    Transformers,
    Written,
    composed,
    read_mapping,
)
from mm_internvl.data.tiling import tiles_of
from mm_internvl.opengvlab_config import CLASS, is_original, to_original

_EMBEDDINGS = {
    "cls_token": "class_embedding",
    "position_embeddings": "position_embedding",
    "patch_embeddings.projection.{p}": "patch_embedding.{p}",
}
_BLOCK = {
    "attention.projection_layer.{p}": "attn.proj.{p}",
    "attention.q_norm.{p}": "attn.q_norm.{p}",
    "attention.k_norm.{p}": "attn.k_norm.{p}",
    "layernorm_before.{p}": "norm1.{p}",
    "layernorm_after.{p}": "norm2.{p}",
    "lambda_1": "ls1",
    "lambda_2": "ls2",
    "mlp.{rest...}": "mlp.{rest...}",
}
_PROJECTOR = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
_HERE, _THERE = "vision_tower.encoder.layer.{i}", "vision_model.encoder.layers.{i}"

ORIGINAL_KEYS = KeyMap(
    (
        *(
            Rename(f"vision_tower.embeddings.{one}", f"vision_model.embeddings.{other}")
            for one, other in _EMBEDDINGS.items()
        ),
        Fuse(tuple(f"{_HERE}.attention.{x}_proj.{{p}}" for x in "qkv"), f"{_THERE}.attn.qkv.{{p}}"),
        *(Rename(f"{_HERE}.{one}", f"{_THERE}.{other}") for one, other in _BLOCK.items()),
        *(
            Rename(f"multi_modal_projector.{one}.{{p}}", f"{other}.{{p}}")
            for one, other in _PROJECTOR.items()
        ),
    )
)
"""Tensor names in the published Transformers folders -> names in `InternVLChatModel`: the inverse of the
conversion in src/transformers/models/internvl/convert_internvl_weights_to_hf.py of Transformers' source tree.
Names of the language model are the same in both."""


class InternVLOriginal:
    """The weight format `internvl/original`: a folder as OpenGVLab publishes it, with config.json of
    `InternVLChatModel`, safetensors and tokenizer."""

    def __init__(self) -> None:
        self._folder = Transformers()

    def recognises(self, path: Path) -> bool:
        """Whether a folder holds InternVL weights in OpenGVLab's layout: config.json of InternVLChatModel."""
        return is_original(path)

    def folders(self, path: Path) -> Sequence[str]:
        """Names of the folders with weights in OpenGVLab's layout: only the top folder."""
        return [""]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """Opens the weights files of an InternVL model in OpenGVLab's layout."""
        return self._folder.open(path, folder)

    def layout(self, name: str, component: nn.Module) -> Layout | None:
        """How weights of an InternVL model are named in OpenGVLab's layout. None for a component that
        neither is nor wraps an `InternVLForConditionalGeneration`."""
        found = self._folder.layout(name, component)
        if found is None:
            return None
        config = json.loads(found.texts["config.json"])
        if config.get("model_type") != "internvl":
            return None
        base = None
        if isinstance(component, SupportsWeightsFrom) and component.weights_from is not None:
            began = Path(component.weights_from.path)
            base = read_mapping(began / "config.json") if is_original(began) else tiles_of(began)
        text = json.dumps(to_original(config, base), indent=2) + "\n"
        return replace(
            found,
            keys=composed(found.keys, ORIGINAL_KEYS),
            texts={**found.texts, "config.json": text},
            loading=f"from internvl.model.internvl_chat import {CLASS}\n\n"
            f'model = {CLASS}.from_pretrained("{{folder}}")',
            reading=None,
        )

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | None:
        """None: adapter files of PEFT fit only the Transformers layout, whose attention has three matrices
        where OpenGVLab's has one."""
        return None

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """Files that complete an InternVL export: tokenizer and processor files, and the Python files of the
        original folder, copied without being executed."""
        found = self._folder.companions(task, written)
        began = [origin for one in written for origin in one.sources if is_original(origin)]
        code = {path.name: path for folder in began for path in sorted(folder.glob("*.py"))}
        return replace(found, copies={**found.copies, **code})
