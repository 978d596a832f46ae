"""Measures the feature cache: opening a million keys, reading, a build, a training step, and memory.

    python benchmarks/data_cache.py [--only keys read build step memory] [--rounds 20]

`read` reads entries of three sizes, in turn with and without verifying them; ratios are taken per round.

`step` trains in one process, in turn from the cache and from the same batches kept in memory, with the same
task and engine; ratios are taken per round, so a change of the machine's speed affects both. `memory`
compares the resident memory of two runs with a T5 encoder of 200 MB after three steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import yaml

KEYS, SHARD = 1_000_000, 128
PARTS = ("keys", "read", "build", "step", "memory")


def main() -> int:
    """Runs each part; in a child process, runs that part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return CHILDREN[args.child[0]](Path(args.child[1]))
    short = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            place = Path(folder) / name
            place.mkdir()
            for row in globals()[f"measure_{name}"](place, args.rounds):
                print("RESULT", *row, flush=True)
                short += row[-1] != "ok"
    return int(short > 0)


def result(name: str, value: float, bar: float, unit: str = "") -> tuple[str, str, str, str]:
    """A line of the result: at most `bar` is ok."""
    return name, f"{value:.3f}{unit}", f"<={bar:g}{unit}", "ok" if value <= bar else "short"


def child(part: str, place: Path) -> list[float]:
    """The numbers that a process of its own prints last."""
    command = [sys.executable, __file__, "--child", part, str(place)]
    steady = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # what threads have freed is given back
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=steady).stdout
    return [float(word) for word in out.splitlines()[-1].split()]


