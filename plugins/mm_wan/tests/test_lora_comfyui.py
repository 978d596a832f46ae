"""What ComfyUI applies of a file beside plain factors changes the weights here as it does there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import wan_frames
import yaml
from diffusers import WanTransformer3DModel
from lora_in_comfyui import applied
from mm_wan.formats import ORIGINAL_KEYS
from safetensors.torch import load_file, save_file
from test_lora_names import Task, theirs
from torch import Tensor

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.config.load import load_config
from mm_core.errors import CheckpointError, MMError
from mm_core.interchange.import_weights import import_weights
from mm_core.interchange.lora import export_lora
from mm_core.modules.adapter_layers import adapted_layers, adapter_of, base_name
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters.inject import AdapterWeights
from mm_core.weights.fitting import formats_of
from support import runs
from support.runs import load_task
from support.tensors import close

Q, OUT, UP = "blocks.0.attn1.to_q", "blocks.1.attn2.to_out.0", "blocks.1.ffn.net.0.proj"


def comfyui(weight: Tensor, change: Tensor, dora_scale: Tensor | None = None) -> Tensor:
    """A weight with an adapter's change in ComfyUI: weight_decompose of comfy/weight_adapter/base.py (commit
    9c0cf36 of 2025) divides by the row lengths of the weight without the change."""
    changed = weight.double() + change.double()
    if dora_scale is None:
        return changed
    return changed * (dora_scale.double() / weight.double().norm(dim=1, keepdim=True))


@pytest.fixture(scope="module")
def before() -> dict[str, Tensor]:
    """The base: its tensors by name."""
    return {name: tensor.detach() for name, tensor in Task().predictor.named_parameters()}


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def pair(shape: torch.Size, module: str, rank: int = 3) -> dict[str, Tensor]:
    """The two factors of a module, by their names in ComfyUI's files."""
    down, up = random(rank, *shape[1:]), random(shape[0], rank, *([1] * (len(shape) - 2)), seed=2)
    return {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}


def read(
    folder: Path, tensors: dict[str, Tensor], train: str | None = None, start="diffusion_model."
) -> Task:
    """A task that starts from such a file."""
    save_file({f"{start}{name}": t.contiguous() for name, t in tensors.items()}, folder / "a.safetensors")
    return Task(folder / "a.safetensors", train)


def after(task: Task) -> dict[str, Tensor]:
    """The tensors with all adapters merged, by their names in the base."""
    layers = adapted_layers(task.predictor)
    for layer in layers.values():
        layer.merge()
    names = dict(task.predictor.named_parameters())
    return {base_name(name): t.detach() for name, t in names.items() if adapter_of(name) is None}


def near(found: Tensor, expected: Tensor, weight: Tensor) -> None:
    """The changes of a weight agree within 1e-6 of the largest."""
    largest = (expected - weight.double()).abs().max().clamp(1e-3)
    assert float((found.double() - expected).abs().max() / largest) < 1e-6


def notes(folder: Path, task: Task) -> str:
    adapters = [AdapterConfig(from_=str(folder / "a.safetensors"))]
    return "\n".join(AdapterWeights(task, adapters, formats_of(get_registry(()))).notes)


@pytest.mark.parametrize("alpha", [None, 6.0])
def test_a_dora_of_comfyui_is_read_by_rows(alpha, before, tmp_path):
    tensors = {}
    for module in (Q, UP):
        weight = before[f"{module}.weight"]
        tensors |= pair(weight.shape, theirs(module))
        tensors[f"{theirs(module)}.dora_scale"] = 1 + random(len(weight), 1, seed=4).abs()
        if alpha is not None:
            tensors[f"{theirs(module)}.alpha"] = torch.tensor(alpha)
    merged = after(read(tmp_path, tensors))
    for module in (Q, UP):
        down, up, scale = (
            tensors[f"{theirs(module)}.{part}"] for part in ("lora_A.weight", "lora_B.weight", "dora_scale")
        )
        weight = before[f"{module}.weight"]
        expected = comfyui(weight, up.double() @ down.double() * (1 if alpha is None else alpha / 3), scale)
        near(merged[f"{module}.weight"], expected, weight)


def test_a_file_may_have_a_dora_of_some_modules_only(before, tmp_path):
    tensors = pair(before[f"{UP}.weight"].shape, theirs(UP)) | pair(before[f"{Q}.weight"].shape, theirs(Q))
    tensors[f"{theirs(Q)}.dora_scale"] = scale = 1 + random(24, 1).abs()
    merged = after(read(tmp_path, tensors))
    for module, lengths in ((Q, scale), (UP, None)):
        down, up = (tensors[f"{theirs(module)}.lora_{end}.weight"].double() for end in "AB")
        weight = before[f"{module}.weight"]
        near(merged[f"{module}.weight"], comfyui(weight, up @ down, lengths), weight)


