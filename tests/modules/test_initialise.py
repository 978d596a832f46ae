"""Tensors that `init_weights` leaves unset are found, for any dtype; set ones may have any value."""

from __future__ import annotations

import functools
import random
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.init import orthogonal_ as by_name

from mm_core.contracts import Randomness
from mm_core.errors import ContractError
from mm_core.modules.initialise import _MARKS, initialise, seeded_init
from mm_core.runtime.process_group import process_group

KINDS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
KINDS += (torch.uint16, torch.float32, torch.bfloat16, torch.complex64)
MARK = 0x5EEDA110C8ED0B57
VALUES = (0, 1, 0x57, 0xA8 - 256, 0x0B57, MARK, ~MARK, -(2**63), 2**63 - 1)


class Positions(nn.Module):
    """A table of `kind`, which `fill` fills."""

    def __init__(self, kind, fill, shape=(4, 3)):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))
        self.register_buffer("position_ids", torch.zeros(shape, dtype=kind), persistent=False)
        self.register_buffer("none", None)
        self.fill = fill
        self.calls = 0

    def init_weights(self):
        self.calls += 1
        nn.init.normal_(self.weight)
        self.weight.mul_(0.5)
        self.fill(self.position_ids)


def begun(kind, fill, shape=(4, 3), **options):
    with torch.device("meta"):
        module = Positions(kind, fill, shape)
    module.to_empty(device="cpu")
    initialise(module, "predictor", Randomness(1), **options)
    return module


def untouched(table):
    """Leaves a table unset."""


def last_row_left(table):
    table[:3] = 0


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("fill", (untouched, last_row_left))
def test_a_table_that_is_not_set_is_named_with_what_to_do(kind, fill):
    with pytest.raises(
        ContractError, match=r"Positions left 1 tensor unset: predictor\.position_ids"
    ) as fault:
        begun(kind, fill)
    assert "self.position_ids.copy_(values)" in fault.value.hint


def test_integer_weights_that_are_not_set_are_named():
    with torch.device("meta"):
        module = Positions(torch.int64, lambda table: table.zero_())
        module.codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ContractError, match=r"1 tensor unset: predictor\.codes"):
        initialise(module.to_empty(device="cpu"), "predictor", Randomness(1))


def write_through_numpy(table):
    table.numpy()[:] = 1


def write_out(table):
    torch.logical_or(torch.ones_like(table), table, out=table)


def write_rows(table):
    for row in table.data:
        row.fill_(True)


def write_mask(table):
    table.masked_fill_(torch.ones(4, 3, dtype=torch.bool), 1)


@pytest.mark.parametrize("kind", (torch.bool, torch.int8, torch.int64), ids=str)
@pytest.mark.parametrize("fill", (write_through_numpy, write_out, write_rows, write_mask))
def test_however_a_table_is_written_it_is_set(kind, fill):
    module = begun(kind, fill)
    assert bool((module.position_ids == 1).all())


@pytest.mark.parametrize("kind", KINDS[:6], ids=str)
def test_no_value_is_refused(kind):
    """Values equal to the marks in memory are accepted too."""
    for value in VALUES:
        whole = torch.tensor(value).to(kind).expand(4, 3)
        by_copy = begun(kind, functools.partial(copy_whole, whole))
        by_rows = begun(kind, functools.partial(copy_rows, whole))
        assert torch.equal(by_copy.position_ids, whole) and torch.equal(by_rows.position_ids, whole)
        assert by_copy.calls == 1, "what is written whole needs no second look"
        assert torch.equal(by_copy.weight, by_rows.weight), "a second look changes nothing"


def copy_whole(whole, table):
    table.copy_(whole)


def copy_rows(whole, table):
    for row, values in zip(table, whole, strict=True):
        row.copy_(values)


