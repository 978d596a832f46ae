"""Runs of a model with a scalar: over ranks, resumed, beside an adapter, exported and begun from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from support.checkpoints import state_of
from support.logs import losses
from support.marks import needs_muon
from support.tensors import stored

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).with_name("scalar_dit.py")
SCALE = "predictor.scale"
OPTIONS = (
    "train.steps=4",
    "lr_schedule={type: constant}",
    "ema={decay: 0.5, ramp: false}",
    "checkpoint.every=4",
)


@pytest.fixture(scope="module")
def scalar(tiny, tmp_path_factory) -> Path:
    """The YAML of the tiny run, with the model that has a scalar."""
    config = yaml.safe_load(tiny.read_text(encoding="utf-8"))
    config["task"]["predictor"]["type"] = "local/scalar_dit"
    path = tmp_path_factory.mktemp("scalars") / "scalar.yaml"
    path.write_text(yaml.safe_dump(config | {"plugins": {"path": [str(PLUGIN)]}}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def base(scalar, tmp_path_factory, mm) -> Path:
    """A run of one rank."""
    folder = tmp_path_factory.mktemp("scalars")
    done = mm("train", "--config", scalar, *OPTIONS, f"run.dir={folder}", "run.name=base")
    assert done.code == 0, done.out + done.err
    return folder / "base"


def test_two_ranks_train_what_one_rank_trains(base, scalar, tmp_path, mm):
    """In host memory, too."""
    trained, average = state_of(base)[SCALE], state_of(base, "ema")[SCALE]
    assert trained.shape == () and abs(float(trained) - 0.8) > 1e-4 and trained != average
    for offload in ("false", "true"):
        more = (f"run.dir={tmp_path}", f"run.name=host_{offload}", f"engine.offload_to_cpu={offload}")
        done = mm("train", "--config", scalar, "--nproc", 2, *OPTIONS, *more)
        assert done.code == 0, done.out + done.err
        assert losses(tmp_path / f"host_{offload}") == pytest.approx(losses(base), rel=1e-5)
        torch.testing.assert_close(state_of(tmp_path / f"host_{offload}")[SCALE], trained, rtol=1e-4, atol=0)
        torch.testing.assert_close(
            state_of(tmp_path / f"host_{offload}", "ema")[SCALE], average, rtol=1e-4, atol=0
        )


@needs_muon
def test_a_resume_on_two_ranks_is_exact(scalar, tmp_path, mm):
    more = ("--verify-resume", 2, "optimizer={type: muon, lr: 1e-3}", f"run.dir={tmp_path}")
    done = mm("train", "--config", scalar, "--nproc", 2, *OPTIONS, *more)
    assert done.code == 0, done.out + done.err
    assert "bit-equal" in done.out


def test_an_export_has_it_and_a_run_begins_with_either(base, scalar, tmp_path, mm):
    done = mm("export", "--run", base, "--to", "safetensors", "--out", tmp_path / "out")
    assert done.code == 0, done.out + done.err
    scale = state_of(base)[SCALE]
    assert torch.equal(stored(tmp_path / "out")["scale"], scale)
    for ranks, begin in ((1, f"{{path: {base}, weights: model}}"), (2, f"{{path: {tmp_path / 'out'}}}")):
        more = ("optimizer.lr=0", f"init_from={begin}", f"run.dir={tmp_path}", f"run.name=from_{ranks}")
        done = mm("train", "--config", scalar, "--nproc", ranks, *OPTIONS, *more)
        assert done.code == 0, done.out + done.err
        assert torch.equal(state_of(tmp_path / f"from_{ranks}")[SCALE], scale)


def test_beside_an_adapter_it_is_frozen_or_trained(base, scalar, tmp_path, mm):
    scale, found = state_of(base)[SCALE], {}
    for name, ranks, also in (("frozen", 1, ""), ("one", 1, SCALE), ("two", 2, SCALE)):
        lora = ("train.adapters=[{targets: [to_q], rank: 3}]", f"train.also_train=[{also}]")
        more = (f"init_from={{path: {base}, weights: model}}", f"run.dir={tmp_path}", f"run.name={name}")
        done = mm(
            "train", "--config", scalar, "--nproc", ranks, *OPTIONS, *lora, *more, "checkpoint.frozen=true"
        )
        assert done.code == 0, done.out + done.err
        found[name] = state_of(tmp_path / name)
    assert torch.equal(found["frozen"][SCALE], scale)
    assert not torch.equal(found["one"][SCALE], scale)
    torch.testing.assert_close(found["two"][SCALE], found["one"][SCALE], rtol=1e-4, atol=0)
    assert torch.equal(state_of(tmp_path / "frozen", "ema")[SCALE], scale)
    assert not torch.equal(state_of(tmp_path / "two", "ema")[SCALE], found["two"][SCALE])
