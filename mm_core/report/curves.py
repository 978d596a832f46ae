"""Series made small enough for a page: each bucket of points keeps its mean, least and greatest value."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from mm_core.report.reading import Density, Run, Series

POINTS = 700
"""Buckets of a curve: about the pixels of a wide chart."""

COLUMNS = 140
"""Buckets of a heat map and of the stacked times."""

_LISTED = 200  # steps with values that are not finite, a curve


def curve(series: Series, points: int = POINTS) -> dict[str, object]:
    """The series in at most `points` buckets: `x` the last step, `y` the mean; `low` and `high` where a
    bucket holds more than one point. A bucket without finite values is a gap (None); `bad` lists steps
    whose values are not finite."""
    steps, size = series.steps, max(1, math.ceil(len(series.steps) / points))
    begins = range(0, len(steps), size)
    values = [_finite(series.values[begin : begin + size]) for begin in begins]
    found: dict[str, object] = {
        "x": [steps[min(begin + size, len(steps)) - 1] for begin in begins],
        # Divided first: a sum of large values may overflow where their mean does not.
        "y": [short(math.fsum(v / len(some) for v in some)) if some else None for some in values],
    }
    if size > 1:
        found["low"] = [short(min(some)) if some else None for some in values]
        found["high"] = [short(max(some)) if some else None for some in values]
    if sum(map(len, values)) < len(steps):
        bad = [step for step, value in zip(steps, series.values, strict=True) if not math.isfinite(value)]
        found |= {"bad": bad[:_LISTED], "bad_count": len(bad)}
    return found


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def short(value: float) -> float:
    """Six digits: more than a chart shows, and half the bytes."""
    return float(f"{value:.6g}")


def axis(run: Run) -> dict[str, list[float]]:
    """Steps, and the samples and seconds of training that they had taken, for the page to interpolate."""
    samples = run.series.get("samples", Series())
    times = run.series.get("step_time", Series())
    steps: list[int] = [0]
    seconds = [0.0]
    for step, mean in zip(times.steps, times.values, strict=True):
        spent = mean * (step - steps[-1])
        steps.append(step)
        seconds.append(seconds[-1] + (spent if math.isfinite(spent) else 0.0))
    every = max(1, math.ceil(len(steps) / POINTS))
    kept = [*range(0, len(steps) - 1, every), len(steps) - 1] if len(steps) > 1 else [0]
    return {
        "time_x": [steps[i] for i in kept],
        "time": [short(seconds[i]) for i in kept],
        **_thinned(samples),
    }


def _thinned(samples: Series) -> dict[str, list[float]]:
    finite = [(s, v) for s, v in zip(samples.steps, samples.values, strict=True) if math.isfinite(v)]
    every = max(1, math.ceil(len(finite) / POINTS))
    points = [(0, 0.0), *finite[::every], *finite[-1:]] if finite else []
    return {"samples_x": [step for step, _ in points], "samples": [value for _, value in points]}


def binned(run: Run, prefix: str) -> dict[str, object] | None:
    """The metrics `<prefix>/<low>-<high>` as a table: bins from low to high, buckets of steps, means."""
    names = [name for name in run.series if name.startswith(f"{prefix}/")]
    if not names:
        return None
    names.sort(key=lambda name: _bin_start(name.rpartition("/")[2]))
    columns = buckets([run.series[name] for name in names])
    return {
        "bins": [name.rpartition("/")[2] for name in names],
        "x": columns,
        "rows": [means_at(run.series[name], columns) for name in names],
    }


def _bin_start(label: str) -> tuple[float, str]:
    """Sorts `0.1-0.2` by its number, and what has none behind, by its letters."""
    for end in range(len(label), 0, -1):
        try:
            return float(label[:end]), label
        except ValueError:
            continue
    return math.inf, label


def buckets(many: Sequence[Series], columns: int = COLUMNS) -> list[int]:
    """At most `columns` steps, each the last of a bucket, that together hold every point of the series."""
    steps = sorted({step for series in many for step in series.steps})
    size = max(1, math.ceil(len(steps) / columns))
    return [steps[min(begin + size, len(steps)) - 1] for begin in range(0, len(steps), size)]


def means_at(series: Series, columns: Sequence[int]) -> list[float | None]:
    """The mean of the finite points in each bucket; None for one without."""
    return [short(sum(some) / len(some)) if some else None for some in _in_buckets(series, columns)]


def _in_buckets(series: Series, columns: Sequence[int]) -> Iterator[list[float]]:
    """The finite values of each bucket of steps, whose last ones `columns` are."""
    begin = 0
    for last in columns:
        end = bisect_right(series.steps, last, begin)
        yield _finite(series.values[begin:end])
        begin = end


def density(run: Run, declared: Density | None) -> dict[str, object] | None:
    """Realised share of each bin, over everything logged, beside the declared one."""
    if declared is None:
        return None
    labels = [f"{low:g}-{high:g}" for low, high in zip(declared.edges, declared.edges[1:], strict=False)]
    named = [run.series.get(f"timesteps_by_{declared.name}/{label}") for label in labels]
    lines = {step for series in named if series is not None for step in series.steps}
    if not lines:
        return None
    # A bin that a line leaves out had no sample then: it counts as 0.
    shares = [sum(_finite(series.values)) / len(lines) if series else 0.0 for series in named]
    return {
        "name": declared.name,
        "bins": labels,
        "realised": [short(share) for share in shares],
        "declared": [short(share) for share in declared.declared],
    }


def time_split(run: Run) -> dict[str, object] | None:
    """Seconds a step by phase, in buckets of steps, and the mean of each phase. A line that leaves a phase
    out spent no time in it."""
    phases = {name.removeprefix("time/"): s for name, s in run.series.items() if name.startswith("time/")}
    if not phases:
        return None
    lines = sorted({step for series in phases.values() for step in series.steps})
    columns = buckets(list(phases.values()))
    ends = [bisect_right(lines, last) for last in columns]
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return {
        "phases": list(phases),
        "x": columns,
        "rows": [
            [short(sum(some) / n) for some, n in zip(_in_buckets(series, columns), counts, strict=True)]
            for series in phases.values()
        ],
        "means": [short(sum(_finite(series.values)) / len(lines)) for series in phases.values()],
    }
