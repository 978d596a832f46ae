"""The end of a rank: its error is said once over all ranks of the host, and it leaves cleanly."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mm_core.errors import MMError, PeerError

LAUNCH_DIR = "MM_LAUNCH_DIR"
"""Variable that names the private folder in which the ranks of one launch meet."""


def launch_dir() -> Path:
    """The folder of this launch: mm-train's own or, under torchrun, one named after its agent."""
    if own := os.environ.get(LAUNCH_DIR):
        return Path(own)
    read = os.environ.get
    parts = (os.getuid(), os.getppid(), read("MASTER_PORT", "0"), read("TORCHELASTIC_RESTART_COUNT", "0"))
    folder = Path(tempfile.gettempdir()) / "-".join(["mm_core", *map(str, parts)])
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def claim(since: float) -> bool:
    """Whether this rank is the first to fail, and so the one to speak. `since`: this rank's start;
    a claim from before it belongs to a launch that is over."""
    path = launch_dir() / "failed"
    for _ in range(2):
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return True
        except FileExistsError:
            try:
                stale = path.stat().st_mtime < since - 600
            except FileNotFoundError:
                continue
            if not stale:
                return False
            path.unlink(missing_ok=True)
        except OSError:
            return True  # better said twice than never
    return False


def run_as_rank(work: Callable[[], int]) -> int:
    """Runs `work` as one rank of several and returns the exit code. Errors are printed by the first
    rank that fails: an MMError as its sentence, anything else as a traceback and a sentence."""
    started = time.time()
    debug = os.environ.get("MM_DEBUG", "0") not in ("", "0")
    rank = os.environ.get("RANK", "0")
    prefix = f"mm: error: rank {rank}: " if os.environ.get("WORLD_SIZE", "1") != "1" else "mm: error: "
    (launch_dir() / f"rank_{os.environ.get('LOCAL_RANK', rank)}.pid").write_text(str(os.getpid()))
    try:
        return work()
    except PeerError:
        return 1
    except MMError as error:
        if debug:
            traceback.print_exc()
        if claim(started):
            sys.stderr.write(f"{prefix}{error.render()}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # A collective that breaks off because another rank has failed is that rank's story.
        if claim(started) or debug:
            traceback.print_exc()
            sys.stderr.write(f"{prefix}{type(error).__name__}: this is a fault in code, not in your input\n")
        return 1


def leave(code: int) -> None:
    """Ends a rank's process without C++ destructors, which abort now and then after collective saves."""
    for child in multiprocessing.active_children():
        child.kill()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
