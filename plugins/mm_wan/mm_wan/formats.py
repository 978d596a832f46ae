"""Weight formats for Wan's transformer: Diffusers' pipelines, and Wan-AI's own layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import diffusers
from torch import nn

from mm_core.contracts import TaskModule
from mm_core.weights import (
    AdapterLayout,
    Companions,
    Diffusers,
    KeyMap,
    Layout,
    Rename,
    StoredTensors,
    Transformers,
    Written,
    composed,
    read_mapping,
)
from mm_wan.encoders.umt5 import WanUMT5
from mm_wan.encoders.vae import WanVAE
from mm_wan.predictor.architecture import (
    CLASS,
    EXPERT_FOLDERS,
    EXPERT_PARTS,
    ORIGINAL_CLASS,
    STEM,
    is_original,
    pipeline_of,
    wan_parts,
)
from mm_wan.predictor.transformer import TEXT_LENGTH, WanTransformer
from mm_wan.predictor.two_expert import TwoExpert
from mm_wan.single_file import COMFY, UMT5_KEYS, is_single, open_single, pair_in, vae_keys

_LORA = {"high": "pytorch_lora_weights.safetensors", "low": "pytorch_lora_weights_2.safetensors"}
"""File names for the adapters of the two experts. A single transformer uses the first."""

_NAMES = {
    "high": ("high_noise", "high_noise_model", "transformer", "pipe.dit"),
    "low": ("low_noise", "low_noise_model", "transformer_2", "pipe.dit2"),
}
"""What other programs call the two experts in adapter files: Wan-AI, ComfyUI, Diffusers, DiffSynth-Studio."""

# The first image-to-video checkpoints hold a norm that nothing uses; Diffusers ignores it as well.
DIFFUSERS_KEYS = KeyMap(ignored=("blocks.{i}.attn2.norm_added_q.weight",))
_LAYERS = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q", "norm_k": "norm_k"}
_IMAGE = {"add_k_proj": "k_img", "add_v_proj": "v_img", "norm_added_k": "norm_k_img"}
_EMBEDDER = {
    "time_embedder.linear_1": "time_embedding.0",
    "time_embedder.linear_2": "time_embedding.2",
    "time_proj": "time_projection.1",
    "text_embedder.linear_1": "text_embedding.0",
    "text_embedder.linear_2": "text_embedding.2",
    "image_embedder.norm1": "img_emb.proj.0",
    "image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "image_embedder.ff.net.2": "img_emb.proj.3",
    "image_embedder.norm2": "img_emb.proj.4",
}


def _attention(ours: str, theirs: str, layers: dict[str, str]) -> list[Rename]:
    return [
        Rename(f"blocks.{{i}}.{ours}.{one}.{{p}}", f"blocks.{{i}}.{theirs}.{other}.{{p}}")
        for one, other in layers.items()
    ]


ORIGINAL_KEYS = KeyMap(
    (
        *_attention("attn1", "self_attn", _LAYERS),
        *_attention("attn2", "cross_attn", {**_LAYERS, **_IMAGE}),
        # Wan-AI uses norm1, norm3 and norm2 in this order, which Diffusers calls 1, 2 and 3; only this one of
        # them has parameters.
        Rename("blocks.{i}.norm2.{p}", "blocks.{i}.norm3.{p}"),
        Rename("blocks.{i}.ffn.net.0.proj.{p}", "blocks.{i}.ffn.0.{p}"),
        Rename("blocks.{i}.ffn.net.2.{p}", "blocks.{i}.ffn.2.{p}"),
        Rename("blocks.{i}.scale_shift_table", "blocks.{i}.modulation"),
        *(Rename(f"condition_embedder.{one}.{{p}}", f"{other}.{{p}}") for one, other in _EMBEDDER.items()),
        Rename("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),
        Rename("proj_out.{p}", "head.head.{p}"),
        Rename("scale_shift_table", "head.modulation"),
    )
)
"""Tensor names of `WanTransformer3DModel` -> names of `WanModel` (https://github.com/Wan-Video/Wan2.1,
wan/modules/model.py): the inverse of Diffusers' conversion (scripts/convert_wan_to_diffusers.py)."""


