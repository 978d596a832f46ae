"""`mm align record`: steps of a training run in a folder of its own, with every module's numbers recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mm_core.config.sections import RunConfig
from mm_core.device import set_numerics
from mm_core.errors import MMError, plural
from mm_core.report.align.records import Names
from mm_core.runtime.launch.rank_logs import rank_log
from mm_core.runtime.process_group import process_group
from mm_core.telemetry.align.attaching import Recorded, RunRecorder, check_patterns
from mm_core.training import verify_resume
from mm_core.training.assembly import assemble
from mm_core.training.loop import Training, run_steps
from mm_core.training.run import running

QUIET = (*verify_resume.QUIET, "validation=null", "data.validation=null", "data.test=null")
"""Overrides that leave out everything but the training steps."""


@dataclass(frozen=True)
class Recording:
    """What `mm align record` is asked for.

    Attributes:
        out: folder of the record.
        steps: steps to record.
        after: steps to train before, unrecorded.
        like: the record whose inputs and initial weights are fed; None for the run's own.
        names: from the names of that record to those of this run.
        weights: whether the initial weights are stored.
        modules: patterns of modules whose tensors are stored.
        resume: the checkpoint to begin with, or `never`.
    """

    out: Path
    steps: int
    after: int = 0
    like: Path | None = None
    names: Names = field(default_factory=Names)
    weights: bool = False
    modules: Sequence[str] = ()
    resume: str = "never"


def record(config: RunConfig, asked: Recording) -> list[str]:
    """Records steps of a training run; no checkpoint is saved. Called by all ranks, without a process group.

    Args:
        config: the checked config, whose `run` is in the folder of the record.
        asked: what to record.

    Returns:
        Sentences about what was fed and recorded.

    Raises:
        MMError: as for `mm_core.train`; and the record to feed does not fit, the run has too few steps, or a
            pattern matches no module.
    """
    set_numerics(config.run.deterministic, config.run.float32_matmul)
    with process_group(config.run.stuck_after) as ranks, rank_log(config.run.folder, ranks.rank, ranks.count):
        like = Recorded(asked.like, asked.names) if asked.like is not None else None
        run = assemble(config, asked.resume)
        first, steps = run.start + asked.after, run.plan.steps
        if first + asked.steps > steps:
            what = f"the run has only {plural(steps, 'step')}"
            raise MMError(what, where="--steps", accepted=f"1 to {steps - first}")
        check_patterns(run.task, asked.modules)
        with running(run):
            _train(run, run.start, first)
            notes = [like.weights(run.engine)] if like is not None else []
            facts = json.loads((config.run.folder / "manifest.json").read_text(encoding="utf-8"))
            recorder = RunRecorder(
                asked.out,
                run.engine,
                run.task,
                like,
                rank=ranks.rank,
                step=first,
                facts=facts,
                weights=asked.weights,
                modules=asked.modules,
            )
            _train(run, first, first + asked.steps)
            recorder.close()
        if like is not None:
            fed = ", ".join(sorted(like.fed)) or "no input has a name of ours"
            notes.append(f"fed from {asked.like}: {fed}")
        return notes


def _train(run: Training, start: int, end: int) -> None:
    """Runs steps without the end of the run, which would save a checkpoint."""
    if end > start:
        plan = run.plan
        run.plan = replace(plan, steps=end)
        run_steps(run, start)
        run.plan = plan
