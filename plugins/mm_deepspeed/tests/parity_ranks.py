"""Run by each of two ranks: trains the small task of the engine kit with DeepSpeed, and with plain torch.

usage: parity_ranks.py OUT (rank 0 writes what it measured to OUT, as JSON)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from mm_deepspeed.engine import DeepSpeedEngine

from mm_core.contracts import Loss
from mm_core.testing.training.engines import task as kit
from support.rank_program import run_as_rank

CPU = {"device": "cpu"}
PARTS = {"stage": 3, "stage3_param_persistence_threshold": 0}
FLOAT32: dict[str, dict[str, Any]] = {f"fp32 stage {stage}": {"stage": stage} for stage in range(4)}
FLOAT32 |= {
    "fp32 stage 3, all split": PARTS,
    "fp32 stage 2, optimizer in host memory": {"stage": 2, "offload_optimizer": CPU},
    "fp32 stage 3, optimizer in host memory": {**PARTS, "offload_optimizer": CPU},
    "fp32 stage 3, all in host memory": {**PARTS, "offload_optimizer": CPU, "offload_param": CPU},
}
HALF = {"stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "stage 3": PARTS}
HOPELESS = {
    "least scale": {"initial_scale_power": 8, "min_loss_scale": 256, "hysteresis": 1},
    "fixed scale": {"loss_scale": 256},
}
STEPS, DISCARDED, OVERFLOW, MICROS, CLIP = 10, 4, 3, 6, 0.3
ROWS, WEIGHTS = 6, (1.0, 0.5, 2.0, 0.0, 3.0, 0.25)
"""Six rows, so that each of two ranks has three micro-batches of one row."""
USED = ((1, 1, 1), (0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0))
"""Which of a rank's micro-batches go through the last block of `Branching`, in one step after the other."""
BRANCHING = [name for name in FLOAT32 if name != "fp32 stage 3"]
HUGE = 1e6
"""A gradient of 1 is beyond float16 at the loss scale times this."""


class SixRows(kit.TinyTask):
    """The task with more rows than those of the kit."""

    def loss_of_rows(self, step: int, rows: slice = slice(ROWS), device: torch.device | str = "cpu") -> Loss:
        return super().loss_of_rows(step, rows, device)


class _Net(kit.Net):
    """The network; the rows for which `used` is false do not go through the last block."""

    def forward(self, x: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.fixed(self.first(x)) + self.shift)
        if len(used) > 1:
            x = torch.where(used[:, None], self.blocks[1](x), x)
        elif used:
            x = self.blocks[1](x)
        return self.head(x) * self.scale


class Branching(SixRows):
    """The task with a block that some micro-batches do not use, as one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _Net()

    def losses(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.encoder.encode(batch["x"])
        rows = [divmod(key.index, ROWS) for key in batch.keys]
        used = torch.tensor([USED[step % len(USED)][row // 2] for step, row in rows], dtype=torch.bool)
        return (self.net(hidden, used) - batch["y"]).square().mean(1)


def summed(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def relative(found: float, wanted: float) -> float:
    return abs(found - wanted) / abs(wanted)


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The L2 norm of a parameter's difference, relative to that of the parameter; the largest of all."""
    assert found.keys() == wanted.keys()
    return max(float((found[n].float() - w).norm() / w.norm()) for n, w in wanted.items())


def scale_of(engine: DeepSpeedEngine) -> float:
    return float(engine.state_dict()["loss_scale"]["cur_scale"])


def exploded(micro: int, loss: Loss) -> Loss:
    return Loss(loss.total * HUGE, loss.weight) if micro == 1 else loss


class Run:
    """The task in the engine and in plain torch, step by step, with the worst differences so far."""

    def __init__(self, settings: dict[str, Any]) -> None:
        values = kit.network_values()
        self.trial, self.plain = kit.Trial(DeepSpeedEngine(settings=settings), values=values), kit.Plain()
        self.worst: dict[str, Any] = {"loss": 0.0, "norm": 0.0, "weights": 0.0}
        self.worst["begun"] = self.unchanged(self.plain.weights())

    def step(self, number: int) -> None:
        factor = 1 - number / STEPS
        loss, norm = self.trial.step(number, MICROS, factor, CLIP)
        wanted = self.plain.step(number, factor, CLIP)
        self.note("loss", relative(summed(loss), wanted[0]))
        self.note("norm", relative(norm, wanted[1]))
        self.note("weights", distance(self.trial.weights(), self.plain.weights()))

    def note(self, what: str, value: float) -> None:
        if not value <= self.worst[what]:  # NaN too
            self.worst[what] = value

    def unchanged(self, before: dict[str, torch.Tensor]) -> bool:
        now = self.trial.weights()
        return all(torch.equal(now[name], tensor) for name, tensor in before.items())


