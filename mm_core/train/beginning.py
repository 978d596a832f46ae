"""How a run begins: from a checkpoint, from the weights of another run, or from nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mm_core.contracts import Engine
from mm_core.errors import CheckpointError
from mm_core.train.agreement import Ranks
from mm_core.train.checkpoint import CheckpointStore
from mm_core.train.checkpoint_dcp import stepped_parameters, stored_parts
from mm_core.train.checkpoint_reading import read_run_manifest
from mm_core.train.ema import EMA
from mm_core.train.resume_check import check_resume


@dataclass
class Beginning:
    """Steps already taken, the facts of the checkpoint, and what a person should know of it."""

    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def begin(
    store: CheckpointStore,
    source: Path | None,
    refused: Sequence[CheckpointError],
    engine: Engine,
    ema: EMA | None,
    manifest: Mapping[str, Any],
    allow: Sequence[str],
    steps: int,
    absent: Collection[str] = (),
) -> Beginning:
    """Restores the engine and the average for a run of `steps` from the checkpoint `source`, as
    `store.open` found it; None begins anew. Called by all ranks.

    `refused`: damaged checkpoints that were passed over, loudly, for an older one. `absent`: weights that the
    checkpoint leaves to other files, which the engine has read.

    Raises:
        CheckpointError: a change since then that `allow` does not name.
    """
    begun = Beginning()
    for fault in refused:
        begun.notes.append(f"warning: {fault.where} is passed over: {fault.what}")
    if source is not None:
        _restore(store, source, engine, ema, manifest, allow, begun, absent)
        begun.notes.insert(len(refused), f"resumed {source} at step {begun.step} of {steps}")
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
    absent: Collection[str],
) -> None:
    """Fills model, optimizer and average in place."""
    ranks = Ranks.current()
    begun.facts = ranks.agree("reading the checkpoint", lambda: store.read_facts(source))
    begun.step = int(begun.facts["step"])
    saved = ranks.agree("reading the checkpoint", lambda: read_run_manifest(source))
    begun.notes += check_resume(saved, manifest, allow, say=dist.get_rank() == 0)
    stepped, parts = ranks.agree(
        "reading the checkpoint", lambda: (stepped_parameters(source), stored_parts(source))
    )
    state = engine.state_template(stepped)
    state["model"] = {name: tensor for name, tensor in state["model"].items() if name not in absent}
    averaged = "ema" in parts
    if ema is not None and averaged:
        state["ema"] = ema.state_dict()
    store.load(source, state, verified=True)
    if ema is not None and averaged:
        ema.updates = int(begun.facts.get("ema_updates", 0))
    elif ema is not None:
        ema.reset()
        begun.notes.append("the checkpoint holds no average of the weights: it begins with the weights")
