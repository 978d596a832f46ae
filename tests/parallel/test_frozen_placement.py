"""Frozen components: built without memory, offloaded between calls, planned to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mm_core.contracts import FrozenPlan, Streamed, empty_parameters
from mm_core.errors import ContractError, PlanError
from mm_core.parallel.frozen_placement import blocks_of, bytes_of, place, plan_frozen

CPU = torch.device("cpu")
SIZE = 8


class Encoder(nn.Module):
    """Three blocks between a table and a norm; the table is also used at the end."""

    entry_points = ("encode",)
    block_patterns = "auto"
    weights_from = None

    def __init__(self) -> None:
        super().__init__()
        self.built = False

    def build_empty(self) -> None:
        if self.built:
            return
        with empty_parameters():
            self.table = nn.Embedding(5, SIZE)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)) for _ in range(3)
            )
            self.norm = nn.LayerNorm(SIZE)
            self.head = nn.Linear(SIZE, 5, bias=False)
            self.head.weight = self.table.weight
            self.register_buffer("places", torch.arange(SIZE) / SIZE, persistent=False)
        self.built = True

    def missing_files(self) -> list[str]:
        return []

    def encode(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids) + self.places
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden))


class SelfLoaded(nn.Module):
    def missing_files(self) -> list[str]:
        return []

    def load(self, device: torch.device) -> None: ...


class Task(nn.Module):
    trainable, frozen = ("predictor",), ("autoencoder", "text_encoder")

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Linear(4, 4)
        self.autoencoder = SelfLoaded()
        self.text_encoder = Encoder()


class Drawn:
    """Weights that depend on their names alone. Satisfies `InitialWeights` and `WeightPlan`."""

    def covers(self, state):
        self.names = set(state)
        return self

    def fill(self, state):
        for name, tensor in sorted(state.items()):
            generator = torch.Generator().manual_seed(sum(name.encode()))
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def placed(placement: str) -> Encoder:
    encoder = Encoder()
    encoder.build_empty()
    blocks = blocks_of(encoder, "text") if placement != "replicated" else ()
    place(encoder, FrozenPlan("text", placement, blocks, 0, 0, 0), CPU, Drawn())
    return encoder


def memory(module: nn.Module) -> int:
    """Bytes of the parameters' storages, each once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().size() for p in module.parameters()}
    return sum(storages.values())


def test_an_empty_model_has_its_tables_and_shares_what_is_shared():
    encoder = Encoder()
    with torch.device("meta"):
        encoder.build_empty()
    assert isinstance(encoder, Streamed)
    assert all(parameter.is_meta for parameter in encoder.parameters())
    assert torch.equal(encoder.places, torch.arange(SIZE) / SIZE)
    assert encoder.head.weight is encoder.table.weight
    assert not nn.Linear(2, 2).weight.is_meta  # outside, all is as it was


def test_a_model_that_cannot_be_made_leaves_modules_as_they_were():
    with pytest.raises(TypeError), empty_parameters():
        nn.Linear("wide", 2)
    assert not nn.Linear(2, 2).weight.is_meta


@torch.no_grad()
def test_offloaded_weights_compute_the_same_and_are_there_for_a_call_alone():
    ids = torch.tensor([[0, 3, 1]])
    whole, away = placed("replicated"), placed("offloaded")
    entire, rest = memory(whole), memory(whole) - memory(whole.layers)
    seen: list[int] = []
    for layer in away.layers:
        layer[1].register_forward_hook(lambda *_: seen.append(memory(away)))
    assert torch.equal(away.encode(ids), whole.encode(ids))
    block = memory(whole.layers[0])
    numbers = 4 * len(list(away.layers[1].parameters())) * 2  # the other blocks: a number a parameter
    assert seen == [rest + block + numbers] * 3 and max(seen) < entire
    assert memory(away) == 4 * len(list(away.parameters()))
    for kept, there in zip(away.parameters(), whole.parameters(), strict=True):
        assert (kept.shape, kept.dtype, kept.device) == (there.shape, there.dtype, there.device)
    assert torch.equal(away.encode(ids), whole.encode(ids))


