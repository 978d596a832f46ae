"""What is wrong with a pipeline's folder or a request is a sentence, before anything is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from mm_diffusers import Encoded, Family
from mm_diffusers.testing.parity import RNG, batch_of, pair_of
from mm_diffusers.text import DiffusersText
from mm_diffusers.transformer import DiffusersTransformer, whole
from mm_diffusers.vae import DiffusersVAE
from safetensors.torch import save_file
from tuned import TunedTask

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.cli.main import main
from mm_core.config.dump import to_mapping, to_yaml
from mm_core.config.load import load_config
from mm_core.errors import MMError
from mm_core.plugin import get_registry
from mm_core.weights.adapters.inject import scales_of

TASK = """
run: {{name: run}}
task: {{type: diffusers, pipeline: {folder}{more}}}
data:
  train: {{type: media_text, sources: [{{annotations: rows.jsonl}}], num_frames: 1, height: 64, width: 64}}
train: {{steps: 1}}
optimizer: {{type: adamw}}
"""


def config_of(place: Path, folder: Path, more: str = ""):
    path = place / "run.yaml"
    path.write_text(TASK.format(folder=folder, more=more), encoding="utf-8")
    return load_config(path)


def faults(place: Path, folder: Path, more: str = "") -> str:
    config = config_of(place, folder, more)
    options = config.task.options["predictor"]
    registered = get_registry().resolve("predictor", options.type)
    return "\n".join(map(str, registered.option_faults(options.options)))


@pytest.fixture
def copied(pipeline_of, tmp_path) -> Path:
    return Path(shutil.copytree(pipeline_of("ZImagePipeline"), tmp_path / "pipeline"))


def test_a_whole_pipeline_has_no_faults_and_fills_in_all_parts(pipeline_of, tmp_path):
    folder = pipeline_of("ZImagePipeline")
    assert faults(tmp_path, folder) == ""
    config = config_of(tmp_path, folder, ", text_encoder: {dtype: fp32}")
    parts = [config.task.options[name] for name in ("predictor", "autoencoder", "text_encoder", "scheduler")]
    assert {part.options["from_pretrained"] for part in parts} == {str(folder)}
    written = to_mapping(config)["task"]
    assert written["text_encoder"] == {"type": "diffusers/text", "dtype": "fp32", "max_length": None}
    assert written["pipeline"] == str(folder)


def test_a_recipe_of_the_predictor_reaches_all_parts_and_is_stored_once(pipeline_of, tmp_path):
    given = ", predictor: {family: {encoded: [{name: a, width: b}], latents: tokens, 'off': {scale: 1}}}"
    config = config_of(tmp_path, pipeline_of("ZImagePipeline"), given)
    options = config.task.options
    parts = [options[name].options for name in ("predictor", "autoencoder", "text_encoder", "scheduler")]
    recipe = Family((Encoded("a", "b"),), latents="tokens", off={"scale": 1})
    assert [part["family"] for part in parts] == [recipe] * 4
    written = to_mapping(config)["task"]
    assert written["predictor"]["family"]["latents"] == "tokens"
    assert "family" not in written["autoencoder"] | written["text_encoder"] | written["scheduler"]
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(again).task == config.task


def test_a_folder_that_is_no_pipeline_of_a_known_family(copied, tmp_path):
    (copied / "model_index.json").write_text(json.dumps({"_class_name": "ChromaPipeline"}))
    assert "'ChromaPipeline', which has no recipe" in (found := faults(tmp_path, copied))
    assert 'write a recipe (the page "Add a Diffusers family")' in found and "QwenImagePipeline" in found
    (copied / "model_index.json").unlink()
    assert "model_index.json is missing" in faults(tmp_path, copied)


def test_a_pipeline_that_is_not_there_yet_is_noted_and_starts_no_run(tmp_path, capsys):
    folder = tmp_path / "nowhere"
    config_of(tmp_path, folder)
    assert main(["validate", str(tmp_path / "run.yaml")]) == 0
    assert f"missing: {folder} (needed to train)" in capsys.readouterr().out
    assert main(["validate", str(tmp_path / "run.yaml"), "--strict"]) == 1
    assert main(["train", "--config", str(tmp_path / "run.yaml"), "--dry-run"]) == 1
    error = capsys.readouterr().err
    assert (
        f"{folder}: this folder does not exist\n  accepted: a folder that Diffusers' save_pretrained" in error
    )


@pytest.mark.filterwarnings("ignore:hub.org/image@v2")
@pytest.mark.parametrize("command", [["train", "--dry-run"], ["cache", "status"]])
def test_a_pipeline_on_the_hub_that_cannot_be_fetched_is_named(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "run.yaml").write_text(TASK.format(folder="hub:org/image@v2", more=""), encoding="utf-8")
    assert main([*command, "--config", str(tmp_path / "run.yaml")]) == 1
    assert capsys.readouterr().err.endswith(
        "mm: error: hub:org/image@v2: it is not in the cache\n"
        "  hint: where there is a network: hf download org/image --revision v2\n"
    )


def test_sizes_that_do_not_divide_are_in_the_plan(pipeline_of, tmp_path, capsys):
    config_of(tmp_path, pipeline_of("ZImagePipeline"))
    command = ["train", "--config", str(tmp_path / "run.yaml"), "--dry-run", "data.train.height=63"]
    assert main(command) == 1
    assert "height 63" in capsys.readouterr().err


def test_a_part_that_is_missing(copied, tmp_path):
    shutil.rmtree(copied / "text_encoder")
    found = faults(tmp_path, copied)
    assert "lists the part `text_encoder`, but there is no such folder" in found


def test_a_part_of_the_index_and_small_files_that_are_missing(copied, tmp_path):
    assert DiffusersText(str(copied)).missing_files() == []
    for path in (copied / "tokenizer").iterdir():
        path.unlink()
    assert DiffusersText(str(copied)).missing_files() == [str(copied / "tokenizer/*.json")]
    (copied / "scheduler/scheduler_config.json").unlink()
    assert "scheduler: scheduler_config.json is missing" in faults(tmp_path, copied)
    index = json.loads((copied / "model_index.json").read_text())
    (copied / "model_index.json").write_text(json.dumps({**index, "vae": [None, None]}))
    assert "model_index.json lists no vae" in faults(tmp_path, copied)


def test_an_index_of_another_pipeline_and_references_are_refused_before_torch_is_loaded(copied, tmp_path):
    more = ", predictor: {references: 1}"
    assert "ZImagePipeline takes no reference pictures" in faults(tmp_path, copied, more)
    index = copied / "model_index.json"
    index.write_text(index.read_text().replace("ZImagePipeline", "FluxPipeline"))
    found = faults(tmp_path, copied)
    assert (
        "ZImageTransformer2DModel: config.json of the transformer has no number 'joint_attention_dim'"
        in found
    )
    assert "cap_feat_dim" in found


def test_a_reference_picture_without_a_patch_is_refused_by_its_size():
    with pytest.raises(MMError, match="a reference picture is 10 high and 40 wide"):
        whole({"references": torch.zeros(1, 3, 1, 10, 40)}, None)


def test_pictures_sizes_and_conditions_that_a_family_does_not_take(pipeline_of):
    folder = str(pipeline_of("ZImagePipeline"))
    with pytest.raises(MMError, match="ZImagePipeline takes no reference pictures"):
        DiffusersTransformer(folder, references=2)
    for kind in ("FluxKontextPipeline", "QwenImageEditPipeline"):
        with pytest.raises(MMError, match=f"{kind} takes one reference picture"):
            DiffusersTransformer(str(pipeline_of(kind)), references=2)
    with pytest.raises(MMError, match="height 63"):
        DiffusersVAE(folder).latent_shape(1, 63, 64)
    with pytest.raises(MMError, match="num_frames 5"):
        DiffusersVAE(folder).latent_shape(5, 64, 64)
    with pytest.raises(
        MMError, match="accepted: num_frames 1 more than a multiple of 8, height a multiple of 32"
    ):
        DiffusersVAE(str(pipeline_of("LTXPipeline"))).latent_shape(8, 64, 64)


def test_pictures_to_edit_that_are_missing_too_many_or_of_mixed_sizes(pipeline_of):
    pair = pair_of("QwenImageEditPlusPipeline", pipeline_of("QwenImageEditPlusPipeline"), 2)
    (one, other), *_ = pair.references
    with pytest.raises(MMError, match="'a dog' has no reference picture, and QwenImageEditPlus"):
        pair.sampled(2, captions=["a cat", "a dog"], references=((one,), ()))
    with pytest.raises(MMError, match="3 pictures of `references`"):
        pair.sampled(2, captions=["a cat"], references=((one,) * 3,))
    for second in ((one, one), (other,)):
        with pytest.raises(MMError, match="batch have reference pictures of other numbers or sizes"):
            pair.sampled(2, captions=["a cat", "a dog"], references=((one,), second))
    (found,) = pair.sampled(2, captions=["a cat"], references=((one,),))
    assert found.isfinite().all()
    with pytest.raises(MMError, match="reads the field `references`, which is not given"):
        pair.task.prepare(batch_of(torch.zeros(1, 3, 1, 64, 96), ["a cat"]), RNG)


def test_a_component_without_a_folder_or_with_a_damaged_config(copied, tmp_path):
    registered = get_registry().resolve("predictor", "diffusers/transformer")
    (fault,) = registered.option_faults({"from_pretrained": None, "references": 0})
    assert "has no from_pretrained, and the task names no pipeline" in str(fault)
    (copied / "transformer/config.json").write_text(json.dumps({"dim": "wide"}))
    with pytest.raises(MMError, match="no transformer can be built"):
        DiffusersTransformer(str(copied))


def test_a_lora_of_another_family_is_refused_with_its_modules(pipeline_of, tmp_path):
    model = TunedTask(pipeline_of("FluxPipeline"), AdapterConfig("auto", rank=2)).predictor
    names = list(scales_of(model)["default"])
    sides = {"lora_A": (2, 4), "lora_B": (4, 2)}
    file = tmp_path / "flux.safetensors"
    save_file(
        {f"{name}.{side}.weight": torch.zeros(size) for name in names for side, size in sides.items()}, file
    )
    with pytest.raises(MMError) as caught:
        TunedTask(pipeline_of("ZImagePipeline"), AdapterConfig(from_=str(file)))
    assert "17 of the 17 modules in this adapter match no linear layer of predictor" in str(caught.value)
    assert "transformer_blocks.0.attn.to_q" in str(caught.value)
    assert "the adapter is for a different model" in str(caught.value)
    with pytest.raises(MMError, match="the adapter is for a different model"):
        TunedTask(pipeline_of("QwenImagePipeline"), AdapterConfig(from_=str(file)))
