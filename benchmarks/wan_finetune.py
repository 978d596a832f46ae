"""Fine-tunes a tiny Wan on real clips: held-out loss after 300 steps against its start; exact resume.

    python benchmarks/wan_finetune.py [--seeds 1 2 3] [--steps 300] [--jobs 2]

Needs mm-wan, and the extra `dev` for the clips (examples/real_clips). The runs are configs/wan/t2v_tiny.yaml.
The loss is the run's own validation: fixed noise at five quantiles of the training timesteps, on the four
clips.

The meaning of the ratio depends on the start:
- random: the tiny checkpoint of `make_tiny_checkpoint`, with the initialisation of Diffusers' class. It is
  untrained, so the bar applies to the lower of two losses: its own, and that of the same model with a head of
  zeros, which always predicts 0.
- shapes: the same model after the same number of steps on clips of moving shapes, for one seed. It shows the
  gain from fine-tuning a trained model on other clips.

A resumed run is bit-equal if, from its checkpoint half way, it reaches the same exported bytes and the
same loss.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mm_wan.testing import make_tiny_checkpoint
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs/wan/t2v_tiny.yaml"
BAR = 0.8
FROZEN = {"autoencoder": "vae", "text_encoder": "text_encoder"}
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@dataclass(frozen=True)
class Outcome:
    """Result of a fine-tuned run: held-out loss before and after, and whether the resumed run was
    bit-equal."""

    origin: str
    seed: int
    start: float
    end: float
    same: bool

    @property
    def ratio(self) -> float:
        return self.end / self.start


def command(folder: Path, *arguments: str) -> str:
    """Runs `mm ARGUMENTS` in the folder; raises RuntimeError with its output if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mm_core.cli.main", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise RuntimeError(f"mm {' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return done.stdout


def prepare(folder: Path, seeds: Sequence[int]) -> None:
    """Writes real clips, clips of shapes, and tiny pipelines."""
    for seed in seeds:
        make_tiny_checkpoint(folder / f"ckpt/random_{seed}", seed=seed)
    for script, *options in (
        ("real_clips/prepare.py", "--out", "data/real_clips"),
        ("shapes/render.py", "--out", "data/shapes", "--clips", "64", "--frames", "9", "--size", "64"),
    ):
        arguments = [sys.executable, str(ROOT / "examples" / script), *options]
        subprocess.run(arguments, cwd=folder, check=True, capture_output=True)


def run(folder: Path, name: str, origin: str, seed: int, steps: int, *more: str) -> None:
    """Trains one run of the tiny config, starting from a pipeline's folder."""
    overrides = [f"run.name={name}", f"run.seed={seed}", f"task.predictor.from_pretrained={origin}"]
    overrides += [f"task.{part}.from_pretrained={origin}/{place}" for part, place in FROZEN.items()]
    overrides += [f"train.steps={steps}", f"validation.every={steps}", f"checkpoint.every={steps // 2}"]
    overrides += ["train.micro_batch_size=4", "data.loader.workers=0", "log.every=50"]
    command(folder, "train", "--config", str(CONFIG), *overrides, *more)


def losses(folder: Path, name: str) -> dict[int, float]:
    """Held-out losses of a run, by step."""
    lines = (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["validation/loss"] for row in rows if "validation/loss" in row}


def exported(folder: Path, name: str) -> str:
    """Exports a run and returns a digest of its transformer."""
    out = folder / f"out_{name}"
    command(folder, "export", "--run", f"runs/{name}", "--to", "wan/diffusers", "--out", str(out))
    return hashlib.sha256((out / WEIGHTS).read_bytes()).hexdigest()


def tiny(folder: Path, seed: int) -> str:
    """Folder of a tiny pipeline with random weights, from `prepare`."""
    return str(folder / f"ckpt/random_{seed}")


def shaped(folder: Path, seed: int, steps: int) -> str:
    """Folder of a tiny pipeline whose transformer was trained on moving shapes."""
    name, data = f"shapes_{seed}", ("data.train.annotations=data/shapes/data.json", "data.train.height=64")
    run(folder, name, tiny(folder, seed), seed, steps, *data, "data.train.fps=8")
    exported(folder, name)
    return str(folder / f"out_{name}")


def silent(folder: Path, seed: int) -> float:
    """Held-out loss of the tiny pipeline with a head of zeros."""
    origin = Path(tiny(folder, seed))
    zeroed = shutil.copytree(origin, folder / f"ckpt/silent_{seed}")
    weights = load_file(zeroed / WEIGHTS)
    weights |= {name: weights[name] * 0 for name in ("proj_out.weight", "proj_out.bias")}
    save_file(weights, zeroed / WEIGHTS, {"format": "pt"})
    run(folder, f"silent_{seed}", str(zeroed), seed, 2)
    return losses(folder, f"silent_{seed}")[0]


def finetune(folder: Path, kind: str, seed: int, steps: int) -> Outcome:
    """Fine-tunes one run on the real clips, and repeats its second half from the checkpoint."""
    origin = shaped(folder, seed, steps) if kind == "shapes" else tiny(folder, seed)
    name = f"{kind}_{seed}_tuned"
    run(folder, name, origin, seed, steps)
    found = losses(folder, name)
    half = folder / f"runs/{name}/checkpoints/step_{steps // 2:08d}"
    run(folder, f"{name}_resumed", origin, seed, steps, "--resume", str(half), "--allow", "all")
    again = losses(folder, f"{name}_resumed")
    same = exported(folder, name) == exported(folder, f"{name}_resumed") and found[steps] == again[steps]
    return Outcome(kind, seed, found[0], found[steps], same)


def measure(folder: Path, runs: Sequence[tuple[str, int]], steps: int, jobs: int) -> list[Outcome]:
    """Fine-tunes several runs, `jobs` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda each: finetune(folder, *each, steps), runs))


def main() -> int:
    parser = argparse.ArgumentParser(description="fine-tune a tiny Wan on real clips")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel runs, each on one core")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wan_finetune-") as scratch:
        folder = Path(scratch)
        prepare(folder, args.seeds)
        runs = [("shapes", args.seeds[0]), *(("random", seed) for seed in args.seeds)]
        outcomes = measure(folder, runs, args.steps, args.jobs)
        nothing = dict(zip(args.seeds, map(partial(silent, folder), args.seeds), strict=True))
    print(
        f"{'starts from':<12} {'seed':>4} {'predicting 0':>13} {'start':>8} {'end':>8} {'ratio':>7}  resumed"
    )
    for one in outcomes:
        print(
            f"{one.origin:<12} {one.seed:>4} {nothing[one.seed]:>13.4f} {one.start:>8.4f} {one.end:>8.4f}"
            f" {one.ratio:>7.3f}  {'bit-equal' if one.same else 'DIFFERENT'}"
        )
    worst = max(one.end / min(one.start, nothing[one.seed]) for one in outcomes if one.origin == "random")
    same = sum(one.same for one in outcomes)
    good = worst <= BAR and same == len(outcomes)
    print(f"RESULT wan_finetune_loss_ratio {worst:.3f} <={BAR} {'ok' if worst <= BAR else 'short'}")
    verdict = "ok" if same == len(outcomes) else "short"
    print(f"RESULT wan_finetune_resumed_bit_equal {same}/{len(outcomes)} {len(outcomes)} {verdict}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
