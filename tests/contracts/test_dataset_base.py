"""Plain dicts of an author become batches; what cannot be stacked is an error with the author's line."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from mm_core.contracts import DataRanks, DatasetBase, DictBatch, Randomness, SampleKey
from mm_core.data.loading.loader import CodeError, MicroBatchLoader
from mm_core.data.loading.sampler import BatchPlan
from mm_core.errors import ContractError


class Sounds(DatasetBase):
    """Samples of all types; `changes` replaces values of sample 1."""

    def __init__(self, **changes: object) -> None:
        self.changes = changes

    def __len__(self) -> int:
        return 4

    def sample_at(self, index: int, rng: Randomness) -> dict:
        sample = {
            "audio": rng.normal((6,), "audio"),
            "table": np.full((2, 2), index, dtype=np.int16),
            "label": index,
            "loud": index == 1,
            "share": index / 2,
            "mel": np.float64(index),
            "words": f"sound {index}",
            "notes": [index] * index,
            "id": f"sounds/{index}.wav",
        }
        return {**sample, **self.changes} if index == 1 else sample


def read(dataset: DatasetBase, epoch: int = 0) -> list[DictBatch]:
    plan = BatchPlan(
        num_samples=4, micro_batch_size=2, global_batch_size=2, seed=1, order="sequential", drop_last=True
    )
    loader = MicroBatchLoader(
        dataset,
        plan,
        batch_transform=None,
        rng=Randomness(1),
        share=DataRanks(),
        steps=range(2 * epoch, 2 * epoch + 2),
        workers=0,
        prefetch=2,
        pin_memory=False,
        device_type="cpu",
    )
    return list(loader)


def test_samples_are_stacked_by_name() -> None:
    first, second = read(Sounds())
    assert first.keys == [SampleKey(0, 0), SampleKey(0, 1)] and first.sample_weights.tolist() == [1.0, 1.0]
    assert second.ids == ["sounds/2.wav", "sounds/3.wav"]
    assert [*first.values] == ["audio", "table", "label", "loud", "share", "mel", "words", "notes"]
    tensors = {name: value for name, value in first.values.items() if isinstance(value, torch.Tensor)}
    assert {name: (list(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        "audio": ([2, 6], torch.float32),
        "table": ([2, 2, 2], torch.int16),
        "label": ([2], torch.int64),
        "loud": ([2], torch.bool),
        "share": ([2], torch.float32),
        "mel": ([2], torch.float64),
    }
    assert second["words"] == ["sound 2", "sound 3"] and second["notes"] == [[2, 2], [3, 3, 3]]
    assert second["label"].tolist() == [2, 3]


def test_samples_depend_on_epoch_and_index_alone() -> None:
    one, same, later = read(Sounds()), read(Sounds()), read(Sounds(), epoch=1)
    assert all(torch.equal(a["audio"], b["audio"]) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0]["audio"], later[0]["audio"])
    assert torch.equal(Sounds()[2]["audio"], Sounds()[2]["audio"])


def test_a_batch_moves_its_tensors_and_names_what_it_has() -> None:
    moved = read(Sounds())[0].to(torch.device("meta"))
    assert moved["audio"].is_meta and moved["words"] == ["sound 0", "sound 1"]
    with pytest.raises(ContractError) as caught:
        _ = moved["auido"]
    line = inspect.getsourcelines(test_a_batch_moves_its_tensors_and_names_what_it_has)[1] + 4
    assert caught.value.where == f"{__file__}, line {line}"
    assert caught.value.what == "the samples have no 'auido'"
    assert caught.value.hint == "did you mean 'audio'?"
    assert str(caught.value.accepted).startswith("audio, table, label")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"audio": torch.zeros(5)}, "audio is [6] float32 in sample 0, and [5] float32 in sample 1"),
        ({"audio": torch.zeros(6).double()}, "audio is [6] float32 in sample 0, and [6] float64 in sample 1"),
        ({"audio": None}, "audio is [6] float32 in sample 0, and a NoneType in sample 1"),
        ({"label": "one"}, "label is [] int64 in sample 0, and a str in sample 1"),
        ({"lable": 3}, "samples 0 and 1 differ in their names: only one has lable"),
    ],
)
def test_what_cannot_be_stacked_is_a_readable_error(changes: dict[str, object], what: str) -> None:
    with pytest.raises(ContractError) as caught:
        read(Sounds(**changes))
    assert caught.value.what == what
    assert caught.value.where == f"{__file__}, line {inspect.getsourcelines(Sounds)[1]}"


class Tuples(Sounds):
    def sample_at(self, index: int, rng: Randomness) -> tuple:
        return (index,)


class Unbatched(Sounds):
    def collate(self, samples: list[dict]) -> dict:
        return {"samples": samples}


class Misspelt(Sounds):
    def sample_at(self, index: int, rng: Randomness) -> dict:
        sample = super().sample_at(index, rng)
        return {"audio": sample["auido"]}


def test_what_is_no_sample_and_no_batch_is_a_readable_error() -> None:
    for made, what, accepted in (
        (Tuples, "sample 0 is a tuple", "a plain dict"),
        (Unbatched, "what collate returns is a dict", "a Batch"),
    ):
        with pytest.raises(CodeError) as caught:
            read(made())
        line = inspect.getsourcelines(made)[1]
        assert (caught.value.what, caught.value.accepted) == (what, accepted)
        assert caught.value.where == f"{made.__name__}, {__file__}, line {line}"


def test_an_error_in_a_sample_has_its_number_and_the_authors_line() -> None:
    with pytest.raises(CodeError, match="sample 0 raised KeyError: 'auido'") as caught:
        read(Misspelt())
    line = inspect.getsourcelines(Misspelt.sample_at)[1] + 2
    assert caught.value.where == f"{__file__}, line {line}"
