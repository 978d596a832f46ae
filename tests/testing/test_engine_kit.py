"""The conformance kit of engines: the shipped one passes, and one with a wrong line is refused."""

from __future__ import annotations

import math
import random
from contextlib import contextmanager
from dataclasses import replace
from inspect import getsourcelines
from pathlib import Path

import pytest
import torch

from mm_core.contracts import Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.plugin.registry import get_registry
from mm_core.testing.kit import Examination
from mm_core.testing.suite import find_components
from mm_core.testing.training.engines.checks import KIT
from mm_core.testing.training.engines.task import Values
from support.conformance import examined, refusal

ALONE = [name for name in KIT.checks if name not in KIT.ranks]


class Good(FSDP2Engine):
    """Faults replace one method each."""


def planned(name: str, change) -> type:
    """An engine with other values in its plan."""

    def plan(self, task, world, optimizer_state_tensors, *, purpose="train"):
        found = FSDP2Engine.plan(self, task, world, optimizer_state_tensors, purpose=purpose)
        return replace(found, **change(found, task, world, optimizer_state_tensors))

    return type(name, (Good,), {"plan": plan})


def prepared(name: str, change) -> type:
    """An engine that prepares a task with another seed, or other weights."""

    def prepare(self, task, plan, optimizer, rng, weights=None):
        FSDP2Engine.prepare(self, task, plan, optimizer, *change(rng, weights))

    return type(name, (Good,), {"prepare": prepare})


def stated(name: str, change) -> type:
    """An engine with another state."""

    def state_dict(self):
        state = FSDP2Engine.state_dict(self)
        return {**state, **change(state)}

    return type(name, (Good,), {"state_dict": state_dict})


def faulty(name: str, **methods) -> type:
    return type(name, (Good,), methods)


class Forgetful(Good):
    """It begins each step with a new optimizer state."""

    def step(self, norm, clip_grad_norm):
        super().step(norm, clip_grad_norm)
        self._optimizer.state.clear()


class Zeroed(Good):
    """Its buffers are cleared after the initialisation."""

    def prepare(self, task, plan, optimizer, rng, weights=None):
        super().prepare(task, plan, optimizer, rng, weights)
        with torch.no_grad():
            for buffer in task.net.buffers():
                buffer.zero_()


class LastBatch(Good):
    """Only the last micro-batch of a step counts."""

    def micro_step(self, compute, *, last, scale):
        if last:
            return super().micro_step(compute, last=last, scale=scale)
        with torch.no_grad():
            return compute()


class Scaled(Good):
    """It returns the scaled loss."""

    def micro_step(self, compute, *, last, scale):
        loss = super().micro_step(compute, last=last, scale=scale)
        return replace(loss, total=loss.total * scale)


class Attached(Good):
    """It returns the loss with its graph."""

    def micro_step(self, compute, *, last, scale):
        made = []

        def kept():
            made.append(compute())
            return made[0]

        super().micro_step(kept, last=last, scale=scale)
        return made[0]


class Finite(Good):
    """A loss that is not finite counts as 0."""

    def micro_step(self, compute, *, last, scale):
        def finite():
            loss = compute()
            return replace(loss, total=torch.nan_to_num(loss.total))

        return super().micro_step(finite, last=last, scale=scale)


class Unclipped(Good):
    """It never clips."""

    def step(self, norm, clip_grad_norm):
        super().step(norm, None)


class Normalised(Good):
    """It scales every gradient to the largest norm."""

    def step(self, norm, clip_grad_norm):
        if clip_grad_norm is not None:
            torch._foreach_mul_(self._gradients(), clip_grad_norm / norm)
        super().step(norm, None)


class Compound(Good):
    """It multiplies the rates of the step before."""

    def scale_lr(self, factor):
        for group in self._optimizer.param_groups:
            group["lr"] *= factor
        return self.base_lr * factor


