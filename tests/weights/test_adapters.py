"""Adapters in components: PEFT's layers, initialised like PEFT's and Diffusers', or from their files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import peft
import pytest
import torch
import yaml
from diffusers import WanTransformer3DModel
from mm_custom_dit.model import CustomDiT
from safetensors.torch import load_file, save_file
from torch import nn

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.config.load import load_config
from mm_core.config.sections import TrainSection
from mm_core.contracts import Randomness
from mm_core.errors import CheckpointError, PlanError
from mm_core.loading.initial_weights import sentence_on
from mm_core.modules import casting
from mm_core.modules.adapter_layers import adapter_of, base_name
from mm_core.modules.initialise import initialise
from mm_core.plan import build_task, make_plan
from mm_core.plugin.registry import get_registry
from mm_core.weights.adapters import inject as module
from mm_core.weights.adapters.files import AdapterScale, merge, open_adapter
from mm_core.weights.adapters.inject import AdapterWeights, add_adapters, scales_of
from mm_core.weights.adapters.targets import skipped_layers
from mm_core.weights.adapters.written import peft_settings
from mm_core.weights.fitting import formats_of
from mm_core.weights.formats.format import AdapterLayout
from support.ranks import run_ranks

SIZES = {"num_layers": 2, "head_dim": 12, "freq_dim": 16, "ffn_dim": 32, "text_dim": 16}
WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
WAN |= {name: SIZES[name] for name in ("num_layers", "freq_dim", "ffn_dim", "text_dim")}
FORMATS = formats_of(get_registry(()))


class Task(nn.Module):
    trainable, frozen = ("predictor",), ()

    def __init__(self, *adapters: AdapterConfig, beside: tuple[str, ...] = ()) -> None:
        super().__init__()
        with torch.device("meta"):
            self.predictor = CustomDiT(num_heads=2, in_channels=4, out_channels=4, **SIZES)
        add_adapters(self, adapters, FORMATS, beside)
        self.adapters = adapters

    def begin(self, seed: int = 0) -> Task:
        """Allocates and fills it, as the engine does."""
        weights = AdapterWeights(self, self.adapters, FORMATS)
        self.predictor.to_empty(device="cpu")
        initialise(self.predictor, "predictor", Randomness(seed), weights.names)
        weights.fill(self.state_dict())
        return self


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "latents": torch.randn(2, 4, 2, 4, 4, generator=generator),
        "timestep": torch.tensor([998.7, 20.0]),
        "text": torch.randn(2, 5, 16, generator=generator),
        "text_mask": torch.ones(2, 5, dtype=torch.bool),
    }


def plain(seed: int = 0) -> CustomDiT:
    """The same weights without any adapter, and a head that is not zero."""
    return bold(Task().begin(seed).predictor)


def bold(model: CustomDiT) -> CustomDiT:
    with torch.no_grad():
        model.proj_out.weight.copy_(torch.linspace(-0.2, 0.2, model.proj_out.weight.numel()).view(-1, 24))
    return model


def perturbed(model: nn.Module) -> nn.Module:
    """Adapters as if trained: no matrix is zero, no magnitude equals the weight's row lengths."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if adapter_of(name) is not None:
            with torch.no_grad():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def test_an_adapted_component_begins_as_the_plain_one_and_trains_the_adapter_alone():
    bare = dict(plain().named_parameters())
    for dora in (False, True):
        adapter = AdapterConfig(targets=("predictor.blocks.{*}.attn1", "ffn.net.2"), rank=4, dora=dora)
        task = Task(adapter).begin()
        bold(task.predictor)
        for name, parameter in task.predictor.named_parameters():
            place = adapter_of(name)
            assert parameter.requires_grad == (place is not None)
            if place is None:
                assert torch.equal(parameter, bare[base_name(name)]), name
        torch.testing.assert_close(task.predictor(**inputs()), plain()(**inputs()), rtol=1e-5, atol=1e-6)
        (adapted,) = scales_of(task.predictor).values()
        ends = {name.split(".", 2)[2] for name in adapted}
        assert ends == {"attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "ffn.net.2"}


def test_what_is_drawn_does_not_depend_on_the_other_adapters():
    one = Task(AdapterConfig(targets=("to_q",), init="gaussian")).begin()
    two = Task(AdapterConfig(targets=("to_q",), init="gaussian"), AdapterConfig(("to_k",), name="b")).begin()
    names = [name for name in one.state_dict() if adapter_of(name)]
    assert len(names) == 8 and all(torch.equal(one.state_dict()[n], two.state_dict()[n]) for n in names)
    spread = one.predictor.blocks[0].attn1.to_q.lora_A["default"].weight.std()
    assert 0.04 < spread.item() < 0.09, "gaussian: 1 / rank"


@pytest.mark.parametrize(
    "settings", [{}, {"use_dora": True}, {"use_rslora": True}, {"alpha_pattern": {"to_k": 7}}]
)
def test_an_adapter_that_peft_has_saved_is_begun_from(tmp_path, settings):
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["to_q", "attn1.to_k", "ffn.net.2"], **settings
    )
    theirs = peft.get_peft_model(plain(), config)
    perturbed(theirs)
    theirs.save_pretrained(tmp_path)
    task = Task(AdapterConfig(from_=str(tmp_path))).begin()
    bold(task.predictor)
    torch.testing.assert_close(task.predictor(**inputs()), theirs(**inputs()), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(task.predictor(**inputs()), plain()(**inputs()), atol=1e-3)


def test_an_adapter_that_diffusers_has_saved_is_begun_from(tmp_path):
    theirs = WanTransformer3DModel(**WAN)
    own = plain().state_dict()
    theirs.load_state_dict({name: own[name].reshape(t.shape) for name, t in theirs.state_dict().items()})
    theirs.add_adapter(peft.LoraConfig(r=4, lora_alpha=6, target_modules=["to_q", "ffn.net.2"]))
    perturbed(theirs)
    theirs.save_lora_adapter(tmp_path)
    task = Task(AdapterConfig(from_=str(tmp_path))).begin()
    bold(task.predictor)
    call = inputs()
    expected = theirs(call["latents"], call["timestep"], call["text"], return_dict=False)[0]
    torch.testing.assert_close(task.predictor(**call), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("error:Already found a")  # PEFT warns about several adapters
def test_several_adapters_count_together_and_only_those_in_training_learn(tmp_path):
    first = peft.get_peft_model(plain(), peft.LoraConfig(r=4, target_modules=["to_q"]))
    perturbed(first).save_pretrained(tmp_path)
    style = AdapterConfig(from_=str(tmp_path), name="style", train=False)
    task = Task(style, AdapterConfig(targets=("to_q", "to_k"), rank=2)).begin()
    bold(task.predictor)
    torch.testing.assert_close(task.predictor(**inputs()), first(**inputs()), rtol=1e-5, atol=1e-6)
    learning = {adapter_of(n)[2] for n, p in task.predictor.named_parameters() if p.requires_grad}
    assert learning == {"default"}
    perturbed(task.predictor)
    task.predictor(**inputs()).square().sum().backward()
    moved = {adapter_of(n)[2] for n, p in task.predictor.named_parameters() if p.grad is not None}
    assert moved == {"default"}


def test_what_is_trained_in_full_beside_an_adapter():
    task = Task(AdapterConfig(("to_q",)), beside=("predictor.proj_out", "predictor.blocks.{*}.norm2.bias"))
    names = [n for n, p in task.named_parameters() if p.requires_grad and adapter_of(n) is None]
    blocks = [f"predictor.blocks.{i}.norm2.bias" for i in range(2)]
    assert names == [*blocks, "predictor.proj_out.weight", "predictor.proj_out.bias"]
    with pytest.raises(PlanError) as caught:
        Task(AdapterConfig(("to_q",)), beside=("predictor.blocks.0.attn1",))
    assert str(caught.value) == (
        "train.also_train: predictor.blocks.0.attn1.to_q.weight would be trained in full and has an adapter"
        " too\n"
        "  hint: leave it out of train.also_train, or out of the adapter's targets"
    )
    with pytest.raises(PlanError, match=r"pattern 'predictor\.proj' matches no module"):
        Task(AdapterConfig(("to_q",)), beside=("predictor.proj",))


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rslora": True}])
def test_merged_weights_are_those_that_peft_merges(options):
    task = Task(AdapterConfig(targets=("to_q", "ffn"), rank=4, alpha=6, **options)).begin()
    perturbed(bold(task.predictor))
    state = {name: tensor.clone() for name, tensor in task.predictor.state_dict().items()}
    expected = task.predictor(**inputs())
    merged = plain()
    for name, scale in scales_of(task.predictor)["default"].items():
        own = {adapter_of(n)[1]: t for n, t in state.items() if n.startswith(f"{name}.lora_")}
        weight = merge(state[f"{name}.base_layer.weight"], [(scale, own)])
        layer = task.predictor.get_submodule(name)
        layer.merge()
        torch.testing.assert_close(weight, layer.base_layer.weight, rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            merged.get_submodule(name).weight.copy_(weight)
    torch.testing.assert_close(merged(**inputs()), expected, rtol=1e-5, atol=1e-5)
    assert AdapterScale(4, 6.0).factor == 1.5 and AdapterScale(4, 6.0, rslora=True).factor == 3.0


@pytest.mark.parametrize(
    "patterns",
    [{r"blocks\.\d+\.attn1\.to_k": 70}, {"^blocks.0.attn1.to_k": 70}, {"to_(q|k)": 70, "k": 2}],
)
@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match")  # `k` is no such key
def test_the_patterns_of_an_alpha_mean_what_they_mean_to_peft(tmp_path, patterns):
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["to_q", "to_k"], alpha_pattern=patterns)
    perturbed(peft.get_peft_model(plain(), config)).save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(plain(), tmp_path).eval()
    task = Task(AdapterConfig(from_=str(tmp_path))).begin()
    bold(task.predictor)
    torch.testing.assert_close(task.predictor(**inputs()), theirs(**inputs()), rtol=1e-5, atol=1e-6)


def test_lengths_that_were_read_stay_where_they_are():
    """A DoRA read by `init_from` is not initialised again."""
    adapter = AdapterConfig(targets=("to_q",), rank=2, dora=True)
    task = Task(adapter).begin()
    perturbed(task.predictor)
    state = task.state_dict()
    lengths = {n: t.clone() for n, t in state.items() if "lora_magnitude_vector" in n}
    *known, new = lengths
    AdapterWeights(task, (adapter,), FORMATS).fill(state, known)
    assert all(torch.equal(state[name], lengths[name]) for name in known)
    weight = state[new.replace("lora_magnitude_vector.default", "base_layer")]
    torch.testing.assert_close(state[new], weight.norm(dim=1))
    assert not torch.allclose(state[new], lengths[new])


# -- what is wrong -------------------------------------------------------------------------------


def test_targets_that_name_nothing_show_what_there_is():
    with pytest.raises(PlanError) as caught:
        Task(AdapterConfig(targets=("to_qq",)))
    assert str(caught.value) == (
        "train.adapters: the target 'to_qq' of the adapter 'default' matches no linear layer\n"
        "  accepted: patterns of modules, or ends of paths such as 'to_q', 'to_v', 'to_k'"
    )
    with pytest.raises(PlanError, match=r"the target 'predictor\.blocks\.0\.norm1' of the adapter"):
        Task(AdapterConfig(targets=("predictor.blocks.0.norm1",)))
    with pytest.raises(PlanError, match=r"pattern 'predictor\.block\.\{\*\}' matches no module"):
        Task(AdapterConfig(targets=("predictor.block.{*}",)))


class Around(nn.Module):
    """A task around any model."""

    trainable, frozen = ("model",), ()

    def __init__(self, build, *targets: str) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = build()
        add_adapters(self, (AdapterConfig(targets, rank=2),), {})


def test_adapters_are_of_linear_layers_alone_and_report_what_they_skip():
    def build():
        return nn.ModuleDict({"stem": nn.Conv3d(2, 4, 3), "words": nn.Embedding(5, 4), "up": nn.Linear(4, 4)})

    with pytest.raises(PlanError) as caught:
        Around(build, "stem")
    assert str(caught.value) == (
        "train.adapters: the target 'stem' of the adapter 'default' matches no linear layer, but"
        " Conv3d: only linear layers can have adapters\n"
        "  accepted: patterns of modules, or ends of paths such as 'up'"
    )
    task = Around(build, "model")
    others = {"model.stem": "Conv3d", "model.words": "Embedding"}
    assert skipped_layers(task, AdapterConfig(("model",))) == others
    assert not skipped_layers(task, AdapterConfig(("up",)))
    assert sentence_on(task, AdapterConfig(("model",))) == (
        "adapter 'default' changes linear layers only, and leaves out model.stem (Conv3d), model.words"
        " (Embedding)"
    )


def test_a_layer_that_is_read_and_never_called_is_not_adapted():
    def build():
        return nn.TransformerEncoderLayer(16, 2, 32)

    assert list(scales_of(Around(build, "model").model)["default"]) == ["linear1", "linear2"]
    with pytest.raises(PlanError) as caught:
        Around(build, "out_proj")
    assert str(caught.value) == (
        "train.adapters: the target 'out_proj' of the adapter 'default' is a layer that"
        " nn.MultiheadAttention never calls: an adapter there would do nothing\n"
        "  hint: remove it from the adapter's targets"
    )


def test_a_weight_that_two_modules_share_is_not_adapted():
    """A merge would change both modules, but the run changes only one."""

    def build():
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5), "up": nn.Linear(4, 4)})
        model["head"].weight = model["embed"].weight
        return model

    with pytest.raises(PlanError) as caught:
        Around(build, "head")
    assert str(caught.value) == (
        "train.adapters: model.head shares its weight with model.embed.weight; the adapter 'default' of only"
        " one of them would make them differ\n"
        "  hint: leave it out of the adapter's targets, or build the model with untied weights"
    )
    assert list(scales_of(Around(build, "up").model)["default"]) == ["up"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "targets is empty"),
        ({"targets": ("a",), "from_": "x"}, "targets and from are both set"),
        ({"targets": ("a",), "train": False}, "train is false and from is not set"),
        ({"targets": ("a",), "name": "a.b"}, "must be at most 64 letters, digits"),
    ],
)
def test_settings_that_contradict_each_other(fields, said):
    with pytest.raises(ValueError, match=said):
        AdapterConfig(**fields)


