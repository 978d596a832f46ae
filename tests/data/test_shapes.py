"""The moving-shapes example: what is rendered, and a judge that can be trusted."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from mm_core.data.datasets import shapes as moving
from mm_core.data.datasets.media_text import MediaSource, MediaTextDataset
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.media.readers import PyAVReader
from support.scripts import script

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"


def test_six_combinations_are_held_out_and_all_pairs_of_parts_trained() -> None:
    assert len(moving.HELD_OUT) == 6 and len(set(moving.HELD_OUT)) == 6 and len(moving.TRAINED) == 26
    assert not set(moving.HELD_OUT) & set(moving.TRAINED)
    for one, other in itertools.combinations(range(3), 2):
        parts = (moving.COLOURS, moving.SHAPES, moving.DIRECTIONS)
        pairs = {(combination[one], combination[other]) for combination in moving.TRAINED}
        assert pairs == set(itertools.product(parts[one], parts[other]))


def test_the_files_are_a_dataset_without_the_held_out_captions(shapes_data: Path) -> None:
    rows = json.loads((shapes_data / "data.json").read_text())
    held_out = json.loads((shapes_data / "held_out.json").read_text())
    assert len(held_out) == 32 and set(held_out) == {moving.caption(*c) for c in moving.HELD_OUT}
    assert set(Counter(row["cap"] for row in rows).values()) == {2}
    assert {row["cap"] for row in rows} == {moving.caption(*c) for c in moving.TRAINED}
    dataset = VideoTextDataset(shapes_data / "data.json", 8, 16, 16)
    assert dataset[3]["pixels"].shape == (3, 8, 16, 16)
    info = PyAVReader().probe(shapes_data / rows[0]["path"])
    assert (info.width, info.height, info.num_frames, info.fps) == (16, 16, 8, 8.0)


def test_the_mp4_files_keep_the_pixels(shapes, shapes_data: Path) -> None:
    _, judge = shapes
    for index in range(26):
        scene = moving.draw_scene(moving.TRAINED[index], random.Random(f"0/{index}"), (16, 16), 8)
        truth = moving.draw(scene, (16, 16), 8).astype(np.float64)
        read = (judge.read_mp4(shapes_data / f"videos/{index:05d}.mp4").transpose(1, 2, 3, 0) + 1) * 127.5
        assert np.abs(read - truth).mean() < 1.5 and np.abs(read - truth).max() < 30


def test_shapes_stay_in_view_and_cross_much_of_it() -> None:
    for index in range(300):
        combination = moving.TRAINED[index % 26]
        scene = moving.draw_scene(combination, random.Random(index), (16, 16), 8)
        dx, dy = moving.DIRECTIONS[scene.direction]
        for frame in (0, 7):
            for place, step in ((scene.x, dx), (scene.y, dy)):
                centre = place + step * scene.speed * frame
                assert scene.side / 2 - 1e-9 <= centre <= 16 - scene.side / 2 + 1e-9
        assert scene.speed * 7 >= 7


def test_rendering_is_repeatable(shapes, shapes_data: Path, tmp_path: Path) -> None:
    """Each bit of what the example decides; x264 has been seen to write other bytes for the same pixels."""
    render, judge = shapes
    drawn = {}
    write = render.write_mp4
    render.write_mp4 = lambda path, clip, fps: (drawn.setdefault(path.name, clip), write(path, clip, fps))
    try:
        render.render(tmp_path, clips=3, seed=0, size=16, frames=8, fps=8, prompts=6)
    finally:
        render.write_mp4 = write
    rows = json.loads((shapes_data / "data.json").read_text())
    assert json.loads((tmp_path / "data.json").read_text()) == rows[:3]
    for index, name in enumerate(sorted(drawn)):
        scene = moving.draw_scene(moving.TRAINED[index], random.Random(f"0/{index}"), (16, 16), 8)
        assert np.array_equal(drawn[name], moving.draw(scene, (16, 16), 8))
        one, other = (judge.read_mp4(folder / "videos" / name) * 127.5 for folder in (tmp_path, shapes_data))
        assert one.shape == other.shape and np.abs(one - other).mean() < 1.5
    assert len(drawn) == 3


def test_the_judge_is_right_about_every_rendered_clip(shapes, shapes_data: Path) -> None:
    _, judge = shapes
    clips, prompts = judge.load(shapes_data, None)
    result = judge.score(clips, prompts)
    assert (result.clips, result.colour, result.direction, result.shape) == (52, 1.0, 1.0, 1.0)
    assert 0.15 < result.control_colour < 0.35 and 0.15 < result.control_direction < 0.35
    assert 0.4 < result.control_shape < 0.6
    assert "100.0%" in result.table()


def test_the_judge_is_right_about_held_out_combinations_and_tensors(shapes) -> None:
    _, judge = shapes
    for index in range(60):
        combination = moving.HELD_OUT[index % 6]
        clip = moving.draw(moving.draw_scene(combination, random.Random(index), (16, 16), 8), (16, 16), 8)
        noisy = clip + np.random.default_rng(index).normal(0, 8, clip.shape)  # as a sampled clip is
        pixels = torch.tensor(noisy.transpose(3, 0, 1, 2) / 127.5 - 1, dtype=torch.float32)
        assert judge.judge_clip(pixels) == judge.Judgement(*combination)


def test_the_direction_of_a_photo_is_the_side_where_its_shape_is(shapes) -> None:
    _, judge = shapes
    sides = {(5.0, 12.0): "left", (27.0, 13.0): "right", (15.0, 4.0): "up", (17.0, 20.0): "down"}
    for (x, y), side in {**sides, (16.0, 12.0): None, (4.0, 4.0): None}.items():
        scene = moving.Scene("red", "square", "left", 6.0, 0.0, x, y)
        pixels = moving.draw(scene, (24, 32), 1).transpose(3, 0, 1, 2) / 127.5 - 1
        assert judge.judge_clip(pixels) == judge.Judgement("red", "square", side)


def test_what_the_benchmark_of_buckets_draws_shows_its_captions_in_every_bucket(tmp_path) -> None:
    benchmark = script("benchmarks/data_buckets.py")
    benchmark.render(tmp_path, rows=5)
    sources = [MediaSource(annotations=str(tmp_path / name)) for name in ("photos", "clips.jsonl")]
    media = MediaTextDataset(sources)
    found = Counter()
    for row, (frames, height, width) in enumerate(media.row_sizes().tolist()):
        size = (frames, height // 2, width // 2)
        sample = media.sample_of(row, size, None)
        shown = benchmark.judge_clip(sample["pixels"].float().numpy() / 127.5 - 1)
        asked = benchmark.judge_prompt(sample["caption"])
        assert (shown.colour, shown.direction) == (asked.colour, asked.direction)
        found[size] += 1
    assert found == dict.fromkeys(benchmark.sizes(), 5)


def test_what_shows_nothing_scores_nothing(shapes) -> None:
    _, judge = shapes
    rng = np.random.default_rng(0)
    nothing = judge.Judgement(None, None, None)
    for _ in range(50):
        assert judge.judge_clip(rng.uniform(-1, 1, (3, 8, 16, 16))) == nothing
        assert judge.judge_clip(rng.normal(-0.8, 0.2, (3, 8, 16, 16))).direction is None
    for level in (-1.0, 0.0, 1.0):
        assert judge.judge_clip(np.full((3, 8, 16, 16), level)) == nothing
    full_red = np.stack([np.ones((8, 16, 16)), -np.ones((8, 16, 16)), -np.ones((8, 16, 16))])
    assert judge.judge_clip(full_red) == nothing, "a field of one colour is no shape"


def test_motion_must_be_there_and_be_the_right_way(shapes) -> None:
    _, judge = shapes
    scene = moving.draw_scene(("red", "circle", "left"), random.Random(0), (16, 16), 8)
    clip = moving.draw(scene, (16, 16), 8).transpose(3, 0, 1, 2) / 127.5 - 1
    assert judge.judge_clip(clip) == judge.Judgement("red", "circle", "left")
    static = np.repeat(clip[:, :1], 8, axis=1)
    assert judge.judge_clip(static) == judge.Judgement("red", "circle", None)
    assert judge.judge_clip(clip[:, ::-1]).direction == "right"
    shuffled = clip[:, [3, 0, 6, 2, 7, 1, 5, 4]]
    assert judge.judge_clip(shuffled).direction is None
    diagonal = np.stack([np.roll(clip[:, f], f, axis=1) for f in range(8)], axis=1)
    assert judge.judge_clip(diagonal).direction is None
    assert judge.score([static], ["a red circle moves left"]).direction == 0


def test_prompts_are_read_by_their_words(shapes) -> None:
    _, judge = shapes
    assert judge.judge_prompt("A Blue square moves up.") == judge.Judgement("blue", "square", "up")
    assert judge.judge_prompt("a dog") == judge.Judgement(None, None, None)
    with pytest.raises(ValueError, match="1 clips and 2 prompts"):
        judge.score([np.zeros((3, 2, 16, 16))], ["a", "b"])


def test_both_scripts_run_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "made"
    command = [sys.executable, str(SHAPES / "render.py"), "--out", str(out), "--clips", "26"]
    assert "rendered 26 clips" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    judging = [sys.executable, str(SHAPES / "judge.py"), str(out), "--require", "0.95"]
    report = subprocess.run(judging, capture_output=True, text=True)
    assert report.returncode == 0 and "colour" in report.stdout and "shuffled" in report.stdout
    pixels = np.stack([np.zeros((3, 8, 16, 16), dtype=np.float32)] * 2)
    np.savez(tmp_path / "clips.npz", pixels=pixels, prompts=np.array(["a red circle moves left"] * 2))
    for source in (str(tmp_path / "clips.npz"), str(tmp_path)):
        wrong = subprocess.run([*judging[:2], source, "--require", "0.95"], capture_output=True, text=True)
        assert wrong.returncode != 0 and "Traceback" not in wrong.stderr


def test_the_dataset_draws_the_quickstart_s_clips_without_files(shapes_data: Path) -> None:
    drawn = moving.ShapesDataset(num_frames=8, height=16, width=16, clips=52)
    files = VideoTextDataset(shapes_data / "data.json", 8, 16, 16)
    assert len(drawn) == len(files) == 52
    for index in (0, 25, 51):
        own, read = drawn[index], files[index]
        assert own["caption"] == read["caption"] and own["fps"] == read["fps"] == 8.0
        assert (own["pixels"] - (read["pixels"] / 127.5 - 1)).abs().mean() < 0.02, "but for the codec"


@pytest.mark.parametrize("size", [(16, 32), (32, 16)])
def test_shapes_cross_frames_of_any_size(size: tuple[int, int]) -> None:
    for index in range(60):
        scene = moving.draw_scene(moving.TRAINED[index % 26], random.Random(index), size, 8)
        dx, dy = moving.DIRECTIONS[scene.direction]
        for place, step, extent in ((scene.x, dx, size[1]), (scene.y, dy, size[0])):
            for frame in (0, 7):
                centre = place + step * scene.speed * frame
                assert scene.side / 2 - 1e-9 <= centre <= extent - scene.side / 2 + 1e-9
        clip = moving.draw(scene, size, 8)
        assert clip.shape == (8, *size, 3) and np.ptp(clip) > 100


def test_a_single_frame_is_a_picture() -> None:
    sample = moving.ShapesDataset(num_frames=1, height=8, width=8, clips=1)[0]
    assert sample["pixels"].shape == (3, 1, 8, 8) and sample["pixels"].min() >= -1
