"""The conformance kit of datasets (`mm_core.contracts.Dataset`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_core.contracts import Batch, Randomness, SupportsSampleAt, TextBatch, VideoTextBatch, seeded
from mm_core.errors import DataError, MMError, first_line, plural
from mm_core.testing.data.capabilities import (
    buckets,
    class_names,
    evaluation,
    lengths,
    micro_batches,
    questions,
    sources,
)
from mm_core.testing.data.reading import SEED, DatasetProbe, damaged, equal
from mm_core.testing.kit import Kit, NotApplicable, by_name

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
    probe.expect(isinstance(batch, Batch), f"collate returned a {type(batch).__name__}", accepted="a Batch")
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
    probe.expect(
        isinstance(batch.ids, list)
        and len(batch.ids) == len(keys)
        and all(isinstance(i, str) for i in batch.ids),
        f"the ids of the batch are {batch.ids!r}",
        accepted=f"a list of {len(keys)} strings",
    )
    places = sorted({str(tensor.device) for tensor in _tensors(batch) if tensor.device.type != "cpu"})
    probe.expect(not places, f"collate returned tensors on {', '.join(places)}", accepted="the CPU")
    if isinstance(batch, VideoTextBatch):
        _check_clips(probe, batch)
    if isinstance(batch, TextBatch):
        _check_texts(probe, batch)


def _check_clips(probe: DatasetProbe, batch: VideoTextBatch) -> None:
    pixels, rows, captions = batch.pixels, len(batch), batch.captions
    probe.expect(
        isinstance(captions, list)
        and len(captions) == rows
        and all(isinstance(each, str) for each in captions),
        f"captions are {captions!r}",
        accepted=f"a list of {rows} strings",
    )
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
    wrong = [name for name, value in inputs.items() if not isinstance(value, Tensor)]
    probe.expect(
        not wrong, f"the inputs {', '.join(wrong)} are not tensors", accepted="tensors by argument name"
    )
    probe.expect("labels" in inputs, "the inputs have no labels", accepted="tensors that include `labels`")
    for name in {"labels", "input_ids", "attention_mask"} & set(inputs):
        probe.expect(
            len(inputs[name]) == rows,
            f"the input {name} is {list(inputs[name].shape)} for {plural(rows, 'row')}",
            accepted=f"[{rows}, ...]",
        )
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

    Rows may be equal: what shows the fault is a common id, or files that make other samples in another order.
    """
    size = min(len(probe.dataset), 8)
    if size < 2 or not _one_sample(found := _drawn_alike(probe, probe.dataset, size)):
        return
    these = f"samples 0 to {size - 1} are all the same one"
    hint = "return the sample of the index, with an `id` of its own"
    ids = {str(probe.batch(rows=[index])[0].ids) for index in range(size)}
    probe.expect(len(ids) > 1, f"{these}, with the id {', '.join(ids)}", hint=hint)
    for names, contents in _other_orders(probe.files, len(probe.dataset)):
        with ExitStack() as stack:
            for path, content in contents.items():
                stack.enter_context(damaged(path, content))
            try:
                moved = _drawn_alike(probe, probe.build(), size)
            except Exception:  # the files hold no rows in this way
                continue
        follows = _one_sample(moved) and not equal(moved[0], found[0])
        probe.expect(not follows, f"{these}, though {names} holds different rows", hint=hint)
    raise NotApplicable(f"{these}, which may be right: let `tiny` write different rows to have them compared")


def _drawn_alike(probe: DatasetProbe, dataset: Any, size: int) -> list[Any]:
    """The first samples, each with the random draws of the first one, and without their ids."""
    return [{**probe.sample(index, dataset=dataset, drawn=0), "id": None} for index in range(size)]


def _one_sample(samples: Sequence[Any]) -> bool:
    return all(equal(samples[0], other) for other in samples[1:])


