"""The conformance kit of datasets (`mm_core.contracts.Dataset`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_core.contracts import Dataset, Randomness, SupportsSampleAt, TextBatch, VideoTextBatch, seeded
from mm_core.errors import DataError, MMError, plural
from mm_core.plugin.checks.values import returned
from mm_core.testing.data import capabilities
from mm_core.testing.data.reading import SEED, DatasetProbe, damaged, equal
from mm_core.testing.kit import Kit, NotApplicable, checks_of

_DAMAGE = b"\xff\x00damaged\n"


def schema(probe: DatasetProbe) -> None:
    """The dataset has samples, each a plain dict whose keys are strings."""
    size = len(probe.dataset)
    probe.expect(size > 0, "the small instance has no samples", hint="let `tiny` write a few rows")
    for index in range(min(size, 8)):
        for sample in (probe.sample(index), probe.dataset[index]):
            probe.expect(
                type(sample) is dict and all(isinstance(name, str) for name in sample),
                f"sample {index} is a {type(sample).__name__}",
                accepted="a plain dict with strings as keys",
            )
            taken = sorted({"key", "weight"} & set(sample))
            probe.expect(
                not taken, f"sample {index} has the keys {taken}, which the loader sets", hint="rename them"
            )


def batches(probe: DatasetProbe) -> None:
    """collate makes a Batch of samples, with their keys, their weights and a name for each."""
    weights = [1.0, 0.0][: probe.rows]
    batch, samples = probe.batch(weights)
    returned(Dataset.collate, batch, probe.dataset)
    keys = [sample["key"] for sample in samples]
    probe.expect(
        isinstance(batch.keys, list) and batch.keys == keys,
        f"the keys of the batch are {batch.keys!r}",
        accepted=f"{keys!r}, those of its samples",
    )
    found = batch.sample_weights
    probe.expect(
        isinstance(found, Tensor) and found.dtype == torch.float32 and found.tolist() == weights,
        f"sample_weights are {found!r}",
        accepted=f"a tensor {weights} of torch.float32, the samples' weights",
    )
    _expect_strings(probe, "the ids of the batch", batch.ids, len(keys))
    if isinstance(batch, VideoTextBatch):
        _check_clips(probe, batch)
    if isinstance(batch, TextBatch):
        _check_texts(probe, batch)


def _expect_strings(probe: DatasetProbe, what: str, found: object, count: int) -> None:
    right = isinstance(found, list) and len(found) == count and all(isinstance(each, str) for each in found)
    probe.expect(right, f"{what} are {found!r}", accepted=f"a list of {count} strings")


def _check_clips(probe: DatasetProbe, batch: VideoTextBatch) -> None:
    pixels, rows = batch.pixels, len(batch)
    _expect_strings(probe, "captions", batch.captions, rows)
    if pixels is None:
        return
    probe.expect(
        pixels.dim() == 5 and pixels.shape[:2] == (rows, 3) and pixels.dtype in (torch.float32, torch.uint8),
        f"pixels are {list(pixels.shape)} of {pixels.dtype}",
        accepted=f"[{rows}, 3, F, Y, X] of torch.float32 or torch.uint8",
    )
    if pixels.dtype == torch.uint8:
        return
    least, most = float(pixels.min()), float(pixels.max())
    probe.expect(
        least >= -1.001 and most <= 1.001 and least < 0,
        f"pixels are from {least:.3g} to {most:.3g}",
        accepted="-1 (black) to 1 (white)",
    )


def _check_texts(probe: DatasetProbe, batch: TextBatch) -> None:
    rows, inputs = len(batch), batch.inputs
    probe.expect("labels" in inputs, "the inputs have no labels", accepted="tensors that include `labels`")
    for name, value in inputs.items():
        found = f"the input {name} is a {type(value).__name__}"
        probe.expect(isinstance(value, Tensor), found, accepted="tensors by argument name")
        if name in ("labels", "input_ids", "attention_mask"):
            found = f"the input {name} is {list(value.shape)} for {plural(rows, 'row')}"
            probe.expect(len(value) == rows, found, accepted=f"[{rows}, ...]")
    references = batch.references
    probe.expect(
        references is None
        or (len(references) == rows and all(isinstance(each, tuple) for each in references)),
        f"references are {references!r}",
        accepted=f"None, or a tuple of texts for each of {plural(rows, 'row')}",
    )


def determinism(probe: DatasetProbe) -> None:
    """A sample depends on (seed, epoch, index) alone: not on what was read before, nor on a new start."""
    other = probe.build()
    probe.expect(len(other) == len(probe.dataset), "a second dataset has another number of samples")
    order = range(min(len(other), 8))
    for epoch in (0, 1):
        first = [probe.sample(index, epoch) for index in order]
        second = [probe.sample(index, epoch, other) for index in reversed(order)][::-1]
        different = [index for index in order if not equal(first[index], second[index])]
        probe.expect(
            not different,
            f"sample {different[:1]} of epoch {epoch} changes when it is read again",
            hint="draw from the `rng` that sample_at is given, and keep no state from sample to sample",
        )
    batch, samples = probe.batch()
    with seeded(Randomness(SEED).at("collate")):
        again = probe.dataset.collate(samples)
    probe.expect(equal(batch, again), "collate makes different batches of the same samples")


def each_index(probe: DatasetProbe) -> None:
    """Samples are those of their index, not one and the same row.

    Rows may be equal: what shows the fault is a common id, or files with different rows.
    """
    size = min(len(probe.dataset), 8)
    # Each with the random draws of the first one, and without their ids.
    alike = [{**probe.sample(index, drawn=0), "id": None} for index in range(size)]
    if size < 2 or not all(equal(alike[0], other) for other in alike):
        return
    these = f"samples 0 to {size - 1} are all the same one"
    hint = "return the sample of the index, with an `id` of its own"
    ids = {str(probe.batch(rows=[index])[0].ids) for index in range(size)}
    probe.expect(len(ids) > 1, f"{these}, with the id {', '.join(ids)}", hint=hint)
    differ = _different_rows(probe.files, len(probe.dataset))
    probe.expect(not differ, f"{these}, though the files of `tiny` hold different rows", hint=hint)
    raise NotApplicable(f"{these}, which may be right: let `tiny` write different rows to have them compared")


def _different_rows(files: Sequence[Path], size: int) -> bool:
    """Whether a file has a line for each row, or there is a file for each, and they differ."""
    tables = [path.read_bytes().splitlines() for path in files]
    for folder, suffix in {(path.parent, path.suffix) for path in files}:
        tables.append([path.read_bytes() for path in files if (path.parent, path.suffix) == (folder, suffix)])
    return any(len(rows) - size in (0, 1) and len({*rows[-size:]}) > 1 for rows in tables)


def given_randomness(probe: DatasetProbe) -> None:
    """sample_at draws from `rng` alone: the process's own generators change nothing."""
    dataset, size = probe.dataset, len(probe.dataset)
    probe.require(dataset, SupportsSampleAt)
    for index in range(min(size, 8)):
        rng = Randomness(SEED).at("data", 0, index)
        found = []
        for seed in (1, 2):
            with seeded(Randomness(seed)):
                found.append(dataset.sample_at(index, rng))
        probe.expect(
            equal(*found),
            f"sample_at({index}, rng) draws from the process's own generators",
            accepted="equal samples for equal rng",
            hint="draw with rng.uniform(name), rng.normal(shape, name) or rng.generator(name)",
        )


