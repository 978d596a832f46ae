"""The conformance kit of callbacks (`mm_core.contracts.Callback`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from mm_core.data.media.video_files import write_clips
from mm_core.errors import TrainingError
from mm_core.testing.common import KindProbe, contents, state_changes
from mm_core.testing.kit import Kit, checks_of
from mm_core.testing.outputs.evaluations import sampled_clips

_LAST = 4
_SAMPLES, _CHECKPOINT = "samples/step_00000002", "checkpoints/step_00000002"
"""Where a run's second step leaves sampled clips and a checkpoint."""
Event = tuple[str, tuple[object, ...]]
"""Name of an event, and what the loop passes."""


class CallbackProbe(KindProbe):
    """A callback under test, and the events of runs that it observes."""

    def folder(self, name: str) -> Path:
        """The folder of a run, with sampled clips and a checkpoint of its second step."""
        folder = self.probe.folder / "runs" / name
        write_clips(sampled_clips(), folder / _SAMPLES)
        (folder / _CHECKPOINT).mkdir(parents=True)
        (folder / _CHECKPOINT / "checksums.json").write_text("{}\n", encoding="utf-8")
        (folder / "config.yaml").write_text("run: {name: tiny}\n", encoding="utf-8")
        return folder

    def call(self, callback: Any, *events: Event) -> None:
        """Passes events to a callback, which may not raise an error."""
        for name, given in events:
            accepted = "no error: one in a callback ends the run"
            self.expect_no_error(f"{name}{_shown(given)}", accepted, getattr(callback, name), *given)


def _shown(given: tuple[object, ...]) -> str:
    return f"({', '.join(each.name if isinstance(each, Path) else repr(each) for each in given)})"


def _events(folder: Path, begin: int = 0) -> Iterator[Event]:
    """The events of a run as the loop passes them."""
    yield "run_started", (folder, begin, _LAST)
    for step in range(begin + 1, _LAST + 1):
        logged = {"loss": 0.5, "lr": 1e-4, "grad_norm": 1.5, "step_time": 0.25} if step % 2 == 0 else None
        yield "step_ended", (step, logged)
        if step == 2:
            yield "validated", (step, {"validation/loss": 0.5, "validation/rows": 8.0})
            yield "sampled", (step, folder / _SAMPLES)
            yield "saved", (step, folder / _CHECKPOINT)
    yield "validated", (_LAST, {"test/loss": 0.25, "test/rows": 8.0})
    yield "run_ended", (_LAST, None)


def whole_run(probe: CallbackProbe) -> None:
    """A callback takes every event of a run, with what the loop passes."""
    probe.call(probe.build(), *_events(probe.folder("whole")))


def resumes(probe: CallbackProbe) -> None:
    """A callback works in a resumed run, in a folder with the files of an earlier process."""
    folder = probe.folder("resumed")
    first = [each for each in _events(folder) if each[0] != "run_ended"]  # killed before its end
    probe.call(probe.build(), *first[: len(first) // 2])
    probe.call(probe.build(), *_events(folder, begin=1))


def failed_runs(probe: CallbackProbe) -> None:
    """A run that ends at once, or by any exception, is not the callback's error; the exception is kept."""
    errors = (
        TrainingError("the loss is not finite", where="step 2", hint="lower the learning rate"),
        RuntimeError(),
        KeyError("loss"),
        KeyboardInterrupt(),
    )
    for number, error in enumerate(errors):
        folder = probe.folder(f"failed_{number}")
        kept = dict(vars(error)), error.args, error.__cause__, error.__context__
        probe.call(probe.build(), ("run_started", (folder, 0, _LAST)), ("run_ended", (0, error)))
        probe.expect(
            kept == (dict(vars(error)), error.args, error.__cause__, error.__context__),
            f"run_ended changes the {type(error).__name__} that ended the run",
            hint="the core prints it after the callbacks: read it only",
        )


def unusual_metrics(probe: CallbackProbe) -> None:
    """Metrics that are not finite, or have any other names, are not an error."""
    folder = probe.folder("metrics")
    cases: tuple[Mapping[str, float], ...] = (
        {"loss": math.nan, "grad_norm": math.inf},
        {"loss": -1e308},
        {"recall/größe": 1},
    )
    for number, metrics in enumerate(cases, start=1):
        events = (("step_ended", (number, metrics)), ("validated", (number, metrics)))
        probe.call(probe.build(), ("run_started", (folder, 0, _LAST)), *events, ("run_ended", (number, None)))


def observes(probe: CallbackProbe) -> None:
    """A callback changes no random numbers, defaults or libraries, and nothing that it is given."""
    folder = probe.folder("observed")
    callback, files = probe.build(), contents(folder)
    for name, given in _events(folder):
        kept = deepcopy(given)
        changed = state_changes(partial(getattr(callback, name), *given))
        hint = "draw from generators of your own, and restore what you change"
        probe.expect(not changed, f"{name} changes {', '.join(changed[:4])}", hint=hint)
        probe.expect(
            given == kept,
            f"{name} changes the metrics that it is given",
            hint="other callbacks get them: change a copy",
        )
        left = contents(folder)
        touched = [path for path in files if left.get(path) != files[path]]
        probe.expect(
            not touched,
            f"{name} changes or deletes files of the run: {', '.join(touched[:3])}",
            hint="they are the core's: write files of your own",
        )


KIT = Kit(checks_of(__name__), probe=CallbackProbe)
"""The conformance checks of callbacks."""
