"""Ranks that read the same samples count once: four ranks in pairs train and write what two ranks do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

import mm_core
from mm_core.contracts import DataRanks
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import ContractError
from support import pretrained_models as models
from support import token_rows
from support.checkpoints import state_of
from support.logs import log_of

HERE = Path(__file__).parent
WORLDS = {"two": (2, "fsdp2"), "pairs": (4, "local/paired")}
TIMES = ("step_time", "data_wait", "memory", "time/", "_per_second", "mfu")


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name, tensor in one.items():
        bound = 1e-6 * float(tensor.abs().max())
        torch.testing.assert_close(
            other[name], tensor, rtol=1e-6, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )


def compare(two: Path, pairs: Path, rel: float = 1e-6) -> list[dict]:
    """Asserts that the lines of both logs are equal; returns them."""
    rows, others = log_of(two), log_of(pairs)
    for row, other in zip(rows, others, strict=True):
        timed = {name for name in row if name.startswith(TIMES) or name.endswith(TIMES)}
        assert row.keys() == other.keys()
        for name in row.keys() - timed - {"time"}:
            assert other[name] == pytest.approx(row[name], rel=rel), name
        if "tokens_per_second" in row:  # one step in each line
            one, four = (line["tokens_per_second"] * line["step_time"] for line in (row, other))
            assert four == pytest.approx(one) and one == pytest.approx(round(one))
    return rows


def both(mm, config: Path, folder: Path, plugin: str | Path, *more: str) -> tuple[Path, Path]:
    """The folders of a run on two ranks, and on four in pairs."""
    plugins = f"plugins.path=[{plugin}, {HERE / 'paired_engine.py'}]"
    for name, (world, engine) in WORLDS.items():
        own = (f"run.dir={folder}", f"run.name={name}", f"engine.type={engine}", "log.every=1")
        done = mm("train", "--config", config, "--nproc", world, plugins, *own, *more)
        assert done.code == 0, done.out + done.err
    return folder / "two", folder / "pairs"


@pytest.mark.slow
def test_a_language_model_with_rows_of_uneven_weight(tmp_path, mm):
    """A row's weight is its tokens; after one step, AdamW's first moment is a tenth of the gradient."""
    folder = models.save_model("qwen3_tied", tmp_path)
    held_out = {"type": "token_rows", "kind": models.MODELS["qwen3_tied"][-1], "seed": 1, "rows": 7}
    path = models.run_config(
        "qwen3_tied",
        folder,
        tmp_path,
        data={"validation": held_out},
        validation={"every": 1},
        train={"global_batch_size": 8, "steps": 1, "clip_grad_norm": None},
    )
    two, pairs = both(mm, path, tmp_path, token_rows.__file__)
    rows = compare(two, pairs)
    assert [row["samples"] for row in rows if "samples" in row] == [8]
    assert [row["validation/rows"] for row in rows if "validation/rows" in row] == [7]
    assert any("tokens_per_second" in row for row in rows)
    moments = [state_of(run, "optimizer") for run in (two, pairs)]
    close(*({k: t for k, t in found.items() if k.endswith(".exp_avg")} for found in moments))


@pytest.mark.slow
def test_clips_with_dropout_and_samples(tiny, tmp_path, mm, same_clips):
    """Ranks of a pair draw the same dropout; one of them writes the clips."""
    more = ("validation.samples={prompts: [a red circle, a blue square, a disc], steps: 2}", "train.steps=2")
    config = yaml.safe_load(tiny.read_text(encoding="utf-8"))
    config["task"]["predictor"]["type"] = "local/dropout_dit"
    path = tmp_path / "dropout.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    two, pairs = both(mm, path, tmp_path, HERE / "dropout_dit.py", *more)
    compare(two, pairs)
    (one,), (other,) = ([*run.glob("samples/*")] for run in (two, pairs))
    assert len([*one.iterdir()]) == len([*other.iterdir()]) == 5 and same_clips(one, other)
    assert (one / "prompts.json").read_bytes() == (other / "prompts.json").read_bytes()
    words = ("--prompt", "a red circle", "--seed", 3, "--steps", 2)
    for run, world in ((two, 1), (pairs, 4)):
        done = mm("sample", "--run", run, "--nproc", world, "--out", tmp_path / f"out_{world}", *words)
        assert done.code == 0, done.err
    one, four = (sorted(path.name for path in (tmp_path / f"out_{world}").iterdir()) for world in (1, 4))
    assert one == four


@pytest.mark.slow
def test_one_rank_and_two_log_the_same_of_steps_whose_samples_are_uneven(tiny, tmp_path, mm):
    """Every third step has 16 samples in micro-batches of 12, so that a rank of two has 12 or 4 of them."""
    held_out = yaml.safe_load(tiny.read_text(encoding="utf-8"))["data"]["train"]
    more = ("train.micro_batch_size=12", "train.global_batch_size=24", "data.loader.drop_last=false")
    more += ("train.steps=6", "log.every=1", "log.detail_every=3", f"data.validation={json.dumps(held_out)}")
    more += ("validation={every: 3, rows: 17, metrics: [{type: latent_psnr}]}", "ema={decay: 0.9}")
    for world in (1, 2):
        own = (f"run.dir={tmp_path}", f"run.name=world_{world}")
        done = mm("train", "--config", tiny, "--nproc", world, *own, *more)
        assert done.code == 0, done.out + done.err
    rows = compare(tmp_path / "world_1", tmp_path / "world_2", rel=2e-5)
    assert [row["samples"] for row in rows if "samples" in row] == [24, 48, 64, 88, 112, 128]
    assert sum(any(name.startswith("grad_norm_by_sigma/") for name in row) for row in rows) == 2
    assert sum("validation_ema/latent_psnr" in row for row in rows) == 2


def test_an_engine_that_gives_no_shares_is_refused(tiny, tmp_path, monkeypatch):
    """Each rank would read all samples, and the loop would count them wrong."""

    def prepare(self, *given, prepare=FSDP2Engine.prepare):
        prepare(self, *given)
        self.data_ranks = DataRanks(0, 3)

    monkeypatch.setattr(FSDP2Engine, "prepare", prepare)
    with pytest.raises(ContractError, match="data_ranks have 3 shares, but its plan has data_parallel 1"):
        mm_core.train(mm_core.load_config(tiny, [f"run.dir={tmp_path}"]))
