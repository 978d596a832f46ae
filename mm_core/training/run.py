"""A run from its config to its last checkpoint: what `mm-train` calls on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mm_core.config.sections import RunConfig
from mm_core.data.loading.stopping import StopRequested, stop_on
from mm_core.device import set_deterministic
from mm_core.runtime.launch.rank_logs import rank_log
from mm_core.runtime.launch.signals import StopFlag, leaving_at_signals
from mm_core.runtime.process_group import process_group
from mm_core.training.assembly import Assembly, assemble
from mm_core.training.loop import run_steps

UNREADY = 10.0
"""Seconds after a signal in which a run that is made ready comes to where it can stop in good order."""

_OTHER_RANK = "a signal to another rank"


@dataclass(frozen=True)
class RunResult:
    """Where a run ended. steps: of the whole run. stopped: why it ended before its last step, or None.

    step and steps are None where it was stopped while its data was made ready: neither is known yet then.
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
) -> RunResult:
    """Trains as the rank that the environment names (a lone process without a launcher).

    Args:
        config: a checked run, from `mm_core.load_config`.
        resume: `auto` (the newest complete checkpoint of the run, else from zero), `never`, or the
            path of a checkpoint or run directory.
        stop: asked after every step whether to save and end, and before the first one whether to end.
        allow: keys whose change since the checkpoint is meant, or `all` (see `--allow`).
        stop_after: save and end after this step, as on a signal.

    Raises:
        MMError: ConfigError, PlanError, ContractError, DataError, CheckpointError, TrainingError;
            PeerError where another rank is the one to blame.
    """
    if config.run.deterministic:
        set_deterministic()
    folder = config.run.folder
    with process_group(config.run.stuck_after) as ranks, rank_log(folder, ranks.rank, ranks.count):
        try:
            with (
                stop_on(lambda: stop is not None and stop.requested is not None),
                leaving_at_signals("made the run ready", patience=UNREADY),
            ):
                run = assemble(config, resume, stop, allow)
        except StopRequested:
            return RunResult(folder, None, None, (stop and stop.requested) or _OTHER_RANK)
        run.between.stop_after = stop_after
        steps, step = run.training.plan.steps, run.start
        with running(run):
            if not run.between.interrupted and (stop_after is None or step < stop_after):
                step = run_steps(run.training, run.start)
        # One rank that was asked to stop stops all of them.
        reason = (stop and stop.requested) or ("--stop-after" if stop_after else _OTHER_RANK)
        unfinished = step < steps or run.between.interrupted
        return RunResult(run.folder, step, steps, reason if unfinished else None)


@contextmanager
def running(run: Assembly) -> Iterator[None]:
    """Watches over the steps in the block, and leaves files, trackers and callbacks in order."""
    between = run.between
    error: BaseException | None = None
    try:
        between.start(run.start)
        yield
        if run.ledger.path.exists():
            what = "samples that could not be read were replaced, or parts left out"
            run.reporter.note(f"{what}; {run.ledger.path} lists them")
    except BaseException as raised:
        error = raised
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
