"""Keys that have a unit of time are counted in that one."""

from __future__ import annotations

import time
from pathlib import Path

from mm_core.config.load import load_config
from mm_core.runtime.process_group import process_group
from mm_core.training.assembly import assemble


def test_every_minutes_counts_minutes(tiny: Path, tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}", "checkpoint={every: 1000, every_minutes: 1.5}"]
    with process_group(None):
        made = assemble(load_config(tiny, overrides))
        for seconds, due in ((80, False), (92, True)):
            made.between._saved_at = time.monotonic() - seconds
            assert made.between.save_due is due, f"after {seconds} of 90 seconds"
        made.between.close(None)
        made.reporter.close("stopped")
