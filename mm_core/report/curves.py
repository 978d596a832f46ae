"""Reduces metric series for a report page: each bucket of points keeps its mean, minimum and maximum."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from mm_core.report.reading import Density, Run, Series

POINTS = 700
"""Buckets per curve: about one per pixel of a wide chart."""

COLUMNS = 140
"""Buckets per heat map and per chart of stacked times."""

_LISTED = 200  # most listed steps per curve with values that are not finite


def curve(series: Series, points: int = POINTS) -> dict[str, object]:
    """A metric's series as a curve of the report, in at most `points` buckets.

    Returns:
        `x`: the last step of each bucket; `y`: its mean, None without finite values; `low` and `high`, if
        buckets have more than one point; `bad`: steps whose values are not finite.
    """
    steps, size = series.steps, max(1, math.ceil(len(series.steps) / points))
    begins = range(0, len(steps), size)
    values = [_finite(series.values[begin : begin + size]) for begin in begins]
    found: dict[str, object] = {
        "x": [steps[min(begin + size, len(steps)) - 1] for begin in begins],
        # Divide first: the sum of large values may overflow although their mean does not.
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
    """Rounds a value of a report's chart to six digits: more than a chart shows, and half the bytes."""
    return float(f"{value:.6g}")


def axis(run: Run) -> dict[str, list[float]]:
    """Steps of a run with samples and training seconds so far, for the x axes of the report's charts."""
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


def heat_map(run: Run, prefix: str) -> dict[str, object] | None:
    """The metrics `<prefix>/<low>-<high>` of a run as a heat map of the report: bins, steps, means."""
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
    """A sort key: labels such as `0.1-0.2` by their number, then all others alphabetically."""
    for end in range(len(label), 0, -1):
        try:
            return float(label[:end]), label
        except ValueError:
            continue
    return math.inf, label


def buckets(many: Sequence[Series], columns: int = COLUMNS) -> list[int]:
    """Divides the steps of a report's series into buckets, and returns the last step of each bucket."""
    steps = sorted({step for series in many for step in series.steps})
    size = max(1, math.ceil(len(steps) / columns))
    return [steps[min(begin + size, len(steps)) - 1] for begin in range(0, len(steps), size)]


def means_at(series: Series, columns: Sequence[int]) -> list[float | None]:
    """The mean of a report series' finite points in each bucket; None for a bucket without any."""
    return [short(sum(some) / len(some)) if some else None for some in _in_buckets(series, columns)]


def _in_buckets(series: Series, columns: Sequence[int]) -> Iterator[list[float]]:
    """The finite values in each bucket; `columns` are the last steps of the buckets."""
    begin = 0
    for last in columns:
        end = bisect_right(series.steps, last, begin)
        yield _finite(series.values[begin:end])
        begin = end


def density(run: Run, declared: Density | None) -> dict[str, object] | None:
    """The share of each bin of the loss scale for the report: realised in the logged steps, and declared."""
    if declared is None:
        return None
    labels = [f"{low:g}-{high:g}" for low, high in zip(declared.edges, declared.edges[1:], strict=False)]
    named = [run.series.get(f"timesteps_by_{declared.name}/{label}") for label in labels]
    lines = {step for series in named if series is not None for step in series.steps}
    if not lines:
        return None
    # A bin that is missing in a line had no samples: it counts as 0.
    shares = [sum(_finite(series.values)) / len(lines) if series else 0.0 for series in named]
    return {
        "name": declared.name,
        "bins": labels,
        "realised": [short(share) for share in shares],
        "declared": [short(share) for share in declared.declared],
    }


def time_split(run: Run) -> dict[str, object] | None:
    """Seconds per step by phase for the report, in buckets of steps, and the mean of each phase.

    A phase that is missing in a logged line took no time.
    """
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
