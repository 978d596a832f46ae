"""Checkpoints of a run: complete or absent, never overwritten, checked before they are believed.

A checkpoint is written to `step_N.tmp-<id>`, checked on all ranks, renamed to `step_N`, and only then does
`LATEST` name it. What a crash leaves behind has `.tmp-` in its name, is never counted, and goes when the
next run begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from mm_core.errors import CheckpointError
from mm_core.train import checkpoint_dcp as dcp
from mm_core.train import checkpoint_io as files
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint_bytes import HostCopies, State, Write, WriterProcess, check_tensors, write_file
from mm_core.train.checkpoint_digests import write_digests
from mm_core.train.checkpoint_facts import step_name
from mm_core.train.checkpoint_opening import examine, newest_whole, verify
from mm_core.train.checkpoint_reading import (
    find_checkpoint,
    open_checkpoint,
    read_facts,
    shares,
)
from mm_core.train.checkpoint_retention import (
    Retention,
    complete_steps,
    put_aside,
    remove_stale_stages,
    torn_steps,
)
from mm_core.train.checkpoint_sample import Fingerprint, fingerprints
from mm_core.train.checkpoint_stage import complete, discard, open_stage, to_json
from mm_core.train.checkpoint_thread import WriterThread
from mm_core.train.run_lock import RunLock


class CheckpointStore:
    """The checkpoints under `<run_dir>/checkpoints`.

    Args:
        run_dir: the run's folder, the same on all ranks and shared by all nodes.
        keep: how many of the newest complete checkpoints stay.
        keep_every: checkpoints of every so many steps stay as well.
        best: a metric of the facts' `metrics`, whose best checkpoint stays as well.
        mode: which value of `best` is best.
        asynchronous: "thread" or "process": `save` returns once the state is copied to host memory, and
            the rest is done behind the caller's back; "process" hands the bytes to a child. None: all of
            it is done when `save` returns.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        *,
        keep_every: int | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        asynchronous: Literal["thread", "process"] | None = None,
    ) -> None:
        self.folder = Path(run_dir) / "checkpoints"
        self.retention = Retention(keep, keep_every, best, mode)
        self._lock = RunLock(Path(run_dir))
        self._asynchronous = asynchronous
        self._ranks: Ranks | None = None
        self._write: Write = write_file
        self._copies = HostCopies(shared=asynchronous == "process")
        self._thread = WriterThread("mm_core checkpoint writer", "saving the checkpoint")
        # Of its own, and never waited for: no save stands in a line behind gigabytes of sums.
        self._checks = WriterThread("mm_core checkpoint sums", "checking sha256")
        self._committed: threading.Event | None = None
        self._hurry = threading.Event()
        self._finished: list[Path] = []
        self._naming = threading.Lock()  # between a checkpoint that gets its name and what is told of it
        self._later: dict[Path, Mapping[str, Any]] = {}

    # -- saving --------------------------------------------------------------------------------

    def begin(self, step: int, damaged: Sequence[Path] = ()) -> None:
        """Called once by all ranks before a run that has taken `step` steps goes on: locks the run's
        folder, removes what dead runs left unfinished, puts `damaged` checkpoints aside, and refuses
        (CheckpointError) a run that would meet newer checkpoints."""
        Ranks.current().first("preparing the checkpoint folder", lambda: self._begin(step, damaged))
        if self._asynchronous is not None:
            self._speakers()  # while there is a launcher, through whom a group is made

    def reserve(self, tensors: State) -> None:
        """Makes the host buffers of asynchronous saves before the first of them, behind the caller's back."""
        if self._asynchronous is not None:
            self._thread.give(partial(self._copies.reserve, tensors))

    def save(
        self,
        step: int,
        tensors: State,
        facts: Mapping[str, Any],
        config_yaml: str,
        *,
        manifest: Mapping[str, Any] | None = None,
        digest: bool = True,
    ) -> Path:
        """Writes one checkpoint and returns its folder. Called by all ranks of the default process group,
        or by a lone process. An asynchronous one is complete when `poll` names it.

        Args:
            step: steps taken so far.
            tensors: {"model": {name: tensor}, "optimizer": {name: tensor}}, and "ema" where there is an
                average; plain tensors or DTensors.
            facts: everything else, as JSON; `step` is added.
            config_yaml: the resolved config.
            manifest: what the run was made of, as JSON, to compare with at a resume.
            digest: whether sha256.json follows, unless another rank has no time for it. Without it, an
                earlier one that is still being summed is given up.

        Raises:
            CheckpointError: on all ranks, when any of them fails, or when an earlier asynchronous save
                has failed. Earlier checkpoints stay as they were, and nothing half-written has a
                checkpoint's name.
        """
        # The thread may still be speaking in its own group (sha256): here the default one is used.
        ranks = Ranks.current()
        digest = all(ranks.gather(digest))  # a signal may have reached some ranks only
        if not digest:
            self.hurry()
        ranks.agree("saving the checkpoint before", self.wait)
        final = self._path(step)
        texts = {
            files.FACTS: to_json({"torch": str(torch.__version__), **facts, "step": step}),
            files.MANIFEST: to_json(manifest or {}),
            files.CONFIG: config_yaml,
        }
        removed, stage = ranks.first("preparing the checkpoint folder", lambda: open_stage(final, self._lock))
        if removed is not None:
            self._thread.record(removed)
        try:
            held, live = ranks.agree("copying the state", lambda: self._collect(step, tensors))
        except BaseException:
            discard(ranks, stage)
            raise
        if self._asynchronous is None:
            self._commit(ranks, stage, final, held, texts, live)
            if digest:
                write_digests(ranks, final, threading.Event())
            return final
        apart = self._speakers()
        done = self._committed = threading.Event()
        hurry = self._hurry = threading.Event()

        def work() -> None:
            try:
                self._commit(apart, stage, final, held, texts, live)
            except BaseException as fault:
                self._thread.record(fault)  # before anybody who waits looks for it
                return
            finally:
                done.set()
            if digest:
                write_digests(apart, final, hurry)

        self._thread.give(work)
        return final

    def add(self, step: int, metrics: Mapping[str, Any], *, looked: bool) -> None:
        """Lays what became known after a save beside its checkpoint: now, or once that is complete.
        Called by all ranks; rank 0 writes, and talks to nobody.

        Args:
            step: of a checkpoint that was saved, or that the run began with.
            metrics: of its validation, as JSON.
            looked: whether the validation and samples that were due are there.
        """
        if Ranks.current().rank:
            return
        final, later = self._path(step), {"metrics": metrics, "looked": looked}
        with self._naming:
            if final.is_dir():
                self._write_later(final, later)
                with suppress(OSError):  # BEST is named again with the next save
                    self.retention.name_best(final)
            else:
                self._later[final] = later

    def poll(self) -> list[Path]:
        """Checkpoints that are complete since the last call. CheckpointError for one that failed."""
        self._thread.check()
        self._checks.check()
        finished: list[Path] = []
        while self._finished:
            finished.append(self._finished.pop(0))
        return finished

    def wait(self) -> None:
        """Waits until the save in flight is complete. CheckpointError when it failed."""
        if self._committed is not None:
            self._committed.wait()
            self._committed = None
        self._thread.check()
        self._checks.check()

    def hurry(self) -> None:
        """Gives up the sha256 of the last save, on all ranks: there is no time for it."""
        self._hurry.set()

    def close(self, *, hurry: bool = False) -> None:
        """Waits for what is being written, and frees the run's folder.

        hurry: an error waits to be heard. The save itself is completed; its sha256 is given up, and ranks
            that still sum, or have died meanwhile, are not waited for.
        """
        if hurry:
            self.hurry()
            if self._committed is not None:
                self._committed.wait()
        self._thread.finish(_PATIENCE if hurry else None)
        if isinstance(self._write, WriterProcess):
            self._write.close()
            self._write = write_file
        self._lock.release()

    # -- loading -------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        steps = complete_steps(self.folder)
        return steps[max(steps)] if steps else None

    def resolve(self, request: str) -> Path | None:
        """The checkpoint that `--resume` asks for, unchecked.

        Args:
            request: "auto" (the newest of this run, if any), "never", or the path of a checkpoint or of a
                run, whose newest is taken.

        Raises:
            CheckpointError: nothing complete is there.
        """
        if request == "never":
            return None
        if request == "auto":
            return self.latest()
        return find_checkpoint(Path(request), words="'auto', 'never', ")

    def open(self, request: str) -> tuple[Path | None, list[CheckpointError]]:
        """The checkpoint that `--resume` asks for, with every byte and value checked. Called by all ranks,
        which find the same.

        With "auto", a damaged checkpoint is passed over for the next older one; the faults say which, and
        their `where` is the folder. What is left of a run whose checkpoints are all damaged is no
        checkpoint: that is an error.
        """
        if request == "auto":
            return newest_whole(self.folder)
        path = self.resolve(request)
        if path is not None:
            verify(path)
            examine(path)
        return path, []

    def verify(self, path: Path) -> None:
        """Checks every byte of a checkpoint against its checksums, the ranks sharing the work.

        Raises:
            DamagedError: on all ranks, when any of them finds a fault.
        """
        verify(path)

    def verify_digests(self, path: Path) -> None:
        """Has the sha256 of every file checked behind the caller's back; `poll` raises what is found."""
        ranks = Ranks.current()
        own = ranks.agree("reading the checkpoint", lambda: shares(files.read_manifest(path), ranks))
        self._checks.give(partial(files.check_digests, path, own))

    def read_facts(self, path: Path) -> dict[str, Any]:
        """The facts that a checkpoint was saved with, `step` among them. Not collective."""
        return read_facts(path)

    def load(self, path: Path, tensors: dict[str, Any], *, verified: bool = False) -> dict[str, Any]:
        """Fills `tensors`, of the form that `save` takes, in place; returns the facts. Called by all ranks.

        Any number of ranks loads what any number has saved. Everything is checked before the first
        tensor is touched: each file's checksum (unless `verified` before), and every name, shape and dtype.

        Raises:
            CheckpointError: on all ranks, when any of them finds a fault.
        """
        ranks = Ranks.current()
        paths = set(map(str, ranks.gather(path)))
        if len(paths) > 1:
            raise CheckpointError(f"the ranks would load different checkpoints: {', '.join(sorted(paths))}")
        if not verified:
            self.verify(path)
        doing = "reading the checkpoint"
        facts, metadata = ranks.agree(doing, lambda: open_checkpoint(path, tensors, exact=True))
        ranks.agree(doing, lambda: dcp.read_tensors(path, metadata, tensors, alone=ranks.alone))
        return facts

    # -- parts ---------------------------------------------------------------------------------

    def _speakers(self) -> Ranks:
        """The ranks in the group that the thread speaks in."""
        if self._ranks is None:
            self._ranks = Ranks.apart()
            if self._asynchronous == "process":
                self._write = WriterProcess()
        return self._ranks

    def _begin(self, step: int, damaged: Sequence[Path]) -> None:
        self._lock.take()
        try:
            self._clear(step, damaged)
        except BaseException:
            self._lock.release()
            raise

    def _clear(self, step: int, damaged: Sequence[Path]) -> None:
        remove_stale_stages(self.folder)
        own = {path for path in damaged if path.parent == self.folder}
        for path in own.union(torn_steps(self.folder)):  # a torn one would be in the way of its step's save
            put_aside(path)
        newer = sorted(found for found in complete_steps(self.folder) if found > step)
        if newer:
            raise CheckpointError(
                f"this run starts from step {step}, but its folder holds checkpoints up to step {newer[-1]}",
                where=str(self.folder),
                hint="resume with --resume auto, choose another run.name, or move the newer checkpoints away",
            )

    def _collect(self, step: int, tensors: State) -> tuple[State, Mapping[str, Fingerprint]]:
        """What is to be written, and the fingerprints of a sample of it as it is in training."""
        check_tensors(tensors)
        held = tensors if self._asynchronous is None else self._copies.take(tensors)
        return held, fingerprints(step, tensors)

    def _commit(
        self,
        ranks: Ranks,
        stage: Path,
        final: Path,
        tensors: State,
        texts: Mapping[str, str],
        live: Mapping[str, Fingerprint],
    ) -> None:
        """Every file of the checkpoint, on disk and summed; then its name. live: what it has to hold."""
        try:
            ranks.agree("preparing the checkpoint folder", lambda: stage.mkdir(parents=True, exist_ok=True))
            doing = "writing the checkpoint"
            sums = ranks.agree(
                doing,
                lambda: dcp.write_tensors(stage, tensors, ranks=ranks, write=self._write, expected=live),
            )
            own = ranks.agree(
                doing, lambda: {**sums, **(files.write_texts(stage, texts) if ranks.rank == 0 else {})}
            )
            manifest = {name: entry for share in ranks.gather(own) for name, entry in share.items()}
            ranks.first("completing the checkpoint", lambda: complete(stage, manifest))
            ranks.first("publishing the checkpoint", lambda: self._publish(stage, final))
        except BaseException:
            discard(ranks, stage)
            raise
        self._finished.append(final)

    def _publish(self, stage: Path, final: Path) -> None:
        with self._naming:
            stage.rename(final)
            files.sync_folder(self.folder)
            files.move_text(self.folder / "LATEST", final.name + "\n")
            if final in self._later:
                self._write_later(final, self._later.pop(final))
        with suppress(OSError):  # what could not be removed goes with a later save
            with self._naming:
                best = self.retention.name_best(final)
            self.retention.remove(final, best)

    def _write_later(self, final: Path, later: Mapping[str, Any]) -> None:
        try:
            files.move_text(final / files.LATER, to_json(later))
        except OSError as fault:  # the checkpoint is as good; a resume looks again
            _logger.warning("%s of %s could not be written: %s", files.LATER, final, fault)

    def _path(self, step: int) -> Path:
        return self.folder / step_name(step)


_logger = logging.getLogger(__name__)
_PATIENCE = 2.0  # seconds that an error waits for other ranks to give up their sums
