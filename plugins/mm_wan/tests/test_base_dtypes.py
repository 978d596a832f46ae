"""LoRA on a base in each form, against Diffusers' class with PEFT's layers and quantisers written here."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import gcd
from pathlib import Path

import pytest
import torch
import wan_frames
from diffusers import WanTransformer3DModel
from mm_wan.testing import make_tiny_checkpoint
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.builtin.configs.engines import BaseConfig
from mm_core.contracts import Loss, PredictorInputs, Randomness, torch_dtype
from mm_core.device.torch_private import shards_mixed
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.loading.initial_weights import FileWeights
from mm_core.loading.left_out import WeightSources
from mm_core.modules.shards import local
from mm_core.plan import build_task
from mm_core.runtime.process_group import process_group

pytestmark = pytest.mark.skipif(not shards_mixed(), reason="this torch shards no module of mixed dtypes")

# QLoRA, appendix E (https://arxiv.org/abs/2305.14314).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
NAMES = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")


def quantised(weight: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """A weight of a linear layer in the values of a base in `kind`, as they compute in `dtype`."""
    if kind == "bf16":
        return weight.bfloat16().to(dtype)
    columns = weight.shape[1]
    rows = weight.reshape(-1, gcd(columns, 64) if kind == "nf4" else columns)
    largest = rows.abs().amax(1, keepdim=True)
    scale = (largest / {"int8": 127, "fp8": 448, "nf4": 1}[kind]).bfloat16().float()
    units = rows / scale
    if kind == "int8":
        units = units.round().clamp(-127, 127)
    elif kind == "fp8":
        units = units.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    else:
        levels = torch.tensor(NF4)
        units = levels[(units[..., None] - levels).abs().argmin(-1)]
    return (units.to(dtype) * scale.to(dtype)).reshape(weight.shape)


def theirs(folder: Path, kind: str, dtype: torch.dtype, rank: int, adapter: dict[str, Tensor]) -> nn.Module:
    model = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer")
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            linear = isinstance(module, nn.Linear) and name.startswith("blocks.") and own == "weight"
            parameter.data = quantised(parameter.data, kind if linear else "bf16", dtype)
    wanted = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(NAMES))
    model = inject_adapter_in_model(wanted, model)
    for name, tensor in adapter.items():
        model.get_parameter(name).data = tensor.to(dtype)
    return model


def values(name: str, shape: torch.Size) -> Tensor:
    return Randomness(3).normal(tuple(shape), name) * 0.1


INPUTS = {"latents": (2, 16, 2, 4, 4), "text": (2, 512, 32), "target": (2, 16, 2, 4, 4)}


def ours(config, engine: FSDP2Engine, given: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss of a run's first step by the task's own call, and the adapter's values."""
    task = build_task(config)
    plan = engine.plan(task, 1, 2)
    weights = FileWeights(WeightSources(task, config.init_from, config.registry), config.train.adapters)
    engine.prepare(task, plan, lambda p: torch.optim.SGD(p.values(), lr=0.1), Randomness(0), weights)
    adapter = {}
    for name, parameter in engine.named_parameters():
        if parameter.requires_grad:
            adapter[name.removeprefix("predictor.")] = values(name, parameter.shape)
            local(parameter).data.copy_(adapter[name.removeprefix("predictor.")])

    def compute() -> Loss:
        mask = torch.ones(2, 512, dtype=torch.bool)
        inputs = PredictorInputs(given["latents"], torch.tensor([998.7, 12.5]))
        found = task.predict(inputs, given["text"], mask, None)
        return Loss((found.float() - given["target"]).square().mean(), 1.0)

    return float(engine.micro_step(compute, last=True, scale=1.0).total), adapter


@pytest.mark.parametrize(
    ("computes", "kind"),
    [
        pytest.param(*each, marks=() if each == ("fp16", "nf4") else pytest.mark.slow)
        for each in product(("fp32", "bf16", "fp16"), ("bf16", "int8", "fp8", "nf4"))
    ],
)
def test_a_base_in_any_form_computes_what_diffusers_and_peft_do_at_any_rank_streamed_or_not(
    kind, computes, tmp_path
):
    folder = make_tiny_checkpoint(tmp_path / "wan")
    config = wan_frames.config_at(tmp_path, folder, "t2v")
    given = {name: Randomness(5).normal(shape, name) for name, shape in INPUTS.items()}
    dtype = torch_dtype(computes)
    for rank, stream in product((4, 24), (False, True)):
        adapter = AdapterConfig(targets=("predictor.blocks.{*}",), rank=rank, alpha=2 * rank)
        train = replace(config.train, adapters=(adapter,), base_dtype=kind)
        engine = FSDP2Engine(
            param_dtype=computes, recompute_modules="auto", base=BaseConfig(stream=stream, keep=1)
        )
        with process_group():
            found, held = ours(replace(config, train=train), engine, given)
        model = theirs(folder, kind, dtype, rank, held)
        with torch.no_grad():
            times = torch.tensor([998.7, 12.5])
            latents, text = given["latents"].to(dtype), given["text"].to(dtype)
            (out,) = model(latents, times, text, return_dict=False)
        expected = float((out.float() - given["target"]).square().mean())
        assert found == pytest.approx(expected, rel=1e-6), (rank, stream)
