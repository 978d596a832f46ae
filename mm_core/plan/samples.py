"""How a run reads the samples of a split: by their numbers, in buckets, or as a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mm_core.config.sections import RunConfig
from mm_core.data.cache.samples import CachedSamples
from mm_core.data.loading.bucketed import BucketedSamples, BucketOrder, in_evaluation, used
from mm_core.data.loading.plain import PlainBatches
from mm_core.data.loading.sampler import BatchPlan, EvenRows, Order


@dataclass(frozen=True)
class Samples:
    """The samples of a split, each in the size that its dataset gives it.

    Attributes:
        dataset: has them.
        stream: the dataset, if its samples have no numbers, and no order but their author's; else None.
    """

    dataset: Any
    stream: PlainBatches | None = None

    @property
    def source(self) -> object:
        """The dataset without its buckets."""
        return self.dataset

    @property
    def available(self) -> int:
        """Number of samples that an evaluation can use."""
        return len(self.dataset)

    def read_from(self, cached: CachedSamples) -> Samples:
        """The same samples, read from the feature cache."""
        return Samples(cached)

    def order(self, config: RunConfig, global_batch_size: int, lengths: Tensor | None = None) -> Order:
        """The planned order of a run's training samples: which samples each step uses.

        Args:
            config: the run's config.
            global_batch_size: samples per step over all ranks; in buckets, of the largest one.
            lengths: length of each sample, for `group_by_length`.
        """
        return BatchPlan(
            num_samples=len(self.dataset),
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=global_batch_size,
            seed=config.run.seed,
            order=config.data.loader.sampler,
            drop_last=config.data.loader.drop_last,
            repeat_first=config.train.overfit_one_batch,
            lengths=lengths,
        )

    def held_out(self, rows: int, micro_batch_size: int, shares: int, seed: int) -> Order:
        """The order of `rows` samples in an evaluation, evenly spaced, over `shares` of the ranks."""
        size, total = micro_batch_size, len(self.dataset)
        return EvenRows(rows, size, size * shares, seed, "sequential", drop_last=False, total=total)


class InBuckets(Samples):
    """Samples that have the sizes of their buckets."""

    dataset: BucketedSamples

    @property
    def source(self) -> object:
        """See `Samples.source`."""
        return self.dataset.dataset

    @property
    def available(self) -> int:
        """See `Samples.available`: those that have a bucket."""
        return used(self.dataset)

    def read_from(self, cached: CachedSamples) -> Samples:
        """See `Samples.read_from`: in the same buckets."""
        return InBuckets(BucketedSamples(cached, self.dataset.buckets, self.dataset.of_row))

    def order(self, config: RunConfig, global_batch_size: int, lengths: Tensor | None = None) -> BucketOrder:
        """See `Samples.order`."""
        count, loader = global_batch_size // config.train.micro_batch_size, config.data.loader
        return BucketOrder(
            samples=self.dataset,
            micro_batches_per_step=count,
            group=count // loader.buckets_per_step,
            seed=config.run.seed,
            order=loader.sampler,
            rests=loader.rests,
            repeat_first=config.train.overfit_one_batch,
        )

    def held_out(self, rows: int, micro_batch_size: int, shares: int, seed: int) -> Order:
        """See `Samples.held_out`; micro-batches have the sizes of their buckets."""
        return in_evaluation(self.dataset, rows, shares, seed)
