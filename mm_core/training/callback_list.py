"""The callbacks of a training run, called in the order of the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mm_core.config.sections import RunConfig
from mm_core.contracts import Callback
from mm_core.errors import MMError
from mm_core.plugin.authors import author_line


class CallbackList:
    """Calls all callbacks of a training run at each event; one that raises ends the run with its name.

    Args:
        callbacks: (name, callback) in the order of the config.
    """

    def __init__(self, callbacks: Sequence[tuple[str, Callback]] = ()) -> None:
        self._callbacks = tuple(callbacks)

    @classmethod
    def of(cls, config: RunConfig, more: Sequence[tuple[str, Callback]]) -> CallbackList:
        """The callbacks that a run's config names, built, and `more` after them."""
        return cls([*((c.type, config.registry.build("callback", c)) for c in config.callbacks), *more])

    def __len__(self) -> int:
        return len(self._callbacks)

    def run_started(self, run_dir: Path, step: int, last_step: int) -> None:
        """Calls the callbacks when the run is ready for its first step; `step` steps were taken before."""
        self._call("run_started", lambda callback: callback.run_started(run_dir, step, last_step))

    def step_ended(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Calls the callbacks after training step `step`; `metrics` is None if none were logged."""
        self._call("step_ended", lambda callback: callback.step_ended(step, metrics))

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Calls the callbacks after a validation or test, with its metrics."""
        self._call("validated", lambda callback: callback.validated(step, metrics))

    def sampled(self, step: int, folder: Path) -> None:
        """Calls the callbacks after clips were sampled into `folder`."""
        self._call("sampled", lambda callback: callback.sampled(step, folder))

    def saved(self, step: int, path: Path) -> None:
        """Calls the callbacks after a checkpoint is complete."""
        self._call("saved", lambda callback: callback.saved(step, path))

    def run_ended(self, step: int, error: BaseException | None) -> None:
        """Calls the callbacks at the end of the run, with the exception that ended it, if any."""
        self._call("run_ended", lambda callback: callback.run_ended(step, error))

    def _call(self, event: str, call: Callable[[Callback], None]) -> None:
        for name, callback in self._callbacks:
            try:
                call(callback)
            except MMError:
                raise
            except Exception as fault:
                raise MMError(
                    f"callback {name} raised {type(fault).__name__} at {event}: {fault}",
                    where=", ".join(filter(None, ["callbacks", author_line(fault)])),
                    hint="fix the callback or remove it from `callbacks`; MM_DEBUG=1 shows the traceback",
                ) from fault
