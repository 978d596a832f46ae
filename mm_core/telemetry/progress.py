"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


def make_progress(total: int, rank: int, start: int = 0, stream: TextIO | None = None) -> Progress:
    """The progress display of a rank.

    Args:
        total: steps of the run.
        rank: only rank 0 shows anything.
        start: steps taken already.
        stream: where to write; standard error by default. A terminal gets the bar.
    """
    if rank > 0:
        return Progress(total)
    stream = sys.stderr if stream is None else stream
    return LiveProgress(total, start, stream) if stream.isatty() else PlainProgress(total, stream)


class Progress:
    """Shows logged steps and notes until it is closed. This one shows nothing: other ranks would only repeat
    rank 0.

    Args:
        total: steps of the run.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._step_time: float | None = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a logged step: `step` steps are taken, with metrics by the names of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Shows a sentence."""

    def close(self) -> None:
        """Leaves the terminal in order. May be called twice."""

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        """The metrics of a logged step, and the time left, from a running mean of the time of a step."""
        latest = metrics["step_time"]
        self._step_time = latest if self._step_time is None else 0.9 * self._step_time + 0.1 * latest
        return "  ".join([*describe(metrics), f"eta {duration((self.total - step) * self._step_time)}"])


class PlainProgress(Progress):
    """One line a logged step, for log files."""

    def __init__(self, total: int, stream: TextIO) -> None:
        super().__init__(total)
        self._stream = stream

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the step's line."""
        self.note(f"step {step}/{self.total}  {self.line(step, metrics)}")

    def note(self, text: str) -> None:
        """Writes a line."""
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveProgress(Progress):
    """A bar that stays on the last line of a terminal, drawn when a step is logged: no thread redraws it."""

    def __init__(self, total: int, start: int, stream: TextIO) -> None:
        super().__init__(total)
        self._start, self._stream = start, stream
        self._bar: Bar | None = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves the bar and shows the step's metrics beside it."""
        bar = self._open()
        bar.update(bar.task_ids[0], completed=step, metrics=self.line(step, metrics))
        bar.refresh()

    def note(self, text: str) -> None:
        """Writes a line above the bar."""
        self._open().console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the bar as it is and frees the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _open(self) -> Bar:
        if self._bar is None:
            # Imported here: rich takes 60 ms, which log files and other ranks need not pay.
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
    """The metrics worth a look, each with its unit."""
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
    """A number in about three figures and without an exponent."""
    for least, places in ((100, 0), (1, 1), (0.01, 2)):
        if value >= least:
            return f"{value:.{places}f}"
    return f"{value:.4f}"


def duration(seconds: float) -> str:
    """`0:12`, `59:05`, `26:03:00`."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