@pytest.mark.parametrize("ending", ["", ".hada", ".lokr"])
def test_a_dora_by_columns_or_of_another_kind_or_of_lycoris_is_named(ending, before, tmp_path):
    tensors = pair(before[f"{Q}.weight"].shape, theirs(Q))
    scale, start = torch.ones(1, 24), "diffusion_model."
    if ending == ".hada":
        tensors = {f"{theirs(Q)}.hada_w{n}_{end}": torch.ones(24, 24) for n in "12" for end in "ab"}
        scale = torch.ones(24, 1)
    name = f"{theirs(Q)}.dora_scale"
    if ending == ".lokr":  # LyCORIS means m itself
        start, scale = "lora_unet_", torch.ones(24, 1)
        tensors = {k.replace(".", "_", 3): t for k, t in tensors.items()}
        name = name.replace(".", "_", 3)
    with pytest.raises(CheckpointError, match="dora_scale") as fault:
        read(tmp_path, tensors | {name: scale}, start=start)
    assert "this is not a LoRA of linear layers: it contains" in str(fault.value)


ADDITIONS = {
    "blocks.0.modulation.diff": "blocks.0.scale_shift_table",
    "head.modulation.diff": "scale_shift_table",
    "blocks.1.self_attn.norm_q.diff": "blocks.1.attn1.norm_q.weight",
    "blocks.1.self_attn.norm_k.w_norm": "blocks.1.attn1.norm_k.weight",
    "patch_embedding.diff_b": "patch_embedding.bias",
    "blocks.1.ffn.0.diff": f"{UP}.weight",
    "blocks.1.ffn.0.bias.diff": f"{UP}.bias",
}
"""Names in ComfyUI -> the tensors that they add to."""


@pytest.mark.parametrize("start", ["diffusion_model.", "lora_unet_"])
def test_a_file_of_additions_alone_changes_the_base(start, before, tmp_path):
    tensors = {name: random(*before[own].shape) for name, own in ADDITIONS.items()}
    if start == "lora_unet_":
        tensors = {
            n.rpartition(".")[0].replace(".", "_") + "." + n.rpartition(".")[2]: t for n, t in tensors.items()
        }
        del tensors["blocks_1_ffn_0_bias.diff"]
    task = read(tmp_path, tensors, start=start)
    assert not adapted_layers(task.predictor)
    changes = dict(zip(ADDITIONS.values(), tensors.values(), strict=False))
    for name, tensor in after(task).items():
        assert torch.equal(tensor, before[name] + changes.get(name, 0)), name


@pytest.mark.parametrize("alpha", [None, 6.0])
def test_a_lora_of_the_patch_embedding_is_added_to_the_base(alpha, before, tmp_path):
    weight = before["patch_embedding.weight"]
    tensors = pair(weight.shape, "patch_embedding") | pair(before[f"{Q}.weight"].shape, theirs(Q))
    if alpha is not None:
        tensors["patch_embedding.alpha"] = torch.tensor(alpha)
    task = read(tmp_path, tensors)
    assert list(adapted_layers(task.predictor)) == [Q]
    down, up = (tensors[f"patch_embedding.lora_{end}.weight"].double().flatten(1) for end in "AB")
    change = (up @ down).reshape(weight.shape) * (1 if alpha is None else alpha / 3)
    near(after(task)["patch_embedding.weight"], comfyui(weight, change), weight)
    wrong = tensors | {"patch_embedding.lora_A.weight": random(3, 4, 1, 2, 3)}
    with pytest.raises(CheckpointError, match="1 full tensor of another shape or form"):
        read(tmp_path, wrong)


def test_a_diff_replaces_the_lora_of_the_same_weight_and_says_so(before, tmp_path):
    tensors = pair(before[f"{Q}.weight"].shape, theirs(Q)) | pair(before[f"{UP}.weight"].shape, theirs(UP))
    tensors |= {f"{theirs(Q)}.diff": random(24, 24, seed=7), f"{theirs(Q)}.alpha": torch.tensor(2.0)}
    task = read(tmp_path, tensors)
    assert list(adapted_layers(task.predictor)) == [UP]
    assert torch.equal(after(task)[f"{Q}.weight"], before[f"{Q}.weight"] + tensors[f"{theirs(Q)}.diff"])
    assert (
        "1 weight with an adapter and a diff: only the diff is applied, as in ComfyUI: blocks.0.self_attn.q"
        in notes(tmp_path, task)
    )


