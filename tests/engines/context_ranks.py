"""Run by each rank: trains tiny predictors whose tokens are spread over ranks.

usage: context_ranks.py OUT CASES: writes by name what each of the cases gives (see `case`), a JSON object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.builtin.configs.engines import BaseConfig, ContextParallelConfig, OffloadConfig
from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.modules.adapter_layers import adapter_of, base_name
from mm_core.parallel.context import exchange
from mm_core.plugin.registry import get_registry
from mm_core.testing.predictors.probe import PredictorProbe
from mm_core.testing.predictors.training import Training, routed
from mm_core.testing.training.engines.task import Values
from mm_core.weights.adapters.inject import add_adapters
from mm_core.weights.fitting import formats_of
from support.rank_program import run_as_rank
from support.tensors import all_whole, whole
from support.token_predictors import PREDICTORS

_FLOAT = torch.Tensor.float


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank sends to others of its context group, which are sent."""
    sent, send = [], dist.all_to_all_single

    def counting(out, mine, outs, ins, group, async_op):
        to_itself = ins[dist.get_rank(group)]
        sent.append((sum(ins) - to_itself) * mine.element_size())
        return send(out, mine, outs, ins, group=group, async_op=async_op)

    dist.all_to_all_single = counting
    try:
        yield sent
    finally:
        dist.all_to_all_single = send


class Settled(NamedTuple):
    """Waits for an exchange, and for gloo's threads, which free what they have sent a little later."""

    work: dist.Work

    def wait(self) -> None:
        self.work.wait()
        time.sleep(0.02)


def peak_of(step: Callable[[], object]) -> int:
    """The largest number of bytes that a function has allocated at a time, by torch's CPU allocator.

    The least of several calls.
    """
    peaks, send = [], dist.all_to_all_single
    for _ in range(5):
        dist.all_to_all_single = lambda *tensors, **options: Settled(send(*tensors, **options))
        with torch.profiler.profile(profile_memory=True) as profiler:
            step()
        dist.all_to_all_single = send
        held = [0]
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held.append(held[-1] + event.nbytes())
        peaks.append(max(held))
    return min(peaks)


@contextmanager
def gather_without_scale(planted: bool) -> Iterator[None]:
    """Gradients as of a gather that does not count the ranks, if `planted`."""
    backward = exchange._Gather.backward

    def unscaled(ctx, gradient):
        return backward(ctx, gradient / ctx.place[-1])

    if planted:
        exchange._Gather.backward = staticmethod(unscaled)
    try:
        yield
    finally:
        exchange._Gather.backward = staticmethod(backward)


def rows_of(probe: PredictorProbe, module: torch.nn.Module, rows: int, per_token: bool) -> dict:
    inputs = probe.inputs(module, rows)
    for name in {"text", "image_embeds"} & inputs.keys():
        inputs[name] *= 20  # keys that are nearly equal would leave only rounding of some gradients
    if per_token:
        tokens = torch.Size(probe.patches).numel()
        inputs["timestep"] = torch.linspace(900, 30, rows * tokens).view(rows, tokens)
    return inputs


def adapted(task: Training, values: Values) -> Values:
    """Adds adapters to the blocks of a task, and to its values those of the adapters."""
    adapter = AdapterConfig(targets=("predictor.blocks.{*}",), rank=2)
    add_adapters(task, [adapter], formats_of(get_registry(())))

    def value(name: str, like: torch.Tensor) -> torch.Tensor:
        if adapter_of(name) is None:
            return values.tensors[base_name(name)]
        return Randomness(1).normal(tuple(like.shape), name) / 4

    return Values({name: value(name, tensor) for name, tensor in task.state_dict().items()})


def case(
    predictor: str,
    size: int = 1,
    kind: str = "ulysses",
    patches: tuple[int, int, int] = (2, 4, 2),
    weights: tuple[float, ...] = (1.0, 1.0),
    steps: int = 10,
    per_token: bool = False,
    planted: bool = False,
    measured: bool = False,
    adapters: bool = False,
    double: bool = True,
    more: dict | None = None,
    conditions: dict[str, tuple[int, ...]] | None = None,
    **fields: object,
) -> dict:
    """Losses, gradients of the first step and weights after all; rows of one sample, in turn over the ranks.

    Args:
        predictor: a key of PREDICTORS.
        size: ranks that share a sample.
        kind: of context parallelism.
        patches: tokens along (t, h, w).
        weights: of the rows.
        steps: of SGD.
        per_token: a timestep for each token.
        planted: the scale of the gradients is wrong.
        measured: only the memory of a step.
        adapters: only these are trained.
        double: all that models compute is float64, what they compute in float32 too: rounding hides nothing.
        more: further fields of the predictor.
        conditions: shapes of a sample's conditions.
        fields: of the engine.
    """
    torch.Tensor.float = torch.Tensor.double if double else _FLOAT
    probe = PredictorProbe({**PREDICTORS[predictor], **(more or {})}, tuple(patches), conditions=conditions)
    task = Training(probe.on_meta())
    for key, section in (("offload", OffloadConfig), ("base", BaseConfig)):
        if key in fields:
            fields[key] = section(**fields[key])
    engine = FSDP2Engine(context_parallel=ContextParallelConfig(size, kind), **fields)
    values = Values({f"predictor.{name}": t for name, t in probe.trained().state_dict().items()})
    if adapters:
        values = adapted(task, values)
    every = rows_of(probe, task.predictor, len(weights), per_token)
    if double:
        task.double()
        values = Values({name: tensor.double() for name, tensor in values.tensors.items()})
        every = {n: t.double() if t.is_floating_point() else t for n, t in every.items()}
    plan = engine.plan(task, dist.get_world_size(), 1.0)
    engine.prepare(task, plan, lambda named: torch.optim.SGD(named.values(), lr=0.05), Randomness(0), values)
    share, found = engine.data_ranks, {"losses": []}
    for step in range(steps):
        total = torch.zeros(())
        mine = range(share.rank, len(weights), share.count)
        for row in mine:
            inputs = {name: t[row : row + 1] for name, t in every.items()} | routed(task.predictor, step)

            def compute(row: int = row, inputs: dict = inputs) -> Loss:
                losses = task.losses(inputs, Randomness(5).at(row))
                return Loss((losses * weights[row]).sum(), weights[row])

            scale = share.count / sum(weights)

            def micro_step(compute=compute, last=row == mine[-1], scale=scale) -> Loss:
                return engine.micro_step(compute, last=last, scale=scale)

            if measured:
                return {"peak": peak_of(micro_step)}
            with gather_without_scale(planted), counted() as sent:
                loss = micro_step()
            found["sent"] = sum(sent)
            total += loss.total * share.leads
        dist.all_reduce(total)
        found["losses"].append(float(total))
        if step == 0:
            found["gradients"] = {
                n: whole(p.grad) for n, p in engine.named_parameters() if p.grad is not None
            }
        engine.step(engine.grad_norm(), None)
    return {**found, "weights": all_whole(engine.state_dict()["model"])}


def main(out: str, cases: str) -> None:
    torch.set_num_threads(1)
    found = {name: case(**given) for name, given in json.loads(cases).items()}
    if dist.get_rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    run_as_rank(main)
