"""The plugin's YAMLs: every one checks and plans the published model, by its parameters."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mm_diffusers.transformer import DiffusersTransformer

from mm_core.cli.main import COMMANDS
from mm_core.config.load import load_config
from mm_core.device.torch_private import shards_mixed
from mm_core.plan import build_task, make_plan
from support.pages import ROOT

CONFIGS = sorted((ROOT / "plugins/mm_diffusers/mm_diffusers/configs").glob("*.yaml"))
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())
"""Stem of a config -> class of the pipeline; elements of all tensors of the published transformer; source;
class and config.json of transformer and autoencoder as published; classes of text encoders."""


def published_folder(name: str, folder: Path) -> Path:
    """The small files of a published pipeline."""
    facts = PUBLISHED[name]
    scheduler = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    index = {"_class_name": facts["pipeline"], "scheduler": scheduler}
    if facts["pipeline"].startswith("HunyuanVideo15"):
        index["guider"] = ["diffusers", "ClassifierFreeGuidance"]
        (folder / "guider").mkdir(parents=True)
    for part in ("transformer", "vae"):
        kind, config = facts[part]
        index[part] = ["diffusers", kind]
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps({"_class_name": kind, **config}))
    for part, kind in facts["encoders"].items():
        for each in (part, part.replace("text_encoder", "tokenizer")):
            index[each] = ["transformers", kind]
            (folder / each).mkdir(exist_ok=True)
    (folder / "scheduler").mkdir()
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps({"_class_name": scheduler[1]}))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_each_published_size_has_a_config_of_both_kinds():
    assert {path.stem for path in CONFIGS} == {name + more for name in PUBLISHED for more in ("", "_lora")}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_checks_is_linked_and_its_commands_are_such_as_the_program_takes(path):
    assert (ROOT / "configs/diffusers" / path.name).resolve() == path
    config = load_config(path)
    assert config.run.name == f"diffusers_{path.stem}"
    commands = re.findall(r"^#   mm(?:-| )(\w+) (.*)$", path.read_text(), re.MULTILINE)
    for name, rest in commands:
        parser = argparse.ArgumentParser(prog=f"mm {name}", allow_abbrev=False)
        import_module(COMMANDS[name][0]).configure(parser)
        found = parser.parse_args(shlex.split(rest))
        own = getattr(found, "config", None) or getattr(found, "run", None)
        assert own in (f"configs/diffusers/{path.name}", f"runs/{config.run.name}")
    assert [name for name, _ in commands] == ["cache", "train", "sample", "export"]


SLOW = {"sd3_5_medium": pytest.mark.slow}  # its table of positions has 226 million elements


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in PUBLISHED])
def test_elements_are_as_many_as_published(name, tmp_path):
    with torch.device("meta"):
        model = DiffusersTransformer(str(published_folder(name, tmp_path / "pipeline")))
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == PUBLISHED[name]["elements"]


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_plans_the_published_model(path, tmp_path):
    """All repeated blocks are wrapped and recomputed, and a LoRA is in each of them."""
    name = path.stem.removesuffix("_lora")
    changes = [f"task.pipeline={published_folder(name, tmp_path / 'pipeline')}"]
    if path.stem.endswith("_lora") and not shards_mixed():
        changes.append("train.base_dtype=null")
    config = load_config(path, changes)
    task = build_task(config)
    plan = make_plan(config, 8, task)
    parameters = {f"predictor.{name}": each for name, each in task.predictor.named_parameters()}
    blocks = {name for name in plan.engine.wrapped if name[-1].isdigit()}
    inside = {name: next((b for b in blocks if name.startswith(f"{b}.")), "") for name in parameters}
    assert blocks <= set(plan.engine.recomputed)  # embedders and last layers of some classes are too
    size = sum(each.numel() for each in parameters.values())
    assert sum(each.numel() for name, each in parameters.items() if inside[name]) > 0.9 * size
    added = {name for name in parameters if ".lora_" in name}
    trained = {name for name, each in parameters.items() if each.requires_grad}
    assert trained == (added or set(parameters))
    assert not config.train.adapters or {inside[name] for name in added} == blocks
