"""How a component's modules and tokens are spread over ranks, as it declares it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mm_core.errors import ContractError


@dataclass(frozen=True)
class ShardPlan:
    """How a model wants to be sharded. Paths and patterns are relative to the model: `blocks.{*}`.

    What the config of the engine sets takes precedence.

    Attributes:
        wrap: patterns of modules to gather one at a time; None: the engine finds repeated blocks.
        recompute: patterns of modules whose activations are recomputed in the backward.
        prefetch: how many wrapped modules are gathered ahead of the one that computes, in forward and
            backward. For a model that does not run them in the order of its modules: path of a wrapped
            module -> wrapped modules to gather while its forward computes, both in the order in which they
            run. The backward gathers in the opposite order.

    Raises:
        ContractError: a value of another type.
    """

    wrap: tuple[str, ...] | None = None
    recompute: tuple[str, ...] = ()
    prefetch: int | Mapping[str, tuple[str, ...]] = 0

    def __post_init__(self) -> None:
        ahead = self.prefetch
        lists = (
            {f"prefetch[{path!r}]": paths for path, paths in ahead.items()}
            if isinstance(ahead, Mapping)
            else {}
        )
        for name, patterns in {"wrap": self.wrap or (), "recompute": self.recompute, **lists}.items():
            if not isinstance(patterns, tuple | list) or not all(isinstance(one, str) for one in patterns):
                raise ContractError(
                    f"{name} of a ShardPlan is {patterns!r}",
                    accepted="a tuple of patterns or paths",
                    hint='write ("blocks.{*}",), with the comma',
                )
        if not isinstance(ahead, Mapping) and (not isinstance(ahead, int) or ahead < 0):
            raise ContractError(
                f"prefetch of a ShardPlan is {ahead!r}",
                accepted="a number from 0 on, or a mapping of module paths",
            )


@runtime_checkable
class SupportsShardPlan(Protocol):
    """Capability of a trained component, such as a predictor, that brings its own sharding plan."""

    def shard_plan(self) -> ShardPlan:
        """The component's sharding plan; every rank calls this once, on the meta device."""


@dataclass(frozen=True)
class ContextPlan:
    """Where a model has its tokens, for an engine that spreads those of a clip over ranks (context parallel).

    Paths are relative to the model. Each rank computes its part of the tokens from the first `split` to the
    `gather`; in between, only the attention modules may mix tokens.

    Attributes:
        heads: heads of the self-attention.
        attention: patterns of the self-attention modules, which call `F.scaled_dot_product_attention`.
        split: path -> argument of its forward, or number of its output -> dimension of the tokens. A tensor
            without this dimension stays whole; an argument that is not given, or is None, is left alone.
        gather: path of the last module that computes on a part -> dimension of the tokens in its output.
        beside: what of `split` belongs to other tokens, such as those of text, with which each self-attention
            attends to the tokens that are gathered, in one sequence. A mask of keys has this rank's part.
        ring: whether `kind: ring` works: the self-attention has no masks, dropout or grouped heads.
    """

    heads: int
    attention: tuple[str, ...]
    split: Mapping[str, Mapping[str | int, int]]
    gather: Mapping[str, int]
    beside: Collection[str | int] = ()
    ring: bool = True


@runtime_checkable
class SupportsContextPlan(Protocol):
    """Capability of a trained component, such as a predictor, whose tokens can be spread over ranks."""

    def context_plan(self) -> ContextPlan:
        """Where the component's tokens are; every rank calls this once, on the meta device."""
