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
State = dict[str, Tensor]


def unsharded(case) -> State:
    """The state of a case's module, initialised without an engine."""
    with torch.device("meta"):
        module = script(SCRIPT).Net(case)
    initialise(module.to_empty(device="cpu"), "net", Randomness(script(SCRIPT).SEED))
    return {f"net.{name}": tensor for name, tensor in module.state_dict().items()}


@pytest.fixture(scope="module")
def plain() -> dict[str, State]:
    return {name: unsharded(case) for name, case in script(SCRIPT).cases().items()}


def outcome(folder: Path, world: int, **fields: object) -> dict[str, State]:
    run_ranks(SCRIPT, world, folder / "out.pt", json.dumps(fields))
    return torch.load(folder / "out.pt")


def equal(one: dict[str, State], other: dict[str, State]) -> None:
    assert one.keys() == other.keys()
    for name, state in one.items():
        assert isinstance(other[name], dict), f"{name}: {other[name]}"
        try:
            same(state, other[name])
        except AssertionError as fault:
            raise AssertionError(f"{name}: {fault}") from None


def test_every_function_of_torch_is_tried():
    public = {name for name, _ in inspect.getmembers(nn.init, inspect.isfunction) if name[0] != "_"}
    assert set(script(SCRIPT).FUNCTIONS) == {name for name in public if name.endswith("_")}


def test_functions_of_torch_fill_as_torch_does(plain):
    """With the seed of the parameter's name, in float32 rounded once; a given generator is used as it is."""
    parts = script(SCRIPT)
    draws = Randomness(parts.SEED).at("init")
    for name, (shapes, arguments) in parts.FUNCTIONS.items():
        for shape in shapes:
            for number, options in enumerate(arguments):
                torch.manual_seed(draws.seed32("net.weight", 1))
                expected = getattr(nn.init, name)(torch.empty(shape), **options)
                assert torch.equal(plain[f"{name} {number} {shape} float32"]["net.weight"], expected)
        shape, options = shapes[-1], arguments[0]
        for dtype, drawn in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
            torch.manual_seed(draws.seed32("net.weight", 1))
            expected = getattr(nn.init, name)(torch.empty(shape, dtype=drawn), **options).to(dtype)
            assert torch.equal(plain[f"{name} 0 {shape} {str(dtype)[6:]}"]["net.weight"], expected)
        if name not in parts.DRAWS_WITHOUT:
            torch.manual_seed(draws.seed32("net.weight", 1))
            expected = getattr(nn.init, name)(torch.empty(shape), **options, generator=parts.generator())
            assert torch.equal(plain[f"{name} 0 {shape} float32 generator"]["net.weight"], expected)


def test_ways_to_fill_a_parameter_fill_it_as_a_plain_tensor(plain):
    """Those that draw nothing are held against torch alone."""
    parts = script(SCRIPT)
    for name in parts.WAYS:
        net = parts.Net(parts.Case((5, 3), torch.float32, parts.WAYS[name]))
        with torch.no_grad():
            net.other.copy_(plain[name]["net.other"])
            nn.init.ones_(net.table)
            state = torch.random.get_rng_state()
            net.weight.fill_(float("nan"))
            parts.WAYS[name](net)
        if torch.equal(state, torch.random.get_rng_state()):
            assert torch.equal(net.weight, plain[name]["net.weight"]), name
        assert not bool(plain[name]["net.weight"].isnan().any()), name


def test_one_rank_is_a_plain_module(plain, tmp_path):
    equal(plain, outcome(tmp_path, 1))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"sharding_size": 1}, {"offload_to_cpu": True}])
def test_two_ranks_are_a_plain_module(plain, tmp_path, fields):
    if "sharding_size" in fields and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        pytest.skip("torch 2.7 cannot keep replicas on CPU")
    equal(plain, outcome(tmp_path, 2, **fields))
