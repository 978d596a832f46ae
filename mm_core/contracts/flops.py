"""What a predictor multiplies: the operations of a step follow from it, and so does MFU.

A multiplication and an addition are two operations: a matrix product [m,k] x [k,n] is 2mkn of them. Norms,
activations and rotations count for nothing (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311,
appendix B).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Shape = Sequence[int]


Paths = tuple[str, ...]
"""Modules and parameters of the predictor that something comes from, and from all that theirs comes from."""


@dataclass(frozen=True)
class ModuleFlops:
    """Matrix products of one module in a forward.

    module: its path in the predictor. flops: operations, of all rows. after: what the input comes from; None:
    all products before it. second: what the other factor comes from where that is no weight of the module but
    another activation, as in attention.
    """

    module: str
    flops: int
    after: Paths | None = None
    second: Paths | None = None

    def below(self, path: str) -> ModuleFlops:
        """The same product where the predictor that it is of lies at `path` of another."""

        def moved(paths: Paths | None) -> Paths | None:
            return None if paths is None else tuple(f"{path}.{one}" for one in paths)

        return ModuleFlops(f"{path}.{self.module}", self.flops, moved(self.after), moved(self.second))


def linear_flops(module: str, rows: int, into: int, out: int, after: Paths | None = None) -> ModuleFlops:
    """A linear layer of [out, into] on `rows` rows, or a convolution whose stride is its kernel."""
    return ModuleFlops(module, 2 * rows * into * out, after)


def attention_flops(
    module: str, sizes: tuple[int, int, int, int], q: Paths, k: Paths, v: Paths
) -> list[ModuleFlops]:
    """Scores of queries and keys, and their product with the values, of all heads.

    Args:
        module: the path of the attention.
        sizes: (clips, queries, keys, width of all heads together).
        q, k, v: paths below the module that each of the three comes from.
    """
    batch, queries, keys, width = sizes
    flops = 2 * batch * queries * keys * width
    of_q, of_k, of_v = (tuple(f"{module}.{name}" for name in names) for names in (q, k, v))
    return [ModuleFlops(module, flops, of_q, of_k), ModuleFlops(module, flops, of_q + of_k, of_v)]


@runtime_checkable
class SupportsModuleFlops(Protocol):
    """A predictor that says what its forward multiplies. Without it, torch counts the first forward of a
    run, which knows nothing of compiled regions and of kernels from outside."""

    def module_flops(
        self, latents: Shape, timestep: Shape, text: Shape, **conditions: Shape
    ) -> Sequence[ModuleFlops]:
        """The products of a forward of arguments of these shapes, in the order of the forward. One of several
        experts (`SupportsExperts`) also takes `expert`, as its forward does."""


@dataclass(frozen=True)
class StepFlops:
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

    def __mul__(self, times: float) -> StepFlops:
        return StepFlops(self.forward * times, self.backward * times, self.recomputed * times)


@runtime_checkable
class SupportsSampleFlops(Protocol):
    """A task that says what a training sample costs before one is read, for the plan."""

    def sample_flops(self, batch_spec: Mapping[str, Any], recomputed: Collection[str]) -> StepFlops | None:
        """Of one sample of a dataset with these fields; None where that cannot be known.

        recomputed: module paths in the task.
        """
