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
    parameters) comes from the model. Every file's checksum is checked by one of the ranks."""

    others: Sequence[str] = ()

    def __init__(self, path: Path, weights: Literal["model", "ema"]) -> None:
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
                hint="set init_from.weights to model, or choose a checkpoint of a run with `ema`",
            )
        self.shapes = {
            name: tuple(stored[f"{part}.{name}"].size)  # type: ignore[union-attr]  # checked by read_metadata
            for name, part in self._parts.items()
        }

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copies stored tensors, by their names, into tensors of their shape (plain, or DTensors of which
        each rank reads its shard), cast to their dtype. Called by all ranks, with the same names."""
        ranks = Ranks.current()
        files.check_contents(self._folder, self._manifest, shares(self._manifest, ranks))
        parts: dict[str, dict[str, Tensor]] = {}
        for name, target in targets.items():
            parts.setdefault(self._parts[name], {})[name] = target.detach()
        dcp.read_tensors(self._folder, self._metadata, parts, alone=ranks.alone)
