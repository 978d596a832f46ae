"""Sampling clips on several ranks: each rank's share of the prompts, and gathering of the clips."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_core.contracts import Clip, DataRanks, SampleRequest
from mm_core.data.media.contact_sheet import write_contact_sheet
from mm_core.data.media.video_files import (
    SHEET,
    clip_name,
    from_bytes,
    make_folder,
    preview,
    to_bytes,
    write_prompts,
    write_video,
)
from mm_core.data.rows.prompts import Prompt, read_images
from mm_core.errors import ContractError, plural
from mm_core.evaluation.sample_inputs import read_inputs
from mm_core.runtime.groups import wait_for_ranks
from mm_core.runtime.ranks import Ranks
from mm_core.schema.fields import ComponentConfig

PLAYBACK_FPS = 16.0
"""Frames per second of written clips if neither the config nor the data set a rate."""


def with_trained_size(request: SampleRequest, task: ComponentConfig, data: ComponentConfig) -> SampleRequest:
    """A sampling request completed with clip sizes of the training data, where nothing else sets them.

    Args:
        request: its own sizes, then those of the task's `sample`, have priority.
        task: the run's config of it.
        data: the run's config of the training data.
    """
    defaults, options = task.options.get("sample"), data.options
    filled: dict[str, Any] = {}
    for name in ("num_frames", "height", "width", "fps"):
        if getattr(request, name) is None and (defaults is None or getattr(defaults, name) is None):
            filled[name] = (
                options.get(name) or options.get(f"max_{name}") or (PLAYBACK_FPS if name == "fps" else None)
            )
    return dataclasses.replace(request, **filled)


def complete_request(
    request: SampleRequest, task: ComponentConfig, data: ComponentConfig, prompts: Sequence[Prompt]
) -> SampleRequest:
    """A sampling request with sizes (`with_trained_size`) and the files of its prompts: frames and inputs.

    Args:
        request: of the prompts' texts.
        task: the run's config of it.
        data: the run's config of the training data.
        prompts: with their files.
    """
    defaults, completed = task.options.get("sample"), with_trained_size(request, task, data)
    frames = completed.num_frames or getattr(defaults, "num_frames", None)
    # Where nothing sets a rate, files are read at their own, as in training: not at that of the playback.
    fps = request.fps or getattr(defaults, "fps", None) or data.options.get("fps")
    inputs = read_inputs(prompts, frames or 1, fps)
    return dataclasses.replace(completed, images=read_images(prompts), inputs=inputs)


def share_of(request: SampleRequest, data_ranks: DataRanks) -> tuple[SampleRequest, int]:
    """A rank's part of a sampling request, filled up to a common length, and its number of real clips.

    Clip i is identical to the one that a single process samples.
    """
    count = len(request.prompts)
    block = -(-count // data_ranks.count)
    first = data_ranks.rank * block
    real = len(range(first, min(first + block, count)))
    rows = [*range(first, first + real), *[0] * (block - real)]
    return dataclasses.replace(
        request,
        prompts=tuple(request.prompts[row] for row in rows),
        images=tuple(request.images[row] for row in rows) if request.images else (),
        inputs={name: tuple(values[row] for row in rows) for name, values in request.inputs.items()},
        first=first,
    ), real


def no_clips(task: str, made: int = 0, wanted: int | None = None) -> ContractError:
    """The error for a task that samples no clips, or fewer clips than prompts.

    Args:
        task: its type or class.
        made: number of clips it made.
        wanted: number of prompts; None for a task that makes no clips at all.
    """
    what = (
        "makes no clips" if wanted is None else f"made {plural(made, 'clip')} for {plural(wanted, 'prompt')}"
    )
    return ContractError(
        f"the task {task} {what}",
        where="task.type",
        accepted="a task whose `sample` returns one clip for each prompt, or one that answers with text",
        hint="let the task's `sample` return the clips; `mm eval` evaluates runs of tasks without clips",
    )


def check_made(ranks: Ranks, task: str, made: int, wanted: int) -> None:
    """Checks that every rank sampled one clip for each of its prompts; a collective call.

    Args:
        ranks: of the run.
        task: type of the task, for the error message.
        made: clips of this rank.
        wanted: prompts of this rank.

    Raises:
        ContractError: some rank made fewer clips than it has prompts; raised on all ranks.
    """
    rows = ranks.gather((min(made, wanted), wanted))
    in_all, of_all = sum(made for made, _ in rows), sum(wanted for _, wanted in rows)
    if in_all < of_all:
        raise no_clips(task, in_all, of_all)


def write_own(clips: Sequence[Clip], first: int, folder: Path) -> str | None:
    """Writes this rank's sampled clips as mp4 files, single frames as PNG.

    Args:
        clips: the clips.
        first: number of the first clip.
        folder: to write to.

    Returns:
        The error, if any: a clip that cannot be written does not end the run.
    """
    try:
        make_folder(folder)
        for number, clip in enumerate(clips, start=first):
            write_video(clip, folder / clip_name(number, clip))
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"
    return None


def gather_previews(
    ranks: Ranks, clips: Sequence[Clip], fault: str | None, folder: Path, title: str
) -> tuple[list[Clip], list[str]]:
    """Gathers previews of all sampled clips on rank 0, which writes the contact sheet and `prompts.json`.

    A collective call; all files exist when it returns.

    Args:
        ranks: of the run.
        clips: of this rank.
        fault: this rank's error, if it could not write its clips.
        folder: to write to.
        title: of the contact sheet.

    Returns:
        On rank 0 the previews in order, and the errors; empty lists on other ranks.
    """
    own = [(to_bytes(preview(clip)), clip.fps, clip.prompt) for clip in clips]
    rows = ranks.gather_first((own, fault))
    previews = [Clip(from_bytes(frames), fps, prompt) for shares, _ in rows for frames, fps, prompt in shares]
    faults = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(rows) if text is not None]
    if ranks.rank == 0 and not faults:
        try:
            write_prompts({clip_name(i, clip): clip.prompt for i, clip in enumerate(previews)}, folder)
            frames = [(each, prompt) for shares, _ in rows for each, _, prompt in shares]
            write_contact_sheet(frames, folder / SHEET, title)
        except Exception as error:
            faults = [f"rank 0: {type(error).__name__}: {error}"]
    if not ranks.alone:
        wait_for_ranks()
    return previews, faults
