"""Weights to begin with that lie in a checkpoint of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from mm_core.errors import CheckpointError
from mm_core.train import checkpoint_dcp as dcp
from mm_core.train import checkpoint_io as files
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint import shares
from mm_core.train.checkpoint_reading import find_checkpoint


class RunSource:
    """A checkpoint of a run, or a run's newest. With `ema`, what has no average (buffers, frozen
    parameters) comes from the model. `otherwise` is what to do where there is no average."""

    others: Sequence[str] = ()

    def __init__(
        self,
        path: Path,
        weights: Literal["model", "ema"],
        otherwise: str = "set init_from.weights to model",
    ) -> None:
        folder = find_checkpoint(path)
        self._folder = folder
        self._manifest = files.read_manifest(folder)
        files.check_present(folder, self._manifest)
        files.check_contents(folder, self._manifest, [files.METADATA])
        self._metadata = dcp.read_metadata(folder, self._manifest)
        stored = self._metadata.state_dict_metadata
        self._parts = {
            name: part
            for part in ("model", weights)
            for full in stored
            if (name := full.removeprefix(f"{part}.")) != full
        }
        if weights not in self._parts.values():
            raise CheckpointError(
                f"this checkpoint holds no {'average of the weights' if weights == 'ema' else 'weights'}",
                where=str(folder),
                hint=f"{otherwise}, or choose a checkpoint of a run with `ema`",
            )
        self.shapes = {
            name: tuple(stored[f"{part}.{name}"].size)  # type: ignore[union-attr]  # checked by read_metadata
            for name, part in self._parts.items()
        }
        self.dtypes = {
            name: stored[f"{part}.{name}"].properties.dtype  # type: ignore[union-attr]
            for name, part in self._parts.items()
        }

    def verify(self) -> None:
        """Checks every file's checksum, each by one of the ranks. DamagedError for one that is wrong."""
        files.check_contents(self._folder, self._manifest, shares(self._manifest, Ranks.current()))

    def compare(self, state: Mapping[str, Tensor]) -> None:
        """CheckpointError that lists every name or shape of a model that differs from the checkpoint's."""
        dcp.compare(self._metadata, {"model": state}, self._folder, exact=False)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copies stored tensors, by their names, into tensors of their shape (plain, or DTensors of which
        each rank reads its shard), cast to their dtype. Called by all ranks, with the same names."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, target in targets.items():
            parts.setdefault(self._parts[name], {})[name] = target.detach()
        dcp.read_tensors(self._folder, self._metadata, parts, alone=Ranks.current().alone)
