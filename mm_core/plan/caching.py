"""Opening the feature cache of a run, and the datasets that read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mm_core.config.sections import CacheSection, RunConfig
from mm_core.contracts import CachePart, SupportsCache, TaskModule
from mm_core.data.cache.hashes import FILES, FileHashes
from mm_core.data.cache.keys import FEATURES, component_facts, digest_of, libraries
from mm_core.data.cache.rows import CacheRows, PartKey, keys_of_texts, rows_of_dataset
from mm_core.data.cache.samples import CachedSamples
from mm_core.data.cache.shards import KEY
from mm_core.data.cache.store import Store
from mm_core.data.class_names import check_class_names
from mm_core.data.loading.plain import promise_of
from mm_core.data.loading.seeding import build_split
from mm_core.data.rows.mapped_rows import read_once
from mm_core.errors import CacheError, PlanError
from mm_core.plan.bucketing import in_buckets
from mm_core.plan.planning import build_task, check_data
from mm_core.plan.run_cache import RunCache
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
    section = config.data.cache or CacheSection()
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
        options, variants = config.data.splits[split].options, section.variants if split == "train" else 1
        rows[split] = rows_of_dataset(dataset.dataset, options, variants, config.run.seed, f"data.{split}")
    folder = Path(section.dir)

    def begin(into: Path) -> list[PartKey]:
        """Makes an empty table of keys for each split."""
        keyed = _keyed(config, task, parts, Store(folder, create=create))
        for name, own in rows.items():
            shape = (len(own), own.variants, len(parts))
            np.lib.format.open_memmap(into / f"{name}.npy", "w+", KEY, shape).flush()
        return keyed

    tables, keyed = read_once(begin)
    _fill_tables(rows, keyed, folder, tables)
    splits = {name: CachedSamples(own, keyed, folder, tables / f"{name}.npy") for name, own in rows.items()}
    texts = [text for part in keyed for text in part.texts]
    if config.validation is not None and (samples := config.validation.samples) is not None:
        texts += [*samples.prompts, samples.negative_prompt]
    keys = {text: keys_of_texts(part, [text]) for part in keyed if part.of_text for text in texts}
    return RunCache(Store(folder), keyed, splits, keys, section)


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


def _keyed(config: RunConfig, task: TaskModule, parts: Sequence[CachePart], store: Store) -> list[PartKey]:
    """The parts with their digests, of files that the cache remembers or that are read now."""
    components: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for part in parts for name in part.components):
        section: ComponentConfig = config.task.options[name]
        components[name] = component_facts(section, getattr(task, name), section.type, store.hashes)
    store.hashes.save()
    found = []
    for part in parts:
        own, of_text = {name: components[name] for name in part.components}, part.of == "text"
        facts = {"part": part.name, "settings": dict(part.settings), "components": own, "version": FEATURES}
        facts |= {"libraries": libraries(of_text), "float32_matmul": config.run.float32_matmul or "highest"}
        more = (part.fields, part.caption, part.components, part.texts, facts)
        found.append(PartKey(part.name, of_text, digest_of(facts), *more))
    return found


def _fill_tables(rows: Mapping[str, CacheRows], keyed: Sequence[PartKey], folder: Path, tables: Path) -> None:
    """Fills in the keys: the ranks share the files to be hashed, then those of a host its table."""
    ranks = Ranks.current()
    mates = [rank for rank, place in enumerate(ranks.gather(str(tables))) if place == str(tables)]
    shares = [(ranks.rank, ranks.count), (mates.index(ranks.rank), len(mates))]
    for share in dict.fromkeys(shares):
        hashes = FileHashes(folder / FILES)
        for name, own in rows.items():
            table = np.load(tables / f"{name}.npy", mmap_mode="r+")
            own.fill(table, keyed, hashes, share)
            table.flush()
        hashes.save()
        ranks.gather(None)  # until all have filled in their shares


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
    rows, lines = cache.survey({})
    mine = {(row.split, row.part) for row in rows if row.missing or row.stale}
    everyone = Ranks.current().gather((mine, lines))
    lacking = set[tuple[str, str]]().union(*(each for each, _ in everyone))
    if lacking and not fills:
        text = "\n".join(f"  {line}" for line in next(each for _, each in everyone if each))
        raise CacheError(
            f"features of this run are not in the cache:\n{text}",
            where=str(cache.store.folder),
            hint="run `mm cache build` with this config, or set data.cache.missing: encode",
        )
    found, splits = dict(datasets), {split for split, _ in lacking}
    filling = {part for split, part in lacking if split in ("train", "texts")}
    online = {name for name in cache.splits if name != "train" and splits & {name, "texts"}}
    for name in cache.splits.keys() - online:
        found[name] = _cached(cache.splits[name], datasets[name], filling if name == "train" else set())
    samples = config.validation is not None and config.validation.samples is not None
    incomplete = {part for _, part in lacking}
    held = [p for p in cache.parts if online or p.name in incomplete or (samples and not p.of_text)]
    covered, needed = ({name for part in each for name in part.components} for each in (cache.parts, held))
    spared = [name for name in task.frozen if name in covered - needed]
    task.frozen = tuple(name for name in task.frozen if name not in spared)
    for part in cache.parts:
        if part.of_text:
            assert isinstance(task, SupportsCache)
            task.use_texts(partial(_text_features, cache.store, part))
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


def _cached(split: CachedSamples, samples: Samples, fills: set[str]) -> Samples:
    return samples.read_from(replace(split, fills=fills))
