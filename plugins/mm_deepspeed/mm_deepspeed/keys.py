"""Reads the keys of a DeepSpeed JSON file: accepted, ignored with a note, or refused with the reason.

DeepSpeed accepts an unknown key at the top level and many useless combinations silently;
here each is an error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from mm_core.errors import did_you_mean
from mm_deepspeed.rules import AUTO, KEYS, PARAMS, SPELT, Alias, Free, Ignored, Refused

__all__ = ["AUTO", "KEYS", "PARAMS", "Refused", "checked", "is_on", "read", "section"]

_AT_LEAST_ONE = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "fp16.loss_scale_window",
    "fp16.min_loss_scale",
)


def checked(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Reads the keys of a DeepSpeed JSON file.

    Returns:
        the settings that DeepSpeed gets, with numbers that are written as text (`5e8` in YAML) as numbers and
        without what is ignored or switched off; the faults; the notes. Faults and notes start with their key.
    """
    faults: list[str] = []
    notes: dict[str, list[str]] = {}
    kept = _section(settings, KEYS, "", faults, notes, _unused(settings))
    if not any(fault.startswith(("zero_optimization ", "zero_optimization.stage ")) for fault in faults):
        faults += _combinations(kept)
    faults += _params(kept)
    shown = [
        f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} ignored: {n}" for n, keys in notes.items()
    ]
    return kept, faults, shown


