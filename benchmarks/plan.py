"""Compares what `mm-train --dry-run` predicts of a run's memory with what its ranks allocate.

    python benchmarks/plan.py [--only NAME ...] [--seconds]

Each case trains three steps of a tiny model on gloo ranks. Measured is the largest sum of live allocations of
torch's CPU allocator on any rank, from the start to the third step, as torch.profiler records them; of some
cases also in an evaluation, and in the sampling of clips.

With --seconds instead: processor time of a step of `TIMED`, one rank and one thread, data read by a worker,
against what the plan shows after `--calibrate`. The runs take turns; the median of five of each counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BAR, BAR_OF_OTHERS, BAR_OF_MEDIAN = 0.10, 0.15, 0.04
"""The second: of language models, DeepSpeed, evaluations and sampled clips."""

BAR_OF_SECONDS, BAR_OF_ORDER = 0.25, 0.9


class Case(NamedTuple):
    """A run: its config (of a folder of configs, or of the benchmark's folder), ranks, overrides, and whether
    its bar is `BAR_OF_OTHERS`."""

    name: str
    config: str
    ranks: int
    overrides: str = ""
    loose: bool = False


WAN, DIT, ZIMAGE, VLM, TEXT = "wan/t2v_tiny", "custom_dit/quickstart", "z_image", "internvl/tiny", "text"
SAMPLED = "validation.samples.prompts=[red] validation.at_start=false"
ZERO = "engine.type=deepspeed engine.settings.zero_optimization."
SMALL = f"{ZERO}reduce_bucket_size=1e6"
ZERO_BF16 = "engine.settings.bf16.enabled=true"
BF16, NONE = "engine.param_dtype=bf16", "engine.recompute_modules=[]"
CASES = (
    Case("wan full, recomputed", WAN, 1),
    Case("wan full, 2 ranks, nothing recomputed", WAN, 2, NONE),
    Case("wan selective bf16, 2 ranks", WAN, 2, f"{BF16} engine.recompute=selective"),
    Case("wan LoRA", "wan/t2v_tiny_lora", 1, NONE),
    Case("wan LoRA on int8", "wan/t2v_tiny_lora", 1, f"{BF16} train.base_dtype=int8"),
    Case("wan LoRA on a streamed base", "wan/t2v_tiny_lora", 1, "engine.base.stream=true"),
    Case("wan from the cache", WAN, 1, "data.cache.dir=cache"),
    Case("dit, 2 ranks, deferred", DIT, 2, "train.global_batch_size=32"),
    Case("dit, 3 ranks, reduced", DIT, 3, "train.global_batch_size=48 engine.accumulate=reduced"),
    Case("dit, context parallel 2", DIT, 2, "engine.context_parallel.size=2"),
    Case("dit, optimizer on the host", DIT, 2, "engine.offload.optimizer=cpu"),
    Case("dit, activations on the host, average", DIT, 1, "engine.offload.activations=cpu ema.decay=0.99"),
    Case("z-image full, buckets", ZIMAGE, 1),
    Case("z-image, 2 ranks, bf16", ZIMAGE, 2, BF16),
    Case("internvl packed", VLM, 1, loose=True),
    Case("internvl LoRA, 2 ranks", "internvl/tiny_lora", 2, loose=True),
    Case("text, 2 ranks", TEXT, 2, loose=True),
    Case("text, recomputed, chunked loss", TEXT, 1, "engine.recompute_modules=auto task.loss=chunked", True),
)
OTHERS = (
    Case("wan, validated and sampled", WAN, 1, SAMPLED),
    Case("wan, validated and sampled, average, 2 ranks", WAN, 2, f"{SAMPLED} ema.decay=0.9"),
    Case("z-image, sampled", ZIMAGE, 1, SAMPLED),
    Case("dit, ZeRO 0, 2 ranks", DIT, 2, f"{ZERO}stage=0", True),
    Case("dit, ZeRO 1, 2 ranks", DIT, 2, f"{ZERO}stage=1 {SMALL}", True),
    Case("dit, ZeRO 2, 2 ranks", DIT, 2, f"{ZERO}stage=2 {SMALL}", True),
    Case("dit, ZeRO 3, 2 ranks", DIT, 2, f"{ZERO}stage=3 {SMALL}", True),
    Case("wan, ZeRO 1 in bf16, 2 ranks", WAN, 2, f"{ZERO_BF16} {ZERO}stage=1", True),
    Case("wan, ZeRO 2 in bf16, 2 ranks", WAN, 2, f"{ZERO_BF16} {ZERO}stage=2 {SMALL}", True),
    Case("wan, ZeRO 3 in bf16, 2 ranks", WAN, 2, f"{ZERO_BF16} {ZERO}stage=3 {SMALL}", True),
)
"""Of other phases, and of another engine: they do not count in the median."""

TIMED = (
    Case("wan full, recomputed", WAN, 1),
    Case("wan full, nothing recomputed", WAN, 1, NONE),
    Case("wan LoRA", "wan/t2v_tiny_lora", 1),
    Case("dit", DIT, 1),
    Case("dit, twice the samples", DIT, 1, "train.micro_batch_size=16"),
    Case("z-image full, buckets", ZIMAGE, 1),
    Case("text", TEXT, 1),
    Case("text, recomputed", TEXT, 1, "engine.recompute_modules=auto"),
)
ALONE = ("train.global_batch_size=null",)
"""Of timed cases: a step is one micro-batch."""

PHASES = ("training", "evaluation", "sample")
ALWAYS = (
    *("run.dir=runs", "train.steps=3", "log.trackers=[]", "data.loader.workers=0", "checkpoint.every=100000"),
    "lr_schedule.warmup_steps=0",
)


def main() -> int:
    """Runs the cases and prints the table; in a child process, trains as one of the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", help="words of the names of cases")
    parser.add_argument("--seconds", action="store_true")
    args = parser.parse_args()
    if args.seconds:
        return compare_seconds()
    ratios: dict[str, float] = {}
    bars: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for case in (*CASES, *OTHERS):
            if args.only and not all(word in case.name for word in args.only):
                continue
            expected, measured = predicted(case, folder), allocated(case, folder)
            for phase, size in measured.items():
                name = f"{case.name}: {phase}" if phase != "training" else case.name
                ratio = ratios[name] = expected[phase] / size
                bar = bars[name] = BAR if phase == "training" and not case.loose else BAR_OF_OTHERS
                row = f"{name:<48} {expected[phase] / 2**20:8.1f} {size / 2**20:8.1f} MiB"
                print(f"{row}  {ratio:.3f}  {'ok' if abs(ratio - 1) <= bar else 'short'}", flush=True)
    offs = [abs(ratio - 1) for ratio in ratios.values()]
    within = sum(off <= bar for off, bar in zip(offs, bars.values(), strict=True))
    counted = [abs(ratios[case.name] - 1) for case in CASES if case.name in ratios]
    median = statistics.median(counted) if counted else 0.0
    print(f"RESULT plan_peaks_within {within} {len(offs)} {'ok' if within == len(offs) else 'short'}")
    good = "ok" if median <= BAR_OF_MEDIAN else "short"
    print(f"RESULT plan_peak_median {median:.4f} {BAR_OF_MEDIAN} {good}")
    return int(within < len(offs) or median > BAR_OF_MEDIAN)


def compare_seconds() -> int:
    """Prints predicted and measured processor time of each timed case."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        os.environ |= {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": f"{folder}/state"}
        for case in TIMED:
            forecast_of(case, folder, *ALONE, "--calibrate")
        expected = [float(forecast_of(case, folder, *ALONE)["step_seconds"]) for case in TIMED]
        rounds = [[processor_time(case, folder) for case in TIMED] for _ in range(5)]
    measured = [statistics.median(column) for column in zip(*rounds, strict=True)]
    for case, one, other in zip(TIMED, expected, measured, strict=True):
        print(f"{case.name:<40} {1000 * one:8.1f} {1000 * other:8.1f} ms  {one / other:.3f}")
    worst = max(abs(one / other - 1) for one, other in zip(expected, measured, strict=True))
    ranks = [[sorted(values).index(value) for value in values] for values in (expected, measured)]
    order = statistics.correlation(*ranks)
    good = worst <= BAR_OF_SECONDS, order >= BAR_OF_ORDER
    print(f"RESULT plan_seconds_worst {worst:.3f} {BAR_OF_SECONDS} {'ok' if good[0] else 'short'}")
    print(f"RESULT plan_seconds_order {order:.3f} {BAR_OF_ORDER} {'ok' if good[1] else 'short'}")
    return int(not all(good))


def processor_time(case: Case, folder: str, batch: tuple[str, ...] = ALONE) -> float:
    """The median processor seconds of a step in a process of its own; `batch` sets its samples."""
    command = [
        sys.executable,
        "-c",
        "import sys; from plan import timed; timed(sys.argv[1:])",
        *words_of(case),
    ]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    last = ["train.steps=12", *batch, "data.loader.workers=1"]
    out = subprocess.run([*command, *last], cwd=folder, env=env, check=True, stdout=subprocess.PIPE).stdout
    return next(float(line.split()[1]) for line in out.decode().splitlines() if line.startswith("seconds "))


def timed(words: list[str]) -> None:
    """Trains alone, and prints the median processor time of the steps after the first four."""
    from dataclasses import replace

    import mm_core
    from mm_core.runtime.groups import start_process_group
    from mm_core.training.assembly import assemble
    from mm_core.training.loop import run_steps

    start_process_group()
    config = mm_core.load_config(words[0], words[1:])
    run = assemble(config, "never")
    run.between.steps = 1 << 30
    whole, times = run.plan, []
    for step in range(config.train.steps or 0):
        run.plan = replace(whole, steps=step + 1)
        began = time.process_time()
        run_steps(run, step)
        times.append(time.process_time() - began)
    print("seconds", statistics.median(times[4:]), flush=True)
    os._exit(0)


def prepare(folder: Path) -> None:
    """Writes tiny checkpoints and data."""
    import diffusers
    import yaml
    from mm_diffusers.testing import tiny_pipeline
    from mm_internvl.testing import make_tiny_checkpoint as make_internvl
    from mm_internvl.testing import make_tiny_conversations
    from mm_wan.testing import make_tiny_checkpoint as make_wan
    from PIL import Image
    from transformers import InternVLForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

    make_wan(folder / "ckpt/wan_tiny")
    wan = diffusers.WanTransformer3DModel.from_pretrained(folder / "ckpt/wan_tiny/transformer").config
    sizes = {"num_layers": 6, "num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 1024}
    diffusers.WanTransformer3DModel(**{**wan, **sizes}).save_pretrained(folder / "ckpt/wan_tiny/transformer")
    make_internvl(folder / "ckpt/internvl_tiny")
    larger = InternVLForConditionalGeneration.config_class.from_pretrained(folder / "ckpt/internvl_tiny")
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "layer_types": None}
    text = type(larger.text_config)(**{**larger.text_config.to_dict(), **sizes})
    larger = type(larger)(**{**larger.to_dict(), "text_config": text.to_dict()})
    InternVLForConditionalGeneration(larger).save_pretrained(folder / "ckpt/internvl_tiny")
    make_tiny_conversations(folder / "data/digits")
    tiny_pipeline(folder / "ckpt/z_image", "ZImagePipeline")
    for place in ("shapes", "real_clips"):
        script = [sys.executable, ROOT / "examples/shapes/render.py", "--out", folder / "data" / place]
        subprocess.run([*script, "--clips", "64"], check=True, stdout=subprocess.DEVNULL)
    for number in range(24):
        size = (96, 64) if number % 2 else (64, 64)
        (folder / "data/photos").mkdir(exist_ok=True)
        Image.new("RGB", size, (10 * number, 90, 40)).save(folder / f"data/photos/{number}.png")
        (folder / f"data/photos/{number}.txt").write_text(f"a photo of number {number}")
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    text = folder / "ckpt/text"
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(text)
    for file in (folder / "ckpt/internvl_tiny").glob("*token*"):
        (text / file.name).write_bytes(file.read_bytes())
    rows = [{"text": " ".join(f"number {word}" for word in range(n, n + 30))} for n in range(64)]
    (folder / "data/rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = {
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "lr_schedule": {"type": "constant", "warmup_steps": 0},
        "train": {"steps": 3, "micro_batch_size": 4, "clip_grad_norm": 1.0},
    }
    photos = {"type": "media_text", "sources": [{"annotations": "data/photos"}], "num_frames": 1}
    documents = {
        ZIMAGE: {
            "run": {"name": "z_image"},
            "task": {"type": "diffusers", "pipeline": "ckpt/z_image", "text_encoder": {"dtype": "fp32"}},
            "data": {
                "train": {**photos, "max_height": 64, "max_width": 96},
                "loader": {"mode": "variable", "buckets": "auto", "rests": "pad"},
            },
            "engine": {"type": "fsdp2", "ignored_modules": ["autoencoder", "text_encoder"]},
        },
        TEXT: {
            "run": {"name": "text"},
            "task": {
                "type": "pretrained",
                "from_pretrained": "ckpt/text",
                "auto_class": "AutoModelForCausalLM",
            },
            "data": {"train": {"type": "text_rows", "file": "data/rows.jsonl", "tokenizer": "ckpt/text"}},
            "engine": {"type": "fsdp2"},
        },
    }
    for name, document in documents.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(document | common))


def words_of(case: Case) -> list[str]:
    """A case's config and overrides."""
    own = ROOT / "configs" / f"{case.config}.yaml"
    words = [str(own) if own.exists() else f"{case.config}.yaml", *ALWAYS, *case.overrides.split()]
    return words + ["validation.every=1000000", "validation.at_start=false"] * case.config.startswith("wan")


def predicted(case: Case, folder: str) -> dict[str, int]:
    """The predicted bytes of a rank at its peak, in each phase."""
    found = forecast_of(case, folder)
    for note in found["notes"]:
        print(f"  {note}")
    needs = {need["phase"]: int(need["device_bytes"]) for need in found["needs"]}
    return needs | {"training": max(needs["load"], needs["step"])}


def forecast_of(case: Case, folder: str, *last: str) -> dict[str, Any]:
    """The forecast of a case on this host, with further words of the command."""
    found: dict[str, Any] = document_of(case, folder, "--nproc", str(case.ranks), *last)["forecast"]
    return found


def document_of(case: Case, folder: str, *last: str) -> dict[str, Any]:
    """The plan of a case with further words of the command."""
    mm = [sys.executable, "-m", "mm_core.cli.main"]
    if "data.cache.dir" in case.overrides:
        built = [*mm, "cache", "build", "--config", *words_of(case)]
        subprocess.run(built, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    run = [*mm, "train", "--dry-run", "--json", "--config"]
    done = subprocess.run([*run, *words_of(case), *last], cwd=folder, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def allocated(case: Case, folder: str) -> dict[str, int]:
    """The measured bytes of the rank that allocates most, in each phase."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(case.ranks)}
    code = "import sys; from plan import rank; rank(sys.argv[1], sys.argv[2:])"
    words = [sys.executable, "-c", code, *words_of(case)]
    ranks = [
        subprocess.Popen(
            words,
            cwd=folder,
            env=os.environ
            | world
            | {"RANK": str(number), "LOCAL_RANK": str(number), "PYTHONPATH": str(Path(__file__).parent)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(case.ranks)
    ]
    outputs = [process.communicate()[0] for process in ranks]
    found = [line for output in outputs for line in output.splitlines() if line.startswith("peak ")]
    if len(found) < case.ranks:
        raise SystemExit(f"{case.name}: a rank failed")
    peaks = [json.loads(line.removeprefix("peak ")) for line in found]
    return {phase: max(peak[phase] for peak in peaks) for phase in peaks[0]}


def rank(path: str, overrides: list[str]) -> None:
    """Trains as a rank, evaluates and samples, and prints the largest sum of its live allocations in each."""
    from torch.profiler import ProfilerActivity, profile, record_function

    import mm_core
    from mm_core.runtime.groups import start_process_group, wait_for_ranks
    from mm_core.training.assembly import assemble
    from mm_core.training.loop import run_steps

    start_process_group()
    config = mm_core.load_config(path, overrides)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        with record_function("training"):
            run = assemble(config, "never")
            run.between.steps = 1 << 30  # far away: the last step of a run would save
            run_steps(run, 0)
        validator = run.between.evaluating.validator
        if validator is not None and config.validation is not None and config.validation.samples is not None:
            if validator.has_rows:
                with record_function("evaluation"):
                    validator.run(3)
            with record_function("sample"):
                validator.sample(3)
    tree, found = [*recorded.profiler.kineto_results.experimental_event_tree()], []
    while tree:
        found.append(tree.pop())
        tree.extend(found[-1].children)
    spans = {e.name: (e.start_time_ns, e.end_time_ns) for e in found if e.name in PHASES}
    peak = dict.fromkeys(spans, 0)
    for event in found:
        if event.tag.name == "Allocation":
            at = event.start_time_ns
            phase = next((name for name, (begin, end) in spans.items() if begin <= at <= end), None)
            if phase is not None:
                peak[phase] = max(peak[phase], event.extra_fields.total_allocated)
    print("peak", json.dumps(peak), flush=True)
    held = wait_for_ranks()
    os._exit(0 if held is not None else 1)


if __name__ == "__main__":
    sys.exit(main())
