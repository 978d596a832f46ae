"""Run by each rank: a pair of experts trained together with AdamW, then once more with a new beginning after
the first step.

usage: expert_ranks.py OUT FOLDER
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from mm_wan.predictor.two_expert import TwoExpert
from mm_wan.schedulers.flow_match import WanFlowMatch

from mm_core.config.sections import EMASection
from mm_core.contracts import Randomness, SampleKey, VideoTextBatch
from mm_core.diffusion.encoders.pixel import PixelAutoencoder
from mm_core.diffusion.encoders.text import ByteTextEncoder
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.left_out import WeightSources
from mm_core.optim.adamw import adamw
from mm_core.optim.ema import EMA
from mm_core.plugin.registry import get_registry
from mm_core.runtime.groups import start_process_group
from mm_core.runtime.launch.rank_process import leave
from mm_core.tasks.text_to_video.task import TextToVideo
from support.tensors import all_whole

WRAP = ("predictor.{*}", "predictor.{*}.blocks.{*}")
# eps is above the smallest gradients: without it, AdamW makes a sign of them, which is another on two ranks.
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.3}
AVERAGE = EMASection(decay=0.8, ramp=False)
STEPS, ROWS, CLIP = 8, 4, 0.5
RNG = Randomness(5)


def task_of(folder: str, train: str = "both", device: str = "cpu", **fields) -> TextToVideo:
    """Clips of 12-channel latents, without weights of encoders."""
    encoder = ByteTextEncoder(32, 64)
    encoder.load(torch.device("cpu"))
    with torch.device(device):
        predictor = TwoExpert(from_pretrained=folder, train=train)
    return TextToVideo(predictor, PixelAutoencoder(2), encoder, WanFlowMatch(**fields))


def row_of(task: TextToVideo, step: int, row: int, rows: int = 1) -> VideoTextBatch:
    """`rows` samples of a step, from its number `row` on."""
    numbers = range(step * ROWS + row, step * ROWS + row + rows)
    batch = VideoTextBatch(
        keys=[SampleKey(0, number) for number in numbers],
        sample_weights=torch.ones(rows),
        ids=[str(number) for number in numbers],
        pixels=torch.stack([RNG.normal((3, 2, 8, 8), "pixels", n).clamp(-1, 1) for n in numbers]),
        captions=["a red circle"] * rows,
    )
    return task.batch_transform()(batch)


def started(folder: str) -> tuple[TextToVideo, FSDP2Engine, EMA]:
    task = task_of(folder, device="meta")
    engine = FSDP2Engine(sub_modules_to_wrap=WRAP, param_dtype=None)
    config = SimpleNamespace(
        registry=get_registry(),
        init_from=None,
        train=SimpleNamespace(adapters=()),
        allow_code=False,
    )
    engine.prepare(
        task,
        engine.plan(task, dist.get_world_size(), 2),
        lambda parameters: adamw([{"params": list(parameters.values())}], **ADAMW),
        Randomness(0),
        FileWeights(WeightSources(task, config.init_from, config.registry), config.train.adapters),
    )
    return task, engine, EMA(engine.shards, AVERAGE)


def steps(task: TextToVideo, engine: FSDP2Engine, ema: EMA, first: int, last: int):
    """Yields (expert, loss, gradient norm) after each step."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(first, last):
        task.begin_step(step)
        losses, rows = [], [row for row in range(ROWS) if row % world == rank]
        for row in rows:

            def compute(step: int = step, row: int = row):
                return task.loss(task.prepare(row_of(task, step, row), RNG))

            loss = engine.micro_step(compute, last=row == rows[-1], scale=world / ROWS)
            losses.append(loss.total)
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
        norm = engine.grad_norm()
        engine.step(norm, CLIP)
        ema.update(step + 1)
        yield task.experts.of_step(RNG, step)[0], float(total) / ROWS, norm


def main() -> None:
    out, folder = sys.argv[1:]
    start_process_group()
    torch.set_num_threads(1)
    task, engine, ema = started(folder)
    seen = {"steps": [], "weights": [all_whole(engine.state_dict()["model"])]}
    for number, figures in enumerate(steps(task, engine, ema, 0, STEPS)):
        seen["steps"].append(figures)
        seen["weights"].append(all_whole(engine.state_dict()["model"]))
        if number == 0:
            state = copied({**engine.state_dict(), "ema": ema.state_dict()})
    seen["optimizer"], seen["ema"] = all_whole(engine.state_dict()["optimizer"]), all_whole(ema.state_dict())
    again, engine, ema = started(folder)
    engine.load_state_dict({part: state[part] for part in ("model", "optimizer")})
    for name, tensor in ema.state_dict().items():
        tensor.copy_(state["ema"][name])
    seen["resumed"] = list(steps(again, engine, ema, 1, STEPS))
    for part, found in (
        ("model", engine.state_dict()["model"]),
        ("optimizer", engine.state_dict()["optimizer"]),
    ):
        seen[f"resumed {part}"] = all_whole(found)
    seen["resumed ema"] = all_whole(ema.state_dict())
    if dist.get_rank() == 0:
        torch.save(seen, out)
    dist.barrier()


def copied(state):
    return {part: {n: t.detach().clone() for n, t in tensors.items()} for part, tensors in state.items()}


if __name__ == "__main__":
    main()
    leave(0)
