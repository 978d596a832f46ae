"""The conformance kits of optimizers and learning-rate schedules: good ones pass, faulty ones are refused."""

from __future__ import annotations

import math
from inspect import getsourcelines
from pathlib import Path

import pytest
import torch

from mm_core.plugin.registry import get_registry
from mm_core.testing.kit import Examination
from mm_core.testing.small_kinds import LR_SCHEDULE
from mm_core.testing.suite import find_components
from mm_core.testing.training import optimizers
from support.conformance import examined, refusal, shortcomings

# -- optimizers --------------------------------------------------------------------------------


class Good(torch.optim.Optimizer):
    """AdamW in plain words; faults replace one method each."""

    def __init__(self, groups, lr: float = 1e-3, weight_decay: float = 0.01):
        self.made_with = lr
        self.count = 0
        super().__init__(self.taken(groups), {"lr": lr, "weight_decay": weight_decay})

    def taken(self, groups):
        return [dict(group) for group in groups]

    def rate(self, group):
        return group["lr"]

    def decay(self, group):
        return group["lr"] * group["weight_decay"]

    def gradient(self, parameter):
        return parameter.grad

    def trains(self, parameter):
        return True

    def fresh(self, parameter):
        zeros = torch.zeros_like(parameter)
        return {"mean": zeros, "square": zeros.clone(), "step": torch.zeros(())}

    def update(self, state):
        mean, square = (
            state["mean"] / (1 - 0.9 ** state["step"]),
            state["square"] / (1 - 0.99 ** state["step"]),
        )
        return mean / (square.sqrt() + 1e-8)

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = self.gradient(parameter)
                if gradient is None or not self.trains(parameter):
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.fresh(parameter))
                state["step"] += 1
                state["mean"].lerp_(gradient, 0.1)
                state["square"].lerp_(gradient**2, 0.01)
                parameter.mul_(1 - self.decay(group))
                parameter.sub_(self.rate(group) * self.update(state))


def faulty(name: str, **methods) -> type:
    return type(name, (Good,), methods)


class Stepped(Good):
    """The scale of its step falls with a count that no checkpoint holds."""

    def rate(self, group):
        return group["lr"] / self.count


class Late(Good):
    """It makes a state tensor in the second step only."""

    def update(self, state):
        if state["step"] > 1:
            state.setdefault("late", torch.zeros(()))
        return super().update(state)


class Drifting(Good):
    """Its steps depend on how many optimizers were made before."""

    made = 0

    def __init__(self, groups, lr: float = 1e-3, weight_decay: float = 0.01):
        Drifting.made += 1
        super().__init__(groups, lr, weight_decay)
        self.share = 1 + 1e-3 * Drifting.made

    def update(self, state):
        return self.share * super().update(state)


