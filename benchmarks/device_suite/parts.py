"""The parts of the device suite. Each prints its figures; without an accelerator, it runs its tiny form."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from device_suite.plain import Plain
from device_suite.runs import (
    CLIPS,
    QUICKSTART,
    Settings,
    config_file,
    holds,
    internvl,
    on_device,
    quickstart,
    release,
    result,
    run_of,
    shapes,
    steps_of,
    tiny_wan,
    trained,
    wan,
)

from mm_core.config.load import load_config
from mm_core.device import device_type, peak_flops, peak_memory_bytes, synchronize
from mm_core.device.torch_private import TorchDispatchMode
from mm_core.errors import first_line
from mm_core.modules.casting import shards_mixed
from mm_core.training.late import late_steps
from mm_core.training.loop import Training

STORED = Path(__file__).with_name("parity.json")
"""Losses of 10 steps in fp32, and a digest of the clips, from the CPU: see `store`."""
EVERY = 3
"""Steps of a measurement of a run, after as many to warm up."""


def furthest(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two runs' losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def losses(rows: list[dict[str, Any]]) -> list[float]:
    """The losses of logged steps."""
    return [row["loss"] for row in rows]


# -- 1: are the numbers right ------------------------------------------------------------------------------


def store(folder: Path) -> None:
    """Writes what `parity` compares with."""
    STORED.write_text(json.dumps(numbers(folder), indent=1) + "\n")


def numbers(folder: Path) -> dict[str, Any]:
    """Losses of 10 steps of the quickstart and of a tiny Wan in fp32, and a digest of the first clips."""
    found: dict[str, Any] = {}
    torch.backends.cudnn.allow_tf32 = False  # for convolutions, whose default is true
    if device_type() == "npu":
        torch.npu.conv.allow_hf32 = False  # likewise

    def digest(run: Training) -> None:
        first = next(run.batches)
        found["pixels"] = hashlib.sha256(first.pixels.numpy().tobytes()).hexdigest()
        run.batches = chain([first], run.batches)

    found["quickstart"] = losses(trained(folder, "quickstart", QUICKSTART, quickstart(folder), digest))
    return found | {"wan": losses(trained(folder, "wan", *tiny_wan(folder)))}


def parity(folder: Path) -> None:
    """Losses of the quickstart and of a tiny Wan in fp32, against those stored from the CPU."""
    found = numbers(folder)
    stored = json.loads(STORED.read_text())
    holds("parity_same_pixels", found["pixels"] == stored["pixels"])  # else the losses differ as well
    for name in ("quickstart", "wan"):
        result(f"parity_{name}_losses", furthest(found[name], stored[name]), 1e-4)


def resume(folder: Path) -> None:
    """6 steps in one go against 3, a new process, and 3: every bit of the checkpoint."""
    file = config_file(folder, "resumed", QUICKSTART, quickstart(folder))
    words = ["-m", "mm_core.cli.main", "train", "--config", str(file), "--nproc", "1", "--verify-resume", "3"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    print((done.stdout + done.stderr).strip().splitlines()[-1])
    holds("resume_bit_equal", done.returncode == 0)


class Infinite(torch.autograd.Function):
    """A finite loss whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor) -> torch.Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.inf


