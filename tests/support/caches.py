"""Feature caches of before."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load, save


def written_before(path: Path) -> None:
    """Makes a shard of a feature cache one that was written before entries had checksums (format 1)."""
    tensors = load(path.read_bytes())
    tensors["index"] = tensors["index"][:, :5].contiguous()
    path.write_bytes(save(tensors, {"format": "mm_core feature cache 1"}))