class _WanFormat(Diffusers):
    """Files of a Wan transformer as of a Diffusers model; each trained expert of Wan 2.2 has its folder."""

    expert_folders: Mapping[str, str]

    def layout(self, name: str, component: nn.Module) -> Layout | Sequence[Layout] | None:  # type: ignore[override]
        """How the weights of a Wan transformer are named; None for any other module."""
        if isinstance(component, TwoExpert):
            return [
                replace(self._layout(model), part=name, folder=self.expert_folders[name])
                for name, model in component.built.items()
            ]
        return self._layout(component) if isinstance(component, WanTransformer) else None

    def _layout(self, component: WanTransformer) -> Layout:
        raise NotImplementedError


class WanDiffusers(_WanFormat):
    """The weight format `wan/diffusers`: a pipeline's folder that `WanPipeline.from_pretrained` loads, or the
    folder of a single transformer.

    A run that started from a pipeline is exported as a pipeline: the trained transformer, and the parts of
    the original pipeline that were not trained. Any other run is exported as a transformer's folder.
    """

    expert_folders = EXPERT_PARTS

    def recognises(self, path: Path) -> bool:
        """Whether a folder holds Wan weights in Diffusers' layout: a pipeline with a Wan transformer, or the
        transformer alone."""
        return bool(wan_parts(path)) or read_mapping(path / "config.json").get("_class_name") == CLASS

    def folders(self, path: Path) -> Sequence[str]:
        """Names of the folders with Wan weights in a Diffusers pipeline; [""] for a transformer's own
        folder."""
        return wan_parts(path) or [""]

    def _layout(self, component: WanTransformer) -> Layout:
        # No folder is named here: a pipeline's two transformers fit equally, and the user must choose one.
        return Layout(
            DIFFUSERS_KEYS,
            stem=STEM,
            texts={"config.json": component.to_json_string()},
            library="diffusers",
            loading=f'from diffusers import {CLASS}\n\nmodel = {CLASS}.from_pretrained("{{folder}}")',
        )

    def adapter(  # type: ignore[override]
        self, name: str, component: nn.Module
    ) -> AdapterLayout | Sequence[AdapterLayout] | None:
        """How adapter weights of a Wan transformer are written for `WanPipeline.load_lora_weights`: one file,
        or one for each trained expert. None for any other module."""
        if isinstance(component, TwoExpert):
            built = component.built
            return [
                replace(_adapter(_LORA[name], EXPERT_PARTS[name]), part=name, names=_NAMES) for name in built
            ]
        if not isinstance(component, WanTransformer):
            return None
        pipeline = pipeline_of(component.weights_from)
        return _adapter(_LORA["high"], pipeline[1] if pipeline else "")


class WanOriginal(_WanFormat):
    """The weight format `wan/original`: a folder as Wan-AI publishes it, with config.json of `WanModel` and
    its safetensors."""

    expert_folders = EXPERT_FOLDERS

    def recognises(self, path: Path) -> bool:
        """Whether a folder holds Wan weights in Wan-AI's layout: config.json of WanModel, or the two folders
        of Wan 2.2's experts."""
        return is_original(path) or bool(_experts(path))

    def folders(self, path: Path) -> Sequence[str]:
        """Names of the folders with Wan weights in Wan-AI's layout: those of Wan 2.2's experts, or [""]."""
        return [""] if is_original(path) else _experts(path)

    def _layout(self, component: WanTransformer) -> Layout:
        config = json.dumps(original_config(component), indent=2) + "\n"
        return Layout(
            ORIGINAL_KEYS,
            stem=STEM,
            texts={"config.json": config},
            library="wan",
            loading='from wan.modules.model import WanModel\n\nmodel = WanModel.from_pretrained("{folder}")',
        )

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | None:
        """None: Wan-AI's own code reads no adapter files."""
        return None

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """Files that complete an export in Wan-AI's layout: the expert that was not trained, if the run
        started from both. Wan-AI's other parts are torch files with other names, and no run starts from
        them."""
        copies = {
            folder: Path(component.weights_from.path) / folder
            for component in task.children()
            if isinstance(component, TwoExpert) and component.weights_from is not None
            for name, folder in EXPERT_FOLDERS.items()
            if name not in component.built and is_original(Path(component.weights_from.path) / folder)
        }
        return Companions(copies=copies)


