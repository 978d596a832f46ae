"""The quickstart's report: right clips are ok, wrong ones short, and the control detects random results."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

SHAPES = Path(__file__).resolve().parents[2] / "examples/shapes"
sys.path.insert(0, str(SHAPES))

from judge import score  # noqa: E402

import report  # noqa: E402
from mm_core.data.datasets import shapes as moving  # noqa: E402


@pytest.fixture(scope="module")
def clips() -> list[np.ndarray]:
    """Samples of a perfect model for the 32 held-out captions."""
    scenes = [
        moving.draw_scene(moving.HELD_OUT[i % len(moving.HELD_OUT)], random.Random(i), (16, 16), 8)
        for i in range(32)
    ]
    frames = [np.asarray(moving.draw(scene, (16, 16), 8), dtype=np.float32) for scene in scenes]
    return [clip.transpose(3, 0, 1, 2) / 127.5 - 1 for clip in frames]


PROMPTS = [moving.caption(*moving.HELD_OUT[i % len(moving.HELD_OUT)]) for i in range(32)]


def _found(clips: list[np.ndarray], prompts: list[str]) -> dict[str, report.Result]:
    return {result.name: result for result in report.results(score(clips, prompts), prompts)}


def test_right_clips_reach_every_bar_and_the_control_is_at_random_level(clips: list[np.ndarray]) -> None:
    found = _found(clips, PROMPTS)
    assert all(result.ok for result in found.values())
    assert found["caption_colour"].value == found["caption_direction"].value == 1.0
    assert found["control_colour"].value == pytest.approx(report.chance(PROMPTS, "colour"))


def test_clips_in_another_order_are_short(clips: list[np.ndarray]) -> None:
    found = _found(clips[1:] + clips[:1], PROMPTS)
    assert not found["caption_colour"].ok and not found["caption_direction"].ok


def test_a_model_that_shows_one_clip_always_scores_no_better_than_its_control(
    clips: list[np.ndarray],
) -> None:
    found = _found([clips[0]] * 32, PROMPTS)
    assert found["caption_colour"].value == pytest.approx(found["control_colour"].value, abs=0.01)


def test_noise_follows_nothing() -> None:
    rng = np.random.default_rng(0)
    found = _found([rng.uniform(-1, 1, (3, 8, 16, 16)) for _ in range(32)], PROMPTS)
    assert found["caption_colour"].value == 0.0
    assert str(found["caption_colour"]) == "RESULT caption_colour 0.0000 0.9500 short"


def test_the_random_level_is_how_often_two_captions_agree() -> None:
    prompts = ["a red circle moves left", "a red square moves up", "a blue circle moves up"]
    # Two of the 6 ordered pairs share the colour, two the direction.
    assert report.chance(prompts, "colour") == pytest.approx(2 / 6)
    assert report.chance(prompts, "direction") == pytest.approx(2 / 6)


def test_a_run_that_is_not_there_gets_a_readable_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.json").write_text('["a red circle moves left"]')
    config = SHAPES.parents[1] / "configs/custom_dit/quickstart.yaml"
    assert report.main(["--config", str(config), "--prompts", "prompts.json"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("report: error: runs/shapes") and "Traceback" not in error
