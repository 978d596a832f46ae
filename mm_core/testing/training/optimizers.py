"""The conformance kit of optimizers: what the engine asks of a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mm_core.checkpoint.files.fingerprints import plain_tensors
from mm_core.contracts import Randomness
from mm_core.errors import plural
from mm_core.modules.shards import gathered
from mm_core.runtime.groups import device_mesh
from mm_core.testing.kit import Kit, Probe, checks_of
from mm_core.testing.ranks import ComponentBuild, ranks_of
from mm_core.testing.tensors import differing

_SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed.weight": (64, 64),
    "conv.weight": (6, 3, 2, 2),
    "head.weight": (5, 8),
    "head.bias": (5,),
    "logit_scale": (),
}
_OWN_GROUP = ("head.weight", "head.bias")
"""Parameters in a group of their own; it has no weight decay, as a config may set."""

_RATE = 0.01
_RANKS, _STEPS = 2, 2


Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes the optimizer from parameter groups."""


class Trial:
    """A new optimizer of the small instance over parameters of two groups.

    Args:
        build: makes the optimizer from its groups.
        values: the parameters' values; None: the same ones in every trial.
        settings: further settings of the second group, as `weight_decay` and `lr_scale`.
    """

    def __init__(self, build: Build, values: Mapping[str, Tensor] | None = None, **settings: float) -> None:
        values = _drawn("values") if values is None else values
        self.parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        first = [name for name in self.parameters if name not in _OWN_GROUP]
        self.groups = [
            {"params": [self.parameters[name] for name in names], "names": list(names), **own}
            for names, own in ((first, {}), (_OWN_GROUP, {"weight_decay": 0.0, **settings}))
        ]
        self.optimizer: torch.optim.Optimizer = build(self.groups)

    def group_of(self, name: str) -> dict[str, Any]:
        """The optimizer's own group of a parameter; {} if none has it."""
        groups = self.optimizer.param_groups
        return next((g for g in groups if any(p is self.parameters[name] for p in g["params"])), {})

    def set_rate(self, rate: float, names: tuple[str, ...] = tuple(_SHAPES)) -> None:
        """Sets the learning rate of the groups of some parameters, as the engine does before each step."""
        for name in names:
            self.group_of(name)["lr"] = rate

    def step(self, gradients: Mapping[str, Tensor], rate: float | None = _RATE) -> dict[str, Tensor]:
        """Takes a step at a learning rate; parameters without a gradient have None.

        Args:
            gradients: gradients by name.
            rate: the learning rate of all groups; None leaves the rates.

        Returns:
            The parameters' values after the step.
        """
        if rate is not None:
            self.set_rate(rate)
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].clone() if name in gradients else None
        with torch.random.fork_rng(devices=[]):  # optimizers may round by chance
            torch.default_generator.manual_seed(0)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return self.values()

    def values(self) -> dict[str, Tensor]:
        """Copies of the parameters; full ones of those that are sharded."""
        return {name: gathered(parameter) for name, parameter in self.parameters.items()}

    def state(self) -> dict[str, Any]:
        """The optimizer's state as a checkpoint names it: `path.key` -> value."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }


def _drawn(purpose: str, step: int = 0) -> dict[str, Tensor]:
    """Random tensors of the parameters' shapes; the same ones for equal arguments."""
    rng = Randomness(0)
    return {name: rng.normal(shape, purpose, step, name) for name, shape in _SHAPES.items()}


def groups(probe: Probe) -> None:
    """Every parameter given is in one group of the optimizer, which has a rate and keeps its settings."""
    trial = Trial(probe.build, lr_scale=0.5)
    held = [id(p) for group in trial.optimizer.param_groups for p in group["params"]]
    for name, parameter in trial.parameters.items():
        count = held.count(id(parameter))
        probe.expect(count == 1, f"{name} is in {count} of the optimizer's groups", accepted="one")
        wanted = {"lr_scale": 0.5, "weight_decay": 0.0} if name in _OWN_GROUP else {}
        lost = [key for key, value in wanted.items() if trial.group_of(name).get(key) != value]
        probe.expect(
            not lost,
            f"the group of {name} has lost its {' and '.join(lost)}",
            hint="pass the groups on as they are: `super().__init__([dict(g) for g in groups], defaults)`",
        )


