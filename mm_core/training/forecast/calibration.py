"""What this machine reaches: a step's operators, measured one by one and kept for later forecasts."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mm_core.device import current_device, synchronize
from mm_core.errors import MMError
from mm_core.files import replace_text, state_folder
from mm_core.training.forecast.meter import Meter, Shape, Work

SECONDS = 10.0
"""How long the operators of a run are measured."""

_START = 3e-6  # seconds of a call that do not depend on its size
_TINY = 1e-7  # published seconds that show nothing of what grows with the size
_ROUNDS = 5
_LARGEST = 1 << 30  # bytes of an operator's tensors


@dataclass(frozen=True)
class Factors:
    """What a device was measured to take.

    Attributes:
        call: seconds of the host for an operator within a step, besides the operator itself.
        operators: name and dtype -> seconds of a call, and its seconds in those of the published peaks.
        sizes: name, dtype, FLOPs and bytes -> seconds.
    """

    call: float = 0.0
    operators: dict[str, tuple[float, float]] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    def of(self, work: Work, published: float) -> float:
        """Seconds of an operator that takes `published` at the device's peaks; of one that was not measured
        those of the median one."""
        if (exact := self.sizes.get(_size(work))) is not None:
            return exact
        call, slope = self.operators.get(_key(work)) or self._usual
        return call + slope * published

    @cached_property
    def _usual(self) -> tuple[float, float]:
        calls, slopes = zip(*self.operators.values(), strict=True) if self.operators else ([0.0], [1.0])
        return statistics.median(calls), statistics.median(slopes)


def _key(work: Work) -> str:
    return f"{work.name} {work.dtype}"


def _size(work: Work) -> str:
    return f"{_key(work)} {work.flops} {work.bytes}"


def factors_of(name: str, model: str = "") -> Factors | None:
    """What was measured for a device on this host with as many threads; None: nothing.

    Args:
        name: of the device.
        model: whose code takes the host's seconds between operators (`RunPlan.model`); of one that was not
            measured they are those of the median one.
    """
    calls, found = _kept(name)
    if not calls:
        return None
    return replace(found, call=calls.get(model, statistics.median(calls.values())))


def _kept(name: str) -> tuple[dict[str, float], Factors]:
    file = _file(name)
    with suppress(OSError, ValueError, TypeError, KeyError):
        document = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
        operators = {key: (float(a), float(b)) for key, (a, b) in document["operators"].items()}
        sizes, calls = ({k: float(v) for k, v in document[part].items()} for part in ("sizes", "calls"))
        return calls, Factors(0.0, operators, sizes)
    return {}, Factors()


def keep(name: str, factors: Factors, model: str = "") -> Path | None:
    """Writes what was measured, beside what was before; returns the file, None for a user without a home.

    Raises:
        MMError: the file cannot be written.
    """
    calls, before = _kept(name)
    document = {
        "calls": {**calls, model: factors.call},
        "operators": {**before.operators, **factors.operators},
        "sizes": {**before.sizes, **factors.sizes},
    }
    if (file := _file(name)) is None:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(document, indent=1))
    except OSError as error:
        what = f"{file} cannot be written: {error.strerror}"
        raise MMError(what, where="--calibrate", hint="set XDG_STATE_HOME to a folder of yours") from None
    return file


def _file(name: str) -> Path | None:
    folder = state_folder("calibrated")
    threads = f"_{torch.get_num_threads()}_threads" if name == "cpu" else ""
    return None if folder is None else folder / f"{name.replace(' ', '_')}{threads}.json"


def clock() -> float:
    """Seconds; of a processor with one thread its own, which other processes do not lengthen."""
    alone = current_device().type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if alone else time.perf_counter()


def calibrate(
    calls: Mapping[Work, tuple[Any, Any, Any]],
    weights: Mapping[Work, float],
    published: Callable[[Work], float],
) -> Factors:
    """Measures operators on this process's device for `SECONDS`, those that take most first.

    Args:
        calls: an operator with its arguments, tensors as `Shape`.
        weights: how often each runs.
        published: seconds of a call at the device's peaks.
    """
    device, ends = current_device(), time.perf_counter() + SECONDS
    order = sorted(calls, key=lambda work: -weights[work] * max(published(work), 1e-6))
    measured: dict[str, list[tuple[float, float, float]]] = {}
    sizes: dict[str, float] = {}
    for work in order:
        if time.perf_counter() > ends:
            break
        if work.kind != "communication" and work.bytes <= _LARGEST:
            # Some operators take no numbers of our own: they count as the median one.
            with suppress(RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                seconds = _seconds(*calls[work], device)
                sizes[_size(work)] = seconds
                measured.setdefault(_key(work), []).append((published(work), seconds, weights[work]))
    return Factors(_host_call(), {key: _line(points) for key, points in measured.items()}, sizes)


def _line(points: list[tuple[float, float, float]]) -> tuple[float, float]:
    """The line a + b x through the measured seconds, weighted by the calls; a and b are not negative."""
    total = sum(w for *_, w in points)
    x = sum(w * px for px, _, w in points) / total
    y = sum(w * py for _, py, w in points) / total
    spread = sum(w * (px - x) ** 2 for px, _, w in points)
    slope = sum(w * (px - x) * (py - y) for px, py, w in points) / spread if spread else -1.0
    if slope >= 0 and y >= slope * x:
        return y - slope * x, slope
    start = min(y, _START)  # of one size, or of none that lie on a line
    return start, (y - start) / x if x > _TINY else 1.0


def _seconds(func: Any, args: Any, kwargs: Any, device: torch.device) -> float:
    """The median of some calls, each with tensors of its own: a step has none of them in a cache."""

    def made(shape: Shape) -> Tensor:
        own = [
            size if stride else min(size, 1) for size, stride in zip(shape.size, shape.stride, strict=True)
        ]
        values = torch.empty_strided(own, shape.stride, dtype=shape.dtype, device=device)
        values = values.uniform_(-1, 1) if shape.dtype.is_floating_point else values.zero_()
        return values.expand(shape.size)

    times = []
    with torch.no_grad():
        for round_ in range(_ROUNDS):
            own_args, own_kwargs = tree_map_only(Shape, made, (args, kwargs))
            synchronize()
            began = clock()
            func(*own_args, **own_kwargs)
            synchronize()
            if round_:
                times.append(clock() - began)
    return statistics.median(times)


def _host_call() -> float:
    """Seconds that Python and autograd take for an operator, from a step of a module of almost no work."""
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(8)]
    module = nn.Sequential(*layers)
    x = torch.ones(4, 8, requires_grad=True)
    meter = Meter()
    with meter.phase("step"), meter.counting():
        module(x).sum().backward()
    operators = sum(meter.phases["step"]["begin"].work.values())
    times = []
    for _ in range(30):
        began = clock()
        module(x).sum().backward()
        times.append(clock() - began)
    return max(0.0, statistics.median(times) / operators - 2e-6)
