"""Training a run from its config to its last checkpoint: called by `mm-train` on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mm_core.config.sections import RunConfig
from mm_core.data.loading.skipped import SKIPPED
from mm_core.data.loading.stopping import StopRequested, stop_on
from mm_core.device import set_numerics
from mm_core.runtime.launch.rank_logs import rank_log
from mm_core.runtime.launch.restarts import restarted, restarts_of
from mm_core.runtime.launch.signals import StopFlag, leaving_at_signals
from mm_core.runtime.process_group import process_group
from mm_core.training.assembly import assemble
from mm_core.training.forecast.in_run import NOTHING, foresee
from mm_core.training.loop import Training, run_steps
from mm_core.training.optional.memory import advise

UNREADY = 10.0
"""Seconds after a signal within which a run that is being prepared can stop normally."""

_OTHER_RANK = "a signal to another rank"


@dataclass(frozen=True)
class RunResult:
    """The result of a training run: its folder, and where and why it ended.

    Attributes:
        run_dir: the run's folder.
        step: steps taken; None if the run was stopped while it was being prepared.
        steps: steps of the complete run; None as above, since it is not known yet.
        stopped: why the run ended before its last step; None at the end.
    """

    run_dir: Path
    step: int | None
    steps: int | None
    stopped: str | None


def train(
    config: RunConfig,
    *,
    resume: str = "auto",
    stop: StopFlag | None = None,
    allow: Sequence[str] = (),
    stop_after: int | None = None,
    forecast: bool = True,
) -> RunResult:
    """Trains a run as the rank given by the environment (a single process without a launcher).

    Args:
        config: a checked config, from `mm_core.load_config`.
        resume: `auto` (the newest complete checkpoint of the run, otherwise from step 0), `never`, or the
            path of a checkpoint or run folder.
        stop: checked after every step: whether to save and stop. Before the first step: whether to stop.
        allow: keys whose change since the checkpoint is intended, or `all` (see `--allow`).
        stop_after: save and stop after this step, as at a signal.
        forecast: whether to predict first what the run needs, and to refuse what does not fit.

    Raises:
        MMError: ConfigError, PlanError, ContractError, DataError, CheckpointError or TrainingError;
            PeerError if another rank caused the failure.
    """
    numerics = set_numerics(config.run.deterministic, config.run.float32_matmul)
    folder, foreseen = config.run.folder, foresee(config) if forecast else NOTHING
    with process_group(config.run.stuck_after) as ranks, rank_log(folder, ranks.rank, ranks.count):
        try:
            with (
                stop_on(lambda: stop is not None and stop.requested is not None),
                leaving_at_signals("preparing the run", patience=UNREADY),
            ):
                run = assemble(config, resume, stop, allow, foreseen)
        except StopRequested:
            return RunResult(folder, None, None, (stop and stop.requested) or _OTHER_RANK)
        for sentence in numerics:
            run.reporter.note(sentence)
        if (restart := restarted(folder)) is not None:
            run.reporter.note(restart)
            run.reporter.log(run.start, {"restarts": float(len(restarts_of(folder)))})
        run.between.stop_after = stop_after
        steps, step = run.plan.steps, run.start
        with running(run), run.reporter.timing():
            if not run.between.interrupted and (stop_after is None or step < stop_after):
                step = run_steps(run, run.start)
        # A stop request to one rank stops all ranks.
        reason = (stop and stop.requested) or ("--stop-after" if stop_after else _OTHER_RANK)
        unfinished = step < steps or run.between.interrupted
        return RunResult(folder, step, steps, reason if unfinished else None)


@contextmanager
def running(run: Training) -> Iterator[None]:
    """Starts the work around training steps, and closes files, trackers and callbacks after the block."""
    between = run.between
    skipped = between.config.run.folder / SKIPPED
    error: BaseException | None = None
    try:
        between.start(run.start)
        yield
        run.reporter.ran("end")
        if cut := run.cut.of_ranks(run.engine.data_ranks.leads).described():
            run.reporter.note(f"warning: {cut}")
        if skipped.exists():
            what = "samples that could not be read were replaced, or parts of them skipped"
            run.reporter.note(f"{what}; see {skipped} for the list")
    except BaseException as raised:
        error = raised
        advise(error, between.config.engine, run.foreseen, run.plan)
        raise
    finally:
        try:
            between.close(error)
        except BaseException as raised:
            error = raised
            raise
        finally:
            stopped = between.interrupted or between.step < between.steps
            run.reporter.close("failed" if error is not None else "stopped" if stopped else "done")
