"""The plan's bytes on the device and in host memory equal those of FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mm_core.builtin.configs.engines import OffloadConfig
from mm_core.config.sections import EMASection
from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.optim.ema import EMA
from mm_core.plan import RunPlan
from mm_core.runtime.process_group import process_group
from support.ranks import run_ranks
from support.tensors import whole
from support.tiny_models import Task

WIDTHS = (16, 32, 24, 8)
BLOCKS = [4 * (8 * width + width * 8 + 8) for width in WIDTHS]  # bytes of two weights and one bias, fp32
REST = 2 * 4 * (64 + 8)  # the stem and the head


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width, bias=False), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(map(Block, WIDTHS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + 0

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()


def built() -> Task:
    with torch.device("meta"):
        return Task(predictor=Blocks())


def prepared(engine: FSDP2Engine, world: int = 1):
    task = built()
    plan = engine.plan(task, world, 2)
    engine.prepare(task, plan, lambda p: torch.optim.AdamW(p.values(), lr=0.1), Randomness(0))
    return task, plan


def shown(plan, **fields) -> str:
    return RunPlan("a", plan, (), (), 1, 1, 1, 1, **fields)._memory()


def local_bytes(tensors) -> int:
    kept = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    assert all(t.device.type == "cpu" for t in kept)
    return sum(t.nbytes for t in kept)


def test_offloaded_state_is_counted_in_host_memory_to_the_byte():
    """On a CPU the device is the host: what CPUOffloadPolicy keeps there is counted after a step."""
    engine = FSDP2Engine(offload_to_cpu=True, param_dtype="bf16")
    whole: list[int] = []
    with process_group():
        task, plan = prepared(engine)
        for block in task.predictor.blocks:
            block.register_forward_pre_hook(
                lambda *_: whole.append(
                    sum(p.nbytes for p in task.parameters() if not isinstance(p, DTensor))
                )
            )
        ema = EMA(engine.shards, EMASection())
        engine.micro_step(
            lambda: Loss(task.predictor(torch.ones(1, 8)).float().sum(), 1.0), last=True, scale=1.0
        )
        parameters = list(dict(engine.named_parameters()).values())
        gradients = local_bytes(p.grad for p in parameters)
        engine.step(engine.grad_norm(), None)
        states = [v for k, v in engine.state_dict()["optimizer"].items() if not k.endswith(".step")]
        found = RunPlan("a", plan, (), (), 1, 1, 1, 1, ema_bytes=plan.gradient_bytes, ema_on_host=True)
        assert found.host_bytes == {
            "parameters": local_bytes(parameters),
            "gradients": gradients,
            "optimizer": local_bytes(states),
            "average": local_bytes(ema.state_dict().values()),
        }
    assert found.device_bytes == {"parameters": 0}
    # In a forward the widest block is whole beside the stem and the head; in bf16, half of its bytes.
    assert max(whole) == (REST + max(BLOCKS)) // 2
    assert plan.gathered_bytes == (REST + BLOCKS[1] + BLOCKS[2]) // 2


def test_an_optimizer_in_host_memory_updates_as_on_the_device_and_is_counted_there():
    found = []
    with process_group():
        for where in (None, "cpu"):
            task, plan = prepared(engine := FSDP2Engine(offload=OffloadConfig(optimizer=where)))
            engine.load_state_dict(engine.state_template({name for name, _ in engine.named_parameters()}))
            x = torch.linspace(-1, 1, 8)[None]
            for _ in range(3):

                def compute(task: Task = task, x: torch.Tensor = x) -> Loss:
                    return Loss(task.predictor(x).square().sum(), 1.0)

                engine.micro_step(compute, last=True, scale=1.0)
                engine.step(engine.grad_norm(), 0.1)
            assert all(p.grad is None for _, p in engine.named_parameters())
            found.append({part: {k: t.clone() for k, t in named.items()}
                          for part, named in engine.state_dict().items()})  # fmt: skip
            held = {p.to_local().data_ptr() for _, p in engine.named_parameters()}
            stepped = [p for group in engine._optimizer.param_groups for p in group["params"]]
            own = [getattr(p, "_local_tensor", p).data_ptr() for p in stepped]
            assert held.isdisjoint(own) == (where == "cpu")
    alone, ours = found
    assert alone["optimizer"].keys() == ours["optimizer"].keys()
    for part, named in alone.items():
        assert all(torch.equal(whole(ours[part][key]), whole(tensor)) for key, tensor in named.items())
    shown_host = RunPlan("a", plan, (), (), 1, 1, 1, 1).host_bytes
    copies = [*stepped, *(p.grad for p in stepped)]
    states = [v for k, v in ours["optimizer"].items() if not k.endswith(".step")]
    assert shown_host == {"optimizer": local_bytes(states), "copies": local_bytes(copies)}
    assert "optimizer" not in RunPlan("a", plan, (), (), 1, 1, 1, 1).device_bytes


def test_the_dry_run_distinguishes_both_memories():
    with process_group():
        here, away = (FSDP2Engine(offload_to_cpu=off).plan(built(), 1, 2) for off in (False, True))
    state = sum(BLOCKS) + REST
    assert shown(here)[-2:] == [
        f"  {'total':<11} {4 * state:>18,} bytes  0.02 MiB",
        "  the trained modules need up to 0.00 MiB more while they compute",
    ]
    lines = shown(away, ema_bytes=state, ema_on_host=True)
    assert lines[1:3] == [f"  {label:<11} {0:>18,} bytes  0.00 MiB" for label in ("parameters", "total")]
    assert lines[4] == "  in host memory"
    assert [line.split()[:2] for line in lines[5:]] == [
        ["parameters", f"{state:,}"],
        ["gradients", f"{state:,}"],
        ["optimizer", f"{2 * state:,}"],
        ["average", f"{state:,}"],
        ["total", f"{5 * state:,}"],
    ]


def test_an_average_on_the_cpu_is_counted_there():
    with process_group():
        plan = FSDP2Engine().plan(built(), 1, 2)
    kept = RunPlan("a", plan, (), (), 1, 1, 1, 1, ema_bytes=plan.gradient_bytes, ema_on_host=True)
    assert kept.host_bytes == {"average": plan.gradient_bytes} and "average" not in kept.device_bytes
    assert kept.to_mapping()["host_bytes"] == kept.host_bytes


def test_ignored_modules_stay_on_the_device_when_the_rest_is_offloaded():
    """`meta` stands for an accelerator: nothing is computed with it here."""
    engine = FSDP2Engine(offload_to_cpu=True, pin_memory=False, ignored_modules=("predictor.stem",))
    engine.device = torch.device("meta")
    with process_group():
        task = built()
        task.predictor.stem.requires_grad_(False)
        plan = engine.plan(task, 1, 2)
        engine.prepare(task, plan, lambda p: torch.optim.AdamW(p.values(), lr=0.1), Randomness(0))
    assert {p.device.type for p in task.predictor.stem.parameters()} == {"meta"}
    assert {p.device.type for p in task.predictor.blocks.parameters()} == {"cpu"}
    assert plan.offloaded_bytes == plan.parameter_bytes - REST // 2


@pytest.mark.parametrize(
    ("fields", "blocks"),
    [
        ({}, [1, 2]),
        ({"num_to_forward_prefetch": 2}, [0, 1, 2]),
        ({"num_to_backward_prefetch": 3}, [0, 1, 2, 3]),
        ({"reshard_after_forward": False}, [0, 1, 2, 3]),
        ({"sub_modules_to_wrap": ("predictor.blocks.{2}",)}, None),
    ],
)
def test_how_much_is_whole_at_a_time(fields, blocks):
    plan = FSDP2Engine(**fields).plan(built(), 1, 2)
    whole = sum(BLOCKS[i] for i in blocks) if blocks is not None else sum(BLOCKS)
    assert plan.gathered_bytes == REST + whole


def test_a_block_within_a_block_is_whole_with_what_it_lies_in():
    engine = FSDP2Engine(sub_modules_to_wrap=("predictor.blocks.{*}", "predictor.blocks.{*}.up"))
    up = 4 * 8 * WIDTHS[2]
    assert engine.plan(built(), 1, 2).gathered_bytes == REST + BLOCKS[1] + BLOCKS[2] - up


@pytest.mark.slow
def test_two_ranks_have_as_much_whole_as_planned(tmp_path):
    out = tmp_path / "bytes.txt"
    run_ranks(Path(__file__).with_name("memory_ranks.py"), 2, out)
    planned, seen = map(int, out.read_text().split())
    assert planned == seen == REST + BLOCKS[1] + BLOCKS[2]
