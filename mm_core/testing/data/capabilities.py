"""Conformance checks of what a dataset may support: lengths, evaluation, class names, questions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mm_core.contracts import (
    Randomness,
    SampleKey,
    Source,
    SupportsBatchSpecs,
    SupportsCheckMicroBatch,
    SupportsClassNames,
    SupportsConversing,
    SupportsEvaluated,
    SupportsLengths,
    SupportsRowSizes,
    SupportsSampleAt,
    SupportsSources,
    Turn,
    VideoTextBatch,
)
from mm_core.errors import ContractError, MMError, first_line, plural
from mm_core.schema.checking import check_component
from mm_core.testing.data.reading import SEED, DatasetProbe
from mm_core.testing.kit import NotApplicable


def lengths(probe: DatasetProbe) -> None:
    """lengths() returns the length of each sample: int64 [N] on the CPU."""
    dataset, size = probe.dataset, len(probe.dataset)
    if not isinstance(dataset, SupportsLengths):
        raise NotApplicable("the dataset has no lengths()")
    found = dataset.lengths()
    probe.expect(
        isinstance(found, Tensor)
        and found.shape == (size,)
        and found.dtype == torch.int64
        and found.device.type == "cpu",
        f"lengths() returned {_shown(found)} for {plural(size, 'sample')}",
        accepted=f"[{size}] of torch.int64 on the CPU",
    )
    probe.expect(
        bool((found >= 0).all()), f"lengths() returned {found.tolist()[:8]}", accepted="no negative ones"
    )
    same = torch.equal(found, dataset.lengths()) and torch.equal(found, probe.build().lengths())
    probe.expect(same, "lengths() returns different numbers each time: a resumed run would batch differently")


def micro_batches(probe: DatasetProbe) -> None:
    """check_micro_batch and batch_specs are class methods that accept batches of one sample, and describe
    batches by their options, before the dataset is built."""
    cls, options = type(probe.dataset), probe.probe.config.options
    if isinstance(probe.dataset, SupportsBatchSpecs):
        _expect_class_method(probe, "batch_specs")
        specs = cls.batch_specs(options)
        probe.expect(
            isinstance(specs, Mapping)
            and bool(specs)
            and all(isinstance(s, Mapping) for s in specs.values()),
            f"batch_specs returned {specs!r}"[:200],
            accepted="a mapping of names to options",
        )
    elif not isinstance(probe.dataset, SupportsCheckMicroBatch):
        raise NotApplicable("the dataset has neither check_micro_batch nor batch_specs")
    if not isinstance(probe.dataset, SupportsCheckMicroBatch):
        return
    _expect_class_method(probe, "check_micro_batch")
    try:
        cls.check_micro_batch(1, options)
    except ContractError as error:
        probe.expect(False, f"check_micro_batch refuses batches of one sample: {first_line(error)}")


def buckets(probe: DatasetProbe) -> None:
    """row_sizes() is int64 [R,3], epoch_rows() the row of each sample, and sample_of reads a row in any
    size, the same each time."""
    dataset = probe.dataset
    if not isinstance(probe.dataset, SupportsRowSizes):
        raise NotApplicable("the dataset has no row_sizes, epoch_rows and sample_of")
    sizes, rows = dataset.row_sizes(), dataset.epoch_rows(0)
    probe.expect(
        isinstance(sizes, Tensor) and sizes.dtype == torch.int64 and sizes.dim() == 2 and sizes.shape[1] == 3,
        f"row_sizes() returned {_shown(sizes)}",
        accepted="[R, 3] of torch.int64: frames, height and width",
    )
    probe.expect(
        isinstance(rows, Tensor)
        and rows.shape == (len(dataset),)
        and bool((rows >= 0).all())
        and bool((rows < len(sizes)).all()),
        f"epoch_rows(0) returned {_shown(rows)} for {plural(len(dataset), 'sample')}",
        accepted=f"one number from 0 to {len(sizes) - 1} for each",
    )
    rng = Randomness(SEED).at("data", 0, 0)
    for size in ((1, 8, 16), (1, 16, 8)):
        found, again = (dataset.sample_of(int(rows[0]), size, rng) for _ in range(2))
        batch = dataset.collate([{**each, "key": SampleKey(0, 0), "weight": 1.0} for each in (found, again)])
        assert isinstance(batch, VideoTextBatch) and batch.pixels is not None
        probe.expect(batch.size == size, f"sample_of returned a sample of {batch.size}", accepted=str(size))
        same = torch.equal(batch.pixels[0], batch.pixels[1]) and batch.captions[0] == batch.captions[1]
        probe.expect(same, "sample_of reads another sample each time: a resumed run would differ")


def sources(probe: DatasetProbe) -> None:
    """source_of describes each row in the same way each time, differently from other rows, and names its
    caption."""
    dataset: Any = probe.dataset
    if not isinstance(probe.dataset, SupportsSources):
        raise NotApplicable("the dataset has no num_sources and source_of")
    count, rng = dataset.num_sources(), Randomness(SEED).at("data", 0, 0)
    probe.expect(
        isinstance(count, int) and count >= 1, f"num_sources() returned {count!r}", accepted="1 or more"
    )
    random = rng if isinstance(dataset, SupportsSampleAt) else None
    sized = (1, 8, 16) if isinstance(dataset, SupportsRowSizes) else None
    found = [dataset.source_of(row, sized, random) for row in range(min(count, 2))]
    again = [dataset.source_of(row, sized, random) for row in range(min(count, 2))]
    probe.expect(
        all(isinstance(source, Source) for source in found),
        f"source_of returned {found!r}"[:200],
        accepted="mm_core.contracts.Source",
    )
    probe.expect(found == again, "source_of describes a row differently when it is called again")
    own = [(source.path, source.span, source.drawn, source.caption) for source in found]
    probe.expect(
        len(set(own)) == len(own),
        "source_of describes two rows alike, so that one would be trained on the other's features",
        hint="set `path`, `span` or `drawn` of the row",
    )
    sample = dataset.sample_of(0, sized, random) if sized else None
    if sample is not None and "caption" in sample:
        probe.expect(
            sample["caption"] == found[0].caption,
            f"source_of names the caption {found[0].caption!r}, but the sample has {sample['caption']!r}",
        )


def evaluation(probe: DatasetProbe) -> None:
    """evaluated is a class method that returns options of the dataset, with which it is built."""
    if not isinstance(probe.dataset, SupportsEvaluated):
        raise NotApplicable("the dataset has no evaluated")
    _expect_class_method(probe, "evaluated")
    config = probe.probe.config
    options = dict(type(probe.dataset).evaluated(config.options))
    try:
        check_component("dataset", {"type": config.type, **options}, probe.probe.registry, "evaluated")
        found = probe.build(**options)
    except MMError as error:
        probe.expect(False, f"the dataset refuses the options that evaluated returns: {first_line(error)}")
    probe.expect(len(found) > 0, "the dataset with the options that evaluated returns has no samples")


def class_names(probe: DatasetProbe) -> None:
    """class_names() is a tuple of different strings."""
    if not isinstance(probe.dataset, SupportsClassNames):
        raise NotApplicable("the dataset has no class_names()")
    names = probe.dataset.class_names()
    probe.expect(
        isinstance(names, tuple) and all(isinstance(n, str) for n in names) and len(set(names)) == len(names),
        f"class_names() returned {names!r}",
        accepted="a tuple of different strings; () if classes have only numbers",
    )


def questions(probe: DatasetProbe) -> None:
    """conversing is a class method whose questions are batches of one with the same names of tensors."""
    cls: object = type(probe.dataset)
    if not isinstance(cls, SupportsConversing):
        raise NotApplicable("the dataset has no conversing")
    _expect_class_method(probe, "conversing")
    try:
        conversing = cls.conversing(**probe.probe.config.options)
    except MMError as refusal:
        raise NotApplicable(f"it lays out no questions: {first_line(refusal)}") from refusal
    short, long = (conversing.prompt([Turn("user", text)]) for text in ("blue", "a red circle moves left"))
    probe.expect(
        short.keys() == long.keys() and {len(tensor) for tensor in (*short.values(), *long.values())} == {1},
        f"prompt returned {[*short]} for one question and {[*long]} for another",
        accepted="the same names, each of a tensor [1, ...]",
    )
    again = conversing.prompt([Turn("user", "blue")])
    same = all(torch.equal(again[name], tensor) for name, tensor in short.items())
    probe.expect(same, "prompt returns other tensors for the same question")
    probe.expect(
        any(
            short[name].shape != long[name].shape or not torch.equal(short[name], long[name])
            for name in short
        ),
        "prompt returns the same tensors for two questions: the text of the turns is not used",
    )


def _expect_class_method(probe: DatasetProbe, name: str) -> None:
    found = inspect.getattr_static(type(probe.dataset), name)
    probe.expect(
        isinstance(found, classmethod | staticmethod),
        f"{name} is not a class method, but the plan calls it before any file is opened",
        hint="decorate it with @classmethod",
    )


def _shown(value: object) -> str:
    return (
        f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    )
