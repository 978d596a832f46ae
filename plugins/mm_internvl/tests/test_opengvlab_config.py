"""OpenGVLab's layout and that of Transformers: every bit the same, from each into the other."""

from __future__ import annotations

import json
from pathlib import Path

import internvl_runs as runs
import pytest
import torch
from mm_internvl.data.tiling import read_tiling
from mm_internvl.formats import InternVLOriginal
from mm_internvl.opengvlab_config import from_original, to_original
from mm_internvl.testing import make_tiny_checkpoint, make_tiny_conversations
from transformers import AutoConfig, InternVLConfig, InternVLForConditionalGeneration, Qwen3Config

import mm_core
from mm_core.errors import ContractError, MMError
from mm_core.interchange.export import export
from mm_core.interchange.import_weights import import_weights
from mm_core.plan import build_task
from mm_core.weights.formats.libraries import TOKENIZER_FILES
from support.tensors import same, stored

LAYOUTS = ("internvl/original", "core/transformers")


@pytest.fixture(scope="module", params=[0, 4], ids=["dense", "experts"])
def folders(request, tmp_path_factory):
    """The same weights in both layouts, by the format's name."""
    top = tmp_path_factory.mktemp("layouts")
    made = {
        name: make_tiny_checkpoint(top / name.partition("/")[2], experts=request.param, original=not number)
        for number, name in enumerate(LAYOUTS)
    }
    (made["internvl/original"] / "modeling_internvl_chat.py").write_text("raise SystemExit('was run')\n")
    return made


def settings(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def plain(config: InternVLConfig) -> dict:
    """A config without the ranges that only new weights are drawn from."""
    found = config.to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        for part in (found, found["text_config"], found["vision_config"]):
            part.pop(key, None)
    del found["vision_config"]["initializer_range"]
    return found


@pytest.mark.parametrize("given", LAYOUTS)
def test_in_and_out_is_bit_equal_from_each_layout_into_both(folders, given, tmp_path):
    config = runs.config_of(tmp_path, folders[given])
    _, notes = import_weights(config, folders[given])
    assert f"({given})" in notes[0]
    for layout in LAYOUTS:
        out = export(tmp_path / "runs/tuned", tmp_path / layout, layout)
        same(stored(out), stored(folders[layout]))
        for name in TOKENIZER_FILES:
            taken = folders[given] / name
            assert (out / name).is_file() == taken.is_file()
            assert not taken.is_file() or (out / name).read_bytes() == taken.read_bytes()
    out, there = tmp_path / "core/transformers", InternVLForConditionalGeneration
    loaded, info = there.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert loaded.generation_config.eos_token_id == loaded.config.text_config.eos_token_id
    assert plain(loaded.config) == plain(there.from_pretrained(folders["core/transformers"]).config)


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
def test_a_run_that_begins_with_either_layout_is_the_same_run(folders, tmp_path):
    rows = make_tiny_conversations(tmp_path / "digits", rows=12)
    logged = []
    for number, folder in enumerate(folders.values()):
        train = {"steps": 3, "micro_batch_size": 2, "global_batch_size": 4}
        mm_core.train(runs.config_of(tmp_path, folder, rows, name=f"run{number}", train=train))
        lines = (tmp_path / f"runs/run{number}/metrics.jsonl").read_text().splitlines()
        logged.append([(found["loss"], found["grad_norm"]) for found in map(json.loads, lines)])
    assert len(logged[0]) == 3 and logged[0] == logged[1]


def test_an_original_config_comes_out_as_it_was(folders, tmp_path):
    """Also what Transformers has no word for; numbers of the weights' types are those of the files."""
    folder = folders["internvl/original"]
    import_weights(runs.config_of(tmp_path, folder), folder)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "internvl/original")
    found, given = settings(out), settings(folder)
    legacy = ("torch_dtype", "_attn_implementation_autoset", "top_k")
    text = {key: value for key, value in given["llm_config"].items() if key not in legacy}
    assert {key: found["llm_config"][key] for key in text} == text
    seen = {
        key: v for key, v in given["vision_config"].items() if key not in ("torch_dtype", "use_flash_attn")
    }
    assert {key: found["vision_config"][key] for key in seen} == seen
    parts = ("llm_config", "vision_config", "torch_dtype")
    assert {key: found[key] for key in given if key not in parts} == {
        key: value for key, value in given.items() if key not in parts
    }
    assert (out / "modeling_internvl_chat.py").read_bytes() == (
        folder / "modeling_internvl_chat.py"
    ).read_bytes()
    assert "InternVLChatModel.from_pretrained" in (out / "README.md").read_text()


