"""The ranks of a run: exchanging values, and agreeing on errors so that no rank waits for a failed one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mm_core.errors import CheckpointError
from mm_core.runtime.groups import cpu_group

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run as seen by this process; without a process group it is alone.

    Attributes:
        rank: this process's number.
        count: number of ranks.
        alone: whether there is no process group.
    """

    rank: int
    count: int
    alone: bool
    group: dist.ProcessGroup | None = None
    """The process group used for communication; None for the default one."""

    @classmethod
    def current(cls) -> Ranks:
        """The ranks of the default process group, with this process's own rank."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), alone=False)
        return cls(0, 1, alone=True)

    @classmethod
    def in_own_group(cls) -> Ranks:
        """The ranks in a new process group for a thread, while the loop uses the default group.

        Called by all ranks.
        """
        ranks = cls.current()
        return ranks if ranks.alone else cls(ranks.rank, ranks.count, False, cpu_group())

    def share(self, count: int) -> range:
        """This rank's share of a number of equal pieces of work, which ranks take in turn."""
        return range(self.rank, count, self.count)

    def gather(self, item: T) -> list[T]:
        """Collects an item from every rank, in rank order, on every rank."""
        if self.alone:
            return [item]
        items: list[Any] = [None] * self.count
        dist.all_gather_object(items, item, group=self.group)
        return items

    def gather_first(self, item: T) -> list[T]:
        """Collects an item from every rank on rank 0 ([] elsewhere), for items too large to send to all."""
        if self.alone:
            return [item]
        items: list[Any] = [None] * self.count if self.rank == 0 else []
        dist.gather_object(item, items or None, dst=0, group=self.group)
        return items

    def from_first(self, item: T) -> T:
        """Sends rank 0's item to every rank and returns it."""
        if self.alone:
            return item
        items = [item]
        dist.broadcast_object_list(items, src=0, group=self.group)
        return items[0]

    def agree(self, doing: str, work: Callable[[], T]) -> T:
        """Runs `work` on every rank and returns this rank's result once all ranks have succeeded.

        An error on any rank raises one CheckpointError with the same text on all of them: no rank continues
        alone, and none waits for a failed one.

        Args:
            doing: what the work does, for the message of an error that is not a CheckpointError.
            work: called without arguments.
        """
        given: list[T] = []
        culprit, fault, cause = self.rank, None, None
        try:
            given.append(work())
        except (Exception, CheckpointException) as raised:
            culprit, cause = blame(raised, self.rank)
            fault = cause if isinstance(cause, CheckpointError) else explain(doing, cause)
        failed = [(rank, error) for rank, error in self.gather((culprit, fault)) if error is not None]
        if failed:
            rank, error = min(failed, key=lambda pair: pair[0])
            raise (error if self.count == 1 else at_rank(rank, error)) from cause
        return given[0]

    def on_first(self, doing: str, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 only and returns its result on every rank; errors are raised on all ranks."""
        given = self.agree(doing, work if self.rank == 0 else lambda: None)
        return cast(T, self.gather(given)[0])


def gather_rows(row: Sequence[float] | Tensor) -> Tensor:
    """Collects n numbers from every rank into a CPU tensor [ranks, n], in rank order, on every rank.

    One small collective; [1, n] for a single process.

    Args:
        row: numbers, which become float64, or a tensor [n] on CPU.
    """
    mine = row if isinstance(row, Tensor) else torch.tensor(row, dtype=torch.float64, device="cpu")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine[None]
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)
    return torch.stack(table)


def sum_rows(row: Sequence[float] | Tensor, counts: bool = True) -> Tensor:
    """Sums n numbers over all ranks, in rank order, so that every rank has bit-identical results [n].

    Args:
        row: as for `gather_rows`.
        counts: false where another rank adds the same numbers.
    """
    return gather_rows(row if counts else [0.0] * len(row)).sum(0)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of a tensor on the device over all ranks, in its memory; alone, the tensor as it is."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def tensor_from_first(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Sends rank 0's tensor to every rank: a CPU tensor with the shape and dtype of `like`, on each.

    Args:
        tensor: rank 0's; None on other ranks.
        like: has the full shape; on any device, sharded or not.
    """
    if tensor is None:
        sent = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    else:
        sent = tensor.detach().to("cpu", like.dtype).contiguous()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(sent.flatten().view(torch.uint8), 0)  # as bytes: gloo does not know every dtype
    return sent


def on_any_rank(flag: bool) -> bool:
    """Whether a flag is set on any rank. Called by all ranks."""
    return bool(gather_rows([float(flag)]).any())


def blame(raised: BaseException, rank: int) -> tuple[int, BaseException]:
    """The rank on which an error happened, and the error itself.

    torch.distributed.checkpoint raises one rank's error on all ranks, wrapped in its own exception.
    """
    if not isinstance(raised, CheckpointException) or not raised.failures:
        return rank, raised
    culprit, (cause, _) = min(raised.failures.items(), key=lambda pair: pair[0])
    if isinstance(cause, KeyboardInterrupt | SystemExit):
        raise cause
    return culprit, cause


def explain(doing: str, fault: BaseException) -> CheckpointError:
    """The error message for an exception of the operating system or of torch.

    Args:
        doing: what failed.
        fault: the exception.
    """
    text = " ".join(str(fault).split())
    if isinstance(fault, OSError):
        remedy = "check free space, quota and permissions of the run folder, on every node"
        return CheckpointError(f"{doing} failed: {text}", hint=remedy)
    return CheckpointError(f"{doing} failed: {type(fault).__name__}: {text}"[:2000])


def at_rank(rank: int, fault: CheckpointError) -> CheckpointError:
    """The error with the rank on which it happened added to its `where`, unless it names one already."""
    if fault.where and str(fault.where).startswith("rank "):
        return fault
    place = f"rank {rank}, {fault.where}" if fault.where else f"rank {rank}"
    return type(fault)(fault.what, where=place, accepted=fault.accepted, hint=fault.hint)
