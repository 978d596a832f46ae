"""Each layout of LoRA files, kind and choice of ranks, loaded by the other library's own loader: every weight
changes as in the run, and no key of the file is left over."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path

import expert_runs
import peft
import pytest
import torch
import wan_frames
import yaml
from diffusers import WanPipeline, WanTransformer3DModel
from lora_in_comfyui import applied
from lycoris import wrapper
from mm_wan.formats import ORIGINAL_KEYS
from safetensors.torch import load_file
from torch import Tensor, nn

from mm_core.config.load import load_config
from mm_core.errors import ContractError
from mm_core.interchange.lora import export_lora
from mm_core.modules.adapter_layers import adapted_layers
from support import runs

VARIANTS = {  # part of the predictor -> folder in the pipeline
    "t2v": {"": "transformer"},
    "i2v": {"": "transformer"},
    "t2v_high_low": expert_runs.PARTS,
}
KINDS = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "lokr": {"kind": "lokr"},
    "loha": {"kind": "loha"},
}
RANKS = {
    "one rank": {"rank": 2, "alpha": 3.0},
    "patterns": {"rank": 2, "alpha": 1.0, "ranks": {"to_q": 1, "attn2.to_k": 1}, "alphas": {"to_v": 5.0}},
}
CORE = [("t2v", kind, "patterns") for kind in KINDS]
CORE += [("i2v", "lora", "patterns"), ("t2v_high_low", "loha", "one rank")]
REST = [case for case in itertools.product(VARIANTS, KINDS, RANKS) if case not in CORE]
Changes = Mapping[str, Tensor]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Makes each variant's pipeline once."""
    made: dict[str, Path] = {}

    def base(variant: str) -> Path:
        if variant not in made:
            make = expert_runs.pair_at if "high" in variant else wan_frames.checkpoint_at
            made[variant] = make(tmp_path_factory.mktemp("base") / variant, variant)
        return made[variant]

    return base


def trained(base: Path, top: Path, variant: str, adapter: dict) -> nn.Module:
    """The task of a run in `top` that trained an adapter of all blocks, and of the image embedder."""
    document = wan_frames.document(top, base, variant)
    targets = ["predictor"] if variant == "i2v" else ["to_q", "to_k", "to_v", "to_out.0", "ffn"]
    document["train"] = {"epochs": 1, "adapters": [{"targets": targets, **adapter}]}
    (top / "run.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return runs.trained(load_config(top / "run.yaml"), base)


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The change of each weight by PEFT's layers in a model, in float64."""
    model, found = copy.deepcopy(model).double(), {}
    for path, layer in adapted_layers(model).items():
        before = layer.base_layer.weight.detach().clone()
        layer.merge()
        found[path.removeprefix("base_model.model.")] = layer.base_layer.weight.detach() - before
    return found


def agree(found: Changes, expected: Changes) -> None:
    """The same weights change, each within 1e-6 of its largest change."""
    assert found.keys() == expected.keys()
    for name, change in expected.items():
        assert change.abs().max() > 1e-3, name
        assert float((found[name] - change).abs().max() / change.abs().max()) < 1e-6, name


def in_diffusers(base: WanTransformer3DModel, file: Path) -> Changes:
    pipeline = WanPipeline(None, None, None, None, transformer=copy.deepcopy(base))
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    return merged(pipeline.transformer)


def in_peft(base: WanTransformer3DModel, folder: Path) -> Changes:
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)
    assert (
        peft.get_peft_model_state_dict(model).keys() == load_file(folder / "adapter_model.safetensors").keys()
    )
    return merged(model)


