"""FLOPs of a predictor's forward, from which the FLOPs of a step and the MFU are computed.

A multiplication and an addition are two operations: a matrix product [m,k] x [k,n] has 2mkn. Norms,
activations and rotations are not counted (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311,
appendix B).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Shape = Sequence[int]


Paths = tuple[str, ...]
"""Modules and parameters of the predictor that an input depends on, directly or transitively."""


@dataclass(frozen=True)
class ModuleFlops:
    """FLOPs of one module's matrix products in a forward.

    Attributes:
        module: the module's path in the predictor.
        flops: operations for all rows.
        after: what the input depends on; None: all products before it.
        second: what the second factor depends on, if it is not a weight of the module but another
            activation, as in attention.
    """

    module: str
    flops: int
    after: Paths | None = None
    second: Paths | None = None

    def below(self, path: str) -> ModuleFlops:
        """These FLOPs for a predictor that is a sub-module, at `path`, of another predictor."""

        def moved(paths: Paths | None) -> Paths | None:
            return None if paths is None else tuple(f"{path}.{one}" for one in paths)

        return ModuleFlops(f"{path}.{self.module}", self.flops, moved(self.after), moved(self.second))


def linear_flops(module: str, rows: int, into: int, out: int, after: Paths | None = None) -> ModuleFlops:
    """FLOPs of a linear layer, or of a convolution whose stride equals its kernel.

    Args:
        module: the layer's path in the predictor.
        rows: number of input rows.
        into: input width.
        out: output width.
        after: what the input depends on; None: all products before it.
    """
    return ModuleFlops(module, 2 * rows * into * out, after)


def attention_flops(
    module: str, sizes: tuple[int, int, int, int], q: Paths, k: Paths, v: Paths
) -> list[ModuleFlops]:
    """FLOPs of an attention: the scores of queries and keys, and their product with the values, of all heads.

    Args:
        module: the attention's path in the predictor.
        sizes: (clips, queries, keys, total width of all heads).
        q: paths in the module that the queries depend on.
        k: paths in the module that the keys depend on.
        v: paths in the module that the values depend on.
    """
    batch, queries, keys, width = sizes
    flops = 2 * batch * queries * keys * width
    of_q, of_k, of_v = (tuple(f"{module}.{name}" for name in names) for names in (q, k, v))
    return [ModuleFlops(module, flops, of_q, of_k), ModuleFlops(module, flops, of_q + of_k, of_v)]


@runtime_checkable
class SupportsModuleFlops(Protocol):
    """Capability of a predictor that declares the FLOPs of its forward.

    Without it, torch counts the FLOPs of a run's first forward, and of one without numbers for the plan; both
    miss third-party kernels.
    """

    def module_flops(
        self, latents: Shape, timestep: Shape, text: Shape, **conditions: Shape
    ) -> Sequence[ModuleFlops]:
        """The FLOPs of a predictor's forward for arguments of these shapes, in the order of the forward.

        A predictor with several experts (`SupportsExperts`) also accepts `expert`, as its forward does.

        Args:
            latents: (B, C, T, H, W), in latent units.
            timestep: (B,), or (B, N) per token.
            text: (B, L, D).
            conditions: shapes of the other tensors of the forward, by argument: those of text and given
                frames, without `CLIP_CONDITIONS`, whose shapes are known.
        """


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a training step's forward and backward.

    Attributes:
        forward: everything that is computed, frozen or not.
        backward: gradients of the trained weights, and of activations on the way to them.
        recomputed: parts of the forward that the backward computes again, which is not useful work.
    """

    forward: float
    backward: float
    recomputed: float = 0.0

    @property
    def useful(self) -> float:
        """The FLOPs that MFU counts: forward and backward, without recomputation."""
        return self.forward + self.backward

    def __add__(self, other: StepFlops) -> StepFlops:
        sums = (self.forward + other.forward, self.backward + other.backward)
        return StepFlops(*sums, self.recomputed + other.recomputed)

    def __mul__(self, times: float) -> StepFlops:
        return StepFlops(self.forward * times, self.backward * times, self.recomputed * times)


@runtime_checkable
class SupportsSampleFlops(Protocol):
    """Capability of a task that knows the FLOPs of a training sample before one is read, for the plan."""

    def sample_flops(self, batch_spec: Mapping[str, Any], recomputed: Collection[str]) -> StepFlops | None:
        """The FLOPs of one training sample; None if they are unknown.

        Args:
            batch_spec: the config fields of the training dataset.
            recomputed: paths in the task of modules that the backward recomputes.
        """


@runtime_checkable
class SupportsSampleForward(Protocol):
    """Capability of a task that knows a forward of its trained component before a sample is read."""

    def sample_forward(self, batch_spec: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
        """The path of the component and the arguments of its forward for one training sample, with tensors on
        the meta device; None if sizes are unknown.

        Args:
            batch_spec: the config fields of the training dataset.
        """
