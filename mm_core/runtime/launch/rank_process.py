"""Running a process as a rank: its error is printed once for all ranks of the host, and it exits cleanly."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from mm_core.errors import MMError, PeerError, outer_fault
from mm_core.plugin.authors import author_error, author_line
from mm_core.runtime.launch.launch_folder import ENDED, FAILED, LOST, STOPPED_EARLY, LaunchFolder
from mm_core.runtime.launch.rank_logs import latest_log
from mm_core.runtime.launch.signals import PASSING, REASONS, STOPPED, show_cursor
from mm_core.runtime.leftovers import end_workers

GRACE = 5.0
"""Seconds that a rank continues after another rank on its host has failed or vanished."""

_LOST = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection refused|Socket closed|[Tt]imed out waiting"
    r"|communicator was aborted|remote process exited|wait timeout after|recvValue failed|sendBytes failed"
    r"|Failed to recv"
)
_OF_DEVICE = re.compile(r"\b(?:CUDA|NCCL|HCCL|NPU|ACL|HIP) (?:\w+ )?error|\bncclSystemError|\bE[A-Z]\d{4}:")
"""Errors of accelerators and their communication, of which torch has no class on every backend."""
_OF_CODE = re.compile(r"device-side assert|invalid argument|out of memory", re.IGNORECASE)
_NO_MEMORY = re.compile(r"can't allocate memory|out of memory|Cannot allocate memory", re.IGNORECASE)

_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)")
_CAPACITY = re.compile(r"total capacity of ([\d.]+) ([KMGT]iB)|; ([\d.]+) ([KMGT]iB) total capacity")
_OF_RANK = re.compile(r"rank \d+\b")
_OF_HOST = "DefaultCPUAllocator"
_SMALLER = "use a smaller train.micro_batch_size, engine.recompute_modules=auto, or shard over more ranks"
_UNITS = "bKMGT"


def run_as_rank(work: Callable[[], int]) -> int:
    """Runs `work` as the rank given by the environment (RANK, LOCAL_RANK), and returns the exit code.

    The first rank of the host that fails prints its error: an MMError as its message, an exception from a
    plugin's code as its message and line, any other exception as a traceback and a message. A rank that fails
    only because another one failed prints nothing. Once a rank of the host has failed or vanished, the others
    end within `GRACE` seconds, even if they wait in a collective. MM_DEBUG=1 prints every traceback.
    """
    folder = LaunchFolder.current()
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    with suppress(OSError):  # prints stacks at a crash in native code; a closed stderr has no descriptor
        faulthandler.enable()
    folder.enter(local_rank)
    if folder.path is not None:
        threading.Thread(target=_watch, args=(folder,), name="mm_core rank watch", daemon=True).start()
    try:
        code = _outcome(work, folder)
    finally:
        folder.depart(local_rank)
    return code


def _outcome(work: Callable[[], int], folder: LaunchFolder) -> int:
    try:
        code = work()
    except SystemExit as stop:
        if isinstance(stop.code, str) and folder.mark(FAILED):
            sys.stderr.write(f"{stop.code}\n")
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        return _report(error, folder)
    if code == STOPPED and folder.launched:
        # torch's agent treats any code except 0 as a failure and ends the other ranks.
        folder.mark(STOPPED_EARLY)
        return 0
    if code not in (0, STOPPED):
        folder.mark(ENDED)
    return code


def _report(error: BaseException, folder: LaunchFolder) -> int:
    """Prints the error, if this rank is the one that should, and returns the rank's exit code."""
    debug = os.environ.get("MM_DEBUG", "0") not in ("", "0")
    if debug:
        traceback.print_exception(error)
    lost = lost_peer(error)
    if isinstance(error, PeerError) or lost is not None:
        # The rank that caused it may be about to print; torch's agent ends all ranks when this one exits.
        if folder.wait_for(FAILED, GRACE):
            return 1
        if folder.launched or isinstance(error, PeerError):
            folder.mark(LOST, lost.render() if lost is not None else str(error))
            return 1
    code = PASSING if lost is not None or passing(error) else 1
    if not folder.mark(FAILED, _failure(code, error)):
        return code
    shown = lost or (error if isinstance(error, MMError) else out_of_memory(error))
    shown = shown or outer_fault(error, author_line(error)) or author_error(error, latest_log())
    if shown is None:
        if not debug:
            traceback.print_exception(error)
        shown = MMError(
            f"{type(error).__name__}: {_first_line(error)}",
            hint="this is a bug in code, not an error in your input: the traceback above shows where",
        )
    _write(shown)
    return code