@pytest.mark.parametrize(
    "compute",
    (
        lambda table: table.add_(1),
        lambda table: table.clamp_(0, 1),
        lambda table: table.copy_(table),
        lambda table: table.copy_(table.clone()),
        lambda table: table.copy_((table > 0).sum()),
        lambda table: table.fill_(table.sum()),
        lambda table: table[:2].copy_(table[2:]),
        lambda table: table.bitwise_not_(),
        lambda table: torch.maximum(table, torch.zeros_like(table), out=table),
        lambda table: table.numpy().sort(),
    ),
)
def test_integers_that_are_computed_of_unset_memory_are_unset(compute):
    with pytest.raises(ContractError, match=r"1 tensor unset: predictor\.position_ids"):
        begun(torch.int64, compute)


def test_a_mask_that_is_turned_over_in_unset_memory_is_unset():
    with pytest.raises(ContractError, match=r"1 tensor unset: predictor\.position_ids"):
        begun(torch.bool, lambda table: table.logical_not_())


def test_integers_that_are_computed_of_another_table_before_it_is_set_are_unset():
    class Two(Positions):
        def init_weights(self):
            super().init_weights()
            self.others.copy_(self.position_ids + 1)
            self.position_ids.fill_(3)

    module = Two(torch.int64, lambda table: None)
    module.register_buffer("others", torch.zeros(4, 3, dtype=torch.int64))
    with pytest.raises(ContractError, match=r"1 tensor unset: predictor\.others"):
        initialise(module, "predictor", Randomness(1))


@pytest.mark.parametrize(
    "fill",
    (
        lambda table: table.copy_(torch.randint(0, 9, (4, 3))),
        lambda table: table[:].copy_(torch.randint(0, 9, (4, 3))),
        lambda table: table[:].random_(0, 9),
        lambda table: table.zero_().add_(random.randrange(9)),
        lambda table: [row.fill_(int(np.random.randint(9))) for row in table],
        lambda table: table.random_(0, 9).add_(1),
        lambda table: table.copy_(torch.arange(table.numel()).view(table.shape)).add_(table),
    ),
)
def test_integers_that_are_drawn_are_set(fill):
    assert torch.equal(begun(torch.int64, fill).position_ids, begun(torch.int64, fill).position_ids)


@pytest.mark.parametrize("shape", ((0, 3), (0,)))
def test_a_table_without_elements_is_set(shape):
    begun(torch.int64, untouched, shape)


def test_a_table_that_is_replaced_is_set():
    def fill(table):
        module.position_ids = torch.arange(5)

    with torch.device("meta"):
        module = Positions(torch.int64, fill)
    initialise(module.to_empty(device="cpu"), "predictor", Randomness(1))
    assert module.position_ids.tolist() == [0, 1, 2, 3, 4]


def test_what_other_means_fill_is_not_looked_at():
    begun(torch.bool, untouched, spared=("predictor.position_ids",))


@pytest.mark.parametrize(
    "draw",
    (
        lambda: torch.randn(4, 3),
        lambda: torch.tensor(np.random.rand(4, 3)),
        lambda: torch.tensor([[random.random()] * 3] * 4),
    ),
)
def test_draws_outside_of_parameters_are_by_seed_and_prefix(draw):
    """Whatever the process has drawn before, which no two ranks need agree on; and it goes on from there."""
    found, after = [], []
    for seed in (1, 2):
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        found.append(begun(torch.float32, lambda table: table.copy_(draw())).position_ids)
        after.append((torch.rand(()).item(), np.random.rand(), random.random()))
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        assert after[-1] == (torch.rand(()).item(), np.random.rand(), random.random())
    assert torch.equal(*found) and len(set(after)) == 2
    with torch.device("cpu"):
        other = Positions(torch.float32, lambda table: table.copy_(draw()))
    for prefix, seed in (("other", 1), ("predictor", 2)):
        initialise(other, prefix, Randomness(seed))
        assert not torch.equal(other.position_ids, found[0])


