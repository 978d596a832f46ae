"""The conformance kits of metrics, trackers, callbacks and learning-rate schedules.

Each has at most two checks, for faults that an author would not see: a run goes on with them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from mm_core.contracts import Ending, Metric
from mm_core.data.media.video_files import write_clips
from mm_core.plugin.checks.values import fits, returned
from mm_core.testing.common import contents, expect_tensor, state_changes
from mm_core.testing.data.reading import equal
from mm_core.testing.kit import Kit, NotApplicable, Probe, by_name
from mm_core.testing.outputs.evaluations import Source, sampled_clips, sources

_STEPS, _BASE_LR = 40, 1e-3
_METRICS: tuple[dict[str, float], ...] = (
    {"loss": 0.5, "validation/loss": 2**53},
    {"loss": math.nan, "a b": -math.inf, "recall/größe": 1.7e308},
)
"""Metrics that a run may log: also not finite, and with any name."""
_near = partial(math.isclose, rel_tol=1e-6, abs_tol=1e-9)  # batches sum their rows in float32 in any order
_Rows = Sequence[int]
_Ranks = Sequence[Sequence[_Rows]]
_CLIPS, _CHECKPOINT = "samples/step_00000002", "checkpoints/step_00000002"


def figures(probe: Probe) -> None:
    """Figures are finite, and depend on the rows alone: not on ranks, batches or earlier evaluations."""
    hint = "clear totals in reset, add those of rows with a weight, and divide the sums that result is given"
    for source in _taken(probe):
        rows = source.rows
        wanted = _figures(probe, source, [[rows]], (), ())
        for what, ranks, filling, earlier in (
            ("in batches of unequal size", [[rows[:1], rows[1:]]], (), ()),
            ("in reverse order", [[[row] for row in rows[::-1]]], (), ()),
            ("over 2 ranks", [[rows[1:]], [rows[:1]]], (), ()),
            ("with rows that only fill a batch", [[rows, ()]], (0, 1), ()),
            ("after an evaluation and reset", [[rows]], (), rows[:3]),
        ):
            found = _figures(probe, source, ranks, filling, earlier)
            given = f"{what}, the figures of {source.name} are {found}"
            accepted = f"{wanted}, as for all rows in one batch"
            same = found.keys() == wanted.keys() and all(_near(found[n], wanted[n]) for n in wanted)
            probe.expect(same, given, accepted, hint)


def without_samples(probe: Probe) -> None:
    """Without samples, result returns no figures and raises no error."""
    metric = _new_metric(probe)
    found = metric.result(metric.sums().double())
    probe.expect(not found, f"without samples, result returned {found}", accepted="{}: no figures")


def _new_metric(probe: Probe) -> Any:
    metric = probe.build()
    metric.reset()
    return metric


def _taken(probe: Probe) -> list[Source]:
    """The sorts of rows that the metric takes and has figures for."""
    tried, taken = sources(probe.examples or ()), []
    for source in tried:
        with contextlib.suppress(Exception):  # rows of another task
            metric = _new_metric(probe)
            source.give(metric, source.rows)
            taken += [source] if metric.result(metric.sums().double()) else []
    if not taken:
        found = _figures(probe, tried[0], [[tried[0].rows]], (), ())  # its own error is shown
        hint = "name rows that it takes: Component(..., examples='package.module:function')"
        probe.expect(found, f"result returned no figures for {tried[0].name} or any others", hint=hint)
    return taken


def _figures(probe: Probe, source: Source, ranks: _Ranks, filling: _Rows, earlier: _Rows) -> dict[str, float]:
    """The figures as the core computes them from each rank's batches of rows."""
    sums = []
    for batches in ranks:
        metric = _new_metric(probe)
        if earlier:
            source.give(metric, earlier)
            metric.reset()
        for rows in batches:
            same = source.give(metric, rows, filling)
            what = f"the metric changes the {source.name} that it is given"
            probe.expect(same, what, hint="other metrics are given the same objects: change copies")
        sums.append(metric.sums())
        expect_tensor(probe, "sums", sums[-1], torch.float64, len(sums[0]))
    found = returned(Metric.result, metric.result(torch.stack(sums).sum(0)), metric)
    for name, value in found.items():
        right = fits(name, str) and fits(value, float) and math.isfinite(value)
        what = f"the figure {name!r} of {source.name} is {value!r}"
        probe.expect(right, what, accepted="a finite float by name", hint="convert tensors with float()")
    return dict(found)


def whole_run(probe: Probe) -> None:
    """A tracker takes any metrics and clips and every ending without an error, and changes none of them."""
    for ending in get_args(Ending):
        folder = _run_folder(probe, f"whole_{ending}")
        tracker, metrics, clips = probe.build(folder), deepcopy(_METRICS), sampled_clips()
        for step, logged in enumerate(metrics, 1):
            tracker.log(step, logged)
        tracker.clips(2, clips, folder / _CLIPS)
        tracker.clips(3, sampled_clips(), folder / "written_by_another_host")
        tracker.close(ending)
        tracker.close(ending)
        same = equal((metrics, clips), (_METRICS, sampled_clips()))
        probe.expect(same, "the tracker changes the metrics or clips that it is given", hint="change a copy")


