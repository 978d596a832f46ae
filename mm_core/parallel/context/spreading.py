"""Spreads the tokens of a task's modules over the ranks of a context group, from outside of the modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mm_core.contracts import Randomness, TaskModule
from mm_core.errors import ContractError, plural
from mm_core.modules.forwards import around_forward
from mm_core.parallel.context.exchange import Peers, gather, split, ulysses
from mm_core.parallel.context.layout import ContextLayout
from mm_core.parallel.context.ring import ring

Forward = Callable[..., Any]


class Spreading:
    """What the modules of a task share while each rank computes a part of the tokens.

    Args:
        layout: where the tokens are.
        peers: the ranks of the context group.
    """

    def __init__(self, layout: ContextLayout, peers: Peers) -> None:
        self.layout, self.peers = layout, peers
        self.tokens: Sequence[int] = ()
        """Tokens of each rank in the forward that runs."""
        self.beside: Sequence[int] = ()
        """The same of the other tokens that attend with them; () where there are none."""
        self._seed: int | None = None  # of the global generators before the first split

    def apply(self, task: TaskModule) -> None:
        """Replaces the bound `forward` of modules of the task, so that parameter paths stay the same.

        Call it after `recompute`: what a recomputed module keeps is this rank's part.
        """
        for path in self.layout.attention:
            around_forward(task.get_submodule(path), functools.partial(self._attend, path))
        for path, dims in self.layout.split.items():
            around_forward(task.get_submodule(path), functools.partial(self._split, path, dims))
        for path, dim in self.layout.gather.items():
            around_forward(task.get_submodule(path), functools.partial(self._gather, dim))

    def kept(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a forward and of its recomputation, which begins with the tokens and dropout of the
        forward, and may end before the gather."""
        return nullcontext(), self._again(self.tokens, self.beside, self._seed)

    @contextmanager
    def _again(self, tokens: Sequence[int], beside: Sequence[int], seed: int | None) -> Iterator[None]:
        before = self.tokens, self.beside, self._seed
        self.tokens, self.beside, self._seed = tokens, beside, seed
        try:
            yield
        finally:
            self.tokens, self.beside, self._seed = before

    def _attend(self, path: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        mode = _Attention(self, path)
        with mode:
            out = forward(*args, **kwargs)
        if not mode.called:
            raise ContractError(
                f"{path} computes its attention by something else than F.scaled_dot_product_attention, so"
                " each rank would attend to its own tokens only",
                where="engine.context_parallel",
                hint="let the model use torch's attention (for Diffusers' models, the backend `native`)",
            )
        return out

    def _split(
        self, path: str, dims: Mapping[str | int, int], forward: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        named = {key: dim for key, dim in dims.items() if isinstance(key, str)}
        if named:
            bound = inspect.signature(forward).bind(*args, **kwargs)
            for name, dim in named.items():
                if name in bound.arguments:
                    bound.arguments[name] = self._part(path, name, bound.arguments[name], dim)
            args, kwargs = bound.args, bound.kwargs
            self._begin_part()
        out = forward(*args, **kwargs)
        outputs = list(out) if isinstance(out, tuple | list) else [out]
        for key, dim in dims.items():
            if isinstance(key, int):
                if key >= len(outputs):
                    raise ContractError(
                        f"{path} returns {plural(len(outputs), 'output')}, so there is no number {key}",
                        where=f"split[{path!r}] of its context_plan",
                        accepted=f"0 to {len(outputs) - 1}",
                    )
                outputs[key] = self._part(path, key, outputs[key], dim)
        return tuple(outputs) if isinstance(out, tuple | list) else outputs[0]

    def _part(self, path: str, key: str | int, x: Tensor | None, dim: int) -> Tensor | None:
        if x is None or x.dim() <= dim:
            return x  # one timestep a sample, where others have one a token
        shares = self.peers.shares(x.shape[dim])
        if key in self.layout.beside:
            self.beside = shares
        else:
            self.tokens = shares
        if 0 in shares:
            tokens, ranks = plural(x.shape[dim], "token"), plural(self.peers.count, "rank")
            raise ContractError(
                f"{tokens} of {path} cannot be shared by {ranks}",
                where="engine.context_parallel.size",
                accepted=f"at most {x.shape[dim]} for samples of this size",
            )
        return split(x, dim, self.peers)

    def _gather(self, dim: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        out = gather(forward(*args, **kwargs), dim, self.tokens, self.peers)
        if self._seed is not None:
            torch.manual_seed(Randomness(self._seed).seed32("together"))
            self._seed = None
        return out

    def _begin_part(self) -> None:
        """Lets dropout draw other numbers on each rank from here to the gather, and before and after it the
        same on all: there, each rank computes all tokens."""
        if torch.is_grad_enabled() and self._seed is None:
            self._seed = torch.initial_seed()
            torch.manual_seed(Randomness(self._seed).seed32("rank", self.peers.rank))


class _Attention(TorchFunctionMode):
    """Attention over all tokens, where a module calls that of torch with this rank's part."""

    def __init__(self, spreading: Spreading, path: str) -> None:
        super().__init__()
        self._spreading, self._path = spreading, path
        self.called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.called = True
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        tokens, beside, peers = self._spreading.tokens, self._spreading.beside, self._spreading.peers
        if beside:
            tokens = [sum(both) for both in zip(tokens, beside, strict=True)]
        own = tokens[peers.rank] if tokens else None
        if {query.shape[2], key.shape[2]} != {own}:
            raise ContractError(
                f"{self._path} attends from {query.shape[2]} to {plural(key.shape[2], 'token')}, where"
                f" context_plan gives this rank {own}",
                where="engine.context_parallel",
                accepted="self-attention over the tokens that `split` names",
            )
        if beside and attn_mask is not None:  # of keys: other ranks have other ones
            attn_mask = gather(attn_mask.to(torch.uint8), 3, tokens, peers).bool()
        if self._spreading.layout.kind == "ulysses":
            options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
            return ulysses(query, key, value, tokens, peers, scale=scale, enable_gqa=enable_gqa, **options)
        if attn_mask is not None or is_causal or dropout_p or enable_gqa:
            raise ContractError(
                f"{self._path} uses a mask, dropout or grouped heads in its attention, which ring attention"
                " does not have",
                where="engine.context_parallel.kind",
                accepted="ulysses",
            )
        return ring(query, key, value, tokens, peers, scale)
