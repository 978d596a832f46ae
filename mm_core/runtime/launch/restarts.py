"""What follows when the ranks of a run have ended: a restart, or the end of the run, on every host."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mm_core.errors import plural
from mm_core.files import open_append, read_rows
from mm_core.runtime.launch.signals import PASSING, STOPPED

RESTARTS = "restarts.jsonl"
"""The file of a run's folder with a line for each restart."""

RESTART = "MM_RESTART"
"""Environment variable with the number of the restart that started a rank."""

LONGEST_WAIT = 30.0
"""Seconds to wait before a restart, at most: the wait doubles while attempts end within `SHORT`."""

SHORT = 600.0
"""Seconds within which an attempt counts as short."""

IN_VAIN = 2
"""Failures in a row without a new checkpoint after which a run ends."""


@dataclass(frozen=True)
class End:
    """How the ranks of a host ended.

    Attributes:
        code: exit code of the launch, as `launch` returns it.
        what: the error in one line; empty without one.
        own: whether the error occurred on this host. A rank that lost the connection to another one has none.
        asked: whether a signal or a user asked this host to stop.
        order: which of the hosts' ends this is, from 1.
    """

    code: int
    what: str = ""
    own: bool = True
    asked: bool = False
    order: int = 0

    @property
    def passing(self) -> bool:
        """Whether another try can succeed: a signal has ended a rank, or a device or connection failed."""
        return self.code == PASSING or (self.code > 128 and self.code != 130)

    @property
    def failed(self) -> bool:
        """Whether the ranks ended by an error."""
        return self.code not in (0, STOPPED)


@dataclass(frozen=True)
class Decision:
    """What follows an attempt. It holds what the next one needs to know of all before it.

    Attributes:
        again: whether the ranks start again.
        code: exit code of the run, if they do not.
        what: the error that ended the attempt, with its host.
        why: why there is no restart after a failure; empty otherwise.
        number: restarts so far, with this one.
        first: step of the newest checkpoint before the first attempt; None without one.
        step: that of the newest one now.
        in_vain: failures in a row without a new checkpoint.
        short: failures in a row of attempts that were short.
        seconds: how long to wait before the restart.
    """

    again: bool
    code: int = 0
    what: str = ""
    why: str = ""
    number: int = 0
    first: int | None = None
    step: int | None = None
    in_vain: int = 0
    short: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Tries:
    """How often a run may start again, and what a restart needs to know of it.

    Attributes:
        most: restarts at most.
        folder: the run's folder; None where nothing restarts.
        newest: the step of the newest complete checkpoint; None without one.
        facts: versions, config and options, which must be the same on all hosts.
        again: command line of a rank after a restart, from whether the run has saved since its first start;
            None: the same.
    """

    most: int = 0
    folder: Path | None = None
    newest: Callable[[], int | None] = field(default=lambda: None)
    facts: Mapping[str, str] = field(default_factory=dict)
    again: Callable[[bool], Sequence[str]] | None = None


def decide(
    ends: Mapping[str, End | None], before: Decision, newest: int | None, lasted: float, most: int
) -> Decision:
    """What follows an attempt. All hosts use the decision that the first of them has made.

    Args:
        ends: host -> how its ranks ended; None for a host that has not responded.
        before: the decision after the attempt before; for the first attempt one with the steps alone.
        newest: step of the newest checkpoint now.
        lasted: seconds of the attempt.
        most: restarts at most.
    """
    known = {host: end for host, end in ends.items() if end is not None}
    failed = {host: end for host, end in known.items() if end.failed}
    # Ranks wait for each other before they end well: where one has, the run is complete.
    done = any(end.code == 0 for end in known.values())
    if done:
        failed = {host: end for host, end in failed.items() if not end.passing}
    if not failed and (done or len(known) == len(ends)):
        return replace(before, again=False, code=0 if done else STOPPED, step=newest)
    first = min(((not end.own, end.order, host) for host, end in failed.items()), default=None)
    if first is not None and (not first[0] or len(known) == len(ends)):
        host, end = first[2], failed[first[2]]
    else:
        host = next(each for each in ends if each not in known)
        end = End(PASSING, "the host or its launcher was lost")
    what = f"{host}: {end.what}" if len(ends) > 1 else end.what
    in_vain = before.in_vain + 1 if newest == before.step else 0
    short = before.short + 1 if lasted < SHORT else 0
    why = ""
    if any(each.asked for each in known.values()):
        why = "it was asked to stop"
    elif not end.passing:
        why = "another try would fail as well"
    elif before.number >= most:
        why = f"{plural(most, 'restart')} of --max-restarts {'is' if most == 1 else 'are'} used up"
    elif in_vain >= IN_VAIN:
        why = f"{plural(in_vain, 'failure')} in a row without a new checkpoint"
    seconds = min(2.0 ** max(short - 1, 0), LONGEST_WAIT)
    number = before.number + (not why)
    return Decision(not why, end.code, what, why, number, before.first, newest, in_vain, short, seconds)


def record(folder: Path | None, decision: Decision, hosts: Sequence[str], lasted: float) -> None:
    """Appends a restart to the run's `restarts.jsonl`, after an attempt of `lasted` seconds.

    Hosts that cannot reach each other decide apart: what one of them has recorded counts for all.
    """
    if folder is None:
        return
    for last in restarts_of(folder)[-1:]:
        if last["restart"] == decision.number and time.time() - last["time"] < lasted:
            return
    row = {"restart": decision.number, "time": time.time(), "hosts": list(hosts), **asdict(decision)}
    folder.mkdir(parents=True, exist_ok=True)
    with open_append(folder / RESTARTS) as file:
        file.write((json.dumps(row) + "\n").encode())


def restarted(folder: Path) -> str | None:
    """The restart that started this rank, in one line; None if it was not restarted."""
    number = os.environ.get(RESTART)
    if number is None:
        return None
    rows = restarts_of(folder)
    return f"restart {number}" + (f": {rows[-1]['what']}" if rows else "")


def restarts_of(folder: Path) -> list[dict[str, Any]]:
    """The restarts of a run, oldest first, as the lines of its `restarts.jsonl`; [] without one."""
    return read_rows(folder / RESTARTS)