def test_adapters_of_one_name_or_all_at_rest_are_faults_of_the_config():
    twice = (AdapterConfig(("a",)), AdapterConfig(("b",)))
    with pytest.raises(ValueError, match="the name 'default' is used twice"):
        TrainSection(steps=1, adapters=twice)
    with pytest.raises(ValueError, match="none of them is trained"):
        TrainSection(steps=1, adapters=(AdapterConfig(from_="x", train=False),))
    with pytest.raises(ValueError, match="also_train works only with adapters; without them"):
        TrainSection(steps=1, also_train=("a",))


def test_without_peft_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(PlanError, match=r'hint: pip install "mm-core\[lora\]"'):
        Task(AdapterConfig(targets=("to_q",)))
    assert module.KEY == "train.adapters"


@pytest.fixture
def saved(tmp_path) -> Path:
    theirs = peft.get_peft_model(plain(), peft.LoraConfig(r=4, target_modules=["to_q"]))
    theirs.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def change(folder: Path, **settings) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_files_that_are_no_lora_of_this_model_are_one_error(saved, tmp_path):
    tensors = load_file(saved / "adapter_model.safetensors")

    def fault(path: Path = saved) -> str:
        with pytest.raises(CheckpointError) as caught:
            Task(AdapterConfig(from_=str(path))).begin()
        return str(caught.value)

    assert fault(tmp_path / "none") == (
        f"{tmp_path}/none: there is no such adapter\n"
        "  accepted: adapter_model.safetensors or pytorch_lora_weights.safetensors, or a folder"
        " with one"
    )
    assert "there is no adapter here" in fault(tmp_path)
    change(saved, peft_type="IA3")
    assert "this adapter has the type IA3\n  accepted: LORA" in fault()
    change(saved, peft_type="LORA", lora_alpha="much")
    assert "lora_alpha is 'much'\n  accepted: a number above 0" in fault()
    change(saved, lora_alpha=4, init_lora_weights="pissa_niter_4")
    assert "this adapter was initialised with 'pissa_niter_4', which also changed the base weights" in fault()
    for pattern in ("(a+)+", "(", "a*b*c*d*"):
        change(saved, init_lora_weights="gaussian", alpha_pattern={pattern: 3})
        assert f"the pattern {pattern!r} in the adapter's alpha_pattern is not supported" in fault()
    change(saved, alpha_pattern={})
    first = next(iter(tensors))
    save_file(tensors | {"base_model.model.head.weight": torch.ones(2)}, saved / "adapter_model.safetensors")
    assert "this is not a LoRA of linear layers: it contains base_model.model.head.weight" in fault()
    biased = {first.replace("lora_A.weight", "lora_B.bias"): torch.ones(24)}
    save_file(tensors | biased, saved / "adapter_model.safetensors")
    assert f"this is not a LoRA of linear layers: it contains {next(iter(biased))}" in fault()
    save_file({k: v for k, v in tensors.items() if k != first}, saved / "adapter_model.safetensors")
    assert "(one of its two matrices)" in fault()
    moved = {name.replace("blocks.1", "blocks.9"): tensor for name, tensor in tensors.items()}
    save_file(moved, saved / "adapter_model.safetensors")
    said = fault()
    assert (
        "2 of the 4 modules in this adapter match no linear layer of predictor: blocks.9.attn1.to_q" in said
    )
    assert said.endswith("hint: the adapter is for a different model: use one trained for this model")
    wide = {name: t.repeat(1, 2) if "lora_A" in name else t for name, t in tensors.items()}
    save_file(wide, saved / "adapter_model.safetensors")
    assert "has shape [4, 48], but predictor.blocks.0.attn1.to_q.lora_A.default.weight has [4, 24]" in fault()


