"""Measures memory per rank while a frozen encoder is streamed into shards on several ranks, and while it
encodes.

    python benchmarks/load_frozen.py [--ranks 2] [--gigabytes 1.0] [--rounds 3]

A synthetic encoder (a stack of linear layers, bf16, stored in fp32, so that it is both cut and cast) is in
sharded safetensors files. Each round places it as `engine.frozen: sharded` does, from the headers to the
last byte, and runs it twice. Memory is a rank's anonymous memory (RssAnon, every 5 ms) above its memory
before the files are opened; memory-mapped files do not count, the shard does. While it encodes, one layer
at a time is gathered.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from load_weights import Anonymous, run, write_model

BAR = 300
"""Bar: MB above the shard."""


def main() -> int:
    """Starts the ranks in each round; in a child process, runs as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--gigabytes", type=float, default=1.0, help="size of the encoder in memory, over all ranks"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank is not None:
        return load_sharded(args.as_rank)
    loading, encoding = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_model(folder, 2 * args.gigabytes)
        print(f"{size / 2e9:.2f} GB in bf16, {args.ranks} ranks")
        print("round   shard, MB   anonymous above the shard, MB (worst rank): loading, encoding")
        for number in range(args.rounds):
            rows = run(folder, args.ranks, "ranks", Path(__file__))
            loading.append(max(row["loading"] - row["shard"] for row in rows) / 1e6)
            encoding.append(max(row["encoding"] - row["shard"] for row in rows) / 1e6)
            shard = max(row["shard"] for row in rows) / 1e6
            print(f"{number + 1:5d} {shard:11.0f} {loading[-1]:12.0f} {encoding[-1]:9.0f}", flush=True)
    ok = max(loading) <= BAR
    print(f"RESULT load_frozen_memory_above_shard_mb {max(loading):.0f} {BAR} {'ok' if ok else 'short'}")
    return 0 if ok else 1


def load_sharded(folder: Path) -> int:
    """Runs one rank: reads the frozen encoder into shards and measures memory."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from mm_core.contracts import WeightsFrom, empty_parameters
    from mm_core.engines.fsdp2 import FSDP2Engine
    from mm_core.loading.frozen import FrozenFiles
    from mm_core.plugin.registry import get_registry
    from mm_core.runtime.groups import start_process_group
    from mm_core.runtime.launch.rank_process import leave

    class Encoder(nn.Module):
        entry_points, block_patterns = ("encode",), "auto"

        def __init__(self) -> None:
            super().__init__()
            self.weights_from = WeightsFrom(str(folder), "core/safetensors")

        def missing_files(self) -> list[str]:
            return []

        def build_empty(self) -> None:
            layers = range(int((folder / "layers").read_text()))
            with empty_parameters():
                made = [nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in layers]
            for index, layer in enumerate(made):
                self.add_module(str(index), layer)
            self.block_patterns = tuple(str(index) for index in layers)

        def encode(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.children():
                hidden = layer(hidden)
            return hidden

    class Task(nn.Module):
        trainable, frozen = (), ("encoder",)

        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

    torch.set_num_threads(1)
    start_process_group()
    task = Task()
    task.encoder.build_empty()
    engine = FSDP2Engine(frozen={"encoder": "sharded"})
    plan = engine.plan(task, dist.get_world_size(), 0)
    memory = Anonymous()
    engine.place_frozen(task, plan, FrozenFiles({"encoder": task.encoder}, get_registry(())))
    loading = memory.peak
    with torch.no_grad():
        for _ in range(2):
            task.encoder.encode(torch.zeros(1, 4096, dtype=torch.bfloat16))
    row = {"loading": loading, "encoding": memory.close(), "shard": plan.frozen[0].device_bytes}
    print(json.dumps(row), flush=True)
    leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
