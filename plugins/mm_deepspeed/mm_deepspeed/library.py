"""Imports DeepSpeed and starts its engine, quietly and without what the core does itself."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch

from mm_core.device import environment_world
from mm_core.errors import PlanError, PluginError
from mm_deepspeed.json_file import place_of

VERSIONS = ("0.19.8",)
_INSTALL = f"pip install deepspeed=={VERSIONS[-1]}"


def load(
    device: torch.device, dtype: str = "fp32", settings: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Imports DeepSpeed for a device; its messages go to Python's logging, from warnings on.

    Args:
        device: on which it computes.
        dtype: in which it computes, `fp32`, `bf16` or `fp16`.
        settings: where the dtype is set.

    Raises:
        PluginError: it is missing, or of a version whose private parts are not known here.
        PlanError: it does not compute in that dtype on the device.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        found = metadata.version("deepspeed")
        import deepspeed
    except ImportError as fault:
        raise PluginError(
            f"the engine needs deepspeed, which cannot be imported: {fault}", where="engine", hint=_INSTALL
        ) from None
    if found not in VERSIONS:
        raise PluginError(
            f"deepspeed {found} is installed, whose private parts the engine does not know",
            where="engine",
            accepted=f"deepspeed {', '.join(VERSIONS)}",
            hint=_INSTALL,
        )
    if dtype != "fp32" and not getattr(deepspeed.get_accelerator(), f"is_{dtype}_supported")():
        raise PlanError(
            f"{dtype}.enabled is true, but DeepSpeed does not compute in {dtype} on this device",
            where=place_of(settings, f"{dtype}.enabled") or "engine.settings",
            accepted="fp32" if dtype == "bf16" else "bf16, fp32",
            hint=f"remove the section {dtype}, or enable bf16 where the device has it",
        )
    logger = logging.getLogger("DeepSpeed")
    logger.handlers.clear()  # it writes to stdout
    logger.propagate = True
    logger.setLevel(logging.ERROR)  # its warnings are about its own optimizers and schedules
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)
    _forget_groups()
    return deepspeed


def _forget_groups() -> None:
    """Drops what DeepSpeed keeps of an earlier engine in this process, whose groups are gone."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    comm.cdb = None
    groups._release_process_group_references()
    Init.num_persisted_parameters = Init.num_persisted_elements = 0


@contextmanager
def starting() -> Iterator[None]:
    """A context for making DeepSpeed's engine; the environment is as before at its end, but for LOCAL_RANK.

    DeepSpeed compiles nothing for the communication of CPUs in it: gloo does that. Nor does it broadcast
    rank 0's parameters, which are equal already: it cannot broadcast one without dimensions.
    """
    os.environ.setdefault("LOCAL_RANK", str(environment_world().local_rank))  # stage 3 reads it in each step
    with (
        patch.dict(os.environ),
        patch("deepspeed.comm.torch.build_shm_op", lambda: None),
        patch("deepspeed.runtime.bf16_optimizer.see_memory_usage", lambda *_, **__: None),  # it prints
        patch("deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model", lambda _: None),
    ):
        yield
