"""Conditions of a text-to-video predictor: which it takes by name, which it needs, and what gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from mm_core.contracts import (
    CLIP_CONDITIONS,
    ConditionShapes,
    Predictor,
    SupportsConditionShapes,
    SupportsExperts,
    TextEncoder,
)
from mm_core.errors import ContractError, did_you_mean, plural
from mm_core.modules.casting import KEEP
from mm_core.plugin.checks.places import place_of_method, place_of_object

T = TypeVar("T")
_INPUTS = ("latents", "timestep", "text", "text_mask", "text_lengths")


class Conditions:
    """The conditions that a predictor takes: the parameters of its forward, or those that it declares.

    Args:
        predictor: the task's predictor.

    Attributes:
        declared: shapes of the declared conditions; None if the predictor declares none.
        taken: names of the conditions that it takes.
        needed: names of those without which its forward cannot be called.
    """

    def __init__(self, predictor: Predictor | SupportsExperts) -> None:
        own = (*_INPUTS, "expert") if isinstance(predictor, SupportsExperts) else _INPUTS
        parameters = inspect.signature(_forward(predictor)).parameters.values()
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [p for p in parameters if p.name not in own and p.kind not in variable]
        optional = {p.name for p in named if p.default is not p.empty}
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._named = frozenset(p.name for p in named)
        self._lengths = any(p.name == "text_lengths" for p in parameters)
        self.declared = predictor.condition_shapes if isinstance(predictor, SupportsConditionShapes) else None
        self.taken = self._named if self.declared is None else frozenset(self.declared)
        self.needed = (self._named | self.taken) - optional
        self._predictor = predictor

    def of_text(self, given: Mapping[str, T]) -> dict[str, T]:
        """The conditions of a text encoder (tensors, or their shapes) that the predictor takes."""
        return {name: value for name, value in given.items() if name in self.taken}

    def lengths_of(self, mask: Tensor) -> dict[str, list[int]]:
        """`text_lengths` of a mask [B,L], if the predictor takes them; a mask of the host makes none wait."""
        return {"text_lengths": mask.sum(1).tolist()} if self._lengths else {}

    @property
    def unknown(self) -> list[str]:
        """Names of declared conditions that the predictor's forward does not take."""
        return self.refused(self.taken)

    def refused(self, given: Collection[str]) -> list[str]:
        """Those names of conditions that the predictor's forward does not take."""
        return [] if self._open else sorted({*given} - self._named)

    @property
    def listed(self) -> str:
        """The conditions that the predictor's forward takes, for a message."""
        return ", ".join(sorted(self._named)) or "no condition"

    @property
    def embedded_guidance(self) -> bool:
        """Whether the predictor takes the guidance scale as a condition."""
        return "guidance" in self.taken

    def of_clips(
        self,
        count: int,
        size: tuple[float, float],
        device: torch.device,
        fps: Tensor | float | None,
        guidance: float,
    ) -> dict[str, Tensor]:
        """The conditions that the task itself gives and the predictor takes, float32 [B,...].

        Args:
            count: B, the number of clips.
            size: height and width of the clips in pixels.
            device: device of the tensors.
            fps: frames per second of each clip [B], or of all; None: not known.
            guidance: scale of embedded guidance.
        """
        values = {"fps": fps, "size": size, "guidance": guidance}
        assert values.keys() == CLIP_CONDITIONS.keys()
        return {
            name: _filled(value, device).expand(count, *([2] if name == "size" else []))
            for name, value in values.items()
            if name in self.taken and value is not None
        }

    def check(self, given: Collection[str], text: Collection[str] = ()) -> None:
        """Checks that the predictor gets all conditions that it needs.

        Args:
            given: names of the conditions that it gets.
            text: names of those that the text encoder returns.

        Raises:
            ContractError: one is missing.
        """
        for name in sorted(self.needed.difference(given)):
            raise _missing(name, text, self._predictor)

    def faults(self, encoder: TextEncoder, shows: bool) -> Iterator[ContractError]:
        """Conditions that the predictor needs and nothing gives, or whose shapes do not match.

        Args:
            encoder: the task's text encoder.
            shows: whether the predictor has a table of inputs, which may give more.
        """
        where = f"task.predictor, {place_of_object(self._predictor)}"
        if unknown := self.unknown:
            yield ContractError(
                f"condition_shapes names `{unknown[0]}`, but the predictor's forward does not",
                where=where,
                accepted=self.listed,
                hint=did_you_mean(unknown[0], self._named),
            )
        if encoder.missing_files():
            return  # its files may decide what the text encoder returns
        text = shapes_of(encoder)
        for name in sorted(set(text) & {*_INPUTS, *CLIP_CONDITIONS}):
            yield ContractError(
                f"the text encoder's condition_shapes names `{name}`, which the task itself gives",
                where=f"task.text_encoder, {place_of_object(encoder)}",
                hint="give this condition another name in encode and in condition_shapes",
            )
        # The names of what `with_inputs` returns are known from the first batch on.
        if not shows:
            for name in sorted(self.needed.difference(text, CLIP_CONDITIONS)):
                yield _missing(name, text, self._predictor)
        for name, wanted in (self.declared or {}).items():
            found = {**text, **CLIP_CONDITIONS}.get(name, wanted)
            if not _match(found, wanted):
                giver = "the task" if name in CLIP_CONDITIONS else "the text encoder"
                yield ContractError(
                    f"the predictor takes `{name}` {_text(wanted)}, but {giver} gives {_text(found)}",
                    where=where,
                    accepted=_text(found),
                )

    def guidance_faults(self, settings: Mapping[str, float | None]) -> Iterator[ContractError]:
        """Settings of embedded guidance, by their keys, for a predictor that takes none."""
        for where, value in settings.items():
            if value is not None and not self.embedded_guidance:
                yield ContractError(
                    f"{where.rpartition('.')[2]} is {value:g}, but the predictor takes no `guidance`",
                    where=where,
                    hint="remove it: task.sample.guidance is the scale of classifier-free guidance",
                )

    def unused(self, encoder: TextEncoder) -> list[str]:
        """Names of the conditions that the text encoder returns and the predictor does not take."""
        return [] if encoder.missing_files() else sorted(set(shapes_of(encoder)) - self.taken)


