"""Conformance checks of a task's evaluations and clips."""

from __future__ import annotations

import torch
from torch import Tensor

from mm_core.contracts import (
    Evaluation,
    Randomness,
    SampleRequest,
    SupportsCheckRequest,
    VideoTextBatch,
    seeded,
)
from mm_core.errors import MMError, first_line, plural
from mm_core.testing.data.reading import SEED
from mm_core.testing.kit import NotApplicable
from mm_core.testing.tensors import differing, names
from mm_core.testing.training.tasks.probe import TaskProbe, near


def evaluation(probe: TaskProbe) -> None:
    """An evaluation has a loss for each row, equal each time, alone and in a batch."""
    task, count = probe.ready(), probe.data.rows
    batch = probe.batch(range(count))
    found = probe.evaluation(batch, task)
    probe.expect(
        isinstance(found, Evaluation) and "loss" in found.sums,
        f"evaluate returned a {type(found).__name__} without a loss",
        accepted="Evaluation(sums={'loss': [B], ...}, weights=[B])",
    )
    for name, tensor in {**found.sums, "weights": found.weights}.items():
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None
        probe.expect(
            shape == (count,) and tensor.dtype == torch.float32 and tensor.isfinite().all(),
            f"`{name}` of the evaluation is {tensor!r}",
            accepted=f"finite torch.float32 values of the shape ({count},), one a row",
        )
    for name, tensor in found.outputs.items():
        probe.expect(
            isinstance(tensor, Tensor) and len(tensor) == count,
            f"the output `{name}` of the evaluation does not have {plural(count, 'row')}",
        )
    again = probe.evaluation(batch, task, stray=1)
    different = differing(found.sums, again.sums)
    probe.expect(
        not different,
        f"a second evaluation of the same rows gives another {names(different)}",
        accepted="the same values in each evaluation of a run",
        hint="draw from `rng` and the rows' keys alone, and from no step or global generator",
    )
    for row in range(count):
        alone = probe.evaluation(probe.batch([row]), task)
        for name, value in {**found.sums, "weights": found.weights}.items():
            one = {**alone.sums, "weights": alone.weights}[name]
            probe.expect(
                near(float(value[row]), float(one[0])),
                f"`{name}` of row {row} is {float(value[row]):.7g} in a batch of {plural(count, 'row')},"
                f" and {float(one[0]):.7g} alone",
                accepted="the same value: batches of an evaluation depend on the number of ranks",
                hint="return one value a row: no mean over the batch",
            )


def clips(probe: TaskProbe) -> None:
    """Sampled clips are those of their prompts, and depend on the seed and their number alone."""
    request = _request(probe)
    task = probe.ready()
    if isinstance(task, SupportsCheckRequest):
        try:
            task.check_request(request)
        except MMError as error:
            raise NotApplicable(f"the task samples no clips: {first_line(error)}") from error
    with torch.no_grad(), seeded(Randomness(SEED)):
        found = task.sample(request)
    probe.expect(
        [clip.prompt for clip in found] == list(request.prompts),
        f"sample returned clips of {[clip.prompt for clip in found]!r}",
        accepted=f"one clip for each of {list(request.prompts)!r}, in this order",
    )
    for clip in found:
        pixels = clip.pixels
        probe.expect(
            pixels.dim() == 4
            and len(pixels) == 3
            and pixels.dtype == torch.float32
            and pixels.device.type == "cpu"
            and bool((pixels.abs() <= 1).all()),
            f"the pixels of a clip are {list(pixels.shape)} of {pixels.dtype} on {pixels.device.type},"
            f" from {float(pixels.min()):.3g} to {float(pixels.max()):.3g}",
            accepted="[3, F, Y, X] of torch.float32 on the CPU, from -1 to 1",
        )
    last = len(request.prompts) - 1
    other = SampleRequest(**{**vars(request), "prompts": request.prompts[last:], "first": last})
    with torch.no_grad(), seeded(Randomness(SEED + 1)):
        (alone,) = task.sample(other)
    distance = float((alone.pixels - found[last].pixels).abs().max())
    probe.expect(
        distance <= 1e-3,
        f"the clip of {request.prompts[last]!r} differs by {distance:.2g} where it is sampled alone,"
        f" as number {last}",
        accepted="the same clip: ranks share a list of prompts",
        hint="draw the noise of clip i from Randomness(request.seed) and request.first + i alone",
    )


def _request(probe: TaskProbe) -> SampleRequest:
    """A request for two clips of the dataset's size."""
    batch = probe.batch(range(probe.data.rows))
    shape = batch.size if isinstance(batch, VideoTextBatch) else (None, None, None)
    frames, height, width = shape
    return SampleRequest(
        ("a red circle", "a blue square"),
        seed=3,
        steps=2,
        num_frames=frames,
        height=height,
        width=width,
        fps=8.0,
    )
