"""torch.distributed.checkpoint made safe: nothing in a checkpoint directory can run code.

`.metadata` is read by `checkpoint_metadata`; tensors are read by torch with `weights_only`, from archives
that hold no more than their bytes; items that are no tensors, which torch would unpickle freely, are refused.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import IO, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mm_core.checkpoint.files.fingerprints import Fingerprint
from mm_core.checkpoint.files.host_copies import State
from mm_core.checkpoint.files.layout import Checksum, DamagedError
from mm_core.checkpoint.files.mismatch import Mismatch, size_text
from mm_core.checkpoint.files.tensor_files import check_finite, write_file
from mm_core.errors import CheckpointError
from mm_core.runtime.ranks import Ranks
from mm_core.weights.archives import check_archive


class _Writer(FileSystemWriter):
    """One file a rank, written and summed by `write_file`. Leaves out where the checkpoint was written: it
    may be moved, and the path is nobody's business."""

    def __init__(self, folder: Path, expected: Mapping[str, Fingerprint]) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self._folder, self._expected = folder, expected
        self.sums: dict[str, Checksum] = {}

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        name = f"{plan.storage_data.prefix}0.distcp"
        # Nothing else is among them: `check_tensors` has seen to that.
        tensors = [data for item in plan.items if isinstance(data := planner.resolve_data(item), Tensor)]
        final = self._folder.name.partition(".tmp-")[0]
        check_finite([item.index.fqn for item in plan.items], tensors, final)
        results = []
        if tensors:
            expected = [self._expected.get(item.index.fqn) for item in plan.items]
            written = write_file(self._folder / name, tensors, expected)
            self.sums[name] = Checksum(written.size, written.crc32)
            for item, (offset, length) in zip(plan.items, written.places, strict=True):
                place = filesystem._StorageInfo(name, offset, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
        done.set_result(results)
        return done


class _Reader(FileSystemReader):
    """Reads by metadata that has been checked already."""

    def __init__(self, folder: Path, checked: Metadata) -> None:
        super().__init__(folder)
        self._checked = checked

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._checked

    def _slice_file(self, file: IO[bytes], sinfo: filesystem._StorageInfo) -> IO[bytes]:
        check_archive(file, sinfo.offset, sinfo.length)
        return super()._slice_file(file, sinfo)


class _LoadPlanner(DefaultLoadPlanner):
    """Loads tensors only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        raise CheckpointError(f"{read_item.storage_index.fqn} is not a tensor")


def write_tensors(
    folder: Path, tensors: State, *, ranks: Ranks, expected: Mapping[str, Fingerprint] = MappingProxyType({})
) -> dict[str, Checksum]:
    """This rank's share of the tensors, and on rank 0 `.metadata`; files are on disk when it returns.

    Replicated tensors are written once, by the rank with the least to write. Returns the checksums of the
    files that this rank wrote, taken from the bytes as they went out. CheckpointError for a tensor that
    differs from its fingerprint in `expected`.
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
    """DamagedError for a tensor of the files `own` whose archive claims to hold more than it does."""
    for name in own:
        places = [place for place in checked.storage_data.values() if place.relative_path == name]
        with (folder / name).open("rb") as file:
            for place in places:
                try:
                    check_archive(file, place.offset, place.length)
                except (CheckpointError, RuntimeError, ValueError) as fault:
                    what = f"{name} holds a tensor that is refused: {fault}"
                    raise DamagedError(what, where=str(folder), hint="do not trust this checkpoint") from None


def read_tensors(folder: Path, checked: Metadata, tensors: State, *, alone: bool) -> None:
    """Fills `tensors` in place from a checkpoint whose metadata has been checked against them."""
    with _quiet(alone):
        load(
            _sections(tensors), storage_reader=_Reader(folder, checked), planner=_LoadPlanner(), no_dist=alone
        )


def check_fits(checked: Metadata, tensors: State, folder: Path, *, exact: bool) -> None:
    """CheckpointError that lists every missing, unexpected and misshapen tensor; nothing is touched.

    exact: also compares dtypes, and refuses tensors of the checkpoint that are not asked for, but for
    those of an average that the run no longer keeps.
    """
    wanted = {f"{part}.{name}": tensor for part, named in tensors.items() for name, tensor in named.items()}
    parts = tuple(f"{part}." for part in tensors)
    spared = () if "ema" in tensors else ("ema.",)
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
            f"this checkpoint is of another model or optimizer: {mismatch}",
            where=str(folder),
            hint="compare its config.yaml with yours, or choose another run.name to begin anew",
        )


def _kind(shape: torch.Size, dtype: torch.dtype, exact: bool) -> str:
    return f"{size_text(shape)} {str(dtype).removeprefix('torch.')}" if exact else size_text(shape)


def _sections(tensors: State) -> dict[str, dict[str, Tensor]]:
    # An empty dict would count as a leaf that is no tensor.
    return {part: dict(named) for part, named in tensors.items() if named}


def _quiet(alone: bool) -> AbstractContextManager[object]:
    """Without torch's warning that there is no process group: here that is meant."""
    return warnings.catch_warnings(action="ignore", category=UserWarning) if alone else nullcontext()
