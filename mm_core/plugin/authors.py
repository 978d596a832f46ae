"""Exceptions from the code of a plugin's author, as errors that name the author's own line."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from traceback import walk_tb
from types import FrameType

from mm_core.errors import MMError
from mm_core.plugin.local import LOCAL_PREFIX
from mm_core.plugin.manager import entry_point_records


def author_error(error: BaseException, log: object = None) -> MMError | None:
    """The error that the author of a plugin reads for an exception; None if no plugin's code is involved.

    Args:
        error: any exception but an MMError.
        log: the file that contains its traceback, if there is one.
    """
    shows = f"{log or 'MM_DEBUG=1'} shows the whole traceback"
    if (found := _innermost(error)) is not None:
        cause, frame, line = found
        file = frame.f_code.co_filename
        text = " ".join(str(cause).split()) or linecache.getline(file, line).strip()
        return MMError(
            f"{type(cause).__name__}{f': {text}' if text else ''}",
            where=f"{file}, line {line}, in {frame.f_code.co_name}",
            hint=f"correct this line; {shows}",
        )
    return None


def author_line(error: BaseException) -> str | None:
    """File and line of the innermost code of a plugin that an exception passed; None if it passed none."""
    found = _innermost(error)
    return None if found is None else f"{found[1].f_code.co_filename}, line {found[2]}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _innermost(error: BaseException) -> tuple[BaseException, FrameType, int] | None:
    """The innermost frame of a plugin's code that an exception or a cause of it passed, with its line."""
    packages = {re.split("[.:]", record.module)[0] for record in entry_point_records()} - {"mm_core"}
    for cause in _causes(error):
        for frame, line in reversed([*walk_tb(cause.__traceback__)]):
            module = str(frame.f_globals.get("__name__", ""))
            if module.startswith(LOCAL_PREFIX) or module.partition(".")[0] in packages:
                return cause, frame, line
    return None
