"""Key lists of published Wan LoRAs, from users' logs: each is recognised and fits, with nothing left over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import wan_runs
from mm_wan.formats import ORIGINAL_KEYS
from mm_wan.predictor.transformer import WanTransformer
from safetensors.torch import load_file, save_file
from torch import nn

from mm_core.errors import CheckpointError, MMError, PlanError
from mm_core.interchange.export import export
from mm_core.interchange.import_weights import import_weights
from mm_core.modules.adapter_layers import base_name
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.inject import linear_layers
from mm_core.weights.adapters.locate import locate
from mm_core.weights.fitting import formats_of
from support.runs import load_task

LISTS = json.loads(Path(__file__).with_name("published_lora_keys.json").read_text())
SIZES = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
SIZES |= {"text_dim": 16, "freq_dim": 16, "ffn_dim": 40, "rope_max_seq_len": 32}
SIZES |= {"image_dim": 8, "added_kv_proj_dim": 24, "num_layers": 40}
PREFIXES = ("diffusion_model.", "lora_unet__", "lora_unet_", "pipe.dit.")
ENDS = {"diff": "weight", "diff_b": "bias", "diff_m": "modulation"}


class Task(nn.Module):
    trainable, frozen = ("predictor",), ()

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.predictor = WanTransformer(**SIZES)


@pytest.fixture(scope="module")
def task() -> Task:
    return Task()


def shapes_of(model: nn.Module, names: list[str]) -> dict[str, list[int]]:
    """The shape of each named tensor for this model, rank 2."""
    own = {ORIGINAL_KEYS.renamed(name): list(p.shape) for name, p in model.named_parameters()}
    flat = {name.replace(".", "_"): shape for name, shape in own.items()}
    found = {}
    for name in names:
        bare = next(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix))
        module, part = bare.removesuffix(".weight").removesuffix(".default").rsplit(".", 1)
        shape = flat[f"{module}.{ENDS.get(part, 'weight')}".replace(".", "_")]
        found[name] = (
            [] if part == "alpha" else shape if part in ENDS
            else [2, shape[1]] if part in ("lora_A", "lora_down") else [shape[0], 2]
        )  # fmt: skip
    return found


@pytest.mark.parametrize("kind", LISTS)
def test_a_published_list_of_keys_is_recognised_and_fits(kind, task, tmp_path):
    names = LISTS[kind]["names"]
    tensors = {name: torch.ones(shape) for name, shape in shapes_of(task.predictor, names).items()}
    path = tmp_path / "published.safetensors"
    save_file(tensors, path)
    linear = {"predictor": linear_layers(task.predictor)}
    found = locate(task, str(path), linear, formats_of(get_registry(())))
    read = {key for file, _ in found.modules.values() for key in file.keys.values()}
    read |= {key for _, key in found.added.values()} | {name for name in names if name.endswith("alpha")}
    assert read == set(names)
    assert all(ORIGINAL_KEYS.renamed(f"{module}.weight") for module in found.modules)


# -- additions -----------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path):
    """A tiny pipeline, and a file with a LoRA and additions to a bias, a norm and a modulation."""
    from diffusers import WanTransformer3DModel

    tiny = {key: SIZES[key] for key in ("num_attention_heads", "attention_head_dim", "freq_dim", "ffn_dim")}
    torch.manual_seed(4)
    model = WanTransformer3DModel(
        **tiny, **wan_runs.CHANNELS, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32
    )
    pipeline = wan_runs.pipeline_at(tmp_path / "wan", model)
    names = ["self_attn.q.lora_down.weight", "self_attn.q.lora_up.weight", "self_attn.q.diff_b"]
    names += ["self_attn.norm_q.diff", "diff_m"]
    names = [f"diffusion_model.blocks.0.{name}" for name in names]
    generator = torch.Generator().manual_seed(1)
    shapes = shapes_of(model, names)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "file.safetensors")
    train = {"epochs": 1, "adapters": [{"from": str(tmp_path / "file.safetensors")}]}
    config = wan_runs.config_of(
        tmp_path, {"from_pretrained": str(pipeline)}, "more", train=train, checkpoint={"frozen": False}
    )
    return config, pipeline, model, tensors


@pytest.mark.slow
def test_additions_change_the_base_and_stay_in_checkpoints(begun, tmp_path):
    config, pipeline, model, tensors = begun
    saved, _ = import_weights(config, pipeline)
    task = load_task(config, saved, "model")
    state = {base_name(name): p.detach() for name, p in task.predictor.named_parameters()}
    added = {"attn1.to_q.bias": "self_attn.q.diff_b", "attn1.norm_q.weight": "self_attn.norm_q.diff",
             "scale_shift_table": "diff_m"}  # fmt: skip
    added = {f"blocks.0.{name}": tensors[f"diffusion_model.blocks.0.{key}"] for name, key in added.items()}
    for name, tensor in model.named_parameters():
        assert torch.equal(state[name], tensor + added.get(name, 0)), name
    with pytest.raises(MMError, match="also adds to 3 weights of the base, such as predictor"):
        export(saved, tmp_path / "out", "wan/diffusers")
    merged = export(saved, tmp_path / "merged", "wan/diffusers", merge_adapters=True)
    (file,) = merged.glob("transformer/*.safetensors")
    name = "blocks.0.attn1.to_q.bias"
    assert torch.equal(load_file(file)[name], state[name])


@pytest.mark.slow
def test_additions_of_another_shape_are_named(begun, tmp_path):
    config, pipeline, _, tensors = begun
    name = "diffusion_model.patch_embedding.diff"
    save_file(tensors | {name: torch.ones(24, 99, 1, 2, 2)}, tmp_path / "file.safetensors")
    with pytest.raises(CheckpointError, match="1 full tensor of another shape or form") as fault:
        import_weights(config, pipeline)
    assert name in str(fault.value)


@pytest.mark.slow
def test_a_file_of_additions_alone_begins_a_run_that_trains_something_else(begun, tmp_path):
    config, pipeline, model, tensors = begun
    own = {name: t for name, t in tensors.items() if "lora_" not in name}
    save_file(own, tmp_path / "file.safetensors")
    with pytest.raises(PlanError, match="no parameter is trained: the files of this run's adapters only add"):
        import_weights(config, pipeline)
    adapters = [{"from": str(tmp_path / "file.safetensors")}, {"name": "mine", "targets": ["to_q"]}]
    train = {"epochs": 1, "adapters": adapters}
    config = wan_runs.config_of(
        tmp_path, {"from_pretrained": str(pipeline)}, "both", train=train, checkpoint={"frozen": False}
    )
    saved, _ = import_weights(config, pipeline)
    table = load_task(config, saved, "model").predictor.blocks[0].scale_shift_table
    name = "diffusion_model.blocks.0.diff_m"
    assert torch.equal(table, model.blocks[0].scale_shift_table + own[name])
