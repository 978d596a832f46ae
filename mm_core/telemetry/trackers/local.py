"""Built-in trackers, and the set that keeps a failing tracker from ending a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_core.contracts import Clip, Ending, Tracker
from mm_core.data.media.video_files import gif_bytes
from mm_core.errors import MMError
from mm_core.files import json_number, replace_text
from mm_core.plugin.registry import Registry
from mm_core.schema.fields import ComponentConfig
from mm_core.telemetry.trackers.remote import forget_runs

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
_logger = logging.getLogger(__name__)


class JsonlTracker:
    """`<run_dir>/metrics.jsonl`: one JSON object a logged step, appended, on disk line by line.

    JSON has no numbers for what is not finite: those are written as the strings "NaN", "Infinity" and
    "-Infinity", which `float()` reads. A line that cannot be written (a full disk, say) is lost and counted;
    the next one is tried all the same.
    """

    def __init__(self, run_dir: Path) -> None:
        path = Path(run_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer: one would hold a line that failed, and fail with it for ever.
        self._file = path.open("ab", buffering=0)
        self._torn = False
        self._lost: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line."""
        row = {"step": step, **{name: json_number(value) for name, value in metrics.items()}}
        try:
            self._append(json.dumps(row, allow_nan=False).encode() + b"\n")
        except OSError as fault:
            if not self._lost:
                _logger.warning(
                    "%s could not be written at step %d, and is tried again: %s", METRICS_FILE, step, fault
                )
            self._lost.append(step)

    def _append(self, line: bytes) -> None:
        left = b"\n" + line if self._torn else line  # what was cut short ends there, and readers drop it
        while left:
            written = self._file.write(left)
            self._torn = written < len(left)
            left = left[written:]

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Nothing: the files speak for themselves."""

    def close(self, ending: Ending) -> None:
        """Closes the file, and says what it lacks."""
        self._file.close()
        if self._lost:
            _logger.warning(
                "%s lacks %d lines, of steps %d to %d: they could not be written",
                METRICS_FILE,
                len(self._lost),
                self._lost[0],
                self._lost[-1],
            )


class TensorBoardTracker:
    """Scalars and clips under `<run_dir>/tensorboard`. After a resume, TensorBoard hides what the dead run
    had logged beyond the step that the new one starts at."""

    def __init__(self, run_dir: Path, flush_secs: int) -> None:
        self._folder = Path(run_dir) / "tensorboard"
        self._flush_secs = flush_secs
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one point to each curve."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all: add_scalar makes one each, and waits whenever ten of them are not yet written.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._open(step).file_writer.add_summary(Summary(value=values), step)

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Adds each clip as an animated image, `samples/000` and so on, described by its prompt."""
        # add_video would need moviepy, and makes the same GIF of the clip.
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

        writer = self._open(step)
        for index, clip in enumerate(clips):
            height, width = clip.pixels.shape[2:]
            image = Summary.Image(
                height=height, width=width, colorspace=3, encoded_image_string=gif_bytes(clip)
            )
            about = SummaryMetadata(summary_description=clip.prompt)
            value = Summary.Value(tag=f"samples/{index:03d}", image=image, metadata=about)
            writer.file_writer.add_summary(Summary(value=[value]), step)
        writer.flush()

    def _open(self, step: int) -> SummaryWriter:
        if self._writer is None:
            # Importing it takes a second, and only now is the first step known.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step, flush_secs=self._flush_secs)
        return self._writer

    def close(self, ending: Ending) -> None:
        """Flushes and closes the event file, if there is one."""
        if self._writer is not None:
            self._writer.close()


class TrackerSet:
    """Several trackers by name. One that fails is reported once and switched off; the run goes on."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands one step's metrics to every tracker that still works."""
        self._tell(step, lambda tracker: tracker.log(step, metrics))

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Hands sampled clips to every tracker that still works."""
        self._tell(step, lambda tracker: tracker.clips(step, clips, folder))

    def _tell(self, step: int, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as fault:
                del self._trackers[name]
                _logger.warning(
                    "tracker %s failed at step %d and is switched off: %s: %s",
                    name,
                    step,
                    type(fault).__name__,
                    fault,
                )

    def close(self, ending: Ending) -> None:
        """Closes every tracker that still works."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close(ending)
            except Exception as fault:
                _logger.warning("tracker %s could not be closed: %s: %s", name, type(fault).__name__, fault)
        self._trackers.clear()


def open_trackers(
    run_dir: Path,
    components: Sequence[ComponentConfig],
    start: int,
    note: Callable[[str], None],
    registry: Registry,
) -> TrackerSet:
    """metrics.jsonl and the trackers of the config, for a run that has taken `start` steps.

    A tracker that cannot start is told of in a sentence, and the run goes on without it. A run that
    starts at zero begins new runs in the programs that its trackers report to.
    """
    truncate_after(run_dir, start)
    if start == 0:
        forget_runs(run_dir)
    trackers: dict[str, Tracker] = {"core/jsonl": JsonlTracker(run_dir)}
    for component in components:
        if component.type not in trackers:
            try:
                trackers[component.type] = registry.build("tracker", component, run_dir)
            except Exception as fault:
                reason = str(fault) if isinstance(fault, MMError) else f"{type(fault).__name__}: {fault}"
                note(f"warning: tracker {component.type} could not start and is switched off: {reason}")
    return TrackerSet(trackers)


def truncate_after(run_dir: Path, step: int) -> int:
    """Drops the lines of `metrics.jsonl` beyond `step`, where a run resumes, and lines that are not whole;
    returns how many went. The file is replaced in one move."""
    lines = _lines(run_dir)
    kept = [line for line in lines if (row := _row(line)) is not None and row["step"] <= step]
    if len(kept) < len(lines):
        replace_text(Path(run_dir) / METRICS_FILE, "".join(line + "\n" for line in kept))
    return len(lines) - len(kept)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's `metrics.jsonl`; [] when nothing was logged."""
    return [row for row in map(_row, _lines(run_dir)) if row is not None]


def _lines(run_dir: Path) -> list[str]:
    path = Path(run_dir) / METRICS_FILE
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _row(line: str) -> dict[str, Any] | None:
    """The object on a line; None for a line that a crash cut short."""
    with suppress(ValueError):
        row = json.loads(line)
        return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
    return None
