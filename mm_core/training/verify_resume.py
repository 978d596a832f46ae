"""`mm-train --verify-resume K`: is a run that was stopped, and resumed, the one that was not?"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mm_core.checkpoint.files import dcp
from mm_core.checkpoint.files import layout as files
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import find_checkpoint, open_checkpoint
from mm_core.config.load import load_config
from mm_core.errors import MMError
from mm_core.runtime.launch.launcher import COMMAND
from mm_core.runtime.launch.signals import STOPPED
from mm_core.telemetry.trackers.local import read_metrics

_NEVER = 10**9
"""Steps that no run has."""

_AT_ONCE = 1 << 30
"""Bytes of tensors that are compared at a time."""


@dataclass
class PartResult:
    """One part of the state: its tensors, how many are equal bit for bit, and the worst of the rest."""

    part: str
    tensors: int = 0
    equal: int = 0
    worst: float = 0.0
    worst_name: str = ""

    @property
    def ok(self) -> bool:
        """Whether every bit is the same."""
        return self.equal == self.tensors


def verify_resume(
    config: str, overrides: Sequence[str], steps: int, nproc: int, run: str, allow_code: bool = False
) -> tuple[list[PartResult], list[str]]:
    """Trains 2K steps, and K + K with a restart, in a folder that goes afterwards.

    Each run is the configured one, learning-rate schedule included, and is stopped where it is compared.
    Callbacks and trackers are left out.

    Args:
        config, overrides: the run, as on the command line.
        steps: K.
        nproc: ranks.
        run: the run's name.
        allow_code: as `--allow-code`.

    Returns:
        A result for each part of the state, and sentences on what else differs; [] when nothing does.

    Raises:
        MMError: when one of the three runs fails, or the run has less than 2K steps.
    """
    checked = load_config(config, overrides, allow_code=allow_code)
    # torch reads the tensors of an optimizer's own kind once its library is there.
    checked.registry.resolve("optimizer", checked.optimizer.type).load_target()
    with tempfile.TemporaryDirectory(prefix="mm_core-verify-") as folder:
        quiet = ["checkpoint.best=null", "log={every: 1, trackers: []}", "callbacks=[]", "profile=null"]
        # Nothing but the stop saves: a save is no part of what is compared.
        base = [*overrides, f"checkpoint.every={_NEVER}", "checkpoint.every_minutes=null", *quiet]
        base += ["--allow-code"] * allow_code
        whole, halves = (Path(folder) / name for name in ("whole", "halves"))
        _train(config, [*base, f"run.dir={whole}"], nproc, 2 * steps, "the uninterrupted run")
        reached = int(open_checkpoint(whole / run).facts["step"])
        if reached < 2 * steps:
            raise MMError(
                f"{steps} + {steps} steps are more than the run's {reached}",
                where="--verify-resume",
                accepted=f"1 to {reached // 2}" if reached > 1 else "a run of at least 2 steps",
            )
        stopped = [*base, f"run.dir={halves}"]
        _train(config, stopped, nproc, steps, "the first half")
        _train(config, stopped, nproc, 2 * steps, "the resumed half")
        return compare_runs(whole / run, halves / run)


def _train(config: str, overrides: Sequence[str], nproc: int, last: int, name: str) -> None:
    """One run, up to step `last`."""
    command = [*COMMAND, "train", "--config", config, *overrides]
    done = subprocess.run(
        [*command, "--nproc", str(nproc), "--stop-after", str(last)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    if done.returncode not in (0, STOPPED):
        said = done.stderr.strip()
        sentence = said[said.rfind("mm: error:") :].removeprefix("mm: error: ")
        raise MMError(
            f"{name} ended with exit code {done.returncode}\n{sentence}"[:4000], where="--verify-resume"
        )


def compare_runs(one: Path, other: Path) -> tuple[list[PartResult], list[str]]:
    """The newest checkpoints and the logged figures of two runs."""
    a, b = find_checkpoint(one), find_checkpoint(other)
    facts_a, facts_b = OpenedCheckpoint(a).facts, OpenedCheckpoint(b).facts
    remarks = [
        f"the fact {key!r} is {facts_a.get(key)} without and {facts_b.get(key)} with the restart"
        for key in sorted(facts_a.keys() | facts_b.keys())
        if facts_a.get(key) != facts_b.get(key)
    ]
    for name in ("loss", "grad_norm", "lr"):
        series_a, series_b = (_series(run, name) for run in (one, other))
        apart = [step for step in series_a if series_a[step] != series_b.get(step)]
        if apart or series_a.keys() != series_b.keys():
            remarks.append(f"{name} differs from step {apart[0] if apart else len(series_a)} on")
    return compare_checkpoints(a, b), remarks


def _series(run: Path, name: str) -> dict[int, object]:
    return {row["step"]: row[name] for row in read_metrics(run) if name in row}


def compare_checkpoints(one: Path, other: Path) -> list[PartResult]:
    """Every bit of every tensor of two checkpoints. MMError when they hold other tensors."""
    held, also = (set(OpenedCheckpoint(path).metadata.state_dict_metadata) for path in (one, other))
    if odd := sorted(held ^ also):
        raise MMError(f"only one of the checkpoints holds {files.listed(odd)}", where=f"{one}, {other}")
    results: dict[str, PartResult] = {}
    for (name, a), (_, b) in zip(_tensors(one), _tensors(other), strict=True):
        part = name.partition(".")[0]
        result = results.setdefault(part, PartResult(part))
        result.tensors += 1
        if a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
            result.equal += 1
            continue
        apart = float((a.double() - b.double()).abs().max()) if a.shape == b.shape else float("inf")
        if not apart <= result.worst or not result.worst_name:
            result.worst, result.worst_name = apart, name
    return list(results.values())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, whole, in the order of their names; about a gigabyte of them in memory at a time."""
    metadata = OpenedCheckpoint(checkpoint).metadata
    held: dict[str, Tensor] = {}
    size = 0
    for name in sorted(metadata.state_dict_metadata):
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)  # `read_metadata` refuses any other
        held[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        size += held[name].nbytes
        if size > _AT_ONCE:
            yield from _filled(checkpoint, metadata, held)
            held, size = {}, 0
    yield from _filled(checkpoint, metadata, held)


def _filled(checkpoint: Path, metadata: Metadata, held: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    nested: dict[str, dict[str, Tensor]] = {}
    for name, tensor in held.items():
        part, _, rest = name.partition(".")
        nested.setdefault(part, {})[rest] = tensor
    dcp.read_tensors(checkpoint, metadata, nested, alone=True)
    yield from held.items()


def render(results: Sequence[PartResult], remarks: Sequence[str]) -> str:
    """The outcome as a table, and what else differs."""
    lines = [f"{'part':<12}{'tensors':>8}{'bit-equal':>11}  worst difference"]
    for result in results:
        worst = "" if result.ok else f"{result.worst:.3g} in {result.worst_name}"
        lines.append(f"{result.part:<12}{result.tensors:>8}{result.equal:>11}  {worst}".rstrip())
    return "\n".join([*lines, *remarks])
