"""Clips from a trained run: one process, weights from a checkpoint, mp4 files and a contact sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from mm_core.config.load import load_config
from mm_core.config.schema import RunConfig
from mm_core.contracts import Clip, Randomness, SampleRequest, torch_dtype
from mm_core.device import current_device
from mm_core.errors import MMError
from mm_core.parallel.casting import cast_inputs, hold_frozen
from mm_core.parallel.initialise import initialise
from mm_core.parallel.tying import tie, tied_names
from mm_core.plan import build_task
from mm_core.plugin.registry import build
from mm_core.train.adapter_runs import adapters_in
from mm_core.train.base_weights import recorded
from mm_core.train.checkpoint_dcp import stored_parts
from mm_core.train.checkpoint_reading import find_checkpoint, load_model_only
from mm_core.train.frozen import load_frozen_alone
from mm_core.train.media import write_clips
from mm_core.train.prompts import Prompt, read_images, with_images
from mm_core.train.sampled_clips import with_trained_size

if TYPE_CHECKING:
    from torch import nn

Weights = Literal["auto", "model", "ema"]
Which = Literal["latest", "best"]


def sample(
    run: str | Path,
    prompt: str | None = None,
    *,
    prompts: Sequence[str | Prompt] = (),
    images: Sequence[str | Path] = (),
    last_images: Sequence[str | Path] = (),
    negative_prompt: str = "",
    seed: int = 0,
    steps: int | None = None,
    guidance: float | Sequence[float] | None = None,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    fps: float | None = None,
    out: str | Path | None = None,
    weights: Weights = "auto",
    checkpoint: Which = "latest",
    overrides: Sequence[str] = (),
) -> list[Clip]:
    """Generates one clip a prompt from a run's checkpoint.

    Args:
        run: a run's folder, or one of its checkpoints.
        prompt, prompts: what to show; `prompt` comes first when both are given.
        images, last_images: for image-to-video, files of the first (and last) frame: one for all prompts, or
            one for each. They are brought to the clip's size; one of another shape is stretched.
        negative_prompt: what guidance leads away from.
        seed: clip i's noise comes from (seed, i).
        steps: solver steps. guidance: classifier-free guidance scale (up to 1 it is
            off), or one for each expert of the predictor, from noise to clean.
        num_frames, height, width, fps: size in pixels and frames, and frames a second; None takes
            the task's `sample` defaults, then what the run was trained on.
        out: folder for mp4 files and a contact sheet; None writes nothing.
        weights: `ema`, `model`, or `auto`: the average where the checkpoint holds one.
        checkpoint: `latest` or `best`, of the complete ones.
        overrides: `key.path=value` over the run's config: where folders are that have moved.

    Raises:
        MMError: no prompt, no checkpoint, a size that the model can not make, images that it does not take
            or that are missing.
    """
    given = [*([prompt] if prompt is not None else []), *prompts]
    if not given:
        raise MMError("there is no prompt", accepted="prompt='...' or prompts=[...]")
    wanted = with_images([p if isinstance(p, Prompt) else Prompt(p) for p in given], images, last_images)
    source = find_checkpoint(Path(run), checkpoint)
    config = load_config(source / "config.yaml", overrides, spare_environment=True)
    request = SampleRequest(
        prompts=tuple(each.text for each in wanted),
        images=read_images(wanted),
        negative_prompt=negative_prompt,
        seed=seed,
        steps=steps,
        guidance=guidance if isinstance(guidance, int | float | None) else tuple(guidance),
        num_frames=num_frames,
        height=height,
        width=width,
        fps=fps,
    )
    request = with_trained_size(request, config)
    task = load_task(config, source, weights)
    with torch.no_grad():
        clips: list[Clip] = task.sample(request)  # type: ignore[operator]
    if out is not None:
        write_clips(clips, Path(out))
    return clips


def load_task(config: RunConfig, checkpoint: Path, weights: Weights = "auto") -> nn.Module:
    """The run's task on this process's device, in evaluation mode, with the checkpoint's weights. An
    accelerator computes in the dtype that the engine trained in."""
    task, device = build_task(config, adapters_in(checkpoint)), current_device()
    state: dict[str, torch.Tensor] = {}
    load_frozen_alone(task, device, config)
    for name in task.trainable:  # type: ignore[union-attr]
        module = task.get_submodule(name)
        tied = tied_names(module)
        module.to_empty(device=device)
        tie(module, tied)
        own = {f"{name}.{key}": t for key, t in module.state_dict().items() if key not in tied}
        # Fills tables that no checkpoint holds.
        initialise(module, name, Randomness(config.run.seed), spared=own)
        state |= own
    absent = recorded(checkpoint, config, task, state)
    own = {name: tensor for name, tensor in state.items() if name not in absent.names}
    load_model_only(checkpoint, own, weights)
    absent.fill(state)
    if config.train.base_dtype is not None:
        hold_frozen(task, torch.float32)  # its values stay, and one process computes all in one dtype
    if device.type != "cpu":
        compute_as_trained(task, config)
    return task.eval()


def stored_weights(checkpoint: Path, weights: Weights) -> Literal["model", "ema"]:
    """What `auto` stands for in a checkpoint: the average where it holds one, whatever its config says."""
    if weights == "auto":
        return "ema" if "ema" in stored_parts(checkpoint) else "model"
    return weights


def compute_as_trained(task: nn.Module, config: RunConfig) -> None:
    """Parameters and inputs in the engine's `param_dtype`, as the sharded modules compute; tables and
    timesteps keep their precision."""
    options = config.engine.options
    name = options.get("param_dtype")
    if name in (None, "fp32"):
        return
    undivided = {**options, "sharding_size": "auto"} if "sharding_size" in options else options
    alone = replace(config.engine, options=undivided)  # one rank is no multiple of the run's shards
    dtype, plan = torch_dtype(name), build("engine", alone).plan(task, 1, 0)
    for root in task.trainable:  # type: ignore[union-attr]
        for path, parameter in task.get_submodule(root).named_parameters(prefix=root):
            if not any(path.startswith(ignored + ".") for ignored in plan.ignored):
                parameter.data = parameter.data.to(dtype)
    if options.get("cast_forward_inputs", True):
        for path in (*plan.wrapped, *task.trainable):  # type: ignore[misc]
            cast_inputs(task.get_submodule(path), dtype)
