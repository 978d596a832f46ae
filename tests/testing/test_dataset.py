"""The conformance kit of datasets: shipped ones pass, and each check refuses a faulty one."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mm_core.builtin.tiny import text_rows
from mm_core.contracts import DatasetBase, Randomness, Source
from mm_core.data.datasets.media_text import MediaTextDataset
from mm_core.data.datasets.text_rows import TextRowsDataset
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.errors import ContractError, DataError
from mm_core.testing.data.datasets import KIT
from mm_core.testing.data.reading import SEED
from support.conformance import examined, refusal

SHIPPED = ("core/video_text", "core/text_rows", "core/media_text", "internvl/conversations")


@pytest.mark.parametrize(
    "name", [*SHIPPED[:3], pytest.param("internvl/conversations", marks=pytest.mark.slow)]
)
def test_shipped_datasets_keep_their_contract(name: str) -> None:
    assert [f"{o.check}: {o.reason}" for o in examined(name, ranks=False) if o.status == "failed"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_datasets_read_the_same_in_workers(name: str) -> None:
    outcome = examined(name).run("workers")
    assert (outcome.status, outcome.reason) == ("passed", "")


def clips(**members: object) -> type:
    return type("Faulty", (VideoTextDataset,), members)


def sampled(change) -> type:
    """A dataset of clips whose samples differ from the true ones."""

    def sample_at(self, index, rng):
        return change(VideoTextDataset.sample_at(self, index, rng))

    def getitem(self, index):
        return change(VideoTextDataset.__getitem__(self, index))

    return clips(sample_at=sample_at, __getitem__=getitem)


def collated(change, base: type = VideoTextDataset) -> type:
    return type("Faulty", (base,), {"collate": lambda self, samples: change(base.collate(self, samples))})


class FirstRow(VideoTextDataset):
    """Row 0 for each index, cut at random places."""

    def sample_at(self, index, rng):
        return super().sample_at(0, rng)


class NamedFirstRow(FirstRow):
    def sample_at(self, index, rng):
        return {**super().sample_at(index, rng), "id": f"{index}.mp4"}


class NamedFirstText(TextRowsDataset):
    def __getitem__(self, index):
        return {**super().__getitem__(0), "id": f"row {index}"}


class Drawn(DatasetBase):
    """Samples that are drawn, whatever their index."""

    def __init__(self, size: int = 6) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def sample_at(self, index, rng):
        return {"noise": rng.normal((3,), "noise")}


class Remembering(VideoTextDataset):
    """A sample depends on how many have been read before."""

    count = 0

    def _sample(self, index, rng):
        self.count += 1
        found = super()._sample(index, rng)
        return {**found, "caption": f"{found['caption']} {self.count}"}


class Marked(VideoTextDataset):
    """Only what this process has set lets it read as it did."""

    mark = "a worker"

    def _sample(self, index, rng):
        return {**super()._sample(index, rng), "caption": Marked.mark}


class Blank(VideoTextDataset):
    """A clip that cannot be read is black."""

    def _sample(self, index, rng):
        try:
            return super()._sample(index, rng)
        except DataError:
            return {"pixels": torch.zeros((3, 4, 8, 8), dtype=torch.uint8), "caption": "", "id": str(index)}


class Crashing(VideoTextDataset):
    def _sample(self, index, rng):
        try:
            return super()._sample(index, rng)
        except DataError as error:
            raise KeyError(error.what) from error


class Locked(VideoTextDataset):
    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        self.lock = threading.Lock()


class Global(VideoTextDataset):
    def sample_at(self, index, rng):
        if random.random() < 0.5:
            rng = rng.at("other")
        return self._sample(index, rng)


class Growing(VideoTextDataset):
    """Another dataset gives other batches of the same samples."""

    made = 0

    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        type(self).made += 1
        self.name = f"{type(self).made}"

    def collate(self, samples):
        batch = super().collate(samples)
        return replace(batch, ids=[self.name] * len(batch.ids))


class Forgiving(VideoTextDataset):
    """What could not be read once is another sample the next time."""

    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        self.known: set[int] = set()

    def sample_at(self, index, rng):
        if index in self.known:
            return super().sample_at((index + 1) % 4, rng)
        try:
            return super().sample_at(index, rng)
        except DataError:
            self.known.add(index)
            raise


def refuse_all(cls, size, options):
    raise ContractError("no batch fits")


def asked(prompt) -> type:
    """A dataset that lays out questions: by their text and how many have been laid out."""

    def conversing(cls, **fields):
        numbers = iter(range(9))
        return SimpleNamespace(prompt=lambda turns: prompt(turns[-1].text, next(numbers)))

    return clips(conversing=classmethod(conversing))


VIDEO_FAULTS = [
    ("schema", clips(__len__=lambda self: 0), "the small instance has no samples"),
    ("schema", sampled(lambda sample: tuple(sample.values())), "sample 0 is a tuple"),
    (
        "schema",
        sampled(lambda sample: {**sample, "key": 3}),
        "sample 0 has the keys ['key'], which the loader sets",
    ),
    (
        "batches",
        collated(lambda batch: {"pixels": batch.pixels}),
        "collate of Faulty returned a dict; accepted: mm_core.contracts.batch.Batch",
    ),
    ("batches", collated(lambda batch: replace(batch, keys=batch.keys[::-1])), "the keys of the batch are"),
    (
        "batches",
        collated(lambda batch: replace(batch, sample_weights=torch.ones(len(batch)))),
        "sample_weights are tensor([1., 1.])",
    ),
    ("batches", collated(lambda batch: replace(batch, ids=[1, 2])), "the ids of the batch are [1, 2]"),
    (
        "batches",
        collated(lambda batch: replace(batch, pixels=batch.pixels.transpose(1, 2))),
        "ValueError: pixels must have the shape [B,3,F,Y,X], not [2, 4, 3, 8, 8]",
    ),
    (
        "batches",
        collated(lambda batch: replace(batch, pixels=batch.pixels.double())),
        "pixels are [2, 3, 4, 8, 8] of torch.float64",
    ),
    ("batches", collated(lambda batch: replace(batch, pixels=batch.pixels / 255)), "pixels are from 0.1"),
    ("batches", collated(lambda batch: replace(batch, captions="ab")), "captions are 'ab'"),
    ("determinism", Remembering, "sample [0] of epoch 0 changes when it is read again"),
    ("given_randomness", Global, "draws from the process's own generators"),
    (
        "new_samples_each_epoch",
        clips(sample_at=lambda self, index, rng: self[index]),
        "sample_at returns the same samples in each epoch: it uses nothing of `rng`",
    ),
    ("each_index", FirstRow, "samples 0 to 3 are all the same one, with the id ['0.mp4']; hint: return the"),
    (
        "each_index",
        NamedFirstRow,
        "samples 0 to 3 are all the same one, though the files of `tiny` hold different rows",
    ),
    ("resume", Growing, "the batches from step 1 on are different after a resume"),
    ("picklable", Locked, "the dataset cannot be sent to data workers: cannot pickle '_thread.lock' object"),
    ("bad_samples", Blank, "with 0.mp4 damaged, sample 0 is a different one, without an error"),
    (
        "bad_samples",
        Forgiving,
        "with 0.mp4 damaged, batches list the samples [] as unreadable; accepted: [0], in",
    ),
    ("bad_samples", Crashing, "with 0.mp4 damaged, sample 0 raises KeyError: "),
    (
        "lengths",
        clips(lengths=lambda self: torch.ones(3)),
        "lengths() returned [3] of torch.float32 on cpu; accepted: [4] of torch.int64",
    ),
    (
        "lengths",
        clips(lengths=lambda self: torch.randint(9, (4,))),
        "lengths() returns different numbers each time",
    ),
    ("work", clips(work_at=lambda self, *_: random.random()), "work_at of Faulty returned 0."),
    ("work", clips(work_at=lambda self, *_: random.randrange(2**60)), "accepted: the same on every rank"),
    (
        "micro_batches",
        clips(check_micro_batch=classmethod(refuse_all)),
        "check_micro_batch, asked for batches of one sample, raises ContractError: no batch fits",
    ),
    (
        "micro_batches",
        clips(check_micro_batch=lambda self, size, options: None),
        "check_micro_batch is not a class method",
    ),
    (
        "micro_batches",
        clips(batch_specs=classmethod(lambda cls, options: [options])),
        "batch_specs of Faulty returned a list; accepted: Mapping[",
    ),
    ("micro_batches", clips(batch_specs=lambda self, options: {}), "batch_specs is not a class method"),
    (
        "evaluation",
        clips(evaluated=classmethod(lambda cls, options: {**options, "frames": 3})),
        "the options that evaluated returns",
    ),
    ("rendered_text", clips(rendered=lambda self, index: None), "rendered of Faulty returned None"),
    ("rendered_text", clips(rendered=lambda self, index: [("", True)]), "accepted: some text"),
    (
        "pictured",
        clips(contents=lambda self, index: [], pictures=lambda self, index: []),
        "contents(0) is empty",
    ),
    (
        "pictured",
        clips(
            contents=lambda self, index: [("a", "image")], pictures=lambda self, index: [("b", torch.ones(1))]
        ),
        "pictures(0) of b returned [1] of torch.float32 on cpu; accepted: [n, n, n, 3] of torch.uint8",
    ),
    ("class_names", clips(class_names=lambda self: ["a", "b"]), "class_names of Faulty returned ['a', 'b']"),
    ("sources", clips(num_sources=lambda self: 0), "num_sources() returned 0; accepted: 1 or more"),
    ("sources", clips(source_of=lambda self, *_: "a.mp4"), "source_of of Faulty returned 'a.mp4'"),
    ("sources", clips(source_of=lambda self, *_: Source("a", "b", {})), "describes two rows alike"),
    (
        "sources",
        clips(source_of=lambda self, *_: Source("a", "b", {}, drawn=(random.random(),))),
        "source_of describes a row differently when it is called again",
    ),
    ("questions", clips(conversing=lambda self, **fields: None), "conversing is not a class method"),
    ("questions", asked(lambda text, _: {text[:4]: torch.ones(1, 2)}), "prompt returned ['blue'] for one"),
    ("questions", asked(lambda text, _: {"ids": torch.ones(2, len(text))}), "accepted: the same names, each"),
    (
        "questions",
        asked(lambda text, count: {"ids": torch.full((1, 2), count)}),
        "other tensors for the same",
    ),
    ("questions", asked(lambda text, _: {"ids": torch.ones(1, 2)}), "the same tensors for two questions"),
]


@pytest.mark.parametrize(("check", "faulty", "sentence"), VIDEO_FAULTS)
def test_a_faulty_dataset_is_refused(check: str, faulty: type, sentence: str) -> None:
    assert sentence in refusal("core/video_text", check, faulty)


BUCKET_FAULTS = [
    (
        {"row_sizes": lambda self: torch.ones(6, 3)},
        "row_sizes() returned [6, 3] of torch.float32 on cpu; accepted: [n, 3] of torch.int64",
    ),
    (
        {"epoch_rows": lambda self, epoch: torch.arange(6) + 1},
        "epoch_rows(0) returned [1, 2, 3, 4, 5, 6]; accepted: numbers from 0 to 5",
    ),
    (
        {"sample_of": lambda self, row, size, rng: self._sample(self.rows[row], (1, 8, 16), rng)},
        "sample_of returned a sample of (1, 8, 16); accepted: (1, 16, 8)",
    ),
    (
        {
            "sample_of": lambda self, row, size, rng: {
                **self._sample(self.rows[row], size, rng),
                "caption": str(random.random()),
            }
        },
        "sample_of reads another sample each time",
    ),
]


@pytest.mark.parametrize(("members", "sentence"), BUCKET_FAULTS)
def test_a_dataset_with_faulty_buckets_is_refused(members: dict, sentence: str) -> None:
    faulty = type("Faulty", (MediaTextDataset,), members)
    assert sentence in refusal("core/media_text", "buckets", faulty)


TEXT_FAULTS = [
    (
        collated(
            lambda batch: replace(batch, inputs={"input_ids": batch.inputs["input_ids"]}), TextRowsDataset
        ),
        "the inputs have no labels",
    ),
    (
        collated(
            lambda b: replace(b, inputs={**b.inputs, "labels": b.inputs["labels"][:1]}), TextRowsDataset
        ),
        "the input labels is [1] for 2 rows",
    ),
    (
        collated(lambda b: replace(b, inputs={**b.inputs, "more": 3}), TextRowsDataset),
        "the input more is a int; accepted: tensors",
    ),
    (collated(lambda b: replace(b, references=["a", "b"]), TextRowsDataset), "references are ['a', 'b']"),
]


@pytest.mark.parametrize(("faulty", "sentence"), TEXT_FAULTS)
def test_a_faulty_batch_of_texts_is_refused(faulty: type, sentence: str) -> None:
    assert sentence in refusal("core/text_rows", "batches", faulty)


def test_the_first_line_for_each_index_is_found_by_the_lines_that_the_file_has() -> None:
    reason = refusal("core/text_rows", "each_index", NamedFirstText)
    assert "are all the same one, though the files of `tiny` hold different rows" in reason


def equal_rows(folder: Path) -> dict:
    """Writes four lines of one text: their order changes nothing."""
    fields = text_rows(folder)
    table = Path(str(fields["file"]))
    table.write_text(table.read_text().partition("\n")[0].join(["", "\n"]) * 4)
    return dict(fields)


def test_datasets_of_equal_rows_are_not_blamed() -> None:
    equal = f"{__name__}:equal_rows"
    for of in (
        examined("core/text_rows", NamedFirstText, tiny=equal),
        examined("core/text_rows", Drawn, tiny={}, config=None),
    ):
        outcome = of.run("each_index")
        assert outcome.status == "not applicable", outcome
        assert "which may be right: let `tiny` write different rows to" in outcome.reason


def test_a_random_choice_that_is_the_same_in_two_epochs_is_one() -> None:
    """Each of its samples is a negative in a tenth of the epochs, and none is in the first two."""
    drawn = [
        [Randomness(SEED).at("data", epoch, i).uniform("coin") < 0.1 for i in range(4)] for epoch in (0, 1)
    ]
    assert not any(map(any, drawn))

    def sample_at(self, index, rng):
        sample = self[index]
        return sample | {"pixels": 255 - sample["pixels"]} if rng.uniform("coin") < 0.1 else sample

    found = examined("core/video_text", clips(sample_at=sample_at)).run("new_samples_each_epoch")
    assert found.status == "passed", found


@pytest.mark.slow
def test_a_dataset_that_reads_otherwise_in_workers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Marked, "mark", "the training process")
    reason = refusal("core/video_text", "workers", Marked)
    assert "with two data workers, the batches of the steps [0, 1, 2, 3] are different" in reason


def test_each_check_has_a_fault() -> None:
    assert {check for check, *_ in VIDEO_FAULTS} | {"buckets", "workers"} == set(KIT.checks)
