"""A script for ranks: optimizers, EMA, warm start and an error in sharded weights; rank 0 writes the results.

usage: parts_ranks.py OUT (muon | ema | warm SOURCE | parameter)
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor, distribute_tensor

from mm_core.builtin.configs.training import AdamWConfig, MuonConfig
from mm_core.config.sections import EMASection, InitFromSection, TrainSection
from mm_core.contracts import Batch, Loss, Randomness, SampleKey
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import MMError
from mm_core.loading.matching import WeightMatch
from mm_core.optim.adamw import adamw
from mm_core.optim.ema import EMA
from mm_core.optim.muon import muon
from mm_core.optim.parameter_groups import groups_of
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from mm_core.training.guard import UpdateGuard
from mm_core.training.non_finite import first_non_finite
from support.tensors import all_whole
from support.tiny_models import OddNet, Task


def make(optimizer) -> tuple[Task, FSDP2Engine]:
    with torch.device("meta"):
        task = Task(predictor=OddNet())
    engine = FSDP2Engine(sub_modules_to_wrap=("predictor.first",))
    plan = engine.plan(task, dist.get_world_size(), 2)
    groups = TrainSection(steps=9, decay_norms_and_biases=False)
    engine.prepare(task, plan, lambda p: optimizer(groups_of(p, groups)), Randomness(7))
    return task, engine


def use_muon() -> dict[str, torch.Tensor]:
    """Four updates with given gradients: the same on any number of ranks."""
    settings = dataclasses.asdict(MuonConfig(lr=0.02, adamw_for=("predictor.last",)))
    _, engine = make(lambda groups: muon(groups, **settings))
    parameters = dict(engine.named_parameters())
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters.values():
            full = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        engine.scale_lr(1 / (1 + step))
        engine.step(engine.grad_norm(), None)
    return all_whole(parameters) | all_whole(engine.state_dict()["optimizer"])


def use_ema() -> dict[str, torch.Tensor]:
    """Training, with an evaluation of the averaged weights in the middle."""
    settings = dataclasses.asdict(AdamWConfig(lr=1e-2))
    task, engine = make(lambda groups: adamw(groups, **settings))
    parameters = dict(engine.named_parameters())
    ema = EMA(engine.shards, EMASection(decay=0.9))
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    found: dict[str, torch.Tensor] = {}
    for step in range(1, 6):
        # Every rank receives the complete batch, so that a step is the same on any number of ranks.
        engine.micro_step(lambda: Loss(task.predictor(inputs).square().sum(), 1.0), last=True, scale=1.0)
        engine.step(engine.grad_norm(), None)
        ema.update(step)
        with engine.evaluating():
            before = task.predictor(inputs).clone()
        bits = all_whole(parameters)
        with ema.applied(), engine.evaluating():
            averaged = task.predictor(inputs).clone()
        assert not torch.equal(averaged, before)
        assert all(torch.equal(bits[name], now) for name, now in all_whole(parameters).items())
        assert torch.equal(task.predictor(inputs).detach(), before), "training sees the true weights again"
        for root in (task.predictor, task.predictor.first):
            root.reshard()
        found |= {f"{step}.averaged": averaged}
    shadows = ema.state_dict()
    for name, shadow in shadows.items():
        assert isinstance(shadow, DTensor) and shadow.placements == parameters[name].placements
        assert shadow.to_local().shape == parameters[name].to_local().shape
    # With a checkpoint of another world size, if there is one.
    folder = Path(sys.argv[1]).with_name("ema_checkpoint")
    if folder.exists():
        other = EMA(engine.shards, EMASection(decay=0.9))
        dcp.load(other.state_dict(), checkpoint_id=folder)
        found |= {f"loaded.{name}": t for name, t in all_whole(other.state_dict()).items()}
    else:
        dcp.save(shadows, checkpoint_id=folder)
    return found | all_whole(shadows)


def use_match() -> dict[str, torch.Tensor]:
    """Weights of which each rank reads its own shard."""
    _, engine = make(lambda groups: adamw(groups, **dataclasses.asdict(AdamWConfig())))
    model = engine.state_dict()["model"]
    init = InitFromSection(path=sys.argv[3], prefixes={"net": "predictor"})
    found = WeightMatch(init, model)
    found.fill(model)
    assert set(found.names) == set(model) and not found.missing
    return all_whole(model)


def use_bad_parameter() -> list[list[str]]:
    """A weight that is not finite in the shard of rank 1: reports of all ranks on the step."""
    task, engine = make(lambda groups: adamw(groups, **dataclasses.asdict(AdamWConfig())))
    weight = dict(engine.named_parameters())["predictor.last.weight"]
    if dist.get_rank() == 1:
        with torch.no_grad():
            weight.to_local()[0, 0] = float("nan")

    def compute() -> Loss:
        return Loss(task.predictor(torch.ones(4, 5)).square().sum(), 1.0)

    loss = engine.micro_step(compute, last=True, scale=1.0)
    batch = Batch([SampleKey(0, 0)], torch.ones(1), [f"clip_{dist.get_rank()}.mp4"])
    guard = UpdateGuard(
        TrainSection(steps=9),
        locate=lambda forwards: first_non_finite(task, task.trainable, forwards, engine),
    )
    try:
        said = ["", guard.judge(0, engine.grad_norm(), [loss], [batch], lambda: iter([compute()])) or ""]
    except MMError as fault:
        said = [type(fault).__name__, str(fault)]
    everybody: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everybody, said)
    return everybody


def main() -> None:
    start_process_group()
    torch.set_num_threads(1)
    case = {"muon": use_muon, "ema": use_ema, "match": use_match, "parameter": use_bad_parameter}[sys.argv[2]]
    found = case()
    if dist.get_rank() == 0:
        torch.save(found, sys.argv[1])
    dist.barrier()


if __name__ == "__main__":
    main()
    leave(0)
