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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from mm_core.errors import MMError, plural
from mm_core.runtime.launch.restarts import Decision, End
from mm_core.runtime.launch.store import ANSWER, Answers, is_here, open_store

PATIENCE = 900.0
"""Seconds that a launcher waits for hosts, or for the rendezvous host to come back."""

LAST_CALL = 30.0
"""Seconds that enough hosts wait for more, with `--nnodes MIN:MAX`."""

SILENT = 10.0
"""Seconds without a sign of life after which a launcher counts as gone."""

SETTLING = 90.0
"""Seconds that launchers wait until the ranks of the others have ended."""

LOOK = 10
"""Seconds between two looks for launchers that are silent while ranks run."""

UNSEEN = 120.0
"""Seconds without a sign of life from a launcher after which the ranks of the others are ended. It is longer
than `SILENT`, since a launcher that was killed leaves ranks that save."""


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
        self._facts = dict(facts)
        self._me: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "facts": self._facts,
        }
        self._run = nodes.run_id or "mm_core"
        self._store: Any = None
        self._answers = Answers()
        self._attempt = self._index = 0
        self._roster: list[int] = []
        self._entries: dict[int, Any] = {}  # launcher -> what it has written about itself
        self._seen: dict[int, tuple[int, float, bool]] = {}  # launcher -> last beat, its time, if it changed
        self.serves = False
        """Whether the store is in this process."""
        self.hosts: list[str] = []
        """The hosts of the attempt, in an order that all of them share."""
        self.last: Decision
        """What followed the last attempt, as those hosts know it that have been there the longest."""
        self.waits_for = ""
        """What this launcher waits for; empty while it does not wait."""

    def join(self, last: Decision) -> Nodes | Decision:
        """Waits until the next attempt has its hosts; returns the launch of that attempt, or how the run has
        ended without this host.

        Args:
            last: what followed the last attempt of this launcher.

        Raises:
            Asked: a signal ended the wait.
            MMError: the hosts differ in a version or in the config.
            TimeoutError, RuntimeError: not enough hosts came, or the rendezvous host is not there.
        """
        self.last, end = last, time.monotonic() + PATIENCE
        while True:
            try:
                self._connect(end)
                joined = self._join()
                self.waits_for = ""
                return joined
            except RuntimeError:  # the rendezvous host is gone
                if self._store is not None:
                    end = time.monotonic() + PATIENCE
                self._store = None
                if time.monotonic() > end:
                    raise
            except (Asked, MMError, TimeoutError):
                with suppress(RuntimeError):
                    self._call("set", f"gone/{self._index}", "1")
                raise

    def _connect(self, end: float) -> None:
        endpoint = self._nodes.endpoint or "localhost:0"
        host, _, port = endpoint.rpartition(":")
        here = is_here(host) if self._nodes.hosts_meeting is None else self._nodes.hosts_meeting
        soon = time.monotonic() + 15  # its own port is free, or another launcher's store listens there
        while self._store is None:
            self.waits_for = f"the rendezvous host {endpoint}"
            for serves in (True, False) if here else (False,):
                try:
                    self._answers = Answers() if self._answers.stuck else self._answers
                    self._store = self._answers.of(partial(open_store, host.strip("[]"), int(port), serves))
                except (RuntimeError, ValueError, TimeoutError) as error:
                    if not serves and time.monotonic() > (soon if here else end):
                        raise TimeoutError(f"{endpoint}: {error}") from error
                else:
                    self.serves, self._attempt = serves, 0
                    break
            self._pause()
        owner = self._answers.of(partial(self._store.compare_set, "mm_core/run", "", self._run)).decode()
        if owner != self._run:
            hint = "choose another port for --rdzv-endpoint"
            raise MMError(f"another run ({owner}) meets there", where=endpoint, hint=hint)

    def _join(self) -> Nodes | Decision:
        while (decision := self._read("decision")) is not None:
            decision.pop("by")
            self.last = Decision(**decision)
            if not self.last.again:
                self._call("add", "seen", 1)
                return self.last
            self._attempt += 1
        self._index = self._call("add", "joined", 1) - 1
        self._seen, self._entries = {}, {}
        mine = self._me | {"last": asdict(self.last), "serves": self.serves}
        self._call("set", f"host/{self._index}", json.dumps(mine))
        roster = self._gather()
        first = self._entry(roster[0])
        if self._index not in roster:
            if fault := _difference({"the run's hosts": first["facts"], "this host": self._facts}):
                raise fault
            self.waits_for = "the next restart of the run, which is under way without this host"
            while self._read("decision") is None:
                self._beat()
                self._pause()
            return self._join()
        known = [self._entry(index) for index in roster]
        names = [each["host"] for each in known]
        self.hosts = [name if names.count(name) == 1 else f"{name} ({n})" for n, name in enumerate(names)]
        self._roster = roster
        fault = _difference({name: each["facts"] for name, each in zip(self.hosts, known, strict=True)})
        if fault is not None:
            self._leave()
            raise fault
        self.last = max((Decision(**each["last"]) for each in known), key=lambda each: each.number)
        return replace(
            self._nodes,
            least=len(roster),
            most=len(roster),
            run_id=f"{self._run}-{first['id']}-{self._attempt}",
            hosts_meeting=self.serves,
        )

    @property
    def records_alone(self) -> bool:
        """Whether this launcher is the one that records a restart after the rendezvous host is gone."""
        rest = [index for index in self._roster if not self._entry(index)["serves"]]
        return rest[:1] == [self._index]

    def _gather(self) -> list[int]:
        """The launchers of the attempt, by the order in which they joined."""
        before = Counter(name.partition(" (")[0] for name in self.hosts)
        count, grew = 0, time.monotonic()
        end = grew + PATIENCE
        while (roster := self._read("roster")) is None:
            self._beat()
            joined = self._call("add", "joined", 0)
            here = [index for index in range(joined) if self._here(index)]
            if len(here) > count:
                grew = time.monotonic()
            count = len(here)
            enough = count >= self._nodes.least and time.monotonic() - grew > LAST_CALL
            if count >= self._nodes.most or enough:
                self._call("compare_set", "roster", "", json.dumps(here[: self._nodes.most]))
                continue
            names = Counter(self._entry(index)["host"] for index in here)
            missing = sorted((before - names).elements())
            lacking = self._nodes.least - count
            more = plural(lacking, "more host") if lacking > 0 else "more hosts"
            there = ", ".join(sorted(names.elements()))
            self.waits_for = f"{', '.join(missing) or more} at {self._nodes.endpoint}; here: {there}"
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
            answered, looks = time.monotonic(), 0
            while not over.wait(1.0):
                looks += 1
                try:
                    self._beat()
                    if (error := self._error(of_silence=looks % LOOK == 0)) is not None:
                        failed(error)
                        return self._beating(over)
                    answered = time.monotonic()
                except RuntimeError:  # its ranks may be saving
                    if time.monotonic() - answered > UNSEEN:
                        failed(f"the rendezvous host {self._nodes.endpoint} does not respond")
                        return None
            return None

        thread = threading.Thread(target=watch, name="mm_core meeting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(ANSWER)

    def _error(self, of_silence: bool) -> str | None:
        """The error of another host of the attempt, or that it is silent; None without one."""
        if self._call("add", "ends", 0):
            for name, end in self._ends().items():
                if end is not None and end.failed:
                    return f"host {name} failed: {end.what}"
        for name, index in zip(self.hosts, self._roster, strict=True):
            if of_silence and index != self._index and not self._alive(index, UNSEEN):
                return f"host {name} has not responded for {UNSEEN:.0f} s"
        return None

    def _beating(self, over: threading.Event) -> None:
        while not over.wait(1.0):
            with suppress(RuntimeError):
                self._beat()

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
        if self._store is None:
            raise RuntimeError("there is no connection to the rendezvous host")
        call = getattr(self._store, name)
        return self._answers.of(partial(call, f"mm_core/{self._run}/{self._attempt}/{key}", *values))

    def _read(self, key: str) -> Any:
        if not self._check(key):
            return None
        return json.loads(self._call("get", key))

    def _check(self, key: str) -> bool:
        there = partial(self._store.check, [f"mm_core/{self._run}/{self._attempt}/{key}"])
        return bool(self._answers.of(there))

    def _here(self, index: int) -> bool:
        """Whether a launcher waits for the attempt to begin."""
        if self._entry(index) is None or not self._alive(index):
            return False
        return bool(self._seen[index][2]) and not self._check(f"gone/{index}")

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

    def _alive(self, index: int, within: float = SILENT) -> bool:
        count, now = self._call("add", f"beat/{index}", 0), time.monotonic()
        seen, when, changed = self._seen.get(index, (count, now, index == self._index))
        if seen != count:
            when, changed = now, True
        self._seen[index] = (count, when, changed)
        return bool(now - when < within)

    @property
    def _rest(self) -> float:
        """Seconds between two looks: of 64 launchers, each looks at 64 entries."""
        return 0.2 + 0.02 * max(self._nodes.most, len(self._roster))

    def _pause(self) -> None:
        time.sleep(self._rest)
        if self._asked():
            raise Asked


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
