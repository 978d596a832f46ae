"""What a user can get wrong about text-to-video, as a user types it: one error with what is expected."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from mm_wan.testing import make_tiny_checkpoint

from mm_core.cli.main import main

CONFIG = Path(__file__).parents[1] / "mm_wan/configs/t2v_tiny.yaml"
WANTED = (
    "  accepted: the folder of a Wan pipeline (model_index.json), of its transformer (config.json of"
    " WanTransformer3DModel), or in Wan-AI's layout (config.json of WanModel)\n"
)
FRAMES = "  accepted: num_frames of 4k+1, height a multiple of 8, width a multiple of 8\n"
PATCHES = "  hint: sizes that also divide into the predictor's patches: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints as the tiny config names them, and others that do not fit it."""
    folder = tmp_path_factory.mktemp("wan")
    make_tiny_checkpoint(folder / "ckpt/wan_tiny")
    make_tiny_checkpoint(folder / "ckpt/ti2v", "ti2v")
    make_tiny_checkpoint(folder / "ckpt/wan_tiny_a14b", "t2v_high_low")
    (folder / "flux").mkdir()
    (folder / "flux/config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    for part in ("transformer", "vae"):
        cut = shutil.copytree(folder / "ckpt/wan_tiny", folder / f"cut_{part}")
        weights = cut / part / "diffusion_pytorch_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    (folder / "data/real_clips").mkdir(parents=True)
    (folder / "data/real_clips/data.json").write_text(json.dumps([{"path": "none.mp4", "cap": "a cat"}]))
    return folder


@pytest.fixture
def said(folder, monkeypatch, capfd):
    """Runs a command that must fail, and returns what it prints on stderr."""
    monkeypatch.chdir(folder)

    def type_(*arguments: str) -> str:
        capfd.readouterr()
        code = main([*map(str, arguments)])
        out, err = capfd.readouterr()
        assert code == 1, out + err
        assert "Traceback" not in out + err
        return err[err.index("mm: error: ") :]

    return type_


def dry(*overrides: str) -> list[str]:
    return ["train", "--config", CONFIG, "--dry-run", *overrides]


def test_the_config_itself_is_good(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    assert main(list(map(str, dry()))) == 0 and main(["validate", str(CONFIG)]) == 0
    assert "missing" not in capfd.readouterr().out


@pytest.mark.parametrize("named", ["ckpt/tinny", "{high: ckpt/tinny, low: ckpt/wan_tiny}"])
def test_missing_weights_are_listed(named, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    pair = ["task.predictor.type=wan/two_expert"] if "high" in named else []
    assert main(["validate", str(CONFIG), *pair, f"task.predictor.from_pretrained={named}"]) == 0
    assert capfd.readouterr().out.splitlines()[1:] == ["missing: ckpt/tinny (needed to train)"]


def test_sizes_of_a_preset_whose_folder_is_missing_are_answered_with_the_folder(said):
    preset = ("task.predictor.preset=wan2.1-t2v-1.3b", "task.predictor.from_pretrained=ckpt/tinny")
    error = said(*dry(*preset))
    assert "text_dim is 4096, but the text encoder's hidden states are" in error
    assert "; ckpt/tinny is missing: the predictor's sizes are those of its preset or fields" in error


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        (
            "flux",
            "flux: this folder holds no Wan transformer: config.json names the class FluxTransformer2DModel\n"
            + WANTED,
        ),
        ("data", "data: this folder holds no Wan transformer: config.json is missing\n" + WANTED),
        (
            "ckpt/none",
            f"ckpt/none: this folder does not exist\n{WANTED}"
            "  hint: download the weights to it; or set preset to plan a run without them\n",
        ),
    ],
)
def test_a_folder_that_is_no_wan_model(said, named, sentence):
    assert said(*dry(f"task.predictor.from_pretrained={named}")) == f"mm: error: {sentence}"


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("num_layers", 10**9, "a whole number from 1 to 1000, such as 40"),
        ("rope_max_seq_len", 10**12, "a whole number from 1 to 32768, such as 1024"),
        ("attention_head_dim", 0, "a whole number from 1 to 1024, such as 128"),
        ("attention_head_dim", -128, "a whole number from 1 to 1024, such as 128"),
        ("num_attention_heads", 10**30, "a whole number from 1 to 100000, such as 40"),
        ("image_dim", 1e9, "null, or a whole number from 1 to 100000"),
        ("patch_size", [1, 2, 0], "a value such as (1, 2, 2)"),
    ],
)
def test_absurd_numbers_of_a_config_are_refused_at_once(said, folder, field, value, accepted):
    """Diffusers would build for ever, or ask for more memory than there is."""
    (folder / "absurd").mkdir(exist_ok=True)
    fields = {"_class_name": "WanTransformer3DModel", field: value}
    (folder / "absurd/config.json").write_text(json.dumps(fields))
    began = time.monotonic()
    found = said(*dry("task.predictor.from_pretrained=absurd"))
    shown = tuple(value) if isinstance(value, list) else value
    assert found == f"mm: error: absurd/config.json: {field} is {shown!r}\n  accepted: {accepted}\n"
    assert time.monotonic() - began < 5


