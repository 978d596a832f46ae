"""The callbacks of a run, called in the order of the YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mm_core.contracts import Callback
from mm_core.errors import MMError


class CallbackList:
    """Tells every callback what happens. One that raises ends the run, by name.

    Args:
        callbacks: (name, callback) in the order of the YAML.
    """

    def __init__(self, callbacks: Sequence[tuple[str, Callback]] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def run_started(self, run_dir: Path, step: int, last_step: int) -> None:
        """Everything is ready; `step` steps were taken before."""
        self._tell("run_started", lambda callback: callback.run_started(run_dir, step, last_step))

    def step_ended(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """`step` steps are taken; metrics where they were logged."""
        self._tell("step_ended", lambda callback: callback.step_ended(step, metrics))

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation has ended."""
        self._tell("validated", lambda callback: callback.validated(step, metrics))

    def sampled(self, step: int, folder: Path) -> None:
        """Clips were written."""
        self._tell("sampled", lambda callback: callback.sampled(step, folder))

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is complete."""
        self._tell("saved", lambda callback: callback.saved(step, path))

    def run_ended(self, step: int, error: BaseException | None) -> None:
        """The run is over."""
        self._tell("run_ended", lambda callback: callback.run_ended(step, error))

    def _tell(self, event: str, call: Callable[[Callback], None]) -> None:
        for name, callback in self._callbacks:
            try:
                call(callback)
            except MMError:
                raise
            except Exception as fault:
                raise MMError(
                    f"callback {name} raised {type(fault).__name__} at {event}: {fault}",
                    where="callbacks",
                    hint="fix the callback or remove it from `callbacks`; MM_DEBUG=1 shows where",
                ) from fault
