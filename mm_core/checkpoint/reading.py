"""Finding checkpoints and reading what is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.files.host_copies import State
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.retention import complete_steps
from mm_core.config.load import load_config
from mm_core.config.sections import RunConfig
from mm_core.errors import CheckpointError
from mm_core.runtime.ranks import Ranks
from mm_core.weights.stored import TORCH_SUFFIXES

DOING = "reading the checkpoint"
"""What fails, in the sentence for a fault of the system."""

Which = Literal["latest", "best"]
Weights = Literal["auto", "model", "ema"]
"""Of a checkpoint: those that were trained, or their average; `auto`: the average where there is one."""


def load_model_only(
    path: Path | OpenedCheckpoint,
    model_state: Mapping[str, Tensor],
    weights: Weights = "model",
) -> files.Document:
    """Fills a model's tensors, by name, from a checkpoint or from a run's newest; returns the facts.

    For what trains no further, such as sampling. Called by all ranks, where there are several; of a sharded
    tensor each reads its part. Dtypes may differ: values are cast.

    Args:
        path: a checkpoint or a run.
        model_state: tensors by name, filled in place.
        weights: "ema" takes the average of what was trained, and the model's own tensors for the rest;
            "auto" does so where the checkpoint holds an average.

    Raises:
        CheckpointError: no complete checkpoint, a damaged one, one of another model, or no average in it.
    """
    ranks, checkpoint = Ranks.current(), verify(path)
    facts = ranks.agree(DOING, lambda: checked_facts(checkpoint, {"model": model_state}, exact=False))
    averaged = checkpoint.names("ema")
    if weights == "ema" and not averaged:
        raise CheckpointError(
            "this checkpoint holds no average of the weights",
            where=str(checkpoint.folder),
            hint="take --weights model",
        )
    if weights == "model":
        averaged = set()
    tensors = {
        "model": {name: tensor for name, tensor in model_state.items() if name not in averaged},
        "ema": {name: tensor for name, tensor in model_state.items() if name in averaged},
    }
    folder, metadata = checkpoint.folder, checkpoint.metadata
    if averaged:
        dcp.check_fits(metadata, {"ema": tensors["ema"]}, folder, exact=False)
    ranks.agree(DOING, lambda: dcp.read_tensors(folder, metadata, tensors, alone=ranks.alone))
    return facts


def verify(path: Path | OpenedCheckpoint) -> OpenedCheckpoint:
    """The checkpoint, every byte of which was checked against its checksums. Called by all ranks, which share
    the work.

    Raises:
        DamagedError: on all ranks, when any of them finds a fault.
    """
    ranks = Ranks.current()
    checkpoint = ranks.agree(DOING, lambda: open_checkpoint(path))
    ranks.agree(DOING, lambda: checkpoint.check(ranks))
    return checkpoint


def open_checkpoint(path: Path | OpenedCheckpoint) -> OpenedCheckpoint:
    """A checkpoint, or a run's newest; one that was opened before stays as it is."""
    return path if isinstance(path, OpenedCheckpoint) else OpenedCheckpoint(find_checkpoint(path))


def find_checkpoint(path: Path, which: Which = "latest", words: str = "") -> Path:
    """A complete checkpoint: `path` itself, or the newest (or best) of the run at `path`. words: that the
    caller takes in the place of a path, for the error."""
    if (path / files.CHECKSUMS).is_file() and ".tmp-" not in path.name:
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if steps := complete_steps(folder):
        return steps[max(steps)] if which == "latest" else _best(folder, steps)
    accepted = f"{words}a checkpoint folder (runs/NAME/checkpoints/step_N) or a run folder (runs/NAME)"
    hint = ""
    if not path.exists():
        what = "there is no such checkpoint"
    elif not path.is_dir():
        what = "this is a file, not a checkpoint folder"
    elif ".tmp-" in path.name or (path / files.METADATA).exists():
        what = "this checkpoint is incomplete: its save never finished"
    elif folder != path:
        what = "this run has no complete checkpoint"
    else:
        what = "this folder is neither a checkpoint nor a run"
        if held := sorted(file.name for file in path.iterdir() if file.suffix in TORCH_SUFFIXES):
            hint = f"files of torch.save are read one by one; name {path / held[0]}"
            hint += f", or another of the {len(held)} here" if len(held) > 1 else ""
    raise CheckpointError(what, where=str(path), accepted=accepted, hint=hint)


def checkpoint_at(run: str | Path, which: Which = "latest") -> Path:
    """The checkpoint that `DIR`, `DIR@STEP`, `DIR@best` or a checkpoint's own folder stands for; `which`
    is for a run without a mark."""
    if which == "best":
        return find_checkpoint(Path(run), which)
    folder, mark, step = str(run).rpartition("@")
    if not mark or Path(run).exists():
        return find_checkpoint(Path(run))
    place = Path(folder)
    if step in ("best", "latest"):
        return find_checkpoint(place, "best" if step == "best" else "latest")
    steps = complete_steps(place / "checkpoints" if (place / "checkpoints").is_dir() else place)
    if step.isdecimal() and int(step) in steps:
        return steps[int(step)]
    known = ", ".join(map(str, sorted(steps))) or "none: the folder has no complete checkpoint"
    raise CheckpointError(
        f"there is no complete checkpoint {step!r} of this run",
        where=folder,
        accepted=f"{known}, best, latest",
    )


@dataclass(frozen=True)
class StoredRun:
    """A run that is at work again.

    Attributes:
        checkpoint: that it is taken from.
        config: under the overrides, checked once.
    """

    checkpoint: OpenedCheckpoint
    config: RunConfig


def stored_run(
    run: str | Path | StoredRun,
    which: Which = "latest",
    overrides: Sequence[str] = (),
    allow_code: bool = False,
) -> StoredRun:
    """The checkpoint of `checkpoint_at`, and its config under the overrides. One that was opened before stays
    as it is. MMError where there is none, and TrustError for code that this user has not trained with, unless
    `allow_code`."""
    if isinstance(run, StoredRun):
        return run
    checkpoint = OpenedCheckpoint(checkpoint_at(run, which))
    file = checkpoint.folder / files.CONFIG
    config = load_config(file, overrides, spare_environment=True, stored=True, allow_code=allow_code)
    return StoredRun(checkpoint, config)


def _best(folder: Path, steps: Mapping[int, Path]) -> Path:
    """The checkpoint that BEST names."""
    with suppress(OSError, UnicodeDecodeError):
        name = (folder / "BEST").read_text(encoding="utf-8").strip()
        for path in steps.values():
            if path.name == name:
                return path
    raise CheckpointError(
        "this run names no best checkpoint",
        where=str(folder),
        hint="checkpoint.best sets the metric to judge by; the newest one is there",
    )


def checked_facts(checkpoint: OpenedCheckpoint, tensors: State, *, exact: bool) -> files.Document:
    """The facts of a checkpoint, of which everything was checked but the bytes of its tensors: it holds what
    `tensors` asks for."""
    facts = checkpoint.facts
    dcp.check_fits(checkpoint.metadata, tensors, checkpoint.folder, exact=exact)
    return facts