def passing(error: BaseException) -> bool:
    """Whether another try can succeed after an error: of a device, of communication, or of a process that was
    killed. Not after one of the config, the data or code, which would occur again."""
    if isinstance(error, MMError):
        return error.passing
    names = {kind.__name__ for kind in type(error).__mro__}
    if _OF_CODE.search(str(error)) or "RuntimeError" not in names:
        return False
    ours = any(name.startswith(("Dist", "AcceleratorError")) for name in names)
    return ours or bool(_OF_DEVICE.search(str(error)))


def _failure(code: int, error: BaseException) -> str:
    """The text of the mark FAILED: the exit code, and what is wrong in one line."""
    what = f"{type(error).__name__}: {_first_line(error)}"
    if isinstance(error, MMError):
        what = error.render().splitlines()[0]
    return f"{code} rank {os.environ.get('RANK', '0')}: {what}"


def print_error(fault: MMError) -> None:
    """Prints an error found by a thread of this rank, if no other rank of the host has printed one."""
    if LaunchFolder.current().mark(FAILED, _failure(PASSING if fault.passing else 1, fault)):
        _write(fault)


def mark_reported() -> None:
    """Records that this rank has already reported its failure, so that nothing prints it again."""
    LaunchFolder.current().mark(FAILED)


def _write(fault: MMError) -> None:
    log = latest_log() if _self() else None  # of several ranks only one prints; the logs contain the rest
    where = f"  log: {log}\n" if log is not None else ""
    text = fault.render()
    sys.stderr.write(f"mm: error: {'' if _OF_RANK.match(text) else _self()}{text}\n{where}")
    sys.stderr.flush()


def _self() -> str:
    return f"rank {os.environ['RANK']}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no details").splitlines()[0]


def lost_peer(error: BaseException) -> MMError | None:
    """The message for an exception caused by the loss of another rank; None for any other exception."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and _LOST.search(str(cause)):
            return MMError(
                f"lost the connection to another rank ({_first_line(cause)})",
                hint="that rank or its host failed: check the output on the other hosts",
            )
        cause = cause.__cause__
    return None


def out_of_memory(error: BaseException) -> MMError | None:
    """The message for a rank that ran out of memory, on the device or the host; None for other exceptions."""
    named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    if not named and not (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
        return None
    if (too_large := _too_large(error)) is not None:
        return too_large
    # A training run notes on its error which setting to try next.
    hint = next(iter(getattr(error, "__notes__", ())), _SMALLER)
    return MMError(f"out of memory: {_first_line(error)}", hint=hint)


def _too_large(error: BaseException) -> MMError | None:
    """The message for a single allocation larger than the total memory; None for any other exception."""
    found = _REQUEST.search(str(error))
    if found is None:
        return None
    asked = float(found[1]) * 1024 ** _UNITS.index(found[2][0])
    total = _CAPACITY.search(str(error))  # of an accelerator; the host's is not in the message
    if total is not None:
        size, unit = total[1] or total[3], total[2] or total[4]
        there = float(size) * 1024 ** _UNITS.index(unit[0])
    elif _OF_HOST not in str(error):
        return None
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if asked <= there:
        return None
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename]
    place = f", in {own[-1].name} ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return MMError(
        f"out of memory: one tensor needs {asked / 2**30:,.1f} GiB{place}, but the total memory is"
        f" {there / 2**30:,.1f} GiB",
        hint="check that code for unintended broadcasting (a [B] where a [B, 1, 1, 1, 1] is needed), or"
        " reduce sizes in the config, such as train.micro_batch_size",
    )


def _watch(folder: LaunchFolder) -> None:
    """Ends this process soon after another rank has failed, and requests a stop when its launcher is gone.

    Runs in a thread, because a main thread that waits in a collective runs no Python signal handler.
    """
    watched = folder.has_parent or "TORCHELASTIC_RUN_ID" in os.environ
    parent, failed_at = os.getppid(), None
    while True:
        time.sleep(0.5)
        if watched and (os.getppid() != parent or (folder.has_parent and not folder.launched)):
            watched = False
            REASONS[signal.SIGTERM] = "the loss of its launcher"
            os.kill(os.getpid(), signal.SIGTERM)  # saves, and ends
        if not folder.failing():
            failed_at = None
        elif failed_at is None:
            failed_at = time.monotonic()
        elif time.monotonic() - failed_at > GRACE:
            end_workers()
            show_cursor()  # the main thread, which waits in native code, may show a progress bar
            os._exit(1)


def leave(code: int) -> NoReturn:
    """Ends a rank's process without C++ destructors, which sometimes abort after collective saves."""
    end_workers(orderly=True)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
