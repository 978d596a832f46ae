"""Measures weights streamed into shards on several ranks: memory per rank, and time against one read of
the files.

    python benchmarks/load_weights.py [--ranks 2] [--gigabytes 2.6] [--rounds 5]

A synthetic model (a stack of linear layers, fp32) is in sharded safetensors files, warm in the page cache.
Each round times two variants in alternating order: one process that reads the files once into its own
memory, as `safetensors.torch.load_file` with its copy does; and `ranks` processes that read the same
weights into their FSDP2 shards through the engine, from the headers to the last byte, including the
allocation of the shards. Memory is a rank's anonymous memory (RssAnon, every 5 ms) above its memory before
the files are opened; memory-mapped files do not count, the shard does.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MEMORY_BAR, TIME_BAR = 300, 1.3
"""Bars: MB above the shard; time relative to one process."""


def main() -> int:
    """Starts the ranks in each round; in a child process, runs as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=2.6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank is not None:
        return load_sharded(args.as_rank)
    if args.alone is not None:
        return read_once(args.alone)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_model(folder, args.gigabytes)
        print(f"{size / 1e9:.2f} GB in {len(list(folder.glob('*.safetensors')))} files, {args.ranks} ranks")
        print("round  one process, s   ranks, s   ratio   anonymous above the shard, MB (worst rank)")
        ratios, above = [], []
        for number in range(args.rounds):
            seconds = {}
            for kind in ("alone", "ranks") if number % 2 else ("ranks", "alone"):
                found = run(folder, 1 if kind == "alone" else args.ranks, kind)
                seconds[kind] = max(row["seconds"] for row in found)
                if kind == "ranks":
                    above.append(max(row["peak"] - row["shard"] for row in found) / 1e6)
            ratios.append(seconds["ranks"] / seconds["alone"])
            row = f"{seconds['alone']:14.2f} {seconds['ranks']:10.2f} {ratios[-1]:7.2f} {above[-1]:12.0f}"
            print(f"{number + 1:5d} {row}", flush=True)
    ratio, memory = statistics.median(ratios), max(above)
    time_ok, memory_ok = ratio <= TIME_BAR, memory <= MEMORY_BAR
    print(f"RESULT load_memory_above_shard_mb {memory:.0f} {MEMORY_BAR} {'ok' if memory_ok else 'short'}")
    print(f"RESULT load_time_ratio {ratio:.2f} {TIME_BAR} {'ok' if time_ok else 'short'}")
    return 0 if time_ok and memory_ok else 1


def write_model(folder: Path, gigabytes: float) -> int:
    """Writes the synthetic model of `stack` as sharded safetensors; returns the bytes of its tensors."""
    import torch
    from safetensors.torch import save_file

    layers = layers_of(gigabytes)
    table = {}
    for first in range(0, layers, 8):
        file = f"model-{first // 8:05d}.safetensors"
        block = {f"{i}.weight": torch.randn(4096, 4096) for i in range(first, min(first + 8, layers))}
        save_file(block, folder / file)
        table |= dict.fromkeys(block, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    (folder / "layers").write_text(str(layers))
    return layers * 4096 * 4096 * 4


def layers_of(gigabytes: float) -> int:
    """Number of layers of 64 MiB for a model of this size."""
    return max(1, round(gigabytes * 1e9 / (4096 * 4096 * 4)))


def run(folder: Path, world: int, kind: str, script: Path = Path(__file__)) -> list[dict[str, float]]:
    """Runs a script in several processes; returns the measurements of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flag = "--alone" if kind == "alone" else "--as-rank"
    processes = []
    for rank in range(world):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        command = [sys.executable, str(script), flag, str(folder)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def read_once(folder: Path) -> int:
    """Reads all weights in one process, every byte into its own memory."""
    import torch
    from safetensors import safe_open

    torch.set_num_threads(1)
    warm(folder)
    began = time.perf_counter()
    held = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as stored:
            held += [stored.get_tensor(name).clone() for name in stored.keys()]  # noqa: SIM118
    print(json.dumps({"seconds": time.perf_counter() - began}))
    return 0


def load_sharded(folder: Path) -> int:
    """Runs one rank: reads its shards of the weights through the engine."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from mm_core.builtin.configs.training import AdamWConfig
    from mm_core.config.sections import InitFromSection
    from mm_core.contracts import Randomness
    from mm_core.engines.fsdp2 import FSDP2Engine
    from mm_core.loading.matching import WeightMatch
    from mm_core.modules.tying import trained_state
    from mm_core.optim.adamw import adamw
    from mm_core.plugin.registry import get_registry
    from mm_core.runtime.groups import start_process_group
    from mm_core.runtime.launch.rank_process import leave
    from mm_core.weights.fitting import formats_of

    class Stack(nn.Sequential):
        def init_weights(self) -> None:
            """Does nothing: all weights are read from files."""

    class Task(nn.Module):
        trainable, frozen = ("model",), ()

        def __init__(self) -> None:
            super().__init__()
            layers = int((folder / "layers").read_text())
            self.model = Stack(*(nn.Linear(4096, 4096, bias=False) for _ in range(layers)))

    class Timed:
        """Measures time and memory from opening the files to the last byte."""

        def __init__(self, task: Task) -> None:
            warm(folder)
            parts, formats = {"model": task.model}, formats_of(get_registry(()))
            self.memory, self.began = Anonymous(), time.perf_counter()
            self.plan = WeightMatch(InitFromSection(path=str(folder)), trained_state(task), parts, formats)
            self.names = self.plan.names

        def fill(self, state):  # type: ignore[no-untyped-def]
            self.plan.fill(state)
            self.seconds, self.peak = time.perf_counter() - self.began, self.memory.close()

    torch.set_num_threads(1)
    start_process_group()
    with torch.device("meta"):
        task = Task()
    engine = FSDP2Engine(sub_modules_to_wrap=("model.{*}",), param_dtype=None)
    plan = engine.plan(task, dist.get_world_size(), 0)

    def optimizer(parameters):  # type: ignore[no-untyped-def]
        return adamw([{"params": [*parameters.values()]}], **vars(AdamWConfig()))

    start = Timed(task)
    engine.prepare(task, plan, optimizer, Randomness(0), start)
    shard = sum(p.to_local().nbytes for _, p in engine.named_parameters())
    print(json.dumps({"seconds": start.seconds, "peak": start.peak, "shard": shard}), flush=True)
    leave(0)
    return 0


def warm(folder: Path) -> None:
    """Reads every byte of the files, so that they are in the page cache."""
    buffer = bytearray(2**24)
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


class Anonymous:
    """Peak of this process's anonymous memory above its start value, in bytes."""

    def __init__(self) -> None:
        self._before = self._peak = self.now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> int:
        """Current anonymous memory of this process in bytes."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise OSError("this system does not report anonymous memory: /proc/self/status has no RssAnon")

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._peak = max(self._peak, self.now())

    @property
    def peak(self) -> int:
        """Peak of anonymous memory so far."""
        return max(self._peak, self.now()) - self._before

    def close(self) -> int:
        """Ends the measurement of anonymous memory and returns its peak."""
        self._ended.set()
        self._thread.join()
        return max(self._peak, self.now()) - self._before


if __name__ == "__main__":
    sys.exit(main())
