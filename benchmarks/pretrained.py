"""Compares a training step of the task `pretrained` with Transformers' Trainer and an Accelerate loop.

    python benchmarks/pretrained.py [--ranks 2] [--rounds 12] [--steps 4] [--accumulation 2]

All three train copies of one model (a Qwen3 of a few million parameters) on the same rows of uneven length
in the same order, in the same process of each rank, in turn: a round is `steps` steps of each. Ratios are
computed per round, of wall time and of CPU time, which a shared machine disturbs less. All use FSDP2 over
all ranks with a group for each block, fp32, AdamW, gradient clipping at 1.0, and read the loss at every
step. Accelerate has no FSDP on the CPU: the script overrides its check, and it shards as it does on other
devices.
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
import threading
import time
from pathlib import Path
from typing import Any

from mm_core import Component, hookimpl
from mm_core.errors import plural

BAR = 1.0
MODEL = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
MODEL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}
MICRO, RATE = 2, 1e-4
Times = dict[str, list[tuple[float, float]]]
"""Wall and CPU seconds of a step in each round, by loop."""


@hookimpl
def mm_datasets():
    return [Component(name="benchmark_tokens", target=f"{Path(__file__).stem}:Tokens")]


class Tokens:
    """A dataset of rows with 32 to 160 tokens."""

    def __init__(self, rows: int = 256) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int):
        import torch

        rng = torch.Generator().manual_seed(index)
        length = int(torch.randint(32, 161, (1,), generator=rng))
        return {"input_ids": torch.randint(3, MODEL["vocab_size"], (length,), generator=rng), "index": index}

    def inputs(self, samples):
        """Inputs of the model for a batch, padded to the longest row."""
        from torch.nn.utils.rnn import pad_sequence

        rows = [sample["input_ids"] for sample in samples]
        ids = pad_sequence(rows, batch_first=True)
        mask = pad_sequence([row.new_ones(len(row)) for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def collate(self, samples):
        import torch

        from mm_core.contracts import TextBatch

        keys, weights = [s["key"] for s in samples], torch.tensor([s["weight"] for s in samples])
        return TextBatch(keys, weights, [str(s["index"]) for s in samples], inputs=self.inputs(samples))


def main() -> int:
    """Starts the ranks; in a child process, runs as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=2)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return run_rank(args)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(f"{folder}/model")
        probe.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": str(args.ranks), "LOCAL_WORLD_SIZE": str(args.ranks), "OMP_NUM_THREADS": "1"}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "BENCH_DIR": folder}
        world |= {"ACCELERATE_USE_CPU": "true"}
        probe.close()
        command = [sys.executable, __file__, *sys.argv[1:]]
        ranks = [
            subprocess.Popen(command, env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(args.ranks)
        ]
        return max(abs(process.wait()) for process in ranks)


def run_rank(args: argparse.Namespace) -> int:
    """Times the three training loops in turn; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from mm_core.runtime.groups import start_process_group

    folder = Path(os.environ["BENCH_DIR"])
    start_process_group()
    turns = (args.rounds + 1) * args.steps
    loops = {
        "mm_core": Ours(folder, document_of(folder, turns, args.accumulation)),
        "Trainer": TrainedOnTokens(
            folder,
            turns,
            sharded=True,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=args.accumulation,
        ),
        "Accelerate": Accelerated(folder, args.accumulation),
    }
    times: Times = {name: [] for name in loops}
    names = list(loops)
    for round_ in range(args.rounds + 1):
        for name in names[round_ % 3 :] + names[: round_ % 3]:
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            loops[name].run(args.steps)
            busy = torch.tensor(time.process_time() - began[1])
            dist.all_reduce(busy)
            times[name].append(((time.perf_counter() - began[0]) / args.steps, float(busy) / args.steps))
    ok = True
    if dist.get_rank() == 0:
        first = {name: loop.losses[:2] for name, loop in loops.items()}
        print("first losses: " + "; ".join(f"{n} {a:.4f} {b:.4f}" for n, (a, b) in first.items()))
        ok = report({name: values[1:] for name, values in times.items()}, dist.get_world_size())
    dist.barrier()
    sys.stdout.flush()
    os._exit(0 if ok else 1)


class Ours:
    """The training loop of mm_core.

    Args:
        folder: for the run.
        document: its config, without names and checkpoints.
    """

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        import torch.distributed as dist
        import yaml

        import mm_core
        from mm_core.training.assembly import assemble

        document = {
            **document,
            "run": {"name": "ours", "dir": str(folder / "runs")},
            "checkpoint": {"every": 1_000_000},
        }
        path = folder / f"ours{dist.get_rank()}.yaml"
        path.write_text(yaml.safe_dump(document))
        self.assembly = assemble(mm_core.load_config(path), "never")
        self.assembly.between.steps = 1 << 30  # far away: the last step of a run would save
        self.whole, self.taken = self.assembly.plan, 0

    def run(self, steps: int) -> None:
        """Trains the next steps."""
        from mm_core.training.loop import run_steps

        self.assembly.plan = dataclasses.replace(self.whole, steps=self.taken + steps)
        run_steps(self.assembly, self.taken)
        self.taken += steps

    @property
    def losses(self) -> list[float]:
        """Losses as logged by mm_core."""
        import json

        rows = (self.assembly.reporter.run_dir / "metrics.jsonl").read_text().splitlines()
        return [row["loss"] for row in map(json.loads, rows) if "loss" in row]


def document_of(folder: Path, turns: int, accumulation: int) -> dict[str, Any]:
    """Config of mm_core's run."""
    import torch.distributed as dist

    return {
        "plugins": {"path": [__file__]},
        "task": {
            "type": "pretrained",
            "from_pretrained": str(folder / "model"),
            "auto_class": "AutoModelForCausalLM",
        },
        "data": {"train": {"type": "benchmark_tokens"}, "loader": {"workers": 0, "sampler": "sequential"}},
        "optimizer": {"type": "adamw", "lr": RATE, "weight_decay": 0.0},
        "train": {
            "steps": turns,
            "micro_batch_size": MICRO,
            "global_batch_size": MICRO * accumulation * dist.get_world_size(),
        },
    }


def plugin_of(blocks):
    """Accelerate's FSDP2 plugin with a group for each block, as in mm_core."""
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(block).__name__ for block in blocks],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )


def shard_on_cpu(accelerator, *blocks) -> None:
    """Makes Accelerate use FSDP2 on a CPU, which it supports only on accelerators."""
    from accelerate.utils import DistributedType

    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin_of(blocks)
    assert accelerator.is_fsdp2


def check_sharded(*modules) -> None:
    """Checks that a model and its blocks are sharded with FSDP2, so that the comparison is fair."""
    from torch.distributed.fsdp import FSDPModule

    assert all(isinstance(module, FSDPModule) for module in modules)


class Accelerated:
    """A training loop in the style of Accelerate's documentation."""

    def __init__(self, folder: Path, accumulation: int) -> None:
        import torch
        from accelerate import Accelerator
        from torch.utils.data import DataLoader
        from transformers import AutoModelForCausalLM

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = AutoModelForCausalLM.from_pretrained(folder / "model").train()
        shard_on_cpu(self.accelerator, model.model.layers[0])
        data = Tokens()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
        loader = DataLoader(data, MICRO, collate_fn=data.inputs, drop_last=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        check_sharded(self.model, self.model.model.layers[0])
        self.batches, self.losses = self.forever(), []

    def forever(self):
        """Repeats the loader without end."""
        while True:
            yield from self.loader

    def run(self, steps: int) -> None:
        """Runs the next steps, each with a mean over micro-batches: tokens have no weights."""
        for _ in range(steps):
            total = 0.0
            for _ in range(self.accelerator.gradient_accumulation_steps):
                batch = next(self.batches)
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch, use_cache=False).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    total += loss.detach()
            mean = self.accelerator.reduce(total, "mean") / self.accelerator.gradient_accumulation_steps
            self.losses.append(mean.item())