def updates(probe: Probe) -> None:
    """A step changes each parameter that has a gradient, against it, and no other parameter."""
    trial = Trial(probe.build)
    for group in trial.optimizer.param_groups:
        group["weight_decay"] = 0.0
    before, gradients = trial.values(), _drawn("gradients")
    spared = ("conv.weight", "head.bias")
    after = trial.step({name: each for name, each in gradients.items() if name not in spared})
    probe.expect(
        all(bool(value.isfinite().all()) for value in after.values()), "a step makes NaN or infinity"
    )
    for name in gradients:
        moved = after[name] - before[name]
        if name in spared:
            probe.expect(not moved.any(), f"a step changes {name}, which has no gradient")
            continue
        probe.expect(moved.any(), f"a step does not change {name} {tuple(moved.shape)}, which has a gradient")
        probe.expect(
            (moved * gradients[name]).sum() < 0,
            f"the first step moves {name} along its gradient",
            accepted="against it: an optimizer minimises",
        )


def rates(probe: Probe) -> None:
    """A step uses the rate that the engine has set in each group: 0 changes nothing."""
    trial = Trial(probe.build)
    before, gradients = trial.values(), _drawn("gradients")
    moved = differing(before, trial.step(gradients, 0.0))
    probe.expect(
        not moved,
        f"a step at the learning rate 0 changes {', '.join(moved)}",
        accepted="no parameter: the engine makes the state that it loads a checkpoint into by such a step",
        hint='read group["lr"] in each step, and multiply the weight decay by it too',
    )
    trial = Trial(probe.build)
    trial.set_rate(_RATE)
    trial.set_rate(0.0, _OWN_GROUP)
    moved = differing(before, trial.step(gradients, None))
    probe.expect(
        moved and not set(moved) & set(_OWN_GROUP),
        f"with the learning rate 0 in the group of {' and '.join(_OWN_GROUP)}, a step changes"
        f" {', '.join(moved) or 'nothing'}",
        accepted="only parameters of the other group",
    )
    plain, scaled = (Trial(probe.build, lr_scale=scale).step(gradients) for scale in (1.0, 0.5))
    probe.expect(
        not differing(plain, scaled),
        "the optimizer multiplies its rate by the group's lr_scale, which is in the rate already",
        hint="leave lr_scale to the engine",
    )


def weight_decay(probe: Probe) -> None:
    """A group without weight decay keeps weights whose gradient is 0; one with it shrinks them."""
    zeros = {name: torch.zeros(shape) for name, shape in _SHAPES.items()}
    trial = Trial(probe.build)
    before = trial.values()
    moved = [name for name in differing(before, trial.step(zeros)) if name in _OWN_GROUP]
    probe.expect(
        not moved,
        f"a step changes {', '.join(moved)}, whose gradient is 0 and whose group has weight_decay 0",
        hint='read group["weight_decay"] of each group',
    )
    after = Trial(probe.build, weight_decay=0.5).step(zeros)
    for name in _OWN_GROUP:
        probe.expect(
            after[name].norm() < before[name].norm(),
            f"weight_decay 0.5 of a group does not shrink {name}",
            hint='read group["weight_decay"] of each group',
        )


def deterministic(probe: Probe) -> None:
    """Equal parameters and gradients give equal bits."""
    one, other = Trial(probe.build), Trial(probe.build)
    for step in range(2):
        gradients = _drawn("gradients", step)
        wrong = differing(one.step(gradients), other.step(gradients))
        probe.expect(
            not wrong,
            f"equal gradients change {', '.join(wrong)} differently after {plural(step + 1, 'step')}",
        )


def resumes(probe: Probe) -> None:
    """All state is tensors in `optimizer.state`: with it in a new optimizer, training goes on bit for bit."""
    trial = Trial(probe.build)
    for step in range(2):
        trial.step(_drawn("gradients", step))
    plain = [name for name, value in trial.state().items() if not isinstance(value, Tensor)]
    probe.expect(
        not plain,
        f"the state {', '.join(plain)} is not a tensor, so a checkpoint cannot contain it",
        accepted="tensors, such as a 0-dimensional one for a count",
    )
    again = Trial(probe.build, trial.values())
    again.step({name: torch.zeros(shape) for name, shape in _SHAPES.items()}, 0.0)  # makes the state
    stored, made = trial.state(), again.state()
    probe.expect(
        stored.keys() == made.keys(),
        f"after two steps the state has {', '.join(sorted(stored.keys() ^ made.keys()))}"
        " where it has not after one, or the other way round",
        hint="make all state of a parameter in its first step",
    )
    for path, value in stored.items():
        made[path].copy_(value)
    gradients = _drawn("gradients", 2)
    wrong = differing(trial.step(gradients), again.step(gradients))
    probe.expect(
        not wrong,
        f"{', '.join(wrong)} differ after a resumed run's first step",
        hint="keep what a step depends on in `self.state[parameter]`: a checkpoint holds nothing else",
    )


