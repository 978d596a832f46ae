"""Compares the host's time for a training step with lean code, round by round, as ratios of processor time.

    python benchmarks/host_time.py tensors [--ranks 2] [--rounds 60] [--tensors 1000]
    python benchmarks/host_time.py script [--rounds 60] [--steps 2]

- tensors: gradient norm, clipping, AdamW and the moving average of many small tensors, against the same
  arithmetic written by hand over lists of local shards; and torch's functions over DTensors ("before").
  Norms, weights and averages of the three must be equal to the bit.
- script: a step of configs/wan/t2v_tiny.yaml in one process, against a script in the style of Accelerate's
  documentation with the classes of Diffusers and Transformers; both read the same clips, without workers, and
  neither recomputes, nor drops captions or gathered weights.

The loop against a hand-written FSDP2 loop is in loop_overhead.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DECAY, RATE, CLIP = 0.999, 1e-3, 1.0


def main() -> int:
    """Starts the ranks of a part; in a child process, runs as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=("tensors", "script"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=2, help="steps of each side in a round")
    parser.add_argument("--tensors", type=int, default=1000)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return (tensors if args.part == "tensors" else script)(args)
    ranks = args.ranks if args.part == "tensors" else 1
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "BENCH_DIR": folder}
        probe.close()
        started = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:]],
                env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        return max(abs(process.wait()) for process in started)


def paired(
    sides: dict[str, Callable[[], None]], rounds: int, before: Callable[[str], None] = lambda name: None
) -> dict[str, list[float]]:
    """Processor seconds of each side in each round, over all ranks; the first round is not counted."""
    import torch
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for round_ in range(rounds + 1):
        for name in names if round_ % 2 else names[::-1]:
            before(name)
            dist.barrier()
            began = time.process_time()
            sides[name]()
            busy = torch.tensor(time.process_time() - began, dtype=torch.float64)
            dist.all_reduce(busy)
            times[name].append(float(busy))
    return {name: values[1:] for name, values in times.items()}


