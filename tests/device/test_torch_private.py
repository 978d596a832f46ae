"""Each name that mm_core takes from torch's private modules does on this torch what its users rely on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from mm_core.device import torch_private
from mm_core.device.torch_private import (
    DataDependentOutputException,
    DisableTorchFunctionSubclass,
    DTensorSpec,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TensorMeta,
    TorchDispatchMode,
    collectives_within,
    compute_local_shape_and_global_offset,
    fake_store,
    forget_layouts,
    functorch_config,
    in_backward,
    is_traceable_wrapper_subclass,
    kernel_of,
    layouts_unseen,
    shards_mixed,
    unset_fake_temporarily,
    without_modes,
)
from support.ranks import run_ranks
from support.scripts import nodes_of


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def second_of_two() -> Iterator[DeviceMesh]:
    """As the second rank of two has it, whose other rank is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


class Names(TorchDispatchMode):
    """The operators that ran within it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_each_entry_has_a_test_here():
    used = {node.id for node in nodes_of(Path(__file__)) if isinstance(node, ast.Name)}
    untested = {"Kernel", "divide_apart"}  # a type; the last test calls it in other processes
    assert set(torch_private.__all__) - used == untested


def test_fake_tensors_have_sizes_and_no_numbers_beside_real_weights():
    layer = nn.Linear(3, 5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = layer(torch.empty(2, 3))
        assert isinstance(out, FakeTensor) and out.shape == (2, 5)
    assert not isinstance(layer(torch.ones(2, 3)), FakeTensor)


def test_what_depends_on_numbers_raises_where_there_are_none():
    with FakeTensorMode():
        with pytest.raises(DataDependentOutputException) as number:
            torch.ones(()).item()
        with pytest.raises(DynamicOutputShapeException) as places:
            torch.ones(3).nonzero()
    assert str(number.value.func) == "aten._local_scalar_dense.default"
    assert str(places.value.func) == "aten.nonzero.default"


def test_the_other_ranks_of_a_fake_store_exist_in_name_only():
    dist.init_process_group("fake", rank=0, world_size=3, store=fake_store())
    try:
        rows = torch.zeros(3)
        dist.all_gather_into_tensor(rows, torch.ones(1))
        assert dist.get_world_size() == 3 and rows.sum() <= 3
    finally:
        dist.destroy_process_group()


def test_real_tensors_compute_where_fake_ones_are_set_aside():
    with FakeTensorMode(), unset_fake_temporarily():
        assert torch.ones(3).sum().item() == 3


def test_a_mode_sees_operators_forward_and_backward():
    weight = torch.ones(2, 2, requires_grad=True)
    with Names() as names:
        (weight @ torch.ones(2, 2)).sum().backward()
    assert names.seen.count("aten::mm") == 2 and "aten::sum" in names.seen


def test_modes_are_handed_over_and_see_nothing_until_the_end():
    with Names() as outer, Names() as inner:
        with without_modes() as modes:
            torch.ones(2).exp()
        torch.ones(2).log()
    assert set(modes) == {outer, inner}
    assert "aten::exp" not in outer.seen + inner.seen
    assert "aten::log" in outer.seen and "aten::log" in inner.seen


class Sizes(TorchDispatchMode):
    """Elements of the tensors that operators made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.seen += [each.numel() for each in tree_leaves(out) if isinstance(each, Tensor)]
        return out


def test_modes_do_not_see_how_shapes_of_sharded_tensors_are_computed():
    seen = []
    for unseen in (nullcontext(), layouts_unseen()):
        dist.init_process_group("fake", rank=0, world_size=4, store=fake_store())
        try:
            mesh = dist.init_device_mesh("cpu", (4,))
            sharded = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)], src_data_rank=None)
            with unseen, Sizes() as sizes:
                torch._foreach_exp([sharded])
        finally:
            dist.destroy_process_group()
            forget_layouts()
        seen.append(max(sizes.seen))
    assert seen == [24, 6]


class Scaled(Tensor):
    """A tensor that holds two plain ones, as quantised weights do."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Scaled:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_a_tensor_of_tensors_is_different_from_a_plain_one():
    assert is_traceable_wrapper_subclass(Scaled(torch.ones(2, dtype=torch.int8), torch.ones(2)))
    assert not is_traceable_wrapper_subclass(torch.ones(2))
    assert not is_traceable_wrapper_subclass(nn.Parameter(torch.ones(2)))


class Followed(Tensor):
    """Counts torch's functions that are called with it, and calls each as if it were a plain tensor."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls += 1
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_subclass_calls_a_function_without_being_asked_again():
    Followed.calls = 0
    out = torch.softmax(torch.ones(3).as_subclass(Followed), dim=0)
    assert Followed.calls == 1 and type(out) is Tensor