def test_biases_of_factors_are_left_out_and_diff_m_is_applied_with_a_note(before, tmp_path):
    tensors = pair(before[f"{Q}.weight"].shape, theirs(Q))
    tensors |= {f"{theirs(Q)}.lora_B.bias": torch.ones(24), "blocks.0.diff_m": random(1, 6, 24)}
    task = read(tmp_path, tensors)
    merged = after(task)
    down, up = (tensors[f"{theirs(Q)}.lora_{end}.weight"].double() for end in "AB")
    near(merged[f"{Q}.weight"], comfyui(before[f"{Q}.weight"], up @ down), before[f"{Q}.weight"])
    assert torch.equal(merged[f"{Q}.bias"], before[f"{Q}.bias"])
    assert notes(tmp_path, task).splitlines() == [
        f"{tmp_path}/a.safetensors: left out 1 bias of a factor, which ComfyUI does not load:"
        " diffusion_model.blocks.0.self_attn.q.lora_B.bias",
        f"{tmp_path}/a.safetensors: applied 1 diff_m, which ComfyUI itself skips:"
        " diffusion_model.blocks.0.diff_m",
    ]


@pytest.mark.parametrize(("first", "second", "over"), [(True, True, 2), (True, False, 3), (False, True, 2)])
def test_a_lokr_with_a_first_matrix_of_low_rank(first, second, over, before, tmp_path):
    """ComfyUI divides alpha by the rank of the second matrix, else by that of the first (lokr.py)."""
    name, tensors = theirs(Q), {f"{theirs(Q)}.alpha": torch.tensor(1.5)}
    sizes = {"lokr_w1": (4, 3, 4, first), "lokr_w2": (6, 2, 6, second)}  # 24 as 4 times 6
    whole = {}
    for part, (rows, rank, columns, divided) in sizes.items():
        a, b = 5 * random(rows, rank), 5 * random(rank, columns, seed=3)
        whole[part] = a.double() @ b.double()
        if divided:
            tensors |= {f"{name}.{part}_a": a, f"{name}.{part}_b": b}
        else:
            tensors[f"{name}.{part}"] = whole[part].float()
    merged = after(read(tmp_path, tensors))
    expected = torch.kron(whole["lokr_w1"], whole["lokr_w2"]) * 1.5 / over
    near(merged[f"{Q}.weight"], comfyui(before[f"{Q}.weight"], expected), before[f"{Q}.weight"])


def test_an_expert_takes_additions_and_a_dora_too(before, tmp_path):
    tensors = pair(before[f"{Q}.weight"].shape, theirs(Q)) | {"head.modulation.diff": random(1, 2, 24)}
    tensors[f"{theirs(Q)}.dora_scale"] = torch.ones(24, 1)
    plain = {name: t.detach() for name, t in Task(train="high").predictor.named_parameters()}
    merged = after(read(tmp_path, tensors, "high"))
    down, up = (tensors[f"{theirs(Q)}.lora_{end}.weight"].double() for end in "AB")
    weight = plain[f"high.{Q}.weight"]
    near(merged[f"high.{Q}.weight"], comfyui(weight, up @ down, torch.ones(24, 1)), weight)
    name = "high.scale_shift_table"
    assert torch.equal(merged[name], plain[name] + tensors["head.modulation.diff"])


# -- out -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return wan_frames.checkpoint_at(tmp_path_factory.mktemp("origin") / "t2v", "t2v")


