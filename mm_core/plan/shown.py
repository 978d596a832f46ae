"""The plan of a run that is only shown: files may be missing, and what is there is read as training would."""

from __future__ import annotations

import warnings
from dataclasses import replace

from mm_core.config.components import absent_inputs, inputs_of
from mm_core.config.sections import RunConfig
from mm_core.contracts import SupportsEvaluated, TaskModule
from mm_core.data.class_names import check_class_names
from mm_core.data.datasets.media_report import remarks
from mm_core.data.loading.plain import AnyDataset
from mm_core.data.loading.seeding import build_split
from mm_core.errors import RunWarning
from mm_core.plan.bucketing import in_buckets
from mm_core.plan.caching import in_cache, open_datasets
from mm_core.plan.planning import check_data, make_plan
from mm_core.plan.run_plan import RunPlan
from mm_core.plan.samples import Samples


def plan_shown(config: RunConfig, world: int, task: TaskModule) -> tuple[RunPlan, Samples | None]:
    """The plan of a run for `mm-train --dry-run`, with notes on what the sources of its data leave out.

    The samples of data.train come with it if they are there.

    A dataset whose fields name its files is opened once all of them are there, which reads every row; until
    then they are in the plan's `missing`.

    Args:
        config: the run's config.
        world: number of ranks.
        task: from `build_task`.

    Raises:
        MMError: as for `make_plan`; or data that are there cannot be used.
    """
    absent, notes = absent_inputs(config), []
    if config.data.cache is None or absent:
        check_data(config, task)
        there = [split for split in inputs_of(config) if split not in absent]
        sources: dict[str, object] = {split: _opened(config, split) for split in there}
        check_class_names(task, sources)
        read = in_buckets(config, task, {split: sources[split] for split in there if split == "train"})
        if config.data.cache is not None:
            notes.append("data.cache is not looked up while data are missing")
    else:
        opened = open_datasets(config, task)
        read, notes, _ = in_cache(config, task, opened)
        sources = {split: samples.source for split, samples in opened.items()}
    plan = make_plan(config, world, task, train=read.get("train"))
    for split, source in sources.items():
        notes += [f"data.{split}: {each}" for each in remarks(source)]
    return replace(plan, notes=(*plan.notes, *notes)), read.get("train")


def _opened(config: RunConfig, split: str) -> AnyDataset:
    section, mode = config.data.splits[split], config.data.loader.mode
    class_: object = config.registry.resolve("dataset", section.type).load_target()
    if isinstance(class_, SupportsEvaluated) and not (split == "train" and config.train.epochs is not None):
        # Rows one by one: a dataset that packs them would measure them all.
        section = replace(section, options={**class_.evaluated(section.options)})
    with warnings.catch_warnings():
        if getattr(class_, "remarked", False):
            warnings.simplefilter("ignore", RunWarning)  # the plan's notes have it
        return build_split(config.registry, section, config.run.seed, mode, split)
