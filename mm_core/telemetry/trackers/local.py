"""Trackers that write local files (metrics.jsonl, TensorBoard), and the set of all trackers of a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_core.contracts import Clip, Ending, Tracker
from mm_core.data.media.video_files import gif_bytes
from mm_core.errors import MMError, plural
from mm_core.files import json_number, open_append, replace_text
from mm_core.plugin.authors import author_line
from mm_core.plugin.registry import Registry
from mm_core.schema.fields import ComponentConfig
from mm_core.telemetry.extras import package
from mm_core.telemetry.trackers.remote import forget_runs

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
_logger = logging.getLogger(__name__)


class JsonlTracker:
    """Tracker that appends the metrics of each logged step to `<run_dir>/metrics.jsonl`, as one JSON object.

    Numbers that are not finite are written as the strings "NaN", "Infinity" and "-Infinity", which
    `float()` reads. A line that cannot be written (a full disk, for example) is lost and counted; the next
    line is tried again.
    """

    def __init__(self, run_dir: Path) -> None:
        path = Path(run_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a buffer would keep a line that failed and fail on it again at every write.
        self._file = open_append(path, buffering=0)
        self._incomplete = False
        self._lost: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of a step to metrics.jsonl as one line."""
        row = {"step": step, **{name: json_number(value) for name, value in metrics.items()}}
        try:
            self._append(json.dumps(row, allow_nan=False).encode() + b"\n")
        except OSError as fault:
            if not self._lost:
                _logger.warning(
                    "%s could not be written at step %d; this line is lost, later ones will be tried: %s",
                    METRICS_FILE,
                    step,
                    fault,
                )
            self._lost.append(step)

    def _append(self, line: bytes) -> None:
        left = b"\n" + line if self._incomplete else line  # ends an incomplete line, which readers drop
        while left:
            written = self._file.write(left)
            self._incomplete = written < len(left)
            left = left[written:]

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Ignores sampled clips: they are in files already."""

    def close(self, ending: Ending) -> None:
        """Closes metrics.jsonl and warns of lines that could not be written."""
        self._file.close()
        if self._lost:
            _logger.warning(
                "%s lacks %s (steps %d to %d) that could not be written; check the disk's free space",
                METRICS_FILE,
                plural(len(self._lost), "line"),
                self._lost[0],
                self._lost[-1],
            )


class TensorBoardTracker:
    """Tracker that writes metrics and sampled clips for TensorBoard, under `<run_dir>/tensorboard`.

    After a resume, TensorBoard hides what the interrupted run had logged beyond its checkpoint.

    Args:
        run_dir: the run's folder.
        flush_secs: most seconds between two writes to disk.
    """

    def __init__(self, run_dir: Path, flush_secs: int) -> None:
        package("tensorboard", "tensorboard")
        self._folder = Path(run_dir) / "tensorboard"
        self._flush_secs = flush_secs
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step to TensorBoard's curves."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all metrics: add_scalar makes one for each, and waits if ten of them are unwritten.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._open(step).file_writer.add_summary(Summary(value=values), step)

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Adds sampled clips to TensorBoard as animated images (`samples/000` ...) with their prompts."""
        # add_video would need moviepy to write the same GIF.
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
            # Imported here: the import takes a second. Created here: the first step is known only now.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step, flush_secs=self._flush_secs)
        return self._writer

    def close(self, ending: Ending) -> None:
        """Writes and closes TensorBoard's event file, if there is one."""
        if self._writer is not None:
            self._writer.close()


class TrackerSet:
    """All trackers of a run; a tracker that fails is switched off with a warning and the run goes on."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the metrics of a step to every tracker that still works."""
        self._call_each(step, lambda tracker: tracker.log(step, {**metrics}))

    def clips(self, step: int, clips: Sequence[Clip], folder: Path) -> None:
        """Passes sampled clips to every tracker that still works."""
        self._call_each(step, lambda tracker: tracker.clips(step, clips, folder))

    def _call_each(self, step: int, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as fault:
                del self._trackers[name]
                _logger.warning(
                    "tracker %s failed at step %d and is switched off until the run is resumed: %s: %s",
                    name,
                    step,
                    type(fault).__name__,
                    _placed(fault),
                )

    def close(self, ending: Ending) -> None:
        """Closes every tracker that still works, with how the run ended."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close(ending)
            except Exception as fault:
                _logger.warning(
                    "tracker %s could not be closed and may lack the last metrics (see %s): %s: %s",
                    name,
                    METRICS_FILE,
                    type(fault).__name__,
                    fault,
                )
        self._trackers.clear()


def open_trackers(
    run_dir: Path,
    components: Sequence[ComponentConfig],
    start: int,
    note: Callable[[str], None],
    registry: Registry,
) -> TrackerSet:
    """Opens metrics.jsonl and the trackers that a run's config lists.

    A tracker that cannot start is reported and switched off; the run goes on. A run that starts at step 0
    begins new runs in W&B and MLflow.

    Args:
        run_dir: the run's folder.
        components: trackers of the config (`log.trackers`).
        start: steps already taken; later lines of metrics.jsonl are dropped.
        note: prints a warning about a tracker that cannot start.
        registry: builds the trackers.
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
                reason = (
                    str(fault) if isinstance(fault, MMError) else f"{type(fault).__name__}: {_placed(fault)}"
                )
                note(f"warning: tracker {component.type} could not start and is switched off: {reason}")
    return TrackerSet(trackers)


def _placed(fault: Exception) -> str:
    """The message of a tracker's exception, with the line of the plugin that raised it."""
    place = author_line(fault)
    return str(fault) if place is None else f"{fault} ({place})"


def truncate_after(run_dir: Path, step: int) -> int:
    """Drops lines of metrics.jsonl after `step`, and incomplete ones; returns how many were dropped.

    The file is replaced in one step.
    """
    lines = _lines(run_dir)
    kept = [line for line in lines if (row := _row(line)) is not None and row["step"] <= step]
    if len(kept) < len(lines):
        replace_text(Path(run_dir) / METRICS_FILE, "".join(line + "\n" for line in kept))
    return len(lines) - len(kept)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Reads the metrics of a run: the complete lines of its metrics.jsonl; [] if nothing was logged."""
    return [row for row in map(_row, _lines(run_dir)) if row is not None]


def _lines(run_dir: Path) -> list[str]:
    path = Path(run_dir) / METRICS_FILE
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def _row(line: str) -> dict[str, Any] | None:
    """The JSON object of a line; None if the line is incomplete."""
    with suppress(ValueError):
        row = json.loads(line)
        return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
    return None