class Trained:
    """Transformers' Trainer in its own thread, which waits for its turn at each step.

    Args:
        folder: for the run.
        turns: number of steps.
        sharded: whether the model is sharded with FSDP2.
        options: of `TrainingArguments`, beside those below.
    """

    def __init__(self, folder: Path, turns: int, sharded: bool, **options: Any) -> None:
        self.folder, self.turns, self.sharded, self.options = folder, turns, sharded, options
        self.losses: list[float] = []
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.fault: BaseException | None = None
        threading.Thread(target=self.train, daemon=True).start()
        self.wait()  # until its first step is due

    def parts(self) -> tuple[Any, Any, Any]:
        """The model, the dataset, and what collates its samples."""
        raise NotImplementedError

    def blocks(self, model: Any) -> tuple[Any, ...]:
        """One block of each kind, for FSDP2."""
        raise NotImplementedError

    def run(self, steps: int) -> None:
        """Trains the next steps."""
        for _ in range(steps):
            self.go.release()
            self.wait()

    def wait(self) -> None:
        """Waits until a step has ended."""
        self.done.acquire()
        if self.fault is not None:
            raise self.fault

    def train(self) -> None:
        """Runs `Trainer.train` in the thread."""
        from torch.utils.data import SequentialSampler
        from transformers import Trainer, TrainerCallback, TrainingArguments
        from transformers.trainer_callback import PrinterCallback

        outer = self

        class InOrder(Trainer):
            def _get_train_sampler(self, *_) -> SequentialSampler:
                return SequentialSampler(self.train_dataset)

        class Turns(TrainerCallback):
            def on_step_begin(self, args, state, control, model=None, **_) -> None:
                if outer.sharded:
                    check_sharded(model, *outer.blocks(model))
                outer.done.release()
                outer.go.acquire()

            def on_log(self, args, state, control, logs=None, **_) -> None:
                if "loss" in logs:
                    outer.losses.append(float(logs["loss"]))

        try:
            model, data, collate = self.parts()
            arguments = TrainingArguments(
                output_dir=str(self.folder / "trainer"),
                use_cpu=True,
                max_steps=self.turns + 1,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                optim="adamw_torch_fused",
                logging_steps=1,
                logging_strategy="steps",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
                remove_unused_columns=False,
                **self.options,
            )
            trainer = InOrder(model, arguments, collate, data, callbacks=[Turns()])
            trainer.remove_callback(PrinterCallback)
            if self.sharded:
                shard_on_cpu(trainer.accelerator, *self.blocks(model))
                trainer.is_fsdp_enabled = True
            trainer.train()
        except BaseException as fault:
            self.fault = fault
            self.done.release()


class TrainedOnTokens(Trained):
    """Trainer of the text model."""

    def parts(self) -> tuple[Any, Any, Any]:
        from transformers import AutoModelForCausalLM

        data = Tokens()
        return AutoModelForCausalLM.from_pretrained(self.folder / "model"), data, data.inputs

    def blocks(self, model: Any) -> tuple[Any, ...]:
        return (model.model.layers[0],)


def report(times: Times, world: int) -> bool:
    """Prints the table and the RESULT lines; returns whether the bar is met."""
    print_times(times, world)
    met = True
    for name in ("Trainer", "Accelerate"):
        for column, kind in ((0, "step"), (1, "cpu")):
            ratio = median_ratio(times, name, column)
            met &= ratio <= BAR
            verdict = "ok" if ratio <= BAR else "short"
            print(f"RESULT pretrained_{kind}_{name.lower()} {ratio:.3f} {BAR} {verdict}")
    return met


def print_times(times: Times, world: int) -> None:
    """Prints the wall and CPU time of each loop's steps."""
    print(f"{plural(world, 'rank')}, {len(times['mm_core'])} paired rounds; median (least to most) of a step")
    print(f"{'loop':<14}{'ms wall time':>24}{'ms CPU time':>24}")
    for name, values in times.items():
        columns = ([1000 * row[column] for row in values] for column in (0, 1))
        cells = (f"{statistics.median(c):.0f} ({min(c):.0f} to {max(c):.0f})" for c in columns)
        print(f"{name:<14}" + "".join(f"{cell:>24}" for cell in cells))


def median_ratio(times: Times, name: str, column: int) -> float:
    """The median of mm_core's times over another loop's, round by round; prints their range."""
    pairs = zip(times["mm_core"], times[name], strict=True)
    ratios = [ours[column] / theirs[column] for ours, theirs in pairs]
    kind = ("wall", "CPU")[column]
    print(f"{kind} time against {name}, round by round: {min(ratios):.3f} to {max(ratios):.3f}")
    return statistics.median(ratios)


if __name__ == "__main__":
    sys.exit(main())
