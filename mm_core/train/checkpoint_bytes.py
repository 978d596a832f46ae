"""The bytes of a checkpoint's tensors: copied to host memory, written and summed, here or by a child."""

from __future__ import annotations

import io
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from mm_core.device import synchronize
from mm_core.errors import CheckpointError
from mm_core.parallel.shards import like, local
from mm_core.train.checkpoint_sample import Fingerprint

State = Mapping[str, Mapping[str, Any]]
"""{"model": {name: tensor}, "optimizer": {name: tensor}, ...}: plain tensors or DTensors."""

_CHUNK = 1 << 23
_SMALL = 1 << 16


@dataclass(frozen=True)
class WrittenFile:
    """A file of tensors: where each of them lies (offset, length in bytes), size and crc32 of the whole."""

    places: tuple[tuple[int, int], ...]
    size: int
    crc32: int


class HostCopies:
    """Copies of a state in host memory, whose buffers are used again by the next copy.

    Args:
        shared: lay the buffers in memory that a child process can see.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._lock = threading.Lock()  # buffers are reserved by another thread

    def reserve(self, state: State) -> None:
        """Makes the buffers and touches their pages, so that the first copy costs no more than the next.

        A copy may have been taken already: buffers that are there are left as they are. CheckpointError where
        the host has no memory for them.
        """
        with self._lock:
            for part, named in state.items():
                for name, tensor in named.items():
                    key = (part, name)
                    if key in self._buffers or type(share := local(tensor)) is not Tensor:
                        continue
                    try:
                        self._buffer(key, share).zero_()
                    except (RuntimeError, OSError, MemoryError) as fault:
                        raise CheckpointError(
                            f"the host has no memory for a copy of {part}.{name}: {fault}"[:500],
                            hint="checkpoint.async=false needs none; more ranks need less each",
                        ) from fault

    def take(self, state: State) -> dict[str, dict[str, Any]]:
        """The state as it is now: what changes later does not reach it. DTensors stay DTensors."""
        with self._lock:
            return self._take(state)

    def _take(self, state: State) -> dict[str, dict[str, Any]]:
        pairs: list[tuple[Tensor, Tensor]] = []
        copied: dict[str, dict[str, Any]] = {part: {} for part in state}
        for part, named in state.items():
            for name, tensor in named.items():
                source = local(tensor)
                if type(source) is not Tensor:  # a packed kind of tensor (8-bit moments): it copies itself
                    copied[part][name] = like(tensor, source.clone().cpu())
                    continue
                target = self._buffer((part, name), source)
                pairs.append((target, source))
                copied[part][name] = like(tensor, target)
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        synchronize()
        return copied

    def _buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        held = self._buffers.get(key)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            pinned = tensor.device.type != "cpu" and not self._shared
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[key] = held
            if self._shared:
                held.share_memory_()  # type: ignore[no-untyped-call]
        return held


def check_tensors(tensors: Mapping[str, Mapping[str, Any]]) -> None:
    """CheckpointError for state that is no tensor: such state belongs into the facts."""
    for part, named in tensors.items():
        for name, value in named.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{part}.{name} is a {type(value).__name__}",
                    accepted="tensors",
                    hint="put other state in facts",
                )


class _Summing(io.RawIOBase):
    """Writes to a file and sums what it is given, in another thread at the same time."""

    def __init__(self, file: Any, summer: ThreadPoolExecutor) -> None:
        self._file, self._summer = file, summer
        self.size = self.crc32 = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < _SMALL:  # torch.save writes some forty such pieces a tensor
            self._file.write(view)
            self.crc32 = zlib.crc32(view, self.crc32)
            self.size += len(view)
            return len(view)
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            summed = self._summer.submit(zlib.crc32, chunk, self.crc32)
            try:
                self._file.write(chunk)
            finally:
                self.crc32 = summed.result()  # the bytes are the caller's again after this
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def writable(self) -> bool:
        return True


def write_file(
    path: Path, tensors: Sequence[Tensor], expected: Sequence[Fingerprint | None] | None = None
) -> WrittenFile:
    """Writes tensors one after another, each as torch saves it, and waits until the disk has them.

    Raises:
        CheckpointError: a tensor has another fingerprint than that of `expected` in its place.
    """
    places = []
    checkpoint = path.parent.name.partition(".tmp-")[0]
    with _no_sums_by_torch(), ThreadPoolExecutor(1) as summer, path.open("wb", buffering=0) as file:
        stream = _Summing(file, summer)
        for tensor, fingerprint in zip(tensors, expected or [None] * len(tensors), strict=True):
            held = tensor.detach().cpu()
            if held.numel() * held.element_size() != held.untyped_storage().nbytes():
                held = held.clone()  # torch saves the whole storage behind a view
            if fingerprint is not None:
                fingerprint.check(held, checkpoint)
            before = stream.size
            _save(held, stream)
            places.append((before, stream.size - before))
        os.fsync(file.fileno())
    return WrittenFile(tuple(places), stream.size, stream.crc32)


@contextmanager
def _no_sums_by_torch() -> Iterator[None]:
    """torch.save sums every tensor once more, for its zip format, before it writes it: a quarter of the time.
    torch.load does not look at that sum; ours covers the whole file."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _save(tensor: Tensor, stream: _Summing) -> None:
    try:
        torch.save(tensor, cast(IO[bytes], stream))
    except RuntimeError as fault:
        # When the disk is full, torch.save's own complaint ("unexpected pos") hides the system's.
        if isinstance(fault.__context__, OSError):
            raise fault.__context__ from None
        raise


