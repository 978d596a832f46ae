"""`wan/clip_vision`: equal to what WanImageToVideoPipeline makes of images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline
from mm_wan.encoders.clip_vision import WanCLIPVision
from mm_wan.testing import TEXT_WIDTH, make_tiny_checkpoint
from PIL import Image
from safetensors.torch import load_file, save_file

import mm_core
from mm_core.contracts import ImageEncoder
from mm_core.errors import CheckpointError

SIZES = [(32, 32), (50, 70), (90, 31), (200, 300)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("i2v"), "i2v")


@pytest.fixture
def copied(checkpoint, tmp_path) -> Path:
    """A pipeline's folder that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "pipeline"))


def loaded(folder: Path, **options) -> WanCLIPVision:
    encoder = WanCLIPVision(str(folder), **options)
    mm_core.load_frozen(encoder, torch.device("cpu"))
    return encoder


def pictures() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]


def tensors() -> list[torch.Tensor]:
    return [torch.from_numpy(picture).permute(2, 0, 1) for picture in pictures()]


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_hidden_states_are_bit_equal_to_the_pipelines(checkpoint, name, dtype):
    pipeline = WanImageToVideoPipeline.from_pretrained(checkpoint, torch_dtype=dtype)
    encoder = loaded(checkpoint, dtype=name)
    assert isinstance(encoder, ImageEncoder) and encoder.hidden_size == TEXT_WIDTH
    with torch.no_grad():
        expected = pipeline.encode_image([Image.fromarray(picture) for picture in pictures()])
    found = encoder.encode(tensors())
    assert found.shape == (4, encoder.tokens, TEXT_WIDTH) and encoder.tokens == 5 and found.dtype == dtype
    assert torch.equal(found, expected)
    assert (found[0] - found[1]).abs().max() > 0.01
    assert not encoder.training and not encoder.train().training
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_names_as_they_are_published_are_read(checkpoint, copied):
    """Wan's repositories were saved by Transformers 4, whose CLIPVisionModel holds all below vision_model."""
    file = copied / "image_encoder/model.safetensors"
    prefix = "vision_model."
    weights = {prefix + name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    assert torch.equal(loaded(copied).encode(tensors()), loaded(checkpoint).encode(tensors()))


def test_folders_are_the_pipelines_or_their_own(checkpoint, tmp_path):
    found = [
        loaded(checkpoint / "image_encoder"),
        loaded(checkpoint),
        loaded(checkpoint / "image_encoder", processor=str(checkpoint / "image_processor")),
    ]
    for encoder in found:
        assert encoder.missing_files() == []
    nowhere = WanCLIPVision(str(tmp_path / "image_encoder"))
    names = [Path(path).name for path in nowhere.missing_files()]
    assert names == ["config.json", "model.safetensors", "preprocessor_config.json"]


def test_the_folder_of_another_model_is_a_readable_error(checkpoint):
    with pytest.raises(CheckpointError, match=r"holds no CLIP image encoder: .* model_type 'umt5'"):
        loaded(checkpoint / "text_encoder")


def test_missing_and_damaged_files_are_readable_errors(copied):
    (copied / "image_processor/preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError):
        loaded(copied)
    (copied / "image_processor/preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        loaded(copied)


def test_weights_that_lack_a_tensor_are_a_readable_error(copied):
    file = copied / "image_encoder/model.safetensors"
    weights = load_file(file)
    (lost,) = (name for name in weights if name.endswith("layers.0.mlp.fc1.weight"))
    del weights[lost]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.fc1\.weight"):
        loaded(copied)


def test_a_description_without_a_width_is_a_readable_error(copied):
    path = copied / "image_encoder/config.json"
    path.write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(CheckpointError, match=r"Transformers cannot read config.json"):
        _ = WanCLIPVision(str(copied)).hidden_size
