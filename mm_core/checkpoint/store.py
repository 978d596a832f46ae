"""Saving and loading the checkpoints of a run: complete or absent, never overwritten, checked before use.

A checkpoint is written to `step_N.tmp-<id>`, checked on all ranks and renamed to `step_N`; only then does
`LATEST` name it. A crash leaves a folder with `.tmp-` in its name, which is never used as a checkpoint and is
removed when the run next starts.
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
from mm_core.errors import CheckpointError, some
from mm_core.files import remove_stale_stages, replace_text, stage_name, sync_folder
from mm_core.runtime.background import BackgroundQueue
from mm_core.runtime.ranks import Ranks

_logger = logging.getLogger(__name__)
_PATIENCE = 2.0  # seconds to wait for the thread after an error, once the save in progress is complete


class CheckpointStore:
    """Saves, finds and loads the checkpoints of a run, under `<run_dir>/checkpoints`.

    Args:
        run_dir: the run's folder, the same on all ranks and shared by all nodes.
        keep: how many of the newest complete checkpoints stay.
        keep_every: checkpoints of multiples of this step stay as well.
        best: a metric in the facts' `metrics`, whose best checkpoint stays as well.
        mode: whether the smallest or the largest value of `best` is best.
        asynchronous: `save` returns once the state is copied to host memory, and a thread writes it.
            False: the checkpoint is complete when `save` returns.
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
        self._ranks = Ranks.current()
        self._background: Ranks | None = None
        self._copies = HostCopies()
        self._thread = BackgroundQueue("mm_core checkpoint writer", "saving the checkpoint")
        self._committed: threading.Event | None = None
        self._finished: list[Path] = []
        self._naming = threading.Lock()  # the thread renames a checkpoint, the loop adds its metrics
        self._later: dict[Path, files.Document] = {}

    # -- saving --------------------------------------------------------------------------------

    def begin(self, step: int, damaged: Sequence[Path] = ()) -> None:
        """Prepares the checkpoint folder for a run that starts from `step`; called once by all ranks.

        Locks the run's folder, removes incomplete checkpoints of dead runs and renames `damaged` ones.
        CheckpointError if the folder contains checkpoints of later steps, or is another one on some host.
        """
        holder = self._ranks.on_first("preparing the checkpoint folder", lambda: self._begin(step, damaged))
        self._ranks.agree("reading the run's folder", lambda: self._lock.check_shared(holder))
        if self._asynchronous:
            self._background_ranks()  # now, because creating a group needs the launcher, which may end first

    def reserve(self, tensors: State) -> None:
        """Allocates the host buffers of asynchronous saves in the background, before the first checkpoint."""
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
        """Saves one checkpoint of the run and returns its folder. Called by all ranks, or a single process.

        An asynchronous save is complete when `poll` returns its folder.

        Args:
            step: steps taken so far.
            tensors: {"model": {name: tensor}, "optimizer": {name: tensor}}, and "ema" if there is an
                average; plain tensors or DTensors.
            facts: everything else, as JSON; `step` is added.
            config_yaml: the resolved config.
            manifest: the run's manifest as JSON, which a resume compares.

        Raises:
            CheckpointError: on all ranks, if any of them fails or an earlier asynchronous save has failed.
                Earlier checkpoints are unchanged, and no incomplete folder has a checkpoint's name.
        """
        ranks = self._ranks
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
        own_group = self._background_ranks()
        done = self._committed = threading.Event()

        def work() -> None:
            try:
                self._commit(own_group, stage, final, held, texts, live)
            except BaseException as fault:
                self._thread.record(fault)  # before `wait` returns and checks for it
            finally:
                done.set()

        self._thread.give(work)
        return final

    def add(self, step: int, metrics: files.Document, *, evaluated: bool) -> None:
        """Adds validation metrics to a checkpoint that was saved before them: now, or once it is complete.

        Called by all ranks; rank 0 writes, without communication.

        Args:
            step: the step of a checkpoint that was saved, or that the run resumed from.
            metrics: validation metrics, as JSON.
            evaluated: whether the validation and samples that were due are done.
        """
        if self._ranks.rank:
            return
        final, later = self._path(step), {"metrics": metrics, "evaluated": evaluated}
        with self._naming:
            if final.is_dir():
                self._write_later(final, later)
                with suppress(OSError):  # BEST is written again at the next save
                    self.retention.name_best(final)
            else:
                self._later[final] = later

    def poll(self) -> list[Path]:
        """The checkpoints that have become complete since the last call; CheckpointError for a failed one."""
        self._thread.check()
        finished: list[Path] = []
        while self._finished:
            finished.append(self._finished.pop(0))
        return finished

    def wait(self) -> None:
        """Waits until the checkpoint being saved is complete; CheckpointError if the save failed."""
        if self._committed is not None:
            self._committed.wait()
            self._committed = None
        self._thread.check()

    def close(self, *, after_fault: bool = False) -> None:
        """Waits for the checkpoint being saved, and unlocks the run's folder.

        Args:
            after_fault: the run ends with an error. The save in progress is completed; other work of the
                thread (allocating host buffers) is not waited for.
        """
        if after_fault and self._committed is not None:
            self._committed.wait()
        self._thread.finish(_PATIENCE if after_fault else None)
        self._lock.release()

    # -- loading -------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """The newest complete checkpoint of the run, or None."""
        steps = complete_steps(self.folder)
        return steps[max(steps)] if steps else None

    def resolve(self, request: str) -> Path | None:
        """The checkpoint that `--resume` names, unchecked.

        Args:
            request: "auto" (the newest of this run, if any), "last" (the newest, which must be there),
                "never", or the path of a checkpoint or of a run, whose newest checkpoint is used.

        Raises:
            CheckpointError: there is no complete checkpoint there.
        """
        if request == "never":
            return None
        if request in ("auto", "last"):
            if (newest := self.latest()) is None and request == "last":
                hint = "leave out --resume to start at step 0"
                raise CheckpointError(
                    "this run has no complete checkpoint", where=str(self.folder.parent), hint=hint
                )
            return newest
        return find_checkpoint(Path(request), words="'auto', 'last', 'never', ")

    def open(self, request: str) -> tuple[OpenedCheckpoint | None, list[CheckpointError]]:
        """Opens the checkpoint that `--resume` names and checks its bytes and values. Called by all ranks.

        With "auto", a damaged checkpoint is skipped in favour of the next older one. The returned errors
        describe the skipped ones; their `where` is the folder. CheckpointError if all are damaged.
        """
        if request == "auto":
            return newest_whole(self.folder, self._ranks)
        path = self.resolve(request)
        if path is None:
            return None, []
        checkpoint = verify(path, self._ranks)
        examine(checkpoint, self._ranks)
        return checkpoint, []

    def load(
        self, source: Path | OpenedCheckpoint, tensors: State, *, verified: bool = False
    ) -> files.Document:
        """Loads a checkpoint into `tensors` (in the form that `save` takes), in place; returns its facts.

        Called by all ranks, whose number may differ from the one at the save. Everything is checked before
        the first tensor is changed: the checksums (unless `verified` before), names, shapes and dtypes.

        Raises:
            CheckpointError: on all ranks, if any of them finds damage or a mismatch.
        """
        ranks = self._ranks
        folder = source.folder if isinstance(source, OpenedCheckpoint) else source
        paths = set(map(str, ranks.gather(folder)))
        if len(paths) > 1:
            raise CheckpointError(
                f"the ranks would load different checkpoints: {', '.join(sorted(paths))}",
                hint="start all ranks with the same --resume, on a file system that all nodes share",
            )
        if verified:
            checkpoint = ranks.agree(DOING, lambda: open_checkpoint(source))
        else:
            checkpoint = verify(source, ranks)
        facts = ranks.agree(DOING, lambda: checked_facts(checkpoint, tensors, exact=True))
        metadata = checkpoint.metadata
        ranks.agree(DOING, lambda: dcp.read_tensors(checkpoint.folder, metadata, tensors, alone=ranks.alone))
        return facts

    # -- parts ---------------------------------------------------------------------------------

    def _background_ranks(self) -> Ranks:
        """The ranks in the process group that the thread uses."""
        if self._background is None:
            self._background = Ranks.in_own_group()
        return self._background

    def _begin(self, step: int, damaged: Sequence[Path]) -> str:
        self._lock.take()
        try:
            self._clear(step, damaged)
        except BaseException:
            self._lock.release()
            raise
        return self._lock.read()

    def _clear(self, step: int, damaged: Sequence[Path]) -> None:
        remove_stale_stages(self.folder)
        own = {path for path in damaged if path.parent == self.folder}
        # An incomplete checkpoint would block saving its step again.
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
        """Creates the temporary folder of the checkpoint `final`. Returns an error to report after the save
        (if the run's folder was removed in the meantime) and the folder."""
        removed = self._lock.renew()
        if final.exists():
            raise CheckpointError(
                "this step already has a checkpoint, and checkpoints are never overwritten",
                where=str(final),
                hint="choose another run.name, or move the folder away",
            )
        stage = final.with_name(stage_name(final.name))
        stage.mkdir(parents=True)
        return removed, stage

    def _collect(self, step: int, tensors: State) -> tuple[State, Mapping[str, Fingerprint]]:
        """The tensors to write, and fingerprints of a sample of the live tensors."""
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
        live: Mapping[str, Fingerprint],  # which the written tensors must have
    ) -> None:
        """Writes all files of the checkpoint with checksums, then renames it."""
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
        with suppress(OSError):  # a checkpoint that could not be removed goes at a later save
            with self._naming:
                best = self.retention.name_best(final)
            self.retention.remove(final, best)

    def _write_later(self, final: Path, later: files.Document) -> None:
        try:
            replace_text(final / files.EVALUATION_FILE, _to_json(later), durable=True)
        except OSError as fault:  # the checkpoint is still complete; a resume validates again
            _logger.warning("%s of %s could not be written: %s", files.EVALUATION_FILE, final, fault)

    def _path(self, step: int) -> Path:
        return self.folder / step_name(step)


def _discard(ranks: Ranks, stage: Path) -> None:
    """Rank 0 removes the incomplete checkpoint."""
    if ranks.rank == 0:
        shutil.rmtree(stage, ignore_errors=True)


def _complete(stage: Path, checksums: Mapping[str, files.Checksum]) -> None:
    """Rank 0 checks that all ranks' files exist and writes their checksums: the checkpoint is complete."""
    unseen = sorted(name for name in checksums if not (stage / name).is_file())
    if unseen:
        raise CheckpointError(
            f"files written by other ranks are missing here: {some(unseen, 10)}",
            where=str(stage),
            hint="set run.dir to a folder on a file system that all nodes share",
        )
    files.write_checksums(stage, checksums)
    sync_folder(stage)


def _to_json(facts: files.Document) -> str:
    try:
        return json.dumps(dict(facts), indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as fault:
        raise CheckpointError(
            f"values that are saved beside a checkpoint's tensors cannot be written as JSON: {fault}",
            accepted="finite numbers, strings, booleans, None, and lists and mappings of these",
            hint="convert the value in the state_dict that returns it",
        ) from None
