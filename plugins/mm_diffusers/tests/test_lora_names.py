"""LoRA files for other programs: their names are those that the programs themselves know, as committed lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from mm_diffusers.testing import TINY
from tuned import TunedTask

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.inject import scales_of
from mm_core.weights.adapters.layouts import LoraFormat
from mm_core.weights.adapters.stored_names import module_key
from mm_core.weights.fitting import formats_of
from mm_core.weights.formats.format import of_component

KNOWN: Mapping[str, Mapping[str, list[str]]] = yaml.safe_load(
    Path(__file__).with_name("names_elsewhere.yaml").read_text(encoding="utf-8")
)


def names_of(folder: Path, program: str) -> tuple[str, set[str]]:
    """The class of a pipeline's transformer, and the modules in its LoRA file, without numbers of blocks."""
    model = TunedTask(folder, AdapterConfig("auto", rank=2)).predictor
    form = LoraFormat(f"lora/{program}", formats_of(get_registry()), "lora.safetensors", {})
    (layout,) = of_component(form.adapter("predictor", model))
    keys = [module_key(layout, path) for path in scales_of(model)["default"]]
    bare = {re.sub(r"(blocks|layers|refiner)([._])\d+(?=[._])", r"\1\2{i}", key) for key in keys}
    return type(model.transformer).__name__, bare


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("program", ["comfyui", "kohya"])
def test_every_module_of_a_lora_file_is_one_that_the_program_knows(pipeline_of, kind, program):
    name, found = names_of(pipeline_of(kind), program)
    assert found <= set(KNOWN[name][program])
