"""How a run begins: from a checkpoint, from the weights of another run, or from nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mm_core.config.schema import RunConfig
from mm_core.contracts import Engine
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint import CheckpointStore
from mm_core.train.checkpoint_dcp import stepped_parameters, stored_parts
from mm_core.train.checkpoint_reading import read_run_manifest
from mm_core.train.ema import EMA
from mm_core.train.resume_check import check_resume
from mm_core.train.warm_start import warm_start


@dataclass
class Beginning:
    """Steps already taken, the facts of the checkpoint, and what a person should know of it."""

    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def begin(
    config: RunConfig,
    store: CheckpointStore,
    resume: str,
    engine: Engine,
    ema: EMA | None,
    manifest: Mapping[str, Any],
    allow: Sequence[str],
    steps: int,
) -> Beginning:
    """Restores the engine and the average, or warm-starts them, for a run of `steps`. Called by all ranks.

    A damaged newest checkpoint is passed over, loudly, for the next older one.

    Raises:
        CheckpointError: nothing whole to resume from, or a change since then that `allow` does not name.
    """
    source, refused = store.open(resume)
    begun = Beginning()
    for fault in refused:
        begun.notes.append(f"warning: {fault.where} is passed over: {fault.what}")
    if source is not None:
        _restore(store, source, engine, ema, manifest, allow, begun)
        begun.notes.insert(len(refused), f"resumed {source} at step {begun.step} of {steps}")
    elif config.init_from is not None:
        model = engine.state_dict()["model"]
        begun.notes.append(f"{config.init_from.path}: {warm_start(config.init_from, model)}")
        if ema is not None:
            ema.reset()
    store.begin(begun.step, [Path(str(fault.where)) for fault in refused])
    if source is not None:
        store.verify_digests(source)
    return begun


def _restore(
    store: CheckpointStore,
    source: Path,
    engine: Engine,
    ema: EMA | None,
    manifest: Mapping[str, Any],
    allow: Sequence[str],
    begun: Beginning,
) -> None:
    """Fills model, optimizer and average in place."""
    ranks = Ranks.current()
    begun.facts = ranks.agree("reading the checkpoint", lambda: store.read_facts(source))
    begun.step = int(begun.facts["step"])
    saved = ranks.agree("reading the checkpoint", lambda: read_run_manifest(source))
    begun.notes += check_resume(saved, manifest, allow, say=dist.get_rank() == 0)
    state = engine.state_template(stepped_parameters(source))
    averaged = "ema" in stored_parts(source)
    if ema is not None and averaged:
        state["ema"] = ema.state_dict()
    store.load(source, state, verified=True)
    if ema is not None and averaged:
        ema.updates = int(begun.facts.get("ema_updates", 0))
    elif ema is not None:
        ema.reset()
        begun.notes.append("the checkpoint holds no average of the weights: it begins with the weights")
