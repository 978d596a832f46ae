"""Where the launchers of several hosts meet: who takes part in an attempt, how each ended, what all do next.

A store on the rendezvous host outlives the attempts. Nobody leads: each launcher reads the same entries, and
of several proposals the first counts.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from mm_core.errors import MMError, plural
from mm_core.runtime.launch.restarts import Decision, End

PATIENCE = 900.0
"""Seconds that a launcher waits for hosts, or for the rendezvous host to come back."""

LAST_CALL = 30.0
"""Seconds that enough hosts wait for more, with `--nnodes MIN:MAX`."""

SILENT = 10.0
"""Seconds without a sign of life after which a launcher counts as gone."""

SETTLING = 90.0
"""Seconds that launchers wait until the ranks of the others have ended."""

_CALL = timedelta(seconds=10)


@dataclass(frozen=True)
class Nodes:
    """How many ranks and hosts a launch has, and where the hosts connect to each other (the rendezvous).

    Attributes:
        nproc: ranks on this host.
        least: the smallest number of hosts.
        most: the largest number of hosts.
        endpoint: HOST:PORT of the rendezvous; None for one host.
        run_id: the rendezvous id, the same on every host.
        hosts_meeting: whether the rendezvous runs on this host; None: torch compares names and addresses.
    """

    nproc: int
    least: int = 1
    most: int = 1
    endpoint: str | None = None
    run_id: str | None = None
    hosts_meeting: bool | None = None


class Asked(Exception):
    """A signal has asked this launcher to stop while it waited."""


class Meeting:
    """The hosts of a run, as one launcher sees them.

    Args:
        nodes: how many hosts, and where they meet.
        facts: versions and config, which must be the same on all hosts.
        asked: whether a signal has asked this launcher to stop.
    """

    def __init__(self, nodes: Nodes, facts: Mapping[str, str], asked: Callable[[], bool]) -> None:
        self._nodes, self._asked = nodes, asked
        self._me = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "facts": dict(facts)}
        self._store: Any = None
        self._attempt = self._index = 0
        self._roster: list[int] = []
        self._entries: dict[int, Any] = {}  # launcher -> what it has written about itself
        self._seen: dict[int, tuple[int, float]] = {}  # launcher -> its last beat, and when it was new
        self.serves = False
        """Whether the store is in this process."""
        self.hosts: list[str] = []
        """The hosts of the attempt, in an order that all of them share."""
        self.decisions: list[Decision] = []
        """What followed the earlier attempts of this store."""
        self.waits_for = ""
        """What this launcher waits for; empty while it does not wait."""

    def join(self) -> Nodes | Decision:
        """Waits until the next attempt has its hosts; returns the launch of that attempt, or how the run has
        ended without this host.

        Raises:
            Asked: a signal ended the wait.
            MMError: the hosts differ in a version or in the config.
            TimeoutError, RuntimeError: not enough hosts came, or the rendezvous host is not there.
        """
        end = time.monotonic() + PATIENCE
        while True:
            try:
                self._connect(end)
                joined = self._join(end)
                self.waits_for = ""
                return joined
            except RuntimeError:  # the rendezvous host is gone
                self._store = None
                if time.monotonic() > end:
                    raise

    def _connect(self, end: float) -> None:
        import torch.distributed

        stores: Any = torch.distributed
        endpoint = self._nodes.endpoint or "localhost:0"
        host, _, port = endpoint.rpartition(":")
        here = _is_here(host) if self._nodes.hosts_meeting is None else self._nodes.hosts_meeting
        soon = time.monotonic() + 15  # its own port is free, or another launcher's store listens there
        while self._store is None:
            self.waits_for = f"the rendezvous host {endpoint}"
            for serves in (True, False) if here else (False,):
                try:
                    self._store = stores.TCPStore(
                        host.strip("[]"),
                        int(port),
                        is_master=serves,
                        wait_for_workers=False,
                        multi_tenant=True,
                        timeout=_CALL,
                    )
                except (RuntimeError, ValueError, TimeoutError) as error:
                    if not serves and time.monotonic() > (soon if here else end):
                        raise TimeoutError(f"{endpoint}: {error}") from error
                else:
                    self.serves, self._attempt, self.decisions = serves, 0, []
                    break
            self._pause()

    def _join(self, end: float) -> Nodes | Decision:
        while (decision := self._read("decision")) is not None:
            decision.pop("by")
            self.decisions.append(Decision(**decision))
            if not self.decisions[-1].again:
                self._call("add", "seen", 1)
                return self.decisions[-1]
            self._attempt += 1
        self._index = self._call("add", "joined", 1) - 1
        self._seen, self._entries = {}, {}
        self._call("set", f"host/{self._index}", json.dumps(self._me))
        roster = self._gather(end)
        if self._index not in roster:
            self.waits_for = "the next restart of the run, which is under way without this host"
            while self._read("decision") is None:
                self._beat()
                self._pause()
            return self._join(end=time.monotonic() + PATIENCE)
        known = [self._entry(index) for index in roster]
        names = [each["host"] for each in known]
        self.hosts = [name if names.count(name) == 1 else f"{name} ({n})" for n, name in enumerate(names)]
        self._roster = roster
        fault = _difference({name: each["facts"] for name, each in zip(self.hosts, known, strict=True)})
        if fault is not None:
            self._leave()
            raise fault
        return replace(
            self._nodes,
            least=len(roster),
            most=len(roster),
            run_id=f"{self._nodes.run_id or 'mm_core'}-{known[0]['id']}-{self._attempt}",
            hosts_meeting=self.serves,
        )

    def _gather(self, end: float) -> list[int]:
        """The launchers of the attempt, by the order in which they joined."""
        before, count, grew = set(self.hosts), 0, time.monotonic()
        while (roster := self._read("roster")) is None:
            self._beat()
            joined = self._call("add", "joined", 0)
            here = [index for index in range(joined) if self._entry(index) and self._alive(index)]
            if len(here) > count:
                grew = time.monotonic()
            count = len(here)
            enough = count >= self._nodes.least and time.monotonic() - grew > LAST_CALL
            if count >= self._nodes.most or enough:
                self._call("compare_set", "roster", "", json.dumps(here[: self._nodes.most]))
                continue
            names = {self._entry(index)["host"] for index in here}
            missing = sorted(before - names)
            lacking = self._nodes.least - count
            more = plural(lacking, "more host") if lacking > 0 else "more hosts"
            self.waits_for = (
                f"{', '.join(missing) or more} at {self._nodes.endpoint}; here: {', '.join(sorted(names))}"
            )
            if time.monotonic() > end:
                raise TimeoutError(f"after {PATIENCE / 60:.0f} minutes it still waits for {self.waits_for}")
            self._pause()
        return list(roster)

    @contextmanager
    def watching(self, failed: Callable[[str], object]) -> Iterator[None]:
        """While ranks run: shows the others that this launcher is there, and passes on another's error.

        Args:
            failed: called with the error once another host's ranks have failed.
        """
        over = threading.Event()

        def watch() -> None:
            passed_on = False
            while not over.wait(1.0):
                with suppress(RuntimeError):  # the rendezvous host is gone: seen when the ranks have ended
                    self._beat()
                    if passed_on or self._call("add", "ends", 0) == 0:
                        continue
                    for name, end in self._ends().items():
                        if end is not None and end.failed and not passed_on:
                            passed_on = True
                            failed(f"host {name} failed: {end.what}")

        thread = threading.Thread(target=watch, name="mm_core meeting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def settle(
        self, end: End, decide: Callable[[Mapping[str, End | None]], Decision]
    ) -> tuple[Decision, bool]:
        """What all hosts do next, and whether this one has decided it.

        Args:
            end: how the ranks of this host ended.
            decide: the decision, from how the ranks of each host ended; None for a host that is gone.

        Raises:
            RuntimeError: the rendezvous host is gone.
        """
        order = self._call("add", "ends", 1)
        self._call("set", f"end/{self._index}", json.dumps(asdict(replace(end, order=order))))
        until = time.monotonic() + SETTLING
        while time.monotonic() < until:
            self._beat()
            ends = self._ends()
            open_ends = [
                index for index, each in zip(self._roster, ends.values(), strict=True) if each is None
            ]
            if not any(map(self._alive, open_ends)) or self._read("decision") is not None:
                break
            time.sleep(self._rest)
        if (found := self._read("decision")) is None:
            proposal = json.dumps(asdict(decide(self._ends())) | {"by": self._me["id"]})
            found = json.loads(self._call("compare_set", "decision", "", proposal))
        decided = found.pop("by") == self._me["id"]
        decision = Decision(**found)
        if not decision.again:
            self._leave()
        return decision, decided

    def _leave(self) -> None:
        """Notes that this launcher has read the outcome; keeps the store until the others have."""
        self._call("add", "seen", 1)
        until = time.monotonic() + SILENT
        others = [index for index in range(self._call("add", "joined", 0)) if index != self._index]
        while self.serves and time.monotonic() < until:
            if self._call("add", "seen", 0) > sum(map(self._alive, others)):
                break
            time.sleep(0.1)

    # -- the store -----------------------------------------------------------------------------

    def _call(self, name: str, key: str, *values: Any) -> Any:
        run = self._nodes.run_id or "mm_core"
        return getattr(self._store, name)(f"mm_core/{run}/{self._attempt}/{key}", *values)

    def _read(self, key: str) -> Any:
        run = self._nodes.run_id or "mm_core"
        if not self._store.check([f"mm_core/{run}/{self._attempt}/{key}"]):
            return None
        return json.loads(self._call("get", key))

    def _entry(self, index: int) -> Any:
        if index not in self._entries and (found := self._read(f"host/{index}")) is not None:
            self._entries[index] = found
        return self._entries.get(index)

    def _ends(self) -> dict[str, End | None]:
        found = {}
        for name, index in zip(self.hosts, self._roster, strict=True):
            end = self._read(f"end/{index}")
            found[name] = None if end is None else End(**end)
        return found

    def _beat(self) -> None:
        self._call("add", f"beat/{self._index}", 1)

    def _alive(self, index: int) -> bool:
        count, now = self._call("add", f"beat/{index}", 0), time.monotonic()
        if self._seen.get(index, (None, 0))[0] != count:
            self._seen[index] = (count, now)
        return now - self._seen[index][1] < SILENT

    @property
    def _rest(self) -> float:
        """Seconds between two looks: of 64 launchers, each looks at 64 entries."""
        return 0.2 + 0.02 * max(self._nodes.most, len(self._roster))

    def _pause(self) -> None:
        time.sleep(self._rest)
        if self._asked():
            raise Asked


def _is_here(host: str) -> bool:
    """Whether a name or address is one of this host: it can be bound."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as own:
                own.bind(address)
                return True
    return False


def _difference(facts: Mapping[str, Mapping[str, str]]) -> MMError | None:
    """The error for a host that has another version, or another config, than the first one."""
    (first, expected), *others = facts.items()
    for name, found in others:
        for key in sorted(expected.keys() | found.keys()):
            ours, theirs = expected.get(key, "absent"), found.get(key, "absent")
            if ours != theirs:
                return MMError(
                    f"the hosts differ: {key} is {ours} on {first}, and {theirs} on {name}",
                    where="rendezvous",
                    hint="all hosts need the same versions, config and overrides",
                )
    return None
