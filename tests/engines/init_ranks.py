"""Run by each rank: initialises one parameter after another in the ways of CASES.

usage: init_ranks.py OUT FIELDS: writes the full state of the task.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.init import orthogonal_ as orthogonal_by_name
from torch.nn.init import trunc_normal_ as trunc_normal_by_name

from mm_core.contracts import Randomness
from mm_core.engines.fsdp2 import FSDP2Engine
from support.rank_program import run_as_rank
from support.tensors import same, whole
from support.tiny_models import Task

SEED = 4
ANY = ((), (1,), (7,), (1, 4), (5, 3), (3, 5), (5, 3, 3))
MATRICES = ((5, 3), (3, 5), (1, 4), (4, 4))
KERNELS = ((5, 3, 3), (3, 4, 1, 2), (3, 2, 1, 2, 2))
WIDE = (*MATRICES, *KERNELS)
FUNCTIONS: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[dict[str, Any], ...]]] = {
    "uniform_": (ANY, ({}, {"a": -2.0, "b": 0.5})),
    "normal_": (ANY, ({}, {"mean": 1.0, "std": 0.02})),
    # The second interval makes torch draw by rejection from a uniform distribution.
    "trunc_normal_": (ANY, ({"std": 0.02}, {"std": 0.5, "a": -0.5, "b": 0.5}, {"a": 1.0, "b": 1.2})),
    "constant_": (ANY, ({"val": 0.3},)),
    "ones_": (ANY, ({},)),
    "zeros_": (ANY, ({},)),
    "eye_": (MATRICES, ({},)),
    "dirac_": (KERNELS, ({},)),
    "xavier_uniform_": (WIDE, ({}, {"gain": 5 / 3})),
    "xavier_normal_": (WIDE, ({}, {"gain": 5 / 3})),
    "kaiming_uniform_": (WIDE, ({"a": 5**0.5}, {"mode": "fan_out", "nonlinearity": "relu"})),
    "kaiming_normal_": (WIDE, ({}, {"mode": "fan_out", "nonlinearity": "relu"})),
    "orthogonal_": (WIDE, ({}, {"gain": 2.0})),
    "sparse_": (MATRICES, ({"sparsity": 0.4},)),
}
"""Every function of torch.nn.init: the shapes and the arguments to call it with."""

DRAWS_WITHOUT = {"constant_", "ones_", "zeros_", "eye_", "dirac_"}
"""Functions that draw nothing, so they take no generator."""


@dataclass(frozen=True)
class Case:
    """A parameter, and what `init_weights` does with the module that has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[Any], object]


