"""The kernel of attention, chosen through the dispatch of the library that a model comes from."""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from mm_core.contracts import TaskModule
from mm_core.errors import PlanError, first_line
from mm_core.modules.forwards import around_forward
from mm_core.parallel.context.layout import ContextLayout

_KEY = "engine.attention"
_DIFFUSERS = {
    "sdpa": "native",
    "flash": "_native_flash",
    "efficient": "_native_efficient",
    "cudnn": "_native_cudnn",
    "math": "_native_math",
    "torch_npu": "_native_npu",
    "flash_2": "flash",
    "flash_3": "_flash_3",
    "xformers": "xformers",
}
_TRANSFORMERS = {"sdpa": "sdpa", "flash_2": "flash_attention_2", "flash_3": "flash_attention_3"}
_TORCH = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


_NO_KERNEL = re.compile(r"No available kernel|No viable backend")
"""torch's errors for a kernel that cannot compute what it is given."""


def check_kernel(wanted: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuses a kernel of torch that a device does not run in a dtype, found by running it.

    Args:
        wanted: `engine.attention`.
        device: the device that will compute.
        dtype: the dtype in which it will.

    Raises:
        PlanError: it does not run there.
    """
    if wanted in _TORCH and not _runs(_TORCH[wanted], device, dtype):
        able = [name for name, kernel in _TORCH.items() if _runs(kernel, device, dtype)]
        raise PlanError(
            f"attention {wanted!r} does not run on {device.type} in {str(dtype).removeprefix('torch.')}",
            where=_KEY,
            accepted=", ".join(["auto", "sdpa", *able]),
            hint="plan on a host with the device that will compute, or with engine.attention=auto",
        )


def _runs(kernel: SDPBackend, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel computes a small attention and its gradients."""
    x = torch.ones(1, 1, 8, 64, dtype=dtype, device=device, requires_grad=True)
    with warnings.catch_warnings(), torch.enable_grad(), sdpa_kernel(kernel):
        warnings.simplefilter("ignore")  # torch's reasons, for each kernel
        try:
            torch.autograd.grad(functional.scaled_dot_product_attention(x, x, x).sum(), x)
        except RuntimeError as fault:
            if _NO_KERNEL.search(first_line(fault)):
                return False
            raise
    return True


@contextmanager
def kernel_named(wanted: str) -> Iterator[None]:
    """A context for forwards with a kernel of torch, which may not take the model's mask or size of heads.

    Raises:
        PlanError: in place of torch's error, with the key.
    """
    try:
        yield
    except RuntimeError as fault:
        if wanted not in _TORCH or not _NO_KERNEL.search(first_line(fault)):
            raise
        raise PlanError(
            f"attention {wanted!r} does not take what this model gives it, such as a mask or dropout",
            where=_KEY,
            accepted="auto, sdpa, or another kernel",
        ) from fault


def decide_attention(
    task: TaskModule, trainable: Sequence[str], wanted: str, context: ContextLayout | None = None
) -> dict[str, str]:
    """Decides how trained components attend: component -> library and its name of the kernel, where known.

    Args:
        task: the task, on the meta device or not.
        trainable: names of the trained components.
        wanted: `engine.attention`.
        context: how their tokens are spread over ranks.

    Raises:
        PlanError: a model's library has no such kernel, or it cannot attend to tokens of other ranks.
    """
    found: dict[str, dict[str, None]] = {root: {} for root in trainable}
    for root in trainable:
        for path, module in _models(task.get_submodule(root), root):
            library, names = _library(module)
            if wanted == "auto" and library == "diffusers":
                found[root][f"diffusers {os.environ.get('DIFFUSERS_ATTN_BACKEND', 'native')}"] = None
            elif wanted in names:
                found[root][f"{library} {names[wanted]}"] = None
            elif wanted != "auto":
                raise PlanError(
                    f"{path} ({type(module).__name__}) has no attention {wanted!r}",
                    where=_KEY,
                    accepted=", ".join(["auto", *names]),
                )
    if context is not None:
        spread = [root for root in found if any(path.startswith(f"{root}.") for path in context.attention)]
        _check_spread([name for root in spread for name in found[root]], wanted, context.kind)
    return {root: ", ".join(names) for root, names in found.items() if names}


def _check_spread(found: Sequence[str], wanted: str, kind: str) -> None:
    """Refuses kernels that are not called through torch's attention, which is what is spread over ranks."""
    accepted = ("sdpa", *_TORCH) if kind == "ulysses" else ("sdpa",)  # the ring has a kernel of its own
    usable = {name for key in accepted for name in (f"torch {key}", f"diffusers {_DIFFUSERS[key]}")}
    if other := [name for name in found if name not in usable]:
        raise PlanError(
            f"context_parallel with kind: {kind} does not work with the attention {other[0]!r}",
            where=_KEY,
            accepted=", ".join(["auto", *accepted]),
            hint=None if wanted != "auto" else "unset DIFFUSERS_ATTN_BACKEND, which chooses it",
        )


def _models(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """The models of libraries in a component, outermost only; without any, the component itself."""
    found: dict[str, nn.Module] = {}
    for name, each in module.named_modules(prefix=path):
        if not any(name.startswith(f"{outer}.") for outer in found) and _library(each)[0] != "torch":
            found[name] = each
    yield from found.items() if found else [(path, module)]


def _library(module: nn.Module) -> tuple[str, Mapping[str, str]]:
    if hasattr(module, "set_attention_backend"):
        return "diffusers", _DIFFUSERS
    if hasattr(module, "set_attn_implementation"):
        return "transformers", _TRANSFORMERS | {name: name for name in _TORCH}
    return "torch", {"sdpa": "sdpa"} | {name: name for name in _TORCH}


def set_attention(task: TaskModule, trainable: Sequence[str], wanted: str, blocks: Sequence[str]) -> None:
    """Sets the kernel of attention. Call it before `recompute`, since what is recomputed needs it too.

    Args:
        task: changes in place.
        trainable: names of the trained components.
        wanted: `engine.attention`.
        blocks: modules that are recomputed.

    Raises:
        PlanError: the library refuses, for example because a package is missing.
    """
    for root in trainable if wanted != "auto" else ():
        for path, module in _models(task.get_submodule(root), root):
            library, names = _library(module)
            try:
                if library == "diffusers":
                    dispatch: Any = importlib.import_module("diffusers.models.attention_dispatch")
                    with dispatch.attention_backend(names[wanted]):  # raises for a missing package
                        module.set_attention_backend(names[wanted])
                elif wanted in _TRANSFORMERS and library == "transformers":
                    module.set_attn_implementation(names[wanted])
                elif wanted in _TORCH:
                    for each in (path, *(block for block in blocks if block.startswith(f"{path}."))):
                        _within(task.get_submodule(each), _TORCH[wanted])
            except (ImportError, RuntimeError, ValueError) as fault:
                text = f"{library} refuses attention {wanted!r} for {path}: {first_line(fault)}"
                raise PlanError(text, where=_KEY) from fault


def _within(module: nn.Module, kernel: SDPBackend) -> None:
    def attending(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(kernel):
            return forward(*args, **kwargs)

    around_forward(module, attending)
