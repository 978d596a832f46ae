"""Kills runs with SIGKILL while they save; checks that they resume from the newest complete checkpoint.

    python benchmarks/kill_while_saving.py [--kills 50] [--seed 0]

Two series, with 1 and with 2 ranks. Each round starts real training processes in the series' run folder,
which resume from the state of the previous round. It waits until they write the checkpoint of a seeded
step, and kills them after a seeded delay. At the end the run is finished, and its weights, optimizer,
average and data position are compared bit for bit with those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 400
"""More steps than 50 rounds can reach: a round that finished the run would have nothing to kill."""
MOMENTS = (0.12, 0.8)
"""Seconds: half of the kills hit the writing, the others also renaming and pruning."""


def command(folder: Path, data: Path, steps: int) -> list[str]:
    """Training command for a model of a few megabytes that saves at every step."""
    return [
        sys.executable,
        "-m",
        "mm_core.cli.main",
        "train",
        "--config",
        str(ROOT / "configs/custom_dit/quickstart.yaml"),
        f"data.train.annotations={data / 'data.json'}",
        f"run.dir={folder}",
        "run.name=killed",
        f"train.steps={steps}",
        "train.micro_batch_size=1",
        "train.global_batch_size=2",
        "data.loader.workers=0",
        "lr_schedule={type: constant}",
        "ema={decay: 0.9}",
        "checkpoint={every: 1, keep: 2}",
        "log.every=1",
    ]


def start(arguments: list[str], ranks: int, log: Path) -> subprocess.Popen[bytes]:
    """Starts the training command in its own process group."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("ab") as stream:
        return subprocess.Popen(
            [*arguments, "--nproc", str(ranks)],
            stdout=stream,
            stderr=stream,
            env=environment,
            start_new_session=True,
        )


def newest(folder: Path) -> int:
    """Step of the newest complete checkpoint, by its name."""
    from mm_core.checkpoint.retention import complete_steps

    return max(complete_steps(folder / "killed/checkpoints"), default=0)


def kill_in_a_save(process: subprocess.Popen[bytes], folder: Path, target: int, delay: float) -> bool:
    """Kills the process `delay` seconds after it starts to write step `target`; False if it ended earlier."""
    checkpoints = folder / "killed/checkpoints"
    stale = names_in(checkpoints)
    until = time.monotonic() + 120
    met = False
    while process.poll() is None and time.monotonic() < until:
        names = names_in(checkpoints) - stale
        if any(name.startswith(f"step_{target:08d}") for name in names):
            met = True
            time.sleep(delay)
            break
        time.sleep(0.001)
    met = met and process.poll() is None
    for pid in (*descendants(process.pid), process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return met


def names_in(folder: Path) -> set[str]:
    """Names in a folder; empty if the folder does not exist yet."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def descendants(pid: int) -> list[int]:
    """Ids of all direct and indirect child processes: ranks have their own process groups."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def series(folder: Path, data: Path, ranks: int, kills: int, chance: random.Random) -> tuple[int, bool]:
    """Runs one series; returns the number of rounds killed and resumed as expected, and whether the
    finished run is bit-equal."""
    log = folder / "log"
    good = before = completed = 0
    for number in range(1, kills + 1):
        target, delay = before + chance.randint(2, 4), chance.uniform(0, chance.choice(MOMENTS))
        offset = log.stat().st_size if log.exists() else 0
        process = start(command(folder / "runs", data, STEPS), ranks, log)
        met = kill_in_a_save(process, folder / "runs", target, delay)
        text = log.read_bytes()[offset:].decode(errors="replace")
        resumed = next((line for line in text.splitlines() if line.startswith("resumed ")), "from nothing")
        right = met and (f"at step {before} of" in resumed or not before)
        good += right
        before = newest(folder / "runs")
        completed += before >= target
        left = len(list((folder / "runs/killed/checkpoints").glob("*.tmp-*")))
        where = resumed.split("checkpoints/")[-1]
        row = f"{ranks:>5} {number:>4} {target:>7} {delay:>8.3f} {before:>6} {left:>4}  {where}"
        print(row + ("" if right else "  WRONG"), flush=True)
    print(f"kills after the checkpoint was complete: {completed} of {kills}")
    return good, finish(folder, data, ranks, before + 3, log)


def finish(folder: Path, data: Path, ranks: int, steps: int, log: Path) -> bool:
    """Finishes the killed run, trains an undisturbed one, and returns whether both are bit-equal."""
    from mm_core.training.verify_resume import compare_runs, render

    for runs in ("runs", "untouched"):
        if start(command(folder / runs, data, steps), ranks, log).wait():
            print(log.read_text(errors="replace")[-2000:])
            return False
    results, remarks = compare_runs(folder / "runs/killed", folder / "untouched/killed")
    print(render(results, remarks))
    return all(result.ok for result in results) and not remarks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    data = folder / "shapes"
    render = [sys.executable, ROOT / "examples/shapes/render.py", "--out", data, "--clips", "64"]
    subprocess.run(render, check=True, capture_output=True)
    chance = random.Random(args.seed)
    good, same = 0, True
    print("ranks kill in save  after s newest left  resumed from")
    try:
        for ranks in (1, 2):
            kills = args.kills // 2 + (args.kills % 2 if ranks == 1 else 0)
            own = folder / f"ranks_{ranks}"
            own.mkdir()
            resumed, equal = series(own, data, ranks, kills, chance)
            good, same = good + resumed, same and equal
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ok = good == args.kills and same
    print(f"bit-equal with undisturbed runs: {'yes' if same else 'NO'}")
    print(f"RESULT kill_while_saving {good}/{args.kills} {args.kills}/{args.kills} {'ok' if ok else 'short'}")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
