"""The plan of a run: batches, steps, memory, FLOPs for a number of ranks, before anything is allocated."""

from mm_core.plan.activations import Activations, shared_activations
from mm_core.plan.base_choices import base_choices, table_of
from mm_core.plan.bucket_report import notes_of_data, report_buckets
from mm_core.plan.bucketing import bucket_order, in_buckets
from mm_core.plan.caching import cache_of, in_cache, open_datasets, plan_with_cache
from mm_core.plan.planning import (
    build_frozen,
    build_task,
    check_data,
    make_plan,
    sample_order,
)
from mm_core.plan.run_cache import RunCache
from mm_core.plan.run_plan import ComponentFact, MissingFile, ModuleFact, RunPlan

__all__ = [
    "Activations",
    "ComponentFact",
    "MissingFile",
    "ModuleFact",
    "RunCache",
    "RunPlan",
    "base_choices",
    "bucket_order",
    "build_frozen",
    "build_task",
    "cache_of",
    "check_data",
    "in_buckets",
    "in_cache",
    "make_plan",
    "notes_of_data",
    "open_datasets",
    "plan_with_cache",
    "report_buckets",
    "sample_order",
    "shared_activations",
    "table_of",
]
