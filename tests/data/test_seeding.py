"""Datasets that draw from the process's own generators: the same sample draws the same, whoever reads it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_core.config.sections import LoaderSection
from mm_core.contracts import Batch, DataRanks, Randomness, seeded
from mm_core.data.loading.loader import CodeError, MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan
from mm_core.data.loading.seeding import build_dataset
from mm_core.errors import DataError
from mm_core.evaluation.batches import EvaluationData
from mm_core.plan.samples import Samples
from mm_core.plugin.registry import get_registry
from mm_core.training.training_samples import sample_lengths
from support.sites import clear_cache


def draws() -> list[float]:
    """One number of each generator that a dataset may draw from."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Drawing:
    """As users write them: draws from whatever generator is at hand. Indices in `bad` cannot be read."""

    def __init__(self, size: int = 12, bad: tuple[int, ...] = (), fault: type[Exception] = DataError) -> None:
        self.size, self.bad, self.fault = size, bad, fault
        self.begun = draws()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = draws()
        if index in self.bad:
            raise self.fault("it is broken")
        return {"found": found, "own": index}

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        batch = Batch(
            keys=[sample["key"] for sample in samples],
            sample_weights=torch.tensor([sample["weight"] for sample in samples]),
            ids=[str(sample["own"]) for sample in samples],
        )
        batch.found = [sample["found"] for sample in samples]
        batch.collated = draws()
        return batch


class Randomised(Drawing):
    """One that draws some numbers from the loader's generator, and some from others."""

    def sample_at(self, index: int, rng: Randomness) -> dict[str, Any]:
        return self[index] | {"uniform": rng.uniform("x")}


def transform(batch: Batch) -> Batch:
    batch.transformed = draws()
    return batch


def loader(
    dataset: Any,
    seed: int = 0,
    size: int = 2,
    *,
    rank: int = 0,
    data_parallel: int = 1,
    start_step: int = 0,
    end_step: int = 6,
    workers: int = 0,
) -> MicroBatchLoader:
    return MicroBatchLoader(
        dataset,
        BatchPlan(len(dataset), size, 4, 0, "random", True),
        batch_transform=transform,
        rng=Randomness(seed),
        share=DataRanks(rank, data_parallel),
        steps=range(start_step, end_step),
        workers=workers,
        prefetch=2,
        pin_memory=False,
        device_type="cpu",
    )


def content(batches: Any) -> list[Any]:
    return [(b.keys, b.ids, b.found, b.collated, b.transformed) for b in batches]


def of_samples(batches: Any) -> dict[Any, list[float]]:
    return {key: found for b in batches for key, found in zip(b.keys, b.found, strict=True)}


def test_a_sample_draws_the_same_whoever_reads_it_and_from_wherever_the_run_goes_on() -> None:
    """test_loader::test_content_does_not_depend_on_who_reads is the same of data workers."""
    dataset = Drawing(bad=(4, 7))
    whole = content(loader(dataset))
    ranks = [content(loader(dataset, rank=rank, data_parallel=2)) for rank in (0, 1)]
    assert [batch for pair in zip(*ranks, strict=True) for batch in pair] == whole, "ranks"
    resumed = content(loader(dataset, start_step=2, end_step=4)) + content(loader(dataset, start_step=4))
    assert resumed == whole[4:], "a resumed run"
    single = of_samples(loader(dataset, size=1))
    assert single == of_samples(loader(dataset, size=4)), "the size of a micro-batch"


def test_other_samples_epochs_and_seeds_draw_others() -> None:
    first, other = of_samples(loader(Drawing())), of_samples(loader(Drawing(), seed=1))
    assert len(first) == 24, "two epochs of 12"
    numbers = [number for found in (*first.values(), *other.values()) for number in found]
    assert len(set(numbers)) == len(numbers) == 2 * 24 * 3
    batches = [*loader(Drawing()), *loader(Drawing(), seed=1)]
    numbers = [number for batch in batches for number in (*batch.collated, *batch.transformed)]
    assert len(set(numbers)) == len(numbers) == 2 * 12 * 6


def test_generators_draw_apart_from_one_another() -> None:
    """Seeded alike, NumPy's and torch's would give the same bits."""
    with seeded(Randomness(3)):
        bits = [random.getrandbits(32), int(np.random.randint(0, 2**32, dtype=np.uint64))]
        bits.append(int(torch.randint(0, 2**32, ())))
    assert len(set(bits)) == 3


