"""Errors that users can cause: what, where, accepted, hint; catching what a plugin's code raises."""

from __future__ import annotations

import difflib
import dis
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

__all__ = [
    "CacheError",
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
    "article",
    "did_you_mean",
    "first_line",
    "foreign_code",
    "nearest",
    "outer_fault",
    "plain_reason",
    "plural",
    "printable",
    "without_controls",
]

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
# Lone surrogates: no text file can hold them.
_SPELT_OUT = _CONTROLS | {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
# What ends a line, or reorders it (bidirectional text).
_IN_LINE = {code: f"\\u{code:04x}" for code in (*range(0x2028, 0x202F), *range(0x2066, 0x206A))}
_IN_LINE |= _SPELT_OUT | {9: "\\t", 10: "\\n"}


class MMError(ValueError):
    """An error that the user can fix: what is wrong, where, what is accepted, and what to do next.

    Args:
        what: one sentence: what was found and why it is wrong.
        where: file, line, config key, component or rank where it was found.
        accepted: values that would have been accepted.
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
        """Whether every rank raises an error at this point, so that they can still save a checkpoint."""
        self.passing = False
        """Whether another try can succeed: a process, host or device was lost."""
        super().__init__(self.render())

    def render(self) -> str:
        """The text of the error: one line, with the accepted values and the hint indented below.

        Control characters and lone surrogates, which names in a file can contain, become escapes.
        """
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.accepted:
            lines.append(f"  accepted: {self.accepted}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return without_controls("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by their args; these are keyword-only, and data workers send them to their rank.
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(cls: type[MMError], state: dict[str, object]) -> MMError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    ValueError.__init__(error, error.render())
    return error


class ConfigError(MMError):
    """A config file or command-line override with errors; `faults` holds all of them."""

    def __init__(self, faults: Sequence[MMError] | str, **details: str | None) -> None:
        self.faults: tuple[MMError, ...] = () if isinstance(faults, str) else tuple(faults)
        count = f"{plural(len(self.faults), 'error')} in the config"
        super().__init__(faults if isinstance(faults, str) else count, **details)

    def render(self) -> str:
        """The text of the config error: every error in the config, one below the other."""
        head = super().render()
        return "\n".join([head, *(fault.render() for fault in self.faults)])


class PluginError(MMError):
    """A plugin or component that is missing, broken, ambiguous or written for another API version."""


class TrustError(MMError):
    """A stored run names code that this user has neither trained with nor allowed; none of it has run."""


class DataError(MMError):
    """Annotations or media that cannot be read as described."""


class PartsError(DataError):
    """Parts of a data sample that cannot be read.

    Raised when no part of the sample can be read; otherwise stored under the sample's `missing`.

    Args:
        faults: the error of each part, by the part's number in the dataset. The number is the same in every
            epoch, whichever sample the part belongs to.
        of: number of parts in the sample, readable or not.
    """

    def __init__(self, faults: Mapping[int, DataError], of: int) -> None:
        self.faults, self.of = dict(faults), of
        first, more = next(iter(self.faults.values())), len(self.faults) - 1
        also = f" (and {plural(more, 'other part')} of the same sample)" if more else ""
        super().__init__(first.what + also, where=first.where, accepted=first.accepted, hint=first.hint)


class CacheError(MMError):
    """A feature cache that cannot be read or written, or that does not fit the run."""


class CheckpointError(MMError):
    """A checkpoint that is missing, incomplete, damaged, or from another model."""


class ContractError(MMError):
    """A component that violates the contract of its kind (shapes, names, dtypes)."""


class PlanError(MMError):
    """A run that does not fit the number of ranks: batch sizes, mesh sizes, module patterns."""


class TrainingError(MMError):
    """A training step that must not be taken: a non-finite loss or gradient, or a failed rank."""


class PeerError(MMError):
    """Another rank failed: that rank prints its own error, so this one is not printed."""


class ForeignExit(Exception):
    """Plugin code raised SystemExit, KeyboardInterrupt or another BaseException, kept as `__cause__`."""


class RunWarning(UserWarning):
    """A warning for the user who starts a run; the commands print it like their own messages."""


def without_controls(text: str) -> str:
    """Lines of text with escapes for lone surrogates and control characters, but tabs and ends of lines."""
    return text.translate(_SPELT_OUT)


def printable(name: str) -> str:
    """A name or text from a file as part of a printed line: what would command the terminal, end the line or
    reorder it is an escape."""
    return name.translate(_IN_LINE)


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most similar to a misspelt name, best first (also by their part after the last `/`)."""
    known = list(known)
    found = difflib.get_close_matches(word, known, n=count, cutoff=0.6)
    if not found:
        tails = {name.rsplit("/", 1)[-1]: name for name in known}
        found = [tails[t] for t in difflib.get_close_matches(word, tails, n=count, cutoff=0.6)]
    return found


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The hint `did you mean 'x'?` for a misspelt name, or None when no known name is similar."""
    found = nearest(word, known, 2)
    return f"did you mean {' or '.join(repr(name) for name in found)}?" if found else None


def plural(count: int, noun: str) -> str:
    """A count with its noun for a message: `1 rank`, `2,000 ranks`, `0 entries`."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2:-1] not in tuple("aeiou"):
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first of many names for a message, and how many more there are."""
    rest = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def article(noun: str) -> str:
    """A noun of a message with its article: `a rank`, `an engine`."""
    return f"{'an' if noun[:1] in tuple('aeiou') else 'a'} {noun}"


def plain_reason(error: Exception) -> str:
    """The reason for an error as the system or FFmpeg words it, without error number and path."""
    return getattr(error, "strerror", None) or str(error)


def first_line(fault: BaseException) -> str:
    """The first line of a library's error message: the rest advises users of that library."""
    return next(iter(str(fault).splitlines()), type(fault).__name__)


@contextmanager
def foreign_code() -> Iterator[None]:
    """Turns a BaseException raised by plugin code into ForeignExit, except KeyboardInterrupt (Ctrl-C).

    Otherwise `sys.exit(0)` in a module would end the command that imports it as a success.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ForeignExit(f"{type(error).__name__}: {error}") from error


_LIMITS = {
    errno.EMFILE: "raise `ulimit -n`, or lower data.loader.workers",
    errno.ENFILE: "end other programs on this host, or lower data.loader.workers",
    errno.ENOSPC: "free space there; TMPDIR, run.dir and data.cache.dir choose other disks",
    errno.EDQUOT: "free space of your quota; TMPDIR, run.dir and data.cache.dir choose other disks",
    errno.EROFS: "choose another folder: TMPDIR, run.dir and data.cache.dir",
    errno.EACCES: "check the permissions of this path",
    errno.EPERM: "check the permissions of this path",
    errno.ENOMEM: "end other programs on this host, or lower data.loader.workers and train.micro_batch_size",
    errno.EAGAIN: "raise `ulimit -u`, or lower data.loader.workers",
    errno.EIO: "check the disk or its server (dmesg), then run the command again",
    errno.ESTALE: "check the disk's server, then run the command again",
}
_IN_TEXTS = {os.strerror(number).lower(): number for number in _LIMITS if number != errno.EPERM}
_IN_TEXTS["can't start new thread"] = errno.EAGAIN
"""What torch, and threads, have of an error of the operating system: its sentence, without its number."""


_BEYOND = re.compile(r"Target -?\d+ is out of bounds|device-side assert triggered")
"""torch's errors for a label beyond the classes, and for any such number on a device."""


def outer_fault(error: BaseException | None, line: str | None) -> MMError | None:
    """The message for an exception of which this machine's limits, or a number in the data, are the cause.

    Args:
        error: what ended a command; its causes are searched too.
        line: the innermost line of a plugin that it passed.

    Returns:
        None for any other exception.
    """
    while error is not None:
        function, place, raised = _origin(error)
        if raised and place == line:
            return None  # in the plugin's own words
        if isinstance(error, OSError) and error.errno in _LIMITS:
            where = line if error.filename is None else str(error.filename)
            return MMError(f"{error.strerror}", where=where, hint=_LIMITS[error.errno])
        text = str(error).lower() if isinstance(error, RuntimeError) else ""
        if (number := next((_IN_TEXTS[words] for words in _IN_TEXTS if words in text), None)) is not None:
            return MMError(f"{os.strerror(number)} ({first_line(error)})", where=line, hint=_LIMITS[number])
        if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
            return MMError(plain_reason(error), hint=_LIMITS[errno.ENOSPC])
        embedding = isinstance(error, IndexError) and function == "embedding"
        if embedding or (isinstance(error, IndexError | RuntimeError) and _BEYOND.search(str(error))):
            return MMError(
                "a number in the data is outside of a table of the model: a token, label or position"
                f" ({first_line(error)})",
                where=line,
                hint="take the tokenizer of this model or text encoder, and check the numbers that the"
                " dataset returns, such as prompt_ids",
            )
        error = error.__cause__
    return None


def _origin(error: BaseException) -> tuple[str, str, bool]:
    """Function, file and line in which an exception began, and whether by `raise`: else in C."""
    trace = error.__traceback__
    if trace is None:
        return "", "", False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    raised = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return code.co_name, f"{code.co_filename}, line {trace.tb_lineno}", raised
