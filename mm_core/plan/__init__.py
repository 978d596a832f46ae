"""The plan of a run: batches, steps, memory, FLOPs for a number of ranks, before anything is allocated."""

from mm_core.plan.base_choices import base_choices, table_of
from mm_core.plan.bucket_report import report_buckets
from mm_core.plan.bucketing import in_buckets
from mm_core.plan.caching import cache_of, in_cache, open_datasets
from mm_core.plan.planning import (
    build_frozen,
    build_task,
    check_data,
    make_plan,
)
from mm_core.plan.run_cache import RunCache
from mm_core.plan.run_plan import ComponentFact, MissingFile, ModuleFact, RunPlan
from mm_core.plan.shown import plan_shown

__all__ = [
    "ComponentFact",
    "MissingFile",
    "ModuleFact",
    "RunCache",
    "RunPlan",
    "base_choices",
    "build_frozen",
    "build_task",
    "cache_of",
    "check_data",
    "in_buckets",
    "in_cache",
    "make_plan",
    "open_datasets",
    "plan_shown",
    "report_buckets",
    "table_of",
]
