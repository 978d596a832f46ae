"""What a run says while it trains: metrics.jsonl, trackers and the progress display, on log cadence."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from mm_core.config.schema import RunConfig
from mm_core.contracts import Loss, Tracker
from mm_core.device import peak_memory_bytes
from mm_core.plan import RunPlan
from mm_core.plugin.registry import build
from mm_core.train.loss_curve import write_loss_curve
from mm_core.train.metrics import MetricsWindow
from mm_core.train.progress import Progress, make_progress
from mm_core.train.trackers import JsonlTracker, TrackerSet, truncate_after


class RunReporter:
    """The loop's Reporter. Rank 0 writes; the others take part in the means.

    Args:
        run_dir: the run's folder.
        config, plan: the run.
        start: steps already taken; later lines of a run that went further are dropped.
        samples_seen: samples trained on in those steps.
    """

    def __init__(
        self, run_dir: Path, config: RunConfig, plan: RunPlan, start: int, samples_seen: float = 0.0
    ) -> None:
        self.run_dir, self.every, self.last_step = run_dir, config.log.every, plan.steps
        self.window = MetricsWindow(peak_memory_bytes, samples_seen=samples_seen)
        self.leads = dist.get_rank() == 0
        self.progress: Progress = make_progress(plan.steps, dist.get_rank(), start)
        trackers: dict[str, Tracker] = {}
        if self.leads:
            truncate_after(run_dir, start)
            trackers["core/jsonl"] = JsonlTracker(run_dir)
            for component in config.log.trackers:
                if component.type not in trackers:
                    trackers[component.type] = build("tracker", component, run_dir)
        self.trackers = TrackerSet(trackers)

    def enter(self, phase: str) -> None:
        """A new phase of the step begins."""

    def micro(self, loss: Loss) -> None:
        """Adds a micro-batch; nothing is fetched from the device."""
        self.window.micro(loss)

    def step(self, step: int, *, lr: float, grad_norm: float, data_wait: float, samples: float) -> None:
        """Ends a step; on log cadence all ranks take the means and rank 0 writes them."""
        self.window.step(grad_norm=grad_norm, data_wait=data_wait, samples=samples)
        if step % self.every and step != self.last_step:
            return
        metrics = {**self.window.flush(), "lr": lr}
        if self.leads:
            self.trackers.log(step, metrics)
            self.progress.update(step, metrics)

    def pause(self) -> None:
        """Starts the clock of the next step anew, after what is no part of a step."""
        self.window.restart_clock()

    def note(self, text: str) -> None:
        """A sentence beside the progress display (rank 0)."""
        self.progress.note(text)

    def close(self) -> None:
        """Ends the display and the trackers, and draws the loss curve."""
        self.progress.close()
        self.trackers.close()
        if self.leads and (self.run_dir / "metrics.jsonl").exists():
            write_loss_curve(self.run_dir)
