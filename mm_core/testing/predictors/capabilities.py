"""Conformance checks of predictors with frames of their clip, experts, or a formula of guidance."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mm_core.contracts import (
    FrameNames,
    GivenFrames,
    PredictorInputs,
    Randomness,
    SupportsExperts,
    SupportsFrames,
    SupportsGuided,
)
from mm_core.errors import plural
from mm_core.testing.kit import NotApplicable
from mm_core.testing.predictors.forward import expect_output
from mm_core.testing.predictors.given import expect_pure
from mm_core.testing.predictors.probe import PredictorProbe
from mm_core.testing.tensors import expect_close

_CHOICES: tuple[FrameNames, ...] = ((), ("first",), ("first", "last"))
_FEATURES = 3  # image features of each given frame in the check
_LENGTH = 3  # patches along time, so that there are frames between the first and the last


def given_frames(probe: PredictorProbe) -> None:
    """Conformance check: frames of the clip are filled in, counted and used as `SupportsFrames` documents."""
    module: Any = probe.trained()
    probe.require(module, SupportsFrames)
    choices = module.frame_choices
    probe.expect(
        isinstance(choices, tuple) and choices and all(choice in _CHOICES for choice in choices),
        f"frame_choices is {choices!r}",
        accepted="a tuple of (), ('first',) and ('first', 'last'): the first of it is the default",
    )
    taken = [names for names in choices if names]
    if not taken:
        raise NotApplicable("the predictor takes no frames of its clip")
    for names in taken:
        _expect_frames(probe, module, names)


def _expect_frames(probe: PredictorProbe, module: Any, names: FrameNames) -> None:
    inputs = probe.inputs(module, patches=(_LENGTH, 3, 2))
    latents, timestep = inputs["latents"], inputs["timestep"]
    given = _given(probe, module, names, latents)
    tensors = (latents, timestep, given.latents)
    found = expect_pure(probe, "with_frames", lambda m: m.with_frames(latents, timestep, given), tensors)
    _expect_filled(probe, module, latents, given, found)
    others = {name: t for name, t in inputs.items() if name not in ("latents", "timestep")}

    def predicted(shown: PredictorInputs) -> Tensor:
        passed = {**others, **shown.conditions, "latents": shown.latents, "timestep": shown.timestep}
        with torch.no_grad():
            output: Tensor = module(**passed)
        expect_output(probe, module, passed, output)
        return output

    first = predicted(found)
    changed = GivenFrames(names, given.latents + 1, given.features)
    second = predicted(module.with_frames(latents, timestep, changed))
    counts = torch.ones(1, dtype=torch.bool) if found.counts is None else found.counts
    probe.expect(
        not torch.equal(first * counts, second * counts),
        f"other frames ({' and '.join(names)}) do not change the prediction of the rest of the clip",
        hint="with_frames must place given.latents in the latents or in a condition of forward",
    )


def _given(probe: PredictorProbe, module: Any, names: FrameNames, latents: Tensor) -> GivenFrames:
    """Frames of a clip as an autoencoder with strides of 1 would encode them."""
    rng = Randomness(6)
    batch, channels, length, height, width = latents.shape
    frames = [rng.normal((batch, 3, height, width), "frame", name).clamp(-1, 1) for name in names]
    before = [frame.clone() for frame in frames]
    clip = module.frames_clip(frames, length)
    shape = tuple(clip.shape)
    probe.expect(
        shape == (batch, 3, *shape[2:3], height, width) and 1 <= shape[2] <= length,
        f"frames_clip returned {[*shape]} for {plural(length, 'frame')} of {height} x {width}",
        accepted=f"pixels [{batch}, 3, F, {height}, {width}] with F from 1 to {length}",
    )
    probe.expect(
        all(map(torch.equal, frames, before)) and clip.abs().max() <= 1,
        "frames_clip changes its frames, or returns pixels outside of -1 to 1",
        hint="build a new tensor: torch.cat and new_zeros",
    )
    encoded = rng.normal((batch, channels, clip.shape[2], height, width), "encoded", *names)
    features = None
    if module.image_dim is not None:
        features = rng.normal((batch, _FEATURES * len(names), module.image_dim), "features", *names)
    return GivenFrames(names, encoded, features)


def _expect_filled(
    probe: PredictorProbe, module: Any, latents: Tensor, given: GivenFrames, found: PredictorInputs
) -> None:
    """Compares the latents, timesteps, conditions and counts of with_frames with its contract."""
    probe.expect(
        found.latents.shape == latents.shape,
        f"with_frames returns latents {list(found.latents.shape)}",
        accepted=f"the shape that it got, {list(latents.shape)}: further channels are a condition",
    )
    sizes = zip(latents.shape[2:], module.patch_size, strict=True)
    tokens = int(torch.tensor([size // patch for size, patch in sizes]).prod())
    rows = len(latents)
    probe.expect(
        tuple(found.timestep.shape) in ((rows,), (rows, tokens)),
        f"with_frames returns timesteps {list(found.timestep.shape)}",
        accepted=f"[{rows}], or one a token: [{rows}, {tokens}]",
    )
    counts = found.counts
    wanted = (1, 1, *latents.shape[2:])
    shaped = counts is None or tuple(counts.shape) in (wanted, (rows, *wanted[1:]))
    probe.expect(
        counts is None or (counts.dtype == torch.bool and shaped and counts.flatten(1).any(1).all()),
        "the counts of with_frames are of another shape or dtype, or count nothing",
        accepted=f"None, or bool [{', '.join(map(str, wanted))}] with a true element",
    )
    counted = torch.ones(wanted, dtype=torch.bool) if counts is None else counts
    probe.expect(
        counts is None or torch.equal(found.latents * counted, latents * counted),
        "with_frames changes latents that count as predicted",
        accepted="changes only where counts is false",
    )
    known = module.with_frames(
        found.latents, found.timestep[:, -1] if found.timestep.dim() == 2 else found.timestep, given
    )
    probe.expect(
        torch.equal(known.latents, found.latents),
        "with_frames applied to its own latents changes them again",
        hint="sampling calls it once more at its end, so that given frames stay exactly as they are",
    )


def experts(probe: PredictorProbe) -> None:
    """Conformance check: experts share all timesteps; a row without a named one uses that of its timestep."""
    module: Any = probe.trained()
    probe.require(module, SupportsExperts)
    named = list(module.experts)
    ends = [(expert.low, expert.high) for expert in named]
    meet = all(above[0] == below[1] for above, below in pairwise(ends))
    whole = bool(ends) and ends[0][1] is None and ends[-1][0] == 0 and meet
    probe.expect(
        whole and len({expert.name for expert in named}) == len(named),
        f"the experts are {', '.join(f'{e.name} [{e.low:g}, {e.high})' for e in named) or 'none'}",
        accepted="different names, from noise (high=None) to clean (low=0), each begins where the next ends",
    )
    trained = [expert for expert in named if expert.trained]
    probe.expect(trained, "no expert is trained", accepted="at least one Expert(..., trained=True)")
    inputs = probe.inputs(module, batch=len(named) + 1)
    inside = [expert.low + 1 if expert.high is None else (expert.low + expert.high) / 2 for expert in named]
    inputs["timestep"] = torch.tensor([*inside, inside[0]])
    before = dict(module.named_parameters()).keys()
    with torch.no_grad(), module.complete(torch.device("cpu")):
        added = [name for name, p in module.named_parameters() if name not in before and p.requires_grad]
        probe.expect(not added, f"within complete(), {', '.join(added[:3])} is not frozen")
        mixed = module(**inputs)
        expect_output(probe, module, inputs, mixed)
        for row, expert in enumerate([*named, named[0]]):
            one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
            what = f"a row at timestep {float(inputs['timestep'][row]):g} differs from that of the expert"
            hint = "without `expert`, each row uses the expert of its timestep"
            alone = module(**one, expert=expert.name)
            expect_close(probe, alone, mixed[row : row + 1], f"{what} {expert.name!r} alone", hint)
    left = dict(module.named_parameters()).keys() - before
    probe.expect(not left, f"after complete(), the predictor still has {', '.join(sorted(left)[:3])}")
    for expert in trained:
        module.zero_grad(set_to_none=True)
        module(**inputs, expert=expert.name).square().sum().backward()
        probe.expect(
            any(p.grad is not None and p.grad.any() for p in module.parameters()),
            f"the expert {expert.name!r} is trained, but no weight gets a gradient from it",
        )


def guided(probe: PredictorProbe) -> None:
    """Conformance check: `guided` guides each row by itself, and changes nothing at `guidance_off`."""
    module: Any = probe.on_meta()  # without values of parameters: it is called outside of the forward
    probe.require(module, SupportsGuided)
    latents, off = probe.inputs(module)["latents"], module.guidance_off
    passes = [latents, Randomness(7).normal(tuple(latents.shape), "unconditional")]
    before = [tensor.clone() for tensor in passes]
    found = module.guided(*passes, off + 3.0)
    probe.expect(
        isinstance(found, Tensor) and found.shape == latents.shape,
        f"guided returned {list(found.shape) if isinstance(found, Tensor) else type(found).__name__}",
        accepted=f"a tensor of the shape that it got, {list(latents.shape)}",
    )
    probe.expect(
        all(map(torch.equal, passes, before)),
        "guided changes its arguments",
        hint="use no in-place operation on them, or on a view of them",
    )
    alone = module.guided(*(tensor[:1] for tensor in before), off + 3.0)
    what = "guided of a row alone and of the same row in a batch differ"
    expect_close(probe, alone, found[:1], what, "take norms and means over a row, or over its tokens")
    what = f"at guidance_off = {off:g}, guided differs from the conditional prediction"
    hint = "guidance_off is 1 for u + s (c - u), and 0 for c + s (c - u)"
    expect_close(probe, module.guided(*before, off), before[0], what, hint)
