"""Initial weights are equal over world sizes and meshes, however `init_weights` fills them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mm_core.contracts import Randomness
from mm_core.modules.initialise import initialise
from support.ranks import run_ranks
from support.scripts import script
from support.tensors import same

SCRIPT = Path(__file__).with_name("init_ranks.py")


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    """The state of all cases, initialised without an engine."""
    parts = script(SCRIPT)
    task = parts.task()
    for kind in task.trainable:
        initialise(task.get_submodule(kind).to_empty(device="cpu"), kind, Randomness(parts.SEED))
    return task.state_dict()


def outcome(folder: Path, world: int, **fields: object) -> dict[str, Tensor]:
    run_ranks(SCRIPT, world, folder / "out.pt", json.dumps(fields))
    return torch.load(folder / "out.pt")


def test_every_function_of_torch_is_tried():
    public = {name for name, _ in inspect.getmembers(nn.init, inspect.isfunction) if name[0] != "_"}
    assert set(script(SCRIPT).FUNCTIONS) == {name for name in public if name.endswith("_")}


def test_functions_of_torch_fill_as_torch_does(plain):
    """With the seed of the parameter's name, in float32 rounded once; a given generator is used as it is."""
    parts = script(SCRIPT)
    draws = Randomness(parts.SEED).at("init")

    def check(case: str, drawn: torch.dtype, **given: object) -> None:
        kind = parts.cases()[case].dtype
        name = f"of_{str(kind)[6:]}.{case}.weight"
        torch.manual_seed(draws.seed32(name, 1))
        full = torch.empty(plain[name].shape, dtype=drawn)
        expected = getattr(nn.init, case.split()[0])(full, **given)
        assert torch.equal(plain[name], expected.to(kind)), case

    for name, (shapes, arguments) in parts.FUNCTIONS.items():
        for shape in shapes:
            for number, options in enumerate(arguments):
                check(f"{name} {number} {shape} float32", torch.float32, **options)
        last, options = f"{name} 0 {shapes[-1]}", arguments[0]
        check(f"{last} bfloat16", torch.float32, **options)
        check(f"{last} float64", torch.float64, **options)
        if name not in parts.DRAWS_WITHOUT:
            check(f"{last} float32 generator", torch.float32, **options, generator=parts.generator())


def test_ways_to_fill_a_parameter_fill_it_as_a_plain_tensor(plain):
    """Those that draw nothing are held against torch alone."""
    parts = script(SCRIPT)
    for name, fill in parts.WAYS.items():
        net = parts.Net(parts.Case((5, 3), torch.float32, fill))
        state = torch.random.get_rng_state()
        with torch.no_grad():
            net.other.copy_(plain[f"of_float32.{name}.other"])
            net.table.fill_(1)
            net.weight.fill_(float("nan"))
            fill(net)
        if torch.equal(state, torch.random.get_rng_state()) and "generator" not in name:
            assert torch.equal(net.weight, plain[f"of_float32.{name}.weight"]), name


@pytest.mark.slow
def test_one_rank_is_a_plain_module(plain, tmp_path):
    same(plain, outcome(tmp_path, 1))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"sharding_size": 1}, {"offload_to_cpu": True}])
def test_two_ranks_are_a_plain_module(plain, tmp_path, fields):
    if "sharding_size" in fields and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        pytest.skip("torch 2.7 cannot keep replicas on CPU")
    same(plain, outcome(tmp_path, 2, **fields))
