"""Compares the engine on ZeRO with a plain DeepSpeed loop: same JSON, weights and rows; losses and step time.

    python benchmarks/zero_step.py [--stage 2] [--ranks 2] [--rounds 20] [--steps 5]

Both train in the same process (of each rank) in turn: a round is `steps` steps of one, then of the other.
The plain loop is what DeepSpeed documents: forward, backward, step, with its clipping. Needs the plugin
mm-deepspeed.
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

LOSS_BAR, TIME_BAR = 1e-7, 1.05
LAYERS, WIDTH, ROWS = 8, 512, 64


def main() -> int:
    """Starts the ranks; in a child process, runs as one of them."""
    parser = argparse.ArgumentParser()
    for name, value in (("stage", 2), ("ranks", 2), ("rounds", 20), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return run_rank(args.stage, args.rounds, args.steps)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(args.ranks)]
    words = [*launcher, "--standalone", __file__, *sys.argv[1:]]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return subprocess.run(words, env=env, check=False).returncode


def run_rank(stage: int, rounds: int, steps: int) -> int:
    """Times both loops in turn; rank 0 prints. Returns 1 on all ranks where a bar is missed."""
    import torch
    import torch.distributed as dist

    from mm_core.runtime.process_group import process_group

    warnings.simplefilter("ignore", FutureWarning)
    settings = {"zero_optimization": {"stage": stage}}
    with process_group() as ranks:
        torch.manual_seed(7)
        values = {name: value.clone() for name, value in network().state_dict().items()}
        loops = {"mm_core": ours(settings, values), "deepspeed": plain(settings, values, ranks.count)}
        times: dict[str, list[float]] = {name: [] for name in loops}
        losses: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(rounds + 1):
            for name, step in loops.items():
                dist.barrier()
                began = time.perf_counter()
                losses[name] += [step(number * steps + index) for index in range(steps)]
                if number:  # the first round warms up
                    times[name].append((time.perf_counter() - began) / steps)
        met = report(times, losses, stage, ranks.count) if ranks.rank == 0 else True
        return int(not ranks.from_first(met))


def network() -> Any:
    """The model: equal layers with activations between them."""
    from torch import nn

    return nn.Sequential(
        *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())), nn.Linear(WIDTH, 8)
    )


def rows(step: int) -> tuple[Any, Any]:
    """Inputs [ROWS, WIDTH] and targets [ROWS, 8] of a rank's step."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return (
        torch.randn(ROWS, WIDTH, generator=generator),
        torch.randn(ROWS, 8, generator=generator),
    )


def ours(settings: dict[str, Any], values: dict[str, Any]) -> Callable[[int], float]:
    """A step with mm_core's engine, as the training loop takes it."""
    import torch
    from mm_deepspeed.engine import DeepSpeedEngine

    from mm_core.contracts import Loss, Randomness, TaskModule
    from mm_core.testing.training.engines.task import Values

    class Task(TaskModule):
        trainable = ("net",)

        def __init__(self) -> None:
            super().__init__()
            self.net = network()

    with torch.device("meta"):
        task = Task()
    engine = DeepSpeedEngine(settings=settings)
    plan = engine.plan(task, torch.distributed.get_world_size(), 2.0)
    named = Values({f"net.{name}": value for name, value in values.items()})
    engine.prepare(task, plan, lambda p: torch.optim.AdamW(p.values(), lr=1e-3), Randomness(0), named)

    def step(number: int) -> float:
        inputs, targets = rows(number)
        loss = engine.micro_step(
            lambda: Loss((task.net(inputs) - targets).square().mean(), 1.0), last=True, scale=1.0
        )
        engine.step(engine.grad_norm(), 1.0)
        return float(loss.total)

    return step


def plain(settings: dict[str, Any], values: dict[str, Any], world: int) -> Callable[[int], float]:
    """A step of DeepSpeed's own loop."""
    import deepspeed
    import torch

    net = network()
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


def report(times: dict[str, list[float]], losses: dict[str, list[float]], stage: int, world: int) -> bool:
    """Prints the table and the RESULT lines; returns whether the bars are met."""
    print(f"ZeRO {stage}, {world} ranks, {len(times['mm_core'])} paired rounds")
    print(f"{'loop':<14}{'median ms/step':>18}{'least':>10}{'most':>10}")
    for name, values in times.items():
        milli = sorted(1000 * value for value in values)
        print(f"{name:<14}{statistics.median(milli):>18.1f}{milli[0]:>10.1f}{milli[-1]:>10.1f}")
    ratio = statistics.median(a / b for a, b in zip(times["mm_core"], times["deepspeed"], strict=True))
    pairs = zip(losses["mm_core"], losses["deepspeed"], strict=True)
    off = max(abs(a - b) / abs(b) for a, b in pairs)
    print(f"RESULT zero{stage}_loss {off:.2e} {LOSS_BAR:g} {'ok' if off <= LOSS_BAR else 'short'}")
    print(f"RESULT zero{stage}_time {ratio:.3f} {TIME_BAR} {'ok' if ratio <= TIME_BAR else 'short'}")
    return off <= LOSS_BAR and ratio <= TIME_BAR


if __name__ == "__main__":
    sys.exit(main())
