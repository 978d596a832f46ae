"""Compilation of modules by torch.compile, applied from outside; nothing falls back to eager unseen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mm_core.builtin.configs.engines import FSDP2Config
from mm_core.contracts import TaskModule
from mm_core.device import device_type, missing_compiler
from mm_core.device.torch_private import FakeTensorMode, TorchDispatchMode, without_modes
from mm_core.errors import PlanError, first_line
from mm_core.modules.forwards import around_forward
from mm_core.modules.patterns import match
from mm_core.parallel.layout import check_callable, like_blocks

_logger = logging.getLogger(__name__)
_KEY = "engine.compile.modules"

_GRAPHS = 64
"""Graphs of one forward that torch keeps; torch's own limit of 8 is less than some runs have sizes."""


def decide_compiled(
    task: TaskModule, trainable: Sequence[str], config: FSDP2Config, recomputed: Sequence[str]
) -> tuple[str, ...]:
    """Decides which modules of a task are compiled; one within another is part of the other's graph.

    Args:
        task: the task, on the meta device or not.
        trainable: names of the trained components.
        config: the engine's.
        recomputed: modules whose activations are recomputed.

    Raises:
        PlanError: no module is found, or another key of the engine does not allow it.
    """
    wanted = config.compile.modules
    if wanted is False:
        return ()
    if isinstance(wanted, bool | str):
        found = [path for root in trainable for path in like_blocks(task.get_submodule(root), root)]
    else:
        found = match(list(wanted), [name for name, _ in task.named_modules() if name], _KEY)
    if not found:
        raise PlanError(
            f"'auto' finds no repeated blocks in {', '.join(trainable)}",
            where=_KEY,
            accepted="path patterns; or a model with _no_split_modules or a list of equal modules",
            hint="list the modules to compile, for example ['predictor'], or set it to off",
        )
    check_callable(task, found, _KEY)
    outer = [path for path in found if not _within(path, found)]
    clash = None
    if config.use_reentrant and recomputed:
        clash = "use_reentrant: true", "remove use_reentrant"
    elif config.base.stream:
        clash = "engine.base.stream", "set modules: off, or base.stream: false"
    elif config.context_parallel.size > 1:
        clash = "context_parallel", "set modules: off, or context_parallel.size: 1"
    elif config.recompute != "full" and any(_within(path, recomputed) for path in outer):
        clash = "recompute other than full of a module around it", "recompute the compiled modules themselves"
    if clash is not None:
        raise PlanError(f"a compiled module does not work with {clash[0]}", where=_KEY, hint=clash[1])
    return tuple(outer)


def check_compiler(compiled: Sequence[str]) -> None:
    """PlanError if modules are to be compiled on a host without a compiler."""
    if compiled and (missing := missing_compiler()) is not None:
        what = f"torch.compile finds no {missing} for the device {device_type()}"
        raise PlanError(what, where=_KEY, accepted="off, without it", hint=f"install {missing}")


def _within(path: str, others: Sequence[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def compile_module(module: nn.Module, path: str, mode: str, dynamic: bool) -> None:
    """Compiles a module's forward as one graph. Call it after `recompute` and before sharding.

    Args:
        module: changes in place.
        path: of the module in the task, for errors.
        mode: one of torch.compile, such as `default`.
        dynamic: one graph for all sizes, else one for each. Neither depends on the sizes before, so a resumed
            run computes with the graphs of the run that it continues.
    """
    torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
    compiled = torch.compile(module.forward, fullgraph=True, dynamic=dynamic, mode=mode)

    def forward(eager: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        try:
            with without_modes() as modes:  # else torch.compile would run this forward eagerly
                _observe(modes, eager, args, kwargs)
                before, start = graphs(), time.monotonic()
                out = compiled(*args, **kwargs)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as fault:
            raise PlanError(
                f"{path} ({type(module).__name__}) cannot be compiled as one graph: {first_line(fault)}",
                where="engine.compile.modules",
                accepted="modules whose forward torch.compile takes with fullgraph=True",
                hint="leave it out of engine.compile.modules, or set modules: off",
            ) from fault
        if (count := graphs()) != before:
            _logger.warning("%s: compiled graph %d in %.0f s", path, count, time.monotonic() - start)
        return out

    around_forward(module, forward)


def _observe(
    modes: Iterable[TorchDispatchMode], eager: Callable[..., object], args: Any, kwargs: Any
) -> None:
    """Shows the operators of a forward to dispatch modes that were on, such as the FLOP counter, without
    computing numbers."""
    for mode in modes:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), mode:
            eager(*args, **kwargs)


def graphs() -> int:
    """The number of graphs that torch.compile has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