FAULTS = [
    (
        "groups",
        faulty("Flat", taken=lambda self, groups: [{"params": g["params"]} for g in groups]),
        "the group of head.weight has lost its lr_scale and weight_decay",
    ),
    (
        "groups",
        faulty("First", taken=lambda self, groups: [dict(groups[0])]),
        "head.weight is in 0 of the optimizer's groups",
    ),
    (
        "updates",
        faulty("Matrices", trains=lambda self, parameter: parameter.dim() > 0),
        "a step does not change logit_scale (), which has a gradient",
    ),
    (
        "updates",
        faulty(
            "All",
            gradient=lambda self, p: torch.ones_like(p) if p.grad is None else p.grad,
        ),
        "a step changes conv.weight, which has no gradient",
    ),
    (
        "updates",
        faulty("Uphill", update=lambda self, state: -Good.update(self, state)),
        "the first step moves embed.weight along its gradient",
    ),
    (
        "updates",
        faulty("Divided", update=lambda self, state: Good.update(self, state) / (state["step"] - 1)),
        "a step makes NaN or infinity",
    ),
    (
        "rates",
        faulty("Own", rate=lambda self, group: self.made_with),
        "a step at the learning rate 0 changes embed.weight, conv.weight",
    ),
    (
        "rates",
        faulty("Leader", rate=lambda self, group: self.param_groups[0]["lr"]),
        "with the learning rate 0 in the group of head.weight and head.bias, a step changes embed.weight",
    ),
    (
        "rates",
        faulty("Twice", rate=lambda self, group: group["lr"] * group.get("lr_scale", 1.0)),
        "the optimizer multiplies its rate by the group's lr_scale",
    ),
    (
        "weight_decay",
        faulty("Same", decay=lambda self, group: group["lr"] * self.defaults["weight_decay"]),
        "a step changes head.weight, head.bias, whose gradient is 0 and whose group has weight_decay 0",
    ),
    (
        "weight_decay",
        faulty("Growing", decay=lambda self, group: -group["lr"] * group["weight_decay"]),
        "weight_decay 0.5 of a group does not shrink head.weight",
    ),
    ("deterministic", Drifting, "differently after 1 step"),
    ("resumes", Stepped, "differ after a resumed run's first step"),
    ("resumes", Late, "embed.weight.late"),
    (
        "resumes",
        faulty("Counting", fresh=lambda self, p: {**Good.fresh(self, p), "step": 0}),
        "the state embed.weight.step, conv.weight.step",
    ),
    (
        "state_tensors",
        faulty("Three", fresh=lambda self, p: {**Good.fresh(self, p), "kept": p.clone()}),
        "the state of a 64x64 matrix takes 3.00 times its bytes, but state_tensors declares 2",
    ),
]


@pytest.mark.parametrize("ranks", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["core/adamw", "core/adamw_8bit", "core/muon"])
def test_shipped_optimizers_keep_their_contract(name: str, ranks: bool) -> None:
    assert shortcomings(name, ranks=ranks) == []


def test_an_optimizer_whose_package_is_missing_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    outcomes = list(examined("core/muon"))
    assert [o.reason for o in outcomes if o.status == "failed"] == []
    (reason,) = {o.reason for o in outcomes if o.check in optimizers.KIT.checks}
    assert reason.startswith("muon needs torch.optim.Muon, which torch ")


def test_a_good_optimizer_passes() -> None:
    assert failed("core/adamw", Good, optimizers.KIT) == []


@pytest.mark.parametrize(("check", "fault", "sentence"), FAULTS, ids=[each.__name__ for _, each, _ in FAULTS])
def test_each_fault_of_an_optimizer_is_one_error(check: str, fault: type, sentence: str) -> None:
    reason = refusal("core/adamw", check, fault, config=None)
    assert sentence in reason


def test_the_right_check_of_optimizers_fails() -> None:
    """Others fail only where a fault breaks what they need too."""
    beside = {
        "Flat": {"weight_decay"},
        "First": {"updates", "weight_decay"},
        "Divided": {"rates", "weight_decay", "resumes"},
        "Drifting": {"rates", "resumes"},
    }
    for check, fault, _ in FAULTS:
        found = set(failed("core/adamw", fault, optimizers.KIT))
        assert check in found
        assert found - {check} <= beside.get(fault.__name__, set()), fault.__name__


def failed(name: str, fault: type, kit) -> list[str]:
    """The checks of the kind that a class fails in place of a shipped component's target."""
    examination = examined(name, fault, config=None)
    return [
        check for check in kit.checks if check not in kit.ranks and examination.run(check).status == "failed"
    ]


def test_an_error_names_the_authors_file_and_line() -> None:
    reason = refusal("core/adamw", "resumes", Stepped, config=None)
    assert f"{__file__}, line {getsourcelines(Stepped)[1]}" in reason
    reason = refusal("core/cosine", "pure", Counted, config=None)
    assert f"{__file__}, line {getsourcelines(Counted)[1]}" in reason