def test_so_are_those_of_the_original_layout(said, folder):
    sizes = dict.fromkeys(("dim", "ffn_dim", "freq_dim", "in_dim", "num_heads", "out_dim"), 16)
    (folder / "absurd").mkdir(exist_ok=True)
    (folder / "absurd/config.json").write_text(json.dumps({**sizes, "num_layers": 10**9}))
    found = said(*dry("task.predictor.from_pretrained=absurd"))
    sentence = "absurd/config.json: num_layers is 1000000000\n  accepted: a whole number from 1 to 1000\n"
    assert found == f"mm: error: {sentence}"


def test_absurd_options_are_refused_too(said):
    found = said(*dry("task.predictor.num_layers=1000000000"))
    assert "task.predictor.num_layers: found 1000000000" in found and "<= 1000" in found


def test_a_folder_of_another_variant_than_the_preset(said):
    found = said(*dry("task.predictor.preset=wan2.1-t2v-1.3b"))
    assert found == (
        "mm: error: ckpt/wan_tiny: the preset is wan2.1-t2v-1.3b, but this folder holds no published model:"
        " num_attention_heads 2 instead of 12, attention_head_dim 12 instead of 128, text_dim 32 instead of"
        " 4096, freq_dim 32 instead of 256, ffn_dim 48 instead of 8960, num_layers 2 instead of 30\n"
        "  hint: leave preset out: the folder's config.json defines the architecture\n"
    )


@pytest.mark.parametrize("command", ["train", "validate"])
def test_a_preset_that_nobody_published(said, command):
    name = "task.predictor.preset=wan2.1-t2v-2b"
    found = said(*dry(name)) if command == "train" else said("validate", CONFIG, name)
    assert "task.predictor.preset: found 'wan2.1-t2v-2b', a string\n  accepted: wan2.1-t2v-1.3b, " in found


@pytest.mark.parametrize(
    ("component", "part", "override"),
    [("predictor", "transformer", ""), ("autoencoder", "vae", "/vae")],
)
def test_a_truncated_file(said, folder, component, part, override):
    """Found when it is read; nothing of a run is left that could be resumed."""
    found = said(
        "train", "--config", CONFIG, "--nproc", "1", "data.loader.workers=0", f"run.name={part}",
        f"task.{component}.from_pretrained=cut_{part}{override}",
    )  # fmt: skip
    file = f"cut_{part}/{part}/diffusion_pytorch_model.safetensors"
    assert found == (
        f"mm: error: {file}: this is not a complete safetensors file: it is truncated, or longer than its"
        " header declares\n  hint: download or copy it again\n"
    )
    assert not list((folder / f"runs/{part}").glob("checkpoints/step_*"))


@pytest.mark.parametrize(
    "overrides",
    [
        ('train.adapters=[{targets: ["predictor.high.blocks.{*}"]}]',),
        ("train.adapters=[]", "train.freeze=[predictor.low]"),
    ],
)
def test_two_experts_of_which_only_one_is_trained(said, overrides):
    config = CONFIG.with_name("t2v_a14b_tiny_lora.yaml")
    found = said("train", "--config", config, "--dry-run", *overrides)
    assert "no weight of predictor.low is trained, but the run would draw its timesteps too\n" in found
    assert found.endswith("  hint: set task.predictor.train: high (with wan/two_expert)\n")
    both = (*overrides, "train.freeze=[]", "task.predictor.train=high")
    assert main(["train", "--config", str(config), "--dry-run", *both]) == 0