def config_of(top: Path, origin: Path, stored: bool = False, **train):
    """The config of a run, whose checkpoints store the base or not."""
    document = wan_frames.document(top, origin, "t2v") | {"checkpoint": {"frozen": stored}}
    document["train"] = {"epochs": 1, **train}
    if "base_dtype" in train:
        document["engine"] = {"param_dtype": "bf16"}
    (top / "run.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_config(top / "run.yaml")


def begun_with(file: Path, top: Path, origin: Path):
    """The task of a run that starts from a file, before any step."""
    config = config_of(top, origin, adapters=[{"from": str(file)}])
    saved, _ = import_weights(config, origin)
    return load_task(config, saved, "model")


def in_comfyui(origin: Path, file: Path) -> dict[str, Tensor]:
    """The weights of the pipeline with a file, by their names here."""
    model = WanTransformer3DModel.from_pretrained(origin / "transformer")
    names = {ORIGINAL_KEYS.renamed(name): name for name, _ in model.named_parameters()}
    state = {name: model.get_parameter(own).detach() for name, own in names.items()}
    changed = applied(state, load_file(file))
    return {own: changed.get(name, state[name].double()) for name, own in names.items()}


BESIDE = ["proj_out", "blocks.{0}.norm2", "blocks.{1}.scale_shift_table", "scale_shift_table"]
BESIDE += ["patch_embedding", "condition_embedder.text_embedder.linear_1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stored"), [({"dora": True}, False), ({"dora": True}, True), ({"kind": "loha"}, False)]
)
def test_what_is_trained_in_full_is_an_addition_in_the_file(kind, stored, origin, tmp_path):
    adapters = [{"targets": ["to_q", "ffn"], "rank": 2, "alpha": 3.0, **kind}]
    also = [f"predictor.{name}" for name in BESIDE]
    task = runs.trained(config_of(tmp_path, origin, stored, adapters=adapters, also_train=also), origin)
    (file,) = export_lora(tmp_path / "runs/t2v", tmp_path / "s.safetensors", "lora/comfyui")
    names = set(load_file(file))
    assert {"diffusion_model.head.head.diff", "diffusion_model.head.head.diff_b"} <= names
    assert {"diffusion_model.blocks.1.modulation.diff", "diffusion_model.head.modulation.diff"} <= names
    ours, theirs = after(task.double()), in_comfyui(origin, file)
    base = dict(WanTransformer3DModel.from_pretrained(origin / "transformer").named_parameters())
    assert ours.keys() == theirs.keys()
    assert sum(not torch.equal(ours[name].float(), base[name]) for name in ours) == 8 + 10
    for name, tensor in ours.items():
        near(theirs[name], tensor, base[name].detach())
    again = tmp_path / "again"
    again.mkdir()
    for name, tensor in after(begun_with(file, again, origin).double()).items():
        near(tensor, ours[name], base[name].detach())


@pytest.mark.slow
def test_a_run_that_began_with_additions_writes_them_again(origin, tmp_path):
    base = dict(WanTransformer3DModel.from_pretrained(origin / "transformer").named_parameters())
    tensors = pair(base[f"{Q}.weight"].shape, theirs(Q))
    added = {"self_attn.q.diff_b": "attn1.to_q.bias", "self_attn.norm_q.diff": "attn1.norm_q.weight"}
    for name, own in added.items():
        tensors[f"blocks.0.{name}"] = random(*base[f"blocks.0.{own}"].shape)
    tensors = {f"diffusion_model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "a.safetensors")
    begun_with(tmp_path / "a.safetensors", tmp_path, origin)
    (file,) = export_lora(tmp_path / "runs/t2v", tmp_path / "s.safetensors", "lora/comfyui")
    written = load_file(file)
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        close(written[name], tensor)
    with pytest.raises(MMError, match="also adds to 2 weights of the base"):
        export_lora(tmp_path / "runs/t2v", tmp_path / "peft", "lora/peft")


def test_what_is_written_belongs_to_the_base_in_the_dtype_of_the_run(origin, tmp_path):
    base = dict(WanTransformer3DModel.from_pretrained(origin / "transformer").named_parameters())
    weight, table = base[f"{Q}.weight"].detach().bfloat16().double(), "blocks.0.scale_shift_table"
    tensors = pair(weight.shape, theirs(Q))
    tensors[f"{theirs(Q)}.lora_magnitude_vector"] = lengths = 1 + random(24).abs()
    tensors["blocks.0.modulation.diff"] = added = random(*base[table].shape)
    save_file({f"diffusion_model.{name}": t for name, t in tensors.items()}, tmp_path / "a.safetensors")
    adapters = [{"from": str(tmp_path / "a.safetensors")}]
    import_weights(config_of(tmp_path, origin, adapters=adapters, base_dtype="bf16"), origin)
    (file,) = export_lora(tmp_path / "runs/t2v", tmp_path / "s.safetensors", "lora/comfyui", dtype="fp32")
    written = load_file(file)
    down, up = (tensors[f"{theirs(Q)}.lora_{end}.weight"].double() for end in "AB")
    expected = lengths.double() / (weight + up @ down).norm(dim=1) * weight.norm(dim=1)
    found = written[f"diffusion_model.{theirs(Q)}.dora_scale"][:, 0]
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=0)
    begun = base[table].detach().bfloat16()
    expected = (begun + added.bfloat16()).float() - begun.float()
    assert torch.equal(written["diffusion_model.blocks.0.modulation.diff"], expected)


@pytest.mark.slow
def test_a_base_that_has_changed_since_is_not_subtracted(origin, tmp_path):
    place = tmp_path / "wan"
    shutil.copytree(origin, place)
    train = {"adapters": [{"targets": ["to_q"], "rank": 2}], "also_train": ["predictor.proj_out"]}
    runs.trained(config_of(tmp_path, place, True, **train), place)
    path = place / wan_frames.FILE
    save_file({name: 2 * t for name, t in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="its weights have changed since the run used them"):
        export_lora(tmp_path / "runs/t2v", tmp_path / "s.safetensors", "lora/comfyui")
