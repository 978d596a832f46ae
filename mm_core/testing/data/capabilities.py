"""Conformance checks of what a dataset may support: lengths, evaluation, class names, questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mm_core.contracts import (
    Randomness,
    SampleKey,
    SupportsBatchSpecs,
    SupportsCheckMicroBatch,
    SupportsClassNames,
    SupportsConversing,
    SupportsEvaluated,
    SupportsLengths,
    SupportsPictures,
    SupportsRendered,
    SupportsRowSizes,
    SupportsSampleAt,
    SupportsSources,
    SupportsWork,
    Turn,
    VideoTextBatch,
)
from mm_core.errors import MMError, first_line
from mm_core.plugin.checks.values import returned
from mm_core.schema.checking import check_component
from mm_core.testing.common import expect_tensor
from mm_core.testing.data.reading import SEED, DatasetProbe, equal
from mm_core.testing.kit import NotApplicable


def lengths(probe: DatasetProbe) -> None:
    """lengths() returns the length of each sample: int64 [N] on the CPU."""
    dataset, size = probe.dataset, len(probe.dataset)
    probe.require(dataset, SupportsLengths)
    found = dataset.lengths()
    expect_tensor(probe, "lengths()", found, torch.int64, size)
    probe.expect(
        bool((found >= 0).all()), f"lengths() returned {found.tolist()[:8]}", accepted="no negative ones"
    )
    same = torch.equal(found, dataset.lengths()) and torch.equal(found, probe.build().lengths())
    probe.expect(same, "lengths() returns different numbers each time: a resumed run would batch differently")


def work(probe: DatasetProbe) -> None:
    """work_at() is a whole number for each sample, the same each time: ranks share out samples by it."""
    probe.require(probe.dataset, SupportsWork)
    rng = Randomness(SEED).at("data", 0, 0)
    found, again = (
        returned(SupportsWork.work_at, each.work_at(0, rng), each) for each in (probe.dataset, probe.build())
    )
    probe.expect(found == again, f"work_at returned {found}, then {again}", accepted="the same on every rank")


def micro_batches(probe: DatasetProbe) -> None:
    """check_micro_batch and batch_specs are class methods that accept batches of one sample, and describe
    batches by their options, before the dataset is built."""
    dataset, options = probe.dataset, probe.probe.config.options
    described = isinstance(dataset, SupportsBatchSpecs)
    if described:
        probe.require(dataset, SupportsBatchSpecs)
        specs = returned(SupportsBatchSpecs.batch_specs, dataset.batch_specs(options), dataset)
        named = specs and all(isinstance(each, Mapping) for each in specs.values())
        probe.expect(named, f"batch_specs returned {specs!r}"[:200], accepted="names with their options")
    if not described or isinstance(dataset, SupportsCheckMicroBatch):
        probe.require(dataset, SupportsCheckMicroBatch)
        what, call = "check_micro_batch, asked for batches of one sample,", dataset.check_micro_batch
        probe.expect_no_error(what, "no error", call, 1, options)


def buckets(probe: DatasetProbe) -> None:
    """row_sizes() is int64 [R,3], epoch_rows() the row of each sample, and sample_of reads a row in any
    size, the same each time."""
    dataset = probe.dataset
    probe.require(dataset, SupportsRowSizes)
    sizes, rows = dataset.row_sizes(), dataset.epoch_rows(0)
    expect_tensor(probe, "row_sizes()", sizes, torch.int64, None, 3)  # frames, height and width
    expect_tensor(probe, "epoch_rows(0)", rows, torch.int64, len(dataset))
    inside = bool(((rows >= 0) & (rows < len(sizes))).all())
    probe.expect(
        inside, f"epoch_rows(0) returned {rows.tolist()}", accepted=f"numbers from 0 to {len(sizes) - 1}"
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
    probe.require(dataset, SupportsSources)
    count, rng = dataset.num_sources(), Randomness(SEED).at("data", 0, 0)
    probe.expect(
        isinstance(count, int) and count >= 1, f"num_sources() returned {count!r}", accepted="1 or more"
    )
    random = rng if isinstance(dataset, SupportsSampleAt) else None
    sized = (1, 8, 16) if isinstance(dataset, SupportsRowSizes) else None
    found = [dataset.source_of(row, sized, random) for row in range(min(count, 2))]
    again = [dataset.source_of(row, sized, random) for row in range(min(count, 2))]
    for source in found:
        returned(SupportsSources.source_of, source, dataset)
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
    probe.require(probe.dataset, SupportsEvaluated)
    config = probe.probe.config
    options = dict(type(probe.dataset).evaluated(config.options))
    checked = {"type": config.type, **options}
    check_component("dataset", checked, probe.probe.registry, "the options that evaluated returns")
    probe.expect(
        len(probe.build(**options)) > 0, "the dataset with the options that evaluated returns has no samples"
    )


def rendered_text(probe: DatasetProbe) -> None:
    """rendered() gives the text of a sample in pieces, each with whether it is learnt."""
    probe.require(probe.dataset, SupportsRendered)
    pieces = returned(SupportsRendered.rendered, probe.dataset.rendered(0), probe.dataset)
    probe.expect(any(text for text, _ in pieces), f"rendered(0) returned {pieces!r}", accepted="some text")


def pictured(probe: DatasetProbe) -> None:
    """contents() names what a sample has, and pictures() gives its images and videos: uint8 [F,Y,X,3]."""
    probe.require(probe.dataset, SupportsPictures)
    found = returned(SupportsPictures.contents, probe.dataset.contents(0), probe.dataset)
    probe.expect(len(found) > 0, "contents(0) is empty", accepted="a source and a kind at least")
    for name, frames in returned(SupportsPictures.pictures, probe.dataset.pictures(0), probe.dataset):
        expect_tensor(probe, f"pictures(0) of {name}", frames, torch.uint8, None, None, None, 3)


def class_names(probe: DatasetProbe) -> None:
    """class_names() is a tuple of different strings."""
    probe.require(probe.dataset, SupportsClassNames)
    names = returned(SupportsClassNames.class_names, probe.dataset.class_names(), probe.dataset)
    probe.expect(
        len(set(names)) == len(names), f"class_names returned {names!r}", accepted="different strings, or ()"
    )


def questions(probe: DatasetProbe) -> None:
    """conversing is a class method whose questions are batches of one with the same names of tensors."""
    cls: Any = type(probe.dataset)
    probe.require(cls, SupportsConversing)
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
    same = equal(short, conversing.prompt([Turn("user", "blue")]))
    probe.expect(same, "prompt returns other tensors for the same question")
    probe.expect(
        not equal(short, long),
        "prompt returns the same tensors for two questions: the text of the turns is not used",
    )
