"""The weight format `diffusers/encoders`: text encoders, each in its folder, and names in LoRA files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from mm_core.contracts import TaskModule
from mm_core.weights import AdapterLayout, Companions, Layout, Transformers, Written
from mm_diffusers.lora_names import lora_layout
from mm_diffusers.text import DiffusersText


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
        """The transformer's LoRA files, with the names of other programs; None for text encoders."""
        return lora_layout(name, component)

    def companions(self, task: TaskModule, written: Sequence[Written]) -> Companions:
        """None: text encoders are not exported."""
        return Companions()
