"""Weights files of other libraries and adapters: formats, key maps, aliases, LoRA layers and scales."""

from mm_core.hub import no_folder
from mm_core.weights.fitting import Fit, best_layout, candidate_layouts, fit, formats_of, no_layout_error
from mm_core.weights.formats.composed import composed
from mm_core.weights.formats.format import (
    AdapterLayout,
    Companions,
    Layout,
    StoredTensors,
    WeightFormat,
    Written,
)
from mm_core.weights.formats.key_map import Copy, Fuse, KeyMap, Rename, Reshape, Split, Stack, Transpose
from mm_core.weights.formats.libraries import (
    Diffusers,
    Safetensors,
    Transformers,
    only_pickled,
    pipeline_parts,
    read_mapping,
)
from mm_core.weights.formats.part_of import Below
from mm_core.weights.stored import INDEX, check_unscaled, load_tensors, open_saved, open_stored
from mm_core.weights.streaming import stream

__all__ = [
    "INDEX",
    "AdapterLayout",
    "Below",
    "Companions",
    "Copy",
    "Diffusers",
    "Fit",
    "Fuse",
    "KeyMap",
    "Layout",
    "Rename",
    "Reshape",
    "Safetensors",
    "Split",
    "Stack",
    "StoredTensors",
    "Transformers",
    "Transpose",
    "WeightFormat",
    "Written",
    "best_layout",
    "candidate_layouts",
    "check_unscaled",
    "composed",
    "fit",
    "formats_of",
    "load_tensors",
    "no_folder",
    "no_layout_error",
    "only_pickled",
    "open_saved",
    "open_stored",
    "pipeline_parts",
    "read_mapping",
    "stream",
]