def verdict(name: str, times: dict[str, list[float]], other: str, bar: float) -> bool:
    """Prints the ratio of mm_core to another side and its RESULT line; returns whether the bar is met."""
    ratios = [ours / theirs for ours, theirs in zip(times["mm_core"], times[other], strict=True)]
    ratio = statistics.median(ratios)
    print(f"mm_core against {other}, {len(ratios)} rounds: {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"RESULT {name} {ratio:.3f} {bar} {'ok' if ratio <= bar else 'short'}")
    return ratio <= bar


# -- tensors -----------------------------------------------------------------------------------------


def many_tensors(number: int):
    """The engine of a run with so many trained tensors [16,8] on meta, and their average."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from mm_core.config.sections import EMASection
    from mm_core.contracts import Randomness, TaskModule
    from mm_core.engines.fsdp2 import FSDP2Engine
    from mm_core.optim.ema import EMA

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList(torch.empty(16, 8) for _ in range(number))

        def init_weights(self) -> None:
            for parameter in self.all:
                nn.init.normal_(parameter)

    class Task(TaskModule):
        trainable, frozen = ("net",), ()

        def __init__(self) -> None:
            super().__init__()
            self.net = Many()

    with torch.device("meta"):
        task = Task()
    engine = FSDP2Engine()
    plan = engine.plan(task, dist.get_world_size(), 2)
    engine.prepare(task, plan, lambda named: optimizer_of(named.values()), Randomness(0))
    return engine, EMA(engine.shards, EMASection(decay=DECAY, ramp=False))


def optimizer_of(parameters):
    """The optimizer of all sides."""
    import torch

    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


def tensors(args: argparse.Namespace) -> int:
    """Times norm, clipping, update and average of many small tensors; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from mm_core.runtime.groups import start_process_group

    start_process_group()
    engine, ema = many_tensors(args.tensors)
    ours = Ours(engine, ema)
    sides = {"mm_core": ours, "lean": Lean(ours.own), "before": Before(ours.own)}
    generator, spec = torch.Generator(), ours.own[0]._spec
    taken = dict.fromkeys(sides, 0)

    def gradients(name: str) -> None:
        generator.manual_seed(taken[name] * dist.get_world_size() + dist.get_rank())
        taken[name] += 1
        for parameter in sides[name].own:
            share = torch.randn(parameter._local_tensor.shape, generator=generator)
            parameter.grad = type(parameter)(share, spec, requires_grad=False)

    times = paired({name: side.step for name, side in sides.items()}, args.rounds, gradients)
    same = all(
        side.norms == ours.norms
        and all(
            torch.equal(a._local_tensor, b._local_tensor) for a, b in zip(side.own, ours.own, strict=True)
        )
        and all(torch.equal(a, b) for a, b in zip(side.averages, ours.averages, strict=True))
        for side in sides.values()
    )
    good = same
    if dist.get_rank() == 0:
        print(f"{args.tensors} tensors, {dist.get_world_size()} ranks: processor ms of a step on a rank")
        for name, values in times.items():
            milli = [1000 * value / dist.get_world_size() for value in values]
            print(f"{name:<10}{statistics.median(milli):>8.2f} ({min(milli):.2f} to {max(milli):.2f})")
        good &= verdict("host_time_tensors", times, "lean", 1.2)
        verdict("host_time_before", times, "before", 1.0)
        print(f"RESULT host_time_bit_equal {int(same)} 1 {'ok' if same else 'short'}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0 if good else 1)


class Ours:
    """Norm, clipping, update and average by the engine of a run."""

    def __init__(self, engine, ema) -> None:
        self.engine, self.ema, self.norms = engine, ema, []
        self.own = [parameter for _, parameter in engine.named_parameters()]
        self.averages = [*ema.state_dict().values()]
        self.averages = [average._local_tensor for average in self.averages]

    def step(self) -> None:
        self.norms.append(self.engine.grad_norm())
        self.engine.step(self.norms[-1], CLIP)
        self.ema.update(len(self.norms))


class Lean:
    """The same, written by hand over lists of local shards."""

    def __init__(self, parameters) -> None:
        from torch import nn

        self.own = [nn.Parameter(self.copy(p)) for p in parameters]
        self.views = [nn.Parameter(p._local_tensor) for p in self.own]
        self.averages = [p._local_tensor.clone() for p in parameters]
        self.optimizer, self.norms = optimizer_of(self.views), []

    @staticmethod
    def copy(parameter):
        return type(parameter)(parameter._local_tensor.clone(), parameter._spec, requires_grad=False)

    def step(self) -> None:
        import torch
        import torch.distributed as dist

        gradients = [p.grad._local_tensor for p in self.own]
        squares = torch.stack(torch._foreach_norm(gradients)) ** 2
        dist.all_reduce(squares)
        norm = float(torch.linalg.vector_norm(squares.sqrt()))
        if norm > CLIP:
            torch._foreach_mul_(gradients, CLIP / (norm + 1e-6))
        for view, gradient in zip(self.views, gradients, strict=True):
            view.grad = gradient
        self.optimizer.step()
        for parameter, view in zip(self.own, self.views, strict=True):
            parameter.grad = view.grad = None
        torch._foreach_lerp_(self.averages, [view.detach() for view in self.views], 1 - DECAY)
        self.norms.append(norm)


class Before:
    """The same by torch's functions over DTensors."""

    def __init__(self, parameters) -> None:
        from torch import nn

        self.own = [nn.Parameter(Lean.copy(p)) for p in parameters]
        self.averages = [p._local_tensor.clone() for p in parameters]
        self.optimizer, self.norms = optimizer_of(self.own), []

    def step(self) -> None:
        import torch

        gradients = [p.grad for p in self.own]
        norm = float(torch.nn.utils.get_total_norm(gradients).full_tensor())
        if norm > CLIP:
            torch._foreach_mul_(gradients, CLIP / (norm + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad()
        weights = [p.to_local().detach().to("cpu", torch.float32) for p in self.own]
        torch._foreach_lerp_(self.averages, weights, 1 - DECAY)
        self.norms.append(norm)


# -- script ------------------------------------------------------------------------------------------


def script(args: argparse.Namespace) -> int:
    """Times steps of a run and of the script in turn."""
    from mm_wan.testing import make_tiny_checkpoint

    import mm_core
    from mm_core.runtime.groups import start_process_group
    from mm_core.training.assembly import assemble
    from mm_core.training.loop import run_steps

    folder = Path(os.environ["BENCH_DIR"])
    make_tiny_checkpoint(folder / "wan")
    clips = ["--out", str(folder / "clips"), "--clips", "64", "--frames", "9", "--size", "64"]
    render = [sys.executable, str(ROOT / "examples/shapes/render.py"), *clips]
    subprocess.run(render, check=True, stdout=subprocess.DEVNULL)
    start_process_group()
    overrides = {
        "run.dir": folder / "runs",
        "task.predictor.from_pretrained": folder / "wan",
        "task.autoencoder.from_pretrained": folder / "wan/vae",
        "task.text_encoder.from_pretrained": folder / "wan/text_encoder",
        "task.caption_dropout": 0,
        "data.train.annotations": folder / "clips/data.json",
        "data.train.height": 64,
        "data.train.fps": 8,
        "data.validation.annotations": folder / "clips/data.json",
        "data.loader.workers": 0,
        "engine.recompute_modules": "[]",
        "engine.reshard_after_forward": "false",
        "validation.every": 1_000_000,
        "validation.at_start": "false",
        "train.steps": (args.rounds + 1) * args.steps,
        "train.micro_batch_size": 8,
        "train.global_batch_size": 8,
        "checkpoint.every": 1_000_000,
    }
    given = [f"{key}={value}" for key, value in overrides.items()]
    config = mm_core.load_config(ROOT / "configs/wan/t2v_tiny.yaml", given)
    run = assemble(config, "never")
    run.between.steps = 1 << 30  # far away: the last step of a run would save
    whole, taken = run.plan, [0]
    theirs = Script(folder, config)

    def ours() -> None:
        run.plan = dataclasses.replace(whole, steps=taken[0] + args.steps)
        taken[0] = run_steps(run, taken[0])

    times = paired(
        {"mm_core": ours, "script": partial(theirs.run, args.steps, config.log.every)}, args.rounds
    )
    for name, values in times.items():
        milli = [1000 * value / args.steps for value in values]
        print(f"{name:<10}{statistics.median(milli):>8.1f} ms a step ({min(milli):.1f} to {max(milli):.1f})")
    assert all(map(math.isfinite, theirs.losses))
    good = verdict("host_time_script", times, "script", 1.02)
    run.reporter.close("done")
    sys.stdout.flush()
    os._exit(0 if good else 1)


class Script:
    """A training script of its own: Accelerate, and the classes of Diffusers and Transformers."""

    def __init__(self, folder: Path, config) -> None:
        import torch
        from accelerate import Accelerator
        from diffusers import AutoencoderKLWan, WanTransformer3DModel
        from torch.utils.data import DataLoader
        from transformers import AutoTokenizer, UMT5EncoderModel

        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # it runs in one process, so without DDP
            os.environ.pop(name, None)
        self.accelerator = Accelerator(cpu=True)
        assert self.accelerator.distributed_type == "NO"
        model = WanTransformer3DModel.from_pretrained(folder / "wan/transformer").train()
        self.vae = AutoencoderKLWan.from_pretrained(folder / "wan/vae").requires_grad_(False)
        self.text = UMT5EncoderModel.from_pretrained(folder / "wan/text_encoder").requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "wan/tokenizer")
        stats = (
            torch.tensor(values) for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        self.mean, self.std = (values.view(1, -1, 1, 1, 1) for values in stats)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, fused=True)
        dataset = config.registry.build("dataset", config.data.train)
        loader = DataLoader(dataset, 8, shuffle=True, drop_last=True, collate_fn=self.collate)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.batches, self.losses, self.taken = self.forever(), [], 0

    def collate(self, samples):
        """Pixels [B,3,F,Y,X] and tokens [B,512] of clips."""
        import torch

        tokens = self.tokenizer(
            [sample["caption"] for sample in samples],
            padding="max_length",
            max_length=512,
            truncation=True,
            return_tensors="pt",
        )
        return torch.stack([s["pixels"] for s in samples]), tokens.input_ids, tokens.attention_mask

    def forever(self):
        """Repeats the loader without end."""
        while True:
            yield from self.loader

    def run(self, steps: int, log_every: int) -> None:
        """Takes the next steps."""
        import torch

        for _ in range(steps):
            pixels, ids, mask = next(self.batches)
            with torch.no_grad():
                pixels = pixels.float() / 127.5 - 1 if pixels.dtype == torch.uint8 else pixels
                latents = (self.vae.encode(pixels).latent_dist.sample() - self.mean) / self.std
                text = self.text(ids, mask).last_hidden_state * mask[..., None]
                noise, uniform = torch.randn_like(latents), torch.rand(len(latents))
                sigma = 5 * uniform / (1 + 4 * uniform)
                share = sigma.view(-1, 1, 1, 1, 1)
                noisy = (1 - share) * latents + share * noise
            predicted = self.model(noisy, 1000 * sigma, text, return_dict=False)[0]
            loss = (predicted.float() - (noise - latents)).square().mean()
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.taken += 1
            if self.taken % log_every == 0:
                self.losses.append(loss.item())


if __name__ == "__main__":
    sys.exit(main())