def test_a_second_look_draws_the_same_also_outside_of_parameters():
    once = begun(torch.float32, lambda table: table.data.copy_(torch.rand(4, 3)))

    def fill(table):
        table.data.copy_(torch.rand(4, 3) < 2)  # true, as the memory is marked
        drawn.append(torch.rand(3))

    drawn = []
    assert begun(torch.bool, fill).calls == 2
    assert torch.equal(*drawn) and once.calls == 1


@pytest.mark.parametrize(
    "draw",
    (
        lambda weight: nn.init.trunc_normal_(weight, std=0.5, a=-0.5, b=0.5),
        lambda weight: nn.init.orthogonal_(weight),
        lambda weight: nn.init.sparse_(weight, 0.5),
    ),
)
def test_draws_through_tensors_of_their_own_are_by_seed_and_name(draw):
    """As on ranks, where a view of a shard could not be drawn into."""

    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.empty(8, 8)), nn.Parameter(torch.empty(8, 8))

        def init_weights(self):
            draw(self.first)
            draw(self.second)

    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = Drawn()
        initialise(module, "predictor", Randomness(1))
        found.append(module.first.detach().clone())
        assert not torch.equal(module.first, module.second)
    assert torch.equal(*found)


def test_marks_differ_in_every_bit():
    for kind, (first, second) in _MARKS.items():
        bits = torch.tensor([first]).to(kind) ^ torch.tensor([second]).to(kind)
        assert bits.item() == (True if kind == torch.bool else -1)


@pytest.fixture
def sharded():
    """A 4 x 4 parameter that `fill` fills, as one rank of one holds it."""

    def begin(fill, **options):
        module = nn.Linear(4, 4, bias=False, device="meta")
        module.init_weights = lambda: fill(module.weight)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        module.to_empty(device="cpu")
        initialise(module, "predictor", Randomness(1), **options)
        return module.weight.to_local()

    with process_group(None):
        yield begin


def test_a_whole_tensor_is_copied_into_a_sharded_parameter(sharded):
    assert sharded(lambda w: w.copy_(torch.arange(16.0).view(4, 4))).flatten().tolist() == [*range(16)]
    assert sharded(lambda w: w.copy_(torch.arange(4))).tolist() == [[0, 1, 2, 3]] * 4
    drawn = [sharded(lambda w: w.copy_(torch.randn(4, 4))) for _ in range(2)]
    assert torch.equal(*drawn)

    def twice(weight):
        nn.init.ones_(weight)
        weight.copy_(weight * 2)

    assert bool((sharded(twice) == 2).all())
    spared = sharded(lambda w: w.copy_(torch.full((4, 4), 0.7312)), spared=("predictor.weight",))
    assert not bool((spared == 0.7312).any())  # its memory is unset: a number that nobody else writes


@pytest.mark.parametrize(
    "draw",
    (
        by_name,
        lambda w: (w[:2].normal_(), w[2:].zero_()),
        lambda w: w.data.normal_(),
        lambda w: w.t().normal_(),
    ),
)
def test_parts_and_views_of_sharded_parameters_are_drawn_as_those_of_plain_ones(sharded, draw):
    plain = nn.Linear(4, 4, bias=False)
    plain.init_weights = lambda: draw(plain.weight)
    initialise(plain, "predictor", Randomness(1))
    assert torch.equal(sharded(draw), plain.weight)
    assert not torch.equal(plain.weight[0], plain.weight[1])


def test_an_embedding_that_pads_resets_itself(sharded):
    """torch writes zeros into a row of the weight."""
    module = nn.Embedding(4, 4, padding_idx=2)
    fill = module._fill_padding_idx_with_zero

    def reset(weight):
        nn.init.normal_(weight)
        module.weight = weight
        fill()

    assert sharded(reset).count_nonzero(1).tolist() == [4, 4, 0, 4]


def test_full_tensors_live_no_longer_than_their_views(sharded):
    lives = []

    def fill(weight):
        rows = weight[:2]
        lives.append(weakref.ref(vars(rows)["_mm_full_tensor"]))
        rows.fill_(1)
        later = rows.t()
        del rows
        assert lives[0]() is not None
        later.mul_(2)
        del later
        lives.append(lives[0]() is None)
        weight[2:].zero_()

    assert sharded(fill).sum(1).tolist() == [8, 8, 0, 0]
    assert lives[1]


