"""The plugin's YAMLs: every one checks, the full-size ones are the published models, the tiny ones run."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from importlib import import_module
from math import prod
from pathlib import Path

import pytest
import torch
from mm_internvl.formats import InternVLOriginal
from mm_internvl.presets import PRESETS, write_config
from mm_internvl.testing import make_tiny_checkpoint, make_tiny_conversations
from safetensors.torch import load_file
from transformers import InternVLForConditionalGeneration

import mm_core
from mm_core.cli.main import COMMANDS, main
from mm_core.config.load import load_config
from mm_core.device.torch_private import shards_mixed
from mm_core.errors import ConfigError
from mm_core.interchange.export import export
from mm_core.plan import build_task, make_plan
from mm_core.weights import Transformers

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "plugins/mm_internvl/mm_internvl/configs").glob("*.yaml"))
SIZES = {
    "1b": "internvl3.5-1b",
    "2b": "internvl3.5-2b",
    "8b": "internvl3.5-8b",
    "30b_a3b": "internvl3.5-30b-a3b",
}
KINDS = ("full", "lora", "projector")
TINY = ("tiny", "tiny_moe")
PROJECTOR = "model.model.multi_modal_projector."
FILE = "model.safetensors"


def named(size: str, kind: str) -> str:
    return size if kind == "full" else f"{size}_{kind}"


def config_at(name: str, *overrides: str):
    if not shards_mixed():
        overrides = ("train.base_dtype=null", *overrides)
    return load_config(ROOT / f"configs/internvl/{name}.yaml", list(overrides))


def test_absent_conversations_are_listed_and_wrong_ones_are_an_error(tmp_path, capsys):
    config = str(ROOT / "configs/internvl/tiny.yaml")
    rows = tmp_path / "rows.jsonl"
    override = f"data.train.sources=[{{annotations: {rows}}}]"
    assert main(["validate", config, override]) == 0
    assert f"missing: {rows} (needed to train)" in capsys.readouterr().out
    rows.write_text('{"image": "a.png"}\n')
    assert main(["validate", config, override]) == 1
    assert "neither `conversations` nor `messages`" in capsys.readouterr().err


def test_there_is_one_of_each_kind_and_size_linked_from_the_top():
    names = {named(size, kind) for size in (*SIZES, *TINY) for kind in KINDS}
    assert {path.stem for path in CONFIGS} == names
    assert all((ROOT / "configs/internvl" / path.name).resolve() == path for path in CONFIGS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_checks_and_its_commands_are_such_as_the_program_takes(path):
    config = load_config(path)
    assert config.run.name == f"internvl_{path.stem}"
    assert config.data.train.options["processor"] == config.task.options["from_pretrained"]
    commands = re.findall(r"^#   mm(?:-| )(\w+) (.*)$", path.read_text(), re.MULTILINE)
    for name, rest in commands:
        parser = argparse.ArgumentParser(prog=f"mm {name}", allow_abbrev=False)
        import_module(COMMANDS[name][0]).configure(parser)
        parser.parse_intermixed_args(shlex.split(rest))
    assert "train" in dict(commands)


def test_presets_need_no_torch():
    command = "import sys, mm_internvl.presets; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], check=True)


@pytest.mark.parametrize(
    ("preset", "vision", "projector", "language"),
    [
        ("internvl3.5-1b", 304_012_288, 5_253_120, 751_632_384),
        ("internvl3.5-2b", 304_012_288, 12_595_200, 2_031_739_904),
        ("internvl3.5-8b", 304_012_288, 33_570_816, 8_190_735_360),
        ("internvl3.5-30b-a3b", 304_012_288, 12_595_200, 30_532_122_624),
    ],
)
def test_the_numbers_of_parameters_follow_from_the_published_architectures(
    preset, vision, projector, language
):
    """Written out by hand from config.json of Qwen3 and InternViT, and exact."""
    text = PRESETS[preset].document["text_config"]
    wide, layers, head = text["hidden_size"], text["num_hidden_layers"], text["head_dim"]
    heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
    attention = wide * head * (2 * heads + 2 * kv) + 2 * head
    if "num_experts" in text:
        inner = text["num_experts"] * (3 * wide * text["moe_intermediate_size"] + wide)
    else:
        inner = 3 * wide * text["intermediate_size"]
    assert language == layers * (attention + inner + 2 * wide) + wide + 2 * text["vocab_size"] * wide
    assert projector == 2 * 4096 + (4096 + 1) * wide + (wide + 1) * wide
    block = 4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024 + 2 * 1024
    assert vision == 24 * block + (3 * 14 * 14 + 1) * 1024 + 1024 + (32 * 32 + 1) * 1024


PUBLISHED = {"internvl3.5-1b": 1_060_897_792, "internvl3.5-8b": 8_528_318_464}
"""Elements of the published bf16 tensors. Of OpenGVLab/InternVL3_5-1B-HF at revision 9191dbcc, by the headers
of its file: vision tower 304,012,288, projector 5,253,120, language model 751,632,384. Of
OpenGVLab/InternVL3_5-8B-HF at revision 741a7d03, as the hub's metadata of its files counts them."""

