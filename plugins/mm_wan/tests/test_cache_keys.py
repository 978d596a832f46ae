"""What makes an entry of the feature cache stale: fields and files of Wan's encoders, captions, media."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mm_wan.encoders.config import TilingParam, WanCLIPVisionConfig, WanUMT5Config, WanVAEConfig
from mm_wan.testing import make_tiny_checkpoint
from PIL import Image

import mm_core
from mm_core.builtin.configs.diffusion import HFTextConfig
from mm_core.cli.main import main
from mm_core.config.load import load_config
from mm_core.data.cache.hashes import FILES, FileHashes
from mm_core.data.cache.keys import component_facts, digest_of
from mm_core.data.cache.store import Store
from mm_core.loading.caching import Built, build_cache
from mm_core.loading.frozen import load_frozen
from mm_core.plan import build_task

pytestmark = pytest.mark.slow

PARTS = {"autoencoder": "vae", "text_encoder": "text_encoder", "image_encoder": "image_encoder"}
TEXTS = ["a red circle moves left", "a cat and a dog bake a cake together in a kitchen"]
TILES = {
    f"tile_sample_{each}": size
    for each, size in zip(
        ("min_height", "min_width", "stride_height", "stride_width"), (64, 64, 48, 48), strict=True
    )
}
VALUES = {
    "autoencoder": {
        "dtype": "bf16",
        "latent_channels": 16,
        "tiling": (True, {}, {"tiling_param": TILES}),
        "tiling_param": {"tile_sample_min_height": 64},
        "slicing": True,
        "norm_latents": False,
        "norm_mode": ("value_shift_scale", {"scaling_factor": 1.0}, {}),
        "shift_factor": (0.5, {}, {"norm_mode": "value_shift_scale", "scaling_factor": 1.0}),
        "scaling_factor": (2.0, {}, {"norm_mode": "value_shift_scale", "scaling_factor": 1.0}),
        "do_sample": True,
    },
    "text_encoder": {"max_length": 8, "dtype": "bf16"},
    "image_encoder": {"dtype": "bf16"},
}
"""Another value of each field that is no path, what it needs beside it, and what both values need."""

FALSE_MISSES = {
    *("autoencoder.latent_channels", "autoencoder.slicing", "autoencoder.norm_latents"),
    *("autoencoder.norm_mode", "autoencoder.shift_factor", "autoencoder.scaling_factor"),
    *("autoencoder.do_sample", "autoencoder.tiling_param"),
}
"""Fields that change the key and not what is cached: the moments. docs/cache.md lists them."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("keys") / "pipeline", "i2v")


@pytest.fixture
def config_at(tmp_path):
    """A run of the image-to-video pipeline in a folder."""

    def made(folder: Path, **options: dict[str, Any]):
        encoders = {
            "autoencoder": {"type": "wan/vae", "from_pretrained": str(folder / "vae")},
            "text_encoder": {"type": "wan/umt5", "from_pretrained": str(folder), "dtype": "fp32"},
            "image_encoder": {"type": "wan/clip_vision", "from_pretrained": str(folder / "image_encoder")},
        }
        task = {
            "type": "text_to_video",
            "predictor": {"type": "wan/transformer", "from_pretrained": str(folder)},
            "scheduler": {"type": "wan/flow_match"},
            **{name: {**settings, **options.get(name, {})} for name, settings in encoders.items()},
        }
        data = {"type": "shapes", "clips": 4, "num_frames": 5, "height": 32, "width": 48}
        document = {"run": {"name": "keys"}, "task": task, "data": {"train": data}, "train": {"steps": 1}}
        (tmp_path / "keys.yaml").write_text(yaml.safe_dump(document))
        return load_config(tmp_path / "keys.yaml")

    return made


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "cache", create=True)


def key(config, store: Store, name: str) -> bytes:
    """The digest of a component."""
    section = config.task.options[name]
    component = config.registry.build(section.kind, section)
    return digest_of(component_facts(section, component, section.type, FileHashes(store.folder / FILES)))


def output(config, name: str) -> list[torch.Tensor]:
    """What is cached, computed."""
    task = build_task(config)
    load_frozen(getattr(task, name), registry=config.registry)
    if name == "text_encoder":
        return [tensor for row in task.features("text states", TEXTS) for tensor in row.values()]
    if name == "image_encoder":
        return [*task.image_encoder.encode([torch.arange(3 * 40 * 30).view(3, 40, 30).to(torch.uint8)])]
    pixels = torch.randn(2, 3, 5, 96, 96, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)
    return [*task.autoencoder.encode(pixels).moments]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.equal(a.float(), b.float()) for a, b in zip(one, other, strict=True)
    )


def test_every_field_is_tried():
    classes = {
        "autoencoder": WanVAEConfig,
        "text_encoder": WanUMT5Config,
        "image_encoder": WanCLIPVisionConfig,
    }
    paths = {"from_pretrained", "tokenizer", "processor"}
    for name, config in classes.items():
        assert {field.name for field in fields(config)} - paths == VALUES[name].keys()
    assert {field.name for field in fields(HFTextConfig)} - paths == VALUES["text_encoder"].keys()
    assert {"tile_sample_min_height"} <= {field.name for field in fields(TilingParam)}


@pytest.mark.parametrize("field", [f"{name}.{field}" for name, of in VALUES.items() for field in of])
def test_a_field_that_changes_the_output_changes_the_key(pipeline, config_at, store, field):
    name, _, own = field.partition(".")
    value, beside, both = VALUES[name][own], {}, {}
    if isinstance(value, tuple):
        value, beside, both = value
    before = config_at(pipeline, **{name: both})
    after = config_at(pipeline, **{name: {**both, own: value, **beside}})
    changed = key(before, store, name) != key(after, store, name)
    differs = not same(output(before, name), output(after, name))
    assert changed or not differs
    assert changed == differs or field in FALSE_MISSES


