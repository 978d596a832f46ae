"""`mm-train --verify-resume K`: checks that a resumed run equals an uninterrupted one, bit for bit."""

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
from mm_core.checkpoint.opened import OpenedCheckpoint
from mm_core.checkpoint.reading import find_checkpoint, open_checkpoint
from mm_core.config.load import load_config
from mm_core.errors import MMError, plural, some
from mm_core.runtime.launch.launcher import COMMAND
from mm_core.runtime.launch.signals import STOPPED
from mm_core.telemetry.trackers.local import read_metrics

QUIET = (
    *("checkpoint.best=null", f"checkpoint.every={10**9}", "checkpoint.every_minutes=null"),
    *("callbacks=[]", "profile=null", "log={every: 1, trackers: []}"),
)
"""Overrides that leave out checkpoints, except the last one, and what reports a run."""

_AT_ONCE = 1 << 30
"""Bytes of tensors that are compared at a time."""


@dataclass
class PartResult:
    """The result of --verify-resume for one part of the training state.

    Attributes:
        part: model, optimizer or ema.
        tensors: number of tensors.
        equal: how many are bit-identical.
        worst: the largest difference.
        worst_name: the tensor with the largest difference.
    """

    part: str
    tensors: int = 0
    equal: int = 0
    worst: float = 0.0
    worst_name: str = ""

    @property
    def ok(self) -> bool:
        """Whether all tensors of this part are bit-identical after the resume."""
        return self.equal == self.tensors


def verify_resume(
    config: str, overrides: Sequence[str], steps: int, nproc: int, run: str, allow_code: bool = False
) -> tuple[list[PartResult], list[str]]:
    """Trains 2K steps, and K + K steps with a resume, in a temporary folder, and compares the results.

    Both runs use the config as it is, including its learning-rate schedule, and stop at the compared step.
    Callbacks and trackers are left out.

    Args:
        config: the config file, as on the command line.
        overrides: config overrides, as on the command line.
        steps: K.
        nproc: number of ranks.
        run: the run's name.
        allow_code: as `--allow-code`.

    Returns:
        A result for each part of the state, and a remark for every other difference.

    Raises:
        MMError: a run fails, or the run has fewer than 2K steps.
    """
    checked = load_config(config, overrides, allow_code=allow_code)
    # torch can read tensor types of an optimizer's library only after that is imported.
    checked.registry.resolve("optimizer", checked.optimizer.type).load_target()
    with tempfile.TemporaryDirectory(prefix="mm_core-verify-") as folder:
        # Only the stop saves a checkpoint: saving is not part of the comparison.
        base = [*overrides, *QUIET, *(["--allow-code"] * allow_code)]
        whole, halves = (Path(folder) / name for name in ("whole", "halves"))
        _train(config, [*base, f"run.dir={whole}"], nproc, 2 * steps, "the uninterrupted run")
        reached = int(open_checkpoint(whole / run).facts["step"])
        if reached < 2 * steps:
            raise MMError(
                f"{steps} + {steps} steps are more than the run has: {plural(reached, 'step')}",
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
        [*command, "--nproc", str(nproc), "--stop-after", str(last), "--no-forecast"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    if done.returncode not in (0, STOPPED):
        output = done.stderr.strip()
        message = output[output.rfind("mm: error:") :].removeprefix("mm: error: ")
        raise MMError(
            f"{name} failed with exit code {done.returncode}:\n{message}"[:4000], where="--verify-resume"
        )


def compare_runs(one: Path, other: Path) -> tuple[list[PartResult], list[str]]:
    """Compares the newest checkpoints and the logged metrics of two training runs."""
    a, b = find_checkpoint(one), find_checkpoint(other)
    facts_a, facts_b = OpenedCheckpoint(a).facts, OpenedCheckpoint(b).facts
    remarks = [
        f"the fact {key!r} is {facts_a.get(key)} without and {facts_b.get(key)} with the resume"
        for key in sorted(facts_a.keys() | facts_b.keys())
        if facts_a.get(key) != facts_b.get(key)
    ]
    for name in ("loss", "grad_norm", "lr"):
        series_a, series_b = (_series(run, name) for run in (one, other))
        different = [step for step in series_a if series_a[step] != series_b.get(step)]
        if different or series_a.keys() != series_b.keys():
            remarks.append(f"{name} differs from step {different[0] if different else len(series_a)} on")
    return compare_checkpoints(a, b), remarks


def _series(run: Path, name: str) -> dict[int, object]:
    return {row["step"]: row[name] for row in read_metrics(run) if name in row}


def compare_checkpoints(one: Path, other: Path) -> list[PartResult]:
    """Compares every bit of all tensors in two checkpoints; MMError if they contain different tensors."""
    held, also = (set(OpenedCheckpoint(path).metadata.state_dict_metadata) for path in (one, other))
    if odd := sorted(held ^ also):
        raise MMError(
            f"only one of the checkpoints contains {some(odd, 10)}",
            where=f"{one}, {other}",
            hint="compare runs of the same config; if these are, a component does not restore the tensors",
        )
    results: dict[str, PartResult] = {}
    for (name, a), (_, b) in zip(_tensors(one), _tensors(other), strict=True):
        part = name.partition(".")[0]
        result = results.setdefault(part, PartResult(part))
        result.tensors += 1
        if a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
            result.equal += 1
            continue
        difference = float((a.double() - b.double()).abs().max()) if a.shape == b.shape else float("inf")
        if not difference <= result.worst or not result.worst_name:
            result.worst, result.worst_name = difference, name
    return list(results.values())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """All complete tensors in the order of their names; about one gigabyte in memory at a time."""
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
    """The result of --verify-resume as a table, followed by the remarks."""
    lines = [f"{'part':<12}{'tensors':>8}{'bit-equal':>11}  worst difference"]
    for result in results:
        worst = "" if result.ok else f"{result.worst:.3g} in {result.worst_name}"
        lines.append(f"{result.part:<12}{result.tensors:>8}{result.equal:>11}  {worst}".rstrip())
    return "\n".join([*lines, *remarks])