def plant(run: Training, faults: dict[int, Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Changes the loss of some steps, by their number from 0."""
    loss_of = run.task.loss

    def loss(inputs: Any) -> Any:
        found = loss_of(inputs)
        fault = faults.get(run.task._step)
        return found if fault is None else replace(found, total=fault(found.total))

    run.task.loss = loss  # type: ignore[method-assign]


def late_norm(folder: Path) -> None:
    """A NaN loss and an infinite gradient, with the norm read at once and late: the same weights."""
    weights: dict[bool, list[torch.Tensor]] = {}
    for late in (False, True):

        def change(run: Training, late: bool = late) -> None:
            run.engine.late = late
            run.late = late_steps(run)
            plant(run, {3: lambda total: total * math.nan, 6: Infinite.apply})
            weights[late] = [shard.master for shard in run.engine.shards()]

        settings = quickstart(folder, **{"train.non_finite": {"policy": "skip"}})
        rows = trained(folder, f"late_{late}", QUICKSTART, settings, change)
        skipped = sum(not isinstance(loss, float) for loss in losses(rows))
        holds(f"faults_left_out{'_late' * late}", skipped == 2)
    same = all(torch.equal(now, then) for now, then in zip(*weights.values(), strict=True))
    same &= all(bool(tensor.isfinite().all()) for tensor in weights[True])
    holds("late_norm_bit_equal", same)


# -- 2: Wan 1.3B at 480x832 --------------------------------------------------------------------------------


def wan_speed(folder: Path, frames: int) -> None:
    """A step as shipped, with what helps, each with those before it, and beside a plain loop.

    A late norm needs a fused optimizer, so it comes with moments in fp32 again. Blocks are compiled last: one
    graph is enough. At 49 frames, what is between is one setting.
    """
    name, (of, settings) = f"wan_{frames}", wan(folder, frames)
    settings |= {"train.steps": 2 * EVERY, "log.every": EVERY}
    rung(folder, f"{name}_shipped", of, settings | {"data.loader.workers": 2 * on_device()})
    settings |= {"data.cache": {"dir": str(folder / f"cache_{frames}"), "missing": "encode"}}
    trained(folder, f"{name}_filled", of, settings | {"train.steps": CLIPS})  # written at its end
    rungs: dict[str, dict[str, Any]] = {
        "cache": {},
        "selective": {"engine.recompute": "selective"},
        "attention": {"engine.attention": {"cuda": "cudnn", "npu": "torch_npu"}.get(device_type(), "sdpa")},
        "gathered": {"engine.reshard_after_forward": False},
        "moments": {"optimizer.type": "adamw_bf16"},
        "late": {"optimizer.type": "adamw", "engine.late_norm": True},
        "compiled": {"engine.compile": {"modules": "auto"}},
    }
    if frames > 17:
        between = [rungs.pop(key) for key in ("selective", "attention", "gathered", "moments")]
        rungs["late"] = {key: value for more in (*between, rungs["late"]) for key, value in more.items()}
    if frames > 17 and not on_device():
        del rungs["compiled"]  # one minute of the compiler is enough on the CPU
    reached = [0.0]
    for key, more in rungs.items():
        found = rung(folder, f"{name}_{key}", of, settings | more)
        if found:
            settings |= more
            reached.append(found.get("mfu", 0.0))
        if key == "cache":
            try:
                beside_plain(folder, name, of, settings, found.get("flops", 0.0), recompute=frames > 17)
            except Exception as fault:
                does_not_run(f"{name}_to_plain", fault)
    if on_device():
        result(f"{name}_mfu", max(reached), 0.45 if frames > 17 else None, at_least=True)


def rung(folder: Path, name: str, of: str, settings: Settings) -> dict[str, float]:
    """Measures a run: prints its seconds a step, MFU, peak and phases; returns them with a step's FLOPs."""
    try:
        row = trained(folder, name, of, settings)[-1]
    except Exception as fault:  # memory, a kernel, a compiler: others may run all the same
        does_not_run(f"{name}_seconds", fault)
        return {}
    step = row["step_time"]
    phases = ", ".join(f"{key[5:]} {row[key]:.3f}" for key in row if key.startswith("time/"))
    show(name, step, row.get("mfu"), row["memory"], phases)
    return {**row, "flops": row["model_flops_per_second"] * step}


def does_not_run(name: str, fault: Exception) -> None:
    """Prints why a figure is missing, and its RESULT line."""
    print(f"{name} does not run: {type(fault).__name__}: {first_line(fault)}")
    result(name, math.nan, 0.0)


def show(name: str, step: float, mfu: float | None, memory: float, phases: str = "") -> None:
    """Prints the figures of a measured step: seconds, MFU, peak in bytes, seconds of its phases."""
    reached = "no MFU" if mfu is None else f"MFU {mfu:.1%}"
    print(f"{name:<18}{step:.4f} s a step, {reached}, {memory / 2**30:.2f} GiB; {phases}")
    result(f"{name}_seconds", step)


def beside_plain(folder: Path, name: str, of: str, settings: Settings, flops: float, recompute: bool) -> None:
    """Steps of a run and of a plain loop of the same model in turn, neither compiled, as a ratio."""
    settings = {**settings, "train.steps": 60, "log.every": 10, "data.loader.workers": 2 * on_device()}
    settings |= {"engine.recompute": "full"}
    settings |= {"engine.recompute_modules": ["predictor.blocks.{*}"] if recompute else []}
    release()
    plain = Plain(load_config(config_file(folder, "plain", of, settings), []), recompute)
    plain.steps(2)
    synchronize()
    memory, peak = peak_memory_bytes(), peak_flops()
    with run_of(folder, f"{name}_ours", of, settings) as run:
        steps = steps_of(run)
        for late in (False, True) if on_device() and not recompute else (False,):
            run.engine.late = late
            run.late = late_steps(run)
            steps(3)
            times: dict[str, list[float]] = {"ours": [], "plain": []}
            for _ in range(4):
                for side, take in (("ours", steps), ("plain", plain.steps)):
                    synchronize()
                    began = time.perf_counter()
                    take(2)
                    synchronize()
                    times[side].append((time.perf_counter() - began) / 2)
            if not late:
                seconds = statistics.median(times["plain"])
                show(f"{name}_plain", seconds, flops / seconds / peak if peak else None, memory)
            ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
            result(f"{name}{'_late' * late}_to_plain", ratio, 1.02 if on_device() else None)


# -- 3: the host, the allocator, the start -----------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts numbers that the host reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(found: Counter[str]) -> Iterator[None]:
    """Counts where the host waits for the device; on the CPU, the numbers that it reads from tensors."""
    if not on_device():
        with Reads() as reads:
            yield
        found["numbers read"] += reads.count
        return
    module = torch.get_device_module()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            module.set_sync_debug_mode("default")
    for warning in caught:
        if "called a synchronizing" in str(warning.message):
            found[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


def syncs(folder: Path) -> None:
    """How often the host waits for the device in a step of two micro-batches that is not logged."""
    for late in (False, True):
        found: Counter[str] = Counter()
        settings = quickstart(folder, **{"log.every": 50, "train.steps": 99, "engine.late_norm": late})
        with run_of(folder, f"syncs_{late}", QUICKSTART, settings) as run:
            steps = steps_of(run)
            steps(5)
            with waits(found):
                steps(10)
        print(", ".join(f"{place} {count / 10:g}" for place, count in found.most_common()))
        result(f"syncs_a_step{'_late' * late}", found.total() / 10)


def growth(folder: Path) -> None:
    """Memory that the allocator has after two epochs of 6 buckets, as a ratio to that after the first."""
    of, settings = wan(folder, 17)
    n, side = (17, 480) if on_device() else (9, 48)
    wide = side * 4 // 3
    sizes = [(n, side, wide), (n, wide, side), (n, side, side), (5, side, wide), (5, wide, side)]
    sizes.append((1, side, wide))
    sources = [{"annotations": shapes(folder, 2, frames, (h, w))} for frames, h, w in sizes]
    buckets = [{"num_frames": frames, "height": h, "width": w} for frames, h, w in sizes]
    settings |= {"data.train": {"type": "media_text", "sources": sources, "num_frames": n}}
    settings |= {"data.loader": {"mode": "variable", "buckets": buckets, "workers": 0}}
    epoch = 2 * len(sizes)
    settings |= {"train.steps": 2 * epoch, "log.every": epoch}
    held = torch.get_device_module().memory_reserved if on_device() else peak_memory_bytes
    with run_of(folder, "growth", of, settings) as run:
        steps = steps_of(run)
        steps(epoch)
        first = held()
        steps(epoch)
    print(f"{len(sizes)} buckets, {first / 2**30:.2f} GiB held after the first epoch")
    result("allocator_growth", held() / first)


def start(folder: Path) -> None:
    """Seconds from the command to the end of step 1."""
    file = config_file(folder, "start", QUICKSTART, quickstart(folder, **{"train.steps": 1}))
    metrics = folder / "runs/start/metrics.jsonl"
    began = time.perf_counter()
    words = [sys.executable, "-m", "mm_core.cli.main", "train", "--config", str(file), "--nproc", "1"]
    command = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while command.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.02)
    result("start_to_step_1_seconds", time.perf_counter() - began)
    assert command.wait() == 0


# -- 4: number formats and DeepSpeed -----------------------------------------------------------------------


def base(folder: Path) -> None:
    """LoRA on a base in bf16, streamed from the host, and in int8, fp8 and nf4: losses and peak memory."""
    if not shards_mixed():
        print("this torch shards no module of mixed dtypes")
        return
    of, settings = wan(folder, 17, lora=True)
    settings |= {"train.steps": 5, "engine.recompute_modules": ["predictor.blocks.{*}"]}
    settings |= {"engine.param_dtype": "bf16"}
    forms: dict[str, Settings] = {
        "bf16": {"train.base_dtype": "bf16"},
        "streamed": {"train.base_dtype": "bf16", "engine.base": {"stream": True, "keep": 1}},
        **{form: {"train.base_dtype": form} for form in ("int8", "fp8", "nf4")},
    }
    expected: list[float] = []
    for form, more in forms.items():
        rows = trained(folder, f"base_{form}", of, {**settings, **more})
        expected = expected or losses(rows)
        seconds = statistics.median(row["step_time"] for row in rows[2:])
        print(f"base_{form:<13}{seconds:.4f} s a step, {rows[-1]['memory'] / 2**30:.2f} GiB")
        if form != "bf16":
            bar = 0.0 if form == "streamed" else 5e-2
            result(f"base_{form}_losses", furthest(losses(rows), expected), bar)


def fp16(folder: Path) -> None:
    """A run in fp16 with a planted overflow: the step is left out, the scale halved, and it trains on."""
    scales: list[float] = []

    def change(run: Training) -> None:
        plant(run, {3: lambda total: total * 1e30})
        scales.append(run.engine._loss_scale.state["scale"])

    settings = quickstart(folder, **{"engine.param_dtype": "fp16", "train.steps": 20})
    found = losses(trained(folder, "fp16", QUICKSTART, settings, change))
    left_out = [step for step, loss in enumerate(found) if not isinstance(loss, float)]
    print(f"steps left out: {left_out}; scale at the end {float(scales[0]):.0f}; last loss {found[-1]:.4f}")
    holds("fp16_overflow_left_out", left_out == [3] and float(scales[0]) == 2.0**15)
    result("fp16_last_against_first_loss", found[-1] / found[0], 0.9)


def deepspeed(folder: Path) -> None:
    """DeepSpeed's stages 1 to 3 against fsdp2, full and with adapters: losses of 10 steps."""
    full, adapters = (QUICKSTART, quickstart(folder)), tiny_wan(folder, lora=True)
    for kind, (of, settings), stages in (("full", full, (1, 2, 3)), ("adapters", adapters, (2, 3))):
        expected = losses(trained(folder, f"fsdp2_{kind}", of, settings))
        for stage in stages:
            zero = {"type": "deepspeed", "settings": {"zero_optimization": {"stage": stage}}}
            found = trained(folder, f"zero_{kind}_{stage}", of, {**settings, "engine": zero})
            result(f"zero_{stage}_{kind}_losses", furthest(losses(found), expected), 1e-6)


# -- 5: a vision-language model; the data ------------------------------------------------------------------


def packed(folder: Path) -> None:
    """InternVL 3.5 2B with random weights on packed rows of 8,192 tokens: a step as shipped."""
    of, settings = internvl(folder)
    settings |= {"train.steps": 2 * EVERY, "log.every": EVERY}
    rung(folder, "internvl", of, settings)


def workers(folder: Path) -> None:
    """The wait for data workers in steps as shipped, and the clips a second that they read without steps."""
    of, settings = wan(folder, 17)
    number = min(8, os.cpu_count() or 1) if on_device() else 1
    settings |= {"train.steps": 4 * EVERY, "log.every": 2 * EVERY, "data.loader.workers": number}
    row = trained(folder, "workers", of, settings)[-1]
    result("workers_wait_share_of_step", row["data_wait"] / row["step_time"])
    with run_of(folder, "workers_alone", of, settings | {"train.steps": 1000}) as run:
        for _ in range(4 * number):  # those that were read ahead
            next(run.batches)
        began, clips = time.perf_counter(), 16 * number
        for _ in range(clips):
            next(run.batches)
        result("workers_clips_a_second", clips / (time.perf_counter() - began))
