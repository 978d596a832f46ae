"""Measures a training step of the 1.3B custom DiT at 49 x 480 x 832: time, memory, MFU, time per phase.

    python benchmarks/dit_step.py [--size 1_3b|small] [--steps 10] [--recompute auto|N] [--out FILE.md]
    python benchmarks/dit_step.py --ladder [--seconds 60] [--attention cudnn] [--rungs shipped,cache,...]
    torchrun --nproc-per-node 8 benchmarks/dit_step.py

Engine, task, optimizer and clocks are those of a run. Latents and text are random and generated in each
step (16 x 13 x 60 x 104 for a 4 x 8 x 8 autoencoder, 512 x 4096), so no data or download is needed.
Without an accelerator, a small model is used. `--recompute auto` recomputes as few blocks as memory
allows: none, half, all. `--ladder` measures a step as the shipped configs have it (all blocks recomputed,
clips encoded by Wan's autoencoder with random weights; text encoding, some 20 ms, is left out), and then,
each with those before it: cached latents, compiled blocks, selective recomputation, another attention
kernel. Each stops after `--seconds` of steps; compiling takes a minute more.
The limit is the time for a step's FLOPs (without recomputation) at the device's published peak; the rate of
one large matrix product on this device is printed for comparison.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mm_custom_dit.model import CustomDiT

from mm_core.builtin.configs.engines import CompileConfig
from mm_core.builtin.configs.training import AdamWConfig
from mm_core.config.sections import TrainSection
from mm_core.contracts import Loss, Randomness, SampleKey, VideoTextBatch
from mm_core.device import device_stack, peak_flops, peak_memory_bytes, reset_peak_memory, synchronize
from mm_core.diffusion.flow_match import FlowMatch
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.optim.adamw import adamw
from mm_core.optim.parameter_groups import groups_of
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from mm_core.tasks.text_to_video.task import TextToVideo
from mm_core.telemetry.flop_counter import ForwardFlops
from mm_core.telemetry.phase_clock import PhaseClock

WARM_UP = 3


@dataclass(frozen=True)
class Size:
    """Sizes of the benchmark's model, latents and text."""

    layers: int
    heads: int
    head_dim: int
    ffn_dim: int
    latents: tuple[int, int, int, int]
    text: tuple[int, int]

    def model(self) -> CustomDiT:
        """The benchmark's predictor on the meta device."""
        with torch.device("meta"):
            return CustomDiT(
                num_layers=self.layers,
                num_heads=self.heads,
                head_dim=self.head_dim,
                patch_size=(1, 2, 2),
                in_channels=self.latents[0],
                out_channels=self.latents[0],
                text_dim=self.text[1],
                freq_dim=256,
                ffn_dim=self.ffn_dim,
                rope_max_seq_len=1024,
            )


SIZES = {
    "1_3b": Size(30, 12, 128, 8960, (16, 13, 60, 104), (512, 4096)),
    "small": Size(6, 6, 64, 2240, (16, 4, 16, 26), (64, 512)),
}


class RandomLatents:
    """Replaces an autoencoder and its posterior: the same random latents for every clip."""

    stride = (4, 8, 8)

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        self.latent_channels = shape[0]
        self.moments = torch.randn(shape, device=device)

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, ...]:
        """Shape (C,T,H,W) of the random latents, for a clip of any size."""
        return tuple(self.moments.shape)

    def encode(self, pixels: torch.Tensor) -> RandomLatents:
        """Returns itself as the posterior; `mode` returns the random latents."""
        self._rows = len(pixels)
        return self

    def mode(self) -> torch.Tensor:
        """The random latents [B,C,T,H,W]."""
        return self.moments.expand(self._rows, *self.moments.shape)

    def sample(self, generators: Sequence[torch.Generator]) -> torch.Tensor:
        """The same random latents [B,C,T,H,W]: this posterior has no spread."""
        return self.mode()


class RandomText:
    """Replaces a text encoder: the same random hidden states for every caption."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.max_length, self.hidden_size = shape
        self._hidden = torch.randn(shape, device=device)

    def encode(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Random hidden states [B,L,D] and their mask [B,L]."""
        return self._hidden.expand(len(ids), *self._hidden.shape), mask


