"""What context parallelism refuses, what dropout draws on ranks that share samples, and their plan."""

from __future__ import annotations

import pytest
import torch
from mm_custom_dit.model import CustomDiT
from torch import nn

from mm_core.builtin.configs.engines import ContextParallelConfig
from mm_core.contracts import ContextPlan
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import ContractError, PlanError
from mm_core.parallel.activation_checkpointing import recompute
from mm_core.parallel.context.exchange import Peers
from mm_core.parallel.context.layout import ContextLayout, decide_context
from mm_core.parallel.context.spreading import Spreading
from support.tiny_models import Task

TINY = {"num_layers": 2, "num_heads": 3, "head_dim": 6, "patch_size": (1, 2, 2), "in_channels": 4}
TINY |= {"out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 16}

WAN = {name: TINY[name] for name in ("patch_size", "text_dim", "freq_dim", "in_channels", "out_channels")}


def task_of(**plan: object) -> Task:
    with torch.device("meta"):
        net = CustomDiT(**TINY)
    if plan:
        own = net.context_plan()
        net.context_plan = lambda: ContextPlan(**{**vars(own), **plan})
    return Task(net=net)


def task_of_wan() -> Task:
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 16, **WAN}
    with torch.device("meta"):
        return Task(net=pytest.importorskip("mm_wan.predictor.transformer").WanTransformer(**sizes))


def planned(world: int, task: Task | None = None, size: int = 2, kind: str = "ulysses", **fields: object):
    engine = FSDP2Engine(context_parallel=ContextParallelConfig(size, kind), **fields)
    return engine.plan(task or task_of(), world, 2)


