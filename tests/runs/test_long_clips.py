"""Runs whose ranks share each clip, by the commands: they log, store and sample what one rank does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from mm_core.cli.main import main
from support.checkpoints import state_of, tensors
from support.logs import log_of

HERE = Path(__file__).parent
ADAPTERS = ("train.adapters=[{targets: [to_q, ffn.net.2], rank: 3}]", "train.also_train=[predictor.proj_out]")
SAMPLES = "validation={every: 3, samples: {prompts: [a red circle, a blue square], steps: 2}}"
KEYS = ("loss", "grad_norm", "validation/loss", "validation_ema/loss", "samples", "lr")


@pytest.fixture
def config(tiny, tmp_path) -> Path:
    """The tiny run with dropout of captions, whole and in part, an average, and validation."""
    given = yaml.safe_load(tiny.read_text(encoding="utf-8"))
    given["task"]["predictor"] |= {"type": "local/dropout_dit", "num_heads": 3}
    given["data"]["validation"] = given["data"]["train"]
    given["lr_schedule"] = {"type": "constant"}
    path = tmp_path / "long.yaml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return path


def shared(size: int, kind: str = "ulysses") -> str:
    return f"engine.context_parallel={{size: {size}, kind: {kind}}}"


def compare(run: Path, alone: Path) -> None:
    """What one rank logs; each of the other run's parts also validates at its end."""
    found, wanted = ({(row["step"], key): row[key] for row in log_of(each) for key in KEYS if key in row}
                     for each in (run, alone))  # fmt: skip
    assert len(wanted) >= 6 * 4 + 2 * 2 and min(v for (_, key), v in wanted.items() if key == "grad_norm") > 0
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [(), ADAPTERS], ids=["all weights", "adapters"])
def test_from_two_ranks_to_one_and_back_as_one_that_goes_through(config, tmp_path, mm, adapters):
    plugin = f"plugins.path=[{HERE / 'dropout_dit.py'}]"
    common = ("train", "--config", config, plugin, f"run.dir={tmp_path}", "ema={decay: 0.9}", "log.every=1")
    common += ("checkpoint={every: 2, keep: 9}", SAMPLES, *adapters)
    alone = mm(*common, "run.name=alone", "train.steps=6")
    assert alone.code == 0, alone.err
    for steps, ranks, context in ((2, 2, shared(2)), (4, 1, shared(1)), (6, 2, shared(2, "ring"))):
        done = mm(*common, "run.name=legs", f"train.steps={steps}", "--nproc", ranks, context)
        assert done.code == 0, done.out + done.err
    compare(tmp_path / "legs", tmp_path / "alone")
    words = ("--prompt", "a red circle", "--seed", 3, "--steps", 2)
    for ranks in (1, 2):
        done = mm(
            "sample", "--run", tmp_path / "legs", "--nproc", ranks, "--out", tmp_path / f"s{ranks}", *words
        )
        assert done.code == 0, done.err
    one, two = (sorted(path.name for path in (tmp_path / f"s{ranks}").iterdir()) for ranks in (1, 2))
    assert one == two and len(one) == 3


@pytest.mark.slow
def test_another_number_of_ranks_begins_with_every_bit(config, tmp_path, mm):
    """A checkpoint of two ranks that share clips, saved again by one whose step has a rate of 0."""
    plugin = f"plugins.path=[{HERE / 'dropout_dit.py'}]"
    common = ("train", "--config", config, plugin, f"run.dir={tmp_path}", "data.validation=null")
    done = mm(*common, "run.name=two", "train.steps=2", "--nproc", 2, shared(2), "checkpoint.every=2")
    assert done.code == 0, done.err
    first = tensors(tmp_path / "two/checkpoints/step_00000002")
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    still = ("optimizer.lr=0.0", "--allow", "optimizer.lr", "checkpoint={every: 1, keep: 9}")
    done = mm(*common, "run.name=one", "train.steps=3", *still)
    assert done.code == 0, done.err
    kept = state_of(tmp_path / "one")
    assert kept and all(torch.equal(tensor, first[f"model.{name}"]) for name, tensor in kept.items())


def test_the_plan_counts_the_activations_of_a_rank(tiny, capsys):
    command = ["train", "--config", str(tiny), "--dry-run", "--nproc", "2"]
    assert main([*command, shared(2)]) == 0
    shown = capsys.readouterr().out
    assert "2 ranks (replicate 1 x shard 1 x context 2)" in shown
    assert "8 samples per step = 2 per micro-batch x 4 accumulated x 1 data-parallel rank" in shown
    assert "forecast for 2 x cpu, per rank" in shown and "activations of predictor.blocks.*" in shown