class EncodedLatents(RandomLatents):
    """Wan 2.1's autoencoder with random weights, made on the device."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, small: bool) -> None:
        from diffusers import AutoencoderKLWan

        super().__init__(shape, device)
        with torch.device(device):
            sizes = {"base_dim": 8, "num_res_blocks": 1} if small else {}
            self.model = AutoencoderKLWan(**sizes).to(torch.float32 if small else torch.bfloat16)
        self.model.eval().requires_grad_(False)

    def encode(self, pixels: torch.Tensor) -> RandomLatents:
        """Encodes the clips; `mode` returns their latents."""
        self._rows = len(pixels)
        encoded = self.model.encode(pixels.to(next(self.model.parameters()).dtype)).latent_dist.mode()
        self.moments = encoded[0].float()
        return self


@dataclass(frozen=True)
class Rung:
    """Settings of a measurement.

    Attributes:
        name: for the table.
        encodes: whether clips are encoded in the step.
        fields: of the engine.
    """

    name: str = ""
    encodes: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


def ladder(attention: str) -> list[Rung]:
    """As shipped, and what helps, each with those before it."""
    compiled: dict[str, Any] = {"compile": CompileConfig(modules="auto")}
    selective = compiled | {"recompute": "selective"}
    return [
        Rung("shipped", encodes=True),
        Rung("cache"),
        Rung("compile", fields=compiled),
        Rung("selective", fields=selective),
        Rung("attention", fields=selective | {"attention": attention}),
    ]


@dataclass(frozen=True)
class Measured:
    """Measurements of training steps.

    Attributes:
        seconds: time of each step.
        split: seconds per step, by phase.
        memory: peak memory of this rank, in bytes.
        flops: of forward and backward of the trained modules in one step, over all ranks.
        tokens: tokens of a step, over all ranks.
        recomputed: number of recomputed blocks.
        parameters: number of the predictor's parameters.
        loss: loss per sample of the last micro-batch.
    """

    seconds: list[float]
    split: dict[str, float]
    memory: int
    flops: float
    tokens: float
    recomputed: int
    parameters: int
    loss: float

    def shares(self) -> dict[str, float]:
        """Share of a training step's time in each phase."""
        total = sum(self.split.values())
        return {phase: spent / total for phase, spent in self.split.items()}