def trained(settings: dict[str, Any]) -> dict[str, Any]:
    """Ten steps, with one more that is discarded between them."""
    run = Run(settings)
    for number in range(STEPS):
        if number == DISCARDED:
            before = run.trial.weights()
            run.trial.backward(number, MICROS, kit.poisoned(1))
            run.worst["poisoned norm"] = str(run.trial.engine.grad_norm())
            run.trial.engine.discard()
            run.worst["unchanged"] = run.unchanged(before)
        run.step(number)
    with run.trial.engine.evaluating():
        loss = float(run.trial.compute(STEPS, slice(ROWS)).total)
    run.note("loss", relative(loss, run.plain.loss(STEPS)))
    frozen = run.trial.engine.state_dict()["model"]
    drawn = kit.drawn_values()
    run.worst["frozen"] = distance(
        kit.whole((name, frozen[name]) for name in kit.FROZEN), {name: drawn[name] for name in kit.FROZEN}
    )
    return run.worst


def overflowing(settings: dict[str, Any]) -> dict[str, Any]:
    """Ten steps in float16; before the fourth, one whose gradients are beyond its range."""
    run = Run(settings)
    engine = run.trial.engine
    for number in range(STEPS):
        if number == OVERFLOW:
            before, scale = run.trial.weights(), scale_of(engine)
            loss = run.trial.backward(number, MICROS, exploded)
            found = {"loss": loss, "norm": str(engine.grad_norm()), "sentence": engine.overflowed()}
            found |= {"scales": [scale, scale_of(engine)], "unchanged": run.unchanged(before)}
        run.step(number)
    again = Run(settings).trial
    again.engine.load_state_dict(engine.state_dict())
    losses = [each.step(STEPS, MICROS, clip=CLIP) for each in (run.trial, again)]
    resumed = losses[0] == losses[1] and run.unchanged(again.weights())
    scales = [scale_of(engine), scale_of(again.engine)]
    return {**run.worst, "overflow": found, "last scales": scales, "resumed": resumed}


def hopeless(fp16: dict[str, Any]) -> dict[str, Any]:
    """An overflow at a loss scale that cannot be lowered."""
    run = Run({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, **fp16}})
    run.step(0)
    before, engine = run.trial.weights(), run.trial.engine
    run.trial.backward(1, MICROS, exploded)
    found = {"norm": str(engine.grad_norm()), "sentence": engine.overflowed()}
    engine.discard()
    return {**found, "unchanged": run.unchanged(before)}


def main(out: str) -> None:
    found = {name: trained({"zero_optimization": zero}) for name, zero in FLOAT32.items()}
    for name, zero in HALF.items():
        found[f"bf16 {name}"] = trained({"zero_optimization": zero, "bf16": {"enabled": True}})
    with mock.patch.object(kit, "TinyTask", Branching):
        found |= {f"{name}, branching": trained({"zero_optimization": FLOAT32[name]}) for name in BRANCHING}
        for name, zero in HALF.items():
            settings = {"zero_optimization": zero, "bf16": {"enabled": True}}
            found[f"bf16 {name}, branching"] = trained(settings)
    # DeepSpeed refuses float16 on CPUs, which torch computes: in these ranks it does not.
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda _: True):
        for name, zero in HALF.items():
            fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
            found[f"fp16 {name}"] = overflowing({"zero_optimization": zero, "fp16": fp16})
        found |= {f"hopeless {name}": hopeless(fp16) for name, fp16 in HOPELESS.items()}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    with mock.patch.multiple(kit, ROWS=ROWS, WEIGHTS=WEIGHTS, TinyTask=SixRows):
        run_as_rank(main)
