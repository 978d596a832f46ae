"""Weights to begin with that lie in a checkpoint of ours."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import open_checkpoint
from mm_core.errors import CheckpointError
from mm_core.runtime.ranks import Ranks

if TYPE_CHECKING:
    from mm_core.loading.left_out import ExternalWeights


class CheckpointSource:
    """A checkpoint of a run, or a run's newest. With `ema`, what has no average (buffers, frozen
    parameters) comes from the model. `otherwise` is what to do where there is no average."""

    others: Sequence[str] = ()

    def __init__(
        self,
        path: Path | OpenedCheckpoint,
        weights: Literal["model", "ema"],
        otherwise: str = "set init_from.weights to model",
    ) -> None:
        self.checkpoint = open_checkpoint(path)
        self.folder = self.checkpoint.folder
        self._base: ExternalWeights | None = None
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
                f"this checkpoint holds no {'average of the weights' if weights == 'ema' else 'weights'}",
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

    def join(self, base: ExternalWeights, state: Mapping[str, Tensor]) -> None:
        """Has it hold what it leaves to files, in the shapes and dtypes that `state` has for them."""
        self._base = base
        self.shapes |= {name: tuple(state[name].shape) for name in base.names}
        self.dtypes |= {name: state[name].dtype for name in base.names}

    def fingerprint(self) -> str:
        """Of its tensors' files, by their checksums."""
        rows = sorted((name, entry.size, entry.crc32) for name, entry in self.checkpoint.checksums.items())
        held = [row for row in rows if row[0] not in (files.FACTS, files.CONFIG)]
        return hashlib.sha256(repr(held).encode()).hexdigest()

    def verify(self) -> None:
        """Checks every file's checksum, each by one of the ranks, the first time that it is called.
        DamagedError for one that is wrong."""
        if self._verified:
            return
        self.checkpoint.check(Ranks.current())
        self._verified = True

    def check_fits(self, state: Mapping[str, Tensor]) -> None:
        """CheckpointError that lists every name or shape of a model that differs from the checkpoint's."""
        base = self._base.names if self._base is not None else ()
        own = {name: tensor for name, tensor in state.items() if name not in base}
        dcp.check_fits(self.checkpoint.metadata, {"model": own}, self.folder, exact=False)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copies stored tensors, by their names, into tensors of their shape (plain, or DTensors of which
        each rank reads its shard), cast to their dtype. Called by all ranks, with the same names."""
        base = self._base.names if self._base is not None else ()
        if self._base is not None and (beside := {n: t for n, t in targets.items() if n in base}):
            self._base.fill(beside)
        parts: dict[str, dict[str, Tensor]] = {}
        for name, target in targets.items():
            if name in base:
                continue
            parts.setdefault(self._parts[name], {})[name] = target.detach()
        if parts:
            dcp.read_tensors(self.folder, self.checkpoint.metadata, parts, alone=Ranks.current().alone)
