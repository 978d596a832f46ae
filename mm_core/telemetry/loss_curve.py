"""Draws the loss curve of a run as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mm_core.files import replacing
from mm_core.telemetry.extras import package
from mm_core.telemetry.trackers.local import read_metrics


def write_loss_curve(run_dir: Path) -> Path:
    """Draws the loss curve of a run, `<run_dir>/loss.png`, from `metrics.jsonl`: losses and running mean.

    Raises:
        MMError: matplotlib is not installed.
    """
    package("matplotlib", "plots")
    # Imported here, so that runs without a loss curve do not wait for it. pyplot is not used: it would
    # choose a window system and keep every figure in memory.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run_dir = Path(run_dir)
    points = [(row["step"], float(row["loss"])) for row in read_metrics(run_dir) if "loss" in row]
    points = [(step, loss) for step, loss in points if math.isfinite(loss)]
    figure = Figure(figsize=(7.0, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xlabel="step", ylabel="loss", title=f"loss of {run_dir.name}")
    axes.grid(alpha=0.3)
    if points:
        steps, losses = zip(*points, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="logged")
        axes.plot(
            steps, running_mean(losses, max(1, len(losses) // 50)), color="tab:blue", label="running mean"
        )
        axes.legend()
    else:
        axes.text(0.5, 0.5, "no step was logged", ha="center", transform=axes.transAxes)
    path = run_dir / "loss.png"
    with replacing(path) as staged:
        figure.savefig(staged)
    return path


def running_mean(values: Sequence[float], length: int) -> list[float]:
    """Exponential running mean of logged losses over about `length` values, without bias to the first one."""
    decay, total, weight, means = 1.0 - 1.0 / length, 0.0, 0.0, []
    for value in values:
        total = decay * total + value
        weight = decay * weight + 1.0
        means.append(total / weight)
    return means