def in_lycoris(base: WanTransformer3DModel, file: Path, monkeypatch) -> Changes:
    """LyCORIS's loader, for linear layers with the names of Wan's publisher."""
    monkeypatch.setattr(wrapper.LycorisNetwork, "LORA_PREFIX", "lora_unet")
    tree, names = nn.Module(), {}
    for name, layer in base.named_modules():
        if isinstance(layer, nn.Linear):
            above = tree
            *path, last = ORIGINAL_KEYS.renamed(f"{name}.weight").removesuffix(".weight").split(".")
            for step in path:
                if step not in above._modules:
                    above.add_module(step, nn.Module())
                above = above._modules[step]
            above.add_module(last, copy.deepcopy(layer))
            names[name] = above._modules[last]
    network, _ = wrapper.create_lycoris_from_weights(1.0, str(file), tree.double())
    held = {key.split(".")[0] for key in load_file(file)}
    assert len(network.loras) == len(held)
    network.double().apply_to()
    changes = {}
    for name, layer in names.items():  # not by `merge_to`: that of 4.1 scales a LoKr or LoHa twice
        with torch.no_grad():
            columns = layer(torch.eye(layer.in_features, dtype=torch.float64)) - layer.bias
        changes[name] = columns.T - layer.weight.detach()
    return {name: change for name, change in changes.items() if change.abs().max() > 1e-9}


def in_comfyui(base: WanTransformer3DModel, file: Path) -> Changes:
    state = {ORIGINAL_KEYS.renamed(name): t.detach() for name, t in base.named_parameters()}
    after = applied(state, load_file(file))
    names = {ORIGINAL_KEYS.renamed(name): name for name, _ in base.named_parameters()}
    assert all(name.endswith(".weight") for name in after)
    return {names[name].removesuffix(".weight"): after[name] - state[name].double() for name in after}


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "kind", "ranks"), REST)
@pytest.mark.filterwarnings("error:Found missing adapter keys")
def test_all_other_kinds_and_ranks_of_all_models_too(variant, kind, ranks, bases, tmp_path, monkeypatch):
    check_layouts(variant, kind, ranks, bases, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("variant", "kind", "ranks"),
    [pytest.param(*case, marks=() if case[1] == "dora" else pytest.mark.slow) for case in CORE],
)
@pytest.mark.filterwarnings("error:Found missing adapter keys")
def test_every_layout_changes_each_weight_elsewhere_as_here(
    variant, kind, ranks, bases, tmp_path, monkeypatch
):
    check_layouts(variant, kind, ranks, bases, tmp_path, monkeypatch)


def check_layouts(variant: str, kind: str, ranks: str, bases, tmp_path: Path, monkeypatch) -> None:
    """Exports a trained adapter in every layout, and loads each file by the library that it is for."""
    origin = bases(variant)
    task = trained(origin, tmp_path, variant, KINDS[kind] | RANKS[ranks])
    run = tmp_path / "runs" / variant
    for part, folder in VARIANTS[variant].items():
        base = WanTransformer3DModel.from_pretrained(origin / folder)
        expected = merged(task.predictor.get_submodule(part))
        end = f"_{part}" if part else ""

        def file(label: str, end: str = end) -> Path:
            stem = tmp_path / label.replace("/", "-")
            if not (done := stem.with_name(f"{stem.name}{end}.safetensors")).exists():
                export_lora(run, stem.with_suffix(".safetensors"), label)
            return done

        agree(in_comfyui(base, file("lora/comfyui")), expected)
        if kind in ("lora", "rslora", "dora"):
            agree(in_diffusers(base, file("lora/diffusers")), expected)
        if kind in ("lora", "rslora") and variant != "i2v":  # Diffusers reads alphas of the blocks only
            agree(in_diffusers(base, file("lora/comfyui")), expected)
            agree(in_diffusers(base, file("lora/kohya")), expected)
        if kind == "dora":
            with pytest.raises(ContractError, match="is a DoRA, which this layout does not store"):
                file("lora/kohya")
        else:
            agree(in_lycoris(base, file("lora/kohya"), monkeypatch), expected)
        if not (tmp_path / "peft").exists():
            export_lora(run, tmp_path / "peft", "lora/peft")
        agree(in_peft(base, tmp_path / "peft" / part), expected)