def _other_orders(files: Sequence[Path], size: int) -> Iterator[tuple[str, dict[Path, bytes]]]:
    """Files with their rows in another order: the lines of one, or the contents of several of a kind."""
    for path in files:
        lines = path.read_bytes().splitlines()
        if (first := len(lines) - size) in (0, 1):  # 1: a line of names
            moved = [*lines[:first], *lines[first + 1 :], lines[first], b""]
            yield path.name, {path: b"\n".join(moved)}
    for folder, suffix in dict.fromkeys((path.parent, path.suffix) for path in files):
        alike = [path for path in files if (path.parent, path.suffix) == (folder, suffix)]
        contents = [path.read_bytes() for path in alike]
        if len(alike) >= size:
            yield f"*{suffix}", dict(zip(alike, [*contents[1:], contents[0]], strict=True))


def given_randomness(probe: DatasetProbe) -> None:
    """sample_at draws from `rng` alone: the process's own generators change nothing."""
    dataset, size = probe.dataset, len(probe.dataset)
    if not isinstance(dataset, SupportsSampleAt):
        raise NotApplicable("the dataset has no sample_at: its samples are not random")
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
    if not isinstance(probe.dataset, SupportsSampleAt):
        raise NotApplicable("the dataset has no sample_at: its samples are not random")
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


def workers(probe: DatasetProbe) -> None:
    """Two data workers read the batches that the training process reads."""
    alone, read = list(probe.loader()), list(probe.loader(workers=2))
    different = [step for step, pair in enumerate(zip(alone, read, strict=True)) if not equal(*pair)]
    probe.expect(
        not different,
        f"with two data workers, the batches of the steps {different[:4]} are different",
        hint="keep no state from sample to sample, and read nothing that only the training process has set",
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
            try:
                dataset = probe.build()
            except MMError:
                continue
            except Exception as error:
                came = f"{type(error).__name__}: {first_line(error)}"
                what = f"with {path.name} damaged, the constructor raises {came}"
                probe.expect(False, what, accepted="DataError")
            _check_unreadable(probe, dataset, wanted, f"with {path.name} damaged")
        dataset = probe.build()
        with damaged(path, None):
            _check_unreadable(probe, dataset, wanted, f"without {path.name}")


def _check_unreadable(probe: DatasetProbe, dataset: Any, wanted: Sequence[Any], when: str) -> None:
    """Checks that samples are as before or raise DataError, and that batches list those that do."""
    bad = []
    for index, expected in enumerate(wanted):
        try:
            same = equal(probe.sample(index, dataset=dataset), expected)
        except DataError:
            bad.append(index)
            continue
        except Exception as error:
            probe.expect(
                False,
                f"{when}, sample {index} raises {type(error).__name__}: {first_line(error)}",
                accepted="DataError, so that the sample is skipped, counted and listed",
            )
        probe.expect(
            same,
            f"{when}, sample {index} is a different one, without an error",
            accepted="DataError, so that the sample is skipped, counted and listed",
        )
    if bad and len(bad) < len(wanted):
        listed = {failure.index for batch in probe.loader(dataset) for failure in batch.failures}
        probe.expect(
            listed == set(bad),
            f"{when}, batches list the samples {sorted(listed)} as unreadable",
            accepted=f"{bad}, in every epoch",
        )


def _tensors(batch: Batch) -> Iterator[Tensor]:
    """The tensors of a batch, including those in dicts."""
    for value in vars(batch).values():
        yield from (
            each for each in (value.values() if isinstance(value, dict) else [value]) if torch.is_tensor(each)
        )


KIT = Kit(
    by_name(
        *(schema, batches, determinism, each_index, given_randomness, new_samples_each_epoch, resume),
        *(picklable, bad_samples, lengths, micro_batches, evaluation, class_names, questions, buckets),
        *(sources, workers),
    ),
    probe=DatasetProbe,
    ranks=("workers",),
)
"""The conformance checks of datasets."""
