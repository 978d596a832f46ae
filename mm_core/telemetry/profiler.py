"""Profiles a range of training steps with torch.profiler: Chrome trace, table of operators, memory."""

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
    """Profiles training steps `steps[0]` to `steps[1]` (from 1, both included) on the chosen ranks.

    If a run resumes or ends within this range, only the steps that it runs are recorded. Writes
    `profile/rank_N_steps_A-B.json.gz` (for chrome://tracing or Perfetto), `.txt` (operators by their own
    time) and, if the device's allocator supports it, `.memory.pickle` (for PyTorch's memory viewer).

    Args:
        settings: steps and ranks to profile; None records nothing.
        run_dir: the run's folder.
        rank: rank of this process.
    """

    def __init__(self, settings: ProfileSection | None, run_dir: Path, rank: int) -> None:
        self._settings = settings if settings is not None and rank in settings.ranks else None
        self._folder, self._rank = Path(run_dir) / "profile", rank
        self._first = self._last = 0
        self._profiler: profile | None = None
        self._memory: MemoryRecorder | None = None

    @property
    def running(self) -> bool:
        """Whether training steps are being recorded."""
        return self._profiler is not None

    def step_begins(self, step: int) -> None:
        """Starts the profiler before training step `step` (from 1), if the profile begins there."""
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
        # By default, all activities of this build of torch: CPU, and the accelerator if there is one.
        self._profiler = profile(profile_memory=settings.memory, record_shapes=True)
        self._profiler.start()

    def step_ended(self, step: int) -> None:
        """Writes the profile after training step `step`, if that was its last step."""
        if self._profiler is None:
            return
        assert self._settings is not None
        self._last = step
        if step >= self._settings.steps[1]:
            self.close()
        else:
            self._profiler.step()

    def close(self) -> None:
        """Writes the profile recorded so far, also if the run ends before its last step."""
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
        except (OSError, RuntimeError) as fault:  # a missing profile must not end the run
            _logger.warning(
                "the profile could not be written: %s; check free space and permissions of %s",
                fault,
                self._folder,
            )
        finally:
            if self._memory is not None:
                self._memory.stop()