def state_tensors(probe: Probe) -> None:
    """The state of a large matrix takes the bytes that the component's `state_tensors` declares."""
    trial = Trial(probe.build)
    trial.step(_drawn("gradients"))
    name = next(iter(_SHAPES))
    parameter = trial.parameters[name]
    state = trial.optimizer.state.get(parameter, {}).values()
    tensors = (value for value in state if isinstance(value, Tensor))
    held = sum(part.nbytes for value in tensors for part in plain_tensors(value))
    ratio = held / parameter.nbytes
    declared = float(probe.registered.component.capabilities.get("state_tensors", 2))  # type: ignore[arg-type]
    probe.expect(
        # One tensor may be two of 8 bits with their tables; counts of a few bytes come on top.
        0.6 * declared <= ratio <= declared + 0.1,
        f"the state of a {'x'.join(map(str, parameter.shape))} matrix takes {ratio:.2f} times its bytes, but"
        f" state_tensors declares {declared:g}",
        hint="declare it: Component(..., capabilities={'state_tensors': n}); the plan's memory depends on it",
    )


def sharded(probe: Probe) -> None:
    """A step over parameters that two ranks share (DTensors) is that on one, and the state is shared too."""
    alone = Trial(probe.build)
    start = alone.values()
    wanted = [alone.step(_drawn("gradients", step)) for step in range(_STEPS)]
    what = " that share the parameters, the optimizer"
    hint = "use operations that torch has for DTensors, or those of `parameter.to_local()`"
    ranks = ranks_of(probe, what, _RANKS, _sharded_steps, ComponentBuild(probe), hint)
    for number, rank in enumerate(ranks):
        probe.expect(
            not rank["plain"],
            f"the state {', '.join(rank['plain'])} of a sharded parameter is a plain tensor, of which a"
            " checkpoint holds one rank's share",
            accepted="DTensors with the parameter's sharding, as zeros_like(parameter) makes them",
        )
        for step, found in enumerate(rank["values"]):
            before = wanted[step - 1] if step else start
            for name, value in wanted[step].items():
                error, moved = (float((each - value).abs().max()) for each in (found[name], before[name]))
                probe.expect(
                    error <= 0.1 * moved,  # states of 8 bits are rounded in blocks, which a shard may cut
                    f"step {step + 1} on {_RANKS} ranks moves {name} otherwise than on one, by {error:.1e} of"
                    f" {moved:.1e} on rank {number}",
                    accepted="the step of the full parameter, on every rank",
                    hint="norms and other sums over a parameter must be those of all its shards",
                )


def _sharded_steps(build: ComponentBuild) -> dict[str, Any]:
    """Run by each rank: steps over DTensors, and the names of state that is not sharded."""
    mesh = device_mesh((_RANKS,), ("shard",))

    def shared(value: Tensor) -> Tensor:
        return distribute_tensor(value, mesh, [Shard(0) if value.dim() else Replicate()])

    trial = Trial(build, {name: shared(value) for name, value in _drawn("values").items()})
    values = [
        trial.step({name: shared(value) for name, value in _drawn("gradients", step).items()})
        for step in range(_STEPS)
    ]
    state = trial.state().items()
    plain = [name for name, t in state if isinstance(t, Tensor) and t.dim() and not isinstance(t, DTensor)]
    return {"values": values, "plain": plain}


KIT = Kit(
    checks_of(__name__),
    arguments=lambda _: (
        [{"params": [nn.Parameter(torch.ones(4, 4))], "names": ["linear.weight"], "weight_decay": 0.0}],
    ),
    ranks=("sharded",),
)
"""The conformance checks of optimizers."""
