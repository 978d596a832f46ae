"""The base class of predictors, and the initialisation of modules that have no own one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from mm_core.contracts.frames import PredictorInputs
from mm_core.contracts.inputs import Input


class PredictorModule(nn.Module):
    """A base class of predictors: set `in_channels` and `text_dim`, and write `forward` as in `Predictor`.

    A predictor need not derive from it: any `torch.nn.Module` that implements `Predictor` is one.

    Attributes:
        text_padding: masked text does not change the output, unless a subclass sets `("fixed", n)`.
        patch_size: latents of any size, unless a subclass sets the patches (t, h, w).
        in_channels: channels of the input latents.
        text_dim: width D of the text's hidden states.
        inputs: what it is given beside latents, timestep and text (see `SupportsInputs`); none, unless a
            subclass sets them.
    """

    text_padding: Literal["masked"] | tuple[Literal["fixed"], int] = "masked"
    patch_size: tuple[int, int, int] = (1, 1, 1)
    in_channels: int
    text_dim: int
    inputs: tuple[Input, ...] = ()

    def with_inputs(self, latents: Tensor, timestep: Tensor, given: Mapping[str, Tensor]) -> PredictorInputs:
        """Passes the conditions of `inputs` to forward under their names, unless a subclass does otherwise.

        Args:
            latents: [B,C,T,H,W].
            timestep: [B].
            given: the conditions by name, [B,...].
        """
        return PredictorInputs(latents, timestep, given)

    @property
    def out_channels(self) -> int:
        """Channels of the output: as many as of the input, unless a subclass sets another number."""
        own: int = self.__dict__.get("out_channels", self.in_channels)
        return own

    @out_channels.setter
    def out_channels(self, channels: int) -> None:
        self.__dict__["out_channels"] = channels

    def init_weights(self) -> None:
        """Initialises the predictor by the `reset_parameters` of its layers.

        Parameters and buffers that no layer of torch fills (`nn.Parameter(torch.randn(...))`) stay unset: an
        error before the first step names them. A subclass with such ones overrides this method, calls it, and
        fills the rest.
        """
        reset_parameters(self)


def reset_parameters(module: nn.Module) -> None:
    """Initialises a module by the methods of its layers, the inner ones first.

    Args:
        module: calls of its layers' `init_weights`, or else `reset_parameters`, fill what these layers own.
    """
    for child in module.children():
        own = getattr(child, "init_weights", None)
        if callable(own):
            own()
        else:
            reset_parameters(child)
    for name in ("reset_parameters", "_reset_parameters"):  # attention of torch has the second name
        own = getattr(module, name, None)
        if callable(own):
            own()
            return


@torch.no_grad()
def fill_as_built(module: nn.Module, build: Callable[[], nn.Module]) -> None:
    """Fills a module with what its constructor computes, for a class whose constructor sets its weights.

    Args:
        module: its parameters and buffers are filled in place; plain tensors that it keeps are replaced.
        build: builds one like it, complete, in the memory of the host.
    """
    with torch.device("cpu"):
        built = build()
    values = dict([*built.named_parameters(), *built.named_buffers()])
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        tensor.copy_(values[name])
    for path, layer in built.named_modules():
        kept = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        vars(module.get_submodule(path)).update(kept)
