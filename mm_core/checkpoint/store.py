"""Checkpoints of a run: complete or absent, never overwritten, checked before they are believed.

A checkpoint is written to `step_N.tmp-<id>`, checked on all ranks, renamed to `step_N`, and only then does
`LATEST` name it. What a crash leaves behind has `.tmp-` in its name, is never counted, and goes when the
next run begins.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.files.facts import step_name
from mm_core.checkpoint.files.fingerprints import Fingerprint, fingerprints
from mm_core.checkpoint.files.host_copies import HostCopies, State, check_tensors
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.opening import examine, newest_whole
from mm_core.checkpoint.reading import DOING, checked_facts, find_checkpoint, open_checkpoint, verify
from mm_core.checkpoint.retention import Retention, complete_steps, incomplete_steps, quarantine
from mm_core.checkpoint.run_lock import RunLock
from mm_core.errors import CheckpointError
from mm_core.files import remove_stale_stages, replace_text, stage_name, sync_folder
from mm_core.runtime.background import BackgroundQueue
from mm_core.runtime.ranks import Ranks

_logger = logging.getLogger(__name__)
_PATIENCE = 2.0  # seconds that an error waits for the thread, once the save in flight is complete


class CheckpointStore:
    """The checkpoints under `<run_dir>/checkpoints`.

    Args:
        run_dir: the run's folder, the same on all ranks and shared by all nodes.
        keep: how many of the newest complete checkpoints stay.
        keep_every: checkpoints of every so many steps stay as well.
        best: a metric of the facts' `metrics`, whose best checkpoint stays as well.
        mode: which value of `best` is best.
        asynchronous: `save` returns once the state is copied to host memory, and a thread does the rest.
            False: all of it is done when `save` returns.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        *,
        keep_every: int | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        asynchronous: bool = False,
    ) -> None:
        self.folder = Path(run_dir) / "checkpoints"
        self.retention = Retention(keep, keep_every, best, mode)
        self._lock = RunLock(Path(run_dir))
        self._asynchronous = asynchronous
        self._ranks: Ranks | None = None
        self._copies = HostCopies()
        self._thread = BackgroundQueue("mm_core checkpoint writer", "saving the checkpoint")
        self._committed: threading.Event | None = None
        self._finished: list[Path] = []
        self._naming = threading.Lock()  # between a checkpoint that gets its name and what is told of it
        self._later: dict[Path, files.Document] = {}

    # -- saving --------------------------------------------------------------------------------

    def begin(self, step: int, damaged: Sequence[Path] = ()) -> None:
        """Called once by all ranks before a run that has taken `step` steps goes on: locks the run's
        folder, removes what dead runs left unfinished, puts `damaged` checkpoints aside, and refuses
        (CheckpointError) a run that would meet newer checkpoints."""
        Ranks.current().on_first("preparing the checkpoint folder", lambda: self._begin(step, damaged))
        if self._asynchronous:
            self._background_ranks()  # while there is a launcher, through whom a group is made

    def reserve(self, tensors: State) -> None:
        """Makes the host buffers of asynchronous saves before the first of them, behind the caller's back."""
        if self._asynchronous:
            self._thread.give(partial(self._copies.reserve, tensors))

    def save(
        self,
        step: int,
        tensors: State,
        facts: files.Document,
        config_yaml: str,
        *,
        manifest: files.Document | None = None,
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

        Raises:
            CheckpointError: on all ranks, when any of them fails, or when an earlier asynchronous save
                has failed. Earlier checkpoints stay as they were, and nothing half-written has a
                checkpoint's name.
        """
        ranks = Ranks.current()
        ranks.agree("saving the checkpoint before", self.wait)
        final = self._path(step)
        texts = {
            files.FACTS: _to_json({"torch": str(torch.__version__), **facts, "step": step}),
            files.MANIFEST: _to_json(manifest or {}),
            files.CONFIG: config_yaml,
        }
        removed, stage = ranks.on_first("preparing the checkpoint folder", lambda: self._open_stage(final))
        if removed is not None:
            self._thread.record(removed)
        try:
            held, live = ranks.agree("copying the state", lambda: self._collect(step, tensors))
        except BaseException:
            _discard(ranks, stage)
            raise
        if not self._asynchronous:
            self._commit(ranks, stage, final, held, texts, live)
            return final
        apart = self._background_ranks()
        done = self._committed = threading.Event()

        def work() -> None:
            try:
                self._commit(apart, stage, final, held, texts, live)
            except BaseException as fault:
                self._thread.record(fault)  # before anybody who waits looks for it
            finally:
                done.set()

        self._thread.give(work)
        return final

    def add(self, step: int, metrics: files.Document, *, evaluated: bool) -> None:
        """Lays what became known after a save beside its checkpoint: now, or once that is complete.
        Called by all ranks; rank 0 writes, and talks to nobody.

        Args:
            step: of a checkpoint that was saved, or that the run began with.
            metrics: of its validation, as JSON.
            evaluated: whether the validation and samples that were due are there.
        """
        if Ranks.current().rank:
            return
        final, later = self._path(step), {"metrics": metrics, "evaluated": evaluated}
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

    def close(self, *, after_fault: bool = False) -> None:
        """Waits for what is being written, and frees the run's folder.

        Args:
            after_fault: an error is to be told. The save in flight is completed all the same; whatever else
                the thread has to do (host buffers to reserve) is not waited for.
        """
        if after_fault and self._committed is not None:
            self._committed.wait()
        self._thread.finish(_PATIENCE if after_fault else None)
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

    def open(self, request: str) -> tuple[OpenedCheckpoint | None, list[CheckpointError]]:
        """The checkpoint that `--resume` asks for, with every byte and value checked. Called by all ranks,
        which find the same.

        With "auto", a damaged checkpoint is passed over for the next older one; the faults say which, and
        their `where` is the folder. What is left of a run whose checkpoints are all damaged is no
        checkpoint: that is an error.
        """
        if request == "auto":
            return newest_whole(self.folder)
        path = self.resolve(request)
        if path is None:
            return None, []
        checkpoint = verify(path)
        examine(checkpoint)
        return checkpoint, []

    def load(
        self, source: Path | OpenedCheckpoint, tensors: State, *, verified: bool = False
    ) -> files.Document:
        """Fills `tensors`, of the form that `save` takes, in place; returns the facts. Called by all ranks.

        Any number of ranks loads what any number has saved. Everything is checked before the first
        tensor is touched: each file's checksum (unless `verified` before), and every name, shape and dtype.

        Raises:
            CheckpointError: on all ranks, when any of them finds a fault.
        """
        ranks = Ranks.current()
        folder = source.folder if isinstance(source, OpenedCheckpoint) else source
        paths = set(map(str, ranks.gather(folder)))
        if len(paths) > 1:
            raise CheckpointError(f"the ranks would load different checkpoints: {', '.join(sorted(paths))}")
        checkpoint = ranks.agree(DOING, lambda: open_checkpoint(source)) if verified else verify(source)
        facts = ranks.agree(DOING, lambda: checked_facts(checkpoint, tensors, exact=True))
        metadata = checkpoint.metadata
        ranks.agree(DOING, lambda: dcp.read_tensors(checkpoint.folder, metadata, tensors, alone=ranks.alone))
        return facts

    # -- parts ---------------------------------------------------------------------------------

    def _background_ranks(self) -> Ranks:
        """The ranks in the group that the thread speaks in."""
        if self._ranks is None:
            self._ranks = Ranks.in_own_group()
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
        # An incomplete checkpoint would be in the way when its step is saved again.
        for path in own.union(incomplete_steps(self.folder)):
            quarantine(path)
        newer = sorted(found for found in complete_steps(self.folder) if found > step)
        if newer:
            raise CheckpointError(
                f"this run starts from step {step}, but its folder holds checkpoints up to step {newer[-1]}",
                where=str(self.folder),
                hint="resume with --resume auto, choose another run.name, or move the newer checkpoints away",
            )

    def _open_stage(self, final: Path) -> tuple[CheckpointError | None, Path]:
        """Makes the folder that the checkpoint `final` is written in before it has its name. Returns what to
        tell once it is saved, where the run's folder was removed meanwhile, and the folder."""
        removed = self._lock.renew()
        if final.exists():
            raise CheckpointError(
                "this step has a checkpoint already, and none is ever overwritten",
                where=str(final),
                hint="choose another run.name, or move the folder away",
            )
        stage = final.with_name(stage_name(final.name))
        stage.mkdir(parents=True)
        return removed, stage

    def _collect(self, step: int, tensors: State) -> tuple[State, Mapping[str, Fingerprint]]:
        """What is to be written, and the fingerprints of a sample of it as it is in training."""
        check_tensors(tensors)
        held = self._copies.take(tensors) if self._asynchronous else tensors
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
            sums = ranks.agree(doing, lambda: dcp.write_tensors(stage, tensors, ranks=ranks, expected=live))
            own = ranks.agree(
                doing, lambda: {**sums, **(files.write_texts(stage, texts) if ranks.rank == 0 else {})}
            )
            checksums = {name: entry for share in ranks.gather(own) for name, entry in share.items()}
            ranks.on_first("completing the checkpoint", lambda: _complete(stage, checksums))
            ranks.on_first("publishing the checkpoint", lambda: self._publish(stage, final))
        except BaseException:
            _discard(ranks, stage)
            raise
        self._finished.append(final)

    def _publish(self, stage: Path, final: Path) -> None:
        with self._naming:
            stage.rename(final)
            sync_folder(self.folder)
            replace_text(self.folder / "LATEST", final.name + "\n", durable=True)
            if final in self._later:
                self._write_later(final, self._later.pop(final))
        with suppress(OSError):  # what could not be removed goes with a later save
            with self._naming:
                best = self.retention.name_best(final)
            self.retention.remove(final, best)

    def _write_later(self, final: Path, later: files.Document) -> None:
        try:
            replace_text(final / files.EVALUATION_FILE, _to_json(later), durable=True)
        except OSError as fault:  # the checkpoint is as good; a resume looks again
            _logger.warning("%s of %s could not be written: %s", files.EVALUATION_FILE, final, fault)

    def _path(self, step: int) -> Path:
        return self.folder / step_name(step)


def _discard(ranks: Ranks, stage: Path) -> None:
    """Rank 0 removes what was not completed."""
    if ranks.rank == 0:
        shutil.rmtree(stage, ignore_errors=True)


def _complete(stage: Path, checksums: Mapping[str, files.Checksum]) -> None:
    """Rank 0 sees every rank's files, and lists them: from here on the checkpoint is complete."""
    unseen = sorted(name for name in checksums if not (stage / name).is_file())
    if unseen:
        raise CheckpointError(
            f"files that other ranks wrote are not here: {files.listed(unseen)}",
            where=str(stage),
            hint="run.dir must lie on a file system that all nodes share",
        )
    files.write_checksums(stage, checksums)
    sync_folder(stage)


def _to_json(facts: files.Document) -> str:
    """Facts as JSON text."""
    try:
        return json.dumps(dict(facts), indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as fault:
        raise CheckpointError(f"the facts of a checkpoint must be JSON: {fault}") from None