REFUSED = {
    "a size that does not divide the ranks": (
        lambda: planned(6, size=4),
        "engine.context_parallel.size: context size 4 does not divide 6 ranks\n  accepted: 1, 2, 3, 6",
    ),
    "a ring of masked attention": (
        lambda: planned(4, task_of(ring=False), kind="ring"),
        "engine.context_parallel.kind: net uses masks in its attention, which ring attention does not have\n"
        "  accepted: ulysses",
    ),
    "more ranks than heads": (
        lambda: planned(4, size=4),
        "engine.context_parallel.size: net has 3 heads, too few for 4 ranks to share\n"
        "  accepted: at most 3 with kind: ulysses\n  hint: set kind: ring, which splits no heads",
    ),
    "shard groups that cut a group": (
        lambda: planned(4, sharding_size=1),
        "engine.sharding_size: sharding_size 1 is no multiple of context_parallel.size, 2\n"
        "  accepted: auto, 2, 4",
    ),
    "a preset without shard groups": (
        lambda: planned(4, preset="ddp"),
        "engine.preset: preset ddp has shard groups of 1, which is no multiple of context_parallel.size, 2\n"
        "  accepted: zero2, zero3",
    ),
    "a model that does not declare its tokens": (
        lambda: planned(2, Task(net=nn.Linear(2, 2, device="meta"))),
        "engine.context_parallel: no trained component declares where its tokens are: net (Linear)\n"
        "  accepted: components with a `context_plan`, such as wan/transformer\n"
        '  hint: write context_plan in the model (the page "Long clips"), or set size: 1',
    ),
    "the older autograd path": (
        lambda: planned(2, use_reentrant=True),
        "engine.use_reentrant: the older autograd path recomputes without a forward's part of the tokens\n"
        "  accepted: false with context_parallel",
    ),
    "an attention beside that of torch": (
        lambda: planned(2, task_of_wan(), attention="flash_2"),
        "engine.attention: context_parallel with kind: ulysses does not work with the attention 'diffusers"
        " flash'\n  accepted: auto, sdpa, flash, efficient, cudnn, math",
    ),
    "a kernel of torch in the ring": (
        lambda: planned(2, kind="ring", attention="math"),
        "engine.attention: context_parallel with kind: ring does not work with the attention 'diffusers"
        " _native_math'\n"
        "  accepted: auto, sdpa",
    ),
    "a path that does not exist": (
        lambda: planned(2, task_of(gather={"proj_oud": 1})),
        "net.context_plan().gather: pattern 'proj_oud' matches no module",
    ),
    "an argument that the forward does not have": (
        lambda: planned(2, task_of(split={"blocks.0": {"hidden": 1}})),
        "net.context_plan().split: the forward of blocks.0 (CustomDiTBlock) has no argument 'hidden'\n"
        "  accepted: x, ",
    ),
    "a device without a kernel for the ring": (
        lambda: decide_context(task_of(), ["net"], ContextParallelConfig(2, "ring"), 2, "tpu"),
        "engine.context_parallel.kind: ring attention has no kernel for the device tpu\n  accepted: ulysses",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_plan_refuses(name):
    plan, sentence = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        plan()
    assert caught.value.render().startswith(sentence)


def test_the_plan_has_a_mesh_of_all_ranks_and_a_share_of_the_data_for_each_group():
    plan = planned(8, kind="ring", sharding_size=4)
    assert dict(plan.mesh) == {"replicate": 2, "shard": 2, "context": 2} and plan.data_parallel == 4
    assert planned(8, sharding_size=4).parameter_bytes == planned(8, size=1, sharding_size=4).parameter_bytes
    assert dict(planned(2, size=1).mesh) == {"replicate": 1, "shard": 2}


def test_an_attention_that_the_environment_chooses_is_refused_too(monkeypatch):
    assert planned(2, task_of_wan(), attention="flash").attention == {"net": "diffusers _native_flash"}
    assert planned(2, task_of_wan(), kind="ring").attention == {"net": "diffusers native"}
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "xformers")
    assert planned(2, task_of_wan(), size=1).attention == {"net": "diffusers xformers"}
    with pytest.raises(PlanError, match="'diffusers xformers'") as caught:
        planned(2, task_of_wan())
    assert caught.value.hint == "unset DIFFUSERS_ATTN_BACKEND, which chooses it"


@pytest.mark.parametrize(
    ("trained", "world", "size"), [(4, 1, 1), (4, 2, 2), (4, 6, 2), (2, 8, 2), (2, 3, 1)]
)
def test_samples_are_shared_by_as_many_ranks_as_there_are(trained, world, size):
    engine = FSDP2Engine(context_parallel=ContextParallelConfig(trained, "ring"))
    plan = engine.plan(task_of(), world, 2, purpose="sample")
    assert (plan.context.size if plan.context else 1, plan.data_parallel) == (size, world // size)


class Net(nn.Module):
    """Dropout before the tokens are split, of a part, and of all."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.before, self.block, self.after = (nn.Dropout(0.5) for _ in range(3))
        self.attention, self.masked, self.last = nn.Identity(), masked, nn.Identity()
        self.attention.forward = self.attend

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q = x[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=self.masked)[:, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.last(self.attention(self.block(self.before(x)))))


def spread(
    net: nn.Module, rank: int, kind: str = "ulysses", recomputed: str | None = None, **paths: object
) -> nn.Module:
    """The net as one of two ranks has it, to which nothing is sent."""
    given = {"attention": ("net.attention",), "split": {"net.block": {"input": 1}}, "gather": {"net.last": 1}}
    spreading = Spreading(ContextLayout(2, kind, **{**given, **paths}), Peers(rank, 2))
    if recomputed is not None:
        recompute(net.get_submodule(recomputed), False, spreading.kept)
    spreading.apply(Task(net=net))
    return net


def drawn(rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Which elements each dropout keeps on a rank."""
    net, found = Net(), {}
    spread(net, rank, kind="ring")
    for name in ("before", "block", "after"):

        def note(_, args, out, name=name):
            found[name] = nn.functional.dropout(torch.ones(1000), 0.5) if name == "after" else out != 0

        getattr(net, name).register_forward_hook(note)
    torch.manual_seed(seed)
    net(torch.ones(1, 40, 8, requires_grad=True))
    return found


def test_dropout_differs_between_the_parts_of_a_sample_and_not_elsewhere():
    one, two, again, other = drawn(0, 3), drawn(1, 3), drawn(1, 3), drawn(1, 4)
    assert torch.equal(one["before"], two["before"]) and torch.equal(one["after"], two["after"])
    assert one["block"].shape == (1, 20, 8) and not torch.equal(one["block"], two["block"])
    assert all(torch.equal(two[name], again[name]) for name in two)
    assert not torch.equal(two["block"], other["block"]) and not torch.equal(two["after"], other["after"])


class Joint(nn.Module):
    """Tokens of a picture and of a text attend in one sequence, with a mask of the text's padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last, self.seen = nn.Identity(), nn.Identity(), []
        self.attention.forward = self.attend

    def attend(self, text: torch.Tensor, picture: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = torch.cat([text, picture], 1).unflatten(-1, (2, 4)).transpose(1, 2)
        keys = torch.cat([mask, mask.new_ones(picture.shape[:2])], 1)[:, None, None]
        self.seen.append(q.shape[2])
        return nn.functional.scaled_dot_product_attention(q, q, q, keys).transpose(1, 2).flatten(2)

    def forward(self, text: torch.Tensor, picture: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.last(self.attention(text, picture, mask)[:, text.shape[1] :])


def test_tokens_beside_those_that_are_gathered_attend_with_them_and_stay_apart():
    inner = Joint()
    net = nn.ModuleDict({"inner": inner})
    given = {"text": 1, "picture": 1, "mask": 1}
    paths = {"attention": ("net.inner.attention",), "gather": {"net.inner.last": 1}}
    spread(net, 0, split={"net.inner": given}, beside=("text", "mask"), **paths)
    inner(torch.ones(1, 5, 8), torch.ones(1, 7, 8), torch.ones(1, 5, dtype=torch.bool))
    # Of 5 tokens of text and 7 of the picture this rank has 3 and 4; the picture's are put together again.
    assert inner.seen == [3 + 4]


class Kept(nn.Dropout):
    """Notes what dropout keeps, and saves for the backward what a recomputation must compute again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.masks = [*getattr(self, "masks", ()), out != 0]
        return out.sin()


@pytest.mark.parametrize("recomputed", [None, "", "around"], ids=["nothing", "all", "up to the split"])
def test_dropout_of_a_part_is_the_same_when_recomputed_and_in_the_steps_after(recomputed):
    """What is recomputed has a split in it, and ends before the gather."""

    def masks(rank: int) -> list[torch.Tensor]:
        net = Net()
        net.around = nn.Sequential(Kept(0.5))
        net.block = net.around
        spread(net, rank, recomputed=recomputed, split={"net.around.0": {"x": 1}})
        for seed in (3, 4):
            torch.manual_seed(seed)
            net(torch.ones(1, 40, 8, requires_grad=True)).sum().backward()
        return net.around[0].masks

    found = masks(1)
    if recomputed is not None:
        assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
        found = found[::2]
    plain = Net()
    plain.block = Kept(0.5)
    spread(plain, 1, split={"net.block": {"x": 1}})
    for seed, mask in zip((3, 4), found, strict=True):
        torch.manual_seed(seed)
        plain(torch.ones(1, 40, 8, requires_grad=True))
        assert torch.equal(plain.block.masks[-1], mask)


CALLS = {
    "fewer tokens than ranks": (
        lambda: spread(Net(), 0)(torch.ones(1, 1, 8)),
        "1 token of net.block cannot be shared by 2 ranks\n  accepted: at most 1 for samples of this size",
    ),
    "attention of the model's own": (
        lambda: spread(Net(), 0, attention=("net.block",))(torch.ones(1, 4, 8)),
        "net.block computes its attention by something else than F.scaled_dot_product_attention",
    ),
    "attention before the split": (
        lambda: spread(Net(), 0, split={"net.last": {"input": 1}}, gather={})(torch.ones(1, 4, 8)),
        "net.attention attends from 4 to 4 tokens, where context_plan gives this rank None",
    ),
    "an output that is not there": (
        lambda: spread(Net(), 0, split={"net.block": {1: 1}})(torch.ones(1, 4, 8)),
        "split['net.block'] of its context_plan: net.block returns 1 output, so there is no number 1\n"
        "  accepted: 0 to 0",
    ),
    "a mask in the ring": (
        lambda: spread(Net(masked=True), 0, kind="ring")(torch.ones(1, 4, 8)),
        "net.attention uses a mask, dropout or grouped heads in its attention, which ring attention does not",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_forward_refuses(name):
    call, sentence = CALLS[name]
    with pytest.raises(ContractError) as caught:
        call()
    assert sentence in caught.value.render()
