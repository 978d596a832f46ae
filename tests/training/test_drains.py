"""A step waits for its device nowhere but at the one read that it declares, the late one of norm and losses.

No accelerator is at hand, so a stand-in counts: tensors that would be on a device are known by their history.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from mm_core.config.load import load_config
from mm_core.contracts import VideoTextBatch
from mm_core.runtime.process_group import process_group
from mm_core.tasks.text_to_video import captions, task
from mm_core.training import late
from mm_core.training.assembly import assemble
from mm_core.training.loop import run_steps
from mm_core.training.run import running

pytestmark = pytest.mark.slow
READS = {
    "tolist",
    "item",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "nonzero",
    "unique",
}


class StandInDevice:
    """A stand-in for a device, on the CPU: which tensors would be there, and what would wait for its queue.

    What is moved there is there, and what is computed from it. Drawn numbers and new tensors of numbers are
    the host's. Noted are: reading what is on the device, copying the host's there without page-locked memory,
    and computing with both; each with the line of mm_core that did it.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self._where: dict[int, tuple[str, Tensor]] = {}

    def put(self, where: str, *tensors: object) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                tensor = getattr(tensor, "_local_tensor", tensor)
                self._where[tensor.untyped_storage()._cdata] = where, tensor

    def where(self, tensor: Tensor) -> str:
        tensor = getattr(tensor, "_local_tensor", tensor)
        return self._where.get(tensor.untyped_storage()._cdata, ("", tensor))[0]

    def note(self, what: str) -> None:
        own = [frame for frame in traceback.extract_stack() if "/mm_core/" in frame.filename]
        self.waits.append(f"{what}: {own[-1].filename}:{own[-1].lineno} {own[-1].line}" if own else what)

    def sees(self, name: str, arguments: object, found: object) -> None:
        tensors = [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Tensor)]
        places = {self.where(tensor) for tensor in tensors if tensor.dim() or self.where(tensor) == "device"}
        if {"host", "device"} <= places:
            self.note(f"{name} of host and device")
        drawn = "generator" in name or "lift_fresh" in name
        place = "device" if "device" in places else "host" if "host" in places or drawn else ""
        if place:
            self.put(place, *tree_flatten(found)[0])


class StandInDispatch(TorchDispatchMode):
    def __init__(self, device: StandInDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        drawn = any(isinstance(leaf, torch.Generator) for leaf in tree_flatten((args, kwargs or {}))[0])
        if "_local_scalar_dense" in str(func) and self.device.where(args[0]) == "device":
            self.device.note("a number is read")
        named = {argument.name: argument for argument in func._schema.arguments}
        given = {**dict(zip(named, args, strict=False)), **(kwargs or {})}
        written = [
            v for name, v in given.items() if named[name].alias_info and named[name].alias_info.is_write
        ]
        self.device.sees(f"{func}{' generator' if drawn else ''}", (args, kwargs or {}), (found, written))
        return found


class StandInFunctions(TorchFunctionMode):
    """Sees what torch does not dispatch for tensors that are on the CPU in truth."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], Tensor):
            where = self.device.where(args[0])
            if name in READS and where == "device":
                self.device.note(f"{name} of the device")
            devices = [a for a in (*args[1:], *(kwargs or {}).values()) if isinstance(a, torch.device)]
            # Batches come in page-locked memory from the loader, and are copied without waiting.
            if name == "to" and devices and where == "host" and not (kwargs or {}).get("non_blocking"):
                self.device.note("a copy from pageable memory")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device(monkeypatch) -> Iterator[StandInDevice]:
    found = StandInDevice()
    to = VideoTextBatch.to

    def moved(batch, where, non_blocking=False):
        result = to(batch, where, non_blocking)
        found.put("device", *(getattr(result, f.name) for f in fields(result) if f.name != "sample_weights"))
        found.put("host", result.sample_weights)
        return result

    def pinned(where, tensor):
        copy = tensor.detach().clone()
        found.put("device", copy)
        return copy

    def read_late(tensor):
        copy = tensor.detach().clone()
        found.put("", copy)
        return lambda: copy

    monkeypatch.setattr(VideoTextBatch, "to", moved)
    for module in (task, captions):
        monkeypatch.setattr(module, "copied_to", pinned)
    monkeypatch.setattr(late, "copied_to_host", read_late)
    with process_group(None):
        yield found


def waits(tiny, folder, device: StandInDevice, on: bool) -> list[str]:
    """What waits in steps 3 to 6 of a run that logs each step."""
    overrides = [f"run.dir={folder}", "train.steps=9", "checkpoint.every=100", "ema={decay: 0.9}"]
    run = assemble(load_config(tiny, [*overrides, "log={every: 1, detail_every: 100}"]), "never")
    engine, training = run.engine, run
    device.put("device", *(shard.master for shard in engine.shards()), *run.between.ema.state_dict().values())
    engine.late = on
    training.late = late.late_steps(training)
    micro = engine.micro_step
    steps: list[int] = []

    def watched(*arguments, **named):
        steps.append(training.task._step)
        return micro(*arguments, **named)

    engine.micro_step = watched
    begin = training.task.begin_step
    modes = StandInFunctions(device), StandInDispatch(device)

    def begins(step: int) -> None:
        begin(step)
        if step == 3:
            for mode in modes:
                mode.__enter__()
        if step == 7:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)

    training.task.begin_step = begins
    with running(run):
        run_steps(training, 0)
    assert {3, 4, 5, 6} <= set(steps)
    return device.waits


def test_late_steps_wait_nowhere(tiny, tmp_path, device):
    assert waits(tiny, tmp_path, device, on=True) == []


def test_the_stand_in_sees_the_wait_of_steps_that_are_not_late(tiny, tmp_path, device):
    found = waits(tiny, tmp_path, device, on=False)
    assert any("return float((self._norm" in wait for wait in found), found
    assert any("tolist" in wait for wait in found), "the log"
