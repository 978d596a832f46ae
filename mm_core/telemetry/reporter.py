"""Reports a training run every `log.every` steps: metrics.jsonl, trackers and the progress display."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from mm_core.config.sections import LogSection
from mm_core.contracts import Bins, Clip, Ending, Loss
from mm_core.device import device_type, peak_flops, peak_memory_bytes
from mm_core.device.torch_private import collectives_within
from mm_core.errors import ConfigError, MMError, plural
from mm_core.files import replace_text
from mm_core.plan import RunPlan
from mm_core.plugin.registry import Registry
from mm_core.runtime.ranks import Ranks
from mm_core.telemetry.flop_counter import ForwardFlops
from mm_core.telemetry.loss_curve import write_loss_curve
from mm_core.telemetry.phase_clock import PhaseClock
from mm_core.telemetry.progress import make_progress
from mm_core.telemetry.slow_ranks import SlowRanks
from mm_core.telemetry.trackers.local import TrackerSet, open_trackers, read_metrics
from mm_core.telemetry.window import MetricsWindow

_logger = logging.getLogger(__name__)


class RunReporter:
    """Reports training metrics to metrics.jsonl, trackers and the progress display.

    Rank 0 writes; the other ranks contribute to the means.

    Args:
        run_dir: the run's folder.
        log: the config's `log`.
        registry: builds the trackers.
        ranks: of the run.
        plan: of the run: its steps, and the micro-batches of a step.
        start: steps already taken; lines of metrics.jsonl after this step are dropped.
        samples_seen: samples trained on in those steps.
        bins: the scale along which the loss is also reported, such as the noise level.
        watch: called with the name of each phase of a step (the watchdog).

    Raises:
        ConfigError: a tracker is listed twice.
    """

    def __init__(
        self,
        run_dir: Path,
        log: LogSection,
        registry: Registry,
        ranks: Ranks,
        plan: RunPlan,
        start: int,
        samples_seen: float = 0.0,
        *,
        bins: Bins | None = None,
        watch: Callable[[str], None] | None = None,
    ) -> None:
        self.run_dir, self.last_step = run_dir, plan.steps
        self.every, self.detail_every = log.every, log.detail_every
        self.phases = PhaseClock(watch=watch)
        self.window = MetricsWindow(
            peak_memory_bytes, samples_seen=samples_seen, bins=bins, phases=self.phases, peak=peak_flops()
        )
        self._flops, self._accumulation = ForwardFlops(), plan.accumulation
        self._steps = 0
        self._slow = SlowRanks(ranks, run_dir, start, self.note)
        self._ranks, self.leads = ranks, ranks.rank == 0
        self.progress = make_progress(plan.steps, ranks.rank, start)
        types = [component.type for component in log.trackers]
        if twice := sorted({name for name in types if types.count(name) > 1}):
            raise ConfigError(
                f"{twice[0]} is listed twice", where="log.trackers", accepted="each tracker once"
            )
        self.trackers = TrackerSet({})
        self.ran: Callable[[str], None] = lambda phase: None
        """Called when a phase of the forecast has run: step (the second one), evaluation, sample."""

        def open_files() -> None:
            write_telemetry(self.run_dir, bins)
            self.trackers = open_trackers(self.run_dir, log.trackers, start, self.note, registry)

        ranks.on_first("opening metrics.jsonl", open_files)

    def enter(self, phase: str) -> None:
        """Begins a phase of a training step: its time is measured separately."""
        self.phases.enter(phase)

    def timing(self) -> AbstractContextManager[None]:
        """A context around the training loop, in which the time of collectives is measured apart."""
        if self._ranks.count == 1:
            return nullcontext()
        return collectives_within(self.phases.wait, blocking=device_type() == "cpu")

    def counting(self) -> AbstractContextManager[None]:
        """A context around the forward of a micro-batch; FLOPs of the first one are counted."""
        return self._flops.counting()

    def micro(self, loss: Loss) -> None:
        """Adds the loss and metrics of a micro-batch; nothing is fetched from the device."""
        self.window.micro(loss)

    def step(
        self, step: int, *, lr: float, grad_norm: float, data_wait: float, samples: float, weight: float
    ) -> Mapping[str, float] | None:
        """Ends a training step and reports its metrics every `log.every` steps.

        Args:
            step: steps taken.
            lr: learning rate of the step.
            grad_norm: global gradient norm before clipping.
            data_wait: seconds that this rank waited for its samples.
            samples: samples of the step, over all ranks.
            weight: total weight of the step, over all ranks.

        Returns:
            the reported metrics, equal on all ranks; None if the step is not logged.
        """
        self.window.step(grad_norm=grad_norm, data_wait=data_wait, samples=samples, weight=weight)
        if not self._steps:
            self.window.step_flops = self._flops.of_step(self._accumulation) or 0.0
        self._steps += 1
        if self._steps == 2:  # the first one makes the optimizer's state
            self.ran("step")
        detailed = step % self.detail_every == 0 or step == self.last_step
        if step % self.every and not detailed:
            return None
        metrics = {**self.window.flush(), "lr": lr, **(self.window.detail() if detailed else {})}
        if self.leads:
            self.trackers.log(step, metrics)
            self.progress.update(step, metrics)
        if self._ranks.count > 1:
            self._slow.judge(step, self.window.own)
        return metrics

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends metrics not measured on training steps (validation) to the trackers and the progress display.

        They must be equal on all ranks.
        """
        if self.leads:
            self.trackers.log(step, metrics)
            shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if "_at/" not in name)
            self.note(f"step {step}: {shown}")

    def logged(self, step: int, name: str) -> dict[str, float]:
        """The metrics that an earlier process has logged with `name` for a step; {} if none has. A collective
        call."""

        def read() -> dict[str, float]:
            rows = read_metrics(self.run_dir)
            found = next((row for row in rows if row["step"] == step and name in row), {})
            return {key: float(value) for key, value in found.items() if key != "step"}

        return self._ranks.on_first("reading metrics.jsonl", read)

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Sends sampled clips to the trackers and notes their folder in the progress display, on rank 0."""
        if self.leads:
            self.trackers.clips(step, clips, folder)
            self.note(f"step {step}: {plural(len(clips), 'clip')} in {folder}")

    def pause(self) -> None:
        """Restarts the clock of step times, after work outside of steps such as saving a checkpoint."""
        self.window.restart_clock()

    def note(self, text: str) -> None:
        """Prints a message above the progress display, on rank 0."""
        self.progress.note(text)

    def close(self, ending: Ending) -> None:
        """Closes the progress display and the trackers, and draws the loss curve.

        An error here is a warning: the run does not depend on it, and it must not hide the error that ended
        the run.

        Args:
            ending: how the run ended; trackers receive it.
        """
        for name, close in (
            ("the progress display", self.progress.close),
            ("the trackers", partial(self.trackers.close, ending)),
            ("loss.png", self._draw),
        ):
            try:
                close()
            except Exception as fault:
                _logger.warning("%s could not be completed: %s: %s", name, type(fault).__name__, fault)

    def _draw(self) -> None:
        if self.leads and (self.run_dir / "metrics.jsonl").exists():
            try:
                write_loss_curve(self.run_dir)
            except MMError as fault:
                _logger.warning("loss.png is left out: %s", fault)


def write_telemetry(run_dir: Path, bins: Bins | None) -> None:
    """Writes telemetry.json: the bins of the training loss and the share of samples declared for each."""
    if bins is None:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    document = {"bins": {"name": bins.name, "edges": list(bins.edges), "declared": list(bins.declared)}}
    replace_text(run_dir / "telemetry.json", json.dumps(document, indent=1) + "\n")
