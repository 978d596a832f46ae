"""Sampling clips from a stored run: weights from a checkpoint, mp4 or PNG files and a contact sheet. A single
process holds the complete model; several ranks shard it as in training, and share the prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import StoredRun, Weights, Which, stored_run
from mm_core.checkpoint.run_manifest import check_plugins
from mm_core.config.sections import RunConfig
from mm_core.contracts import (
    Clip,
    DataRanks,
    Engine,
    EnginePlan,
    Randomness,
    SampleRequest,
    SupportsCheckRequest,
    SupportsClips,
    TaskModule,
    torch_dtype,
)
from mm_core.data.media.video_files import clip_name, make_folder, preview
from mm_core.data.rows.prompts import Prompt, read_images, with_images
from mm_core.device import current_device, environment_world
from mm_core.errors import DataError, MMError
from mm_core.evaluation.batches import EvaluatedEngine
from mm_core.evaluation.sampled_clips import (
    check_made,
    gather_previews,
    no_clips,
    share_of,
    with_trained_size,
    write_own,
)
from mm_core.loading.frozen import load_frozen_alone, load_frozen_of
from mm_core.loading.initial_weights import CheckpointWeights
from mm_core.loading.run_adapters import task_of
from mm_core.modules.casting import cast_as_planned, cast_frozen, quantise_frozen_values
from mm_core.modules.initialise import initialise
from mm_core.modules.quantised import fill_state, scale_names
from mm_core.modules.tying import state_of, tie, tied_names
from mm_core.parallel.streamed_base import StreamedBase, give_memory
from mm_core.plan import build_frozen
from mm_core.runtime.process_group import process_group
from mm_core.runtime.ranks import Ranks


def sample(
    run: str | Path | StoredRun,
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
    keep: bool = True,
    allow_code: bool = False,
) -> list[Clip]:
    """Samples one clip for each prompt from a checkpoint of a stored run.

    All ranks of a launcher call it together, and each returns and writes its share of the clips.

    Args:
        run: a run's folder, `DIR@STEP`, or one of its checkpoints.
        prompt, prompts: the first prompt, and further ones.
        images, last_images: files of first (and last) frames: one for all prompts, or one for each.
        negative_prompt: guidance leads away from it. seed: the noise of clip i derives from (seed, i).
        steps: solver steps.
        guidance: scale of classifier-free (1 or less: off) or embedded guidance, or one for each expert.
        num_frames, height, width, fps: of a clip; None takes the task's `sample`, then the training data's.
        out: folder for mp4 files (PNG for one frame) and a contact sheet; None writes nothing.
        weights: `ema`, `model`, or `auto`: the average if the checkpoint contains one.
        checkpoint: `latest` or `best` complete checkpoint.
        overrides: `key.path=value` to override the run's config, for example paths of moved folders.
        keep: false returns no clips: each is written to `out` when it is ready, and freed.
        allow_code: whether code named by the run may be executed if this user has not trained with it.

    Raises:
        MMError: no prompt, no checkpoint, a size or images that the model does not take, missing images.
    """
    wanted = _prompts(prompt, prompts, images, last_images)
    stored = stored_run(run, checkpoint, overrides, allow_code)
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
    with among_ranks():
        return _sample(stored, with_trained_size(request, stored.config), weights, out, keep)


def _prompts(
    first: str | None,
    others: Sequence[str | Prompt],
    images: Sequence[str | Path],
    last_images: Sequence[str | Path],
) -> list[Prompt]:
    """All prompts with their images. MMError if there is none."""
    given = [*([first] if first is not None else []), *others]
    if not given:
        raise MMError("there is no prompt to sample", accepted="prompt='...' or prompts=[...]")
    return with_images([p if isinstance(p, Prompt) else Prompt(p) for p in given], images, last_images)


@contextmanager
def among_ranks(patient: bool = False) -> Iterator[None]:
    """A context with the process group of all ranks of a command on a stored run, if there are several.

    Args:
        patient: whether ranks wait for each other without a timeout.
    """
    group = process_group(None) if patient else process_group()
    with group if environment_world().world_size > 1 else nullcontext():
        yield


def _sample(
    stored: StoredRun,
    request: SampleRequest,
    weights: Weights,
    folder: str | Path | None,
    keep: bool,
) -> list[Clip]:
    """This rank's clips of a request, and all ranks' files."""
    out = None if folder is None else Path(folder)
    source, config = stored.checkpoint, stored.config
    ranks, task = Ranks.current(), task_of(config, source)
    if not isinstance(task, SupportsClips) and not callable(getattr(task, "sample", None)):
        raise no_clips(config.task.type)
    if isinstance(task, SupportsCheckRequest):
        task.check_request(request)  # before weights are read
    engine = load_as_rank(task, config, source, weights)
    if out is not None:
        make_folder(out)  # fails early, before hours of work
    share, real = share_of(request, engine.data_ranks)
    kept: list[Clip] = []
    previews: list[Clip] = []
    with engine.evaluating():
        clips = task.clips(share) if isinstance(task, SupportsClips) else task.sample(share)
        made = 0
        for number, clip in enumerate(clips or ()):
            made = number + 1
            if number >= real or not engine.data_ranks.leads:
                continue  # only generated because other ranks need this rank's forwards
            if out is not None:
                if fault := write_own([clip], share.first + number, out):
                    raise DataError(
                        f"the clip cannot be written: {fault}",
                        where=str(out / clip_name(share.first + number, clip)),
                        hint="choose another folder, and check that the disk is not full",
                    )
                previews.append(preview(clip))
            if keep:
                kept.append(clip)
    check_made(ranks, config.task.type, made, real)
    if out is not None:
        _, faults = gather_previews(ranks, previews, None, out)
        if faults:
            raise DataError("; ".join(faults), where=str(out))
    return kept


# -- weights -------------------------------------------------------------------------------------


@dataclass
class SingleProcess:
    """The parts of an engine that evaluating a stored run needs, for a task that is not sharded."""

    device: torch.device
    data_ranks: DataRanks = field(default_factory=DataRanks)

    def evaluating(self) -> AbstractContextManager[None]:
        """A context without gradients; a loaded task is already in evaluation mode."""
        return torch.no_grad()


def load_as_rank(
    task: TaskModule, config: RunConfig, checkpoint: OpenedCheckpoint, weights: Weights
) -> EvaluatedEngine:
    """Loads a checkpoint's weights into the task of a stored run: complete in a single process, else sharded.

    All ranks call it together.

    Args:
        task: made by `task_of`.
        config: of the run.
        checkpoint: whose weights are loaded.
        weights: `ema`, `model`, or `auto`: the average if the checkpoint contains one.

    Returns:
        The engine to evaluate the task with.
    """
    if Ranks.current().count > 1:
        return load_sharded(task, config, checkpoint, weights)
    load_alone(task, config, checkpoint, weights)
    return SingleProcess(current_device())


def load_alone(task: TaskModule, config: RunConfig, checkpoint: OpenedCheckpoint, weights: Weights) -> None:
    """Loads a checkpoint's weights into the complete task of a stored run, in a single process.

    Args:
        task: made by `task_of`.
        config: of the run.
        checkpoint: whose weights are loaded.
        weights: `ema`, `model`, or `auto`: the average if the checkpoint contains one.
    """
    device = current_device()
    _, plan = _planned(task, config, 1)
    compute_as_planned(task, plan)  # before parameters have memory
    base = StreamedBase(task, plan.base, device, _lowered(plan)) if plan.base is not None else None
    host = base.parameters if base is not None else set()
    load_frozen_alone(task, device, plan, config)
    stored = CheckpointWeights(checkpoint, config, task, weights)
    state: dict[str, torch.Tensor] = {}
    for name in task.trainable:
        module = task.get_submodule(name)
        tied = tied_names(module)
        give_memory(module, device, host)
        tie(module, tied)
        own = state_of(module, name, tied)
        # Fills tables that checkpoints do not contain.
        initialise(module, name, Randomness(config.run.seed), spared={*own, *scale_names(module, name)})
        state |= own
    fill_state(stored, state, {name: task.get_submodule(name) for name in task.trainable})
    _round_base_weights(task, config)
    if base is not None:
        base.begin()
    task.eval()


def load_sharded(
    task: TaskModule, config: RunConfig, checkpoint: OpenedCheckpoint, weights: Weights
) -> Engine:
    """Loads a checkpoint's weights into the task of a stored run, sharded over all ranks by the run's engine.

    A collective call.

    Args:
        task: made by `task_of`.
        config: of the run.
        checkpoint: whose weights are loaded.
        weights: `ema`, `model`, or `auto`: the average if the checkpoint contains one.
    """
    check_plugins(config)
    engine, plan = _planned(task, config, Ranks.current().count)
    _cast_parameters(task, plan)
    load_frozen_of(task, engine, plan, config)
    stored = CheckpointWeights(checkpoint, config, task, weights)
    engine.prepare(task, plan, None, Randomness(config.run.seed), stored)
    _round_base_weights(task, config)
    task.eval()
    return engine


def _planned(task: TaskModule, config: RunConfig, ranks: int) -> tuple[Engine, EnginePlan]:
    """The run's engine, and its plan for a task with empty frozen components. Weights below adapters get the
    dtype of the others, different from training, before parameters have memory."""
    if config.train.base_dtype is not None:
        cast_frozen(task, torch.float32)
    build_frozen(task)
    engine: Engine = config.registry.build("engine", config.engine)
    return engine, engine.plan(task, ranks, 0, purpose="sample")


def _round_base_weights(task: TaskModule, config: RunConfig) -> None:
    """Rounds weights below adapters to the values used in training."""
    if config.train.base_dtype is not None:
        quantise_frozen_values(task, torch.bfloat16)


def _lowered(plan: EnginePlan) -> torch.dtype | None:
    """The dtype below float32 in which the engine computes; None if there is none."""
    return torch_dtype(plan.compute_dtype) if plan.compute_dtype not in (None, "fp32") else None


def _cast_parameters(task: TaskModule, plan: EnginePlan) -> None:
    """Casts the parameters that the engine would cast; ignored modules and buffers keep their dtype."""
    if (dtype := _lowered(plan)) is None:
        return
    for root in task.trainable:
        for path, parameter in task.get_submodule(root).named_parameters(prefix=root):
            if parameter.is_floating_point() and not any(path.startswith(p + ".") for p in plan.ignored):
                parameter.data = parameter.data.to(dtype)


def stored_weights(checkpoint: OpenedCheckpoint, weights: Weights) -> Literal["model", "ema"]:
    """Resolves `auto` for the weights of a stored run: the average if the checkpoint contains one."""
    if weights == "auto":
        return "ema" if "ema" in checkpoint.parts else "model"
    return weights


def compute_as_planned(task: TaskModule, plan: EnginePlan) -> None:
    """Casts parameters and inputs of a task that is not sharded to the plan's `compute_dtype`, as its engine
    does; tables and timesteps keep their precision."""
    _cast_parameters(task, plan)
    cast_as_planned(task, plan)
