"""Finding the checkpoints of a run, and reading their weights, facts and config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.files.host_copies import State
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.retention import complete_steps
from mm_core.config.load import Fetch, load_config
from mm_core.config.sections import RunConfig
from mm_core.errors import CheckpointError
from mm_core.files import read_plain
from mm_core.runtime.ranks import Ranks
from mm_core.weights.adapters.inject import Structure
from mm_core.weights.stored import TORCH_SUFFIXES

DOING = "reading the checkpoint"
"""The action named in the message of a system error."""

Which = Literal["latest", "best"]
Weights = Literal["auto", "model", "ema"]
"""Weights of a checkpoint: `model` (trained), `ema` (their average), `auto` (the average if there is one)."""


def load_model_only(
    path: Path | OpenedCheckpoint,
    model_state: Mapping[str, Tensor],
    weights: Weights = "model",
) -> files.Document:
    """Loads only the model weights of a checkpoint, or of a run's newest one, and returns its facts.

    For sampling, evaluation and export, which do not train further. Called by all ranks; each rank reads its
    shard of a sharded tensor. Values are cast where dtypes differ.

    Args:
        path: a checkpoint or a run.
        model_state: tensors by name, filled in place.
        weights: "ema" loads the average of the trained weights, and the model's own tensors for the rest;
            "auto" does so if the checkpoint contains an average.

    Raises:
        CheckpointError: no complete checkpoint, a damaged one, one from another model, or no average in it.
    """
    ranks = Ranks.current()
    checkpoint = verify(path, ranks)
    facts = ranks.agree(DOING, lambda: checked_facts(checkpoint, {"model": model_state}, exact=False))
    averaged = checkpoint.names("ema")
    if weights == "ema" and not averaged:
        raise CheckpointError(
            "this checkpoint contains no average of the weights",
            where=str(checkpoint.folder),
            hint="use --weights model",
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


def verify(path: Path | OpenedCheckpoint, ranks: Ranks) -> OpenedCheckpoint:
    """Checks every byte of a checkpoint against its checksums and returns the opened checkpoint.

    Called by all ranks, which share the work.

    Raises:
        DamagedError: on all ranks, if any of them finds damage.
    """
    checkpoint = ranks.agree(DOING, lambda: open_checkpoint(path))
    ranks.agree(DOING, lambda: checkpoint.check(ranks))
    return checkpoint


def open_checkpoint(path: Path | OpenedCheckpoint) -> OpenedCheckpoint:
    """Opens a checkpoint folder, or a run's newest checkpoint; an opened checkpoint is returned unchanged."""
    return path if isinstance(path, OpenedCheckpoint) else OpenedCheckpoint(find_checkpoint(path))


def find_checkpoint(path: Path, which: Which = "latest", words: str = "") -> Path:
    """Finds a complete checkpoint: `path` itself, or the newest (or best) one of the run at `path`.

    Args:
        path: a checkpoint folder or a run folder.
        which: which checkpoint of a run folder.
        words: keywords that the caller accepts instead of a path, for the error message.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    if (path / files.CHECKSUMS).is_file() and ".tmp-" not in path.name:
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if steps := complete_steps(folder):
        return steps[max(steps)] if which == "latest" else _best(folder, steps)
    accepted = f"{words}a checkpoint folder (runs/NAME/checkpoints/step_N) or a run folder (runs/NAME)"
    hint = ""
    if not path.exists():
        what = "this checkpoint does not exist"
    elif not path.is_dir():
        what = "this is a file, not a checkpoint folder"
    elif ".tmp-" in path.name or (path / files.METADATA).exists():
        what = "this checkpoint is incomplete: its save never finished"
    elif folder != path:
        what = "this run has no complete checkpoint"
    else:
        what = "this folder is neither a checkpoint nor a run"
        if held := sorted(file.name for file in path.iterdir() if file.suffix in TORCH_SUFFIXES):
            hint = f"torch.save files are read one at a time: name {path / held[0]}"
            hint += f", or another of the {len(held)} here" if len(held) > 1 else ""
    raise CheckpointError(what, where=str(path), accepted=accepted, hint=hint)


def checkpoint_at(run: str | Path, which: Which = "latest") -> Path:
    """Finds the checkpoint that `DIR`, `DIR@STEP`, `DIR@best` or a checkpoint folder refers to.

    Args:
        run: a run folder, optionally followed by `@` and a step, `best` or `latest`; or a checkpoint folder.
        which: which checkpoint of a run folder without `@`.
    """
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
        f"this run has no complete checkpoint {step!r}",
        where=folder,
        accepted=f"{known}, best, latest",
    )


@dataclass(frozen=True)
class StoredRun:
    """A trained run that is opened again, for example to sample or evaluate.

    Attributes:
        checkpoint: the checkpoint to load weights from.
        config: the run's config with the overrides applied, checked once.
    """

    checkpoint: OpenedCheckpoint
    config: RunConfig


def stored_run(
    run: str | Path | StoredRun,
    which: Which = "latest",
    overrides: Sequence[str] = (),
    allow_code: bool = False,
    fetch: Fetch = True,
) -> StoredRun:
    """Opens a trained run: its checkpoint, and the checkpoint's config with overrides applied.

    Args:
        run: as for `checkpoint_at`; a `StoredRun` is returned unchanged.
        which: which checkpoint of a run folder.
        overrides: config overrides, as on the command line.
        allow_code: allow code that this user has not trained with.
        fetch: what to fetch of the names on the hub in its config, as for `load_config`.

    Raises:
        MMError: there is no checkpoint, or what is on the hub cannot be fetched.
        TrustError: the config names code that this user has not trained with, and `allow_code` is False.
    """
    if isinstance(run, StoredRun):
        return run
    checkpoint = OpenedCheckpoint(checkpoint_at(run, which))
    file = checkpoint.folder / files.CONFIG
    config = load_config(
        file, overrides, spare_environment=True, stored=True, allow_code=allow_code, fetch=fetch
    )
    return StoredRun(checkpoint, config)


def _best(folder: Path, steps: Mapping[int, Path]) -> Path:
    """The checkpoint that BEST names."""
    with suppress(OSError, UnicodeDecodeError):
        name = read_plain(folder / "BEST").decode().strip()
        for path in steps.values():
            if path.name == name:
                return path
    raise CheckpointError(
        "this run has recorded no best checkpoint",
        where=str(folder),
        hint="use the newest checkpoint instead of the best; runs that set checkpoint.best record one",
    )


def adapters_begun(adapters: Sequence[AdapterConfig], run_dir: Path) -> Structure:
    """The adapters in a run's newest checkpoint, if its config starts adapters from files; else {}.

    For a plan that is only shown (`--dry-run`).
    """
    if all(adapter.from_ is None for adapter in adapters):
        return {}
    steps = complete_steps(run_dir / "checkpoints")
    return OpenedCheckpoint(steps[max(steps)]).adapters if steps else {}


def checked_facts(checkpoint: OpenedCheckpoint, tensors: State, *, exact: bool) -> files.Document:
    """Facts of a checkpoint, after checking that it contains the requested tensors in the right shapes.

    Args:
        checkpoint: the checkpoint; the bytes of its tensors are not read.
        tensors: the tensors to be loaded.
        exact: also compare dtypes, and refuse tensors that were not requested.
    """
    facts = checkpoint.facts
    dcp.check_fits(checkpoint.metadata, tensors, checkpoint.folder, exact=exact)
    return facts