ROUNDED = {"internvl3.5-2b": (2.35e9, 0.005e9), "internvl3.5-30b-a3b": (30.8e9, 0.05e9)}
"""Where no exact number of the whole was found: as the model cards of OpenGVLab/InternVL3_5-* round it."""

INDEXED = {"internvl3.5-8b": 841}
"""Tensors that model.safetensors.index.json of OpenGVLab/InternVL3_5-8B-HF lists."""

LANGUAGE = {
    "internvl3.5-1b": (311, 751_632_384),
    "internvl3.5-2b": (311, 2_031_739_904),
    "internvl3.5-8b": (399, 8_190_735_360),
    "internvl3.5-30b-a3b": (18_867, 61_064_245_248 // 2),
}
"""(tensors, elements) of the language models as Qwen publishes them: by the file headers of Qwen/Qwen3-0.6B
and -1.7B (their head is stored beside the embedding) and the indexes of -8B and -30B-A3B, whose `total_size`
is in bytes of bf16."""


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_full_size_config_plans_the_published_tensors(size, tmp_path):
    preset = SIZES[size]
    folder = write_config(tmp_path / "model", preset)
    with torch.device("meta"):
        class_ = InternVLForConditionalGeneration
        model = class_(class_.config_class.from_pretrained(folder))
    expected = {f"model.{name}": tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    whole = sum(prod(shape) for shape in expected.values())
    if preset in PUBLISHED:
        assert whole == PUBLISHED[preset]
    else:
        assert whole == pytest.approx(ROUNDED[preset][0], abs=ROUNDED[preset][1])
    layers = model.config.text_config.num_hidden_layers
    for kind in KINDS:
        config = config_at(named(size, kind), f"task.from_pretrained={folder}")
        task = build_task(config)
        found = {
            name.replace(".base_layer.", "."): tuple(tensor.shape)
            for name, tensor in task.state_dict().items()
            if ".lora_" not in name
        }
        assert found == expected and all(tensor.is_meta for tensor in task.parameters())
        plan = make_plan(config, 8, task)
        assert len(plan.engine.wrapped) == layers + 24 and set(plan.engine.recomputed) == set(
            plan.engine.wrapped
        )
        trained = {name for name, parameter in task.named_parameters() if parameter.requires_grad}
        counted = plan.modules[0].trained
        assert counted == sum(task.get_parameter(name).numel() for name in trained)
        line = next(line for line in plan.render().splitlines() if " trained " in line)
        if kind == "full":
            assert counted == whole and line.endswith(f"trained  {whole:>15,} parameters")
        else:
            every = sum(parameter.numel() for parameter in task.parameters())
            assert counted < whole <= every
            assert line.endswith(f"trained  {counted:>15,} of {every:,} parameters")
        if kind == "full":
            assert trained == set(dict(task.named_parameters()))
        elif kind == "projector":
            assert trained == {name for name in expected if name.startswith(PROJECTOR)}
            assert counted == sum(prod(shape) for name, shape in expected.items() if name in trained)
        else:
            adapted = {name for name in trained if ".lora_" in name}
            assert trained - adapted == {n for n in expected if n.startswith(PROJECTOR)}
            assert len(adapted) == 2 * layers * (4 if "a3b" in size else 7)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_stored_tensors_are_those_of_the_published_indexes(size, tmp_path):
    folder = write_config(tmp_path / "model", SIZES[size])
    model = build_task(config_at(size, f"task.from_pretrained={folder}")).model
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for layout in (Transformers(), InternVLOriginal()):
        stored = layout.layout("model", model).keys.stored_shapes(shapes)
        language = [prod(shape) for name, shape in stored.items() if "language_model." in name]
        assert (len(language), sum(language)) == LANGUAGE[SIZES[size]]
        assert sum(map(prod, stored.values())) == sum(map(prod, shapes.values()))
        if SIZES[size] in INDEXED and isinstance(layout, Transformers):
            assert len(stored) == INDEXED[SIZES[size]]


def test_the_published_original_files_hold_as_much(tmp_path):
    """Under names and in shapes of OpenGVLab/InternVL3_5-1B."""
    folder = write_config(tmp_path / "model", "internvl3.5-1b")
    model = build_task(config_at("1b", f"task.from_pretrained={folder}")).model
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = InternVLOriginal().layout("model", model).keys.stored_shapes(shapes)
    assert sum(prod(shape) for shape in stored.values()) == 1_060_897_792
    assert stored["vision_model.encoder.layers.23.attn.qkv.weight"] == (3072, 1024)
    assert stored["vision_model.embeddings.position_embedding"] == (1, 1025, 1024)
    assert stored["mlp1.1.weight"] == (1024, 4096) and stored["mlp1.3.bias"] == (1024,)
    assert stored["language_model.model.layers.27.mlp.down_proj.weight"] == (1024, 3072)
    assert stored["language_model.lm_head.weight"] == (151936, 1024)


def test_a_preset_that_there_is_not_and_a_folder_in_use(tmp_path):
    with pytest.raises(ConfigError) as fault:
        write_config(tmp_path, "internvl3.5-9b")
    assert fault.value.what == "unknown preset 'internvl3.5-9b'"
    assert fault.value.accepted == ", ".join(PRESETS)
    write_config(tmp_path, "internvl3.5-1b")
    with pytest.raises(ConfigError, match="this folder already has a"):
        write_config(tmp_path, "internvl3.5-1b")


# -- tiny twins ------------------------------------------------------------------------------------


def trained(name: str, *overrides: str) -> Path:
    """The run's folder after a few steps."""
    fewer = ["train.steps=5", "checkpoint.every=5", "data.loader.workers=0", "lr_schedule.warmup_steps=0"]
    mm_core.train(config_at(name, *fewer, *overrides))
    return Path("runs") / f"internvl_{name}"


@pytest.fixture
def origin(request, tmp_path, monkeypatch):
    """A folder as the first lines of a twin describe it, and the twin's name."""
    monkeypatch.chdir(tmp_path)
    make_tiny_conversations("data/digits")
    folder = config_at(request.param).task.options["from_pretrained"]
    return request.param, make_tiny_checkpoint(folder, experts=4 if "moe" in request.param else 0)


@pytest.mark.parametrize("origin", ["tiny_projector", "tiny_moe_projector"], indirect=True)
def test_what_is_frozen_by_name_stays_and_the_projector_alone_changes(origin, tmp_path):
    name, folder = origin
    out = export(trained(name), tmp_path / "out", "transformers")
    before, after = load_file(folder / FILE), load_file(out / FILE)
    assert before.keys() == after.keys()
    moved = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert moved == {key for key in before if key.startswith("multi_modal_projector.")}
    assert "packed_sdpa" not in (out / "config.json").read_text(), "Transformers elsewhere does not know it"


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["tiny", "tiny_moe"], indirect=True)
def test_a_tiny_twin_trains_in_full_and_comes_out_in_both_layouts(origin, tmp_path):
    name, folder = origin
    run = trained(name)
    out = export(run, tmp_path / "out", "transformers")
    _, info = InternVLForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    before, after = load_file(folder / FILE), load_file(out / FILE)
    # An expert that no token of these steps was sent to stays; nothing else does.
    moved = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert all(".experts." in key for key in before.keys() - moved)
    original = export(run, tmp_path / "original", "internvl/original")
    again = config_at(name, "train.steps=0", f"task.from_pretrained={original}")
    assert build_task(again).model.weights_from.path == str(original)
    assert sum(t.numel() for t in load_file(original / FILE).values()) == sum(
        t.numel() for t in after.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["tiny_lora", "tiny_moe_lora"], indirect=True)
def test_a_tiny_twin_of_a_lora_comes_out_merged(origin, tmp_path):
    name, folder = origin
    run = trained(name)
    merged = export(run, tmp_path / "merged", "transformers", merge_adapters=True)
    before, after = load_file(folder / FILE), load_file(merged / FILE)
    moved = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    inner = ("self_attn.", "mlp.") if name == "tiny_lora" else ("self_attn.",)
    adapted = {
        key
        for key in before
        if key.startswith("language_model.model.layers.")
        and any(f".{part}" in key for part in inner)
        and "_proj." in key
    }
    assert moved == adapted | {key for key in before if key.startswith("multi_modal_projector.")}
    loaded, info = InternVLForConditionalGeneration.from_pretrained(merged, output_loading_info=True)
    assert not any(info.values()) and loaded.config.text_config.num_hidden_layers == 2
