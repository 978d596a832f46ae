"""Diffusion models that other tools train too: their parts here, and the blocks that adapters change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mm_core.interchange import Migrated

PAIRS: Mapping[str, str] = {"wan2.2-t2v-a14b": "t2v", "wan2.2-i2v-a14b": "i2v"}
"""Presets of two experts."""
_BLOCKS = ("predictor.transformer.transformer_blocks.{*}",)
_BOTH = (*_BLOCKS, "predictor.transformer.single_transformer_blocks.{*}")
BLOCKS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("FluxPipeline", "FluxKontextPipeline", "Flux2KleinPipeline"), _BOTH),
    **dict.fromkeys(("QwenImagePipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"), _BLOCKS),
    **dict.fromkeys(("StableDiffusion3Pipeline", "Krea2Pipeline", "HunyuanVideo15Pipeline"), _BLOCKS),
    "HunyuanVideo15ImageToVideoPipeline": _BLOCKS,
    "ZImagePipeline": ("predictor.transformer.layers.{*}",),
}
"""Pipelines of Diffusers that are trained here -> their repeated blocks."""


def set_wan(run: Migrated, preset: str | None, folder: str, where: str, train: str = "both") -> None:
    """The parts of a Wan model, from the folder of its pipeline.

    Args:
        run: receives them.
        preset: the published model; None where its name does not show which.
        folder: of the pipeline, or its name on the hub.
        where: the place of the model's name.
        train: of a pair of experts, which are trained.
    """
    pair = preset in PAIRS
    run.set("task.type", "text_to_video", where)
    run.set("task.predictor.type", "wan/two_expert" if pair else "wan/transformer", where)
    if preset is not None:
        run.set("task.predictor.preset", preset, where)
    run.set("task.predictor.from_pretrained", folder, where)
    if pair:
        run.set("task.predictor.train", train, where)
    parts = {"autoencoder": ("wan/vae", "vae"), "text_encoder": ("wan/umt5", "text_encoder")}
    if preset is not None and preset.startswith("wan2.1-") and "-t2v-" not in preset:
        parts["image_encoder"] = ("wan/clip_vision", "image_encoder")
    for part, (kind, name) in parts.items():
        run.set(f"task.{part}.type", kind, where)
        run.set(f"task.{part}.from_pretrained", f"{folder}/{name}", where)
    run.set("task.autoencoder.dtype", "bf16", where)
    run.set("task.scheduler.type", "wan/flow_match", where)
    run.set("task.scheduler.loss_weighting", "none", "default of the tool", "ours is gaussian")


def set_pipeline(run: Migrated, folder: str, where: str) -> None:
    """A pipeline of Diffusers as it is, from its folder."""
    run.set("task.type", "diffusers/pipeline", where)
    run.set("task.pipeline", folder, where)


def set_density(run: Migrated, density: str, shift: float | str, where: str, note: str = "") -> None:
    """The noise levels of training: their density, and what shifts them towards noise."""
    run.set("task.scheduler.type", "wan/flow_match" if is_wan(run) else "diffusers/schedule", where)
    run.set("task.scheduler.timesteps", density, where, note)
    run.set("task.scheduler.shift", shift, where, "ours is 5" if is_wan(run) else "")


def is_wan(run: Migrated) -> bool:
    """Whether the run trains a Wan model."""
    return bool(run.lines["task.type"].value == "text_to_video")


def block_targets(run: Migrated, pipeline: str | None) -> list[str]:
    """Patterns of the blocks of a model, whose linear layers adapters change."""
    if not is_wan(run):
        return [*BLOCKS[pipeline or ""]]
    pair = run.lines["task.predictor.type"].value == "wan/two_expert"
    return ["predictor.{*}.blocks.{*}" if pair else "predictor.blocks.{*}"]


def listed(value: Any) -> list[Any]:
    """A value as a list of one, and a list as it is."""
    return value if isinstance(value, list) else [value]
