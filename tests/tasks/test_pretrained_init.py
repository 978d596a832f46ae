"""Randomly initialised weights are those of Transformers' own `from_config`, on any number of ranks."""

from __future__ import annotations

import math
import random
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
from mm_core.tasks.pretrained.initial import initialiser
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


def watched(make: Callable[[], nn.Module]) -> tuple[list[nn.Module], nn.Module]:
    """A model that begins as its authors have it, and a list of those that are built for that."""
    found: list[nn.Module] = []

    def again() -> nn.Module:
        found.append(make())
        return found[-1]

    with empty_parameters():
        model = make()
    model.init_weights = initialiser(model, again)
    return found, model


def begin(model: nn.Module, seed: int, spared=()) -> dict[str, torch.Tensor]:
    """What the model's parameters begin with on one rank without an engine; files hold what is spared."""
    tied = tied_names(model)
    model.to_empty(device="cpu")
    tie(model, tied)
    initialise(model, "model", Randomness(seed), {f"model.{name}" for name in spared})
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
    built_again = [found.pop("built") - len(folders) for found in (one, first, second)]
    refused = {name: why for name, why in one.items() if isinstance(why, str)}
    assert refused == {}
    assert len(one) >= 25
    assert one == first == second
    assert built_again == [len(folders), len(folders), 0], "rank 0 alone builds them"


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


def test_new_modules_alone_are_drawn_and_get_memory(tmp_path):
    """Also what a parent sets on its children."""
    architecture = of_faulty("t5_classes")
    built_models, model = watched(architecture.make)
    theirs = dict(architecture.make().named_parameters())
    new = {name for name in theirs if name.startswith("classification_head")}
    spared = theirs.keys() - new
    drawn = begin(model, 1, spared)
    assert {name for name, p in built_models[-1].named_parameters() if not p.is_meta} == new
    for name in new:
        their = theirs[name].detach()
        assert drawn[name].std().item() == pytest.approx(their.std().item(), rel=0.2, abs=1e-6), name
        assert bool(drawn[name].any()) == bool(their.any()), name
    again, other = (begin(model, seed, spared)["classification_head.dense.weight"] for seed in (1, 2))
    assert torch.equal(drawn["classification_head.dense.weight"], again)
    assert not torch.equal(again, other)


def test_where_files_hold_everything_nothing_is_built():
    built_models, model = watched(lambda: Outer(OwnConfig()))
    begin(model, 1, spared=dict(model.named_parameters()).keys())
    assert built_models == []


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
    return watched(lambda: kind(OwnConfig()))[1]


def test_whatever_authors_do_to_weights_is_done():
    assert compare(lambda: Outer(OwnConfig()), own(Outer), 2) == {}


def test_a_parameter_that_was_copied_from_another_begins_as_its_copy():
    drawn = begin(own(Outer), 3)
    assert torch.equal(drawn["copied.weight"], drawn["rows.weight"])
    assert not torch.equal(drawn["rows.weight"], begin(own(Outer), 4)["rows.weight"])
    assert not drawn["rows.weight"][3].any() and drawn["rows.weight"][4].all()


class Adding(Inner):
    def __init__(self, config):
        super().__init__(config)
        self.added = nn.Linear(64, 64)
        self.added.weight.data.add_(self.read.weight.data)


@pytest.mark.parametrize("kind, name", [(Outer, "copied.weight"), (Adding, "added.weight")])
def test_a_new_module_that_is_made_of_another_begins_as_in_a_complete_model(kind, name):
    """It is built without memory for the others first, which it cannot be."""
    built_models, model = watched(lambda: kind(OwnConfig()))
    drawn = begin(model, 3, spared=dict(model.named_parameters()).keys() - {name})
    assert torch.equal(drawn[name], begin(own(kind), 3)[name])
    assert not any(parameter.is_meta for parameter in built_models[-1].parameters())


def test_what_a_constructor_draws_changes_no_other_draws():
    model = own(Outer)
    model.to_empty(device="cpu")
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with torch.no_grad():
        model.init_weights()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
    assert not torch.are_deterministic_algorithms_enabled()


class Forgetful(Outer):
    def __init__(self, config):
        super().__init__(config)
        self.forgotten = nn.Parameter(torch.empty(3, 4))
        self.nothing = nn.Parameter(torch.empty(0, 4))


@pytest.mark.parametrize("others", ("drawn", "in files"))
def test_a_parameter_that_no_one_sets_is_named(others):
    model = own(Forgetful)
    held = dict(model.named_parameters()).keys() - {"forgotten"} if others == "in files" else ()
    with pytest.raises(
        ContractError, match="Forgetful does not initialise 1 parameter: forgotten\n"
    ) as fault:
        begin(model, 1, held)
    assert "fill them in _init_weights" in fault.value.hint
