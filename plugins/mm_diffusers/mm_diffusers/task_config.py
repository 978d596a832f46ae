"""Config of the task `diffusers/pipeline`, without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated

from mm_core.plugin import ComponentConfig, InputPath, Kind
from mm_core.tasks import TextToVideoConfig

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

    pipeline: InputPath  # folder of a pipeline of Diffusers
    predictor: Annotated[ComponentConfig, Kind("predictor")] = _PREDICTOR
    autoencoder: Annotated[ComponentConfig, Kind("autoencoder")] = _AUTOENCODER
    text_encoder: Annotated[ComponentConfig, Kind("text_encoder")] = _TEXT_ENCODER
    scheduler: Annotated[ComponentConfig, Kind("scheduler")] = _SCHEDULER

    def __post_init__(self) -> None:
        filled = {"from_pretrained": self.pipeline, "family": self.predictor.options.get("family")}
        for each in fields(self):
            part = getattr(self, each.name)
            if not isinstance(part, ComponentConfig):
                continue
            new = {name: value for name, value in filled.items() if part.options.get(name, "") is None}
            if new:
                options = {**part.options, **new}
                object.__setattr__(self, each.name, replace(part, options=options, derived=tuple(new)))
