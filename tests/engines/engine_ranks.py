"""Run by each rank: trains a real CustomDiT or a toy with the engine and writes what it saw.

usage: engine_ranks.py OUT CASE

A CASE in JSON is {"micro": rows of a micro-batch, fields of the engine}, trained for 10 steps.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from math import isfinite

import torch
import torch.distributed as dist
from mm_custom_dit.model import CustomDiT
from torch import nn
from torch.distributed.tensor import DTensor

from mm_core.builtin.configs.engines import CompileConfig, OffloadConfig
from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from support.rank_program import run_as_rank
from support.tensors import whole
from support.tiny_models import Task


class TinyDiT(CustomDiT):
    """The real DiT, with a head that is not zero: the first gradients then reach every parameter."""

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.xavier_uniform_(self.proj_out.weight)


SIZES = {"num_layers": 2, "num_heads": 2, "head_dim": 12, "patch_size": (1, 2, 2), "in_channels": 4}
SIZES |= {"out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 16}


class TinyTask(Task):
    def __init__(self) -> None:
        super().__init__(predictor=TinyDiT(**SIZES))
        self.seen: dict[str, torch.Tensor] = {}

    def watch(self) -> None:
        """Notes what reaches the predictor's forward, after the engine's casts."""

        def note(_, args, kwargs) -> None:
            self.seen = {name: value.detach().clone() for name, value in kwargs.items()}

        self.predictor.register_forward_pre_hook(note, with_kwargs=True)


def make(optimizer=torch.optim.AdamW, **fields) -> tuple[TinyTask, FSDP2Engine]:
    with torch.device("meta"):
        task = TinyTask()
    engine = FSDP2Engine(**fields)
    plan = engine.plan(task, dist.get_world_size(), 2)
    engine.prepare(task, plan, lambda parameters: optimizer(parameters.values(), lr=1e-3), Randomness(7))
    return task, engine


def rows(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step: 8 clips with uneven weights, one of them zero."""
    rng = Randomness(3).at("rows", step)
    return {
        "latents": rng.normal((8, 4, 2, 4, 4), "latents"),
        "target": rng.normal((8, 4, 2, 4, 4), "target"),
        "timestep": torch.linspace(1, 998.7, 8),
        "text": rng.normal((8, 5, 16), "text"),
        "text_mask": torch.arange(5)[None] < torch.tensor([5, 3, 1, 4, 5, 2, 5, 1])[:, None],
        "weight": torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 0.0, 1.0]),
    }


def rows_loss(task: TinyTask, batch: dict[str, torch.Tensor], cut: slice) -> Loss:
    inputs = {name: tensor[cut] for name, tensor in batch.items()}
    target, weight = inputs.pop("target"), inputs.pop("weight")
    error = (task.predictor(**inputs).float() - target).square().flatten(1).mean(1)
    return Loss((error * weight).sum(), float(weight.sum()))


def train(steps: int, micro: int, **fields) -> dict[str, object]:
    """`steps` AdamW steps of the same global batches, whatever the world and micro-batch size."""
    task, engine = make(**fields)
    task.watch()
    world, rank = dist.get_world_size(), dist.get_rank()
    first: dict[str, torch.Tensor] = {}
    losses = []
    for step in range(steps):
        weight = rows(step)["weight"]
        parts = [slice(m * micro, (m + 1) * micro) for m in range(8 // micro)]
        parts += [slice(6, 7)] * (-len(parts) % world)  # of weight 0, so that each rank has as many
        mine = parts[rank::world]
        norm = float("inf")
        while not isfinite(norm):  # as in fp16 until the loss scale fits
            for index, part in enumerate(mine):
                compute = partial(rows_loss, task, rows(step), part)
                scale = world / float(weight.sum())
                loss = engine.micro_step(compute, last=index == len(mine) - 1, scale=scale)
                losses.append(float(loss.total))
            norm = engine.grad_norm()
            if not isfinite(norm):
                assert engine.overflowed() is not None
                engine.discard()
        if step == 0:
            first = {name: whole(p.grad) for name, p in engine.named_parameters()}
        engine.step(norm, 1.0)
    return {
        "gradients": first,
        "weights": {name: whole(p) for name, p in engine.named_parameters()},
        "losses": losses,
        "timestep": task.seen["timestep"],
        "dtype": task.seen["latents"].dtype,
    }


def ignored_part() -> dict[str, object]:
    """A frozen, ignored part of the predictor, before and after a step."""
    with torch.device("meta"):
        task = TinyTask()
    part = task.predictor.condition_embedder.text_embedder.requires_grad_(False)
    engine = FSDP2Engine(ignored_modules=("predictor.condition_embedder.text_embedder",))
    plan = engine.plan(task, dist.get_world_size(), 2)
    engine.prepare(
        task, plan, lambda parameters: torch.optim.AdamW(parameters.values(), lr=1e-3), Randomness(7)
    )
    plain = not any(isinstance(parameter, DTensor) for parameter in part.parameters())
    before = [parameter.clone() for parameter in part.parameters()]
    engine.micro_step(partial(rows_loss, task, rows(0), slice(0, 8)), last=True, scale=1.0)
    engine.step(engine.grad_norm(), 1.0)
    kept = all(torch.equal(a, b) for a, b in zip(before, part.parameters(), strict=True))
    return {"plain": plain, "kept": kept, "ignored": plan.ignored}


def initial_hash() -> str:
    task, _ = make()
    digest = hashlib.sha256()
    for name, tensor in [*task.named_parameters(), *task.named_buffers()]:
        digest.update(name.encode() + whole(tensor).numpy().tobytes())
    return digest.hexdigest()


def main(out: str, case: str) -> None:
    if case.startswith("{"):
        fields = json.loads(case)
        for key, config in (("compile", CompileConfig), ("offload", OffloadConfig)):
            if key in fields:
                fields[key] = config(**fields[key])
        result: object = train(10, fields.pop("micro"), **fields)
    elif case == "init":
        result = initial_hash()
    elif case == "bf16":
        result = train(1, 4, param_dtype="bf16", sub_modules_to_wrap=("predictor.blocks.{*}",))
    elif case == "recompute":
        result = [
            train(3, 4),
            train(3, 4, recompute_modules="auto"),
            train(3, 4, recompute_modules="auto", use_reentrant=True),
        ]
    elif case == "ignored":
        result = ignored_part()
    elif case == "offload":
        result = [train(3, 4), train(3, 4, offload_to_cpu=True)]
    elif case == "prefetch":
        ahead = {"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1, "reshard_after_forward": False}
        result = [train(3, 4), train(3, 4, **ahead)]
    else:
        micro, size = case.split(",")
        result = train(
            20, int(micro), sharding_size=int(size) if size != "auto" else "auto", reduce_dtype=None
        )
    if dist.get_rank() == 0:
        torch.save(result, out)


if __name__ == "__main__":
    run_as_rank(main)
