"""Measures how the ranks of a host open a table of a million rows: time, memory, and who reads the file.

    python benchmarks/data_rows.py [--rows 1000000] [--ranks 4] [--rounds 3]

Each rank builds the dataset `media_text` of one table, JSONL or Parquet, warm in the page cache, and reads
every 997th row. Time is that of the slowest rank, from a barrier before to the built dataset. Memory is the
sum over the ranks of the peak of anonymous memory (RssAnon, every 5 ms) above that at the barrier, and the
files that the ranks map, once. A rank has read the table if it has read as many bytes as the table has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from load_weights import Anonymous, run

TIME_BARS = {"jsonl": 20.0, "parquet": 3.0}
MEMORY_BAR, READERS_BAR = 1000, 1
"""Bars: seconds; MB of all ranks together; ranks that read the table."""

_WORDS = ("a", "the", "brown", "old", "dog", "child", "river", "runs", "jumps", "slowly", "towards", "camera")


def main() -> int:
    """Starts the ranks in each round; in a child process, runs as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank is not None:
        return open_rows(args.as_rank)
    seconds: dict[str, list[float]] = {kind: [] for kind in TIME_BARS}
    memory: dict[str, list[float]] = {kind: [] for kind in TIME_BARS}
    readers: dict[str, int] = dict.fromkeys(TIME_BARS, 0)
    with tempfile.TemporaryDirectory() as name:
        tables = write_tables(Path(name), args.rows)
        print(f"{args.rows:,} rows, {args.ranks} ranks")
        head = f"{'seconds':>8} {'MB together':>12} {'ranks that read it':>19}"
        print(f"{'round':>5}  {'table':<8} {'MB':>5} {head}")
        for number in range(args.rounds):
            for kind, table in tables.items():
                found = run(table, args.ranks, "ranks", Path(__file__))
                size = table.stat().st_size
                seconds[kind].append(max(rank["seconds"] for rank in found))
                memory[kind].append((sum(rank["peak"] for rank in found) + found[0]["mapped"]) / 1e6)
                reading = sum(rank["read"] >= size for rank in found)
                readers[kind] = max(readers[kind], reading)
                row = f"{seconds[kind][-1]:8.2f} {memory[kind][-1]:12.0f} {reading:19d}"
                print(f"{number + 1:5d}  {kind:<8} {size / 1e6:5.0f} {row}", flush=True)
    good = True
    for kind, bar in TIME_BARS.items():
        good &= result(f"data_rows_{kind}_seconds", statistics.median(seconds[kind]), bar)
        good &= result(f"data_rows_{kind}_mb", max(memory[kind]), MEMORY_BAR)
        good &= result(f"data_rows_{kind}_readers", readers[kind], READERS_BAR)
    return 0 if good else 1


def result(name: str, value: float, bar: float) -> bool:
    """Prints a RESULT line; returns whether the bar is met."""
    print(f"RESULT {name} {value:.4g} {bar:g} {'ok' if value <= bar else 'short'}")
    return value <= bar


def write_tables(folder: Path, rows: int) -> dict[str, Path]:
    """Writes the same rows, of paths, captions and sizes, as JSONL and Parquet."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    drawn = np.random.default_rng(0).integers(0, len(_WORDS), (rows, 16)).tolist()
    columns = {
        "path": [
            f"clips/{number % 1000:03d}/{number}.{'jpg' if number % 4 else 'mp4'}" for number in range(rows)
        ],
        "cap": [" ".join([_WORDS[place] for place in each]) for each in drawn],
        "width": [640 + 64 * (number % 9) for number in range(rows)],
        "height": [480] * rows,
        "num_frames": [1 if number % 4 else 49 + number % 73 for number in range(rows)],
    }
    tables = {kind: folder / f"rows.{kind}" for kind in TIME_BARS}
    with tables["jsonl"].open("w") as file:
        for values in zip(*columns.values(), strict=True):
            file.write(json.dumps(dict(zip(columns, values, strict=True))) + "\n")
    parquet.write_table(pa.table(columns), tables["parquet"])
    return tables


def open_rows(table: Path) -> int:
    """Runs one rank: opens the rows and measures time, memory and bytes read."""
    import torch
    import torch.distributed as dist

    from mm_core.builtin.configs.data import MediaSource
    from mm_core.data.datasets.media_text import MediaTextDataset
    from mm_core.runtime.groups import start_process_group
    from mm_core.runtime.launch.rank_process import leave

    torch.set_num_threads(1)
    start_process_group()
    dist.barrier()
    before = bytes_read()
    memory = Anonymous()
    began = time.perf_counter()
    dataset = MediaTextDataset([MediaSource(str(table))], 1, 8, 8)
    seconds = time.perf_counter() - began
    paths = [dataset.rows[number].path for number in range(0, len(dataset), 997)]
    peak = memory.close()
    read = bytes_read() - before
    assert len(set(paths)) == len(paths)
    mapped = sum(file.stat().st_size for file in dataset.rows.folder.iterdir())
    print(json.dumps({"seconds": seconds, "peak": peak, "mapped": mapped, "read": read}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    leave(0)
    return 0


def bytes_read() -> int:
    """Bytes that this process has read; mapped files do not count."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


if __name__ == "__main__":
    sys.exit(main())
