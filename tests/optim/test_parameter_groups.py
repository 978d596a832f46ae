"""Parameter groups and freezing by module patterns; the first match applies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_core.config.sections import ParameterGroup, TrainSection
from mm_core.contracts import Loss, Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import PlanError
from mm_core.modules.patterns import freeze
from mm_core.optim.adamw import adamw
from mm_core.optim.parameter_groups import groups_of
from mm_core.runtime.process_group import process_group
from support.tiny_models import Task


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.proj(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            (nn.init.ones_ if "norm.weight" in name else nn.init.normal_)(parameter)


def task_of() -> Task:
    return Task(predictor=Net())


def split(**fields) -> list[tuple[set[str], dict[str, float]]]:
    """(names without `predictor.`, settings) of each group."""
    groups = groups_of(dict(task_of().named_parameters()), TrainSection(steps=1, **fields))
    for group in groups:
        assert len(group["names"]) == len(group["params"])
    return [
        (
            {name.removeprefix("predictor.") for name in group["names"]},
            {key: value for key, value in group.items() if key not in ("names", "params")},
        )
        for group in groups
    ]


ALL = {
    f"blocks.{i}.{name}"
    for i in range(2)
    for name in ("proj.weight", "proj.bias", "norm.weight", "norm.bias")
} | {"head.weight"}


def test_without_settings_there_is_one_group_of_everything():
    assert split() == [(ALL, {})]


def test_norms_and_biases_are_spared_from_decay_where_asked_for():
    matrices = {name for name in ALL if "norm" not in name and "bias" not in name}
    assert split(decay_norms_and_biases=False) == [(matrices, {}), (ALL - matrices, {"weight_decay": 0.0})]


def test_the_first_group_that_matches_counts_and_the_rest_come_first():
    narrow = ParameterGroup(("predictor.blocks.0.proj.weight", "predictor.head"), lr_scale=0.1)
    wide = ParameterGroup(("predictor.blocks.{0}",), lr_scale=0.5, weight_decay=0.3)
    taken = {"blocks.0.proj.weight", "head.weight"}
    others = {name for name in ALL if name.startswith("blocks.0")} - taken
    assert split(parameter_groups=(narrow, wide)) == [
        (ALL - taken - others, {}),
        (taken, {"lr_scale": 0.1}),
        (others, {"lr_scale": 0.5, "weight_decay": 0.3}),
    ]


def test_a_groups_own_decay_holds_for_its_norms_and_biases_too():
    own = ParameterGroup(("predictor.blocks.0",), weight_decay=0.3)
    open_ = ParameterGroup(("predictor.blocks.1",), lr_scale=2.0)
    found = split(parameter_groups=(own, open_), decay_norms_and_biases=False)
    first = {name for name in ALL if name.startswith("blocks.0")}
    assert found == [
        ({"head.weight"}, {}),
        (first, {"lr_scale": 1.0, "weight_decay": 0.3}),
        ({"blocks.1.proj.weight"}, {"lr_scale": 2.0}),
        (
            {"blocks.1.proj.bias", "blocks.1.norm.weight", "blocks.1.norm.bias"},
            {"lr_scale": 2.0, "weight_decay": 0.0},
        ),
    ]


def test_a_group_that_matches_nothing_or_is_left_with_nothing_is_refused():
    with pytest.raises(PlanError, match=r"train\.parameter_groups\.0\.match: pattern 'predictor\.bloks'"):
        split(parameter_groups=(ParameterGroup(("predictor.bloks",)),))
    with pytest.raises(PlanError) as caught:
        split(parameter_groups=(ParameterGroup(("predictor",)), ParameterGroup(("predictor.head",))))
    assert str(caught.value) == (
        "train.parameter_groups.1.match: earlier groups already contain every parameter that this one"
        " matches\n"
        "  hint: put the narrower group first: the first group that matches a parameter applies"
    )


def test_freezing_takes_modules_and_parameters_out():
    task = task_of()
    names = freeze(task, ("predictor.blocks.{*}.norm", "predictor.head.weight"))
    assert {name.removeprefix("predictor.") for name in names} == {
        "blocks.0.norm.weight",
        "blocks.0.norm.bias",
        "blocks.1.norm.weight",
        "blocks.1.norm.bias",
        "head.weight",
    }
    assert {name for name, p in task.named_parameters() if not p.requires_grad} == set(names)
    assert freeze(task_of(), ()) == []


def test_freezing_nothing_or_everything_is_refused():
    with pytest.raises(PlanError, match=r"train\.freeze: pattern 'predictor\.norm' matches no module"):
        freeze(task_of(), ("predictor.norm",))
    with pytest.raises(PlanError) as caught:
        freeze(task_of(), ("predictor",))
    assert str(caught.value) == (
        "train.freeze: every parameter is frozen, so there is nothing to train\n"
        "  hint: leave some modules out of train.freeze"
    )


def test_the_engine_trains_each_group_at_its_rate_and_leaves_what_is_frozen():
    with torch.device("meta"):
        task = task_of()
    freeze(task, ("predictor.blocks.0.norm",))
    section = TrainSection(
        steps=1, parameter_groups=(ParameterGroup(("predictor.head",), lr_scale=0.1),), clip_grad_norm=None
    )
    engine = FSDP2Engine()
    # With beta1 = beta2 = 0 and no decay, AdamW moves every number by its rate.
    settings = {"lr": 0.5, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}
    with process_group():
        engine.prepare(
            task, engine.plan(task, 1, 2), lambda p: adamw(groups_of(p, section), **settings), Randomness(1)
        )
        before = {name: p.full_tensor().detach().clone() for name, p in engine.named_parameters()}
        assert (engine.base_lr, engine.scale_lr(0.5)) == (0.5, 0.25)
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        engine.micro_step(lambda: Loss(task.predictor(inputs).square().sum(), 1.0), last=True, scale=1.0)
        engine.step(engine.grad_norm(), None)
        moved = {
            name: (p.full_tensor().detach() - before[name]).abs() for name, p in engine.named_parameters()
        }
    assert torch.allclose(moved["predictor.head.weight"], torch.full((1, 3), 0.025))
    assert torch.allclose(moved["predictor.blocks.1.norm.bias"], torch.full((3,), 0.25))
    assert not moved["predictor.blocks.0.norm.weight"].any()
