"""Config of the task `diffusers/pipeline`, without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from mm_core.plugin import ComponentConfig, Kind
from mm_core.tasks import TextToVideoConfig
from mm_diffusers.folder import PipelineFolder

_PREDICTOR, _AUTOENCODER, _TEXT_ENCODER, _SCHEDULER = (
    ComponentConfig(kind, f"diffusers/{name}", {"from_pretrained": None})
    for kind, name in (
        ("predictor", "transformer"),
        ("autoencoder", "vae"),
        ("text_encoder", "text"),
        ("scheduler", "schedule"),
    )
)


@dataclass(frozen=True, kw_only=True)
class PipelineTaskConfig(TextToVideoConfig):
    """Config of the task `diffusers/pipeline`: what is not set here comes from the pipeline's folder."""

    pipeline: str  # folder of a pipeline of Diffusers
    predictor: Annotated[ComponentConfig, Kind("predictor")] = _PREDICTOR
    autoencoder: Annotated[ComponentConfig, Kind("autoencoder")] = _AUTOENCODER
    text_encoder: Annotated[ComponentConfig, Kind("text_encoder")] = _TEXT_ENCODER
    scheduler: Annotated[ComponentConfig, Kind("scheduler")] = _SCHEDULER

    def __post_init__(self) -> None:
        if self.image_encoder is None and PipelineFolder(Path(self.pipeline)).has("image_encoder"):
            own = ComponentConfig("image_encoder", "diffusers/image", {"from_pretrained": None})
            object.__setattr__(self, "image_encoder", own)
        for each in fields(self):
            part = getattr(self, each.name)
            if isinstance(part, ComponentConfig) and part.options.get("from_pretrained", "") is None:
                filled: dict[str, Any] = {**part.options, "from_pretrained": self.pipeline}
                object.__setattr__(
                    self, each.name, replace(part, options=filled, derived=("from_pretrained",))
                )
