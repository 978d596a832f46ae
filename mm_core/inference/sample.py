"""Sampling clips from a stored run: weights from a checkpoint, mp4 or PNG files and a contact sheet. A single
process holds the complete model; several ranks shard it as in training, and share the prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import StoredRun, Weights, Which, stored_run
from mm_core.checkpoint.run_manifest import check_plugins
from mm_core.config.sections import RunConfig
from mm_core.contracts import (
    Clip,
    Engine,
    EnginePlan,
    FrozenPlan,
    InitialWeights,
    Randomness,
    SampleRequest,
    Streamed,
    SupportsCheckRequest,
    SupportsClips,
    TaskModule,
    WeightPlan,
    torch_dtype,
)
from mm_core.data.media.video_files import clip_name, make_folder, preview
from mm_core.data.rows.prompts import Prompt, with_images
from mm_core.device import environment_world
from mm_core.engines import EngineBase
from mm_core.errors import DataError, MMError
from mm_core.evaluation.batches import EvaluatedEngine
from mm_core.evaluation.sample_inputs import Value, with_inputs
from mm_core.evaluation.sampled_clips import (
    check_made,
    complete_request,
    gather_previews,
    no_clips,
    share_of,
    write_own,
)
from mm_core.loading.frozen import load_frozen_of
from mm_core.loading.initial_weights import CheckpointWeights
from mm_core.loading.left_out import WeightSources
from mm_core.modules.casting import cast_as_planned, cast_frozen
from mm_core.modules.tying import tied_names
from mm_core.parallel.frozen_placement import place
from mm_core.parallel.streamed_base import StreamedBase
from mm_core.plan import build_frozen, build_task
from mm_core.runtime.process_group import process_group
from mm_core.runtime.ranks import Ranks


def sample(
    run: str | Path | StoredRun,
    prompt: str | None = None,
    *,
    prompts: Sequence[str | Prompt] = (),
    images: Sequence[str | Path] = (),
    last_images: Sequence[str | Path] = (),
    inputs: Mapping[str, Sequence[Value]] = MappingProxyType({}),
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
        images, last_images, inputs: files of first, of last frames, of inputs by field: one for all or each.
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
    wanted = with_inputs(_prompts(prompt, prompts, images, last_images), inputs)
    stored = stored_run(run, checkpoint, overrides, allow_code)
    request = SampleRequest(
        prompts=tuple(each.text for each in wanted),
        negative_prompt=negative_prompt,
        seed=seed,
        steps=steps,
        guidance=guidance if isinstance(guidance, int | float | None) else tuple(guidance),
        num_frames=num_frames,
        height=height,
        width=width,
        fps=fps,
    )
    with among_ranks() as ranks:
        return _sample(stored, wanted, request, ranks, weights, None if out is None else Path(out), keep)


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
def among_ranks(patient: bool = False) -> Iterator[Ranks]:
    """A context with the process group of all ranks of a command on a stored run, if there are several.

    Args:
        patient: whether ranks wait for each other without a timeout.
    """
    group = process_group(None) if patient else process_group()
    with group if environment_world().world_size > 1 else nullcontext(Ranks.current()) as ranks:
        yield ranks


def _sample(
    stored: StoredRun,
    wanted: Sequence[Prompt],
    request: SampleRequest,
    ranks: Ranks,
    weights: Weights,
    out: Path | None,
    keep: bool,
) -> list[Clip]:
    """This rank's clips of a request, and all ranks' files."""
    source, config = stored.checkpoint, stored.config
    request = complete_request(request, config.task, config.data.train, wanted)
    task = build_task(config, source.adapters)
    if not isinstance(task, SupportsClips) and not callable(getattr(task, "sample", None)):
        raise no_clips(config.task.type)
    if isinstance(task, SupportsCheckRequest):
        task.check_request(request)  # before weights are read
    engine = load_as_rank(task, config, ranks, source, weights)
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
        title = f"{config.run.name}, step {source.facts['step']}, seed {request.seed}"
        _, faults = gather_previews(ranks, previews, None, out, title)
        if faults:
            raise DataError("; ".join(faults), where=str(out))
    return kept


# -- weights -------------------------------------------------------------------------------------


class OneProcess(EngineBase):
    """The engine of one process, without a group: evaluates a complete task as the run's engine plans it."""

    def place_frozen(self, task: TaskModule, plan: EnginePlan, weights: InitialWeights) -> None:
        """Places frozen components as planned, and on the device those that the plan leaves out."""
        planned = {part.name: part for part in plan.frozen}
        for name in task.frozen:
            component = task.get_submodule(name) if isinstance(getattr(task, name), Streamed) else None
            if component is not None and any(True for _ in component.parameters()):
                part = planned.get(name, FrozenPlan(name, "replicated", (), 0, 0, 0))
                place(component, part, self.device, weights)

    def prepare(
        self, task: TaskModule, plan: EnginePlan, optimizer: None, rng: Randomness, weights: WeightPlan
    ) -> None:
        """Casts inputs, streams the base where planned, allocates and fills."""
        cast_as_planned(task, plan)
        base = StreamedBase(task, plan.base, self.device, _lowered(plan)) if plan.base is not None else None
        self._task, self._trained = task, {name: task.get_submodule(name) for name in task.trainable}
        self._tied = {name: tied_names(module) for name, module in self._trained.items()}
        self._allocate(self.device, rng, weights, base.parameters if base is not None else ())
        self._begin(optimizer, weights)
        if base is not None:
            base.begin()


def load_as_rank(
    task: TaskModule, config: RunConfig, ranks: Ranks, checkpoint: OpenedCheckpoint, weights: Weights
) -> EvaluatedEngine:
    """Loads a checkpoint's weights into the task of a stored run: complete in a single process, else sharded.

    All ranks call it together.

    Args:
        task: made by `build_task`.
        config: of the run.
        ranks: of the command.
        checkpoint: whose weights are loaded.
        weights: `ema`, `model`, or `auto`: the average if the checkpoint contains one.

    Returns:
        The engine to evaluate the task with.
    """
    if ranks.count > 1:
        check_plugins(config.registry, ranks)
    if config.train.base_dtype is not None:  # weights below adapters have the dtype of the others here
        cast_frozen(task, torch.float32)
    build_frozen(task)
    own: Engine = config.registry.build("engine", config.engine)
    plan = own.plan(task, ranks.count, 0, purpose="sample")
    engine = own if ranks.count > 1 else OneProcess()
    cast_parameters(task, plan)  # before they have memory
    load_frozen_of(task, engine, plan, config.registry)
    sources = WeightSources(task, config.init_from, config.registry, config.allow_code)
    stored = CheckpointWeights(checkpoint, sources, weights, config.train.base_dtype is not None)
    engine.prepare(task, plan, None, Randomness(config.run.seed), stored)
    task.eval()
    return engine


def _lowered(plan: EnginePlan) -> torch.dtype | None:
    """The dtype below float32 in which the engine computes; None if there is none."""
    return torch_dtype(plan.compute_dtype) if plan.compute_dtype not in (None, "fp32") else None


def cast_parameters(task: TaskModule, plan: EnginePlan) -> None:
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
