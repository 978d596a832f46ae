"""The store through which launchers meet: calls that are not held up by a server that does not respond."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

ANSWER = 30.0
"""Seconds that the store may take; torch's own limit does not hold for a server whose process is stopped."""


class Answers:
    """Calls of a store, in a thread: a call that gets no answer must not hold up this process."""

    def __init__(self) -> None:
        self._late: Future[Any] | None = None
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._work, name="mm_core store", daemon=True).start()

    @property
    def stuck(self) -> bool:
        """Whether a call still waits for its answer, behind which others would wait as well."""
        return self._late is not None and not self._late.done()

    def _work(self) -> None:
        while True:
            call, answer = self._calls.get()
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

    def of(self, call: Callable[[], Any]) -> Any:
        """The answer of a call; RuntimeError if there is none in time."""
        if self.stuck:
            raise RuntimeError("the rendezvous host did not respond")
        answer: Future[Any] = Future()
        self._calls.put((call, answer))
        try:
            return answer.result(ANSWER)
        except TimeoutError:
            self._late = answer  # it may come yet: a link that is up again repeats what it has lost
            raise RuntimeError("the rendezvous host does not respond") from None


def open_store(host: str, port: int, serves: bool) -> Any:
    """Connects to the store, or serves it."""
    import torch.distributed

    stores: Any = torch.distributed
    limit = timedelta(seconds=10)
    return stores.TCPStore(
        host, port, is_master=serves, wait_for_workers=False, multi_tenant=True, timeout=limit
    )


def is_here(host: str) -> bool:
    """Whether a name or address is one of this host: it can be bound."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as own:
                own.bind(address)
                return True
    return False
