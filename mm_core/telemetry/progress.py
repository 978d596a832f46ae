"""Progress display of a training run, on rank 0: a bar on a terminal, plain lines in log files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from mm_core.errors import without_controls

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


def make_progress(total: int, rank: int, start: int = 0, stream: TextIO | None = None) -> Progress:
    """The progress display of a rank: a bar if the stream is a terminal, else one line per logged step.

    Args:
        total: steps of the run.
        rank: rank of this process; only rank 0 shows anything.
        start: steps already taken.
        stream: where to write; standard error by default.
    """
    if rank > 0:
        return Progress(total, None)
    stream = sys.stderr if stream is None else stream
    return LiveProgress(total, start, stream) if stream.isatty() else Progress(total, stream)


class Progress:
    """Progress display for log files: one line per logged step.

    Args:
        total: steps of the run.
        stream: where to write; None shows nothing, for ranks other than 0.
    """

    def __init__(self, total: int, stream: TextIO | None) -> None:
        self.total, self._stream = total, stream
        self._step_time: float | None = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a logged step in the progress display.

        Args:
            step: steps taken.
            metrics: its metrics, with the names of metrics.jsonl.
        """
        self.note(f"step {step}/{self.total}  {self.line(step, metrics)}")

    def note(self, text: str) -> None:
        """Shows a message in the progress display."""
        if self._stream is not None:
            self._stream.write(without_controls(text) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Closes the progress display and restores the terminal. May be called twice."""

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        """The metrics of a logged step as one line, with the time left (by a running mean of step times)."""
        latest = metrics["step_time"]
        self._step_time = latest if self._step_time is None else 0.9 * self._step_time + 0.1 * latest
        return "  ".join([*describe(metrics), f"eta {duration((self.total - step) * self._step_time)}"])


class LiveProgress(Progress):
    """Progress bar on the last line of a terminal, redrawn for each logged step (no thread)."""

    def __init__(self, total: int, start: int, stream: TextIO) -> None:
        super().__init__(total, stream)
        self._start = start
        self._bar: Bar | None = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves the progress bar to a logged step and shows its metrics."""
        bar = self._open()
        bar.update(bar.task_ids[0], completed=step, metrics=self.line(step, metrics))
        bar.refresh()

    def note(self, text: str) -> None:
        """Writes a message above the progress bar."""
        self._open().console.print(without_controls(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stops the progress bar and restores the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _open(self) -> Bar:
        if self._bar is None:
            # Imported here: importing rich takes 60 ms, and log files and other ranks do not need it.
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[metrics]}", markup=False),
                console=Console(file=self._stream),
                auto_refresh=False,
            )
            self._bar.add_task("train", total=self.total, completed=self._start, metrics="")
            self._bar.start()
        return self._bar


def describe(metrics: Mapping[str, float]) -> list[str]:
    """The most important metrics of a logged step as text, each with its unit."""
    step_time = metrics["step_time"]
    waiting = metrics["data_wait"] / step_time if step_time else 0.0
    return [
        f"loss {metrics['loss']:.4f}",
        f"lr {metrics['lr']:.1e}",
        f"{short(step_time)} s/step",
        f"{short(metrics['samples_per_second'])} samples/s",
        f"data {waiting:.0%}",
        f"mem {metrics['memory'] / 1e9:.1f} GB",
    ]


def short(value: float) -> str:
    """Formats a metric with about three digits and without an exponent."""
    for least, places in ((100, 0), (1, 1), (0.01, 2)):
        if value >= least:
            return f"{value:.{places}f}"
    return f"{value:.4f}"


def duration(seconds: float) -> str:
    """Formats the time left of a run: `0:12`, `59:05`, `26:03:00`."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
