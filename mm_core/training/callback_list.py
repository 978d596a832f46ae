"""The callbacks of a training run, called in the order of the config."""

from __future__ import annotations

from collections.abc import Sequence

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

    @property
    def follow_steps(self) -> bool:
        """Whether a callback acts at the end of each step."""
        return any(type(each).step_ended is not Callback.step_ended for _, each in self._callbacks)

    def call(self, event: str, *args: object) -> None:
        """Calls the method `event` of each callback."""
        for name, callback in self._callbacks:
            try:
                getattr(callback, event)(*args)
            except MMError:
                raise
            except Exception as fault:
                raise MMError(
                    f"callback {name} raised {type(fault).__name__} at {event}: {fault}",
                    where=", ".join(filter(None, ["callbacks", author_line(fault)])),
                    hint="fix the callback or remove it from `callbacks`; MM_DEBUG=1 shows the traceback",
                ) from fault
