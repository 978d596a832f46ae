"""Images that a Wan model cannot be given, and components that do not fit: a readable error each."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import wan_frames as frames

import mm_core
from mm_core.cli.main import main
from mm_core.contracts import SupportsFrames
from mm_core.data.rows.prompts import Prompt, read_prompts
from mm_core.errors import ContractError, DataError, MMError
from mm_core.interchange.import_weights import import_weights
from mm_core.plan import build_task, make_plan

PROMPT = "a red circle moves left"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return frames.maker(tmp_path_factory.mktemp("wan"))


@pytest.mark.parametrize(
    ("variant", "arguments", "sentence"),
    [
        (
            "i2v",
            [],
            "the request contains no image, but the predictor needs the first frame; accepted: 1 image",
        ),
        (
            "i2v",
            ["{0}", "last:{1}"],
            "the request contains 2 images, but the predictor needs the first frame",
        ),
        (
            "flf2v",
            ["{0}"],
            "the request contains 1 image, but the predictor needs the first and the last frame",
        ),
        ("flf2v", ["last:{1}"], "a prompt has an image of the last frame, but none of the first"),
        (
            "ti2v",
            ["{0}", "last:{1}"],
            "the request contains 2 images, but the predictor needs the first frame or no",
        ),
        ("i2v", ["{0}", "{1}", "{2}"], "the request contains 2 prompts, but 3 images"),
        ("i2v", ["nowhere.png"], "nowhere.png: there is no such image"),
        ("i2v", ["{folder}/model_index.json"], "model_index.json: the image cannot be read"),
        ("i2v", ["{0}", "--num-frames=6"], "num_frames 6 (nearest: 5 or 9)"),
        ("i2v", ["{0}", "--num-frames=1"], "the clip has 1 frame, and 1 of them is given"),
        (
            "i2v",
            ["{0}", "--width=40"],
            "width 40 makes 5 latents, which do not divide into the predictor's patches of 2",
        ),
        ("i2v", ["{0}", "--height=36"], "height 36 (nearest: 32 or 40)"),
    ],
)
def test_bad_input_is_a_readable_error(made, capsys, variant, arguments, sentence):
    at = made(variant)
    places = {"0": at.images[0], "1": at.images[1], "2": at.images[2], "folder": at.folder}
    command = ["sample", "--run", str(at.run), "--prompt", "x", "--prompt", "y", "--steps", "1"]
    for argument in arguments:
        text = argument.format(*at.images, **places)
        kind = "--last-image=" if text.startswith("last:") else "--image="
        command.append(text if text.startswith("--") else kind + text.removeprefix("last:"))
    assert main(command) == 1
    error = capsys.readouterr().err
    assert sentence in " ".join(error.replace("\n  ", "; ").split()) and "Traceback" not in error


def test_an_image_for_a_text_to_video_model(tmp_path):
    folder = frames.checkpoint_at(tmp_path / "t2v", "t2v")
    config = frames.config_at(tmp_path, folder, "t2v")
    import_weights(config, folder)
    (image, *_) = frames.images_at(tmp_path)
    with pytest.raises(
        ContractError, match="the request contains an image, but this predictor makes clips from text alone"
    ):
        mm_core.sample(tmp_path / "runs/t2v", PROMPT, images=[image])
    predictor = build_task(config).predictor
    assert isinstance(predictor, SupportsFrames) and predictor.frame_choices == ((),)


def test_clips_given_different_numbers_of_images(made):
    at = made("ti2v")
    with pytest.raises(ContractError, match="clip 0 has 1 image, but clip 1 has no image"):
        mm_core.sample(at.run, prompts=[Prompt("a", at.images[0]), Prompt("b")])


def test_rows_that_name_no_file(tmp_path):
    (tmp_path / "rows.json").write_text('[{"prompt": "a", "image": 3}]')
    with pytest.raises(DataError, match="image is 3"):
        read_prompts(tmp_path / "rows.json")
    with pytest.raises(MMError, match="the request contains 1 prompt, but 2 last images"):
        mm_core.sample(tmp_path, "a", last_images=["a.png", "b.png"])


def test_mismatches_are_found_before_training(made, tmp_path):
    at, other = made("i2v"), made("ti2v")
    encoder = at.config.task.options["image_encoder"]
    cases = [
        ({"image_encoder": None}, "takes image features 32 wide, but the task has no image encoder"),
        ({"frames": ("last",)}, "would give the predictor the last frame of each clip"),
        ({"frames": ()}, "would give the predictor no frame of each clip"),
        (
            {"autoencoder": other.config.task.options["autoencoder"]},
            "in_channels is 16, but the autoencoder's latents have 48 channels",
        ),
    ]
    for options, sentence in cases:
        config = frames.replace_task(at.config, **options)
        with pytest.raises(ContractError, match=sentence):
            make_plan(config, 1)
    with pytest.raises(
        ContractError, match="the task has an image encoder, but the predictor takes no image"
    ):
        make_plan(frames.replace_task(other.config, image_encoder=encoder), 1)
    wide = json.loads((at.folder / "image_encoder/config.json").read_text()) | {"hidden_size": 40}
    (shutil.copytree(at.folder, tmp_path / "wide") / "image_encoder/config.json").write_text(json.dumps(wide))
    options = replace(encoder, options={**encoder.options, "from_pretrained": str(tmp_path / "wide")})
    with pytest.raises(ContractError, match="hidden states are 40 wide, but the predictor takes 32"):
        make_plan(frames.replace_task(at.config, image_encoder=options), 1)