def test_parts_of_what_files_fill_are_not_written(sharded):
    found = sharded(lambda w: w[:2].fill_(0.7312), spared=("predictor.weight",))
    assert not bool((found == 0.7312).any())


def refusal(fill, shape=(4,)):
    """The error of a module whose weight `fill` fills, and the line of `fill`."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape))
    module.init_weights = lambda: fill(module)
    with pytest.raises(ContractError) as fault:
        initialise(module, "predictor", Randomness(1))
    return str(fault.value), f"{__file__}, line {fill.__code__.co_firstlineno}"


def test_what_torch_refuses_names_the_line_of_the_author(sharded):
    text, line = refusal(lambda module: nn.init.xavier_uniform_(module.weight))
    assert text.startswith(
        f"{line}: init_weights of Module fails in torch, at text, line = refusal(lambda module:"
        " nn.init.xavier_uniform_(module.weight)): Fan in and fan out"
    )
    assert text.endswith(
        " for tensor with fewer than 2 dimensions\n"
        "  hint: check shape and dtype in that line: the tensor has its full, unsharded shape there"
    )
    text, line = refusal(lambda module: nn.init.eye_(module.weight[:2]))
    assert text.startswith(f"{line}: ") and "Only tensors with 2 dimensions are supported" in text
    text, line = refusal(lambda module: module.weight.normal_(0, -1.0))
    assert text.startswith(f"{line}: ") and "normal expects std >= 0.0" in text
    with pytest.raises(
        ContractError, match=r"init_weights of Linear fails in torch, at .*mul_\(torch.ones\(5"
    ):
        sharded(lambda w: nn.init.ones_(w).mul_(torch.ones(5)))


def test_faults_in_the_authors_own_code_stay_what_they_are():
    def fill(module):
        raise ValueError("a size that this model does not know")

    module = nn.Linear(2, 2)
    module.init_weights = lambda: fill(module)
    with pytest.raises(ValueError, match=r"^a size that this model does not know$"):
        initialise(module, "predictor", Randomness(1))


def test_draws_into_a_shard_name_the_line_of_the_author(sharded):
    draws = (lambda w: w.to_local().normal_(), lambda w: nn.init.orthogonal_(w.to_local()))
    for draw, name in zip(draws, ("normal_", "orthogonal_"), strict=True):
        with pytest.raises(ContractError) as fault:
            sharded(draw)
        assert str(fault.value) == (
            f"{__file__}, line {draw.__code__.co_firstlineno}: init_weights calls {name} on a shard of"
            " predictor.weight: each rank would draw the same numbers\n"
            "  accepted: parameters and buffers of the module, their views, and plain tensors\n"
            f"  hint: pass the parameter itself: {name}(self.weight), not its local shard"
        )


def test_a_parameter_that_is_replaced_is_named():
    def replace(module):
        module.weight = nn.Parameter(torch.ones(4))

    text, _ = refusal(replace)
    assert text == (
        "predictor: init_weights of Module replaced 1 parameter by other objects: predictor.weight\n"
        "  accepted: the parameters of the constructor, filled in place: they are sharded already\n"
        "  hint: write self.weight.copy_(values) in place of self.weight = nn.Parameter(values), and tie"
        " weights in the constructor"
    )


def test_a_thread_that_builds_a_model_of_its_own_is_left_alone():
    module = Positions(torch.float32, untouched)
    with (
        seeded_init(module, "predictor", Randomness(1)) as mode,
        ThreadPoolExecutor(1) as threads,
    ):
        threads.submit(torch.no_grad()(nn.init.orthogonal_), module.weight).result()
        assert not mode.calls and not mode.filled
        nn.init.orthogonal_(module.weight)
        assert mode.calls == {"predictor.weight": 1}
