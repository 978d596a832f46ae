"""Runs that train adapters, by the commands: over ranks, resumed, sampled, upon another run's weights."""

from __future__ import annotations

import pytest
import torch

from mm_core.modules.adapter_layers import adapter_of, base_name
from support.checkpoints import state_of
from support.logs import losses

pytestmark = pytest.mark.slow

ATTENTION = "{targets: [to_q], rank: 3, dora: true}"
WIDE = "{name: wide, targets: ['predictor.blocks.{*}.ffn'], dropout: 0.3}"
FEATURES = (
    f"train.adapters=[{ATTENTION}, {WIDE}]",
    "train.also_train=[predictor.condition_embedder.time_proj]",
    "ema={decay: 0.9}",
    "checkpoint={every: 4, keep: 9}",
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_is_exact(ranks, tiny, tmp_path, mm):
    """With dropout before the factors, DoRA, an average, and a module that is trained in full."""
    done = mm(
        "train", "--config", tiny, "--nproc", ranks, "--verify-resume", 4, f"run.dir={tmp_path}", *FEATURES
    )
    assert done.code == 0, done.out + done.err
    assert "bit-equal" in done.out


def test_upon_another_run_the_weights_below_keep_every_bit(tiny, tmp_path, mm):
    """On one rank and on two, whose losses agree; only what is trained has an average; clips are made."""
    short = ("train.steps=4", "lr_schedule={type: constant}", f"run.dir={tmp_path}")
    assert mm("train", "--config", tiny, "run.name=base", *short).code == 0
    base, found = state_of(tmp_path / "base"), {}
    for ranks in (1, 2):
        # Masks of dropout belong to micro-batches, which are others on two ranks.
        features = (
            FEATURES[0].replace("dropout: 0.3", "dropout: 0.0"),
            *FEATURES[1:],
            f"run.name=on_{ranks}",
        )
        begin = (f"init_from={{path: {tmp_path / 'base'}}}", "checkpoint.frozen=true")
        done = mm("train", "--config", tiny, "--nproc", ranks, *features, *begin, *short)
        assert done.code == 0, done.err
        run = tmp_path / f"on_{ranks}"
        found[ranks] = state_of(run)
        same = {
            base_name(n): torch.equal(t, base[base_name(n)])
            for n, t in found[ranks].items()
            if not adapter_of(n)
        }
        assert same.keys() == base.keys()
        assert {name for name, kept in same.items() if not kept} == {
            f"predictor.condition_embedder.time_proj.{part}" for part in ("weight", "bias")
        }
    assert losses(tmp_path / "on_1") == pytest.approx(losses(tmp_path / "on_2"), rel=1e-5)
    moved = {n for n, t in state_of(run, "ema").items() if not torch.equal(t, found[2][n])}
    assert moved == {n for n in found[2] if adapter_of(n) or "time_proj" in n}
    done = mm(
        "sample",
        "--run",
        tmp_path / "on_2",
        "--prompt",
        "a red circle",
        "--steps",
        2,
        "--out",
        tmp_path / "c",
    )
    assert done.code == 0, done.err
    assert list((tmp_path / "c").glob("*.mp4"))


def test_each_save_is_exported_as_a_lora_while_the_run_goes_on(tiny, tmp_path, mm):
    """On two ranks: the files are those of `mm export`, and one that fails is a note."""
    saves = ("train.steps=4", "checkpoint={every: 2, export: lora/diffusers}", "lr_schedule={type: constant}")
    begin = (
        "train",
        "--config",
        tiny,
        f"run.dir={tmp_path}",
        f"train.adapters=[{ATTENTION}]",
        FEATURES[2],
        *saves,
    )
    done = mm(*begin, "--nproc", 2, "run.name=a")
    assert done.code == 0, done.err
    assert done.err.count("loaded again and equal to the checkpoint") == 2, done.err
    for step in (2, 4):
        (file,) = (tmp_path / "a/exports").glob(f"step_*{step}-diffusers-ema.safetensors")
        out = tmp_path / f"{step}.safetensors"
        again = mm("export", "--run", f"{tmp_path}/a@{step}", "--to", "lora/diffusers", "--ema", "--out", out)
        assert again.code == 0 and file.read_bytes() == out.read_bytes()
    (tmp_path / "b").mkdir()
    (tmp_path / "b/exports").write_text("a file where the folder should be")
    done = mm(*begin, "run.name=b")
    assert done.code == 0, done.err
    assert done.err.count("was not exported") == 2, done.err
