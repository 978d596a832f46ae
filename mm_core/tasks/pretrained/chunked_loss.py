"""Cross entropy of a large vocabulary without its logits.

Within the model's own forward, the output embedding returns deferred logits: the hidden states, and the
operations that the model applies to its logits (a scale, a cap). The loss is then computed in chunks of
tokens, together with the gradients of hidden states and embedding (Wijmans et al. 2024,
https://arxiv.org/abs/2411.09009, and https://arxiv.org/abs/2410.10989 do the same in their own kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from mm_core.contracts import IGNORED_LABEL
from mm_core.device.torch_private import DisableTorchFunctionSubclass, without_modes
from mm_core.errors import ContractError
from mm_core.modules.torch_calls import Args, Function, Kwargs

Step = Callable[[Tensor], Tensor]
Steps = Sequence[Step]

_METADATA = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
}
_ELEMENTWISE = {
    *(getattr(Tensor, name) for name in ("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide")),
    *(torch.mul, torch.div, torch.true_divide, torch.tanh, Tensor.tanh),
}


class DeferredLogits(Tensor):
    """Logits [..., V] of a linear layer that has not run: a shape, a dtype and a device without memory.

    Reshaping is applied to the hidden states; scales, tanh and casts are applied later, to each chunk.
    """

    hidden: Tensor
    head: nn.Linear
    steps: tuple[Step, ...]
    chunk_tokens: int

    @staticmethod
    def of(hidden: Tensor, head: nn.Linear, chunk: int, steps: tuple[Step, ...] = ()) -> DeferredLogits:
        """Deferred logits of an output embedding for hidden states [..., D].

        Args:
            hidden: [..., D].
            head: the output embedding.
            chunk: tokens whose logits are in memory at a time.
            steps: elementwise operations to apply to the logits.
        """
        dtype = head.weight.dtype
        for step in steps:
            dtype = step(torch.empty(0, dtype=dtype)).dtype
        made = Tensor._make_wrapper_subclass(
            DeferredLogits, (*hidden.shape[:-1], head.out_features), dtype=dtype, device=hidden.device
        )
        made.hidden, made.head, made.steps, made.chunk_tokens = hidden, head, steps, chunk
        assert isinstance(made, DeferredLogits)
        return made

    def later(self, step: Step) -> DeferredLogits:
        """Deferred logits with one more elementwise operation."""
        return DeferredLogits.of(self.hidden, self.head, self.chunk_tokens, (*self.steps, step))

    def shaped(self, hidden: Tensor) -> DeferredLogits:
        """Deferred logits of other hidden states, with the same output embedding and operations."""
        return DeferredLogits.of(hidden, self.head, self.chunk_tokens, self.steps)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        given = kwargs or {}
        if func is functional.cross_entropy:
            target = args[1] if len(args) > 1 else given["target"]
            handler = type(target).__torch_function__
            if handler is not Tensor.__torch_function__:
                return handler(func, types, args, given)
        own = args[0] if args else None
        if isinstance(own, DeferredLogits):
            made = _reshaped(own, func, args[1:], given)
            made = _computed(own, func, args[1:], given) if made is None else made
            if made is not None:
                return made
        if func in _METADATA or getattr(func, "__name__", "") == "__get__":  # reads shape, dtype or device
            with DisableTorchFunctionSubclass():
                return func(*args, **given)
        raise ContractError(
            f"the model applies `{getattr(func, '__name__', func)}` to its logits before the loss, which "
            "a chunked loss does not support",
            where="task.loss",
            accepted="scales, caps (tanh), casts and reshaping",
            hint="set task.loss: plain",
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        raise ContractError(
            f"the model applies {func} to its logits, which a chunked loss never computes",
            where="task.loss",
            hint="set task.loss: plain",
        )


def _reshaped(logits: DeferredLogits, func: Function, args: Args, given: Kwargs) -> DeferredLogits | None:
    """The logits in another shape whose last dimension is still the vocabulary; None for anything else."""
    if func is Tensor.contiguous:
        return logits
    if func in (Tensor.view, Tensor.reshape) and not given:
        sizes = list(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
        if sizes and all(isinstance(size, int) for size in sizes) and sizes[-1] in (logits.shape[-1], -1):
            if sizes[-1] == -1 and prod(sizes[:-1]) != logits.numel() // logits.shape[-1]:
                return None
            return logits.shaped(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))
    if func is Tensor.__getitem__:
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        simple = all(part is Ellipsis or isinstance(part, (slice, int)) for part in index)
        whole_last = index[-1] == slice(None) if Ellipsis in index else len(index) < logits.dim()
        if simple and (whole_last or (len(index) == logits.dim() and index[-1] == slice(None))):
            return logits.shaped(logits.hidden[args[0]])
    return None


def _computed(logits: DeferredLogits, func: Function, args: Args, given: Kwargs) -> DeferredLogits | None:
    """The logits after an elementwise operation with constants; None for any other operation."""
    if func is Tensor.to:
        places = [value for value in (*args, *given.values()) if not isinstance(value, torch.dtype)]
        if any(torch.device(place) != logits.device for place in places if not isinstance(place, bool)):
            return None
        dtypes = [value for value in (*args, *given.values()) if isinstance(value, torch.dtype)]
        if dtypes == [torch.float32]:
            return logits.later(Tensor.float)
        return logits.later(lambda found: found.to(dtypes[0])) if dtypes else logits
    if func is Tensor.float:
        return logits.later(Tensor.float)
    constant = all(
        isinstance(value, (int, float))
        or (isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad)
        for value in (*args, *given.values())
    )
    if func in _ELEMENTWISE and constant:
        return logits.later(lambda found: func(found, *args, **given))
    return None


def defer_logits(head: nn.Linear, chunk: int) -> Callable[[], AbstractContextManager[None]]:
    """Lets the output embedding of a task's model defer its logits for a chunked loss, within a context.

    Args:
        head: the output embedding.
        chunk: tokens whose logits are in memory at a time.
    """
    forward, active = head.forward, False

    def held(hidden: Tensor) -> Tensor:
        return DeferredLogits.of(hidden, head, chunk) if active else forward(hidden)

    @contextmanager
    def within() -> Iterator[None]:
        nonlocal active
        active = True
        try:
            yield
        finally:
            active = False

    vars(head)["forward"] = held
    return within


def chunked_cross_entropy(
    logits: DeferredLogits, target: Tensor, weights: Tensor, predict: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes a training loss, cross entropy, in chunks of tokens without storing all logits.

    Args:
        logits: [N,V].
        target: [N]; -100 is ignored.
        weights: [N] float32.
        predict: whether to return the most likely labels.

    Returns:
        The weighted sum, the loss of each label [N] without gradients, the most likely labels [N] or None.

    Raises:
        ContractError: the output embedding is sharded by itself, so it is not available for the loss.
    """
    head, hidden = logits.head, logits.hidden
    if isinstance(head.weight, DTensor):
        raise ContractError(
            "the output embedding is sharded as a module of its own, so a chunked loss cannot use its weight",
            where="engine.sub_modules_to_wrap",
            accepted="modules other than the output embedding",
            hint="remove it from the list, or set task.loss: plain",
        )
    flat = hidden.reshape(-1, hidden.shape[-1]).to(head.weight.dtype)
    total, losses, best = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, head.weight, head.bias, target, weights, logits.steps, logits.chunk_tokens, predict
    )
    return total, losses, best if predict else None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        weights: Tensor,
        steps: Steps,
        chunk: int,
        predict: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = _Head(hidden, weight, bias, steps, ctx.needs_input_grad[:3])
        losses = torch.empty(len(target), dtype=torch.float32, device=hidden.device)
        best = torch.empty(len(target) if predict else 0, dtype=torch.int64, device=hidden.device)
        for first in range(0, len(target), chunk):
            part = slice(first, first + chunk)
            losses[part] = head.losses(part, target[part], weights[part], best[part] if predict else None)
        ctx.head = head
        ctx.mark_non_differentiable(losses, best)
        return (losses * weights).sum(), losses, best

    @staticmethod
    def backward(ctx: Any, of_total: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        head, ctx.head = ctx.head, None
        assert head is not None, "a chunked loss supports one backward only"
        return (*head.gradients(of_total), None, None, None, None, None)


class _Head:
    """An output embedding applied to hidden states [N,D], with the gradients that autograd needs."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, steps: Steps, wanted: Sequence[bool]
    ) -> None:
        self.hidden, self.weight, self.bias, self.steps = hidden, weight, bias, steps
        self.differentiable = any(wanted)
        self._of_hidden = torch.empty_like(hidden) if wanted[0] else None
        # Gradients of the embedding are summed over chunks, in float32 whatever its own dtype.
        self._of_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        self._of_bias = (
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        )

    def losses(self, part: slice, target: Tensor, weights: Tensor, best: Tensor | None) -> Tensor:
        """Losses [n] of one chunk, whose gradients, times `weights`, are added to the sums.

        Args:
            part: the chunk's tokens.
            target: labels [n].
            weights: [n].
            best: filled with the most likely labels [n], if not None.
        """
        raw = functional.linear(self.hidden[part], self.weight, self.bias)
        logits, back = _after(raw, self.steps, self.differentiable)
        del raw  # the rest reuses one chunk of memory: logits, exponentials, softmax minus one-hot
        if best is not None:
            best.copy_(logits.argmax(1))
        known = target != IGNORED_LABEL
        labels = target.where(known, 0)[:, None]
        of_label, most = logits.gather(1, labels), logits.amax(1, keepdim=True)
        exponentials = logits.sub_(most).exp_()
        sums = exponentials.sum(1, keepdim=True)
        if self.differentiable:
            slope = exponentials.div_(sums)
            slope.scatter_add_(1, labels, slope.new_full(labels.shape, -1.0))
            slope.mul_(weights.where(known, 0)[:, None])
            with without_modes():  # FLOP counters already count these products as the backward
                self._add(part, back(slope).to(self.weight.dtype))
        return (sums.log() + most - of_label)[:, 0].where(known, 0)

    def _add(self, part: slice, slope: Tensor) -> None:
        """Adds the gradients of the linear layer's inputs, from the gradient [n,V] of a chunk's logits."""
        if self._of_hidden is not None:
            torch.mm(slope, self.weight, out=self._of_hidden[part])
        if self._of_weight is not None and slope.dtype == torch.float32:
            self._of_weight.addmm_(slope.t(), self.hidden[part])
        elif self._of_weight is not None:
            self._of_weight += slope.t() @ self.hidden[part]
        if self._of_bias is not None:
            self._of_bias += slope.sum(0, dtype=torch.float32)

    def gradients(self, factor: Tensor) -> list[Tensor | None]:
        """The summed gradients of a chunked loss times a factor, in the dtypes of their tensors; in place."""
        found = [(self._of_hidden, self.hidden.dtype)]
        found += [(gradient, self.weight.dtype) for gradient in (self._of_weight, self._of_bias)]
        return [g.mul_(factor).to(dtype) if g is not None else None for g, dtype in found]


def _after(raw: Tensor, steps: Steps, differentiable: bool) -> tuple[Tensor, Step]:
    """(logits in float32 that may be overwritten, a function from their gradient to that of `raw`)."""
    while steps and steps[-1] is Tensor.float:  # the cast at the end does the same
        steps = steps[:-1]
    if not steps or not differentiable:
        for step in steps:
            raw = step(raw)
        return raw.float(), lambda slope: slope
    with torch.enable_grad():
        leaf = raw.detach().requires_grad_()
        found = leaf
        for step in steps:
            found = step(found)
        found = found.float()
    logits = found.detach().clone()
    return logits, lambda slope: torch.autograd.grad(found, leaf, slope)[0]