class WanFile:
    """The weight format `wan/file`: one model in one file, or Wan 2.2's experts in two; only read.
    `wan/original` writes its names."""

    def recognises(self, path: Path) -> bool:
        """Whether a path is one file of weights, or a folder with files of both experts."""
        return (path.is_file() and is_single(path)) or bool(pair_in(path))

    def folders(self, path: Path) -> Sequence[str]:
        """[""] for the file itself; the experts' files in a folder."""
        return pair_in(path) if path.is_dir() else [""]

    def open(self, path: Path, folder: str = "") -> StoredTensors:
        """Opens a file's tensors."""
        return open_single(path / folder)

    def layout(self, name: str, component: nn.Module) -> Layout | Sequence[Layout] | None:
        """The names of a Wan model in one file, or of two experts in two; None for any other module."""
        if isinstance(component, WanTransformer):
            comfy = composed(ORIGINAL_KEYS, KeyMap((Rename("{p...}", f"{COMFY}{{p...}}"),)))
            return Layout(ORIGINAL_KEYS, reading=lambda stored: comfy, read_only=True)
        if isinstance(component, TwoExpert) and component.in_files:
            models = ((name, self.layout(name, model)) for name, model in component.built.items())
            return [
                replace(found, part=name, folder=component.folders[name])
                for name, found in models
                if isinstance(found, Layout)
            ]
        if isinstance(component, WanVAE) and component.model is not None:
            own = Diffusers().layout(name, component)
            assert own is not None
            return Layout(composed(own.keys, vae_keys(component.model.config)), read_only=True)
        if isinstance(component, WanUMT5) and (own := Transformers().layout(name, component)) is not None:
            comfy = replace(own.keys, ignored=(*own.keys.ignored, "spiece_model"))  # its tokenizer
            return Layout(composed(own.keys, UMT5_KEYS), reading=lambda stored: comfy, read_only=True)
        return None

    def adapter(self, name: str, component: nn.Module) -> AdapterLayout | None:
        """None: it is only read."""
        return None

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """None: it is only read."""
        return Companions()


def _experts(path: Path) -> list[str]:
    return [name for name in EXPERT_FOLDERS.values() if is_original(path / name)]


def _adapter(file: str, part: str) -> AdapterLayout:
    """The adapter file for the transformer in a pipeline's folder `part`."""
    second = ", load_into_transformer_2=True" if part == EXPERT_PARTS["low"] else ""
    return AdapterLayout(
        file,
        "transformer.",
        metadata_key="lora_adapter_metadata",
        library="diffusers",
        loading=f'pipeline.load_lora_weights("{{folder}}", weight_name="{file}"{second})',
        others=(ORIGINAL_KEYS,),  # names used by ComfyUI and most programs that train LoRAs
    )


def original_config(component: WanTransformer) -> dict[str, object]:
    """config.json of Wan-AI's `WanModel` for the architecture of a Wan transformer."""
    built = component.architecture
    if built.pos_embed_seq_len is not None:
        kind = "flf2v"
    elif component.image_channels:
        kind = "i2v"
    else:
        kind = "ti2v" if component.in_channels == 48 else "t2v"  # only TI2V has the VAE of 48 channels
    return {
        "_class_name": ORIGINAL_CLASS,
        "_diffusers_version": diffusers.__version__,
        "dim": built.width,
        "eps": built.eps,
        "ffn_dim": built.ffn_dim,
        "freq_dim": built.freq_dim,
        "in_dim": built.in_channels,
        "model_type": kind,
        "num_heads": built.num_attention_heads,
        "num_layers": built.num_layers,
        "out_dim": built.out_channels,
        "text_len": TEXT_LENGTH,
    }