class Uniform(Good):
    """It forgets the groups' own scale."""

    def scale_lr(self, factor):
        for group in self._optimizer.param_groups:
            group["lr"] = self.base_lr * factor
        return self.base_lr * factor


class Keeping(Good):
    """It keeps the gradients of a discarded step."""

    def discard(self):
        pass


class Updating(Good):
    """It updates with the gradients that it should discard."""

    def discard(self):
        self._optimizer.step()
        self._optimizer.zero_grad()


class Template(Good):
    """Its template is made by a step that moves the weights."""

    def state_template(self, stepped):
        for parameter in self._parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self.state_dict()


class Eager(Good):
    """It makes the state of every parameter, whatever a checkpoint has."""

    def state_template(self, stepped):
        return super().state_template([name for name, p in self._parameters.items() if p.requires_grad])


class ModelOnly(Good):
    """It loads no state of the optimizer."""

    def load_state_dict(self, state):
        own = self.state_dict()["model"]
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state["model"][name])


class NoBuffers(Good):
    """It loads parameters alone."""

    def load_state_dict(self, state):
        model = {**state["model"], "net.shift": self.state_dict()["model"]["net.shift"].clone()}
        super().load_state_dict({**state, "model": model})


class Stale(Good):
    """Its checkpoints hold the weights of the first one."""

    def state_dict(self):
        state = super().state_dict()
        self.first = getattr(self, "first", {n: t.detach().clone() for n, t in self.begun.items()})
        return {**state, "model": self.first}

    def prepare(self, task, plan, optimizer, rng, weights=None):
        super().prepare(task, plan, optimizer, rng, weights)
        self.begun = {n: t.detach().clone() for n, t in self._model_state().items()}


class Melting(Good):
    """It trains what is frozen."""

    def prepare(self, task, plan, optimizer, rng, weights=None):
        task.net.requires_grad_(True)
        super().prepare(task, plan, optimizer, rng, weights)


class Empty(Good):
    """It leaves frozen components without weights."""

    def place_frozen(self, task, plan, weights):
        super().place_frozen(task, plan, Values({}))


class Training(Good):
    """It evaluates in training mode."""

    @contextmanager
    def evaluating(self):
        with super().evaluating():
            for module in self._trained.values():
                module.train()
            yield


class Partial(Good):
    """It evaluates the trained components alone in evaluation mode."""

    def prepare(self, task, plan, optimizer, rng, weights=None):
        super().prepare(task, plan, optimizer, rng, weights)
        self._task = None


class Remembering(Good):
    """It evaluates with the weights of its first evaluation."""

    @contextmanager
    def evaluating(self):
        now = [parameter.detach().clone() for _, parameter in self.named_parameters()]
        self.first = getattr(self, "first", now)
        self.set(self.first)
        with super().evaluating():
            yield
        self.set(now)

    @torch.no_grad()
    def set(self, values):
        for (_, parameter), value in zip(self.named_parameters(), values, strict=True):
            parameter.copy_(value)


class Restless(Good):
    """After an evaluation, all modules are in training mode."""

    @contextmanager
    def evaluating(self):
        with super().evaluating():
            yield
        for module in self._trained.values():
            module.train()


class Trainer(Good):
    """It cannot do without an optimizer."""

    def prepare(self, task, plan, optimizer, rng, weights=None):
        super().prepare(task, plan, optimizer, rng, weights)
        self.rates = [group["lr"] for group in self._optimizer.param_groups]


class Beside(Good):
    """Its optimizer updates weights of which the model has copies: what is written into them is lost."""

    def shards(self):
        self.masters = getattr(
            self, "masters", [replace(s, master=s.master.clone()) for s in super().shards()]
        )
        return self.masters


def sharded(name: str, change) -> type:
    """An engine with other shards."""
    return faulty(name, shards=lambda self: map(change, FSDP2Engine.shards(self)))


def plan_on_device(self, task, world, optimizer_state_tensors, *, purpose="train"):
    task.net.to_empty(device="cpu")
    return FSDP2Engine.plan(self, task, world, optimizer_state_tensors, purpose=purpose)


