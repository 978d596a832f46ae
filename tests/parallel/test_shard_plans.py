"""A model's own sharding plan: what it decides, what the config decides, and errors with near names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_core.contracts import ShardPlan, SupportsShardPlan
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import ContractError, PlanError
from mm_core.plan.run_plan import ComponentFact, RunPlan
from support.tiny_models import Task


class Chain(nn.Module):
    """Two stages of blocks, with a plan if one is given."""

    def __init__(self, plan: object = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.refiners = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)
        if plan is not None:
            self.shard_plan = lambda: plan


def planned(plan: object, **fields: object):
    with torch.device("meta"):
        task = Task(net=Chain(plan))
    return FSDP2Engine(**fields).plan(task, 2, 2)


def names(*paths: str) -> tuple[str, ...]:
    return tuple(f"net.{path}" for path in paths)


BLOCKS = names(*(f"blocks.{i}" for i in range(4)))
PLAN = ShardPlan(wrap=("blocks.{*}", "head"), recompute=("blocks.{0-2}",), prefetch=2)


def test_without_a_plan_nothing_changes():
    plan = planned(None)
    assert plan.wrapped == (*BLOCKS, *names("refiners.0", "refiners.1")) and plan.recomputed == ()
    assert not plan.forward_prefetch and not plan.backward_prefetch and not plan.decided_by


def test_a_plan_decides_what_the_config_leaves_open():
    plan = planned(PLAN)
    assert plan.wrapped == (*BLOCKS, *names("head"))
    assert plan.recomputed == BLOCKS[:3]
    assert plan.forward_prefetch == {
        BLOCKS[0]: BLOCKS[1:3],
        BLOCKS[1]: BLOCKS[2:4],
        BLOCKS[2]: (BLOCKS[3], "net.head"),
        BLOCKS[3]: ("net.head",),
        "net.head": (),
    }
    assert plan.backward_prefetch["net.head"] == (BLOCKS[3], BLOCKS[2])
    assert plan.backward_prefetch[BLOCKS[1]] == (BLOCKS[0],)
    assert plan.decided_by == {
        "wrapped": "net.shard_plan().wrap",
        "recomputed": "net.shard_plan().recompute",
        "prefetched": "net.shard_plan()",
    }


def test_the_config_wins_key_by_key():
    plan = planned(PLAN, sub_modules_to_wrap=["net.blocks.{0,1}"])
    assert plan.wrapped == BLOCKS[:2] and plan.recomputed == BLOCKS[:3]
    assert plan.forward_prefetch[BLOCKS[0]] == BLOCKS[1:2]
    assert plan.decided_by["wrapped"] == "engine.sub_modules_to_wrap"
    assert planned(PLAN, recompute_modules=[]).recomputed == ()
    assert planned(PLAN, recompute_modules=["net.head"]).recomputed == names("head")
    assert planned(PLAN, recompute_modules="auto").recomputed == BLOCKS[:3]
    plan = planned(PLAN, num_to_forward_prefetch=1)
    assert plan.forward_prefetch[BLOCKS[0]] == BLOCKS[1:2]
    assert plan.backward_prefetch["net.head"] == (BLOCKS[3], BLOCKS[2])
    assert plan.decided_by["prefetched"] == "net.shard_plan(), engine.num_to_forward_prefetch"
    plan = planned(PLAN, num_to_forward_prefetch=0, num_to_backward_prefetch=0)
    assert not plan.forward_prefetch and not plan.backward_prefetch


def test_a_plan_may_leave_the_choice_of_modules_to_the_engine():
    plan = planned(ShardPlan(prefetch=1))
    assert plan.wrapped == planned(None).wrapped
    assert plan.forward_prefetch[BLOCKS[3]] == names("refiners.0")
    assert planned(ShardPlan(), recompute_modules="auto").recomputed == plan.wrapped


def test_a_plan_may_name_another_order_than_that_of_the_modules():
    """Its refiners run first; the backward gathers in the opposite order."""
    order = {"refiners.0": ("refiners.1", "blocks.0"), "refiners.1": ("blocks.0", "blocks.1")}
    plan = planned(ShardPlan(prefetch=order))
    assert plan.forward_prefetch == {
        "net.refiners.0": names("refiners.1", "blocks.0"),
        "net.refiners.1": names("blocks.0", "blocks.1"),
    }
    assert plan.backward_prefetch["net.blocks.1"] == names("refiners.1")
    assert plan.backward_prefetch["net.blocks.0"] == names("refiners.1", "refiners.0")
    one = planned(ShardPlan(prefetch=order), sub_modules_to_wrap=["net.refiners.{*}"])
    assert one.forward_prefetch == {"net.refiners.0": names("refiners.1"), "net.refiners.1": ()}


def test_gathered_memory_counts_what_is_gathered_ahead():
    weight = (4 * 4 + 4) * 4
    rest = planned(None).gathered_bytes - 2 * weight
    assert planned(ShardPlan(prefetch=3)).gathered_bytes == rest + 4 * weight
    order = {"refiners.0": ("blocks.0", "blocks.3")}
    assert planned(ShardPlan(prefetch=order)).gathered_bytes == rest + 3 * weight


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            ShardPlan(wrap=("block.{*}",)),
            "net.shard_plan().wrap: pattern 'block.{*}' matches no module\n"
            "  accepted: a path such as 'blocks.{*}', 'blocks'",
        ),
        (
            ShardPlan(recompute=("blocks.{0-7}",)),
            "net.shard_plan().recompute: pattern 'blocks.{0-7}': no module has 4-7 in this place\n"
            "  accepted: 0, 1, 2, 3\n  hint: write {*} for all of them",
        ),
        (
            ShardPlan(wrap=("blocks",)),
            "net.shard_plan().wrap: 'net.blocks' is a container, which the forward never calls\n"
            "  accepted: the modules in it: net.blocks.{*}",
        ),
        (
            ShardPlan(wrap=("blocks.{*}",), prefetch={"blocks.0": ("block.1",)}),
            "net.shard_plan().prefetch: 'block.1' is not a wrapped module\n"
            "  accepted: paths of wrapped modules, such as 'blocks.1', 'blocks.3', 'blocks.2'",
        ),
        (
            ShardPlan(wrap=(), prefetch={"blocks.0": ("blocks.1",)}),
            "net.shard_plan().prefetch: 'blocks.0' is not a wrapped module\n"
            "  accepted: nothing: no module is wrapped",
        ),
    ],
)
def test_wrong_paths_name_the_nearest_modules(plan, text):
    with pytest.raises(PlanError) as fault:
        planned(plan)
    assert str(fault.value) == text


def rendered(plan: object, **fields: object) -> list[str]:
    """The lines on sharding of `mm-train --dry-run`."""
    run = RunPlan(
        name="tiny",
        engine=planned(plan, **fields),
        components=(ComponentFact("task", "t", "d", "1"),),
        modules=(),
        steps=1,
        micro_batch_size=1,
        global_batch_size=2,
        accumulation=1,
    )
    lines = run.render().splitlines()
    begin = lines.index("sharding") + 1
    return [line.strip() for line in lines[begin : lines.index("batches") - 1]]


def test_the_plan_of_a_run_shows_who_decided():
    assert rendered(PLAN, recompute_modules=["net.head"]) == [
        "wrapped        5  net.blocks.0, net.blocks.1, ... net.head  (by net.shard_plan().wrap)",
        "recomputed     1  net.head  (by engine.recompute_modules)",
        "ignored        0",
        "prefetched     5  net.blocks.0, net.blocks.1, ... net.head  (by net.shard_plan())",
    ]
    assert rendered(None, recompute_modules=["net.head"], num_to_forward_prefetch=1) == [
        "wrapped        6  net.blocks.0, net.blocks.1, ... net.refiners.1",
        "recomputed     1  net.head",
        "ignored        0",
    ]


def test_a_plan_that_separates_tied_weights_is_refused():
    with torch.device("meta"):
        net = Chain(ShardPlan(wrap=("blocks.{*}",)))
        net.blocks[1].weight = net.head.weight
    with pytest.raises(
        PlanError, match=r"net\.shard_plan\(\)\.wrap: 'net\.blocks\.1' shares 'net\.blocks\.1\.weight'"
    ):
        FSDP2Engine().plan(Task(net=net), 2, 2)


def test_what_is_no_plan_is_named():
    with pytest.raises(ContractError) as fault:
        planned({"wrap": ["blocks.{*}"]})
    with torch.device("meta"):
        line = Chain({}).shard_plan.__code__.co_firstlineno
    assert str(fault.value) == (
        f"net, {__file__}, line {line}: shard_plan of Chain returned {{'wrap': ['blocks.{{*}}']}}\n"
        "  accepted: a mm_core.contracts.ShardPlan\n"
        '  hint: return ShardPlan(wrap=("blocks.{*}",))'
    )
    with pytest.raises(ContractError) as fault:
        ShardPlan(wrap="blocks.{*}")
    assert str(fault.value) == (
        "wrap of a ShardPlan is 'blocks.{*}'\n"
        "  accepted: a tuple of patterns or paths\n"
        '  hint: write ("blocks.{*}",), with the comma'
    )
    for wrong in (-1, 1.5, "all"):
        with pytest.raises(ContractError, match="accepted: a number from 0 on, or a mapping of module paths"):
            ShardPlan(prefetch=wrong)
    assert isinstance(Chain(PLAN), SupportsShardPlan) and not isinstance(Chain(), SupportsShardPlan)
