"""Restoring the engine and the weight average of a run from its checkpoint, with notes for the user."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from mm_core.schema.fields import Resume


@dataclass
class Restored:
    """The state of a training run after restoring it from a checkpoint.

    Attributes:
        step: steps already taken.
        facts: the checkpoint's facts.
        notes: messages for the user.
    """

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
    marks: Mapping[str, Resume],
    allow: Sequence[str],
    steps: int,
    absent: Collection[str] = (),
) -> Restored:
    """Restores the engine and the weight average of a training run from its checkpoint. Called by all ranks.

    Args:
        store: the run's checkpoints.
        source: the checkpoint, as `store.open` returned it; None for a new run.
        refused: errors about damaged checkpoints that were skipped for an older one.
        engine: is filled in place.
        ema: is filled in place; None without an average.
        manifest: the manifest of the run as it is now.
        marks: of the fields of its config, from `resume_marks`.
        allow: keys whose change since the checkpoint is intended.
        steps: steps of the complete run.
        absent: names of weights that the checkpoint leaves in other files, which the engine has read.

    Raises:
        CheckpointError: the run has changed in a way that `allow` does not cover.
    """
    restored = Restored()
    for fault in refused:
        restored.notes.append(f"warning: the damaged checkpoint {fault.where} is skipped: {fault.what}")
    if source is not None:
        restored.facts = source.facts
        restored.step = int(source.facts["step"])
        restored.notes.append(f"resumed {source.folder} at step {restored.step} of {steps}")
        first = Ranks.current().rank == 0
        restored.notes += check_resume(source.manifest, manifest, allow, marks=marks, report=first)
        state = engine.state_template({name.rpartition(".")[0] for name in source.names("optimizer")})
        state["model"] = {name: tensor for name, tensor in state["model"].items() if name not in absent}
        if "loss_scale" not in source.parts:  # the checkpoint is of another engine or precision
            state.pop("loss_scale", None)
        averaged = "ema" in source.parts
        if ema is not None and averaged:
            state["ema"] = ema.state_dict()
        store.load(source, state, verified=True)
        if ema is not None and averaged:
            ema.updates = int(source.facts.get("ema_updates", 0))
        elif ema is not None:
            ema.reset()
            restored.notes.append(
                "the checkpoint contains no average of the weights: the average starts from the weights"
            )
    store.begin(restored.step, [Path(str(fault.where)) for fault in refused])
    return restored
