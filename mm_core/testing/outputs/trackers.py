"""The conformance kit of trackers (`mm_core.contracts.Tracker`)."""

from __future__ import annotations

import contextlib
import gc
import math
import time
import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

from mm_core.contracts import Clip, Ending
from mm_core.data.media.video_files import write_clips
from mm_core.telemetry.trackers.local import truncate_after
from mm_core.testing.common import KindProbe, contents
from mm_core.testing.data.reading import equal
from mm_core.testing.kit import Kit, NotApplicable, checks_of
from mm_core.testing.outputs.evaluations import sampled_clips

_STEPS = 6


class TrackerProbe(KindProbe):
    """A tracker under test, and the folders of the runs that it follows."""

    def folder(self, name: str) -> Path:
        """The folder of a run, with what the core has written before it opens trackers."""
        folder = self.probe.folder / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text("run: {name: tiny}\n", encoding="utf-8")
        return folder

    def open(self, folder: Path) -> Any:
        """A new tracker of a run."""
        return self.probe.build(folder)

    def call(self, what: str, call: Any, *given: object) -> None:
        """Makes a call, which may not raise an error."""
        accepted = "no error: a tracker that raises one is switched off for the rest of the run"
        self.expect_no_error(what, accepted, call, *given)

    def points(self, values: Sequence[float]) -> list[int]:
        """How often each number is in the files of the run or the store, as text."""
        files = (path for path in self.probe.folder.rglob("*") if path.is_file())
        data = b"\0".join(path.read_bytes() for path in files)
        return [data.count(str(value).encode()) for value in values]


def _log(tracker: Any, steps: Sequence[int], series: int = 0) -> list[float]:
    """Logs a number for each step, which is in no file by chance: six digits."""
    values = [round(0.743164 + 0.013571 * step + 0.001237 * series, 6) for step in steps]
    for step, value in zip(steps, values, strict=True):
        tracker.log(step, {"loss": value})
    return values


def _clips(folder: Path, step: int, written: bool = True) -> tuple[list[Clip], Path]:
    clips, place = sampled_clips(), folder / "samples" / f"step_{step:08d}"
    if written:
        write_clips(clips, place)
    return clips, place


def whole_run(probe: TrackerProbe) -> None:
    """A tracker takes metrics, validations and clips of a run, and every way in which the run ends."""
    for ending in get_args(Ending):
        folder = probe.folder(f"whole_{ending}")
        tracker = probe.open(folder)
        probe.call("log", tracker.log, 1, {"loss": 0.5, "lr": 1e-5, "samples": 8})
        probe.call("log of a validation", tracker.log, 1, {"validation/loss_at/0.1": 0.25})
        probe.call("clips", tracker.clips, 1, *_clips(folder, 1))
        probe.call("log after clips", tracker.log, 2, {"loss": 0.25})
        probe.call(f"close({ending!r})", tracker.close, ending)


def unusual_numbers(probe: TrackerProbe) -> None:
    """NaN, infinity, whole numbers and the largest and smallest ones are logged without an error."""
    tracker = probe.open(probe.folder("numbers"))
    for value in (math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 5e-324, -0.0, 0, 2**53):
        probe.call(f"log of {value!r}", tracker.log, 1, {"loss": value, "lr": 0.5})
    probe.call("log of no metrics", tracker.log, 2, {})
    probe.call("close after them", tracker.close, "done")


def unusual_names(probe: TrackerProbe) -> None:
    """Names with slashes, spaces and letters of any language are logged without an error."""
    tracker = probe.open(probe.folder("names"))
    for name in ("recall/größe", "recall/犬", "a name with spaces", "loss_at/0.1", "f1@50%", "a" * 120):
        probe.call(f"log of the name {name!r}", tracker.log, 1, {name: 0.5})
        probe.call(f"log of the name {name!r} again", tracker.log, 2, {name: 0.25, "loss": 0.25})
    probe.call("close after them", tracker.close, "done")


def unusual_clips(probe: TrackerProbe) -> None:
    """Clips with any prompt are taken, also none at all and clips whose files another host has written."""
    folder = probe.folder("clips")
    tracker = probe.open(folder)
    probe.call("clips before any metrics", tracker.clips, 1, *_clips(folder, 1))
    probe.call("clips without files", tracker.clips, 2, *_clips(folder, 2, written=False))
    probe.call("clips of an empty list", tracker.clips, 3, [], folder / "samples" / "step_00000003")
    probe.call("close after them", tracker.close, "done")