def test_a_replacement_draws_as_it_does_in_its_own_place() -> None:
    batches = list(loader(Drawing(bad=(3,)), end_step=3))
    own = {int(name): found for b in batches for name, found in zip(b.ids, b.found, strict=True)}
    whole = of_samples(loader(Drawing(), end_step=3))
    (batch,) = [batch for batch in batches if batch.failures]
    stand_in = int(batch.ids[[key.index for key in batch.keys].index(3)])
    assert stand_in != 3 and own[stand_in] == whole[(0, stand_in)]


def test_the_loaders_own_random_state_is_what_it_was() -> None:
    """What `sample_at` draws from its argument moves with none of this."""
    dataset = Randomised()
    sample = loader(dataset)._loader.dataset._read(5, 1)
    assert sample["uniform"] == Randomness(0).at("data", 1, 5).uniform("x")
    assert sample["found"] == of_samples(loader(Drawing()))[(1, 5)]


@contextmanager
def generators_untouched() -> Iterator[None]:
    """The process's generators go on behind the block as if there had been none."""
    begin: list[Callable[[int], object]] = [random.seed, np.random.seed, torch.manual_seed]
    for seed in begin:
        seed(11)
    draws()
    expected = draws()
    for seed in begin:
        seed(11)
    draws()
    yield
    assert draws() == expected


@pytest.mark.parametrize("fault", [DataError, ZeroDivisionError])
def test_the_training_process_draws_on_as_if_nothing_had_been_read(fault: type[Exception]) -> None:
    dataset = Drawing()
    with generators_untouched():
        reading = iter(loader(dataset))
        next(reading)
    with generators_untouched():
        list(reading)
    broken = Drawing(bad=tuple(range(12)), fault=fault)
    with generators_untouched(), pytest.raises(DataError) as caught:
        list(loader(broken))
    assert isinstance(caught.value, CodeError) == (fault is ZeroDivisionError)


@dataclass
class Section:
    """`data.loader` as an evaluation reads it."""

    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False


def test_an_evaluation_draws_the_same_in_every_pass_and_at_any_world_size() -> None:
    def read(rank: int, world: int, passes: int = 1, seed: int = 0) -> list[Any]:
        data = EvaluationData(
            Samples(Drawing()),
            where="data.validation",
            rows=8,
            micro_batch_size=2,
            ranks=DataRanks(rank, world),
            transform=transform,
            seed=seed,
            loader=Section(),  # type: ignore[arg-type]
            device=torch.device("cpu"),
        )
        return content(data.read(passes))

    alone = read(0, 1)
    assert len(alone) == 4 and read(0, 1, passes=2) == alone * 2
    assert [batch for pair in zip(read(0, 2), read(1, 2), strict=True) for batch in pair] == alone
    assert read(0, 1, seed=1) != alone


SPLIT = """
import random
from mm_core import Component, hookimpl

class Split:
    def __init__(self):
        self.files = random.sample(range(1000), 5)

@hookimpl
def mm_datasets():
    return [Component(name="split", target=f"{__name__}:Split")]
"""


@pytest.mark.usefixtures("toys")
def test_constructors_draw_by_the_seed_too(tmp_path: Path) -> None:
    """Else every rank, and every resume, would shuffle its files in another way."""
    file = tmp_path / "split.py"
    file.write_text(SPLIT)
    registry = get_registry((str(file),))
    try:
        with generators_untouched():
            first = build_dataset(registry, {"type": "split"}, 0).files  # type: ignore[attr-defined]
        random.seed()
        assert build_dataset(registry, {"type": "split"}, 0).files == first  # type: ignore[attr-defined]
        assert build_dataset(registry, {"type": "split"}, 1).files != first  # type: ignore[attr-defined]
    finally:
        clear_cache()


class Measured(Drawing):
    """Returns random guesses as the lengths of its samples."""

    def lengths(self) -> torch.Tensor:
        return torch.randint(1, 100, (len(self),))


def test_lengths_are_the_same_on_every_rank() -> None:
    dataset = Measured()

    def lengths(seed: int) -> list[int]:
        loader = LoaderSection(group_by_length=True)
        found = sample_lengths(loader, seed, dataset)
        assert found is not None
        return found.tolist()

    with generators_untouched():
        first = lengths(0)
    torch.manual_seed(1)  # another rank
    assert lengths(0) == first != lengths(1)
