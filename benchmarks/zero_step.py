"""Compares the engine on ZeRO with a plain DeepSpeed loop: same JSON, weights and rows; losses and step time.

    python benchmarks/zero_step.py [--stage 2] [--ranks 2] [--rounds 20] [--steps 5]
    python benchmarks/zero_step.py --device cuda --dtype bf16 --ranks 1 --layers 16 --width 4096 --rows 4096

Both train in the same process (of each rank) in turn: a round is `steps` steps of one, then of the other.
The plain loop is what DeepSpeed documents: forward, backward, step, with its clipping. Needs the plugin
mm-deepspeed. With bf16 both start from rounded weights, and the bar of the losses is that of rounding.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

LOSS_BARS, TIME_BAR = {"fp32": 1e-7, "bf16": 1e-2}, 1.05


def main() -> int:
    """Starts the ranks; in a child process, runs as one of them."""
    parser = argparse.ArgumentParser()
    of_run = {"stage": 2, "ranks": 2, "rounds": 20, "steps": 5}
    for name, value in (of_run | {"layers": 8, "width": 512, "rows": 64}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(LOSS_BARS), default="fp32")
    args = parser.parse_args()
    if "RANK" in os.environ:
        return run_rank(args)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(args.ranks)]
    words = [*launcher, "--standalone", __file__, *sys.argv[1:]]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MM_DEVICE": args.device, "DS_ACCELERATOR": args.device}
    return subprocess.run(words, env=env, check=False).returncode


def run_rank(args: argparse.Namespace) -> int:
    """Times both loops in turn; rank 0 prints. Returns 1 on all ranks where a bar is missed."""
    import torch
    import torch.distributed as dist

    from mm_core.contracts import torch_dtype
    from mm_core.device import synchronize
    from mm_core.runtime.process_group import process_group

    warnings.simplefilter("ignore", FutureWarning)
    settings: dict[str, Any] = {"zero_optimization": {"stage": args.stage}}
    if args.dtype == "bf16":
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    with process_group() as ranks:
        torch.manual_seed(7)
        dtype = torch_dtype(args.dtype)
        values = {name: value.to(dtype).float() for name, value in network(args).state_dict().items()}
        loops = {
            "mm_core": ours(args, settings, values),
            "deepspeed": plain(args, settings, values, ranks.count),
        }
        times: dict[str, list[float]] = {name: [] for name in loops}
        losses: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(args.rounds + 1):
            for name, step in loops.items():
                synchronize()
                dist.barrier()
                began = time.perf_counter()
                losses[name] += [step(number * args.steps + index) for index in range(args.steps)]
                synchronize()
                if number:  # the first round warms up
                    times[name].append((time.perf_counter() - began) / args.steps)
        met = report(args, times, losses) if ranks.rank == 0 else True
        return int(not ranks.from_first(met))


def network(args: argparse.Namespace) -> Any:
    """The model: equal layers with activations between them."""
    from torch import nn

    width = args.width
    layers = (layer for _ in range(args.layers) for layer in (nn.Linear(width, width), nn.GELU()))
    return nn.Sequential(*layers, nn.Linear(width, 8))


def rows_of(args: argparse.Namespace) -> Callable[[int], tuple[Any, Any]]:
    """Makes inputs [rows, width], in the dtype of the computation, and targets [rows, 8] of a rank's step."""
    import torch
    import torch.distributed as dist

    from mm_core.contracts import torch_dtype
    from mm_core.device import current_device

    generator = torch.Generator(current_device())
    dtype = torch_dtype(args.dtype)

    def rows(step: int) -> tuple[Any, Any]:
        generator.manual_seed(1000 * step + dist.get_rank())
        options: dict[str, Any] = {"generator": generator, "device": generator.device}
        return torch.randn(args.rows, args.width, **options).to(dtype), torch.randn(args.rows, 8, **options)

    return rows


def ours(
    args: argparse.Namespace, settings: dict[str, Any], values: dict[str, Any]
) -> Callable[[int], float]:
    """A step with mm_core's engine, as the training loop takes it."""
    import torch
    from mm_deepspeed.engine import DeepSpeedEngine

    from mm_core.contracts import Loss, Randomness, TaskModule
    from mm_core.testing.training.engines.task import Values

    class Task(TaskModule):
        trainable = ("net",)

        def __init__(self) -> None:
            super().__init__()
            self.net = network(args)

    with torch.device("meta"):
        task = Task()
    engine = DeepSpeedEngine(settings=settings)
    plan = engine.plan(task, torch.distributed.get_world_size(), 2.0)
    named, rows = Values({f"net.{name}": value for name, value in values.items()}), rows_of(args)
    engine.prepare(task, plan, lambda p: torch.optim.AdamW(p.values(), lr=1e-3), Randomness(0), named)

    def step(number: int) -> float:
        inputs, targets = rows(number)
        loss = engine.micro_step(
            lambda: Loss((task.net(inputs) - targets).square().mean(), 1.0), last=True, scale=1.0
        )
        engine.step(engine.grad_norm(), 1.0)
        return float(loss.total)

    return step


def plain(
    args: argparse.Namespace, settings: dict[str, Any], values: dict[str, Any], world: int
) -> Callable[[int], float]:
    """A step of DeepSpeed's own loop."""
    import deepspeed
    import torch

    net, rows = network(args), rows_of(args)
    net.load_state_dict(values)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": world,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        **settings,
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)

    def step(number: int) -> float:
        inputs, targets = rows(number)
        loss = (engine(inputs) - targets).square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def report(args: argparse.Namespace, times: dict[str, list[float]], losses: dict[str, list[float]]) -> bool:
    """Prints the table and the RESULT lines; returns whether the bars are met."""
    from mm_core.errors import plural

    stage, bar = args.stage, LOSS_BARS[args.dtype]
    size = f"{args.layers} layers of width {args.width}, {args.rows} rows, {args.dtype} on {args.device}"
    print(f"ZeRO {stage}, {plural(args.ranks, 'rank')}, {len(times['mm_core'])} paired rounds; {size}")
    print(f"{'loop':<14}{'median ms/step':>18}{'least':>10}{'most':>10}")
    for name, values in times.items():
        milli = sorted(1000 * value for value in values)
        print(f"{name:<14}{statistics.median(milli):>18.1f}{milli[0]:>10.1f}{milli[-1]:>10.1f}")
    ratio = statistics.median(a / b for a, b in zip(times["mm_core"], times["deepspeed"], strict=True))
    pairs = zip(losses["mm_core"], losses["deepspeed"], strict=True)
    off = max(abs(a - b) / abs(b) for a, b in pairs)
    print(f"RESULT zero{stage}_loss {off:.2e} {bar:g} {'ok' if off <= bar else 'short'}")
    print(f"RESULT zero{stage}_time {ratio:.3f} {TIME_BAR} {'ok' if ratio <= TIME_BAR else 'short'}")
    return off <= bar and ratio <= TIME_BAR


if __name__ == "__main__":
    sys.exit(main())
