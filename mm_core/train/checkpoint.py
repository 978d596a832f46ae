"""Checkpoints of a run: complete or absent, never overwritten, checked before they are believed.

A checkpoint is written to `step_N.tmp-<id>`, checked on all ranks, renamed to `step_N`, and only then does
`LATEST` name it. What a crash leaves behind has `.tmp-` in its name, is never counted, and goes with the
next save.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from mm_core.errors import CheckpointError
from mm_core.train import checkpoint_dcp as dcp
from mm_core.train import checkpoint_io as files
from mm_core.train.agreement import Ranks

_STEP = re.compile(r"step_(\d{8,})\Z")
_logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints under `<run_dir>/checkpoints`.

    Args:
        run_dir: the run's folder, the same on all ranks and shared by all nodes.
        keep: how many of the newest complete checkpoints stay.
    """

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.folder = Path(run_dir) / "checkpoints"
        self.keep = keep

    def begin(self, step: int) -> None:
        """Called once by all ranks before a run that has taken `step` steps goes on: removes what dead
        runs left unfinished, and refuses (CheckpointError) a run that would meet newer checkpoints."""
        Ranks.current().first("preparing the checkpoint folder", lambda: self._begin(step))

    def save(
        self, step: int, tensors: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any], config_yaml: str
    ) -> Path:
        """Writes one checkpoint and returns its folder. Called by all ranks of the default process group,
        or by a lone process.

        Args:
            step: steps taken so far.
            tensors: {"model": {name: tensor}, "optimizer": {name: tensor}}, plain tensors or DTensors.
            facts: everything else, as JSON; `step` is added.
            config_yaml: the resolved config.

        Raises:
            CheckpointError: on all ranks, when any of them fails. Earlier checkpoints stay as they were,
                and nothing half-written has a checkpoint's name.
        """
        ranks = Ranks.current()
        final = self.folder / f"step_{step:08d}"
        stage = ranks.first("preparing the checkpoint folder", lambda: self._open_stage(final))
        try:
            self._write(ranks, stage, tensors, {**facts, "step": step}, config_yaml)
            ranks.first("publishing the checkpoint", lambda: self._publish(stage, final))
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(stage, ignore_errors=True)
            raise
        return final

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        steps = complete_steps(self.folder)
        return steps[max(steps)] if steps else None

    def resolve(self, request: str) -> Path | None:
        """The checkpoint that `--resume` asks for.

        Args:
            request: "auto" (the newest of this run, if any), "never", or the path of a checkpoint or of a
                run, whose newest is taken.

        Raises:
            CheckpointError: nothing complete is there.
        """
        if request == "never":
            return None
        return self.latest() if request == "auto" else find_checkpoint(Path(request))

    def read_facts(self, path: Path) -> dict[str, Any]:
        """The facts that a checkpoint was saved with, `step` among them. Not collective."""
        return read_facts(path)

    def load(self, path: Path, tensors: dict[str, Any]) -> dict[str, Any]:
        """Fills `tensors`, of the form that `save` takes, in place; returns the facts. Called by all ranks.

        Any number of ranks loads what any number has saved. Everything is checked before the first
        tensor is touched: each file's checksum, and every name, shape and dtype.

        Raises:
            CheckpointError: on all ranks, when any of them finds a fault.
        """
        ranks = Ranks.current()
        paths = set(map(str, ranks.gather(path)))
        if len(paths) > 1:
            raise CheckpointError(f"the ranks would load different checkpoints: {', '.join(sorted(paths))}")
        doing = "reading the checkpoint"
        manifest, facts, metadata = ranks.agree(doing, lambda: open_checkpoint(path, tensors, exact=True))
        ranks.agree(doing, lambda: files.check_contents(path, manifest, shares(manifest, ranks)))
        ranks.agree(doing, lambda: dcp.read_tensors(path, metadata, tensors, alone=ranks.alone))
        return facts

    def _begin(self, step: int) -> None:
        self._clean()
        newer = sorted(found for found in complete_steps(self.folder) if found > step)
        if newer:
            raise CheckpointError(
                f"this run starts from step {step}, but its folder holds checkpoints up to step {newer[-1]}",
                where=str(self.folder),
                hint="resume with --resume auto, choose another run.name, or move the newer checkpoints away",
            )

    def _open_stage(self, final: Path) -> Path:
        if final.exists():
            raise CheckpointError(
                "this step has a checkpoint already, and none is ever overwritten",
                where=str(final),
                hint="choose another run.name, or move the folder away",
            )
        self._clean()
        stage = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
        stage.mkdir(parents=True)
        return stage

    def _write(
        self,
        ranks: Ranks,
        stage: Path,
        tensors: Mapping[str, Any],
        facts: Mapping[str, Any],
        config_yaml: str,
    ) -> None:
        """Every file of the checkpoint, on disk and summed."""
        ranks.agree("collecting the state", lambda: prepare(stage, tensors))
        ranks.agree("writing the checkpoint", lambda: dcp.write_tensors(stage, tensors, alone=ranks.alone))
        own = ranks.agree(
            "checking what was written", lambda: self._sum_own_files(ranks, stage, facts, config_yaml)
        )
        manifest = {name: entry for share in ranks.gather(own) for name, entry in share.items()}
        ranks.first("completing the checkpoint", lambda: complete(stage, manifest))

    @staticmethod
    def _sum_own_files(
        ranks: Ranks, stage: Path, facts: Mapping[str, Any], config_yaml: str
    ) -> dict[str, files.Checksum]:
        paths = list(stage.glob(f"__{ranks.rank}_*"))
        if ranks.rank == 0:
            files.write_durably(stage / files.FACTS, to_json(facts))
            files.write_durably(stage / files.CONFIG, config_yaml)
            paths += [stage / name for name in (files.METADATA, files.FACTS, files.CONFIG)]
        return {path.name: files.checksum(path) for path in paths}

    def _publish(self, stage: Path, final: Path) -> None:
        stage.rename(final)
        files.sync_folder(self.folder)
        files.move_text(self.folder / "LATEST", final.name + "\n")
        try:
            self._prune(final)
        except OSError as fault:
            _logger.warning("old checkpoints could not be removed: %s", fault)

    def _prune(self, newest: Path) -> None:
        """Keeps the newest `keep` up to the one just written."""
        steps = complete_steps(self.folder)
        written = next(step for step, path in steps.items() if path == newest)
        for step in sorted(found for found in steps if found <= written)[: -self.keep]:
            # Renamed first: a deletion that is cut short must not leave a half checkpoint under its name.
            doomed = steps[step].rename(self.folder / f"{steps[step].name}.tmp-{secrets.token_hex(4)}")
            shutil.rmtree(doomed)

    def _clean(self) -> None:
        """Removes what dead runs left unfinished."""
        for leftover in self.folder.glob("*.tmp-*"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink(missing_ok=True)


def load_model_only(path: Path, model_state: dict[str, Tensor]) -> dict[str, Any]:
    """Fills a model's tensors, by name, from a checkpoint or from a run's newest; returns the facts.

    For one process, outside any process group: sampling, export. Dtypes may differ: values are cast.

    Raises:
        CheckpointError: no complete checkpoint, a damaged one, or one of another model.
    """
    folder, tensors = find_checkpoint(path), {"model": model_state}
    lone = Ranks(0, 1, alone=True)
    manifest, facts, metadata = open_checkpoint(folder, tensors, exact=False)
    lone.agree("reading the checkpoint", lambda: files.check_contents(folder, manifest, manifest))
    lone.agree("reading the checkpoint", lambda: dcp.read_tensors(folder, metadata, tensors, alone=True))
    return facts


def read_facts(path: Path) -> dict[str, Any]:
    """The facts that a checkpoint was saved with, `step` among them."""
    manifest = files.read_manifest(path)
    files.check_present(path, manifest)
    files.check_contents(path, manifest, [files.FACTS])
    facts: dict[str, Any] = json.loads((path / files.FACTS).read_text(encoding="utf-8"))
    return facts


def find_checkpoint(path: Path) -> Path:
    """A complete checkpoint: `path` itself, or the newest of the run at `path`."""
    if (path / files.CHECKSUMS).is_file() and ".tmp-" not in path.name:
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if steps := complete_steps(folder):
        return steps[max(steps)]
    accepted = (
        "'auto', 'never', a checkpoint folder (runs/NAME/checkpoints/step_N) or a run folder (runs/NAME)"
    )
    if not path.exists():
        what = "there is no such checkpoint"
    elif not path.is_dir():
        what = "this is a file, not a checkpoint folder"
    elif ".tmp-" in path.name or (path / files.METADATA).exists():
        what = "this checkpoint is incomplete: its save never finished"
    elif folder != path:
        what = "this run has no complete checkpoint"
    else:
        what = "this folder is neither a checkpoint nor a run"
    raise CheckpointError(what, where=str(path), accepted=accepted)


def complete_steps(folder: Path) -> dict[int, Path]:
    """Complete checkpoints under `folder` by step."""
    if not folder.is_dir():
        return {}
    named = ((_STEP.match(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in named if match and (path / files.CHECKSUMS).is_file()}


def open_checkpoint(
    path: Path, tensors: Mapping[str, Any], *, exact: bool
) -> tuple[dict[str, files.Checksum], dict[str, Any], Metadata]:
    """Checks everything about a checkpoint but the bytes of its tensors."""
    if not path.is_dir():
        find_checkpoint(path)
    manifest = files.read_manifest(path)
    files.check_present(path, manifest)
    files.check_contents(path, manifest, [files.METADATA, files.CONFIG])
    facts = read_facts(path)
    metadata = dcp.read_metadata(path, manifest)
    dcp.compare(metadata, tensors, path, exact=exact)
    return manifest, facts, metadata


def shares(manifest: Mapping[str, files.Checksum], ranks: Ranks) -> list[str]:
    """The files whose bytes this rank checks: largest first, dealt in turn."""
    return sorted(manifest, key=lambda name: (-manifest[name].size, name))[ranks.rank :: ranks.count]


def prepare(stage: Path, tensors: Mapping[str, Any]) -> None:
    """What each rank needs before the ranks write together."""
    dcp.check_tensors(tensors)
    stage.mkdir(parents=True, exist_ok=True)


def complete(stage: Path, manifest: Mapping[str, files.Checksum]) -> None:
    """Rank 0 sees every rank's files, and lists them: from here on the checkpoint is complete."""
    unseen = sorted(name for name in manifest if not (stage / name).is_file())
    if unseen:
        raise CheckpointError(
            f"files that other ranks wrote are not here: {files.listed(unseen)}",
            where=str(stage),
            hint="run.dir must lie on a file system that all nodes share",
        )
    files.write_manifest(stage, manifest)
    files.sync_folder(stage)


def to_json(facts: Mapping[str, Any]) -> str:
    """Facts as JSON text."""
    versions = {"torch": str(torch.__version__)}
    try:
        return json.dumps({**versions, **facts}, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as fault:
        raise CheckpointError(f"the facts of a checkpoint must be JSON: {fault}") from None
