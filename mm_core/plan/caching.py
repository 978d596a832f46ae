"""Opening the feature cache of a run, and the datasets that read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mm_core.config.sections import CacheSection, RunConfig
from mm_core.contracts import CachePart, SupportsCache, TaskModule
from mm_core.data.cache.hashes import FILES, FileHashes
from mm_core.data.cache.keys import FEATURES, component_facts, digest_of, libraries
from mm_core.data.cache.rows import CacheRows, PartKey, Size, keys_of_texts, rows_of_dataset
from mm_core.data.cache.samples import CachedSamples
from mm_core.data.cache.shards import KEY
from mm_core.data.cache.store import Store
from mm_core.data.class_names import check_class_names
from mm_core.data.loading.plain import promise_of
from mm_core.data.loading.seeding import build_split
from mm_core.data.rows.mapped_rows import read_once
from mm_core.errors import CacheError, MMError, PlanError
from mm_core.plan.bucketing import in_buckets
from mm_core.plan.planning import build_task, check_data
from mm_core.plan.run_cache import CachedSplit, RunCache
from mm_core.plan.samples import Samples
from mm_core.plugin.checks.places import place_of_object
from mm_core.plugin.checks.values import returned
from mm_core.runtime.ranks import Ranks
from mm_core.schema.fields import ComponentConfig


def open_cache(
    config: RunConfig, task: TaskModule, datasets: Mapping[str, Samples], *, create: bool = False
) -> RunCache:
    """Opens a run's feature cache and computes all keys that it needs. A collective call.

    Args:
        config: of the run.
        task: built, its encoders loaded or not.
        datasets: by split.
        create: whether the folder may be made.

    Raises:
        PlanError: the task or a dataset cannot be cached, or an encoder is trained.
        CacheError: the cache cannot be opened, or files of an encoder cannot be read.
    """
    section, ranks = config.data.cache or CacheSection(), Ranks.current()
    parts = _parts(config, task)
    rows = {}
    for split, dataset in datasets.items():
        if promise_of(dataset.dataset):  # of other datasets there is none
            raise PlanError(
                "the samples of a Dataset or DataLoader that is read as it is cannot be cached",
                where="data.loader.mode",
                accepted="sampler, variable",
                hint="remove data.cache, or write the dataset as a component with `source_of`",
            )
        own, variants = _own_size(config, split), section.variants if split == "train" else 1
        rows[split] = rows_of_dataset(dataset.dataset, own, variants, config.run.seed, f"data.{split}")
    folder = Path(section.dir)
    tables, (facts, keyed) = read_once(partial(_begin_tables, config, task, parts, rows, folder, create))
    _fill_tables(rows, keyed, folder, tables, ranks)
    splits = {
        name: CachedSplit(rows[name], path := tables / f"{name}.npy", np.load(path, mmap_mode="r"))
        for name in rows
    }
    texts = _texts(config, parts)
    keys = {
        text: keys_of_texts(part, [text]) for part in keyed if part.of_text for text in dict.fromkeys(texts)
    }
    return RunCache(Store(folder), parts, tuple(keyed), facts, splits, keys, section, ranks)


def _parts(config: RunConfig, task: TaskModule) -> tuple[CachePart, ...]:
    if not isinstance(task, SupportsCache):
        raise PlanError(
            f"the task {config.task.type} computes no features that can be cached",
            where="data.cache",
            accepted="tasks that are SupportsCache, such as text_to_video",
            hint="remove data.cache",
        )
    parts = returned(SupportsCache.cache_parts, task.cache_parts(), task)
    for part in parts:
        for name in part.components:
            if not isinstance(config.task.options.get(name), ComponentConfig):
                raise PlanError(
                    f"the cache's {part.name} are computed by {name!r}, which the config does not name",
                    where=f"task, {place_of_object(task)}",
                )
            if name in task.trainable:
                raise PlanError(
                    f"the {name} is trained, so what it computes changes with every step",
                    where="data.cache",
                    hint=f"remove data.cache, or do not train the {name}",
                )
    return parts


def _own_size(config: RunConfig, split: str) -> Size | None:
    """Frames, height and width of a dataset, if its config sets them."""
    found = [config.data.splits[split].options.get(name) for name in ("num_frames", "height", "width")]
    return None if None in found else (found[0], found[1], found[2])  # type: ignore[return-value]


def _texts(config: RunConfig, parts: Sequence[CachePart]) -> list[str]:
    """The texts that are needed beside captions."""
    found = [text for part in parts for text in part.texts]
    if config.validation is not None and (samples := config.validation.samples) is not None:
        found += [*samples.prompts, samples.negative_prompt]
    return found


def _begin_tables(
    config: RunConfig,
    task: TaskModule,
    parts: Sequence[CachePart],
    rows: Mapping[str, CacheRows],
    folder: Path,
    create: bool,
    into: Path,
) -> tuple[list[dict[str, Any]], list[PartKey]]:
    """Makes an empty table of keys for each split; returns the facts and digests of the parts."""
    hashes = FileHashes(Store(folder, create=create).folder / FILES)
    known: dict[str, dict[str, Any]] = {}
    facts: list[dict[str, Any]] = []
    for part in parts:
        for name in part.components:
            if name not in known:
                section: ComponentConfig = config.task.options[name]
                known[name] = component_facts(section, getattr(task, name), section.type, hashes)
        components = {name: known[name] for name in part.components}
        about = {"version": FEATURES, "libraries": libraries(part.of == "text")}
        about["float32_matmul"] = config.run.float32_matmul or "highest"
        facts.append({"part": part.name, "settings": dict(part.settings), "components": components, **about})
    hashes.save()
    for name, own in rows.items():
        shape = (len(own), own.variants, len(parts))
        np.lib.format.open_memmap(into / f"{name}.npy", "w+", KEY, shape).flush()
    keyed = zip(parts, facts, strict=True)
    return facts, [PartKey(p.name, p.of == "text", digest_of(f), p.fields, p.caption) for p, f in keyed]


def _fill_tables(
    rows: Mapping[str, CacheRows], keyed: Sequence[PartKey], folder: Path, tables: Path, ranks: Ranks
) -> None:
    """Fills in the keys: the ranks share the files to be hashed, then those of a host its table."""
    mates = [rank for rank, place in enumerate(ranks.gather(str(tables))) if place == str(tables)]
    shares = [(ranks.rank, ranks.count), (mates.index(ranks.rank), len(mates))]
    for share in dict.fromkeys(shares):
        hashes = FileHashes(folder / FILES)
        fault: MMError | None = None
        try:
            for name, own in rows.items():
                table = np.load(tables / f"{name}.npy", mmap_mode="r+")
                own.fill(table, keyed, hashes, share)
                table.flush()
        except MMError as error:
            fault = error
        hashes.save()
        for found in ranks.gather(fault):
            if found is not None:
                raise found


def in_cache(
    config: RunConfig, task: TaskModule, datasets: Mapping[str, Samples]
) -> tuple[dict[str, Samples], list[str], RunCache | None]:
    """The datasets of a run, read from its cache if `data.cache` is set; encoders that nothing needs then are
    no longer among `task.frozen`. A collective call.

    Returns:
        The datasets by split, notes for the user, and the cache if samples may be added to it.

    Raises:
        MMError: as for `open_cache`, or something is missing and `missing` is `error`.
    """
    if config.data.cache is None:
        return dict(datasets), [], None
    fills = config.data.cache.missing == "encode"
    cache = open_cache(config, task, datasets, create=fills)
    mine = {name: cache.lacking(name) for name in ("texts", *cache.splits)}
    everyone = cache.ranks.gather((mine, cache.survey()[1] if any(mine.values()) else []))
    lacking = {name: set().union(*(each[name] for each, _ in everyone)) for name in mine}
    if any(lacking.values()) and not fills:
        raise _incomplete(cache, next(lines for _, lines in everyone if lines))
    filling = lacking["train"] | lacking["texts"]
    found, whole = dict(datasets), True
    for name, split in cache.splits.items():
        if name == "train" or not lacking[name] | lacking["texts"]:
            found[name] = _cached(cache, split, datasets[name], filling if name == "train" else set())
        else:
            whole = False
    samples = config.validation is not None and config.validation.samples is not None
    incomplete = set().union(*lacking.values())
    held = [
        part.name
        for part in cache.parts
        if not whole or part.name in incomplete or (samples and part.of == "media")
    ]
    covered = {name for part in cache.parts for name in part.components}
    needed = {name for part in cache.parts if part.name in held for name in part.components}
    spared = [name for name in task.frozen if name in covered - needed]
    task.frozen = tuple(name for name in task.frozen if name not in spared)
    if cache.text_part is not None:
        assert isinstance(task, SupportsCache)
        task.use_texts(partial(_text_features, cache.store, cache.keyed[cache.text_part]))
    notes = [f"features are read from {cache.section.dir}; not loaded: {', '.join(spared) or 'nothing'}"]
    for name, split in cache.splits.items():
        notes += [f"data.{name}: {note}" for note in split.rows.drawn_otherwise(repeats=name == "train")]
    return found, notes, cache if filling else None


def cache_of(config: RunConfig, create: bool = False) -> tuple[TaskModule, RunCache]:
    """The task of a run, built, and its cache, for commands; see `open_cache`."""
    task = build_task(config)
    return task, open_cache(config, task, open_datasets(config, task), create=create)


def open_datasets(config: RunConfig, task: TaskModule) -> dict[str, Samples]:
    """The datasets of a run by split, checked against its task; see `in_buckets`. A collective call."""
    check_data(config, task)  # before any data is measured
    mode = config.data.loader.mode
    datasets = {
        name: build_split(config.registry, section, config.run.seed, mode, name)
        for name, section in config.data.splits.items()
    }
    check_class_names(task, datasets)
    return in_buckets(config, task, datasets)


def _text_features(store: Store, part: PartKey, text: str) -> Any:
    """The features of a text in the cache; None if it is not there."""
    return store.get(keys_of_texts(part, [text]))[0]


def _cached(cache: RunCache, split: CachedSplit, samples: Samples, fills: set[str]) -> Samples:
    needed = dict.fromkeys(text for part in cache.parts for text in part.texts)
    texts = {text: cache.texts[text] for text in needed}
    made = CachedSamples(split.rows, cache.keyed, cache.store.folder, split.path, texts, fills)
    return samples.read_from(made)


def _incomplete(cache: RunCache, lines: Sequence[str]) -> MMError:
    """The error that names samples and reasons."""
    text = "\n".join(f"  {line}" for line in lines)
    return CacheError(
        f"features of this run are not in the cache:\n{text}",
        where=str(cache.store.folder),
        hint="run `mm cache build` with this config, or set data.cache.missing: encode",
    )
