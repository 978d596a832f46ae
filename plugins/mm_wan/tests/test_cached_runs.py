"""Runs of Wan models from the feature cache: the losses are those of runs that encode in every step."""

from __future__ import annotations

from pathlib import Path

import pytest
from mm_wan.testing import make_tiny_checkpoint
from wan_configs import ROOT, checkpoint_of, environment, render_clips

import mm_core
from mm_core.loading.caching import build_cache
from support import warm
from support.logs import losses

pytestmark = pytest.mark.slow

STEPS = 20
VARIANTS = {"t2v_tiny": "t2v", "i2v_tiny": "i2v", "flf2v_tiny": "flf2v", "t2v_a14b_tiny": "t2v_high_low"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with clips and checkpoints, as the configs name them."""
    folder = tmp_path_factory.mktemp("cached")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        render_clips(Path("data/real_clips"))
        for name, variant in VARIANTS.items():
            make_tiny_checkpoint(checkpoint_of(name), variant)
    return folder


def overrides(run: str, *more: str) -> list[str]:
    fewer = [f"train.steps={STEPS}", f"validation.every={STEPS}", f"checkpoint.every={STEPS}"]
    others = ["task.caption_dropout=0.4", "data.loader.workers=0", "log.every=1"]
    return [*fewer, *others, f"run.name={run}", *more]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_without_a_cache(place, monkeypatch, name, ranks) -> None:
    monkeypatch.chdir(place)
    config = f"{ROOT}/configs/wan/{name}.yaml"
    cached = [f"data.cache.dir=cache_{name}"]

    def train(run: str, *more: str) -> list[float]:
        given = overrides(f"{run}_{name}_{ranks}", *more)
        if ranks == 1:
            result = mm_core.train(mm_core.load_config(config, given))
        else:
            command = ["train", "--config", config, "--nproc", str(ranks), *given]
            found = warm.mm(*command, env=environment())
            assert found.returncode == 0, found.stdout + found.stderr
            return losses(Path(f"runs/{run}_{name}_{ranks}"))
        return losses(result.run_dir)

    build_cache(mm_core.load_config(config, overrides("built", *cached)), lambda _: None)
    online, read = train("online"), train("cached", *cached)
    assert len(online) == STEPS
    assert read == pytest.approx(online, abs=1e-6)