def test_an_adapter_that_is_a_pickle_is_refused_and_nothing_runs(saved, tmp_path):
    mark = tmp_path / "ran"

    class Runs:
        def __reduce__(self):
            return exec, (f"open({str(mark)!r}, 'w').close()",)

    (saved / "adapter_model.safetensors").unlink()
    (saved / "adapter_model.bin").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(CheckpointError, match=r"is a pickle file, which can run code: adapter_model\.bin"):
        open_adapter(saved)
    (saved / "adapter_model.bin").rename(saved / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="this is not a complete safetensors file"):
        open_adapter(saved)
    assert not mark.exists()


def test_a_weight_without_directions_cannot_be_a_dora():
    with pytest.raises(CheckpointError, match=r"some rows of predictor\.proj_out are all zero"):
        Task(AdapterConfig(targets=("proj_out",), dora=True)).begin()


# -- over ranks ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_train_alike_on_two_ranks_and_leave_the_weights_alone(tmp_path, kind):
    script, found = Path(__file__).with_name("adapters_ranks.py"), {}
    for world in (1, 2):
        run_ranks(script, world, tmp_path / f"{world}.pt", kind)
        found[world] = torch.load(tmp_path / f"{world}.pt")
        before, after = found[world]["before"], found[world]["after"]
        for name in before:
            assert torch.equal(before[name], after[name]) == (adapter_of(name) is None), name
    assert found[1]["norms"] == pytest.approx(found[2]["norms"], rel=1e-5)
    for name, tensor in found[1]["after"].items():
        torch.testing.assert_close(found[2]["after"][name], tensor, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(found[1]["before"][n], found[2]["before"][n]) for n in found[1]["before"])


