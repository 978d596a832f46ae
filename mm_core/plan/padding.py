"""Whether masked text has no effect on a predictor that declares so: it would train on padding in silence."""

from __future__ import annotations

import dis
import inspect
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_core.config.sections import RunConfig
from mm_core.contracts import (
    CLIP_CONDITIONS,
    Randomness,
    SupportsConditionShapes,
    SupportsMaxFrames,
    TaskModule,
    generators_kept,
)
from mm_core.errors import ContractError
from mm_core.plugin.checks.places import place_of_method
from mm_core.plugin.records import Registered
from mm_core.schema.checking import check_component
from mm_core.schema.fields import ComponentConfig

_LENGTH = 3
_CHANGED = 1e-3
"""Relative change of the output beside which rounding in another length of text is small."""


def padding_notes(config: RunConfig, task: TaskModule) -> Iterator[str]:
    """Notes about predictors with `text_padding = "masked"` whose forward does not read the mask.

    Raises:
        ContractError: the output of a small instance (`tiny`) depends on the number of padding tokens.
    """
    for name, section in config.task.options.items():
        if not isinstance(section, ComponentConfig) or section.kind != "predictor":
            continue
        predictor: Any = getattr(task, name, None)
        if getattr(predictor, "text_padding", None) != "masked":
            continue
        registered = config.registry.resolve("predictor", section.type)
        if "text_padding" in registered.component.expected_failures:
            continue
        what = 'text_padding is "masked", but '
        where = f"task.{name}, {place_of_method(predictor, '__call__')}"
        hint = 'set text_padding = ("fixed", n) for captions that are padded to n tokens, or use text_mask'
        changed = _change(registered, config) if registered.component.tiny else None
        if changed is not None and changed > _CHANGED:
            raise ContractError(
                f"{what}the number of padding tokens changes the output, by {changed:.1e}",
                where=where,
                accepted='an output that depends on no token whose text_mask is false, or ("fixed", n)',
                hint=hint,
            )
        if changed is None and _reads(predictor, "text") and not _reads(predictor, "text_mask"):
            yield f"{where}: {what}forward never reads text_mask, so it trains on padding; {hint}"


def _change(registered: Registered, config: RunConfig) -> float | None:
    """The relative change of a small instance's output with more padding; None: it cannot be called here."""
    with tempfile.TemporaryDirectory() as folder, generators_kept(), torch.no_grad():
        try:
            fields = {"type": registered.qualified, **registered.tiny_fields(Path(folder))}
            module = config.registry.build(
                "predictor", check_component("predictor", fields, config.registry, "tiny")
            )
            if module.text_padding != "masked":  # small instances may have other fields than the run
                return None
            module.init_weights()
            rng = Randomness(1)
            for name, parameter in module.named_parameters():  # a head of zeros would hide the change
                parameter.add_(0.05 * rng.normal(tuple(parameter.shape), name))
            given = _inputs(module)
            text, mask = given["text"], given["text_mask"]
            # An encoder's states of padding are not zeros.
            padded = {"text": torch.cat([text, text + 10], 1), "text_mask": torch.cat([mask, ~mask], 1)}
            short, long = (module.eval()(**{**given, **more}).double() for more in ({}, padded))
        except Exception:  # an author's code may need what a plan cannot give: `mm plugins test` shows it
            return None
    return float((long - short).abs().max() / short.abs().max().clamp(min=1e-12))


def _inputs(module: Any) -> dict[str, Tensor]:
    """A sample of a predictor: two tokens along each axis, and a caption."""
    rng, frames = Randomness(2), 2 * module.patch_size[0]
    if isinstance(module, SupportsMaxFrames):
        frames = min(frames, module.max_frames)
    size = frames, 2 * module.patch_size[1], 2 * module.patch_size[2]
    taken = inspect.signature(module.forward).parameters.keys() & CLIP_CONDITIONS.keys()
    shapes = {name: CLIP_CONDITIONS[name] for name in sorted(taken)}
    if isinstance(module, SupportsConditionShapes):
        shapes |= module.condition_shapes
    conditions = {
        name: rng.normal((1, *(_LENGTH if each is None else each for each in shape)), name).abs() + 1
        for name, shape in shapes.items()
    }
    return {
        "latents": rng.normal((1, module.in_channels, *size), "latents"),
        "timestep": torch.tensor([500.0]),
        "text": rng.normal((1, _LENGTH, module.text_dim), "text"),
        "text_mask": torch.ones(1, _LENGTH, dtype=torch.bool),
        **conditions,
    }


def _reads(predictor: Any, name: str) -> bool:
    """Whether a forward reads an argument, as far as it can be seen."""
    code = getattr(inspect.unwrap(predictor.forward), "__code__", None)
    if code is None:
        return True
    named = code.co_argcount + code.co_kwonlyargcount
    if name not in code.co_varnames[:named]:  # it is among those that ** takes, and may be passed on
        if not code.co_flags & inspect.CO_VARKEYWORDS:
            return True
        name = code.co_varnames[named + bool(code.co_flags & inspect.CO_VARARGS)]
    loads = (each for each in dis.get_instructions(code) if "LOAD" in each.opname)
    return name in code.co_cellvars or any(each.argval == name for each in loads)
