"""An author's loss is exact over micro-batches and ranks: the figures are those of one batch on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("task_ranks.py")


def trained(folder: Path, kind: str, world: int, accumulated: int) -> dict:
    out = folder / f"{kind}_{world}_{accumulated}.pt"
    run_ranks(SCRIPT, world, out, kind, accumulated)
    return torch.load(out)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, dict]:
    """Each task trained with one batch on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    return {kind: trained(folder, kind, 1, 1) for kind in ("pairs", "clip")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world", "accumulated"), [("pairs", 1, 4), ("pairs", 2, 1), ("pairs", 2, 2), ("clip", 2, 1)]
)
def test_ranks_and_micro_batches_change_no_figure(alone, tmp_path, kind, world, accumulated) -> None:
    """The samples have unequal weights, one of them 0, and noise; the temperature of `clip` is a scalar."""
    found, wanted = trained(tmp_path, kind, world, accumulated), alone[kind]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert found["losses"][2] < found["losses"][0]
    assert found["held out"] == pytest.approx(wanted["held out"], rel=1e-5)
    assert found["state"].keys() == wanted["state"].keys()
    for name, tensor in wanted["state"].items():
        torch.testing.assert_close(found["state"][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
