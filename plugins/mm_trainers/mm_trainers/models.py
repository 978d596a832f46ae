"""Diffusion models that other tools train too: their parts here, and the blocks that adapters change."""

from __future__ import annotations

from mm_core.interchange import Migrated

PAIRS = ("wan2.2-t2v-a14b", "wan2.2-i2v-a14b")
"""Presets of two experts."""


def set_wan(run: Migrated, preset: str | None, folder: str, where: str, train: str = "both") -> None:
    """The parts of a Wan model, from the folder of its pipeline.

    Args:
        run: receives them.
        preset: the published model; None where its name does not show which.
        folder: of the pipeline, or its name on the hub.
        where: the place of the model's name.
        train: of a pair of experts, which are trained.
    """
    start, pair = "task.predictor", preset in PAIRS
    run.set("task.type", "text_to_video", where)
    run.set(f"{start}.type", "wan/two_expert" if pair else "wan/transformer", where)
    run.set(f"{start}.from_pretrained", folder, where)
    if preset is not None:
        run.set(f"{start}.preset", preset, where)
    if pair:
        run.set(f"{start}.train", train, where)
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
    run.set("task.scheduler.type", "diffusers/schedule", where)


def is_wan(run: Migrated) -> bool:
    """Whether the run trains a Wan model."""
    return bool(run.lines["task.type"].value == "text_to_video")


def block_targets(run: Migrated, model: str) -> list[str]:
    """Patterns of the blocks of a model, whose linear layers adapters change."""
    if is_wan(run):
        pair = run.lines["task.predictor.type"].value == "wan/two_expert"
        return ["predictor.{*}.blocks.{*}" if pair else "predictor.blocks.{*}"]
    names = ["layers"] if model == "zimage" else ["transformer_blocks"]
    names += ["single_transformer_blocks"] if model.startswith(("flux", "flex")) else []
    return [f"predictor.transformer.{name}.{{*}}" for name in names]


def whole_frames(count: int) -> int:
    """The frames of a clip that a video model's latents hold."""
    return max(count - 1, 0) // 4 * 4 + 1
