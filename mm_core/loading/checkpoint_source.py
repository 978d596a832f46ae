"""A checkpoint of mm_core as the source of a run's initial weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import open_checkpoint
from mm_core.contracts import WeightPlan
from mm_core.errors import CheckpointError
from mm_core.runtime.ranks import Ranks


class CheckpointSource:
    """A checkpoint, or a run's newest one, whose weights are loaded into a task.

    With `weights="ema"`, tensors without an average (buffers, frozen parameters) come from the model.

    Args:
        path: a run or checkpoint folder, or an opened checkpoint.
        weights: load the model's weights or their average.
        otherwise: next action for the error if the checkpoint has no average.

    Attributes:
        ranks: the ranks that read it together.

    Raises:
        CheckpointError: no such checkpoint, or it does not contain these weights.
    """

    others: Sequence[str] = ()

    def __init__(
        self,
        path: Path | OpenedCheckpoint,
        weights: Literal["model", "ema"],
        otherwise: str = "set init_from.weights to model",
    ) -> None:
        self.checkpoint = open_checkpoint(path)
        self.folder, self.ranks = self.checkpoint.folder, Ranks.current()
        self._base: WeightPlan | None = None
        self._verified = False
        stored = self.checkpoint.metadata.state_dict_metadata
        self._parts = {
            name: part
            for part in ("model", weights)
            for full in stored
            if (name := full.removeprefix(f"{part}.")) != full
        }
        if weights not in self._parts.values():
            raise CheckpointError(
                f"this checkpoint contains no {'average of the weights' if weights == 'ema' else 'weights'}",
                where=str(self.folder),
                hint=f"{otherwise}, or choose a checkpoint of a run with `ema`",
            )
        entries = {
            name: entry
            for name, part in self._parts.items()
            if isinstance(entry := stored[f"{part}.{name}"], TensorStorageMetadata)
        }
        self.shapes = {name: tuple(entry.size) for name, entry in entries.items()}
        self.dtypes = {name: entry.properties.dtype for name, entry in entries.items()}

    def join(self, base: WeightPlan, state: Mapping[str, Tensor]) -> None:
        """Adds the frozen weights that the checkpoint does not store, with shapes and dtypes of `state`.

        Args:
            base: the weights that are read from their original files.
            state: the task's tensors, by path in the task.
        """
        self._base = base
        self.shapes |= {name: tuple(state[name].shape) for name in base.names}
        self.dtypes |= {name: state[name].dtype for name in base.names}

    def fingerprint(self) -> str:
        """sha256 over the checksums of the checkpoint's tensor files."""
        rows = sorted((name, entry.size, entry.crc32) for name, entry in self.checkpoint.checksums.items())
        held = [row for row in rows if row[0] not in (files.FACTS, files.CONFIG)]
        return hashlib.sha256(repr(held).encode()).hexdigest()

    def verify(self) -> None:
        """Checks the checksums of the checkpoint's files once, shared between the ranks.

        Raises:
            DamagedError: a file with a wrong checksum.
        """
        if self._verified:
            return
        self.checkpoint.check(self.ranks)
        self._verified = True

    def check_fits(self, state: Mapping[str, Tensor]) -> None:
        """Compares the names and shapes of a model's tensors with the checkpoint's.

        Raises:
            CheckpointError: lists every name and shape that differs.
        """
        base = self._base.names if self._base is not None else ()
        own = {name: tensor for name, tensor in state.items() if name not in base}
        dcp.check_fits(self.checkpoint.metadata, {"model": own}, self.folder, exact=False)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copies the checkpoint's tensors into a task's tensors by name, cast to their dtype.

        Call it on all ranks, with the same names.

        Args:
            targets: tensors of the stored shapes: plain, or DTensors, of which each rank reads its shard.
        """
        base = self._base.names if self._base is not None else ()
        if self._base is not None and (beside := {n: t for n, t in targets.items() if n in base}):
            self._base.fill(beside)
        parts: dict[str, dict[str, Tensor]] = {}
        for name, target in targets.items():
            if name in base:
                continue
            parts.setdefault(self._parts[name], {})[name] = target.detach()
        if parts:
            dcp.read_tensors(self.folder, self.checkpoint.metadata, parts, alone=self.ranks.alone)
