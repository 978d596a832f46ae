"""Models built without memory for their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _EmptyData(TorchFunctionMode):
    """Permits `parameter.data = tensor` on meta, which torch refuses across devices."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func == _SET_DATA and args[0].is_meta and not args[1].is_meta:
            args = (args[0], args[1].to("meta"))
        return func(*args, **(kwargs or {}))


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Within the block, new modules have their parameters on the meta device and their buffers on the CPU.

    Used to build a component whose weights the core streams. Buffers are computed, as weights files seldom
    contain them.
    """
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:  # a meta parameter is a shared one
            empty = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            module._parameters[name] = empty

    # Buffers are created on the CPU even if the caller builds on meta. What constructors draw is discarded
    # with the parameters' values, so the default generator keeps its state.
    replaced = patch.object(nn.Module, "register_parameter", register_empty)
    with torch.random.fork_rng(devices=()), torch.device("cpu"), _EmptyData(), replaced:
        yield
