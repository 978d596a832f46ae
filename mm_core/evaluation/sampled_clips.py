"""Clips that several ranks sample: who generates which prompt, and how they come together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from mm_core.config.sections import RunConfig
from mm_core.contracts import Clip, SampleRequest
from mm_core.data.media.video_files import (
    SHEET,
    clip_name,
    from_bytes,
    make_folder,
    preview,
    to_bytes,
    write_contact_sheet,
    write_prompts,
    write_video,
)
from mm_core.errors import ContractError
from mm_core.runtime.groups import wait_for_ranks
from mm_core.runtime.ranks import Ranks

T = TypeVar("T")

PLAYBACK_FPS = 16.0
"""Frames a second of written files where neither the config nor the data names a rate."""


def with_trained_size(request: SampleRequest, config: RunConfig) -> SampleRequest:
    """Sizes that neither the request nor the task's `sample` sets: those of the training data."""
    defaults = config.task.options.get("sample")
    trained = config.data.train.options
    filled: dict[str, Any] = {}
    for name in ("num_frames", "height", "width", "fps"):
        if getattr(request, name) is None and (defaults is None or getattr(defaults, name) is None):
            filled[name] = trained.get(name) or (PLAYBACK_FPS if name == "fps" else None)
    return dataclasses.replace(request, **filled)


def share_prompts(prompts: Sequence[T], rank: int, count: int) -> tuple[int, tuple[T, ...], int]:
    """A rank's block of the prompts: the number of its first, the block filled up to the length of the
    others', and how many of it are real. Every rank generates equally many."""
    block = -(-len(prompts) // count)
    first = rank * block
    mine = tuple(prompts[first : first + block])
    return first, mine + (prompts[0],) * (block - len(mine)), len(mine)


def share_of(request: SampleRequest, ranks: Ranks) -> tuple[SampleRequest, int]:
    """A rank's part of a request, filled up to the length of the others', and how many of its clips are
    real: clip i is the one that a process generates that samples alone."""
    rows = list(zip(request.prompts, request.images or [()] * len(request.prompts), strict=True))
    first, mine, real = share_prompts(rows, ranks.rank, ranks.count)
    prompts, images = zip(*mine, strict=True)
    given = images if request.images else ()
    return dataclasses.replace(request, prompts=prompts, images=given, first=first), real


def no_clips(task: str, made: int = 0, wanted: int | None = None) -> ContractError:
    """For a task that makes no clips, or fewer than there are prompts."""
    what = (
        "makes no clips" if wanted is None else f"made {plural(made, 'clip')} for {plural(wanted, 'prompt')}"
    )
    return ContractError(
        f"the task {task} {what}",
        where="task.type",
        accepted="a task whose `sample` returns a clip a prompt, or one that answers in words",
        hint="`mm eval` measures what other tasks have learned",
    )


def check_made(ranks: Ranks, task: str, made: int, wanted: int) -> None:
    """ContractError, on all ranks alike, where one of them made fewer clips than it has prompts: the others
    would wait for it. Called by all of them."""
    rows = ranks.gather((min(made, wanted), wanted))
    in_all, of_all = sum(made for made, _ in rows), sum(wanted for _, wanted in rows)
    if in_all < of_all:
        raise no_clips(task, in_all, of_all)


def plural(count: int, noun: str) -> str:
    """`1 clip`, `2 clips`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def write_own(clips: Sequence[Clip], first: int, folder: Path) -> str | None:
    """This rank's mp4 files, numbered from `first`. What went wrong: no run ends for want of a clip."""
    try:
        make_folder(folder)
        for number, clip in enumerate(clips, start=first):
            write_video(clip, folder / clip_name(number, clip.prompt))
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"
    return None


def gather_previews(
    ranks: Ranks, clips: Sequence[Clip], fault: str | None, folder: Path
) -> tuple[list[Clip], list[str]]:
    """On rank 0: previews of all ranks' clips, in order, and what could not be written; it has written the
    contact sheet and `prompts.json` then. Nothing elsewhere. All files are there when this returns."""
    own = [(to_bytes(preview(clip)), clip.fps, clip.prompt) for clip in clips]
    rows = ranks.gather_first((own, fault))
    previews = [Clip(from_bytes(frames), fps, prompt) for shares, _ in rows for frames, fps, prompt in shares]
    faults = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(rows) if text is not None]
    if ranks.rank == 0 and not faults:
        try:
            write_prompts({clip_name(i, clip.prompt): clip.prompt for i, clip in enumerate(previews)}, folder)
            write_contact_sheet(previews, folder / SHEET)
        except Exception as error:
            faults = [f"rank 0: {type(error).__name__}: {error}"]
    if not ranks.alone:
        wait_for_ranks()
    return previews, faults