def check_finite(names: Sequence[str], tensors: Sequence[Tensor], where: str) -> None:
    """CheckpointError for a model whose weights are not finite: such a state is worth nothing.

    where: the checkpoint that it was to be.
    """
    for name, tensor in zip(names, tensors, strict=True):
        if name.startswith("model.") and tensor.is_floating_point() and not _finite(tensor.detach()):
            raise CheckpointError(
                f"{name.removeprefix('model.')} is not finite, so nothing was saved",
                where=where,
                hint="resume from the last checkpoint with a lower learning rate",
            )


def _finite(tensor: Tensor) -> bool:
    # A sum that is finite proves it in one pass; one that is not may only have overflowed.
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


class WriterProcess:
    """A child that writes files, so that no Python of this process is held up meanwhile.

    Tensors must lie in shared memory (`HostCopies(shared=True)`).
    """

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._lock = threading.Lock()
        self._child = context.Process(target=_serve, args=(theirs,), name="mm_core writer", daemon=True)
        self._child.start()
        theirs.close()

    def __call__(
        self, path: Path, tensors: Sequence[Tensor], expected: Sequence[Fingerprint | None] | None = None
    ) -> WrittenFile:
        """`write_file` in the child. CheckpointError where the child is gone."""
        with self._lock:
            try:
                self._pipe.send((path, list(tensors), expected))
                answer = self._pipe.recv()
            except (EOFError, OSError) as fault:
                raise CheckpointError(
                    "the process that writes checkpoints has ended",
                    hint="the host may be out of memory; checkpoint.async=thread needs no such process",
                ) from fault
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, WrittenFile)
        return answer

    def close(self) -> None:
        """Ends the child."""
        with suppress(OSError):
            self._pipe.close()
        self._child.join(timeout=5)


def _serve(pipe: Connection) -> None:
    """The child: writes until the pipe closes. What asks the run to save must not end it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            path, tensors, expected = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = write_file(path, tensors, expected)
        except Exception as fault:
            answer = fault
        pipe.send(answer)


Write = Callable[[Path, Sequence[Tensor], Sequence[Fingerprint | None]], WrittenFile]
"""`write_file`, in this process or in another."""