OWN = """
import torch
from torch.distributed.tensor import DTensor

from mm_core import Component, hookimpl


class Own(torch.optim.Optimizer):
    def __init__(self, groups, lr: float = 0.01):
        super().__init__([dict(group) for group in groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p.sub_(group["lr"] * state["mean"] / (p.grad.norm() + 1e-6))


@hookimpl
def mm_optimizers():
    return [Component(name="own", target="own:Own", capabilities={"state_tensors": 1})]
"""
SHARDED = [
    (
        "p.grad.norm()",
        "(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).norm()",
        "step 1 on 2 ranks moves embed.weight otherwise than on one, by ",
    ),
    (
        "p.sub_(",
        "p.view(-1).data_ptr(); p.sub_(",
        "on 2 ranks that share the parameters, the optimizer fails: ",
    ),
    (
        'state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)',
        "local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad\n"
        '                    state.setdefault("mean", torch.zeros_like(local)).lerp_(local, 0.1)\n'
        "                    share = p.to_local() if isinstance(p, DTensor) else p\n"
        '                    share.sub_(group["lr"] * state["mean"])\n'
        "                    continue",
        "the state embed.weight.mean, conv.weight.mean, head.weight.mean, head.bias.mean of a sharded",
    ),
]


def own_optimizer(folder: Path, old: str = "", new: str = "") -> Examination:
    """A one-file optimizer with a line replaced."""
    file = folder / "own.py"
    assert not old or OWN.count(old) == 1, old
    file.write_text(OWN.replace(old, new) if old else OWN)
    registry = get_registry((str(file),))
    (registered,) = find_components(registry, "local/own")
    return Examination(registered, registry)


@pytest.mark.slow
def test_a_good_optimizer_passes_over_sharded_parameters(tmp_path: Path) -> None:
    outcome = own_optimizer(tmp_path).run("sharded")
    assert (outcome.status, outcome.reason) == ("passed", "")


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "sentence"), SHARDED)
def test_a_line_that_is_wrong_for_shards_alone_is_refused(
    old: str, new: str, sentence: str, tmp_path: Path
) -> None:
    examination = own_optimizer(tmp_path, old, new)
    assert examination.run("updates").status == examination.run("resumes").status == "passed"
    outcome = examination.run("sharded")
    assert outcome.status == "failed" and sentence in outcome.reason
    assert f"{tmp_path / 'own.py'}, line" in outcome.reason, "the author's file"


# -- learning-rate schedules -------------------------------------------------------------------


class Curve:
    """Linear warm-up, then half a cosine; faults replace `at`."""

    def __init__(self, total_steps, base_lr, warmup_steps: int = 0):
        self.total, self.base, self.warmup, self.calls = total_steps, base_lr, warmup_steps, 0

    def factor(self, step: int) -> float:
        self.calls += 1
        return self.at(step)

    def at(self, step):
        if step < self.warmup:
            return step / self.warmup
        return 0.5 * (1 + math.cos(math.pi * step / max(self.total, 1)))


def bent(name: str, at) -> type:
    return type(name, (Curve,), {"at": at})


class Counted(Curve):
    """Its factor falls from call to call."""

    def at(self, step):
        return super().at(step) / self.calls


CURVES = [
    (
        bent("Negative", lambda self, step: Curve.at(self, step) - (step > 20)),
        "factor(21) of a run of 40 steps returned -0.539",
    ),
    (bent("Never", lambda self, step: 0.0), "the factor is 0 in all 40 steps of a run"),
    (
        bent("AsTensor", lambda self, step: torch.tensor(Curve.at(self, step))),
        "factor(0) of a run of 40 steps returned tensor(0.)",
    ),
    (Counted, "is a different one when steps are computed again"),
    (bent("Rate", lambda self, step: self.base * Curve.at(self, step)), "the factor grows with base_lr"),
]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "polynomial", "wsd"])
def test_shipped_schedules_keep_their_contract(name: str) -> None:
    assert shortcomings(f"core/{name}") == []


def test_a_good_schedule_passes() -> None:
    assert failed("core/cosine", Curve, LR_SCHEDULE) == []


@pytest.mark.parametrize(("fault", "sentence"), CURVES, ids=[each.__name__ for each, _ in CURVES])
def test_each_fault_of_a_schedule_is_one_error(fault: type, sentence: str) -> None:
    assert sentence in refusal("core/cosine", "factors", fault, config=None)
