"""LoRA runs on a base in 8 or 4 bits and on a streamed one: training, resumes, samples and merged weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mm_custom_dit.model import CustomDiT
from PIL import Image
from safetensors.torch import load_file, save_file

from mm_core.device.torch_private import shards_mixed
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.modules.adapter_layers import adapter_of
from mm_core.modules.quantised import rounded
from support.logs import log_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shards_mixed(), reason="this torch shards no module of mixed dtypes"),
]

SIZES = {"num_layers": 3, "num_heads": 2, "head_dim": 24, "in_channels": 12, "out_channels": 12}
SIZES |= {"text_dim": 32, "freq_dim": 32, "ffn_dim": 96, "patch_size": (2, 2, 2), "rope_max_seq_len": 64}
STREAM = ("engine.base={stream: true, keep: 1}", "engine.recompute_modules=auto")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    torch.manual_seed(0)
    made = CustomDiT(**SIZES)
    state = {f"predictor.{name}": torch.randn(t.shape) * 0.1 for name, t in made.state_dict().items()}
    save_file(state, path)
    return path


@pytest.fixture
def run(tiny, base, tmp_path, mm):
    """Trains a run in `tmp_path` and returns its losses."""

    def train(name: str, *more: str, ranks: int = 1, steps: int = 20) -> list[float]:
        done = mm(*command(tiny, base, tmp_path, name, steps, *more), "--nproc", ranks)
        assert done.code == 0, done.err
        return [row["loss"] for row in log_of(tmp_path / name) if "loss" in row]

    return train


def command(tiny: Path, base: Path, tmp_path: Path, name: str, steps: int, *more: str) -> list[object]:
    sizes = [f"task.predictor.{key}={list(v) if isinstance(v, tuple) else v}" for key, v in SIZES.items()]
    return [
        "train", "--config", tiny, *sizes, f"run.name={name}", f"run.dir={tmp_path}",
        f"init_from.path={base}", "train.adapters=[{targets: [predictor], rank: 4}]",
        f"train.steps={steps}", "train.micro_batch_size=1",
        "train.global_batch_size=2", "lr_schedule={type: constant}",
        "optimizer.lr=1.0e-3", "engine.param_dtype=bf16", "checkpoint={every: 10, keep: 9}", *more,
    ]  # fmt: skip


def trained(run: Path) -> dict[str, torch.Tensor]:
    source = CheckpointSource(run, "model")
    assert all(adapter_of(name) for name in source.shapes)
    state = {path: torch.empty(shape) for path, shape in source.shapes.items()}
    source.fill(state)
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
def test_a_quantised_base_trains_like_bf16_and_alike_on_two_ranks_and_streamed(kind, run, tmp_path):
    wide = run("wide", "train.base_dtype=bf16")
    one = run("one", f"train.base_dtype={kind}")
    assert max(abs(a - b) / abs(b) for a, b in zip(one, wide, strict=True)) < 5e-2
    assert one != wide
    two = run("two", f"train.base_dtype={kind}", ranks=2)
    assert max(abs(a - b) / abs(b) for a, b in zip(two, one, strict=True)) < 1e-5
    assert run("streamed", f"train.base_dtype={kind}", *STREAM) == one
    assert same(trained(tmp_path / "streamed"), trained(tmp_path / "one"))


@pytest.mark.parametrize(("kind", "ranks"), [("int8", 1), ("nf4", 2)])
def test_a_resume_is_bit_equal(kind, ranks, tiny, base, tmp_path, mm):
    line = command(tiny, base, tmp_path, "run", 4, f"train.base_dtype={kind}", "checkpoint.every=2")
    done = mm(*line, "--nproc", ranks, "--verify-resume", 2)
    assert done.code == 0, done.out + done.err


PISSA = "train.adapters=[{targets: [predictor.blocks.{*}], rank: 4, init: pissa}]"


def test_a_pissa_resumes_on_a_streamed_base_and_trains_alike_on_two_ranks(run, tiny, base, tmp_path, mm):
    one = run("one", PISSA, "train.base_dtype=bf16", steps=4)
    for options, code in ((("--stop-after", 2), 75), (STREAM, 0)):
        line = command(tiny, base, tmp_path, "a", 4, PISSA, "train.base_dtype=bf16")
        done = mm(*line, *options)
        assert done.code == code, done.err
    assert [row["loss"] for row in log_of(tmp_path / "a") if "loss" in row] == one
    assert same(trained(tmp_path / "a"), trained(tmp_path / "one"))
    two = run("two", PISSA, "train.base_dtype=bf16", ranks=2, steps=4)
    assert two == pytest.approx(one, rel=1e-5)
    other = PISSA.replace("pissa", "gaussian")
    done = mm(*command(tiny, base, tmp_path, "one", 6, other, "train.base_dtype=bf16"))
    assert done.code == 1 and "start" in done.err, done.err


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_resumes_across_a_streamed_and_a_resident_base(ranks, run, tiny, base, tmp_path, mm):
    whole = run("whole", steps=6, ranks=ranks)
    for name, first, second in (("a", STREAM, STREAM[1:]), ("b", (), STREAM)):
        for options, code in ((("--stop-after", 3, *first), 75), (second, 0)):
            line = command(tiny, base, tmp_path, name, 6)
            done = mm(*line, *options, "--nproc", ranks)
            assert done.code == code, done.err
        assert [row["loss"] for row in log_of(tmp_path / name) if "loss" in row] == whole
        assert same(trained(tmp_path / name), trained(tmp_path / "whole"))


def test_checkpoints_that_hold_the_base_are_resumed_across_both_forms_too(tiny, base, tmp_path, mm):
    for name, first, second in (("a", STREAM, STREAM[1:]), ("b", (), STREAM)):
        for options, code in ((("--stop-after", 2, *first), 75), (second, 0)):
            line = command(tiny, base, tmp_path, name, 4)
            done = mm(*line, "checkpoint.frozen=true", *options)
            assert done.code == code, done.err
    one, two = ([row["loss"] for row in log_of(tmp_path / name) if "loss" in row] for name in "ab")
    assert one == two and len(one) == 4


@pytest.mark.parametrize("options", [(), ("--dtype", "fp32")])
def test_samples_and_merged_weights_have_the_values_of_the_base(options, run, base, tmp_path, mm, same_clips):
    run("run", "train.base_dtype=int8", steps=4)
    done = mm("export", "--run", tmp_path / "run", "--to", "safetensors", "--merge-lora", *options,
              "--out", tmp_path / "merged")  # fmt: skip
    assert done.code == 0, done.err
    merged, stored = load_file(tmp_path / "merged/model.safetensors"), load_file(base)
    adapters = trained(tmp_path / "run")
    for name, tensor in stored.items():
        own = name.removesuffix(".weight")
        expected = tensor.bfloat16().float()
        if "blocks" in name and tensor.dim() == 2 and "scale_shift" not in name:
            expected = rounded(tensor, "int8")
        if (first := adapters.get(f"{own}.lora_A.default.weight")) is not None:
            expected = expected + adapters[f"{own}.lora_B.default.weight"] @ first
        found = merged[name.removeprefix("predictor.")]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    clips = []
    for name, options in (("one", ()), ("two", ("--nproc", 2)), ("streamed", STREAM)):
        out = tmp_path / name
        words = ("--prompt", "a circle", "--steps", 2, "--out", out, *options)
        done = mm("sample", "--run", tmp_path / "run", *words)
        assert done.code == 0, done.err
        clips.append(out)
    assert same_clips(clips[0], clips[1]) and same_clips(clips[0], clips[2])


def test_a_streamed_base_in_bf16_is_sampled_alone_and_by_two_ranks(run, tmp_path, mm, same_clips):
    run("run", "train.base_dtype=bf16", steps=2)
    for name, options in (("one", ()), ("streamed", STREAM), ("two", (*STREAM, "--nproc", 2))):
        words = ("--prompt", "a circle", "--steps", 2, "--out", tmp_path / name, *options)
        done = mm("sample", "--run", tmp_path / "run", *words)
        assert done.code == 0, done.err
        assert same_clips(tmp_path / "one", tmp_path / name)


@pytest.mark.parametrize("kind", ["bf16", "nf4"])
def test_evaluations_and_samples_are_those_of_the_merged_weights(kind, run, tiny, base, tmp_path, mm):
    clips = "data.validation={type: shapes, num_frames: 8, height: 16, width: 16, clips: 4}"
    kept = (f"train.base_dtype={kind}", "validation={every: 4}", clips)
    run("run", *kept, steps=4)
    done = mm("export", "--run", tmp_path / "run", "--to", "safetensors", "--merge-lora",
              "--out", tmp_path / "merged")  # fmt: skip
    assert done.code == 0, done.err
    plain = ("train.adapters=[]", "train.base_dtype=null", "init_from=null")
    words = command(tiny, base, tmp_path, "whole", 4, *kept, *plain)[1:]
    done = mm("import", "--from", tmp_path / "merged", *words)
    assert done.code == 0, done.err
    losses, sheets = [], []
    for name in ("run", "whole"):
        done = mm("eval", "--run", tmp_path / name, "--json")
        assert done.code == 0, done.err
        losses.append(json.loads(done.out)["metrics"]["loss"])
        words = ("--prompt", "a circle", "--steps", 2, "--out", tmp_path / f"{name}-clip")
        done = mm("sample", "--run", tmp_path / name, *words)
        assert done.code == 0, done.err
        with Image.open(tmp_path / f"{name}-clip/contact_sheet.png") as image:
            sheets.append(np.asarray(image)[28:].astype(int))  # below its title, which names the run
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert np.abs(sheets[0] - sheets[1]).max() <= 1
    other = "bf16" if kind == "nf4" else "int8"
    done = mm("eval", "--run", tmp_path / "run", "--json", f"train.base_dtype={other}")
    assert abs(json.loads(done.out)["metrics"]["loss"] - losses[0]) > 1e-4 * losses[0], "another base"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("train.base_dtype=int8", "checkpoint.frozen=true"), "checkpoints would have to store 30 quantised"),
        (("train.base_dtype=nf4", "init_from=null"), "nf4 works only for a base that stays in its files"),
        (("train.base_dtype=int8", "train.adapters=[{targets: [to_q], dora: true}]"), "DoRA of predictor."),
        (("train.base_dtype=int8", "train.adapters=[{targets: [to_q], init: pissa}]"), "PiSSA of predictor."),
        (("train.base_dtype=int8", "engine.param_dtype=null"), "would be int8, and no dtype is set"),
        (("engine.base.stream=true",), "only recomputed modules can be streamed"),
    ],
)
def test_what_cannot_work_is_one_sentence(options, sentence, tiny, base, tmp_path, mm):
    done = mm(*command(tiny, base, tmp_path, "run", 4), *options)
    assert done.code == 1 and sentence in done.err, done.err
