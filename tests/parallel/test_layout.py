"""Layouts: `auto` patterns, what may be ignored, and meshes."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import PlanError
from mm_core.parallel.layout import decide_layout, mesh_shape


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleList([nn.Linear(8, 8), nn.GELU()])


class ListTask(nn.Module):
    trainable = ("predictor",)
    frozen = ("autoencoder",)

    def __init__(self, predictor: nn.Module) -> None:
        super().__init__()
        self.predictor = predictor
        self.autoencoder = nn.Conv3d(3, 4, 1)


def layout(task, wrap="auto", recompute=(), ignore=()):
    return decide_layout(task, task.trainable, wrap=wrap, recompute=recompute, ignore=ignore)


def test_auto_takes_lists_of_like_blocks():
    assert layout(ListTask(Lists())).wrapped == tuple(f"predictor.layers.{i}" for i in range(3))


def test_auto_takes_the_outer_ones_of_lists_within_lists():
    """Like blocks whose experts are modules themselves: each would be gathered separately."""
    model = Lists()
    for layer in range(3):
        model.layers[layer] = nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(4)))
    assert layout(ListTask(model)).wrapped == tuple(f"predictor.layers.{i}" for i in range(3))


def test_auto_takes_what_the_model_names():
    wan = WanTransformer3DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=12, ffn_dim=16, text_dim=8, freq_dim=8
    )
    assert layout(ListTask(wan)).wrapped == ("predictor.blocks.0", "predictor.blocks.1")


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_a_trained_component_is_no_container(container):
    layers = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    held = container(layers if container is nn.ModuleDict else layers.values())
    names = ("a", "b") if container is nn.ModuleDict else ("0", "1")
    with pytest.raises(PlanError) as caught:
        FSDP2Engine().plan(ListTask(held), 1, 2)
    assert str(caught.value) == (
        f"task.trainable: predictor is a {container.__name__}, which is never called as a whole\n"
        "  accepted: modules with a forward, since sharded weights are complete only during a call\n"
        f"  hint: name the modules in it: predictor.{names[0]}, predictor.{names[1]}"
    )


def test_frozen_modules_may_be_ignored_and_trained_ones_not():
    task = ListTask(Lists())
    assert layout(task, ignore=["autoencoder"]).ignored == ("autoencoder",)
    with pytest.raises(PlanError, match=r"'predictor\.stem' contains 2 trained parameters"):
        layout(task, ignore=["predictor.stem"])


def test_wrapping_a_frozen_module_is_refused():
    with pytest.raises(PlanError, match="'autoencoder' is not part of a trained module"):
        layout(ListTask(Lists()), wrap=["autoencoder"])


@pytest.mark.parametrize(
    ("world", "size", "mesh"), [(8, "auto", (1, 8)), (8, 1, (8, 1)), (8, 4, (2, 4)), (1, "auto", (1, 1))]
)
def test_meshes(world, size, mesh):
    assert mesh_shape(world, size) == mesh


def test_a_sharding_size_that_does_not_divide():
    with pytest.raises(PlanError) as fault:
        mesh_shape(8, 3)
    assert str(fault.value) == (
        "engine.sharding_size: sharding_size 3 does not divide 8 ranks\n  accepted: auto, 1, 2, 4, 8"
    )


def test_planned_bytes_are_those_of_the_largest_shard():
    with torch.device("meta"):
        task = ListTask(Lists())
    plan = FSDP2Engine().plan(task, 3, 2)
    # Of 8 rows over 3 ranks rank 0 holds 3: five weights of 8x8 less the GELU, and as many biases of 8.
    linears = 5
    expected = linears * (3 * 8 + 3) * 4
    assert (plan.parameter_bytes, plan.gradient_bytes, plan.optimizer_bytes) == (
        expected,
        expected,
        2 * expected,
    )


class Tied(Lists):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.stem.weight


def test_a_block_that_shares_a_parameter_with_the_rest_is_gathered_with_the_rest():
    assert layout(ListTask(Tied())).wrapped == ("predictor.layers.0", "predictor.layers.2")
    with pytest.raises(
        PlanError, match=r"'predictor\.layers\.1' shares 'predictor\.layers\.1\.weight' with"
    ) as e:
        layout(ListTask(Tied()), wrap=["predictor.layers.{*}"])
    assert "'predictor.stem.weight' outside of it" in str(e.value)