def test_the_place_of_a_shard_among_uneven_ones(second_of_two):
    sizes, starts = compute_local_shape_and_global_offset(torch.Size([5, 2]), second_of_two, [Shard(0)])
    assert (tuple(sizes), tuple(starts)) == ((2, 2), (3, 0))


def test_a_shard_becomes_a_sharded_tensor_in_the_memory_that_it_has(second_of_two):
    share = torch.ones(2, 4)
    meta = TensorMeta(torch.Size((5, 4)), (4, 1), share.dtype)
    whole = DTensor(share, DTensorSpec(second_of_two, (Shard(0),), meta), requires_grad=False)
    assert whole.shape == (5, 4) and whole.placements == (Shard(0),)
    assert whole.to_local().data_ptr() == share.data_ptr()


def test_layouts_of_a_mesh_that_is_gone_are_forgotten(mesh):
    kept = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache
    forget_layouts()
    assert kept.cache_info().currsize == 0
    whole = distribute_tensor(torch.full((4,), 3.0), mesh, [Replicate()])
    assert torch.linalg.vector_norm(whole).full_tensor().item() == 6
    forget_layouts()
    assert kept.cache_info().currsize == 0


def test_graphs_compiled_before_are_left_alone_within_the_patch():
    with functorch_config.patch(enable_autograd_cache=True):
        with functorch_config.patch(enable_autograd_cache=False):
            assert functorch_config.enable_autograd_cache is False
        assert functorch_config.enable_autograd_cache is True


def test_a_forward_in_a_backward_is_a_recomputation():
    seen = []

    def forward(given: Tensor) -> Tensor:
        seen.append(in_backward())
        return given.exp()

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True] and not in_backward()


def test_the_kernel_of_an_operator_on_a_device():
    assert kernel_of("aten::mm", "cpu") == "native"
    assert kernel_of("aten::linear", "cpu") == "decomposed"
    assert kernel_of("aten::_scaled_dot_product_flash_attention", "cpu") == "missing"
    registered = Library("_", "IMPL", "PrivateUse1")
    assert kernel_of("aten::mm", "privateuseone") == "missing"
    registered.fallback(fallthrough_kernel)
    try:
        assert kernel_of("aten::mm", "privateuseone") == "fallback"
    finally:
        registered._destroy()


def test_modules_of_mixed_dtypes_are_sharded_or_known_not_to_be(mesh):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].to(torch.bfloat16).requires_grad_(False)
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    try:
        module(torch.ones(1, 2)).sum().backward()
    except AssertionError:
        assert not shards_mixed()
    else:
        assert shards_mixed() and module[1].weight.grad is not None


def test_what_waits_in_fully_shard_goes_through_a_function(second_of_two):
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    layer = nn.Linear(4, 4)
    fully_shard(layer, mesh=second_of_two)
    before, called = dict(vars(FSDPParamGroup)), []
    for blocking, names in ((True, {"unshard"}), (False, {"wait_for_unshard", "finalize_backward"})):
        with collectives_within(
            lambda collective: called.append(collective.func.__name__) or collective(), blocking
        ):
            layer(torch.ones(2, 4)).sum().backward()
        assert set(called) == names | {"post_backward"}, "forward and backward"
        assert dict(vars(FSDPParamGroup)) == before
        called.clear()


@pytest.mark.slow
def test_gradients_on_the_cpu_are_averages(tmp_path):
    """torch 2.7 sums them, unless `divide_apart` divides."""
    program = tmp_path / "averaged.py"
    program.write_text(
        "import torch\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "from mm_core.parallel.gloo_averaging import average_by_sum\n"
        "from mm_core.runtime.ranks import Ranks\n"
        "from support.rank_program import run_as_rank\n"
        "def main():\n"
        "    layer = torch.nn.Linear(1, 4, bias=False)\n"
        "    fully_shard(layer)\n"
        "    average_by_sum(torch.device('cpu'), [layer])\n"
        "    layer(torch.full((1, 1), 1.0 + 2 * Ranks.current().rank)).sum().backward()\n"
        "    print(layer.weight.grad.full_tensor().flatten().tolist())\n"
        "run_as_rank(main)\n"
    )
    assert run_ranks(program, 2) == ["[2.0, 2.0, 2.0, 2.0]\n"] * 2
