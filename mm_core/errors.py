"""Errors that users can cause: what, where, accepted, hint; catching what a plugin's code raises."""

from __future__ import annotations

import difflib
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "DataError",
    "ForeignExit",
    "MMError",
    "PartsError",
    "PeerError",
    "PlanError",
    "PluginError",
    "RunWarning",
    "TrainingError",
    "TrustError",
    "did_you_mean",
    "first_line",
    "foreign_code",
    "nearest",
    "plain_reason",
    "plural",
]

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
# Halves of characters, which no file of text takes.
_SPELT_OUT = _CONTROLS | {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}


class MMError(ValueError):
    """A fault that the user can mend.

    Args:
        what: one sentence: what was found and why it is wrong.
        where: file, line, key path, component or rank that it was found in.
        accepted: what would have been accepted.
        hint: what to do next.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        accepted: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.accepted = accepted
        self.hint = hint
        self.on_all_ranks = False
        """Whether every rank raises an error at this very point, so that they may still save together."""
        super().__init__(self.render())

    def render(self) -> str:
        """The text that a person reads: one line, or one line and its remedies indented below. What a file
        calls things may be made to command a terminal, or hold what is no text: such characters are spelt
        out."""
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.accepted:
            lines.append(f"  accepted: {self.accepted}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines).translate(_SPELT_OUT)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by their args; ours are keyword-only, and data workers send them across.
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(cls: type[MMError], state: dict[str, object]) -> MMError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    ValueError.__init__(error, error.render())
    return error


class ConfigError(MMError):
    """A config file or an override that does not check. `faults` holds every one that was found."""

    def __init__(self, faults: Sequence[MMError] | str, **details: str | None) -> None:
        self.faults: tuple[MMError, ...] = () if isinstance(faults, str) else tuple(faults)
        count = f"{len(self.faults)} fault{'s' if len(self.faults) != 1 else ''} in the config"
        super().__init__(faults if isinstance(faults, str) else count, **details)

    def render(self) -> str:
        """Every fault, one below the other."""
        head = super().render()
        return "\n".join([head, *(fault.render() for fault in self.faults)])


class PluginError(MMError):
    """A plugin or component that is missing, broken, ambiguous or made for another API version."""


class TrustError(MMError):
    """Code of a stored run that this user has neither trained with nor allowed. None of it has run."""


class DataError(MMError):
    """Annotations or media that cannot be read as described."""


class PartsError(DataError):
    """Parts of a sample that cannot be read: raised where no other is left, else given beside the others
    under the sample's `missing`.

    faults: of each part, by its number among all parts of the dataset: the same in every epoch, whichever
    sample the part belongs to then. of: parts of the sample, readable or not.
    """

    def __init__(self, faults: Mapping[int, DataError], of: int) -> None:
        self.faults, self.of = dict(faults), of
        first, more = next(iter(self.faults.values())), len(self.faults) - 1
        also = f" (and {more} more that share{'s' * (more == 1)} its place)" if more else ""
        super().__init__(first.what + also, where=first.where, accepted=first.accepted, hint=first.hint)


class CheckpointError(MMError):
    """A checkpoint that is missing, incomplete, damaged, or of another model."""


class ContractError(MMError):
    """A component that breaks the contract of its kind (shapes, names, dtypes)."""


class PlanError(MMError):
    """A run that does not fit its world: batch sizes, mesh sizes, module patterns."""


class TrainingError(MMError):
    """A step that must not be taken: a non-finite loss or gradient, a rank that failed."""


class PeerError(MMError):
    """Another rank failed; its own sentence is the one to read, so this one stays quiet."""


class ForeignExit(Exception):
    """Code of a plugin raised SystemExit, KeyboardInterrupt or another BaseException: its `__cause__`."""


class RunWarning(UserWarning):
    """A sentence for the person who starts a run: the commands print it as they print their other ones."""


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known words most like `word`, best first (also by their last dotted or slashed part)."""
    known = list(known)
    found = difflib.get_close_matches(word, known, n=count, cutoff=0.6)
    if not found:
        tails = {name.rsplit("/", 1)[-1]: name for name in known}
        found = [tails[t] for t in difflib.get_close_matches(word, tails, n=count, cutoff=0.6)]
    return found


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """`did you mean 'x'?`, or None when nothing is near."""
    found = nearest(word, known, 2)
    return f"did you mean {' or '.join(repr(name) for name in found)}?" if found else None


def plural(count: int, noun: str) -> str:
    """A count with its noun, for a message: `1 rank`, `2 ranks`, `0 entries`."""
    if count == 1:
        return f"1 {noun}"
    ending = "ies" if noun.endswith("y") and noun[-2:-1] not in tuple("aeiou") else "s"
    return f"{count} {noun.removesuffix('y') if ending == 'ies' else noun}{ending}"


def plain_reason(error: Exception) -> str:
    """What the system gives as the reason, without numbers and paths."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def first_line(fault: BaseException) -> str:
    """Of a library's message: the rest of it is advice for its own users."""
    return next(iter(str(fault).splitlines()), type(fault).__name__)


@contextmanager
def foreign_code() -> Iterator[None]:
    """Turns what is no Exception into ForeignExit, but for the KeyboardInterrupt of a person's Ctrl-C.

    `sys.exit(0)` in a module would otherwise be a success of the command that imports it.
    """
    asked: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    handled = callable(before) and threading.current_thread() is threading.main_thread()

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if callable(before):
            before(number, frame)

    if handled:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if asked:
            raise
        raise ForeignExit(f"{type(error).__name__}: {error}") from error
    finally:
        if handled and signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, before)