def resident() -> float:
    """MB of memory that this process has now; with pages of files that are mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024 / 1e6


# -- keys ----------------------------------------------------------------------------------------------


def measure_keys(place: Path, rounds: int) -> list[tuple[str, str, str, str]]:
    """Opens a cache of a million entries and looks all of them up."""
    import numpy as np
    import torch

    from mm_core.data.cache.shards import KEY
    from mm_core.data.cache.store import Store

    store, drawn = Store(place / "cache", create=True), np.random.default_rng(0)
    keys = np.zeros(KEYS, KEY)
    for name in KEY.names or ():
        keys[name] = drawn.integers(1, 2**63, KEYS, dtype=np.uint64)
    np.save(place / "keys.npy", keys)
    with patch.object(os, "fsync"):  # only while these are made: what is measured is reading
        for first in range(0, KEYS, SHARD):
            own = keys[first : first + SHARD]
            store.add(own, [{"moments": torch.zeros(2)}] * len(own))
    seconds, found, memory = child("keys", place)
    print(f"{KEYS:,} keys in shards of {SHARD}: opened in {seconds:.2f} s, found in {found:.2f} s")
    return [result("cache_open_seconds", seconds, 5), result("cache_open_mb", memory, 500)]


def open_keys(place: Path) -> int:
    """Opens the cache."""
    import numpy as np

    from mm_core.data.cache.store import Store

    keys, before = np.load(place / "keys.npy"), resident()
    began = time.perf_counter()
    store = Store(place / "cache")
    opened = time.perf_counter()
    assert (store.find(keys) >= 0).all()
    print(opened - began, time.perf_counter() - opened, resident() - before)
    return 0


# -- reading -------------------------------------------------------------------------------------------


def measure_read(place: Path, rounds: int) -> list[tuple[str, str, str, str]]:
    """Times the reading of entries, verified and not."""
    import numpy as np
    import torch

    from mm_core.data.cache.shards import KEY, Shard
    from mm_core.data.cache.store import Store

    torch.set_num_threads(1)
    found = []
    for kib in (16, 256, 4096):
        store, count = Store(place / f"{kib}", create=True), max(8, 16384 // kib)
        keys = np.zeros(count, KEY)
        keys["high"] = np.arange(1, count + 1)
        store.add(keys, [{"moments": torch.randn(kib * 512).bfloat16()} for _ in range(count)])
        store.refresh()

        def seconds(store: Store = store, keys: np.ndarray = keys) -> float:
            began = time.perf_counter()
            store.get(keys)
            return time.perf_counter() - began

        seconds()
        pairs = []
        for _ in range(rounds):
            with patch.object(Shard, "_fault", lambda *given: ""):
                plain = seconds()
            pairs.append((seconds(), plain))
        own, ratio = statistics.median(v for v, _ in pairs), statistics.median(v / p for v, p in pairs)
        print(
            f"entries of {kib} KiB: verified {1e6 * own / count:.0f} us, {kib * count / own / 1e6:.2f} GB/s"
        )
        found.append(result(f"cache_read_ratio_{kib}_kib", ratio, 5))
    return found


# -- a build -------------------------------------------------------------------------------------------


def config_at(place: Path, name: str, **task: object) -> Path:
    """A run of 1,000 drawn clips."""
    predictor = {"type": "custom_dit", "in_channels": 12, "out_channels": 12, "freq_dim": 64, "ffn_dim": 512}
    predictor |= {"num_layers": 4, "num_heads": 4, "head_dim": 32, "patch_size": [2, 1, 1], "text_dim": 64}
    document = {
        "run": {"name": name, "dir": str(place / "runs")},
        "task": {
            "type": "text_to_video",
            "predictor": predictor,
            "autoencoder": {"type": "pixel", "spatial": 2},
            "text_encoder": {"type": "bytes", "hidden_size": 64},
            "scheduler": {"type": "flow_match"},
            "caption_dropout": 0.1,
            **task,
        },
        "data": {
            "train": {"type": "shapes", "clips": 1000, "num_frames": 8, "height": 16, "width": 16},
            "loader": {"workers": 1},
        },
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "train": {"steps": 100_000, "micro_batch_size": 8},
        "log": {"trackers": []},
    }
    path = place / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def built(config: Path, cache: Path) -> tuple[float, dict[str, int]]:
    """Seconds of a build, and what it has encoded."""
    import mm_core
    from mm_core.loading.caching import build_cache

    began = time.perf_counter()
    found = build_cache(mm_core.load_config(config, [f"data.cache.dir={cache}"]), lambda progress: None)
    return time.perf_counter() - began, found.encoded


def measure_build(place: Path, rounds: int) -> list[tuple[str, str, str, str]]:
    """Builds the cache of 1,000 clips twice."""
    config = config_at(place, "built")
    first, encoded = built(config, place / "cache")
    again, nothing = built(config, place / "cache")
    print(f"1,000 clips: {encoded} in {first:.1f} s; once more: {nothing} in {again:.1f} s")
    return [result("cache_encoded_again", sum(nothing.values()), 0)]


# -- a step --------------------------------------------------------------------------------------------


def measure_step(place: Path, rounds: int) -> list[tuple[str, str, str, str]]:
    """Times steps from the cache and from memory in turn."""
    import torch

    import mm_core
    from mm_core.runtime.process_group import process_group
    from mm_core.training.assembly import assemble
    from mm_core.training.loop import compute

    torch.set_num_threads(1)
    config = config_at(place, "step")
    built(config, place / "cache")
    with process_group(None):
        made = assemble(mm_core.load_config(config, [f"data.cache.dir={place / 'cache'}"]))
        training, steps = made, 10

        def seconds(batches) -> float:  # type: ignore[no-untyped-def]
            began = time.perf_counter()
            for step in range(steps):
                batch = next(batches)
                training.engine.micro_step(
                    lambda batch=batch, step=step: compute(training, step, 0, batch), last=True, scale=1.0
                )
                training.engine.step(training.engine.grad_norm(), 1.0)
            return time.perf_counter() - began

        kept = itertools.cycle([next(training.batches) for _ in range(steps)])
        seconds(training.batches), seconds(kept)
        pairs = [(seconds(training.batches), seconds(kept)) for _ in range(rounds)]
        made.between.close(None)
        made.reporter.close("stopped")
    ratio = statistics.median(cached / memory for cached, memory in pairs)
    own = statistics.median(cached for cached, _ in pairs) / steps * 1000
    print(f"{own:.1f} ms a step from the cache, {rounds} rounds of {steps} steps of each")
    return [result("cache_step_ratio", ratio, 1.03)]


# -- memory --------------------------------------------------------------------------------------------


def measure_memory(place: Path, rounds: int) -> list[tuple[str, str, str, str]]:
    """Compares the resident memory of a run that encodes with one that reads features."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(place / "text")
    sizes = {"vocab_size": 3, "d_model": 64, "d_kv": 64, "num_heads": 16, "d_ff": 96_000, "num_layers": 4}
    model = T5EncoderModel(T5Config(**sizes))
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    model.save_pretrained(place / "text")
    del model
    encoder = {"type": "hf_text", "from_pretrained": str(place / "text"), "dtype": "fp32"}
    config = config_at(place, "memory", text_encoder=encoder)
    build = [sys.executable, "-m", "mm_core.cli.main", "cache", "build", "--config", config]
    subprocess.run([*build, f"data.cache.dir={place}/cache"], check=True, stdout=subprocess.DEVNULL)
    (online,), (cached,) = child("online", place), child("cached", place)
    print(f"{online:.0f} MB resident with an encoder of {weights:.0f} MB, {cached:.0f} MB from the cache")
    spared = (online - cached) / weights
    return [("cache_memory_spared", f"{spared:.3f}", ">=1", "ok" if spared >= 1 else "short")]


def train(place: Path, *overrides: str) -> int:
    """Trains three steps and prints the memory before the run is taken apart."""
    import mm_core
    from mm_core.training import run

    seen, steps = [], run.run_steps

    def measured(*given):  # type: ignore[no-untyped-def]
        taken = steps(*given)
        seen.append(resident())
        return taken

    with patch.object(run, "run_steps", measured):
        fewer = ["train.steps=3", "data.loader.workers=0"]
        mm_core.train(mm_core.load_config(place / "memory.yaml", [*fewer, *overrides]))
    print(seen[0])
    return 0


CHILDREN = {
    "keys": open_keys,
    "online": lambda place: train(place, "run.name=online"),
    "cached": lambda place: train(place, "run.name=cached", f"data.cache.dir={place}/cache"),
}

if __name__ == "__main__":
    sys.exit(main())
