"""Measures the cost of telemetry: training steps with all telemetry on against steps with none.

    python benchmarks/telemetry.py [--pairs 300] [--log-every 1]

One process trains the quickstart's DiT (1.2M parameters, 16 clips per step) through the loop. Steps come
in pairs on the same clips, one of each kind, in alternating order, so a change of the machine's speed
affects both. On: loss and gradient norm by noise level, times of the phases, throughput, metrics.jsonl and
TensorBoard on every logged step, the watchdog. Off: a reporter that does nothing. Detail steps are as
frequent as in a run (log.detail_every, 50).

On a CPU, the ratio of CPU time (all threads of the process) decides: other jobs on a shared machine do not
change it. With an accelerator, where the host's work may overlap the device's, the ratio of wall time
decides. Both are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

import mm_core
from mm_core.config.sections import RunConfig
from mm_core.contracts import Batch, Loss
from mm_core.device import device_type, synchronize
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from mm_core.training.assembly import assemble
from mm_core.training.loop import Training, run_steps

ROOT = Path(__file__).resolve().parents[1]
BAR = 1.01
WARM_UP = 10


class Silent:
    """A telemetry reporter that neither measures nor writes."""

    def enter(self, phase: str) -> None: ...

    def counting(self) -> AbstractContextManager[None]:
        """Does not count FLOPs."""
        return nullcontext()

    def micro(self, loss: Loss) -> None: ...

    def step(self, step: int, **_: float) -> None: ...


class Unending:
    """Hooks between steps without validation and checkpoints: only telemetry is measured."""

    stop = save_due = False

    def step_begins(self, step: int) -> None: ...

    def fault(self) -> None:
        """Does nothing: no background work can fail."""

    def updated(self, step: int, refused: str | None) -> None: ...

    def after_step(self, *_: object, **__: object) -> bool:
        """Returns that the run continues."""
        return False


@dataclasses.dataclass
class Times:
    """Seconds of each step of one kind: wall time, and CPU time of all threads."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


def main() -> int:
    """Measures the steps and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--log-every", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(
        1
    )  # another job on the machine then stalls one thread, not several that wait for each other
    start_process_group()
    with tempfile.TemporaryDirectory() as folder:
        run = assemble(configure(Path(folder), args.pairs, args.log_every), "never")
        reporter = run.reporter
        times = measure(run, args.pairs)
        reporter.close("done")
        rows = len((reporter.run_dir / "metrics.jsonl").read_text().splitlines())
    return report(times["on"], times["off"], rows)


def configure(folder: Path, pairs: int, log_every: int) -> RunConfig:
    """Config of the quickstart, on a few clips that the script renders."""
    render = [sys.executable, ROOT / "examples/shapes/render.py", "--out", folder / "shapes", "--clips", "64"]
    subprocess.run(render, check=True, stdout=subprocess.DEVNULL)
    overrides = [
        f"run.dir={folder}/runs",
        f"data.train.annotations={folder}/shapes/data.json",
        f"data.train.folder={folder}/shapes",
        "data.loader.workers=0",
        f"train.steps={WARM_UP + pairs}",
        "train.micro_batch_size=16",
        "train.global_batch_size=16",
        f"log.every={log_every}",
    ]
    return mm_core.load_config(ROOT / "configs/custom_dit/quickstart.yaml", overrides)


def measure(training: Training, pairs: int) -> dict[str, Times]:
    """Runs steps of both kinds in turn through the training loop, and measures them."""
    reporter = training.reporter
    read: Sequence[Batch] = list(itertools.islice(training.batches, 4))
    watchdog = training.between.watchdog
    watchdog.start()
    training.between = Unending()
    plan, reporters = training.plan, {"on": reporter, "off": Silent()}
    times = {name: Times() for name in reporters}
    gc.collect()
    gc.disable()  # a collection would delay a random step
    for step in range(WARM_UP + pairs):
        training.plan = dataclasses.replace(plan, steps=step + 1)
        for name in ("on", "off") if step % 2 else ("off", "on"):
            training.reporter, training.batches = reporters[name], again(read[step % len(read)])
            synchronize()
            wall, cpu = time.perf_counter(), time.process_time()
            run_steps(training, step)
            synchronize()
            if step >= WARM_UP:
                times[name].wall.append(time.perf_counter() - wall)
                times[name].cpu.append(time.process_time() - cpu)
            reporter.pause()
    gc.enable()
    watchdog.close()
    return times


def again(batch: Batch) -> Iterator[Batch]:
    """Repeats one batch without end."""
    while True:
        yield batch


def report(on: Times, off: Times, rows: int) -> int:
    """Prints the table and the RESULT line; returns 0 if the bar is met."""
    decisive = "cpu" if device_type() == "cpu" else "wall"
    ratios: dict[str, float] = {}
    print(f"{len(on.wall)} pairs of steps; {rows} lines of metrics.jsonl")
    print(f"{'':<6}{'off, ms':>10}{'on, ms':>10}{'difference, ms':>16}{'95 % of it':>20}{'ratio':>9}")
    for name in ("cpu", "wall"):
        with_, without = getattr(on, name), getattr(off, name)
        step = statistics.median(without)
        differences = sorted(a - b for a, b in zip(with_, without, strict=True))
        middle = statistics.median(differences)
        low, high = median_interval(differences)
        ratios[name] = 1 + middle / step
        print(
            f"{name:<6}{1000 * step:>10.2f}{1000 * statistics.median(with_):>10.2f}{1000 * middle:>16.3f}"
            f"{f'{1000 * low:.3f} to {1000 * high:.3f}':>20}{ratios[name]:>9.4f}"
        )
    ok = ratios[decisive] <= BAR
    print(f"RESULT telemetry_overhead {ratios[decisive]:.4f} {BAR} {'ok' if ok else 'short'}")
    return 0 if ok else 1


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median of ordered values (sign test)."""
    half = 0.98 * len(ordered) ** 0.5
    low, high = int(len(ordered) / 2 - half), int(len(ordered) / 2 + half) + 1
    return ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    leave(code)