def main() -> int:
    """Measures training steps, prints the results, and appends them to --out on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--recompute", default="auto", help="number of blocks to recompute, or auto")
    parser.add_argument(
        "--ladder", action="store_true", help="measure the settings that help, one after another"
    )
    parser.add_argument("--rungs", help="names of the settings of --ladder, with commas; all by default")
    parser.add_argument("--attention", help="kernel of the last setting; cudnn on an accelerator by default")
    parser.add_argument("--seconds", type=float, default=math.inf, help="most for the steps of a setting")
    parser.add_argument("--out", type=Path, help="Markdown table to which a row is appended")
    args = parser.parse_args()
    start_process_group()
    stack = device_stack()
    args.size = args.size or ("small" if stack["device"] == "cpu" else "1_3b")
    size, dtype = SIZES[args.size], "fp32" if stack["device"] == "cpu" else "bf16"
    if args.ladder:
        climb(size, dtype, args)
        return 0
    measured = measure_what_fits(size, dtype, args)
    reached = matrix_rate(torch.float32 if dtype == "fp32" else torch.bfloat16)
    memory = torch.tensor([measured.memory], dtype=torch.float64)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        report(args, stack, dtype, measured, int(memory), reached)
    dist.barrier()
    return 0


def climb(size: Size, dtype: str, args: argparse.Namespace) -> None:
    """Measures the settings of `ladder`, and prints a line for each as soon as it is known."""
    attention = args.attention or ("sdpa" if dtype == "fp32" else "cudnn")
    rungs = [rung for rung in ladder(attention) if not args.rungs or rung.name in args.rungs.split(",")]
    first = dist.get_rank() == 0
    for rung in rungs:
        gc.collect()
        reset_peak_memory()
        try:
            m = measure(size, dtype, args, size.layers, rung)
        except torch.OutOfMemoryError:
            if dist.get_world_size() > 1:
                raise
            print(f"{rung.name:<10}out of memory", flush=True)
            continue
        step, peak = statistics.median(m.seconds), peak_flops()
        rate = m.flops / step / dist.get_world_size()
        mfu = f"MFU {rate / peak:.1%}" if peak else "peak unknown"
        split = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in m.split.items())
        if first:
            print(
                f"{rung.name:<10}{step:.4g} s a step ({min(m.seconds):.4g} to {max(m.seconds):.4g} in"
                f" {len(m.seconds)}), {mfu}, {m.memory / 2**30:.2f} GiB; {split}"
            )
            print(
                f"RESULT dit_step_{rung.name} {step:.4g} - {'ok' if math.isfinite(m.loss) else 'short'}",
                flush=True,
            )


def measure_what_fits(size: Size, dtype: str, args: argparse.Namespace) -> Measured:
    """Measures steps with as few recomputed blocks as memory allows, or with the requested number."""
    automatic = args.recompute == "auto"
    choices = [0, size.layers // 2, size.layers] if automatic else [int(args.recompute)]
    for recomputed in choices:
        result: Measured | None = None
        reset_peak_memory()
        try:
            result = measure(size, dtype, args, recomputed)
        except torch.OutOfMemoryError:
            if dist.get_world_size() > 1 or recomputed == choices[-1]:
                raise  # the other ranks wait in a collective that this rank has left
        gc.collect()
        if result is not None:
            return result
        print(f"{recomputed} recomputed blocks do not fit", flush=True)
    raise AssertionError("the last choice returns or raises")


def measure(
    size: Size, dtype: str, args: argparse.Namespace, recomputed: int, rung: Rung | None = None
) -> Measured:
    """Trains warm-up steps and measured steps with the engine, task and optimizer of a run."""
    rng, rows, rung = Randomness(0), args.micro_batch_size, rung or Rung()
    blocks = (f"predictor.blocks.{{0-{recomputed - 1}}}",) if recomputed else ()
    engine = FSDP2Engine(
        sub_modules_to_wrap=("predictor.blocks.{*}",),
        recompute_modules=blocks,
        param_dtype=None if dtype == "fp32" else dtype,
        **rung.fields,
    )
    device = engine.device
    latents = RandomLatents(size.latents, device)
    if rung.encodes:
        latents = EncodedLatents(size.latents, device, small=size is SIZES["small"])
    task = TextToVideo(
        size.model(),
        latents,  # type: ignore[arg-type]
        RandomText(size.text, device),  # type: ignore[arg-type]
        FlowMatch(shift=5.0),
    )
    parameters = sum(p.numel() for p in task.predictor.parameters())
    plan = engine.plan(task, dist.get_world_size(), 2)
    settings = vars(AdamWConfig(lr=1e-5))
    engine.prepare(task, plan, lambda p: adamw(groups_of(p, TrainSection(steps=1)), **settings), rng)
    flops, phases = ForwardFlops(), PhaseClock()
    scale = 1.0 / (rows * args.accumulation)
    seconds: list[float] = []
    tokens = 0
    deadline = time.monotonic() + args.seconds
    for step in range(WARM_UP + args.steps):
        if step == WARM_UP:
            phases.take()
        if step > WARM_UP and time.monotonic() > deadline:
            break
        synchronize()
        began = time.perf_counter()
        tokens = 0
        for micro in range(args.accumulation):
            number = (step * args.accumulation + micro) * dist.get_world_size()
            batch = make_batch(size, rows, number, rung.encodes)

            def compute(batch: VideoTextBatch = batch) -> Loss:
                phases.enter("encode")
                inputs = task.prepare(batch.to(device, non_blocking=True), rng)
                phases.enter("forward_backward")
                with flops.counting():
                    return task.loss(inputs)

            loss = engine.micro_step(compute, last=micro == args.accumulation - 1, scale=scale)
            tokens += loss.tokens
        norm = engine.grad_norm()
        phases.enter("optimizer")
        engine.step(norm, 1.0)
        phases.enter("log")
        synchronize()
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    spent = {name: total / len(seconds) for name, total in phases.take().items() if name != "log"}
    counted = flops.of_step(args.accumulation)
    assert counted is not None
    return Measured(
        seconds=seconds,
        split=spent,
        memory=peak_memory_bytes(),
        flops=counted,
        tokens=float(tokens * dist.get_world_size()),
        recomputed=recomputed,
        parameters=parameters,
        loss=float(loss.total) / rows,
    )


def make_batch(size: Size, rows: int, first: int, pixels: bool) -> VideoTextBatch:
    """A batch of dummy clips and captions: only their number matters, and their size with `pixels`."""
    frames, height, width = ((n - 1) * 4 + 1 if i == 0 else n * 8 for i, n in enumerate(size.latents[1:]))
    clip = (frames, height, width) if pixels else (1, 1, 1)
    numbers = [first + dist.get_rank() + row for row in range(rows)]
    length = size.text[0]
    return VideoTextBatch(
        keys=[SampleKey(0, number) for number in numbers],
        sample_weights=torch.ones(rows),
        ids=[str(number) for number in numbers],
        pixels=torch.zeros(rows, 3, *clip),
        captions=[""] * rows,
        text_ids=torch.zeros(rows, length, dtype=torch.int64),
        text_mask=torch.ones(rows, length, dtype=torch.bool),
    )


def matrix_rate(dtype: torch.dtype) -> float:
    """FLOP/s of one large matrix product on this device: the best of several."""
    device = FSDP2Engine().device
    n = 1024 if device.type == "cpu" else 8192
    left, right = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = math.inf
    for _ in range(10):
        synchronize()
        began = time.perf_counter()
        for _ in range(5):
            left @ right
        synchronize()
        best = min(best, (time.perf_counter() - began) / 5)
    return 2 * n**3 / best


def report(
    args: argparse.Namespace, stack: dict[str, str], dtype: str, m: Measured, memory: int, reached: float
) -> None:
    """Prints the table of a step's measurements and the RESULT lines, and writes the row for --out."""
    world, size, peak = dist.get_world_size(), SIZES[args.size], peak_flops()
    step = statistics.median(m.seconds)
    rate = m.flops / step / world
    mfu = f"{rate / peak:.1%}" if peak else "unknown peak"
    name = stack.get("name", f"cpu, {torch.get_num_threads()} threads")
    rows = {
        "device": f"{world} x {name}, torch {stack['torch']}",
        "model": f"{m.parameters / 1e9:.3f}B parameters, {size.layers} layers, {dtype}",
        "a micro-batch": f"{args.micro_batch_size} x latents {size.latents}, text {size.text}",
        "micro-batches a step and rank": str(args.accumulation),
        "recomputed blocks": f"{m.recomputed} of {size.layers}",
        "step, median": f"{step:.4g} s ({min(m.seconds):.4g} to {max(m.seconds):.4g} in {len(m.seconds)})",
        "tokens a second": f"{m.tokens / step:,.0f}",
        "peak memory": f"{memory / 2**30:.1f} GiB",
        **{f"  {phase}": f"{m.split[phase]:.4g} s ({share:.0%})" for phase, share in m.shares().items()},
        "operations a step": f"{m.flops / 1e12:,.3g} TFLOP, recomputation not counted",
        "of a device": f"{rate / 1e12:,.3g} TFLOP/s; MFU {mfu}",
        "limit by the published peak": f"{m.flops / peak / world:.4g} s a step" if peak else "unknown",
        "one large matrix product": f"{reached / 1e12:,.3g} TFLOP/s; at that rate a step takes "
        f"{m.flops / reached / world:.4g} s ({m.flops / reached / world / step:.0%} of it)",
        "loss of the last micro-batch": f"{m.loss:.4f}",
    }
    width = max(map(len, rows))
    for label, text in rows.items():
        print(f"{label:<{width}}  {text}")
    if args.out:
        append(args.out, [rows[k] for k in ("device", "model", "recomputed blocks")], m, step, memory, mfu)
    ok = "ok" if math.isfinite(m.loss) else "short"
    print(f"RESULT dit_step_seconds {step:.4g} - {ok}")
    if peak:
        print(f"RESULT dit_step_mfu {rate / peak:.3f} - {ok}")


def append(path: Path, labels: list[str], m: Measured, step: float, memory: int, mfu: str) -> None:
    """Appends one row to a Markdown table of step measurements; writes the head into a new file."""
    head = ["device", "model", "recomputed", "step", "tokens/s", "memory", "MFU", "time split"]
    split = ", ".join(f"{phase} {share:.0%}" for phase, share in m.shares().items())
    row = [*labels, f"{step:.4g} s", f"{m.tokens / step:,.0f}", f"{memory / 2**30:.1f} GiB", mfu, split]
    new = not path.exists()
    with path.open("a", encoding="utf-8") as stream:
        if new:
            stream.write(f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n")
        stream.write(f"| {' | '.join(row)} |\n")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    leave(code)