def parameters_alone(state):
    return {"model": {name: t for name, t in state["model"].items() if name != "net.shift"}}


FAULTS = [
    ("plans", faulty("OnDevice", plan=plan_on_device), "plan changes the task: net."),
    (
        "plans",
        planned("Other", lambda plan, *_: {"details": {"wrapped": ("net.layers.0",)}}),
        "the plan names modules that the task has not: net.layers.0",
    ),
    (
        "plans",
        planned("Alone", lambda *_: {"world": 1}),
        "the plan of 2 ranks has world 1, data_parallel 2 and the mesh {'replicate': 1, 'shard': 2}",
    ),
    (
        "plans",
        planned("Elements", lambda plan, *_: {"parameter_bytes": plan.parameter_bytes // 4}),
        "on one rank, parameter_bytes is 260, but the tensors have 1,040 bytes",
    ),
    (
        "plans",
        planned("Stateless", lambda plan, *_: {"optimizer_bytes": plan.gradient_bytes}),
        "on one rank, optimizer_bytes for two more tensors of state is 0",
    ),
    (
        "plans",
        planned("Total", lambda plan, _, world, __: {"gradient_bytes": world * plan.gradient_bytes}),
        "gradient_bytes is ",
    ),
    (
        "initialises",
        prepared("Fixed", lambda rng, weights: (Randomness(0), weights)),
        "with another seed, net.first.weight begins with the same values",
    ),
    (
        "initialises",
        prepared("Random", lambda rng, weights: (Randomness(random.randrange(2**31)), weights)),
        "with the same seed, net.",
    ),
    ("initialises", Zeroed, "after prepare, net.shift has not the value that init_weights sets"),
    (
        "initialises",
        prepared("Deaf", lambda rng, weights: (rng, None)),
        "after prepare, net.blocks.0.layer.bias, net.blocks.0.layer.weight, net.blocks.0.norm.bias,",
    ),
    ("trains", Forgetful, "after scale_lr(1) and a step, net."),
    ("trains", LastBatch, "after a step of four micro-batches, net."),
    ("trains", Scaled, "the loss that micro_step returns is "),
    ("trains", Attached, "micro_step does not return the loss, detached, with its weight"),
    (
        "trains",
        faulty("Summed", grad_norm=lambda self: sum(float(g.norm()) for g in self._gradients())),
        "grad_norm is ",
    ),
    (
        "trains",
        faulty("AsTensor", grad_norm=lambda self: torch.tensor(FSDP2Engine.grad_norm(self))),
        "grad_norm is tensor(",
    ),
    ("trains", Unclipped, "after a step that clips at a small norm, net."),
    ("trains", Normalised, "after a step that clips at a large norm, net."),
    ("trains", Compound, "after scale_lr(0.5) and a step"),
    ("trains", Uniform, "after scale_lr(0.5) and a step, net.head.weight, net.scale differs by"),
    (
        "trains",
        faulty("First", base_lr=property(lambda self: self._base_lrs[0], lambda *_: None)),
        "base_lr is 0.025, but 0.05 in plain torch",
    ),
    ("skipped_steps", Finite, "the loss of micro-batch 1 of 2 is NaN, but grad_norm is "),
    ("skipped_steps", Keeping, "in the step after a discarded one, net."),
    ("skipped_steps", Updating, "discard changes net."),
    ("resumes", Template, "state_template changes net."),
    (
        "resumes",
        Eager,
        "state_template, given net.first.weight, makes optimizer state of net.blocks.0.layer.bias, ",
    ),
    ("resumes", ModelOnly, "the first step of a resumed run has other bits in net."),
    ("resumes", NoBuffers, "load_state_dict does not load the buffer net.shift"),
    (
        "resumes",
        stated("Counting", lambda state: {"optimizer": {**state["optimizer"], "net.scale.steps": 2}}),
        "state_dict has optimizer.net.scale.steps, which is not a tensor",
    ),
    (
        "resumes",
        stated(
            "Numbered",
            lambda state: {"optimizer": {f"{n}.step": t for n, t in enumerate(state["optimizer"].values())}},
        ),
        "the optimizer's part of state_dict does not name the trained parameters: 0, 1, 10, 11, and 44 more",
    ),
    (
        "exported_weights",
        stated("NoTables", parameters_alone),
        "the model's part of state_dict has too many or too few names: net.shift",
    ),
    (
        "exported_weights",
        stated("Half", lambda state: {"model": {n: t.bfloat16() for n, t in state["model"].items()}}),
        "has another shape or dtype in state_dict than in the model",
    ),
    ("exported_weights", Stale, "has other values in state_dict than in named_parameters"),
    (
        "shards",
        sharded("Copies", lambda shard: replace(shard, master=shard.master.clone())),
        "once the masters of shards() are doubled, net.blocks.0.layer.bias, ",
    ),
    ("shards", Beside, "the loss with what was written into shards is "),
    (
        "shards",
        sharded("Flat", lambda shard: replace(shard, shape=(math.prod(shard.shape),))),
        "are doubled, net.blocks.0.layer.weight, net.blocks.1.layer.weight, net.first.weight, ",
    ),
    (
        "shards",
        faulty("Missing", shards=lambda self: (s for s in FSDP2Engine.shards(self) if s.shape)),
        "once the masters of shards() are doubled, net.scale is wrong",
    ),
    (
        "exported_weights",
        Melting,
        "the optimizer gets other parameters than the trained ones: net.fixed.bias",
    ),
    (
        "exported_weights",
        Empty,
        "the frozen component computes with other weights than place_frozen was given",
    ),
    ("evaluation", Training, "within evaluating() modules are in training mode"),
    ("evaluation", Partial, "within evaluating() the task itself is in training mode"),
    ("evaluation", Remembering, "the loss in an evaluation after 1 step is "),
    ("evaluation", Restless, "after evaluating() modules are in other modes than before"),
    ("evaluation", Trainer, "'NoneType' object has no attribute 'param_groups'"),
]
_WITH_WEIGHTS = {"evaluation", "shards", "skipped_steps", "trains"}
_WITH_STATE = {"exported_weights", "initialises", "resumes"}
BESIDE = {
    "Other": {*ALONE},
    "Zeroed": _WITH_WEIGHTS,
    "Deaf": {*_WITH_WEIGHTS, "exported_weights"},
    "Forgetful": {"resumes", "skipped_steps"},
    "LastBatch": {"skipped_steps"},
    "Compound": {"evaluation", "skipped_steps"},
    "Uniform": {"evaluation", "skipped_steps"},
    "NoTables": _WITH_STATE,
    "Half": _WITH_STATE,
    "Stale": {"resumes"},
    "Melting": _WITH_WEIGHTS,
    "Empty": _WITH_WEIGHTS,
}
"""Checks that cannot pass either with a fault, as they need what it breaks."""


def failed(engine: type) -> set[str]:
    """The checks without ranks that an engine fails."""
    examination = examined("core/fsdp2", engine, ranks=False)
    return {check for check in ALONE if examination.run(check).status == "failed"}


def test_the_shipped_engine_passes() -> None:
    outcomes = list(examined("core/fsdp2", ranks=False))
    assert [(o.check, o.reason) for o in outcomes if o.status != "passed"] == []
    assert {o.check for o in outcomes} >= {*ALONE}


@pytest.mark.parametrize(("check", "fault", "sentence"), FAULTS, ids=[each.__name__ for _, each, _ in FAULTS])
def test_a_wrong_line_fails_the_check_that_is_for_it(check: str, fault: type, sentence: str) -> None:
    assert sentence in refusal("core/fsdp2", check, fault, ranks=False)


@pytest.mark.slow
def test_the_other_checks_pass_unless_they_need_what_is_wrong() -> None:
    for check, fault, _ in FAULTS:
        assert failed(fault) - {check} <= BESIDE.get(fault.__name__, set()), fault.__name__


def test_an_error_names_the_authors_file_and_line() -> None:
    reason = refusal("core/fsdp2", "trains", Unclipped, ranks=False)
    assert f"{__file__}, line {getsourcelines(Unclipped)[1]}" in reason


def test_an_engine_for_accelerators_alone_is_not_checked_on_the_cpu() -> None:
    examination = examined("core/fsdp2", capabilities={"cpu": False})
    for check in ("trains", "sharded_training"):
        outcome = examination.run(check)
        assert outcome.status == "not applicable"
        assert outcome.reason == "the engine declares that it needs an accelerator (`cpu: False`)"


# -- on two ranks ------------------------------------------------------------------------------

PLUGIN = """
from dataclasses import replace

import torch

from mm_core import Component, hookimpl
from mm_core.contracts import Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.modules.shards import local
from mm_core.runtime.ranks import Ranks


class Engine(FSDP2Engine):
    {method}


@hookimpl
def mm_engines():
    config = "mm_core.builtin.configs.engines:FSDP2Config"
    return [Component(name="own", target="own_engine:Engine", config=config, tiny={tiny})]
"""


def on_ranks(folder: Path, method: str = "pass", **tiny: object) -> Examination:
    """A one-file engine with a method of its own."""
    file = folder / "own_engine.py"
    file.write_text(PLUGIN.replace("{method}", method.strip()).replace("{tiny}", repr(tiny)))
    registry = get_registry((str(file),))
    (registered,) = find_components(registry, "local/own")
    return Examination(registered, registry)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [{}, {"reshard_after_forward": False, "recompute_modules": "auto"}])
def test_a_good_engine_passes_on_ranks(tiny: dict[str, object], tmp_path: Path) -> None:
    examination = on_ranks(tmp_path, **tiny)
    outcomes = [examination.run(check) for check in KIT.ranks]
    assert [(o.status, o.reason) for o in outcomes] == [("passed", "")] * 2


SHARDED = {
    "own norm": (
        "sharded_training",
        """
    def grad_norm(self):
        return float(torch.nn.utils.get_total_norm([local(g) for g in self._gradients()]))
""",
        "in step 1 on 2 ranks, grad_norm of rank 0 is ",
    ),
    "same share": (
        "sharded_training",
        """
    def prepare(self, task, plan, *given):
        super().prepare(task, plan, *given)
        self.data_ranks = replace(self.data_ranks, rank=0)
""",
        "in step 1 on 2 ranks, ",
    ),
    "own seed": (
        "sharded_training",
        """
    def prepare(self, task, plan, optimizer, rng, weights=None):
        super().prepare(task, plan, optimizer, Randomness(rng.seed + Ranks.current().rank), weights)
""",
        "before a step on 2 ranks, the evaluated loss of rank 0 is ",
    ),
    "sum over ranks": (
        "sharded_training",
        """
    def micro_step(self, compute, *, last, scale):
        return super().micro_step(compute, last=last, scale=scale * Ranks.current().count)
""",
        "in step 1 on 2 ranks, grad_norm of rank 0 is ",
    ),
    "shards in the checkpoint": (
        "sharded_checkpoint",
        """
    def state_dict(self):
        return {part: {n: local(t) for n, t in held.items()} for part, held in super().state_dict().items()}
""",
        "one rank cannot load a checkpoint of 2: ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_a_line_that_is_wrong_on_ranks_alone_fails_the_check_that_is_for_it(
    name: str, tmp_path: Path
) -> None:
    check, method, sentence = SHARDED[name]
    examination = on_ranks(tmp_path, method)
    outcomes = {each: examination.run(each) for each in KIT.ranks}
    assert outcomes[check].status == "failed" and sentence in outcomes[check].reason
    assert f"{tmp_path / 'own_engine.py'}, line" in outcomes[check].reason, "the author's file"
    assert check == "sharded_training" or outcomes["sharded_training"].status == "passed"
