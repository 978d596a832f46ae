"""text_to_video with a predictor that is shown frames: a stand-in for any plugin's, no model of a library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from mm_core.contracts import (
    DataRanks,
    GivenFrames,
    PredictorInputs,
    Randomness,
    SampleKey,
    SampleRequest,
    SupportsFrames,
    VideoTextBatch,
)
from mm_core.data.rows.prompts import Prompt, read_images, read_prompts, with_images
from mm_core.errors import ContractError, DataError, MMError
from mm_core.evaluation.sampled_clips import share_of
from mm_core.plugin.registry import build
from mm_core.tasks.text_to_video.task import TextToVideo

RNG = Randomness(1)


class Repeats(nn.Module):
    """Predicts from the frames it is shown; the first latent stands in its place, and counts for nothing."""

    text_padding, patch_size = "masked", (1, 1, 1)
    in_channels = out_channels = 12
    text_dim = 16

    def __init__(self, choices=(("first",), ("first", "last"), ()), image_dim=None) -> None:
        super().__init__()
        self.frame_choices, self.image_dim = choices, image_dim
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.calls: list[dict[str, Tensor]] = []

    def frames_clip(self, frames, num_frames):
        return torch.stack(list(frames), dim=2)

    def with_frames(self, latents: Tensor, timestep: Tensor, given: GivenFrames) -> PredictorInputs:
        counts = torch.ones(1, 1, *latents.shape[2:], dtype=torch.bool)
        counts[:, :, 0] = False
        known = torch.cat([given.latents[:, :, :1], latents[:, :, 1:]], dim=2)
        conditions = {"shown": given.latents}
        if given.features is not None:
            conditions["features"] = given.features
        return PredictorInputs(known, timestep[:, None].repeat(1, 6), conditions, counts)

    def forward(self, latents, timestep, text, text_mask, **conditions: Tensor) -> Tensor:
        self.calls.append({"latents": latents, "timestep": timestep, **conditions})
        shown = conditions.get("shown")
        mean = latents.mean() * 0 if shown is None else shown.mean((1, 2, 3, 4)).view(-1, 1, 1, 1, 1)
        return self.scale * latents + mean

    def init_weights(self) -> None:
        nn.init.constant_(self.scale, 0.5)


class Brightness(nn.Module):
    """An image encoder: the mean of each channel, twice."""

    hidden_size = 3
    tokens = 2

    def load(self, device):
        pass

    def missing_files(self):
        return []

    def encode(self, images):
        return torch.stack([image.float().mean((1, 2)).repeat(2, 1) for image in images])


def task_of(predictor: nn.Module, **options) -> TextToVideo:
    parts = {
        "autoencoder": {"type": "pixel"},
        "text_encoder": {"type": "bytes", "hidden_size": 16},
        "scheduler": {"type": "core/flow_match"},
    }
    task = TextToVideo(predictor, **{kind: build(kind, parts[kind]) for kind in parts}, **options)
    task.text_encoder.load(torch.device("cpu"))
    return task


def batch_of(pixels: Tensor) -> VideoTextBatch:
    keys = [SampleKey(0, row) for row in range(len(pixels))]
    captions = ["a circle"] * len(pixels)
    return VideoTextBatch(keys, torch.ones(len(pixels)), captions, pixels=pixels, captions=captions)


def clips(count: int = 2) -> Tensor:
    """pixels[B,3,6,8,8] of 8-bit levels: six latent frames of 4 x 4."""
    return RNG.normal((count, 3, 6, 8, 8), "clips").mul(40).round().clamp(-127, 127) / 127.5 - 1 / 255


def image(level: int, height: int = 8, width: int = 8) -> Tensor:
    return torch.full((3, height, width), level, dtype=torch.uint8)


def request(images, prompts=("a", "b"), **options) -> SampleRequest:
    given = {"num_frames": 6, "height": 8, "width": 8, "fps": 8.0, "steps": 2, "guidance": 1.0, **options}
    return SampleRequest(prompts, images=tuple(images), **given)


def test_training_shows_the_first_choice_of_frames_and_counts_the_rest():
    predictor = Repeats()
    assert isinstance(predictor, SupportsFrames)
    task, pixels = task_of(predictor), clips()
    inputs = task.prepare(batch_of(pixels), RNG)
    shown = task.autoencoder.encode(pixels[:, :, :1]).mode()
    assert torch.equal(inputs.given.conditions["shown"], shown)
    assert torch.equal(inputs.given.latents[:, :, :1], shown)
    loss = task.loss(inputs)
    with torch.no_grad():
        predicted = predictor(inputs.given.latents, inputs.given.timestep, None, None, shown=shown)
    squares = (predicted - inputs.target)[:, :, 1:].square().flatten(1).mean(1)
    torch.testing.assert_close(loss.total, (squares * inputs.factors).sum())
    inputs.target[:, :, 0] = float("nan")
    assert torch.equal(task.loss(inputs).total, loss.total)
    assert predictor.calls[0]["timestep"].shape == (2, 6)


def test_a_config_may_choose_other_frames():
    task = task_of(Repeats(), frames=("first", "last"))
    inputs = task.prepare(batch_of(clips()), RNG)
    assert inputs.given.conditions["shown"].shape[2] == 2
    none = task_of(Repeats(), frames=())
    inputs = none.prepare(batch_of(clips()), RNG)
    assert inputs.given.counts is None and not inputs.given.conditions and inputs.given.timestep.shape == (2,)


def test_image_features_come_of_the_frames_as_bytes():
    task = task_of(Repeats(image_dim=3), image_encoder=Brightness(), frames=("first", "last"))
    assert task.frozen == ("autoencoder", "text_encoder", "image_encoder")
    pixels = clips()
    features = task.prepare(batch_of(pixels), RNG).given.conditions["features"]
    levels = ((pixels[:, :, [0, -1]] + 1) * 127.5).mean((3, 4)).transpose(1, 2)
    torch.testing.assert_close(features, levels.repeat_interleave(2, dim=1), rtol=0, atol=1e-3)


def test_image_features_of_another_shape_are_named():
    class Flat(Brightness):
        def encode(self, images):
            return super().encode(images).flatten(1)

    task = task_of(Repeats(image_dim=3), image_encoder=Flat(), frames=("first",))
    wrong = rf"task.image_encoder, {__file__}, line \d+: .* where hidden states \[2, L, D\] is needed"
    with pytest.raises(ContractError, match=wrong):
        task.prepare(batch_of(clips()), RNG)


def test_clips_of_another_shape_are_no_batch():
    with pytest.raises(ValueError, match=r"the shape \[B,3,F,Y,X\], not \[2, 6, 3, 8, 8\]"):
        batch_of(clips().transpose(1, 2))


def test_sampling_keeps_what_is_given_and_shows_it_to_both_halves_of_guidance():
    predictor = Repeats(image_dim=3)
    task = task_of(predictor, image_encoder=Brightness())
    rows = [(image(200, 20, 30),), (image(50, 8, 8),)]
    with torch.no_grad():
        found = task.sample(request(rows, guidance=3.0))
    for clip, level in zip(found, (200, 50), strict=True):
        torch.testing.assert_close(clip.pixels[:, :1], torch.full((3, 1, 8, 8), level / 127.5 - 1))
    call = predictor.calls[-1]
    assert len(call["latents"]) == len(call["shown"]) == len(call["features"]) == 4
    assert torch.equal(call["shown"][:2], call["shown"][2:])
    assert call["features"][:, 0, 0].tolist() == [200, 50, 200, 50]


def test_evaluation_estimates_what_is_not_given():
    task = task_of(Repeats())
    found = task.evaluate(batch_of(clips()), RNG, [0.5])
    assert torch.equal(found.outputs["estimate"][:, :, 0], found.outputs["clean"][:, :, 0])
    assert not torch.equal(found.outputs["estimate"], found.outputs["clean"])


@pytest.mark.parametrize(
    ("choices", "images", "sentence"),
    [
        ((("first",),), [], "the request contains no image, but the predictor needs the first frame"),
        (
            (("first", "last"),),
            [(image(1),)] * 2,
            "the request contains 1 image, but the predictor needs the first and",
        ),
        ((("first",),), [(image(1),)] * 3, "there are 2 prompts, but images for 3 clips"),
        ((("first",), ()), [(image(1),), ()], "clip 0 has 1 image, but clip 1 has no image"),
        (((),), [(image(1),)] * 2, "this predictor makes clips from text alone"),
        (
            (("first", "last"),),
            [(image(1),) * 3] * 2,
            "the request contains 3 images, but the predictor needs",
        ),
    ],
)
def test_images_that_a_predictor_does_not_take(choices, images, sentence):
    task = task_of(Repeats(choices))
    for refusing in (task.sample, task.check_request):
        with pytest.raises(ContractError, match=sentence):
            refusing(request(images))


def test_what_does_not_fit_is_found_when_the_plan_is_made():
    sizes = {"num_frames": 6, "height": 8, "width": 8}
    cases = [
        (task_of(Repeats(), frames=("last",)), "the last frame of each clip"),
        (task_of(Repeats(image_dim=3)), "image features 3 wide, but the task has no image encoder"),
        (task_of(Repeats(image_dim=4), image_encoder=Brightness()), "are 3 wide, but the predictor takes 4"),
        (task_of(Repeats(), image_encoder=Brightness()), "the predictor takes no image features"),
    ]
    for task, sentence in cases:
        with pytest.raises(ContractError, match=sentence):
            task.check(sizes)
    task_of(Repeats(), frames=("first", "last")).check(sizes)


# -- prompts and their images ----------------------------------------------------------------------


def test_rows_name_images_beside_their_file(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"cap": "a", "image": "x/1.png", "last_image": "2.png"}\n"b"\n')
    first, second = read_prompts(tmp_path / "rows.jsonl")
    assert first == Prompt("a", tmp_path / "x/1.png", tmp_path / "2.png") and second == Prompt("b")


def test_one_image_serves_all_that_have_none_and_several_go_one_each():
    prompts = [Prompt("a"), Prompt("b", Path("own.png"))]
    assert [p.image for p in with_images(prompts, ["one.png"], [])] == [Path("one.png"), Path("own.png")]
    both = with_images(prompts, ["1.png", "2.png"], ["3.png", "4.png"])
    assert both == [Prompt("a", Path("1.png"), Path("3.png")), Prompt("b", Path("2.png"), Path("4.png"))]
    assert with_images(prompts, [], []) == prompts
    with pytest.raises(MMError, match="the request contains 2 prompts, but 3 images"):
        with_images(prompts, ["1", "2", "3"], [])


def test_images_are_read_once_and_stay_with_their_prompts(tmp_path: Path):
    for name in ("a", "b"):
        Image.new("RGB", (4, 3), "red" if name == "a" else "blue").save(tmp_path / f"{name}.png")
    a, b = tmp_path / "a.png", tmp_path / "b.png"
    rows = read_images([Prompt("1", a), Prompt("2", b), Prompt("3", a, b)])
    assert [len(row) for row in rows] == [1, 1, 2] and rows[0][0] is rows[2][0]
    assert rows[1][0][:, 0, 0].tolist() == [0, 0, 255]
    assert read_images([Prompt("1"), Prompt("2")]) == ()
    with pytest.raises(DataError, match="a prompt has an image of the last frame, but none of the first"):
        read_images([Prompt("1", None, a)])
    own, real = share_of(SampleRequest(("1", "2", "3"), images=rows), DataRanks(1, 2))
    assert own.images[0] is rows[2] and real == 1


def test_a_clip_does_not_depend_on_the_clips_beside_it():
    task = task_of(Repeats())
    rows = [(image(level),) for level in (10, 90, 240)]
    whole = task.sample(request(rows, ("a", "b", "c")))
    for place in range(3):
        asked = replace(request(rows[place : place + 1], ("abc"[place],)), first=place)
        (alone,) = task.sample(asked)
        torch.testing.assert_close(alone.pixels, whole[place].pixels, rtol=0, atol=1e-6)