def test_a_table_that_no_file_holds_and_that_is_not_computed_is_refused():
    """It would be unset memory."""
    encoder = Encoder()
    encoder.build_empty()
    encoder.places = torch.empty(SIZE, device="meta")
    with pytest.raises(ContractError, match="Encoder leaves 1 buffer without values: places") as fault:
        place(encoder, FrozenPlan("text", "replicated", (), 0, 0, 0), CPU, Drawn())
    assert "mm_core.contracts.empty_parameters" in fault.value.hint


def test_a_call_that_fails_leaves_nothing_behind():
    away = placed("offloaded")
    with pytest.raises(IndexError):
        away.encode(torch.tensor([[9]]))
    assert memory(away) == 4 * len(list(away.parameters()))
    handle = away.layers[1][1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        away.encode(torch.tensor([[0]]))
    handle.remove()
    assert memory(away) == 4 * len(list(away.parameters()))
    assert torch.equal(away.encode(torch.tensor([[2]])), placed("replicated").encode(torch.tensor([[2]])))


def test_frozen_weights_take_no_gradient_and_no_dropout():
    encoder = placed("replicated")
    assert not encoder.training and not any(p.requires_grad for p in encoder.parameters())


# -- the plan ------------------------------------------------------------------------------------


def built_task() -> Task:
    task = Task()
    task.text_encoder.build_empty()
    return task


def test_the_plan_counts_what_a_rank_keeps():
    task = built_task()
    table, layer, norm, places = 5 * SIZE, SIZE * SIZE + SIZE, 2 * SIZE, SIZE
    whole = 4 * (table + 6 * layer + norm + places)
    (plan,) = plan_frozen(task, {}, (), 2)
    assert (plan.name, plan.placement, plan.device_bytes, plan.call_bytes) == (
        "text_encoder", "replicated", whole, 0,
    )  # fmt: skip
    (plan,) = plan_frozen(task, {"text_encoder": "sharded"}, (), 2)
    # Five rows of the table make three for the first rank.
    assert plan.device_bytes == 4 * (3 * SIZE + 3 * layer + norm // 2 + places)
    assert plan.call_bytes == 4 * (table + norm + 2 * layer)
    assert plan.blocks == tuple(f"text_encoder.layers.{i}" for i in range(3))
    (plan,) = plan_frozen(task, {"text_encoder": "offloaded"}, (), 2)
    assert (plan.device_bytes, plan.host_bytes) == (4 * places, whole - 4 * places)
    assert bytes_of(task.text_encoder) == whole


def test_over_one_rank_nothing_is_cut():
    (plan,) = plan_frozen(built_task(), {"text_encoder": "sharded"}, (), 1)
    assert (plan.placement, plan.blocks) == ("replicated", ())


def test_what_is_not_built_yet_is_not_counted():
    assert plan_frozen(Task(), {"text_encoder": "sharded"}, (), 2) == ()


def test_blocks_that_share_weights_are_moved_together():
    encoder = Encoder()
    encoder.build_empty()
    encoder.layers[2][0].weight = encoder.layers[0][0].weight
    assert blocks_of(encoder, "text") == ()


@pytest.mark.parametrize(
    ("placements", "ignored", "sentence"),
    [
        ({"text": "sharded"}, (), "the task has no frozen component 'text'"),
        ({"autoencoder": "offloaded"}, (), "'autoencoder' loads its weights itself, in full on every rank"),
        (
            {"text_encoder": "sharded"},
            ("text_encoder",),
            "'text_encoder' would be sharded, but engine.ignored_modules excludes it from sharding",
        ),
    ],
)
def test_what_cannot_be_placed_so_is_a_readable_error(placements, ignored, sentence):
    with pytest.raises(PlanError) as caught:
        plan_frozen(built_task(), placements, ignored, 2)
    assert caught.value.what == sentence
