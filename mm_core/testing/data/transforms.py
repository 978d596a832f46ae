"""The conformance kit of transforms (`mm_core.contracts.Transform`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mm_core.contracts import Randomness, SupportsFrameByFrame, SupportsLevels, seeded
from mm_core.errors import DataError
from mm_core.testing.common import KindProbe, expect_tensor
from mm_core.testing.kit import Kit, NotApplicable, checks_of

_SIZES = ((24, 40), (40, 24), (32, 32))
"""Heights and widths of the frames and of the results."""
_SEED = 7


class TransformProbe(KindProbe):
    """A transform under test."""

    def pixels(
        self,
        frames: Tensor,
        size: tuple[int, int] = (16, 16),
        draw: int | None = None,
        transform: Any = None,
        state: int = 0,
    ) -> Tensor:
        """The pixels of frames at a size, with the random numbers of a draw and a state of the process's own
        generators. NotApplicable if it refuses such frames."""
        transform = self.build() if transform is None else transform
        rng = None if draw is None else Randomness(_SEED).at("data", 0, draw)
        try:
            with seeded(Randomness(_SEED).at("of the process", state)):
                found: Tensor = transform.pixels(frames, *size, rng)
        except DataError as error:
            raise NotApplicable(f"it takes no such frames: {error.what}") from error
        return found


def _frames(height: int, width: int, count: int = 3) -> Tensor:
    """Frames uint8 [F,Y,X,3] of noise."""
    generator = torch.Generator().manual_seed(height)
    return torch.randint(32, 256, (count, height, width, 3), generator=generator, dtype=torch.uint8)


def _framed(border: int, count: int = 3) -> Tensor:
    """The frames of 24x40 with a black border of some pixels."""
    inner = _frames(24, 40, count)[:, border : 24 - border, border : 40 - border]
    return functional.pad(inner, (0, 0, border, border, border, border))


def sizes(probe: TransformProbe) -> None:
    """pixels returns uint8 [3,F,height,width] on the CPU for frames of any size, also for one frame."""
    for source in _SIZES:
        for height, width in _SIZES:
            for count in (1, 3):
                found: object = probe.pixels(_frames(*source, count), (height, width), draw=0)
                expect_tensor(probe, "pixels", found, torch.uint8, 3, count, height, width)


def one_choice(probe: TransformProbe) -> None:
    """All frames of a clip are changed the same way: a crop that jumps from frame to frame is no motion."""
    still = _frames(24, 40, 1).repeat(4, 1, 1, 1)
    framed = torch.cat([_frames(24, 40, 1), _framed(4, 1)])
    for draw in range(8):
        found = probe.pixels(still, draw=draw)
        same = all(torch.equal(found[:, 0], found[:, at]) for at in range(1, 4))
        found = probe.pixels(framed, draw=draw)
        same = same and bool((found[:, 0] == found[:, 1]).float().mean() > 0.25)
        probe.expect(
            same, "frames of a still clip become different", hint="choose once for all frames of a clip"
        )


def given_randomness(probe: TransformProbe) -> None:
    """The pixels depend on the frames, the size and `rng` alone: read again, a sample is the same."""
    first = [probe.pixels(_framed(draw), draw=draw) for draw in range(4)]
    kept = probe.build()
    for draw in (3, 1, 0, 2):
        again = probe.pixels(_framed(draw), draw=draw, transform=kept, state=draw + 1)
        probe.expect(
            torch.equal(first[draw], again),
            "the same sample has other pixels when it is read again",
            hint="draw from `rng`, and keep no state from sample to sample",
        )


def no_choices(probe: TransformProbe) -> None:
    """Without `rng` nothing is drawn: validation sees the same pixels each time."""
    first = probe.pixels(_frames(24, 40))
    for state in range(1, 9):
        same = torch.equal(first, probe.pixels(_frames(24, 40), state=state))
        probe.expect(same, "pixels without `rng` returns other pixels each time")


def inputs_unchanged(probe: TransformProbe) -> None:
    """The frames stay as they were."""
    frames = _frames(16, 16)
    given = frames.clone()
    probe.pixels(frames, draw=0)
    probe.expect(torch.equal(frames, given), "pixels changes the frames that it is given")


def picture(probe: TransformProbe) -> None:
    """The pixels are those of the frames: red stays red, and the upper half above."""
    frames = torch.full((1, 32, 32, 3), 40, dtype=torch.uint8)
    frames[:, :16, :, 0] = 220
    found = probe.pixels(frames, (16, 16)).float().mean((1, 3))
    red, green = found[0], found[1]
    probe.expect(
        bool(red[:4].mean() > red[-4:].mean()) and bool(red[:4].mean() > green[:4].mean()),
        "frames that are red above are not red above afterwards",
        hint="frames are [F,Y,X,3], pixels [3,F,height,width]; both in the order red, green, blue",
    )


def each_frame(probe: TransformProbe) -> None:
    """frame_by_frame, where there is one, gives what pixels returns, with and without `rng`."""
    transform = probe.build()
    probe.require(transform, SupportsFrameByFrame)
    for source in _SIZES:
        clip = _frames(*source)
        for draw in (None, 0, 1):
            whole = probe.pixels(clip, draw=draw)
            rng = None if draw is None else Randomness(_SEED).at("data", 0, draw)
            one = transform.frame_by_frame(source, 16, 16, rng)
            same = all(torch.equal(one(frame), whole[:, at]) for at, frame in enumerate(clip))
            probe.expect(same, "frame_by_frame gives other pixels than pixels")


def levels(probe: TransformProbe) -> None:
    """levels, where there are any, are finite floats [3,256] that rise."""
    transform = probe.build()
    probe.require(transform, SupportsLevels)
    if transform.levels is None:
        raise NotApplicable("its pixels stand for -1 to 1")
    expect_tensor(probe, "levels", transform.levels, torch.float32, 3, 256)
    rising = bool(transform.levels.isfinite().all() and (transform.levels.diff(dim=1) > 0).all())
    probe.expect(rising, "levels are not finite, or do not rise", accepted="finite and rising")


def picklable(probe: TransformProbe) -> None:
    """The transform goes to data workers: it pickles, and gives the same pixels there."""
    transform, frames = probe.build(), _frames(24, 40)
    wanted = probe.pixels(frames, draw=1, transform=transform)
    again = probe.probe.in_worker("the transform", transform)
    same = torch.equal(wanted, probe.pixels(frames, draw=1, transform=again))
    probe.expect(same, "the transform gives other pixels after pickling")


KIT = Kit(checks_of(__name__), probe=TransformProbe)
"""The conformance checks of transforms."""
