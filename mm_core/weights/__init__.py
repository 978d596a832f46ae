"""Weights on disk: formats, key maps, streaming into shards and out of checkpoints, adapters."""

from mm_core.weights.composed import composed
from mm_core.weights.format import AdapterLayout, Companions, Layout, StoredTensors, WeightFormat, Written
from mm_core.weights.key_map import Copy, Fuse, KeyMap, Rename, Reshape, Split, Stack, Transpose
from mm_core.weights.stored import open_stored

__all__ = [
    "AdapterLayout",
    "Companions",
    "Copy",
    "Fuse",
    "KeyMap",
    "Layout",
    "Rename",
    "Reshape",
    "Split",
    "Stack",
    "StoredTensors",
    "Transpose",
    "WeightFormat",
    "Written",
    "composed",
    "open_stored",
]
