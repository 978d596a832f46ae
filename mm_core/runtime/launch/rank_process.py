"""The end of a rank: its error is said once over all ranks of the host, and it leaves cleanly."""

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

from mm_core.errors import MMError, PeerError
from mm_core.runtime.launch.launch_folder import ENDED, FAILED, LOST, STOPPED_EARLY, LaunchFolder
from mm_core.runtime.launch.rank_logs import latest_log
from mm_core.runtime.launch.signals import STOPPED, show_cursor
from mm_core.runtime.leftovers import end_workers

GRACE = 5.0
"""Seconds that a rank goes on after another one on its host has failed or vanished."""

_LOST = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection refused|Socket closed|[Tt]imed out waiting"
    r"|communicator was aborted|remote process exited|wait timeout after|recvValue failed|sendBytes failed"
    r"|Failed to recv"
)
_NO_MEMORY = re.compile(r"can't allocate memory|out of memory|Cannot allocate memory", re.IGNORECASE)

_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)")
_CAPACITY = re.compile(r"total capacity of ([\d.]+) ([KMGT]iB)|; ([\d.]+) ([KMGT]iB) total capacity")
_OF_HOST = "DefaultCPUAllocator"
_UNITS = "bKMGT"


def run_as_rank(work: Callable[[], int]) -> int:
    """Runs `work` as the rank that the environment names, and returns the exit code.

    What goes wrong is printed by the first rank of the host that fails: an MMError as its sentence,
    anything else as a traceback and a sentence. A rank that fails only because another one did is
    silent. Once a rank of the host has failed or vanished, the others end within `GRACE` seconds, in
    whatever collective they wait. MM_DEBUG=1 prints every traceback.
    """
    folder = LaunchFolder.current()
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    with suppress(OSError):  # a crash in native code then shows where; a closed stderr has no descriptor
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
        _tell(error, folder)
        return 1
    if code == STOPPED and folder.launched:
        # torch's agent takes any code but 0 for a failure and ends the other ranks.
        folder.mark(STOPPED_EARLY)
        return 0
    if code not in (0, STOPPED):
        folder.mark(ENDED)
    return code


def _tell(error: BaseException, folder: LaunchFolder) -> None:
    """Prints the error, if this rank is the one to do so."""
    debug = os.environ.get("MM_DEBUG", "0") not in ("", "0")
    if debug:
        traceback.print_exception(error)
    lost = lost_peer(error)
    if isinstance(error, PeerError) or lost is not None:
        # The rank to blame may be about to speak; torch's agent ends everybody when this one has left.
        if folder.wait_for(FAILED, GRACE):
            return
        if folder.launched or isinstance(error, PeerError):
            folder.mark(LOST, lost.render() if lost is not None else str(error))
            return
    if not folder.mark(FAILED):
        return
    said = lost or (error if isinstance(error, MMError) else out_of_memory(error))
    if said is None:
        if not debug:
            traceback.print_exception(error)
        said = MMError(
            f"{type(error).__name__}: {_first_line(error)}",
            hint="a fault in code, not in your input: the traceback above says where",
        )
    _write(said)


def say(fault: MMError) -> None:
    """Prints an error that a thread has found, if no other rank of the host has spoken."""
    if LaunchFolder.current().mark(FAILED):
        _write(fault)


def has_told() -> None:
    """Notes that this rank has said what its exit code stands for: nobody says it once more."""
    LaunchFolder.current().mark(FAILED)


def _write(fault: MMError) -> None:
    log = latest_log() if _self() else None  # of several ranks, only one is heard: the log has the rest
    where = f"  log: {log}\n" if log is not None else ""
    sys.stderr.write(f"mm: error: {_self()}{fault.render()}\n{where}")
    sys.stderr.flush()


def _self() -> str:
    return f"rank {os.environ['RANK']}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no further account").splitlines()[0]


def lost_peer(error: BaseException) -> MMError | None:
    """The sentence for an error that only says that another rank is gone; None for any other error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and _LOST.search(str(cause)):
            return MMError(
                f"lost the connection to another rank ({_first_line(cause)})",
                hint="that rank, or its host, failed: look at the output of the other hosts",
            )
        cause = cause.__cause__
    return None


def out_of_memory(error: BaseException) -> MMError | None:
    """The sentence for memory that ran out, on the device or the host; None for any other error."""
    named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    if not named and not (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
        return None
    if (told := _too_large(error)) is not None:
        return told
    return MMError(
        f"out of memory: {_first_line(error)}",
        hint="a smaller train.micro_batch_size, engine.recompute_modules=auto, or more ranks to shard over",
    )


def _too_large(error: BaseException) -> MMError | None:
    """The sentence for a single request that is larger than all the memory there is; None for any other."""
    found = _REQUEST.search(str(error))
    if found is None:
        return None
    asked = float(found[1]) * 1024 ** _UNITS.index(found[2][0])
    whole = _CAPACITY.search(str(error))  # of an accelerator; the host's is not in the message
    if whole is not None:
        size, unit = whole[1] or whole[3], whole[2] or whole[4]
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
        f"out of memory: one tensor of {asked / 2**30:,.1f} GiB was asked for{place}, and there are"
        f" {there / 2**30:,.1f} GiB in all",
        hint="look there for shapes that are broadcast against each other (a [B] where a [B, 1, 1, 1, 1] is"
        " needed), or for a size in the config that is too large, train.micro_batch_size among them",
    )


def _watch(folder: LaunchFolder) -> None:
    """Ends this process soon after another rank has failed, and asks it to stop when its launcher is gone.

    A thread, because a main thread that waits in a collective runs no Python signal handler.
    """
    watched = folder.has_parent or "TORCHELASTIC_RUN_ID" in os.environ
    parent, failed_at = os.getppid(), None
    while True:
        time.sleep(0.5)
        if watched and (os.getppid() != parent or (folder.has_parent and not folder.launched)):
            watched = False
            os.kill(os.getpid(), signal.SIGTERM)  # saves, and ends
        if not folder.failing():
            failed_at = None
        elif failed_at is None:
            failed_at = time.monotonic()
        elif time.monotonic() - failed_at > GRACE:
            end_workers()
            show_cursor()  # the main thread, which waits in native code, may have a bar open
            os._exit(1)


def leave(code: int) -> NoReturn:
    """Ends a rank's process without C++ destructors, which abort now and then after collective saves."""
    end_workers(orderly=True)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
