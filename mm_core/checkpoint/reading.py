"""Finding checkpoints and reading what is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.files import facts as checkpoint_facts
from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.files.metadata import read_metadata
from mm_core.checkpoint.retention import complete_steps
from mm_core.config.load import load_config
from mm_core.config.schema import RunConfig
from mm_core.errors import CheckpointError
from mm_core.runtime.ranks import Ranks
from mm_core.weights.stored import TORCH_SUFFIXES

Which = Literal["latest", "best"]
Weights = Literal["auto", "model", "ema"]
"""Of a checkpoint: those that were trained, or their average; `auto`: the average where there is one."""


def load_model_only(
    path: Path, model_state: dict[str, Tensor], weights: Literal["auto", "model", "ema"] = "model"
) -> dict[str, Any]:
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
    folder, ranks = find_checkpoint(path), Ranks.current()
    doing = "reading the checkpoint"
    sums = ranks.agree(doing, lambda: open_files(folder))
    ranks.agree(doing, lambda: files.check_contents(folder, sums, shares(sums, ranks)))
    facts, metadata = ranks.agree(doing, lambda: open_checkpoint(folder, {"model": model_state}, exact=False))
    averaged = {name.removeprefix("ema.") for name in metadata.state_dict_metadata if name.startswith("ema.")}
    if weights == "ema" and not averaged:
        raise CheckpointError(
            "this checkpoint holds no average of the weights", where=str(folder), hint="take --weights model"
        )
    if weights == "model":
        averaged = set()
    tensors = {
        "model": {name: tensor for name, tensor in model_state.items() if name not in averaged},
        "ema": {name: tensor for name, tensor in model_state.items() if name in averaged},
    }
    if averaged:
        dcp.compare(metadata, {"ema": tensors["ema"]}, folder, exact=False)
    ranks.agree(doing, lambda: dcp.read_tensors(folder, metadata, tensors, alone=ranks.alone))
    return facts


def shares(manifest: Mapping[str, files.Checksum], ranks: Ranks) -> list[str]:
    """The files whose bytes this rank checks: largest first, dealt in turn."""
    return sorted(manifest, key=lambda name: (-manifest[name].size, name))[ranks.rank :: ranks.count]


def read_facts(path: Path) -> dict[str, Any]:
    """The facts that a checkpoint was saved with, `step` among them, and what a validation added later."""
    manifest = open_files(path)
    files.check_contents(path, manifest, [files.FACTS])
    return {**checkpoint_facts.read_facts(path), **checkpoint_facts.read_later(path)}


def read_run_manifest(path: Path) -> dict[str, Any]:
    """What the run that saved a checkpoint was made of; {} for one that does not say."""
    sums = files.read_manifest(path)
    if files.MANIFEST not in sums:
        return {}
    files.check_contents(path, sums, [files.MANIFEST])
    return checkpoint_facts.read_manifest(path)


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
        return find_checkpoint(place, step)  # type: ignore[arg-type]  # mypy does not narrow by `in`
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
        checkpoint: its folder.
        config: under the overrides, checked once.
    """

    checkpoint: Path
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
    source = checkpoint_at(run, which)
    file = source / "config.yaml"
    config = load_config(file, overrides, spare_environment=True, stored=True, allow_code=allow_code)
    return StoredRun(source, config)


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


def open_files(path: Path) -> dict[str, files.Checksum]:
    """The checksums of a checkpoint whose files are all there, at their sizes."""
    if not path.is_dir():
        find_checkpoint(path)
    manifest = files.read_manifest(path)
    files.check_present(path, manifest)
    return manifest


def open_checkpoint(
    path: Path, tensors: Mapping[str, Any], *, exact: bool
) -> tuple[dict[str, Any], Metadata]:
    """Checks everything about a checkpoint but the bytes of its tensors."""
    facts = read_facts(path)
    metadata = read_metadata(path, files.read_manifest(path))
    dcp.compare(metadata, tensors, path, exact=exact)
    return facts, metadata
