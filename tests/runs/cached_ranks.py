"""Run by each of two ranks: opens a run's cache just while another job adds a shard to it.

usage: cached_ranks.py CONFIG CACHE ASIDE MISSING: rank 0 finds the shard, rank 1 has looked too early.
Prints what each rank is going to do.
"""

from __future__ import annotations

import time
from pathlib import Path

import mm_core
from mm_core.data.cache.store import Store
from mm_core.data.loading.seeding import build_split
from mm_core.errors import CacheError
from mm_core.plan import build_task, caching, in_buckets, in_cache
from mm_core.runtime.ranks import Ranks
from support.rank_program import run_as_rank


def program(config: str, cache: str, aside: str, missing: str) -> None:
    rank, looked = Ranks.current().rank, Path(aside).with_suffix(f".{missing}")

    def opened(folder: Path, **create: bool) -> Store:
        if create:
            return Store(folder, **create)
        while rank == 0 and not looked.exists():
            time.sleep(0.01)
        if rank == 0:
            Path(aside).rename(Path(cache) / "shards/added.safetensors")
        store = Store(folder)
        looked.touch()
        return store

    caching.Store = opened
    run = mm_core.load_config(config, [f"data.cache.dir={cache}", f"data.cache.missing={missing}"])
    task = build_task(run)
    train = build_split(run.registry, run.data.splits["train"], 0, run.data.loader.mode, "train")
    try:
        _, _, filled = in_cache(run, task, in_buckets(run, task, {"train": train}))
        print(sorted(task.frozen), filled is not None)
    except CacheError as error:
        print(error.what.splitlines()[1].strip()[:60])


if __name__ == "__main__":
    run_as_rank(program)
