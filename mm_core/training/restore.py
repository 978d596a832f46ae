"""Fills engine and average from the run's own checkpoint, and tells what a person should know of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mm_core.checkpoint.files.layout import Document
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.resume_check import check_resume
from mm_core.checkpoint.store import CheckpointStore
from mm_core.contracts import Engine
from mm_core.errors import CheckpointError
from mm_core.optim.ema import EMA
from mm_core.runtime.ranks import Ranks


@dataclass
class Restored:
    """Steps already taken, the facts of the checkpoint, and what a person should know of it."""

    step: int = 0
    facts: Document = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def restore(
    store: CheckpointStore,
    source: OpenedCheckpoint | None,
    refused: Sequence[CheckpointError],
    engine: Engine,
    ema: EMA | None,
    manifest: Document,
    allow: Sequence[str],
    steps: int,
    absent: Collection[str] = (),
) -> Restored:
    """Restores the engine and the average for a run of `steps` from the checkpoint `source`, as
    `store.open` found it; None begins anew. Called by all ranks.

    `refused`: damaged checkpoints that were passed over, loudly, for an older one. `absent`: weights that the
    checkpoint leaves to other files, which the engine has read.

    Raises:
        CheckpointError: a change since then that `allow` does not name.
    """
    restored = Restored()
    for fault in refused:
        restored.notes.append(f"warning: {fault.where} is passed over: {fault.what}")
    if source is not None:
        restored.facts = source.facts
        restored.step = int(source.facts["step"])
        restored.notes.append(f"resumed {source.folder} at step {restored.step} of {steps}")
        restored.notes += check_resume(source.manifest, manifest, allow, say=Ranks.current().rank == 0)
        state = engine.state_template({name.rpartition(".")[0] for name in source.names("optimizer")})
        state["model"] = {name: tensor for name, tensor in state["model"].items() if name not in absent}
        averaged = "ema" in source.parts
        if ema is not None and averaged:
            state["ema"] = ema.state_dict()
        store.load(source, state, verified=True)
        if ema is not None and averaged:
            ema.updates = int(source.facts.get("ema_updates", 0))
        elif ema is not None:
            ema.reset()
            restored.notes.append(
                "the checkpoint holds no average of the weights: it begins with the weights"
            )
    store.begin(restored.step, [Path(str(fault.where)) for fault in refused])
    return restored