def section(settings: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """The section at `path`, empty if it is absent or no section."""
    found: Any = settings
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def is_on(settings: Mapping[str, Any], dtype: str) -> bool:
    """Whether `bf16` or `fp16` is enabled; `auto` enables bf16 at stages 1 to 3 without fp16."""
    enabled = section(settings, dtype).get("enabled", False)
    if enabled == AUTO:
        stage = section(settings, "zero_optimization").get("stage", 0)
        return dtype == "bf16" and read(stage, int) in (1, 2, 3) and not is_on(settings, "fp16")
    return enabled is True


def _unused(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Sections that are switched off, each as the beginning of its keys: nothing in them is refused."""
    halves = [f"{dtype}." for dtype in ("bf16", "fp16") if not is_on(settings, dtype)]
    parts = (("zero_optimization", name) for name in ("offload_optimizer", "offload_param"))
    still = [part for part in parts if section(settings, *part).get("device") in (None, "none")]
    return (*halves, *(f"{'.'.join(part)}." for part in still))


def _section(
    values: Mapping[str, Any],
    rules: Mapping[str, Any],
    path: str,
    faults: list[str],
    notes: dict[str, list[str]],
    unused: Collection[str],
) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        rule, name = rules.get(key), f"{path}{key}"
        if isinstance(rule, Alias):
            if rule.of in values:
                faults.append(f"{name} is another name of {rule.of}, and both are set; remove one")
                continue
            key, rule = rule.of, rules[rule.of]
        if rule is None:
            hint = did_you_mean(str(key), [k for k, r in rules.items() if not isinstance(r, Refused)])
            faults.append(f"{name} is not a key of DeepSpeed{f'; {hint}' if hint else ''}")
        elif isinstance(rule, Ignored):
            notes.setdefault(rule.note, []).append(name)
        elif isinstance(rule, Refused):
            if path not in unused and not _is_off(value, rule):
                faults.append(f"{name} {rule.why}")
        elif isinstance(rule, (dict, Free)):
            if isinstance(value, Mapping) and isinstance(rule, dict):
                kept[key] = _section(value, rule, f"{name}.", faults, notes, unused)
            elif isinstance(value, Mapping):
                kept[key] = dict(value)
            elif value is not None and not (isinstance(rule, Free) and value == AUTO):
                hint = '; write {"stage": 1}, 2 or 3' if key == "zero_optimization" else ""
                faults.append(f"{name} is {value!r}, not a section with keys{hint}")
        elif value == AUTO or value is None:
            kept[key] = value
        else:
            found = read(value, rule)
            if found is not None:
                kept[key] = found
            else:
                faults.append(f"{name} is {value!r}, not {_described(rule)}")
    return kept


def _is_off(value: Any, rule: Refused) -> bool:
    if isinstance(value, Mapping):
        return not value or value.get("enabled", True) is False
    return value is None or value is False or value == AUTO or (value is not True and value in rule.off)


def read(value: Any, rule: Any) -> Any:
    """The value as the rule's type, or None: numbers may be text, and whole numbers may be written 5e8."""
    if isinstance(rule, tuple):
        value = SPELT.get(value, value) if isinstance(value, str) else value
        return value if value in rule else None
    if rule in (str, bool):
        return value if isinstance(value, rule) else None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number) or number < 0 or (rule is int and not number.is_integer()):
        return None
    return int(number) if rule is int else number


def _described(rule: Any) -> str:
    if isinstance(rule, tuple):
        return f"one of {', '.join(rule)}"
    return {str: "text", bool: "true or false", int: "a whole number from 0", float: "a number from 0"}[rule]


def _combinations(settings: Mapping[str, Any]) -> list[str]:
    """What DeepSpeed accepts, but what does nothing or computes something wrong."""
    zero, faults = section(settings, "zero_optimization"), []
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        return [f"zero_optimization.stage is {stage!r}, not one of 0, 1, 2, 3"]
    halves = [dtype for dtype in ("bf16", "fp16") if is_on(settings, dtype)]
    if len(halves) == 2:
        faults.append("fp16.enabled and bf16.enabled are both true; choose one, bf16 where the device has it")
    elif halves and stage == 0:
        reason = "DeepSpeed's half precision at stage 0 takes a false first step and scales wrongly"
        faults.append(f"{halves[0]}.enabled is true at stage 0: {reason}; use zero_optimization.stage 1")
    for key, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        part, name = section(zero, key), f"zero_optimization.{key}"
        device = part.get("device") or "none"
        if device == AUTO:
            faults.append(f"{name}.device is auto: write none or cpu")
        elif device == "nvme":
            faults.append(
                f"{name}.device nvme is not taken over: checkpoints read states from memory; use cpu"
            )
        elif device != "none" and stage < lowest:
            faults.append(f"{name} does nothing at stage {stage}; it needs stage {lowest} or higher")
    for path in _AT_LEAST_ONE:
        *above, key = path.split(".")
        if section(settings, *above).get(key) == 0:
            faults.append(f"{path} is 0, but DeepSpeed needs 1 or more")
    factor = settings.get("gradient_predivide_factor")
    divided = settings.get("prescale_gradients") is True or factor not in (None, AUTO, 1)
    if divided and stage >= 2 and zero.get("reduce_scatter") is not False:
        name = "prescale_gradients" if factor in (None, AUTO, 1) else "gradient_predivide_factor"
        faults.append(f"{name} fails at stage {stage} unless zero_optimization.reduce_scatter is false")
    if stage == 0 and section(settings, "data_types").get("grad_accum_dtype") not in (None, AUTO, "fp32"):
        faults.append("data_types.grad_accum_dtype has no effect at stage 0; remove it or use stage 1")
    return faults


def _params(settings: Mapping[str, Any]) -> list[str]:
    """Types and parameters of an optimizer or schedule that the run cannot compare with its own."""
    faults = []
    for name, types in PARAMS.items():
        part = section(settings, name)
        kind, key = part.get("type"), "lr_schedule" if name == "scheduler" else name
        known = {known.lower(): params.split() for known, params in types.items()}
        if not part or kind == AUTO:
            continue
        if kind is None:
            faults.append(f"{name}.type is missing, one of {', '.join(types)}")
        elif kind.lower() not in known:
            use = f"the run's `{key}:` of the YAML computes: choose there and remove this section"
            faults.append(f"{name}.type {kind} is not taken over (only {', '.join(types)}); {use}")
        else:
            names = known[kind.lower()]
            for param in [p for p in section(part, "params") if p not in names]:
                hint = did_you_mean(str(param), names)
                faults.append(
                    f"{name}.params.{param} is not a parameter of {kind}{f'; {hint}' if hint else ''}"
                )
    return faults
