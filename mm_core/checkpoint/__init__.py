"""Checkpoints of a run: saving, opening, retention, checks at a resume; complete or absent, on any ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mm_core.lazy import lazy_names

if TYPE_CHECKING:
    from mm_core.checkpoint.dcp_format import Dcp, DcpTensors
    from mm_core.checkpoint.reading import find_checkpoint, load_model_only, open_checkpoint
    from mm_core.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "Dcp", "DcpTensors", "find_checkpoint", "load_model_only", "open_checkpoint"]

__getattr__ = lazy_names(__name__)
