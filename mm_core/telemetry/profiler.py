"""A window of steps under torch.profiler: Chrome trace, table of operators, memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.config.sections import ProfileSection
from mm_core.device import MemoryRecorder, memory_recorder

if TYPE_CHECKING:
    from torch.profiler import profile

_logger = logging.getLogger(__name__)


class ProfileWindow:
    """Records steps `steps[0]` to `steps[1]` (from 1, both included) of the ranks that are chosen; of a run
    that resumes or ends within them, those that it takes.

    Writes `profile/rank_N_steps_A-B.json.gz` (for chrome://tracing or Perfetto), `.txt` (operators by
    their own time) and, where the device's allocator records it, `.memory.pickle` (for PyTorch's memory
    viewer). Without settings it does nothing.

    Args:
        settings: the window; None records nothing.
        run_dir: the run's folder.
        rank: this process.
    """

    def __init__(self, settings: ProfileSection | None, run_dir: Path, rank: int) -> None:
        self._settings = settings if settings is not None and rank in settings.ranks else None
        self._folder, self._rank = Path(run_dir) / "profile", rank
        self._first = self._last = 0
        self._profiler: profile | None = None
        self._memory: MemoryRecorder | None = None

    def step_begins(self, step: int) -> None:
        """Called before step number `step` (from 1)."""
        settings = self._settings
        if settings is None or self._profiler is not None:
            return
        if not settings.steps[0] <= step <= settings.steps[1]:
            return
        from torch.profiler import profile

        self._first = self._last = step
        self._memory = memory_recorder() if settings.memory else None
        if self._memory is not None:
            self._memory.start()
        # All activities that this build of torch knows: CPU, and the accelerator's where it has one.
        self._profiler = profile(profile_memory=settings.memory, record_shapes=True)
        self._profiler.start()

    def step_ended(self, step: int) -> None:
        """Called after step number `step`."""
        if self._profiler is None:
            return
        assert self._settings is not None
        self._last = step
        if step >= self._settings.steps[1]:
            self.close()
        else:
            self._profiler.step()

    def close(self) -> None:
        """Writes what was recorded, also where the run ends within the window."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        stem = self._folder / f"rank_{self._rank}_steps_{self._first}-{self._last}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(f"{stem}.json.gz")
            table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=50)
            stem.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
            if self._memory is not None:
                self._memory.write(Path(f"{stem}.memory.pickle"))
        except (OSError, RuntimeError) as fault:  # no run ends for want of a trace
            _logger.warning("the profile could not be written: %s", fault)
        finally:
            if self._memory is not None:
                self._memory.stop()