def resumes(probe: Probe) -> None:
    """A tracker writes every number into its run's folder, and after a resume adds to what is there."""
    folder, found = _run_folder(probe, "resumed/run"), []
    values = [round(0.743164 + 0.013571 * step, 6) for step in range(6)]  # in no file by chance
    for steps in (range(4), range(4, 6)):
        with contextlib.chdir(folder.parent):
            tracker = probe.build(folder)
            for step in steps:
                tracker.log(step + 1, {"loss": values[step]})
            tracker.close("stopped")
        data = b"\0".join(contents(probe.folder).values())
        found.append([data.count(str(value).encode()) for value in values])
        time.sleep(1.1)  # libraries name files by the second, and no run is resumed within one
    outside = [path.name for path in folder.parent.iterdir() if path != folder]
    what = f"the tracker writes outside of the run's folder: {', '.join(outside)}"
    probe.expect(not outside, what, hint="write below run_dir, whatever the working folder is")
    if not any(found[1]):
        raise NotApplicable("the tracker writes no numbers as text into the folder of the run")
    lost = [step for step, count in enumerate(found[1], 1) if not count]
    hint = "open files to append to them, close them in close, and log nothing that was logged before"
    probe.expect(not lost, f"after a resume, the numbers of steps {lost} are not in the files", hint=hint)
    twice = [step for step, (before, after) in enumerate(zip(*found, strict=True), 1) if after > before > 0]
    probe.expect(not twice, f"after a resume, the numbers of steps {twice} are logged again", hint=hint)


def observes(probe: Probe) -> None:
    """A callback takes the events of new, resumed and failed runs without an error, and changes nothing."""
    folder = _run_folder(probe, "observed")
    files = contents(folder)
    for begin, error in ((0, None), (1, RuntimeError()), (1, KeyError("loss"))):
        callback, metrics = probe.build(), deepcopy(_METRICS)
        for name, given in (
            ("run_started", (folder, begin, 4)),
            *(("step_ended", (step, None)) for step in range(begin + 1, 3)),
            ("saved", (2, folder / _CHECKPOINT)),
            ("sampled", (2, folder / _CLIPS)),
            *(
                (event, (n, each))
                for n, each in enumerate(metrics, 3)
                for event in ("step_ended", "validated")
            ),
            ("run_ended", (4, error)),
        ):
            changed = state_changes(partial(getattr(callback, name), *given))
            changed += ["the metrics that it is given"] * (not equal(metrics, _METRICS))
            left = contents(folder)
            changed += [f"the run's file {path}" for path in files if left.get(path) != files[path]]
            hint = "draw from generators of your own, change copies, and write files of your own"
            probe.expect(not changed, f"{name} changes {', '.join(changed[:4])}", hint=hint)


def _run_folder(probe: Probe, name: str) -> Path:
    """The folder of a run, with its config, sampled clips and a checkpoint of its second step."""
    folder = probe.folder / "runs" / name
    write_clips(sampled_clips(), folder / _CLIPS)
    (folder / _CHECKPOINT).mkdir(parents=True, exist_ok=True)
    (folder / _CHECKPOINT / "checksums.json").write_text("{}\n", encoding="utf-8")
    (folder / "config.yaml").write_text("run: {name: tiny}\n", encoding="utf-8")
    return folder


def factors(probe: Probe) -> None:
    """The factor of each step is a finite float, not negative, and depends on the step alone."""
    schedule, again = probe.subject(), probe.subject()
    found = [schedule.factor(step) for step in range(_STEPS)]
    for step, value in enumerate(found):
        right = fits(value, float) and math.isfinite(value) and value >= 0
        what = f"factor({step}) of a run of {_STEPS} steps returned {value!r}"
        probe.expect(right, what, accepted="a float, finite and not negative")
    probe.expect(any(found), f"the factor is 0 in all {_STEPS} steps of a run: nothing is trained")
    other = probe.build(_STEPS, 10 * _BASE_LR)
    share = max(other.factor(step) for step in range(_STEPS)) < 5 * max(found)  # floors may move it a little
    probe.expect(share, "the factor grows with base_lr", accepted="a share of the base rate, such as 1")
    wrong = [step for step in reversed(range(_STEPS)) if again.factor(step) != found[step]]
    probe.expect(
        not wrong,
        f"factor({min(wrong, default=0)}) is a different one when steps are computed again, backwards",
        hint="compute the factor from the step alone, and keep no count of calls",
    )


METRIC = Kit(by_name(figures, without_samples))
TRACKER = Kit(
    by_name(whole_run, resumes),
    arguments=lambda probe: (probe.folder / "runs/built",),
    release=lambda tracker: tracker.close("done"),
)
CALLBACK = Kit(by_name(observes))
LR_SCHEDULE = Kit(by_name(factors), arguments=lambda _: (_STEPS, _BASE_LR))