def _forward(predictor: object) -> Callable[..., Tensor]:
    assert isinstance(predictor, nn.Module)
    return predictor.forward


def shapes_of(encoder: TextEncoder) -> ConditionShapes:
    """The conditions that a text encoder declares, by name; empty if it declares none."""
    return encoder.condition_shapes if isinstance(encoder, SupportsConditionShapes) else {}


def cast_condition(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A condition in the dtype of the predictor; integers, masks and the names in KEEP stay as they are."""
    return tensor if name in KEEP or not tensor.is_floating_point() else tensor.to(dtype)


def check_returned(found: Mapping[str, Tensor], encoder: TextEncoder, rows: int) -> None:
    """Checks the conditions that a text encoder returned: exactly the declared ones, one row per caption.

    Raises:
        ContractError: names or shapes are different.
    """
    declared = shapes_of(encoder)
    if set(found) != set(declared):
        raise ContractError(
            f"encode returned {_listed(found)}, but condition_shapes declares {_listed(declared)}",
            where=f"task.text_encoder, {place_of_method(encoder, 'encode')}",
            hint="declare in `condition_shapes` exactly what the third value of encode contains",
        )
    for name, tensor in found.items():
        if not _match(tuple(tensor.shape), (rows, *declared[name])):
            raise ContractError(
                f"encode returned `{name}` of shape {list(tensor.shape)} for {plural(rows, 'caption')}",
                where=f"task.text_encoder, {place_of_method(encoder, 'encode')}",
                accepted=_text(declared[name]),
            )


def _missing(name: str, text: Collection[str], predictor: object) -> ContractError:
    """The error of a condition that the predictor needs and does not get."""
    if name == "fps":
        return ContractError(
            "the predictor's forward needs `fps`, but the batch has no frame rate",
            where=f"task.predictor, {place_of_object(predictor)}",
            hint="set `fps` [B] of the VideoTextBatch in the dataset's collate, or give `fps` a default",
        )
    known = sorted({*text, *CLIP_CONDITIONS})
    return ContractError(
        f"the predictor's forward needs `{name}`, which nothing gives",
        where=f"task.predictor, {place_of_object(predictor)}",
        accepted=f"{', '.join(known)}, or a parameter with a default",
        hint=did_you_mean(name, known) or f"use a text encoder that returns `{name}`, or give it a default",
    )


def _match(found: tuple[int | None, ...], wanted: tuple[int | None, ...]) -> bool:
    pairs = zip(found, wanted, strict=False)
    return len(found) == len(wanted) and all(a == b or None in (a, b) for a, b in pairs)


def _text(shape: tuple[int | None, ...]) -> str:
    """A shape in words, with the batch as B."""
    return f"[{', '.join(['B', *('any' if size is None else str(size) for size in shape)])}]"


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "no condition"


def _filled(value: Tensor | float | tuple[float, float], device: torch.device) -> Tensor:
    """A float32 tensor of numbers. They are filled in on the device: copies from the host wait for it."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32)
    if isinstance(value, tuple):
        return torch.stack([_filled(part, device) for part in value])
    return torch.full((), value, dtype=torch.float32, device=device)