class Net(nn.Module):
    """A module with the parameter of a case; `other` is one of the same shape."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(case.shape, dtype=case.dtype))
        self.other = nn.Parameter(torch.empty(case.shape, dtype=case.dtype))
        self.register_buffer("table", torch.empty(case.shape))
        self.case = case

    def init_weights(self) -> None:
        nn.init.ones_(self.table)
        nn.init.normal_(self.other)
        self.case.fill(self)


class Nets(nn.Module):
    """A module for each case of one dtype, by the name of the case."""

    def __init__(self, nets: dict[str, Net]) -> None:
        super().__init__()
        for name, net in nets.items():
            self.add_module(name, net)

    def init_weights(self) -> None:
        for net in self.children():
            net.init_weights()


def task() -> Task:
    """All cases on the meta device: a component for each dtype."""
    kinds: dict[str, dict[str, Net]] = {}
    with torch.device("meta"):
        for name, case in cases().items():
            kinds.setdefault(f"of_{str(case.dtype)[6:]}", {})[name] = Net(case)
        return Task(**{kind: Nets(nets) for kind, nets in kinds.items()})


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def by_function(name: str, options: dict[str, Any], seeded: bool) -> Callable[[Net], object]:
    def fill(net: Net) -> object:
        given = {"generator": generator()} if seeded else {}
        return getattr(nn.init, name)(net.weight, **options, **given)

    return fill


def of_functions() -> dict[str, Case]:
    cases = {}
    for name, (shapes, arguments) in FUNCTIONS.items():
        for shape in shapes:
            for number, options in enumerate(arguments):
                fill = by_function(name, options, False)
                cases[f"{name} {number} {shape} float32"] = Case(shape, torch.float32, fill)
        for dtype in (torch.bfloat16, torch.float64):
            fill = by_function(name, arguments[0], False)
            cases[f"{name} 0 {shapes[-1]} {str(dtype)[6:]}"] = Case(shapes[-1], dtype, fill)
        if name not in DRAWS_WITHOUT:
            fill = by_function(name, arguments[0], True)
            cases[f"{name} 0 {shapes[-1]} float32 generator"] = Case(shapes[-1], torch.float32, fill)
    return cases


def ramp(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), dtype=torch.float32).view(like.shape)


def rows_later(net: Net) -> None:
    """Keeps a view while the complete parameter changes."""
    rows = net.weight[1:3]
    nn.init.normal_(net.weight)
    rows.mul_(3)
    net.weight.add_(1)
    rows.zero_()


def two_views(net: Net) -> None:
    one, other = net.weight[:2], net.other[1:]
    one.normal_()
    other.fill_(2)
    one.neg_()
    net.weight[2:] = net.other[2:]


def in_place_operators(net: Net) -> None:
    net.weight.copy_(ramp(net.weight))
    net.weight *= 0.5
    net.weight -= net.other


def through_numpy(net: Net) -> None:
    net.weight.data.numpy()[:] = 3


WAYS: dict[str, Callable[[Net], object]] = {
    "normal_": lambda net: net.weight.normal_(0, 0.1),
    "normal_ generator": lambda net: net.weight.normal_(generator=generator()),
    "uniform_": lambda net: net.weight.uniform_(-1, 1),
    "exponential_": lambda net: net.weight.exponential_(2.0),
    "fill_": lambda net: net.weight.fill_(0.3),
    "zero_": lambda net: net.weight.zero_(),
    "zeros mul_": lambda net: net.weight.zero_().mul_(2),
    "mul_": lambda net: nn.init.normal_(net.weight).mul_(0.3),
    "div_ add_ clamp_": lambda net: nn.init.normal_(net.weight).div_(3).add_(1).clamp_(0.9, 1.1),
    "mul_ tensor": lambda net: nn.init.normal_(net.weight).mul_(ramp(net.weight)),
    "add_ row": lambda net: nn.init.ones_(net.weight).add_(torch.arange(3.0)),
    "mul_ parameter": lambda net: nn.init.normal_(net.weight).mul_(net.other),
    "addcmul_": lambda net: nn.init.ones_(net.weight).addcmul_(net.other, ramp(net.weight)),
    "copy_": lambda net: net.weight.copy_(ramp(net.weight)),
    "copy_ drawn": lambda net: net.weight.copy_(torch.randn(net.weight.shape)),
    "copy_ drawn like": lambda net: net.weight.copy_(torch.randn_like(net.weight)),
    "copy_ drawn twice": lambda net: net.weight.copy_(torch.rand(net.weight.shape) + torch.randn(5, 3)),
    "copy_ parameter": lambda net: net.weight.copy_(net.other),
    "copy_ row": lambda net: net.weight.copy_(torch.arange(3)),
    "copy_ norm": lambda net: net.weight.copy_(net.other / net.other.norm(dim=0, keepdim=True)),
    "copy_ transposed": lambda net: net.weight.copy_(torch.linalg.qr(net.other.T)[0].T[:1]),
    "div_ norm": lambda net: nn.init.normal_(net.weight).div_(net.weight.norm()),
    "slices": lambda net: (net.weight[:2].normal_(), net.weight[2:].uniform_()),
    "slices of columns": lambda net: (net.weight[:, :1].normal_(), net.weight[:, 1:].zero_()),
    "slices of functions": lambda net: (
        nn.init.normal_(net.weight[:2]),
        nn.init.xavier_uniform_(net.weight[2:]),
    ),
    "orthogonal slices": lambda net: (nn.init.zeros_(net.weight), nn.init.orthogonal_(net.weight[:3])),
    "rows set": lambda net: (nn.init.normal_(net.weight), net.weight.__setitem__(4, 0.0)),
    "row filled": lambda net: (nn.init.normal_(net.weight), net.weight[3].fill_(0)),
    "masked": lambda net: nn.init.normal_(net.weight).masked_fill_(ramp(net.weight) > 6, 0.0),
    "set by mask": lambda net: (nn.init.ones_(net.weight), net.weight.__setitem__(net.other > 0, -1.0)),
    "index_fill_": lambda net: nn.init.ones_(net.weight).index_fill_(0, torch.tensor([0, 4]), 7.0),
    "chunks": lambda net: [part.normal_() for part in net.weight.chunk(3)],
    "rows": lambda net: [row.fill_(number) for number, row in enumerate(net.weight)],
    "transposed": lambda net: nn.init.orthogonal_(net.weight.t()),
    "transposed kaiming": lambda net: nn.init.kaiming_uniform_(net.weight.T),
    "view": lambda net: (
        net.weight.zero_(),
        net.weight.view(-1)[3:9].normal_().add_(net.weight.flatten()[9:]),
    ),
    "views whole": lambda net: net.weight.view(-1).copy_(torch.randn(15)),
    "triangle": lambda net: nn.init.ones_(net.weight).tril_(),
    "cumulated": lambda net: nn.init.ones_(net.weight).cumsum_(0),
    "data": lambda net: net.weight.data.normal_(0, 0.02),
    "data slices": lambda net: (net.weight.data[:2].zero_(), net.weight.data[2:].normal_()),
    "data copy_": lambda net: net.weight.data.copy_(ramp(net.weight)),
    "data set": lambda net: setattr(net.weight, "data", ramp(net.weight)),
    "detached": lambda net: net.weight.detach().normal_(),
    "out": lambda net: torch.mul(net.other, 2, out=net.weight),
    "by name": lambda net: orthogonal_by_name(net.weight),
    "trunc_normal_ by name": lambda net: trunc_normal_by_name(net.weight),
    "rows later": rows_later,
    "two views": two_views,
    "in-place operators": in_place_operators,
    "numpy": through_numpy,
    "buffer": lambda net: (nn.init.ones_(net.weight), net.table.copy_(net.weight.cumsum(0))),
    "twice": lambda net: nn.init.normal_(nn.init.normal_(net.weight)),
}
"""Further ways to fill a 5 x 3 parameter."""


def cases() -> dict[str, Case]:
    ways = {name: Case((5, 3), torch.float32, fill) for name, fill in WAYS.items()}
    low = {
        f"{name} bf16": Case((5, 3), torch.bfloat16, WAYS[name])
        for name in ("normal_", "slices", "copy_ drawn")
    }
    return {**of_functions(), **ways, **low}


def main(out: str, fields: str) -> None:
    net = task()
    engine = FSDP2Engine(param_dtype=None, sub_modules_to_wrap=(), **json.loads(fields))
    engine.prepare(net, engine.plan(net, dist.get_world_size(), 0), None, Randomness(SEED))
    found = {name: whole(tensor) for name, tensor in net.state_dict().items()}
    ranks: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    for rank in ranks:
        same(rank, found)
    if dist.get_rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    run_as_rank(main)