@pytest.mark.parametrize("name", ["keys", "items", "forward", "train"])
def test_names_that_torch_keeps_for_itself_are_a_readable_error(name):
    with pytest.raises(PlanError, match=f"an adapter cannot be called '{name}'"):
        Task(AdapterConfig(targets=("to_q",), name=name))


def test_ranks_that_differ_are_kept_for_each_module_alone(tmp_path):
    """`proj_out` must not match other paths with the same end."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["to_q", "proj_out"], rank_pattern={"attn1.to_q": 2}
    )
    theirs = peft.get_peft_model(plain(), config)
    perturbed(theirs).save_pretrained(tmp_path)
    task = Task(AdapterConfig(from_=str(tmp_path))).begin()
    bold(task.predictor)
    torch.testing.assert_close(task.predictor(**inputs()), theirs(**inputs()), rtol=1e-5, atol=1e-6)
    scales = scales_of(task.predictor)["default"]
    settings = peft_settings(AdapterLayout("a.safetensors"), scales)
    again = peft.LoraConfig(**settings)
    fresh = peft.get_peft_model(plain(), again)
    for name, scale in scales.items():
        layer = fresh.base_model.model.get_submodule(name)
        assert (layer.r["default"], layer.scaling["default"]) == (scale.rank, scale.factor), name


# -- base weights in a different dtype -------------------------------------------------------


def with_base_dtype(tmp_path: Path, **engine: object):
    document = yaml.safe_load((Path(__file__).parents[2] / "configs/custom_dit/quickstart.yaml").read_text())
    document["train"] |= {"adapters": [{"targets": ["to_q"]}], "base_dtype": "bf16"}
    document["engine"] = {"type": "fsdp2", **engine}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_config(path)


@pytest.mark.skipif(not casting.shards_mixed(), reason="this torch shards no module of mixed dtypes")
def test_weights_below_adapters_are_held_in_bf16(tmp_path):
    """Half the memory; adapters, weights trained beside them and tables do not change."""
    config = with_base_dtype(tmp_path, param_dtype="bf16")
    task = build_task(config)
    kinds = {adapter_of(n) is None: p.dtype for n, p in task.predictor.named_parameters()}
    assert kinds == {True: torch.bfloat16, False: torch.float32}
    own = sum(p.nbytes for p in task.predictor.parameters())
    assert make_plan(config, 1, task, train=range(100)).engine.parameter_bytes == own


def test_a_dtype_below_adapters_that_nothing_computes_in_is_a_readable_error(tmp_path, monkeypatch):
    monkeypatch.setattr(casting, "shards_mixed", lambda: True)
    with pytest.raises(PlanError) as caught:
        make_plan(with_base_dtype(tmp_path, param_dtype=None), 1, train=range(100))
    assert str(caught.value) == (
        "train.base_dtype: adapters are fp32 but the weights under them would be bf16, and no dtype is set"
        " for the computation\n  hint: set engine.param_dtype: bf16, or what your engine calls that"
    )
    monkeypatch.setattr(casting, "shards_mixed", lambda: False)
    said = "predictor has parameters in bfloat16 and float32, which torch .* cannot shard together"
    with pytest.raises(PlanError, match=said):
        make_plan(with_base_dtype(tmp_path, param_dtype="bf16"), 1, train=range(100))
    with pytest.raises(ValueError, match="base_dtype works only with adapters"):
        TrainSection(steps=1, base_dtype="bf16")