def closed_files(probe: TrackerProbe) -> None:
    """After close, every number is in the files, and no file of the run is open."""
    folder = probe.folder("closed")
    tracker = probe.open(folder)
    values = _log(tracker, range(1, _STEPS + 1))
    tracker.close("done")
    found = probe.points(values)
    with warnings.catch_warnings(record=True, action="always", category=ResourceWarning) as caught:
        del tracker
        gc.collect()
    later = probe.points(values)
    probe.expect(
        found == later and all(found) == any(found),
        f"after close, {sum(map(bool, found))} of {_STEPS} numbers are in the files, {sum(map(bool, later))}"
        " once the tracker is deleted",
        accepted="all of them",
        hint="write and close every file in close",
    )
    for each in caught:
        mine = str(folder) in str(each.message)
        probe.expect(not mine, f"after close: {each.message}", hint="close every file in close")


def closes_twice(probe: TrackerProbe) -> None:
    """close can be called again, and without any metrics before it."""
    tracker = probe.open(probe.folder("unused"))
    probe.call("close without metrics", tracker.close, "failed")
    tracker = probe.open(probe.folder("twice"))
    tracker.log(1, {"loss": 0.5})
    tracker.close("done")
    probe.call("a second close", tracker.close, "done")


def resumes(probe: TrackerProbe) -> None:
    """A resumed run's tracker adds to what the run has logged: nothing is lost or logged again."""
    folder, kept = probe.folder("resumed"), 4
    tracker = probe.open(folder)
    first = _log(tracker, range(1, _STEPS + 1), series=2)[:kept]  # as no other check logs them
    tracker.close("stopped")
    before = probe.points(first)
    if not any(before):
        raise NotApplicable("the tracker writes no numbers as text into the folder of the run")
    time.sleep(1.1)  # libraries name files by the second, and no run is resumed within one
    truncate_after(folder, kept)  # as the core does before it opens trackers
    tracker = probe.open(folder)
    second = _log(tracker, range(kept + 1, kept + 3), series=1)
    tracker.close("done")
    del tracker
    gc.collect()
    after = probe.points(first)
    lost = [step for step, count in enumerate(after, start=1) if not count]
    twice = [step for step, count in enumerate(after, start=1) if count > before[step - 1]]
    hint = "open files to append to them, and log nothing that was logged before"
    probe.expect(not lost, f"after a resume, the numbers of steps {lost} are gone", hint=hint)
    probe.expect(not twice, f"after a resume, the numbers of steps {twice} are logged again", hint=hint)
    missing = [kept + step for step, count in enumerate(probe.points(second), start=1) if not count]
    probe.expect(not missing, f"after a resume, the numbers of steps {missing} are not logged", hint=hint)


def own_folder(probe: TrackerProbe) -> None:
    """A tracker writes into its run's folder alone: not beside it, not into the folder of the clips."""
    folder = probe.folder("own/run")
    work = folder.with_name("work")
    work.mkdir()
    clips, place = _clips(folder, 1)
    before = contents(place)
    with contextlib.chdir(work):
        tracker = probe.open(folder)
        _log(tracker, range(1, 3))
        tracker.clips(1, clips, place)
        tracker.close("done")
    outside = [Path(name).name for name in contents(folder.parent) if not name.startswith("run/")]
    probe.expect(
        not outside,
        f"the tracker writes outside of the run's folder: {', '.join(outside)}",
        hint="write below run_dir, whatever the working folder is",
    )
    after = contents(place)
    changed = sorted(name for name in before | after if before.get(name) != after.get(name))
    probe.expect(
        not changed,
        f"the tracker changes the folder of the clips: {', '.join(changed)}",
        hint="it is the core's: write into another folder of the run",
    )


def inputs(probe: TrackerProbe) -> None:
    """Metrics and clips that a tracker receives stay as they were: others receive the same objects."""
    folder = probe.folder("inputs")
    metrics: dict[str, float] = {"loss": 0.5, "validation/loss": math.inf}
    clips, place = _clips(folder, 1)
    kept = deepcopy((metrics, clips))
    tracker = probe.open(folder)
    tracker.log(1, metrics)
    tracker.clips(1, clips, place)
    tracker.close("done")
    same = equal((metrics, clips), kept)
    probe.expect(same, "the tracker changes the metrics or clips that it is given", hint="change a copy")


def _close(tracker: Any) -> None:
    """Closes the tracker of a check that is not about closing: its errors are found by `whole_run`."""
    with contextlib.suppress(Exception):
        tracker.close("done")


KIT = Kit(
    checks_of(__name__),
    probe=TrackerProbe,
    arguments=lambda probe: (probe.folder / "runs" / "built",),
    release=_close,
)
"""The conformance checks of trackers."""
