"""Conformance checks of predictors with a table of inputs, and of what shapes their call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mm_core.contracts import PredictorInputs, SupportsInputs
from mm_core.testing.kit import NotApplicable
from mm_core.testing.predictors.forward import expect_output
from mm_core.testing.predictors.probe import PredictorProbe
from mm_core.testing.tensors import expect_close


def given_inputs(probe: PredictorProbe) -> None:
    """Conformance check: `with_inputs` is pure, and each input changes the prediction, but not the zeros
    behind pictures."""
    module: Any = probe.trained()
    probe.require(module, SupportsInputs)
    inputs = probe.inputs(module)
    latents, timestep = inputs["latents"], inputs["timestep"]
    given = probe.given(module, latents)
    if not given:
        raise NotApplicable("the predictor's table of inputs is empty")

    def shape(one: Any, named: Mapping[str, Tensor] = given) -> PredictorInputs:
        found: PredictorInputs = one.with_inputs(latents, timestep, named)
        return found

    found = expect_pure(probe, "with_inputs", shape, (latents, timestep, *given.values()))
    counts = torch.ones(1, dtype=torch.bool) if found.counts is None else found.counts

    def predicted(named: Mapping[str, Tensor]) -> Tensor:
        shown = shape(module, named)
        passed = {**inputs, **shown.conditions, "latents": shown.latents, "timestep": shown.timestep}
        with torch.no_grad():
            output: Tensor = module(**passed)
        expect_output(probe, module, passed, output)
        return output * counts

    first = predicted(given)
    for row in module.inputs:
        one = given[row.name]
        other = one * 2 if one.is_floating_point() else (one == 0).to(one.dtype)  # a class stays in its range
        probe.expect(
            not torch.equal(first, predicted({**given, row.name: other})),
            f"the input `{row.name}` does not change the prediction",
            hint="with_inputs must place it in the latents or in a condition that forward uses",
        )
        if row.most and row.encoder != "image_encoder":
            wider = {**given, row.name: pad(given[row.name], (0, module.patch_size[2]))}
            what = f"zeros behind the pictures of `{row.name}` change the prediction"
            expect_close(probe, predicted(wider), first, what, f"use the sizes in `{row.conditions[1]}`")


def expect_pure(
    probe: PredictorProbe, name: str, shape: Callable[[Any], PredictorInputs], arguments: Sequence[Tensor]
) -> PredictorInputs:
    """What a method that shapes the predictor's call returns.

    Args:
        probe: of the predictor.
        name: of the method.
        shape: calls it on a predictor.
        arguments: its tensors.

    Raises:
        ContractError: it reads a parameter, changes an argument, or is no pure function.
    """
    before, module = [one.clone() for one in arguments], probe.trained()
    found, again = shape(module), shape(module)
    probe.expect(
        isinstance(found, PredictorInputs),
        f"{name} returned a {type(found).__name__}",
        accepted="mm_core.contracts.PredictorInputs",
    )
    probe.expect(
        all(map(torch.equal, arguments, before)),
        f"{name} changes its arguments",
        hint="build a new tensor: torch.cat, torch.where, or clone before an assignment",
    )
    same = torch.equal(found.latents, again.latents) and torch.equal(found.timestep, again.timestep)
    hint = "sampling calls it at each step: draw nothing, and keep nothing between calls"
    probe.expect(same, f"{name} returns other inputs for the same arguments", hint=hint)
    probe.expect(
        _is_apart(shape, probe.on_meta(), found),
        f"{name} reads parameters of the predictor",
        hint="it is called outside of the forward, where weights are sharded: move this into forward",
    )
    return found


def _is_apart(shape: Callable[[Any], PredictorInputs], away: Any, found: PredictorInputs) -> bool:
    """Whether the method returns the same for a predictor whose parameters have no values."""
    try:
        apart = shape(away)
        same = all(torch.equal(apart.conditions[name], t) for name, t in found.conditions.items())
        return same and torch.equal(apart.latents, found.latents)
    except (RuntimeError, NotImplementedError):  # torch refuses operations on tensors without values
        return False