def new_samples_each_epoch(probe: DatasetProbe) -> None:
    """sample_at returns other random choices in another epoch."""
    size = len(probe.dataset)
    probe.require(probe.dataset, SupportsSampleAt)
    probe.expect(
        any(
            not equal(probe.sample(i, epoch=0), probe.sample(i, epoch=epoch))
            for i in range(min(size, 8))
            for epoch in range(1, 9)  # a choice of two is the same in half of the epochs
        ),
        "sample_at returns the same samples in each epoch: it uses nothing of `rng`",
        hint="draw from `rng`; leave sample_at out if samples are not random, or switch on what is random in"
        " the small instance (`tiny`)",
    )


def resume(probe: DatasetProbe) -> None:
    """A resumed run reads the batches of an uninterrupted one; no state is needed."""
    whole = list(probe.loader())
    for start in (1, len(whole) - 1):
        rest = list(probe.loader(probe.build(), start))
        probe.expect(
            len(rest) == len(whole) - start and equal(rest, whole[start:]),
            f"the batches from step {start} on are different after a resume",
            hint="a sample may depend only on its index and on rng",
        )


def picklable(probe: DatasetProbe) -> None:
    """The dataset goes to data workers: it pickles, also after reading, and gives equal samples there."""
    for dataset in (probe.build(), probe.dataset):
        wanted = probe.sample(0)
        again = probe.probe.in_worker("the dataset", dataset)
        same = len(again) == len(dataset) and equal(probe.sample(0, dataset=again), wanted)
        probe.expect(same, "the dataset gives different samples after pickling")


def bad_samples(probe: DatasetProbe) -> None:
    """Unreadable data raises an error in the constructor, or a DataError for each sample, which is listed."""
    if not probe.files:
        raise NotApplicable("the small instance has no files that could be damaged")
    wanted = [probe.sample(index) for index in range(len(probe.dataset))]
    for path in probe.files:
        with damaged(path, _DAMAGE):
            what = f"with {path.name} damaged"
            dataset = probe.expect_no_error(
                f"{what}, the constructor", "DataError", probe.build, allowed=(MMError,)
            )
            if not isinstance(dataset, MMError):
                _check_unreadable(probe, dataset, wanted, what)
        dataset = probe.build()
        with damaged(path, None):
            _check_unreadable(probe, dataset, wanted, f"without {path.name}")


def _check_unreadable(probe: DatasetProbe, dataset: Any, wanted: Sequence[Any], when: str) -> None:
    """Checks that samples are as before or raise DataError, and that batches list those that do."""
    bad = []
    for index, expected in enumerate(wanted):
        what, accepted = f"{when}, sample {index}", "DataError: the sample is skipped, counted and listed"
        read = probe.expect_no_error(what, accepted, probe.sample, index, 0, dataset, allowed=(DataError,))
        if isinstance(read, DataError):
            bad.append(index)
            continue
        probe.expect(equal(read, expected), f"{what} is a different one, without an error", accepted=accepted)
    if bad and len(bad) < len(wanted):
        listed = {failure.index for batch in probe.loader(dataset) for failure in batch.failures}
        probe.expect(
            listed == set(bad),
            f"{when}, batches list the samples {sorted(listed)} as unreadable",
            accepted=f"{bad}, in every epoch",
        )


def workers(probe: DatasetProbe) -> None:
    """Two data workers read the batches that the training process reads."""
    alone, read = list(probe.loader()), list(probe.loader(workers=2))
    different = [step for step, pair in enumerate(zip(alone, read, strict=True)) if not equal(*pair)]
    probe.expect(
        not different,
        f"with two data workers, the batches of the steps {different[:4]} are different",
        hint="keep no state from sample to sample, and read nothing that only the training process has set",
    )


KIT = Kit(checks_of(__name__, capabilities.__name__), probe=DatasetProbe, ranks=("workers",))
"""The conformance checks of datasets."""
