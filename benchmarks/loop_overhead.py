"""Compares a training step of mm_core with a hand-written FSDP2 loop on the same model, data and arithmetic.

    python benchmarks/loop_overhead.py [--ranks 2] [--rounds 40] [--steps 4] [--workers 0]

Both train in the same process (of each rank) in turn: a round is `steps` steps of one, then of the other.
Ratios are computed per round, so a change of the machine's speed affects both: of processor time, all ranks
together, which a shared machine disturbs less, and of wall time. Without workers, reading counts.
The hand-written loop reads the same clips through torch's DataLoader with the same number of workers, encodes
with the same components, clips gradients, steps, and reads its loss as often as mm_core logs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BAR = 1.02


def main() -> int:
    """Starts the ranks; in a child process, runs as one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return run_rank(args.rounds, args.steps, args.workers)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        render = [
            sys.executable,
            ROOT / "examples/shapes/render.py",
            "--out",
            f"{folder}/shapes",
            "--clips",
            "128",
        ]
        subprocess.run(render, check=True, stdout=subprocess.DEVNULL)
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:]],
                env=os.environ
                | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(args.ranks),
                    "OMP_NUM_THREADS": "1",
                }
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "BENCH_DIR": folder},
            )
            for rank in range(args.ranks)
        ]
        return max(abs(process.wait()) for process in ranks)


def run_rank(rounds: int, steps: int, workers: int) -> int:
    """Times both training loops in turn; rank 0 prints."""
    import torch
    import torch.distributed as dist

    import mm_core
    from mm_core.runtime.groups import start_process_group
    from mm_core.training.assembly import assemble
    from mm_core.training.loop import run_steps

    folder, world = os.environ["BENCH_DIR"], int(os.environ["WORLD_SIZE"])
    start_process_group()
    config = mm_core.load_config(
        ROOT / "configs/custom_dit/quickstart.yaml",
        [
            f"run.dir={folder}/runs",
            f"data.train.annotations={folder}/shapes/data.json",
            f"data.train.folder={folder}/shapes",
            f"train.steps={(rounds + 1) * steps}",
            f"train.micro_batch_size={16 // world}",
            "train.global_batch_size=16",
            "checkpoint.every=1000000",
            f"data.loader.workers={workers}",
        ],
    )
    run = assemble(config, "never")
    training = run
    whole = training.plan
    run.between.steps = 1 << 30  # far away: the last step of a run would save
    manual = HandWritten(config, training.task, run)
    times: dict[str, list[float]] = {"mm_core": [], "hand": []}
    busy: dict[str, list[float]] = {"mm_core": [], "hand": []}
    for round_ in range(rounds + 1):
        first = round_ * steps
        for name in ("mm_core", "hand") if round_ % 2 else ("hand", "mm_core"):
            dist.barrier()
            began, processor = time.perf_counter(), time.process_time()
            if name == "mm_core":
                training.plan = dataclasses.replace(whole, steps=first + steps)
                run_steps(training, first)
            else:
                manual.run(steps, config.log.every)
            spent = torch.tensor((time.process_time() - processor) / steps)
            dist.all_reduce(spent)
            busy[name].append(float(spent))
            times[name].append((time.perf_counter() - began) / steps)
    run.reporter.close("done")
    ok = True
    if dist.get_rank() == 0:
        for kind, measured in (("wall", times), ("processor", busy)):  # the first round is warm-up
            ok = report(kind, {name: values[1:] for name, values in measured.items()}, world)
    dist.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0 if ok else 1)


class HandWritten:
    """A hand-written training loop without any framework: FSDP2, AdamW, a DataLoader, and nothing else."""

    def __init__(self, config, task, run) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.utils.data import DataLoader, DistributedSampler

        from mm_core.contracts import SampleKey

        torch.manual_seed(0)
        self.task, self.lr = task, config.optimizer.options["lr"]
        self.model = config.registry.build("predictor", config.task.options["predictor"])
        self.model.init_weights()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        reshard = config.engine.options["reshard_after_forward"]
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        options = config.optimizer.options
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.lr,
            betas=options["betas"],
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            fused=True,
        )
        dataset = config.registry.build("dataset", config.data.train)
        transform = task.batch_transform()

        def collate(samples):
            rows = [{**s, "key": SampleKey(0, i), "weight": 1.0} for i, s in enumerate(samples)]
            return transform(dataset.collate(rows))

        loader = DataLoader(
            dataset,
            batch_size=config.train.micro_batch_size,
            sampler=DistributedSampler(dataset, drop_last=True),
            num_workers=config.data.loader.workers,
            prefetch_factor=config.data.loader.prefetch if config.data.loader.workers else None,
            collate_fn=collate,
            drop_last=True,
            persistent_workers=bool(config.data.loader.workers),
        )
        self.batches = self.forever(loader)
        self.losses: list[float] = []
        self.taken = 0

    @staticmethod
    def forever(loader):
        """Repeats the loader without end."""
        while True:
            yield from loader

    def run(self, steps: int, log_every: int) -> None:
        """Runs `steps` optimizer steps of the hand-written loop."""
        import torch

        task, model = self.task, self.model
        for _ in range(steps):
            batch = next(self.batches)
            with torch.no_grad():
                latents = task.autoencoder.encode(batch.to(torch.device("cpu")).pixels).mode()
                text, mask = task.text_encoder.encode(batch.text_ids, batch.text_mask)
                noise = torch.randn_like(latents)
                uniform = torch.rand(len(batch))
                sigma = 5 * uniform / (1 + 4 * uniform)
                weight = sigma.view(-1, 1, 1, 1, 1)
                noisy = (1 - weight) * latents + weight * noise
            velocity = model(noisy, timestep=1000 * sigma, text=text, text_mask=mask)
            loss = (velocity.float() - (noise - latents)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.taken += 1
            if self.taken % log_every == 0:
                self.losses.append(loss.item())


def report(kind: str, times: dict[str, list[float]], world: int) -> bool:
    """Prints the table and the RESULT line; returns whether the bar is met."""
    ratios = [ours / theirs for ours, theirs in zip(times["mm_core"], times["hand"], strict=True)]
    print(f"{world} ranks, {len(ratios)} paired rounds, {kind} time")
    print(f"{'loop':<14}{'median ms/step':>18}{'least':>10}{'most':>10}")
    for name, values in times.items():
        milli = sorted(1000 * value for value in values)
        print(f"{name:<14}{statistics.median(milli):>18.1f}{milli[0]:>10.1f}{milli[-1]:>10.1f}")
    ratio = statistics.median(ratios)
    print(f"ratio round by round: median {ratio:.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"RESULT loop_overhead_{kind} {ratio:.3f} {BAR} {'ok' if ratio <= BAR else 'short'}")
    return ratio <= BAR


if __name__ == "__main__":
    sys.exit(main())
