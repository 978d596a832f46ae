"""Weights from elsewhere as a run's first checkpoint: `mm import`.

As a run begins, without its data and frozen components: the task on meta, sharded, filled by streaming,
and saved as step 0. The run then resumes from it like from any other.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from mm_core.checkpoint.retention import complete_steps, incomplete_steps
from mm_core.checkpoint.run_manifest import check_plugins, run_manifest
from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.dump import to_yaml
from mm_core.config.sections import InitFromSection, RunConfig
from mm_core.contracts import Engine, Randomness, TaskModule
from mm_core.errors import CheckpointError
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.known_code import remember
from mm_core.optim.ema import EMA
from mm_core.plan import RunPlan, build_task, make_plan
from mm_core.runtime.process_group import process_group
from mm_core.runtime.ranks import Ranks
from mm_core.training.assembly import make_optimizer, make_store, state_of
from mm_core.weights.adapters.record import record_of


def import_weights(config: RunConfig, path: Path, format: str | None = None) -> tuple[Path, list[str]]:
    """Makes `step_00000000` of the run that `config` describes from the weights at `path`. Called as the
    rank that the environment names. Returns the checkpoint, and what was read in words.

    Args:
        config: of the run. Its `init_from` says how names are matched, where it is set; its path gives way
            to `path`, and components that name files of their own are filled from these first.
        path: file or folder. format: name of its weight format; None takes the one that fits best.

    Raises:
        MMError: weights that cannot be read or do not fit; a run that has checkpoints already.
    """
    with process_group():
        store = make_store(config)
        try:
            Ranks.current().on_first("looking at the run's checkpoints", lambda: _refuse_begun(store.folder))
            return _import(config, store, path, format)
        finally:
            store.close()


def _refuse_begun(folder: Path) -> None:
    """CheckpointError for a run that has checkpoints already."""
    if found := [*complete_steps(folder).values(), *incomplete_steps(folder)]:
        raise CheckpointError(
            f"this run has checkpoints already: {max(found).name}",
            where=str(folder),
            hint="choose another run.name, or move them away",
        )


def _import(
    config: RunConfig, store: CheckpointStore, path: Path, format: str | None
) -> tuple[Path, list[str]]:
    check_plugins(config)
    init = replace(config.init_from or InitFromSection(path=""), path=str(path), format=format)
    task = build_task(config)
    engine: Engine = config.registry.build("engine", config.engine)
    plan = _plan(config, task, engine)
    held = config.checkpoint.frozen is not False  # what is imported is held, unless the config says otherwise
    imported = replace(config, init_from=init, checkpoint=replace(config.checkpoint, frozen=held))
    weights = FileWeights(imported, task)
    engine.prepare(task, plan.engine, partial(make_optimizer, config), Randomness(config.run.seed), weights)
    ema = EMA(dict(engine.named_parameters()), config.ema) if config.ema is not None else None
    store.begin(0)
    facts = {
        "seed": config.run.seed,
        "samples": 0.0,
        "world": plan.engine.world,
        "ema_updates": 0,
        "imported": {"path": str(path), "format": format},
    }
    base, adapters = weights.left_out(), record_of(task, config.train.adapters)
    rows = base.rows(config.literals.keys() - {"init_from.path"})
    manifest = run_manifest(config, plan, {}, adapters, rows)
    saved = store.save(0, state_of(engine, ema, base.names), facts, to_yaml(config), manifest=manifest)
    store.wait()
    note = remember(config) if Ranks.current().rank == 0 else None
    return saved, [*weights.notes(), *([note] if note is not None else [])]


def _plan(config: RunConfig, task: TaskModule, engine: Engine) -> RunPlan:
    """The plan of the run. Its length is not needed, and would ask for the data where epochs set it; nor is
    its batch, which other ranks may train."""
    train = replace(config.train, steps=config.train.steps or 0, epochs=None, global_batch_size=None)
    return make_plan(replace(config, train=train), Ranks.current().count, task, engine)
