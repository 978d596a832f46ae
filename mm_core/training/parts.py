"""The parts of a training run that compute, and their state from its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mm_core.checkpoint.files.layout import Document
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.resume_check import check_resume
from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.components import resume_marks
from mm_core.config.sections import RunConfig
from mm_core.contracts import Engine, TaskModule
from mm_core.errors import CheckpointError
from mm_core.loading.initial_weights import FileWeights, ResumedWeights
from mm_core.loading.left_out import ExternalWeights
from mm_core.optim.ema import EMA
from mm_core.plan import RunCache, RunPlan
from mm_core.plan.samples import Samples
from mm_core.runtime.ranks import Ranks


@dataclass(frozen=True)
class RunParts:
    """The parts of a training run that compute: task, engine, datasets, plan and weights.

    Attributes:
        config: the checked config.
        ranks: of the run.
        store: the run's checkpoints.
        source: the checkpoint to resume from; None for a new run.
        refused: errors about damaged checkpoints that were skipped for an older one.
        task: computes losses.
        engine: holds the weights.
        datasets: by split.
        plan: of the run.
        weights: the initial weights.
        external: frozen weights that checkpoints do not store and that are read from their original files.
        ema: the moving average of the weights; None without one.
        filled: the feature cache to which training adds what it lacks; None if it adds nothing.
    """

    config: RunConfig
    ranks: Ranks
    store: CheckpointStore
    source: OpenedCheckpoint | None
    refused: Sequence[CheckpointError]
    task: TaskModule
    engine: Engine
    datasets: Mapping[str, Samples]
    plan: RunPlan
    weights: ResumedWeights | FileWeights
    external: ExternalWeights
    ema: EMA | None
    filled: RunCache | None


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


def restore(parts: RunParts, manifest: Document, allow: Sequence[str]) -> Restored:
    """Restores the engine and the weight average of a training run from its checkpoint. Called by all ranks.

    Args:
        parts: the run's parts, whose engine and average are filled in place.
        manifest: the manifest of the run as it is now.
        allow: keys whose change since the checkpoint is intended.

    Raises:
        CheckpointError: the run has changed in a way that `allow` does not cover.
    """
    source, ema, restored = parts.source, parts.ema, Restored()
    for fault in parts.refused:
        restored.notes.append(f"warning: the damaged checkpoint {fault.where} is skipped: {fault.what}")
    if source is not None:
        restored.facts = source.facts
        restored.step = int(source.facts["step"])
        restored.notes.append(f"resumed {source.folder} at step {restored.step} of {parts.plan.steps}")
        first, marks = parts.ranks.rank == 0, resume_marks(parts.config)
        restored.notes += check_resume(source.manifest, manifest, allow, marks=marks, report=first)
        state = parts.engine.state_template({name.rpartition(".")[0] for name in source.names("optimizer")})
        absent = parts.weights.absent.names if isinstance(parts.weights, ResumedWeights) else ()
        state["model"] = {name: tensor for name, tensor in state["model"].items() if name not in absent}
        if source.names("loss_scale") != {*state.get("loss_scale", {})}:  # of another engine or precision
            state.pop("loss_scale", None)
        averaged = "ema" in source.parts
        if ema is not None and averaged:
            state["ema"] = ema.state_dict()
        parts.store.load(source, state, verified=True)
        if ema is not None and averaged:
            ema.updates = int(source.facts.get("ema_updates", 0))
        elif ema is not None:
            ema.reset()
            restored.notes.append(
                "the checkpoint contains no average of the weights: the average starts from the weights"
            )
    parts.store.begin(restored.step, [Path(str(fault.where)) for fault in parts.refused])
    return restored
