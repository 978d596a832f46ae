"""The memory of a LoRA run with its frozen base in other forms, for `--dry-run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mm_core.config.dump import to_mapping
from mm_core.config.sections import RunConfig
from mm_core.contracts import Engine, EnginePlan
from mm_core.errors import MMError
from mm_core.plan.planning import build_frozen, build_task, state_tensors
from mm_core.plan.run_plan import device_bytes, host_bytes
from mm_core.weights.adapters.inject import Structure


@dataclass(frozen=True)
class BaseChoice:
    """The memory of a run with its base in one form.

    Attributes:
        label: the form.
        device_bytes: bytes on a rank's device while the trained modules compute, without activations.
        host_bytes: bytes in a rank's host memory.
        refusal: why the run cannot have its base in this form; "" if it can.
    """

    label: str
    device_bytes: int = 0
    host_bytes: int = 0
    refusal: str = ""


def base_choices(config: RunConfig, world: int, adapters: Structure) -> tuple[BaseChoice, ...]:
    """The memory of a run with adapters as configured, and with one change each: its base streamed (or, if it
    is, not), in int8 and in nf4.

    Returns () for a run without adapters, or with an engine that has no section `base`.

    Args:
        config: the run's config.
        world: number of ranks.
        adapters: as for `build_task`.
    """
    engine = to_mapping(config)["engine"]
    dtype = config.train.base_dtype
    if not config.train.adapters or "base" not in engine:
        return ()
    base = engine["base"]
    other = {**engine, "base": {**base, "stream": not base["stream"]}}
    if not base["stream"]:
        other["recompute_modules"] = engine["recompute_modules"] or "auto"
    also = ", streamed" if base["stream"] else ""
    forms = {
        f"as configured{also}": (dtype, engine),
        "not streamed" if base["stream"] else "+ stream": (dtype, other),
        **{f"+ {kind}{also}": (kind, engine) for kind in ("int8", "nf4") if kind != dtype},
    }
    found = []
    for label, (kind, settings) in forms.items():
        train = replace(config.train, base_dtype=kind)
        try:
            found.append(_choice(label, replace(config, train=train), settings, world, adapters))
        except MMError as fault:
            found.append(BaseChoice(label, refusal=fault.what))
    return tuple(found)


def _choice(
    label: str, config: RunConfig, settings: Mapping[str, Any], world: int, adapters: Structure
) -> BaseChoice:
    task = build_task(config, adapters)
    build_frozen(task)
    engine: Engine = config.registry.build("engine", settings)
    plan: EnginePlan = engine.plan(task, world, state_tensors(config))
    device = sum(device_bytes(plan).values()) + sum(part.device_bytes for part in plan.parts)
    device += plan.gathered_bytes + max((part.call_bytes for part in plan.frozen), default=0)
    device += plan.base.call_bytes if plan.base is not None else 0
    host = sum(host_bytes(plan).values()) + sum(part.host_bytes for part in plan.parts)
    return BaseChoice(label, device, host)


def table_of(choices: tuple[BaseChoice, ...]) -> list[str]:
    """The choices as text, one line each, in GiB."""
    lines = ["the frozen base in other forms: GiB per rank while computing, without activations"]
    width = max((len(one.label) for one in choices), default=0)
    lines += [f"  {'':<{width}}  {'device':>8}  {'host':>8}"]
    for one in choices:
        sizes = f"{one.device_bytes / 2**30:>8.2f}  {one.host_bytes / 2**30:>8.2f}"
        lines.append(f"  {one.label:<{width}}  {one.refusal or sizes}")
    return lines
