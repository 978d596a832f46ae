"""The file of an adapter that an export writes: its layout, and its settings as in PEFT's configs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from mm_core.errors import ContractError
from mm_core.weights.adapters.files import AdapterScale
from mm_core.weights.adapters.kinds import PEFT_TYPES, peft_factor
from mm_core.weights.adapters.stored_names import stored_module
from mm_core.weights.formats.format import AdapterLayout, Layout
from mm_core.weights.formats.key_map import Copy, KeyMap


def adapter_files(
    layout: AdapterLayout,
    placed: Mapping[str, tuple[Copy, ...]],
    scales: Mapping[str, AdapterScale],
    beside: Sequence[str],
    folder: str,
) -> Layout:
    """The layout of one adapter's file, for an export.

    Args:
        layout: the format's layout of the component's adapters.
        placed: the file's tensors, by name.
        scales: rank and scale of the adapted modules.
        beside: modules that the file contains in full.
        folder: folder that contains `layout.file`.
    """
    if len({scale.dora for scale in scales.values()}) > 1 and not layout.additions:
        raise ContractError(
            "some modules of this adapter have a DoRA and some have not, which this layout cannot express",
            accepted="lora/comfyui",
            hint="export merged weights (--merge-lora)",
        )
    texts, metadata = {}, {"format": "pt", **layout.texts}
    if layout.config is not None or layout.metadata_key is not None:
        settings = peft_settings(layout, scales, beside)
    if layout.config is not None:
        texts[layout.config] = json.dumps(settings, indent=2) + "\n"
    if layout.metadata_key is not None:
        held = {f"{layout.module_prefix}{key}": settings[key] for key in scale_settings(scales)}
        metadata[layout.metadata_key] = json.dumps(held, indent=2, sort_keys=True)
    file = PurePath(folder, layout.file)
    keys, stem = KeyMap(placed=placed), file.name.removesuffix(".safetensors")
    about = (layout.library, layout.loading, layout.part)
    return Layout(keys, str(file.parent), stem, texts, metadata, *about)


def peft_settings(
    layout: AdapterLayout, scales: Mapping[str, AdapterScale], beside: Sequence[str] = ()
) -> dict[str, object]:
    """The content of an adapter's adapter_config.json: PEFT's LoraConfig.

    Args:
        layout: the format's layout of the component's adapters.
        scales: rank and scale of the adapted modules, by path in the component.
        beside: modules that the file contains in full.
    """
    names = {stored_module(layout, module): scale for module, scale in scales.items()}
    kind = next(iter(scales.values())).kind
    only_lora = {"bias": "none", "fan_in_fan_out": False, "init_lora_weights": True, "lora_dropout": 0.0}
    return {
        "peft_type": PEFT_TYPES[kind],
        "base_model_name_or_path": None,
        "task_type": None,
        "inference_mode": True,
        **(only_lora if kind == "lora" else {"init_weights": True}),
        **(
            {"decompose_factor": peft_factor(s.blocks for s in scales.values() if s.blocks)}
            if kind == "lokr"
            else {}
        ),
        "modules_to_save": [stored_module(layout, module) for module in beside] or None,
        **scale_settings(names),
    }


def scale_settings(scales: Mapping[str, AdapterScale]) -> dict[str, object]:
    """The fields of PEFT's config for an adapter's modules, ranks and scales."""
    first = next(iter(scales.values()))
    ranks = {_whole_pattern(name): s.rank for name, s in scales.items() if s.rank != first.rank}
    alphas = {_whole_pattern(name): _plain(s.alpha) for name, s in scales.items() if s.alpha != first.alpha}
    only_lora = {"use_dora": first.dora, "use_rslora": first.rslora}
    return {
        "r": first.rank,
        "lora_alpha" if first.kind == "lora" else "alpha": _plain(first.alpha),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        **(only_lora if first.kind == "lora" else {}),
        "target_modules": sorted(scales),
    }


def _whole_pattern(name: str) -> str:
    """A PEFT pattern for this module only: without the `^` it would also match the end of other paths."""
    return f"^{re.escape(name)}"


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number
