"""What a predictor multiplies: the operations of a step follow from it, and so does MFU.

A multiplication and an addition are two operations: a matrix product [m,k] x [k,n] is 2mkn of them. Norms,
activations and rotations count for nothing (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311,
appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Shape = Sequence[int]


@dataclass(frozen=True)
class Product:
    """Matrix products of one module in a forward.

    module: its path in the predictor. flops: operations, of all rows. weight: whether the module's own
    weight is one factor; otherwise activations are multiplied with each other, as attention does. after:
    paths of the modules and parameters that its input comes from, and all that theirs come from; None: of
    all products before it.
    """

    module: str
    flops: int
    weight: bool = True
    after: tuple[str, ...] | None = None


def linear(module: str, rows: int, into: int, out: int, after: tuple[str, ...] | None = None) -> Product:
    """A linear layer of [out, into] on `rows` rows, or a convolution whose stride is its kernel."""
    return Product(module, 2 * rows * into * out, after=after)


def attention(module: str, batch: int, queries: int, keys: int, width: int) -> Product:
    """Scores of all heads, `width` wide together, and their product with the values."""
    return Product(module, 4 * batch * queries * keys * width, weight=False)


@runtime_checkable
class CountsProducts(Protocol):
    """A predictor that says what its forward multiplies. Without it, torch counts the first forward of a
    run, which knows nothing of compiled regions and of kernels from outside."""

    def products(
        self, latents: Shape, timestep: Shape, text: Shape, **conditions: Shape
    ) -> Sequence[Product]:
        """The products of a forward of arguments of these shapes, in the order of the forward. One that is
        `Routed` also takes `expert`, as its forward does."""
        ...


@dataclass(frozen=True)
class StepOperations:
    """Operations of a forward and its backward.

    forward: of all that is computed, frozen or not. backward: gradients of what is trained, and of the
    inputs on the way there. recomputed: what the backward computes of the forward once more, no useful work.
    """

    forward: float
    backward: float
    recomputed: float = 0.0

    @property
    def useful(self) -> float:
        """What MFU counts."""
        return self.forward + self.backward

    def __mul__(self, times: float) -> StepOperations:
        return StepOperations(self.forward * times, self.backward * times, self.recomputed * times)