def files_of(pipeline: Path) -> Iterator[tuple[str, str]]:
    yield from (
        ("autoencoder", f"vae/{name}") for name in ("config.json", "diffusion_pytorch_model.safetensors")
    )
    yield from (("text_encoder", f"text_encoder/{name}") for name in ("config.json", "model.safetensors"))
    yield ("text_encoder", "tokenizer/tokenizer.json")
    yield from (("image_encoder", f"image_encoder/{name}") for name in ("config.json", "model.safetensors"))
    yield ("image_encoder", "image_processor/preprocessor_config.json")


@pytest.mark.parametrize(("name", "file"), [*files_of(Path())])
def test_a_byte_of_each_file_changes_the_key_of_its_component_alone(
    pipeline, config_at, store, tmp_path, name, file
):
    moved = tmp_path / "elsewhere"
    shutil.copytree(pipeline, moved)
    before = {each: key(config_at(pipeline), store, each) for each in PARTS}
    assert before == {each: key(config_at(moved), store, each) for each in PARTS}  # a path is no content
    content = bytearray((moved / file).read_bytes())
    content[-2] ^= 1
    (moved / file).write_bytes(content)
    (moved / "vae/README.md").write_text("what nothing reads")
    after = {each: key(config_at(moved), store, each) for each in PARTS}
    assert {each for each in PARTS if before[each] != after[each]} == {name}


# -- many pictures -----------------------------------------------------------------------------------


class Pictures:
    """A run of pictures with captions, and what each build of its cache encodes."""

    def __init__(self, folder: Path, pipeline: Path, count: int) -> None:
        self.folder, self.pipeline = folder, folder / "pipeline"
        shutil.copytree(pipeline, self.pipeline)
        self.captions = [f"picture {number}" for number in range(count)]
        for number in range(count):
            self.draw(number, number)
        self.size, self.length = 16, 16

    def draw(self, number: int, seed: int) -> None:
        colour = (seed % 251, seed // 251, 9)
        Image.new("RGB", (24, 20), colour).save(self.folder / f"{number}.png")

    def build(self, *overrides: str) -> Built:
        rows = [{"path": f"{n}.png", "cap": caption} for n, caption in enumerate(self.captions)]
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return build_cache(self.config(*overrides), lambda _: None)

    def config(self, *overrides: str):
        source = [{"annotations": str(self.folder / "rows.jsonl")}]
        data = {"type": "media_text", "sources": source, "num_frames": 1}
        data |= {"height": self.size, "width": self.size}
        text = {"type": "wan/umt5", "from_pretrained": str(self.pipeline / "text_encoder"), "dtype": "fp32"}
        document = {
            "run": {"name": "pictures", "dir": str(self.folder / "runs")},
            "task": {
                "type": "text_to_video",
                "predictor": {"type": "wan/transformer", "from_pretrained": str(self.pipeline)},
                "autoencoder": {"type": "wan/vae", "from_pretrained": str(self.pipeline / "vae")},
                "text_encoder": {**text, "max_length": self.length},
                "scheduler": {"type": "wan/flow_match"},
                "caption_dropout": 0.1,
            },
            "data": {
                "train": data,
                "loader": {"workers": 0},
                "cache": {"dir": str(self.folder / "cache")},
            },
            "train": {"steps": 2, "micro_batch_size": 50},
        }
        (self.folder / "run.yaml").write_text(yaml.safe_dump(document))
        return load_config(self.folder / "run.yaml", list(overrides))


@pytest.mark.parametrize("count", [100, 1000])
def test_only_what_has_changed_is_encoded_again(count, tmp_path, tmp_path_factory, capsys):
    pipeline = make_tiny_checkpoint(tmp_path_factory.mktemp("t2v") / "pipeline", "t2v")
    made = Pictures(tmp_path, pipeline, count)
    assert made.build().encoded == {"latents": count, "text states": count + 1}
    assert made.build().encoded == {}

    made.captions[7] = "another caption"
    assert made.build().encoded == {"text states": 1}
    made.draw(7, 5000)
    with pytest.raises(mm_core.errors.CacheError, match=r"1 not cached: not encoded yet.*7\.png"):
        mm_core.train(made.config())
    assert made.build().encoded == {"latents": 1}

    weights = made.pipeline / "vae/diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    assert main(["cache", "status", "--config", str(tmp_path / "run.yaml")]) == 1
    shown = capsys.readouterr().out
    assert f"latents: {count:,} not cached: the autoencoder has changed" in shown
    assert "(autoencoder: diffusion_pytorch_model.safetensors has other bytes)" in shown
    assert made.build().encoded == {"latents": count}

    made.size = 32
    made.config()
    assert main(["cache", "status", "--config", str(tmp_path / "run.yaml")]) == 1
    shown = capsys.readouterr().out
    assert f"latents: {count:,} not cached: its frames, size or transform have changed" in shown
    assert made.build().encoded == {"latents": count}

    made.length = 24
    made.config()
    assert main(["cache", "status", "--config", str(tmp_path / "run.yaml")]) == 1
    assert "(text_encoder.max_length: 16 -> 24)" in capsys.readouterr().out
    assert made.build().encoded == {"text states": count + 1}
    assert main(["cache", "prune", "--config", str(tmp_path / "run.yaml")]) == 0
    assert made.build().encoded == {}
    assert mm_core.train(made.config()).step == 2
