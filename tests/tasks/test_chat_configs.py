"""The core's configs of vision-language models: accepted as they are, and by small twins of their models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mm_core.builtin.configs as package
from mm_core.cli.main import main

CONFIGS = {file.stem: file for file in sorted(Path(package.__file__).parent.glob("*.yaml"))}
TWINS = {
    "qwen2_5_vl_7b": "qwen2_5_vl",
    "qwen3_vl_8b": "qwen3_vl",
    "qwen3_vl_30b_a3b": "qwen3_vl_moe",
    "gemma3_4b": "gemma3",
    "llava_onevision_7b": "llava_onevision",
    "smolvlm2_2_2b": "smolvlm",
}


def test_each_family_has_a_config_in_full_and_as_a_lora() -> None:
    assert {*CONFIGS} == {f"{name}{kind}" for name in TWINS for kind in ("", "_lora")}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_accepted(name, capsys):
    assert main(["validate", str(CONFIGS[name])]) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_small_twin_trains_by_the_config(name, chat_model, chat_rows, tmp_path, mm):
    """The names of modules, packing and attention of the config are those of the class."""
    folder = chat_model(TWINS[name.removesuffix("_lora")])
    source = json.dumps([{"annotations": str(chat_rows), "folder": str(chat_rows.parent)}])
    done = mm(
        *("train", "--config", CONFIGS[name], f"run.dir={tmp_path}", f"task.from_pretrained={folder}"),
        *(f"data.train.sources={source}", "data.train.max_length=1024", "data.loader.workers=0"),
        *("train.steps=1", "train.global_batch_size=2", "log.trackers=[]", "lr_schedule.warmup_steps=0"),
    )
    assert done.code == 0, done.err
    assert "core/transformers" in done.out + done.err