def test_an_autoencoder_of_other_channels(said):
    found = said(*dry("task.autoencoder.from_pretrained=ckpt/ti2v/vae", "data.train.height=64"))
    for name in ("in_channels", "out_channels"):
        sentence = f"task.predictor.{name}: {name} is 16, but the autoencoder's latents have 48 channels\n"
        assert f"{sentence}  accepted: 48\n" in found
    assert found.startswith("mm: error: the task has 2 errors:\n")


@pytest.mark.parametrize(("latents", "sampled"), [("mode", "true"), ("sample", "false")])
def test_a_task_and_an_autoencoder_that_contradict_each_other_about_the_latents(said, latents, sampled):
    other = "sample" if sampled == "true" else "mode"
    found = said(*dry(f"task.latents={latents}", f"task.autoencoder.do_sample={sampled}"))
    assert found == (
        f"mm: error: task.latents: latents is {latents}, but the autoencoder's do_sample is {sampled}\n"
        f"  accepted: {other}\n  hint: remove one of the two\n"
    )


# -- sizes -----------------------------------------------------------------------------------------

FAULTS = {
    "num_frames=10": ("num_frames 10 (nearest: 9 or 13)", "num_frames 9 or 13"),
    "height=50": ("height 50 (nearest: 48 or 56)", "height 48 or 64"),
    "width=70": ("width 70 (nearest: 64 or 72)", "width 64 or 80"),
}


@pytest.mark.parametrize("size", FAULTS)
def test_sizes_that_the_autoencoder_cannot_encode(said, size):
    wrong, fitting = FAULTS[size]
    found = said(*dry(f"data.train.{size}"))
    sentence = f"data.train: the autoencoder 'wan/vae' cannot encode clips with {wrong}\n"
    assert found.startswith(f"mm: error: {sentence}{FRAMES}{PATCHES}{fitting}\n")


def test_sizes_that_do_not_divide_into_patches(said):
    found = said(*dry("data.train.height=56"))
    assert found == (
        "mm: error: data.train.height: height 56 makes 7 latents, "
        "which do not divide into the predictor's patches of 2\n"
        "  accepted: 48 or 64, for example\n"
    )


@pytest.fixture(scope="module")
def run(folder) -> Path:
    """A run that has begun with the weights of the tiny checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["import", "--from", "ckpt/wan_tiny", "--config", str(CONFIG)]) == 0
    return folder / "runs/wan_t2v_tiny"


def sample(run: Path, *options: str) -> list[str]:
    return ["sample", "--run", str(run), "--prompt", "a cat", "--out", "out", *options]


@pytest.mark.parametrize("size", FAULTS)
def test_sizes_to_sample(said, run, folder, size):
    wrong, fitting = FAULTS[size]
    name, value = size.split("=")
    found = said(*sample(run, f"--{name.replace('_', '-')}", value))
    sentence = f"clip to sample: the autoencoder 'wan/vae' cannot encode clips with {wrong}\n"
    assert found == f"mm: error: {sentence}{FRAMES}{PATCHES}{fitting}\n"
    assert not (folder / "out").exists()


def test_sampling_a_run_whose_autoencoder_was_cut_off(said, run, tmp_path):
    """Its config names the folder: the file was whole when it was trained."""
    elsewhere = shutil.copytree(run, tmp_path / "moved")
    for config in elsewhere.rglob("config.yaml"):
        config.write_text(config.read_text().replace("ckpt/wan_tiny/vae", "cut_vae/vae"))
    found = said(*sample(elsewhere))
    assert found.startswith("mm: error: cut_vae/vae/diffusion_pytorch_model.safetensors: this is not a")


def test_images_and_scales_that_the_model_does_not_take(said, run):
    assert said(*sample(run, "--image", "none.png")) == (
        "mm: error: none.png: there is no such image\n"
        "  hint: correct the path, or copy the file to this place\n"
    )
    assert said(*sample(run, "--guidance", "4", "3")) == (
        "mm: error: guidance: guidance lists 2 scales, but the predictor has no experts\n"
        "  accepted: a number\n"
    )
