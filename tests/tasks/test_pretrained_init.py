"""Randomly initialised weights are those of Transformers' own `from_config`, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from mm_core.builtin.configs.pretrained import PretrainedConfig
from mm_core.contracts import Randomness, empty_parameters
from mm_core.device.torch_private import shards_mixed
from mm_core.errors import ContractError
from mm_core.modules.initialise import initialise
from mm_core.modules.tying import tie, tied_names
from mm_core.tasks.pretrained.initial import Recipe, prepare_initialisation, recorded
from mm_core.tasks.pretrained.model import build_model
from support.drawn_architectures import COUNT, Architecture, drawn
from support.ranks import run_ranks

HERE = Path(__file__).parent


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 96}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
WHISPER = {**HEADS, **ENDS, "vocab_size": 96, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
T5 = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 48}
T5 |= {"num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 96, "n_positions": 64}
FAULTY = {
    # architectures that began otherwise, or not at all
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, **ENDS}),
    "t5_classes": ("T5ForSequenceClassification", "T5Config", {**T5, **ENDS, "num_labels": 3}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, **ENDS}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {**WHISPER, "decoder_start_token_id": 1}),
    "mamba": ("MambaForCausalLM", "MambaConfig", SMALL),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", SMALL),
}


def of_faulty(name: str) -> Architecture:
    kind, config, options = FAULTY[name]
    return Architecture(getattr(transformers, kind), getattr(transformers, config)(**options))


def write(architecture: Architecture, folder: Path) -> Path:
    """The folder of a model that begins at random."""
    architecture.config.save_pretrained(folder)
    (folder / "class").write_text(f"{architecture.kind.__module__}:{architecture.name}")
    return folder


def built(folder: Path, **options) -> nn.Module:
    wanted = PretrainedConfig(str(folder), (folder / "class").read_text(), **{"weights": "random", **options})
    with torch.device("meta"):
        return build_model(wanted, "model")


def begin(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """What the model's parameters begin with on one rank without an engine."""
    tied = tied_names(model)
    model.to_empty(device="cpu")
    tie(model, tied)
    initialise(model, "model", Randomness(seed))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def deviations(theirs: list[dict], ours: list[dict]) -> dict[str, str]:
    """What differs by more than 4 standard errors, of draws that are put together; constants: by anything."""
    found = {}
    assert theirs[0].keys() == ours[0].keys()
    for name in theirs[0]:
        a, b = (torch.stack([draw[name].double() for draw in draws]) for draws in (theirs, ours))
        if bool((a == a[0]).all()):
            if not bool((b == a[0]).all()):
                found[name] = f"{float(b.mean()):.4g} +- {float(b.std()):.4g}, not a constant"
        elif bool((a[0] != a[1]).any()):
            (mean_a, error_a, std_a, sigma_a), (mean_b, error_b, std_b, sigma_b) = moments(a), moments(b)
            far = abs(mean_a - mean_b) > 4 * math.hypot(error_a, error_b)
            if far or abs(std_a - std_b) > 4 * math.hypot(sigma_a, sigma_b):
                found[name] = f"{mean_b:.4g} +- {std_b:.4g}, not {mean_a:.4g} +- {std_a:.4g}"
    return found


def moments(drawn: torch.Tensor) -> tuple[float, float, float, float]:
    """(mean, its standard error, standard deviation, its standard error)."""
    count, centred = drawn.numel(), drawn - drawn.mean()
    variance = centred.square().mean()
    spread = (centred.pow(4).mean() - variance.square()).clamp(min=0) / count
    deviation = float(variance.sqrt())
    return float(drawn.mean()), deviation / count**0.5, deviation, float(spread.sqrt()) / (2 * deviation)


def compare(make: Callable[[], nn.Module], model: nn.Module, draws: int) -> dict[str, str]:
    """Deviations that other seeds show too: among thousands of parameters one deviates at random."""
    found = None
    for seed in (0, 100):
        torch.manual_seed(seed)
        theirs = [{n: p.detach() for n, p in make().named_parameters()} for _ in range(draws)]
        now = deviations(theirs, [begin(model, seed + number) for number in range(draws)])
        found = now if found is None else {name: said for name, said in now.items() if name in found}
        if not found:
            break
    return found


@pytest.mark.parametrize("name", FAULTY)
def test_weights_that_a_parent_or_a_formula_sets_are_those_of_the_library(name, tmp_path):
    architecture = of_faulty(name)
    assert compare(architecture.make, built(write(architecture, tmp_path)), 2) == {}


@pytest.mark.slow
def test_weights_of_architectures_that_are_drawn_are_those_of_the_library(tmp_path, capsys):
    found, left = drawn()
    with capsys.disabled():
        print("\n" + ", ".join(architecture.name for architecture in found))
        print(*(f"not {key}: {why}" for key, why in left.items()), sep="\n")
    assert len(found) == COUNT
    models = ((a, built(write(a, tmp_path / a.name))) for a in found)
    assert {a.name: off for a, model in models if (off := compare(a.make, model, 8))} == {}


@pytest.mark.slow
def test_two_ranks_begin_as_one_to_the_bit(tmp_path):
    """Under the engine. Of tables in integers, those that are not set are found on the rank that has them."""
    chosen = {name: of_faulty(name) for name in FAULTY}
    chosen |= {architecture.name: architecture for architecture in drawn()[0]}
    folders = [write(architecture, tmp_path / name) for name, architecture in chosen.items()]
    for world in (1, 2):
        run_ranks(HERE / "drawn_ranks.py", world, tmp_path / f"out{world}", *folders)
    one, first, second = (torch.load(tmp_path / name) for name in ("out1.0", "out2.0", "out2.1"))
    said = "init_weights of Table left 1 tensor unset: model.codes"
    tables = [found.pop("tables") for found in (one, first, second)]
    refusal = [f"model has parameters in int8, which torch {torch.__version__} cannot shard"] * 2
    assert tables == ([["", said], ["", ""], ["", said]] if shards_mixed() else [refusal] * 3)
    refused = {name: why for name, why in one.items() if isinstance(why, str)}
    assert refused == {}
    assert len(one) >= 25
    assert one == first == second


