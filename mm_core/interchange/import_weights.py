"""Importing weights as a run's first checkpoint: `mm import`.

It works like the start of a run without data and frozen components: the task is built on the meta device,
sharded, filled by streaming, and saved as step 0. The run then resumes from that checkpoint.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from mm_core.checkpoint.retention import complete_steps, incomplete_steps
from mm_core.checkpoint.run_manifest import check_plugins, run_manifest
from mm_core.config.dump import to_yaml
from mm_core.config.sections import InitFromSection, RunConfig
from mm_core.config.stored import remember
from mm_core.contracts import Engine, Randomness
from mm_core.errors import CheckpointError
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.left_out import WeightSources
from mm_core.modules.quantised import check_in_files
from mm_core.optim.configured import make_optimizer
from mm_core.optim.ema import EMA
from mm_core.plan import build_task, make_plan
from mm_core.runtime.process_group import process_group
from mm_core.runtime.ranks import Ranks
from mm_core.training.assembly import make_store, state_of
from mm_core.weights.adapters.record import record_of


def import_weights(config: RunConfig, path: Path, format: str | None = None) -> tuple[Path, list[str]]:
    """Imports weights files as checkpoint `step_00000000` of a new run. Call it on all ranks.

    Args:
        config: the run's config. If `init_from` is set, it controls how names are matched, but `path` is
            read. Components that name their own files are filled from those first.
        path: weights file or folder.
        format: name of its weight format; None takes the one that fits best.

    Returns:
        The checkpoint's folder, and sentences about the weights that were read.

    Raises:
        MMError: weights that cannot be read or do not fit; the run has checkpoints already.
    """
    with process_group(), closing(make_store(config)) as store:
        ranks = Ranks.current()
        ranks.on_first("checking for earlier checkpoints", lambda: _refuse_begun(store.folder))
        check_plugins(config.registry, ranks)
        init = replace(config.init_from or InitFromSection(path=""), path=str(path), format=format)
        task = build_task(config)
        engine: Engine = config.registry.build("engine", config.engine)
        # Without its length, which may need the data, and its batch size: training may have other ranks.
        train = replace(config.train, steps=config.train.steps or 0, epochs=None, global_batch_size=None)
        plan = make_plan(replace(config, train=train), ranks.count, task, engine, purpose="import")
        # Imported weights are stored unless the config forbids it.
        held = config.checkpoint.frozen is not False
        sources = WeightSources(task, init, config.registry, config.allow_code)
        weights = FileWeights(sources, config.train.adapters, held)
        base, adapters = weights.left_out(), record_of(task, config.train.adapters)
        check_in_files(task, base.names)
        seed = config.run.seed
        made = partial(make_optimizer, config.registry, config.optimizer, config.train)
        engine.prepare(task, plan.engine, made, Randomness(seed), weights)
        ema = EMA(engine.shards, config.ema) if config.ema is not None else None
        store.begin(0)
        facts = {
            "seed": seed,
            "samples": 0.0,
            "world": plan.engine.world,
            "ema_updates": 0,
            "imported": {"path": str(path), "format": format},
        }
        rows = base.rows(config.literals.keys() - {"init_from.path"})
        manifest = run_manifest(config, plan, {}, adapters, rows)
        saved = store.save(0, state_of(engine, ema, base.names), facts, to_yaml(config), manifest=manifest)
        store.wait()
        note = remember(config) if ranks.rank == 0 else None
        return saved, [*weights.notes(), *([note] if note is not None else [])]


def _refuse_begun(folder: Path) -> None:
    """CheckpointError if the run has checkpoints already."""
    if found := [*complete_steps(folder).values(), *incomplete_steps(folder)]:
        raise CheckpointError(
            f"this run has checkpoints already: {max(found).name}",
            where=str(folder),
            hint="choose a different run.name, or move these checkpoints away",
        )
