"""The loss curve shows what was logged."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from mm_core.telemetry.loss_curve import running_mean, write_loss_curve
from mm_core.telemetry.trackers.local import JsonlTracker


def blue(path) -> np.ndarray:
    """Rows of the curve's pixels, a column each (nan where it has none)."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    mask = (pixels[..., 2] - pixels[..., 0] > 40) & (pixels[..., 2] > 120)
    rows = np.arange(mask.shape[0])[:, None]
    with np.errstate(invalid="ignore"):
        return (mask * rows).sum(0) / np.where(mask.sum(0), mask.sum(0), np.nan)


def draw(run, losses):
    tracker = JsonlTracker(run)
    for step, loss in enumerate(losses, 1):
        tracker.log(step, {"loss": loss})
    tracker.close("done")
    return write_loss_curve(run)


def test_a_falling_loss_falls_from_left_to_right(tmp_path):
    path = draw(tmp_path / "shapes", [math.exp(-step / 40) for step in range(200)])
    assert path == tmp_path / "shapes" / "loss.png"
    heights = blue(path)
    drawn = heights[~np.isnan(heights)]
    assert len(drawn) > 400
    assert drawn[-60:].mean() - drawn[10:60].mean() > 100, "later losses are lower in the picture"


def test_losses_that_are_not_finite_leave_a_picture(tmp_path):
    path = draw(tmp_path / "run", [1.0, math.nan, 0.5, math.inf])
    with Image.open(path) as picture:
        assert picture.size == (840, 480)


def test_a_run_that_logged_nothing_leaves_a_picture(tmp_path):
    (tmp_path / "run").mkdir()
    assert write_loss_curve(tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["loss.png"]


def test_the_running_mean_of_a_constant_is_the_constant():
    assert running_mean([3.0] * 5, 10) == pytest.approx([3.0] * 5)
    assert running_mean([1.0, 2.0, 9.0], 1) == [1.0, 2.0, 9.0]
    # By hand: decay 1/2, (1), (0.5 + 3) / 1.5, (1.75 + 5) / 1.75 with sums 1, 3.5, 6.75 over 1, 1.5, 1.75.
    assert running_mean([1.0, 3.0, 5.0], 2) == pytest.approx([1.0, 3.5 / 1.5, 6.75 / 1.75])


def test_matplotlib_is_imported_only_to_draw():
    script = "import sys, mm_core.telemetry.loss_curve\nassert 'matplotlib' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", script], check=True)