WHOLE = {"dynamic_image_size": False}
BARE = {"use_thumbnail": False, "min_dynamic_patch": 2, "max_dynamic_patch": 6}


@pytest.mark.parametrize("said", [WHOLE, BARE], ids=["whole images", "no thumbnail"])
def test_both_layouts_keep_how_images_are_cut(said, tmp_path):
    """From OpenGVLab's folder into that of Transformers, and from there back."""
    folder = make_tiny_checkpoint(tmp_path / "given", original=True)
    (folder / "config.json").write_text(json.dumps({**settings(folder), **said}))
    (folder / "preprocessor_config.json").write_text('{"size": 56, "crop_size": 56}')  # names no tiles
    given = read_tiling(folder)
    assert given.count(100, 300) == (1 if said is WHOLE else 3)
    for number, (layout, name) in enumerate((("core/transformers", "there"), ("internvl/original", "back"))):
        import_weights(runs.config_of(tmp_path, folder, name=name), folder)
        for also in LAYOUTS:
            assert read_tiling(export(tmp_path / "runs" / name, tmp_path / f"{number}{also}", also)) == given
        folder = tmp_path / f"{number}{layout}"
        assert {key: settings(folder)[key] for key in said} == said
    InternVLForConditionalGeneration.from_pretrained(tmp_path / "1core/transformers")


def test_tiles_of_a_processor_are_those_of_the_original_config(tmp_path):
    folder = make_tiny_checkpoint(tmp_path / "given")
    file = folder / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"max_patches": 12', '"max_patches": 4'))
    import_weights(runs.config_of(tmp_path, folder), folder)
    out = export(tmp_path / "runs/tuned", tmp_path / "out", "internvl/original")
    assert (settings(out)["min_dynamic_patch"], settings(out)["max_dynamic_patch"]) == (1, 4)


def test_an_original_folder_is_read_without_running_its_code(folders):
    from mm_internvl import model  # noqa: F401  makes the type known

    found = AutoConfig.from_pretrained(folders["internvl/original"])
    expected = AutoConfig.from_pretrained(folders["core/transformers"])
    assert type(found) is InternVLConfig
    assert plain(found) == plain(expected)


def test_a_config_converts_there_and_back(folders):
    given = settings(folders["core/transformers"])
    back = from_original(to_original(given), folders["core/transformers"])
    assert plain(InternVLConfig.from_dict(back)) == plain(InternVLConfig.from_dict(given))


def test_options_that_are_not_the_usual_ones_convert_too():
    """Rotary scaling, root mean square norms, normalised queries, a head that is the embedding."""
    scaled = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    ropes = {**scaled, "rope_theta": 5000.0}
    text = {**Qwen3Config().to_dict(), "rope_parameters": ropes, "tie_word_embeddings": True}
    seen = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False, "image_size": [28, 28]}
    given = InternVLConfig(text_config=text, vision_config=seen, tie_word_embeddings=True).to_dict()
    made = to_original(given)
    assert made["llm_config"]["rope_theta"] == 5000.0
    assert made["llm_config"]["rope_scaling"] == scaled
    assert made["llm_config"]["tie_word_embeddings"] and made["vision_config"]["qk_normalization"]
    back = from_original(made)
    assert back["vision_config"] | seen == back["vision_config"]
    assert back["tie_word_embeddings"] and back["text_config"]["tie_word_embeddings"]


