"""The dataset video_text: which frames, which caption, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import mm_core
from mm_core.contracts import Dataset, Randomness, SampleKey, SupportsSampleAt
from mm_core.data.datasets.video_text import VideoTextDataset
from mm_core.data.media.package_readers import DecordReader
from mm_core.data.media.readers import PyAVReader
from mm_core.errors import ContractError, DataError

RNG = Randomness(0)


def numbers(pixels: torch.Tensor) -> list[int]:
    """Frame numbers from their grey levels (20 + 4 k)."""
    return [round(float(level) / 4 - 5) for level in pixels.float().mean((0, 2, 3))]


@pytest.fixture
def build(tmp_path: Path, encode, annotate):
    """A dataset over one numbered video of 40 frames at 24 a second."""
    encode(tmp_path / "videos" / "a.mp4")

    def make(row: dict | None = None, num_frames: int = 8, **fields) -> VideoTextDataset:
        rows = [{"path": "a.mp4", "cap": "one"} | (row or {})]
        file = annotate(tmp_path / "data.json", rows)
        return VideoTextDataset(file, num_frames, 24, 32, folder=tmp_path / "videos", **fields)

    return make


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda frames: frames.float(), r"torch.float32 \[8, 48, 64, 3\]"),
        (lambda frames: frames[:7], r"torch.uint8 \[7, 48, 64, 3\]"),
        (lambda frames: frames.permute(0, 3, 1, 2), r"torch.uint8 \[8, 3, 48, 64\]"),
        (lambda frames: frames.tolist(), "list"),
    ],
)
def test_frames_of_another_kind_are_the_readers_fault(build, change, shown) -> None:
    class Other(PyAVReader):
        def read(self, path, seconds):
            return change(super().read(path, seconds))

    dataset = build(reader=Other())
    wrong = rf"the video reader, {__file__}, line \d+: read returned {shown} for 8 times"
    with pytest.raises(ContractError, match=wrong) as fault:
        dataset[0]
    assert fault.value.accepted == "torch.uint8 [8, Y, X, 3]"


def test_a_sample_is_pixels_caption_and_id(build) -> None:
    dataset = build({"cap": "  a&amp;b\n c"})
    assert isinstance(dataset, SupportsSampleAt) and len(dataset) == 1
    sample = dataset[0]
    assert sample["pixels"].shape == (3, 8, 24, 32) and sample["pixels"].dtype == torch.uint8
    assert sample["caption"] == "a&b c" and sample["id"] == "a.mp4"
    assert numbers(sample["pixels"]) == list(range(8))


def test_a_batch_has_the_frame_rate_of_each_clip_its_own_or_the_one_asked_for(build) -> None:
    for asked, found in ((None, 24.0), (12.5, 12.5)):
        dataset = build(fps=asked)
        rows = [{**dataset[0], "key": SampleKey(0, 0), "weight": 1.0} for _ in range(2)]
        assert dataset.collate(rows).fps.tolist() == [found, found]


@pytest.mark.parametrize("reader", [None, DecordReader()], ids=["pyav", "decord"])
def test_frames_are_sampled_at_the_rate_asked_for(build, reader) -> None:
    assert numbers(build(fps=12, reader=reader)[0]["pixels"]) == list(range(0, 16, 2))
    assert numbers(build(fps=6, reader=reader)[0]["pixels"]) == list(range(0, 32, 4))
    assert numbers(build(fps=48, num_frames=4, reader=reader)[0]["pixels"]) == [0, 1, 1, 2]
    assert numbers(build(num_frames=40, reader=reader)[0]["pixels"]) == list(range(40))
    assert numbers(build(num_frames=20, fps=12, reader=reader)[0]["pixels"]) == list(range(0, 40, 2))


def test_a_random_start_reaches_every_place_and_no_further(build) -> None:
    dataset = build(num_frames=36, random_start=True)
    starts = set()
    for draw in range(40):
        found = numbers(dataset.sample_at(0, RNG.at(draw))["pixels"])
        assert found == list(range(found[0], found[0] + 36))
        starts.add(found[0])
    assert starts == {0, 1, 2, 3, 4}
    assert numbers(dataset[0]["pixels"])[0] == 0
    fixed = build(num_frames=36)
    assert {numbers(fixed.sample_at(0, RNG.at(draw))["pixels"])[0] for draw in range(9)} == {0}


def test_a_random_start_leaves_room_for_spaced_frames(build) -> None:
    dataset = build(num_frames=19, fps=12, random_start=True)
    starts = {numbers(dataset.sample_at(0, RNG.at(draw))["pixels"])[0] for draw in range(40)}
    assert starts == {0, 1, 2, 3}, "the last of 19 frames, two apart, is at most frame 39"


def test_the_caption_of_a_list_is_drawn_and_repeatable(build) -> None:
    dataset = build({"cap": ["x", "y", "z"]})
    drawn = [dataset.sample_at(0, RNG.at(k))["caption"] for k in range(30)]
    assert set(drawn) == {"x", "y", "z"}
    assert drawn == [dataset.sample_at(0, RNG.at(k))["caption"] for k in range(30)]
    assert dataset[0]["caption"] == "x"


def test_a_video_that_is_too_short_names_both_counts(build, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too short: it has 40 frames, but a clip needs 41") as caught:
        build(num_frames=41)[0]
    assert caught.value.where == str(tmp_path / "videos" / "a.mp4")
    with pytest.raises(DataError, match="it has 20 frames at 12 per second, but a clip needs 21"):
        build(num_frames=21, fps=12)[0]


def test_a_row_that_declares_too_few_frames_is_refused_unopened(build, tmp_path: Path) -> None:
    dataset = build({"num_frames": 5})
    (tmp_path / "videos" / "a.mp4").unlink()
    with pytest.raises(DataError, match="the annotation declares 5 frames, but a clip needs 8"):
        dataset[0]


def test_a_link_out_of_the_folder_is_not_read(build, tmp_path: Path) -> None:
    dataset = build()
    video = tmp_path / "videos" / "a.mp4"
    video.rename(tmp_path / "outside.mp4")
    video.symlink_to(tmp_path / "outside.mp4")
    with pytest.raises(DataError, match="symbolic link"):
        dataset[0]


def test_collate_makes_a_batch(build) -> None:
    dataset: Dataset = build()
    rows = [{**dataset[0], "key": SampleKey(2, 0), "weight": weight} for weight in (1.0, 0.0)]
    batch = dataset.collate(rows)
    assert batch.keys == [(2, 0), (2, 0)] and batch.sample_weights.tolist() == [1.0, 0.0]
    assert batch.pixels.shape == (2, 3, 8, 24, 32) and batch.captions == ["one", "one"]
    assert batch.ids == ["a.mp4", "a.mp4"] and batch.failures == []


def test_the_folder_defaults_to_the_annotation_files(tmp_path: Path, encode, annotate) -> None:
    encode(tmp_path / "v" / "a.mp4", 4)
    file = annotate(tmp_path / "data.json", [{"path": "v/a.mp4", "cap": "x"}])
    assert VideoTextDataset(file, 4, 16, 16)[0]["pixels"].shape == (3, 4, 16, 16)
    with pytest.raises(DataError, match="folder of the videos does not exist"):
        VideoTextDataset(file, 4, 16, 16, folder=tmp_path / "nowhere")


def test_the_dataset_travels_to_workers(build) -> None:
    dataset = build()
    twin = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(twin[0]["pixels"], dataset[0]["pixels"])


def test_real_clips_become_samples(clips: Path, tmp_path: Path, annotate) -> None:
    rows = [
        {"path": name, "cap": name} for name in ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")
    ]
    dataset = VideoTextDataset(
        annotate(tmp_path / "data.json", rows), 9, 32, 48, folder=clips, fps=8, random_start=True
    )
    for index in range(3):
        pixels = dataset.sample_at(index, RNG.at(index))["pixels"]
        assert pixels.shape == (3, 9, 32, 48) and pixels.float().std() > 12
        levels = pixels.float()
        assert (levels[:, 1:] - levels[:, :-1]).abs().mean() > 0.1, "frames differ: it moves"


def test_the_registry_builds_it_with_its_reader(build, tmp_path: Path) -> None:
    build()  # writes the files
    fields = {"type": "video_text", "annotations": str(tmp_path / "data.json"), "num_frames": 8}
    fields |= {"height": 24, "width": 32, "folder": str(tmp_path / "videos")}
    for reader in (None, "pyav", {"type": "core/decord", "max_pixels": 4000}):
        chosen = {} if reader is None else {"reader": {"type": reader} if isinstance(reader, str) else reader}
        dataset = mm_core.build("dataset", fields | chosen)
        assert numbers(dataset[0]["pixels"]) == list(range(8))
    assert dataset.reader.max_pixels == 4000
