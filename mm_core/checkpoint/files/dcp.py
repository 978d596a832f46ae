"""torch.distributed.checkpoint made safe: nothing in a checkpoint folder can run code.

`.metadata` is read by the module `metadata`; torch reads tensors with `weights_only`, from archives that
unpack to no more than their size. It refuses what is not a tensor, which torch would unpickle freely.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import IO

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mm_core.checkpoint.files.fingerprints import Fingerprint, key_of
from mm_core.checkpoint.files.host_copies import State
from mm_core.checkpoint.files.layout import DISTRUST, Checksum, DamagedError
from mm_core.checkpoint.files.mismatch import Mismatch, size_text
from mm_core.checkpoint.files.tensor_files import check_finite, write_file
from mm_core.errors import CheckpointError
from mm_core.files import open_plain
from mm_core.runtime.ranks import Ranks
from mm_core.weights.archives import check_archive


class _Writer(FileSystemWriter):
    """Writes one file per rank, with checksum, by `write_file`. The path of the checkpoint is not recorded:
    the checkpoint may be moved, and the path may be private."""

    def __init__(self, folder: Path, expected: Mapping[str, Fingerprint]) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self._folder, self._expected = folder, expected
        self.sums: dict[str, Checksum] = {}

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        name = f"{plan.storage_data.prefix}0.distcp"
        # All items are tensors: `check_tensors` has checked that.
        tensors = [data for item in plan.items if isinstance(data := planner.resolve_data(item), Tensor)]
        final = self._folder.name.partition(".tmp-")[0]
        check_finite([item.index.fqn for item in plan.items], tensors, final)
        results = []
        if tensors:
            expected = [self._expected_of(item.index) for item in plan.items]
            written = write_file(self._folder / name, tensors, expected)
            self.sums[name] = Checksum(written.size, written.crc32)
            for item, (offset, length) in zip(plan.items, written.places, strict=True):
                place = filesystem._StorageInfo(name, offset, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
        done.set_result(results)
        return done

    def _expected_of(self, index: MetadataIndex) -> Fingerprint | None:
        """The fingerprint of a piece; that of a shard by rows, the only one of its rank, has no offset."""
        return self._expected.get(key_of(index.fqn, index.offset), self._expected.get(index.fqn))


class _Reader(FileSystemReader):
    """Reads with metadata that is already checked."""

    def __init__(self, folder: Path, checked: Metadata) -> None:
        super().__init__(folder)
        self._checked = checked

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._checked

    def _slice_file(self, file: IO[bytes], sinfo: filesystem._StorageInfo) -> IO[bytes]:
        check_archive(file, sinfo.offset, sinfo.length)
        return super()._slice_file(file, sinfo)


def write_tensors(
    folder: Path, tensors: State, *, ranks: Ranks, expected: Mapping[str, Fingerprint] = MappingProxyType({})
) -> dict[str, Checksum]:
    """Writes this rank's share of a checkpoint's tensors (rank 0: also `.metadata`), and waits for the disk.

    Replicated tensors are written once, by the rank with the least to write.

    Args:
        folder: the checkpoint's temporary folder.
        tensors: the training state.
        ranks: the ranks that write together.
        expected: fingerprints of the live tensors, by name.

    Returns:
        Checksums of the files that this rank wrote, computed from the bytes as they were written.

    Raises:
        CheckpointError: a tensor differs from its fingerprint in `expected`.
    """
    writer = _Writer(folder, expected)
    with _quiet(ranks.alone):
        save(
            _sections(tensors),
            storage_writer=writer,
            planner=DefaultSavePlanner(),
            process_group=ranks.group,
            no_dist=ranks.alone,
        )
    return writer.sums


def check_archives(folder: Path, checked: Metadata, own: Collection[str]) -> None:
    """Raises DamagedError if a tensor archive in the checkpoint files `own` claims more bytes than it has."""
    for name in own:
        places = [place for place in checked.storage_data.values() if place.relative_path == name]
        with open_plain(folder / name) as file:
            for place in places:
                try:
                    check_archive(file, place.offset, place.length)
                except (CheckpointError, RuntimeError, ValueError) as fault:
                    what = f"{name} contains a tensor that was refused: {fault}"
                    raise DamagedError(what, where=str(folder), hint=DISTRUST) from None


def read_tensors(folder: Path, checked: Metadata, tensors: State, *, alone: bool) -> None:
    """Reads a checkpoint's tensors in place; its metadata must be checked against `tensors` before.

    Args:
        folder: the checkpoint.
        checked: its metadata.
        tensors: the tensors to fill, by part and name; DTensors are filled with this rank's shard.
        alone: whether the process has no other ranks, or reads without them.
    """
    with _quiet(alone):
        load(_sections(tensors), storage_reader=_Reader(folder, checked), no_dist=alone)


def check_fits(checked: Metadata, tensors: State, folder: Path, *, exact: bool) -> None:
    """Raises CheckpointError if a checkpoint has missing, unexpected or misshapen tensors; lists all of them.

    Args:
        checked: the checkpoint's metadata.
        tensors: the tensors to be loaded; they are not changed.
        folder: the checkpoint, for the error.
        exact: also compare dtypes, and refuse tensors in the checkpoint that were not requested, except an
            average (ema) that the run no longer keeps, or the loss scale of another precision.
    """
    wanted = {f"{part}.{name}": tensor for part, named in tensors.items() for name, tensor in named.items()}
    parts = tuple(f"{part}." for part in tensors)
    spared = tuple(f"{part}." for part in ("ema", "loss_scale") if part not in tensors)
    stored = {
        name: entry
        for name, entry in checked.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        and ((exact and not name.startswith(spared)) or name.startswith(parts))
    }
    misshapen = [
        f"{name} ({found} in the checkpoint, {needed} in the model)"
        for name in sorted(wanted.keys() & stored.keys())
        if (found := _kind(stored[name].size, stored[name].properties.dtype, exact))
        != (needed := _kind(wanted[name].shape, wanted[name].dtype, exact))
    ]
    missing, unexpected = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if mismatch := Mismatch(missing, unexpected, misshapen):
        raise CheckpointError(
            f"this checkpoint belongs to another model or optimizer: {mismatch}",
            where=str(folder),
            hint="compare its config.yaml with yours, or choose another run.name to start a new run",
        )


def _kind(shape: torch.Size, dtype: torch.dtype, exact: bool) -> str:
    return f"{size_text(shape)} {str(dtype).removeprefix('torch.')}" if exact else size_text(shape)


def _sections(tensors: State) -> dict[str, dict[str, Tensor]]:
    # An empty dict would count as a leaf that is not a tensor.
    return {part: dict(named) for part, named in tensors.items() if named}


def _quiet(alone: bool) -> AbstractContextManager[object]:
    """Suppresses torch's warning about a missing process group, which is intended in a single process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning) if alone else nullcontext()