def test_experts_are_counted_under_the_published_name(original_experts):
    """`num_experts`, whatever this Transformers calls it: another name leaves OpenGVLab's code at 128."""
    given = settings(original_experts)["llm_config"]
    assert given["num_experts"] == 4 and "num_local_experts" not in given
    found = InternVLConfig.from_dict(from_original(settings(original_experts), original_experts))
    assert found.text_config.num_experts == 4
    made = to_original(plain(found))["llm_config"]
    assert made["num_experts"] == 4 and "num_local_experts" not in made


def test_images_stand_for_as_many_tokens_as_published():
    """448 pixels of 14 a patch, shuffled by 0.5: 256; without a tokenizer the token's published number."""
    given = {
        "llm_config": {"model_type": "qwen3"}, "vision_config": {"image_size": 448, "patch_size": 14},
        "ps_version": "v2", "downsample_ratio": 0.5, "force_image_size": 448,
    }  # fmt: skip
    found = from_original(given)
    assert (found["image_seq_length"], found["image_token_id"]) == (256, 151671)


# -- what cannot be -------------------------------------------------------------------------------


def changed(folder: Path, out: Path, **keys) -> Path:
    out.mkdir()
    (out / "config.json").write_text(json.dumps({**settings(folder), **keys}))
    return out


@pytest.fixture
def original_experts(tmp_path):
    return make_tiny_checkpoint(tmp_path / "experts", experts=4, original=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("original"), original=True)


@pytest.mark.parametrize(
    ("keys", "sentence", "accepted"),
    [
        (
            {"llm_config": {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"]}},
            "this InternVL's language model is InternLM2ForCausalLM, which cannot be converted",
            "Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM",
        ),
        (
            {"ps_version": "v1"},
            "this InternVL has another pixel shuffle: ps_version 'v1'",
            "ps_version v2, as in InternVL 1.5 to 3.5",
        ),
        (
            {"llm_config": None},
            "config.json has the model_type of InternVLChatModel, but no llm_config",
            "config.json of an InternVL, with llm_config and vision_config",
        ),
    ],
)
def test_an_original_that_there_is_no_class_for(original, tmp_path, keys, sentence, accepted):
    folder = changed(original, tmp_path / "other", **keys)
    with pytest.raises(ContractError) as fault:
        build_task(runs.config_of(tmp_path, folder))
    assert (fault.value.what, fault.value.accepted) == (sentence, accepted)
    assert str(folder) in str(fault.value)


def test_a_tokenizer_of_another_model(original, tmp_path):
    folder = changed(original, tmp_path / "other")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    with pytest.raises(ContractError, match="the tokenizer has no <IMG_CONTEXT>, the token for images"):
        build_task(runs.config_of(tmp_path, folder))


def test_a_checkpoint_of_another_architecture(tmp_path):
    folder = tmp_path / "qwen"
    Qwen3Config(architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    with pytest.raises(MMError) as fault:
        build_task(runs.config_of(tmp_path, folder))
    assert fault.value.what == (
        "InternVLForConditionalGeneration cannot build this folder's model, which is of type 'qwen3'"
    )
    assert fault.value.accepted == "an auto class for it, or its own class: Qwen3ForCausalLM"


def test_without_the_plugin_s_class_the_error_for_an_original_folder_has_a_hint(original, tmp_path):
    config = runs.config_of(tmp_path, original, task={"auto_class": "AutoModelForCausalLM"})
    with pytest.raises(MMError, match=r"cannot build (a model from this folder|this folder's model)"):
        build_task(config)


def test_a_vision_tower_that_the_original_class_has_not(original):
    given = from_original(settings(original), original)
    given["vision_config"]["use_mask_token"] = True
    with pytest.raises(ContractError) as fault:
        to_original(given)
    assert fault.value.what == "InternVLChatModel does not support vision_config.use_mask_token True"


def test_other_models_and_adapters_have_no_place_in_the_format():
    assert InternVLOriginal().layout("model", torch.nn.Linear(2, 2)) is None
    assert InternVLOriginal().adapter("model", torch.nn.Linear(2, 2)) is None
    assert not InternVLOriginal().recognises(Path("there is no such folder"))
