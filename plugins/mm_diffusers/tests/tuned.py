"""A transformer with an adapter, and what a LoRA file changes in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import yaml
from mm_diffusers.folder import PipelineFolder
from mm_diffusers.transformer import DiffusersTransformer
from safetensors.torch import load_file
from torch import Tensor, nn

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.interchange.lora import export_lora
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.inject import add_adapters, linear_layers
from mm_core.weights.adapters.locate import locate
from mm_core.weights.fitting import formats_of

KNOWN: Mapping[str, Mapping[str, list[str]]] = yaml.safe_load(
    Path(__file__).with_name("names_elsewhere.yaml").read_text(encoding="utf-8")
)
"""Classes -> program -> the names of modules that it knows."""


SMALL = {1024**2: 64**2, 384**2: 32**2}
"""Areas of reference pictures -> those of tests."""


class TunedTask(nn.Module):
    """As much of a task as `add_adapters` reads.

    Args:
        folder: the pipeline.
        adapter: what the transformer gets.
    """

    trainable, frozen = ("predictor",), ()

    def __init__(self, folder: Path, adapter: AdapterConfig) -> None:
        super().__init__()
        with torch.device("meta"):
            self.predictor = DiffusersTransformer(str(folder))
        add_adapters(self, [adapter], formats_of(get_registry()))


def changes(folder: Path, file: Path) -> dict[str, Tensor]:
    """What a LoRA file adds to the weights of a pipeline's transformer: module -> change [out, in]."""
    task = nn.Module()
    with torch.device("meta"):
        task.predictor = DiffusersTransformer(str(folder))
    linear = {"predictor": linear_layers(task.predictor)}
    found = locate(task, str(file), linear, formats_of(get_registry())).modules
    return {
        name: held.scales[key].factor * held.read(key, "lora_B") @ held.read(key, "lora_A")
        for name, (held, key) in found.items()
    }


def without_numbers(modules: Iterable[str]) -> set[str]:
    """Names of modules with {i} for the number of a block, as in `KNOWN`."""
    return {re.sub(r"(blocks|layers|refiner)([._])\d+(?=[._])", r"\1\2{i}", name) for name in modules}


def check_elsewhere(run: Path, folder: Path, file: Path) -> None:
    """Exports a run's LoRA for other programs: they know every module, and it comes back as it is in `file`.

    Args:
        run: with a LoRA.
        folder: its pipeline.
        file: the LoRA as Diffusers loads it.
    """
    expected = changes(folder, file)
    for program, names in KNOWN[PipelineFolder(folder).parts["transformer"][1]].items():
        (other,) = export_lora(run, file.with_name(f"{program}.safetensors"), f"lora/{program}")
        modules = {re.sub(r"\.(lora_\w+\.weight|alpha)\Z", "", key) for key in load_file(other)}
        assert without_numbers(modules) <= {*names}
        found = changes(folder, other)
        assert found.keys() == expected.keys()
        assert all((found[name] - expected[name]).abs().max() <= 1e-6 for name in expected)
