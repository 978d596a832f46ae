"""Evaluation over real ranks: every row once, the same figures, and all ranks leave together."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from support.ranks import run_ranks
from support.validation import PROMPTS, write_config

SCRIPT = Path(__file__).with_name("validation_ranks.py")


def run(folder: Path, world: int, *case: object) -> list[dict]:
    run_ranks(SCRIPT, world, write_config(folder), folder, *case)
    return [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.slow
def test_101_rows_are_evaluated_once_with_the_same_figures_on_1_2_and_3_ranks(tmp_path):
    expected = None
    for world in (1, 2, 3):
        found = run(tmp_path, world, "metrics", 101)
        figures = found[0]["figures"]
        assert all(rank["figures"] == figures for rank in found)  # to the last bit
        assert figures["validation/rows"] == figures["validation_ema/rows"] == 101
        assert {"validation/loss", "validation/loss_at/0.5", "validation_ema/latent_psnr"} <= figures.keys()
        assert figures["validation/loss"] != pytest.approx(figures["validation_ema/loss"], rel=1e-3)
        reads = sum((Counter(rank["reads"]) for rank in found), Counter())
        assert set(map(int, reads)) == set(range(101))
        expected = expected or figures
        assert figures == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_rank_that_is_asked_to_stop_takes_the_others_with_it_and_training_can_go_on(tmp_path):
    found = run(tmp_path, 2, "stop")
    for rank in found:
        assert rank["run"] is None and rank["sample"] is None
        assert "was abandoned because a stop was requested" in rank["notes"][0]
    assert found[0]["after"] == found[1]["after"] and not list(tmp_path.rglob("*.mp4"))


@pytest.mark.slow
def test_each_rank_samples_its_share_and_the_first_puts_them_together(tmp_path):
    one_folder, two_folder = tmp_path / "one", tmp_path / "two"
    one_folder.mkdir()
    two_folder.mkdir()
    alone, two = run(one_folder, 1, "samples"), run(two_folder, 2, "samples")
    assert two[0]["shown"] == alone[0]["shown"] == [PROMPTS] and two[1]["shown"] == []
    assert two[0]["logged"] == two[1]["logged"] == pytest.approx(alone[0]["logged"], rel=1e-4)
    assert list(alone[0]["logged"]) == ["validation_ema/frame_change"]
    names = [sorted(path.name for path in Path(found[0]["folder"]).iterdir()) for found in (alone, two)]
    assert names[0] == names[1] and sum(name.endswith(".mp4") for name in names[0]) == 3


@pytest.mark.slow
def test_a_rank_that_cannot_read_its_rows_ends_all_of_them(tmp_path):
    found = run(tmp_path, 2, "fault")
    errors = [rank["error"] for rank in found]
    kinds = sorted(kind for kind, _, _ in errors)
    assert kinds in (["DataError", "PeerError"], ["DataError", "DataError"])
    said = next(error for error in errors if error[0] == "DataError")
    assert "could not be read" in said[1] and said[2] == "data.validation"
