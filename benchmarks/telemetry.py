"""What watching a run costs: steps with all of the telemetry on against steps with none.

    python benchmarks/telemetry.py [--pairs 300] [--log-every 1]

One process trains the quickstart's DiT (1.2M parameters, 16 clips a step) through the loop. Steps come in
pairs on the same clips, one of each kind, their order alternating, so that a machine whose speed drifts
harms neither. On: loss and gradient norm by noise level, times of the phases, throughput, metrics.jsonl and
TensorBoard on every logged step, the watchdog. Off: a reporter that does nothing. Steps that write the
details are among them as often as in a run (log.detail_every, 50).

The ratio that counts is that of processor time, of all threads of the process: a lone process on one thread
waits for nobody, and what other jobs take of a shared machine is no cost of telemetry. The wall's is printed
beside it; with an accelerator, where the host's work may hide behind the device's, it is the one that counts.
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
from mm_core.training.assembly import Assembly, assemble
from mm_core.training.loop import run_steps

ROOT = Path(__file__).resolve().parents[1]
BAR = 1.01
WARM_UP = 10


class Silent:
    """A reporter that neither measures nor writes."""

    def enter(self, phase: str) -> None:
        """Nothing."""

    def counting(self) -> AbstractContextManager[None]:
        """Counts nothing."""
        return nullcontext()

    def micro(self, loss: Loss) -> None:
        """Nothing."""

    def step(self, step: int, **_: float) -> None:
        """Nothing."""


class Unending:
    """No validation, no checkpoint: what is not telemetry is left out of both kinds."""

    stop = save_due = False

    def step_begins(self, step: int) -> None:
        """Nothing."""

    def fault(self) -> None:
        """Nothing fails."""

    def updated(self, step: int, refused: str | None) -> None:
        """Nothing."""

    def after_step(self, *_: object, **__: object) -> bool:
        """The run goes on."""
        return False


@dataclasses.dataclass
class Times:
    """Seconds of each step of one kind. cpu: of all threads of the process."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--log-every", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)  # another job on the machine then stalls one thread, not all that wait for it
    start_process_group()
    with tempfile.TemporaryDirectory() as folder:
        run = assemble(configure(Path(folder), args.pairs, args.log_every), "never")
        times = measure(run, args.pairs)
        run.reporter.close("done")
        rows = len((run.folder / "metrics.jsonl").read_text().splitlines())
    return report(times["on"], times["off"], rows)


def configure(folder: Path, pairs: int, log_every: int) -> RunConfig:
    """The quickstart, on a few clips that are rendered here."""
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


def measure(run: Assembly, pairs: int) -> dict[str, Times]:
    """Steps of both kinds in turn, through the loop."""
    training = run.training
    read: Sequence[Batch] = list(itertools.islice(training.batches, 4))
    watchdog = run.between.watchdog
    watchdog.start()
    training.between = Unending()
    plan, reporters = training.plan, {"on": run.reporter, "off": Silent()}
    times = {name: Times() for name in reporters}
    gc.collect()
    gc.disable()  # a collection would fall on one step or the other
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
            run.reporter.pause()
    gc.enable()
    watchdog.close()
    return times


def again(batch: Batch) -> Iterator[Batch]:
    """The same batch for ever."""
    while True:
        yield batch


def report(on: Times, off: Times, rows: int) -> int:
    """The table, and the line that a script reads; 0 when the bar is met."""
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
    """Between which the median lies with 95 % confidence, from the order of the values (sign test)."""
    half = 0.98 * len(ordered) ** 0.5
    low, high = int(len(ordered) / 2 - half), int(len(ordered) / 2 + half) + 1
    return ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    leave(code)