def test_a_new_head_on_a_body_of_t5_begins_at_random_level(tmp_path):
    """Its loss is the logarithm of the number of classes."""
    folder = write(of_faulty("t5_classes"), tmp_path)
    model = built(folder)
    begin(model, 1)
    ids = torch.randint(3, 96, (8, 6), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = 2
    loss = model.eval()(input_ids=ids, labels=torch.arange(8) % 3).loss
    assert loss.item() == pytest.approx(math.log(3), abs=0.3)


@pytest.mark.parametrize("left", (0.0, float("nan")))
def test_what_files_hold_is_not_drawn_whatever_was_in_memory(left, tmp_path):
    model = built(write(of_faulty("mamba"), tmp_path))
    names = {f"model.{name}" for name in model.state_dict()} - {"model.lm_head.weight"}
    tied = tied_names(model)
    model.to_empty(device="cpu")
    tie(model, tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(left)
    initialise(model, "model", Randomness(1), names)
    wanted = torch.tensor(left)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.isnan(), wanted.isnan().expand(parameter.shape)), name
        assert not parameter.nan_to_num().any(), name


def test_a_rank_holds_the_whole_of_one_module_at_a_time(tmp_path, monkeypatch):
    """Also where a parent sets its children: the largest here are one matrix."""
    from mm_core.tasks.pretrained.init_tape import Tape

    sizes, play = [], Tape._play

    def watched(self, *arguments):
        found = play(self, *arguments)
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in found.values()))
        return found

    model = built(write(of_faulty("t5"), tmp_path))
    monkeypatch.setattr(Tape, "_play", watched)
    drawn = begin(model, 1)
    largest = max(tensor.nbytes for tensor in drawn.values())
    assert len(sizes) == len(drawn) and max(sizes) <= largest


# -- what authors do --------------------------------------------------------------------------------


class OwnConfig(transformers.PretrainedConfig):
    model_type = "own_init"


class Inner(transformers.PreTrainedModel):
    """A model within a model, whose authors draw otherwise."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.read = nn.Linear(64, 64)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.3)
            module.bias.data.fill_(0.25)


class Outer(transformers.PreTrainedModel):
    """Old and odd ways to set weights, one a parameter."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.inner = Inner(config)
        self.by_default = nn.Linear(64, 64)
        self.table = nn.Parameter(torch.log(torch.arange(1, 65).float()).repeat(64, 1))
        self.ones = nn.Parameter(torch.ones(64, 8))
        self.drawn_when_made = nn.Parameter(torch.randn(64, 64) * 0.1)
        self.rows = nn.Embedding(64, 64, padding_idx=3)
        self.square = nn.Linear(64, 64, bias=False)
        self.numbers = nn.Parameter(torch.empty(64))
        self.steps = nn.Parameter(torch.empty(4096))
        self.branch = nn.Parameter(torch.empty(64, 64))
        self.scaled = nn.Linear(64, 64)
        self.copied = nn.Linear(64, 64)
        self.gone = nn.Linear(64, 64)
        nn.init.orthogonal_(self.square.weight)
        nn.init.xavier_uniform_(self.gone.weight)
        del self.gone
        self.post_init()
        self.scaled.weight.data.mul_(3)  # after all the others

    def _init_weights(self, module):
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(std=0.5)
            module.weight.data[module.padding_idx].zero_()
        if isinstance(module, nn.Linear) and module is self.scaled:
            module.weight.data = torch.randn(64, 64) * 0.01
        if isinstance(module, Outer):
            with torch.no_grad():
                module.numbers.copy_(torch.from_numpy(np.linspace(0, 1, 64)))
                module.steps.copy_(torch.exp(torch.rand(4096) * 2 - 5))
                module.branch.uniform_(1, 2)
                if module.branch.is_meta or float(module.branch.mean()) > 1:
                    module.branch[:, ::2] = -1
            self.copied.weight.data.copy_(self.rows.weight.data)


def own(kind: type[nn.Module]) -> nn.Module:
    with empty_parameters():
        model = kind(OwnConfig())
    prepare_initialisation(model, lambda: kind(OwnConfig()))
    return model


def test_whatever_authors_do_to_weights_is_done():
    assert compare(lambda: Outer(OwnConfig()), own(Outer), 2) == {}


def test_a_parameter_that_was_copied_from_another_begins_as_its_copy():
    with recorded() as tape:
        recipe = Recipe(tape, Outer(OwnConfig()))
    drawn = recipe.draw(["copied.weight"], Randomness(3))["copied.weight"]
    assert torch.equal(drawn, recipe.draw(["rows.weight"], Randomness(3))["rows.weight"])
    assert not torch.equal(drawn, recipe.draw(["rows.weight"], Randomness(4))["rows.weight"])
    assert not drawn[3].any() and drawn[4].all()


class Forgetful(Outer):
    def __init__(self, config):
        super().__init__(config)
        self.forgotten = nn.Parameter(torch.empty(3, 4))
        self.nothing = nn.Parameter(torch.empty(0, 4))


def test_a_parameter_that_no_one_sets_is_named():
    model = own(Forgetful)
    with pytest.raises(
        ContractError, match="Forgetful does not initialise 1 parameter: forgotten\n"
    ) as fault:
        begin(model, 1)
    assert "fill them in _init_weights" in fault.value.hint
