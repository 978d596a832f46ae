"""The conformance kit of autoencoders (`mm_core.contracts.Autoencoder`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mm_core.contracts import Randomness, SupportsPosterior
from mm_core.errors import ContractError, first_line
from mm_core.testing.frozen import components
from mm_core.testing.frozen.components import FrozenProbe, check_pure
from mm_core.testing.kit import Kit, NotApplicable, checks_of
from mm_core.testing.tensors import distance, expect_close, tolerance

_ROWS = 3
_DRAWS = 32
_SIDE = 14
"""Latents along each side of a clip that is encoded in tiles."""
_SEAMS = 0.75
"""How far tiles may be off, as a share of the error of a mirrored clip: random weights see borders."""


class AutoencoderProbe(FrozenProbe):
    """An autoencoder under test, with clips of sizes that it encodes."""

    @cached_property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Sizes (F,Y,X) of small clips that latent_shape accepts: the shortest, and longer ones."""
        t, y, x = self.component.stride
        for factor in (1, 2, 4, 8):
            height, width = 2 * y * factor, 3 * x * factor
            frames = [f for f in range(1, 2 * t + 2) if self.accepts(f, height, width)]
            if frames:
                return [(f, height, width) for f in dict.fromkeys((frames[0], frames[-1]))]
        what = f"no clip is accepted of up to {2 * t + 1} frames and {2 * y}x{3 * x} to {16 * y}x{24 * x}"
        raise ContractError(what, where=self.probe.place, hint="is `stride` true?")

    def accepts(self, *size: int) -> bool:
        """Whether latent_shape accepts a size (F,Y,X)."""
        try:
            self.component.latent_shape(*size)
        except ContractError:
            return False
        return True

    def clips(self, size: tuple[int, int, int], rows: int = _ROWS) -> Tensor:
        """Soft random clips [B,3,F,Y,X] in (-1,1), a different one in each row."""
        coarse = Randomness(3).normal((rows, 3, 3, 4, 4), "clips")
        return interpolate(coarse, size, mode="trilinear", align_corners=True).tanh()

    def encode(self, pixels: Tensor, component: Any = None) -> Any:
        """The posterior of clips, from the component under test or another one."""
        with torch.no_grad():
            return (self.component if component is None else component).encode(pixels)

    def decode(self, latents: Tensor, component: Any = None) -> Tensor:
        """The clips that latents decode into."""
        with torch.no_grad():
            found: Tensor = (self.component if component is None else component).decode(latents)
        return found


def _generators(rows: int = _ROWS, seed: int = 0) -> list[torch.Generator]:
    rng = Randomness(seed)
    return [rng.generator("posterior", row) for row in range(rows)]


def sizes(probe: AutoencoderProbe) -> None:
    """latent_shape, stride and latent_channels are those of what encode and decode return."""
    channels, stride = probe.component.latent_channels, probe.component.stride
    for size in probe.sizes:
        declared = tuple(probe.component.latent_shape(*size))
        fits = tuple(-(-pixel // step) for pixel, step in zip(size, stride, strict=True))
        probe.expect(
            declared == (channels, *fits),
            f"latent_shape{size} is {declared}, with the stride {stride} and {channels} latent_channels",
            accepted=f"{(channels, *fits)}: (C,T,H,W), pixels over stride, rounded up",
        )
        pixels = probe.clips(size)
        posterior = probe.encode(pixels)
        for name, latents in (("mode", posterior.mode()), ("sample", posterior.sample(_generators()))):
            probe.expect(
                tuple(latents.shape) == (_ROWS, *declared),
                f"for clips {list(pixels.shape)}, {name} returned latents {list(latents.shape)}",
                accepted=f"{[_ROWS, *declared]}, the batch and latent_shape{size}",
            )
        decoded = probe.decode(posterior.mode())
        probe.expect(
            decoded.shape == pixels.shape,
            f"decode returned clips {list(decoded.shape)}",
            accepted=f"{list(pixels.shape)}, those that were encoded",
        )


def refused_sizes(probe: AutoencoderProbe) -> None:
    """latent_shape refuses what encode cannot encode, with a ContractError that names sizes near it."""
    good = probe.sizes[-1]
    stride = probe.component.stride
    for place, name in enumerate(("num_frames", "height", "width")):
        for wrong in (0, -stride[place], good[place] + 1, good[place] - 1):
            size = tuple(wrong if place == at else each for at, each in enumerate(good))
            try:
                declared = tuple(probe.component.latent_shape(*size))
            except ContractError as error:
                valid = [number for number in map(int, re.findall(r"\d+", error.render())) if number != wrong]
                near = [n for n in valid if 0 < n <= max(wrong, 0) + 2 * stride[place]]
                named = any(
                    probe.accepts(*(n if place == at else g for at, g in enumerate(good))) for n in near
                )
                probe.expect(
                    named,
                    f"latent_shape refuses {name} {wrong} without naming a valid one: {first_line(error)}",
                    hint=f"name the nearest valid {name} in the ContractError",
                )
                continue
            probe.expect(wrong > 0, f"latent_shape accepts {name} {wrong}", accepted="ContractError")
            try:
                found = tuple(probe.encode(probe.clips((size[0], size[1], size[2]), 1)).mode().shape[1:])
            except Exception as error:
                found = (type(error).__name__,)
            probe.expect(
                found == declared,
                f"latent_shape accepts {name} {wrong} and returns {declared}, but encode gives {found}",
                accepted="ContractError from latent_shape for sizes that cannot be encoded",
            )


def values(probe: AutoencoderProbe) -> None:
    """Latents and pixels are finite floating-point numbers, and decoded pixels are in [-1, 1]."""
    posterior = probe.encode(probe.clips(probe.sizes[-1]))
    missing = [name for name in ("mode", "sample", "moments") if not hasattr(posterior, name)]
    probe.expect(
        not missing,
        f"what encode returns, a {type(posterior).__name__}, has no {' and no '.join(missing)}",
        accepted="an mm_core.contracts.Posterior: mode(), sample(generators) and moments",
    )
    latents = posterior.mode()
    found = {
        "mode": latents,
        "sample": posterior.sample(_generators()),
        "moments": posterior.moments,
        "decode": probe.decode(latents),
    }
    for name, tensor in found.items():
        probe.expect(
            tensor.is_floating_point() and bool(tensor.isfinite().all()) and len(tensor) == _ROWS,
            f"{name} is {list(tensor.shape)} of {tensor.dtype}, or contains NaN or infinity",
            accepted=f"finite floating-point numbers with {_ROWS} rows",
        )
    # Latents of a predictor in training lie outside those of clips.
    decoded = (found["decode"], probe.decode(latents * 3))
    for pixels in decoded:
        least, most = float(pixels.min()), float(pixels.max())
        probe.expect(
            least >= -1.001 and most <= 1.001,
            f"decode returned pixels from {least:.3g} to {most:.3g}",
            accepted="-1 to 1",
            hint="clamp the decoder's output",
        )
    probe.expect(
        any(float(pixels.min()) < 0 for pixels in decoded),
        "decode returned no pixel below 0",
        accepted="-1 (black) to 1 (white)",
        hint="return 2 * pixels - 1 if the decoder's own range is 0 to 1",
    )


def unit_scale(probe: AutoencoderProbe) -> None:
    """Latents of clips are at unit scale, which noise schedulers expect."""
    spread = float(probe.encode(probe.clips(probe.sizes[-1])).mode().double().std())
    probe.expect(
        0.25 <= spread <= 4,
        f"latents of soft random clips have a standard deviation of {spread:.3g}",
        accepted="0.25 to 4",
        hint="subtract the latents' mean and divide by their standard deviation in mode and sample; a small "
        "instance with random weights needs a mean and a deviation of its own",
    )


def posterior(probe: AutoencoderProbe) -> None:
    """Samples of the posterior scatter around its mode, with the mode's scale."""
    found = probe.encode(probe.clips(probe.sizes[0], 1))
    mode = found.mode().double()
    draws = torch.stack([found.sample(_generators(1, seed)) for seed in range(_DRAWS)]).double()
    error = draws.std(0) / _DRAWS**0.5
    off = (draws.mean(0) - mode).abs() - 8 * error
    probe.expect(
        float(off.max()) <= 1e-4 * float(mode.abs().max()),
        "the mean of the posterior's samples is not its mode",
        accepted="sample(generators) = mode() plus noise, both at unit scale",
        hint="scale what sample returns as mode does",
    )


def given_generators(probe: AutoencoderProbe) -> None:
    """Row i of a sample is drawn from generators[i] alone."""
    pixels = probe.clips(probe.sizes[0])
    found = probe.encode(pixels)
    state = torch.get_rng_state()
    drawn, again = found.sample(_generators()), found.sample(_generators())
    probe.expect(
        torch.equal(state, torch.get_rng_state()) and torch.equal(drawn, again),
        "sample draws from torch's default generator, or keeps a state",
        accepted="equal samples from equal generators",
        hint="draw the noise of row i with generator=generators[i]",
    )
    others = found.sample([*_generators()[:1], *_generators(seed=1)[1:]])
    alone = probe.encode(pixels[:1]).sample(_generators()[:1])
    same = torch.equal(others[:1], drawn[:1]) and distance(alone, drawn[:1]) <= tolerance(drawn)
    probe.expect(
        same,
        "the sample of a row depends on the generators or clips of other rows",
        hint="draw the noise of row i from generators[i] alone",
    )
    spread = not torch.equal(drawn, found.mode())
    probe.expect(
        not spread or not torch.equal(others[1:], drawn[1:]),
        "other generators give the same sample",
        hint="draw the noise of row i from generators[i]",
    )


def stored_moments(probe: AutoencoderProbe) -> None:
    """The posterior of stored moments is that of the clips."""
    probe.require(probe.component, SupportsPosterior)
    found = probe.encode(probe.clips(probe.sizes[0]))
    again = probe.component.posterior(found.moments.clone())
    same = torch.equal(again.mode(), found.mode())
    same = same and torch.equal(again.sample(_generators()), found.sample(_generators()))
    probe.expect(same, "posterior(moments) has another mode or sample than what encode returned")


def each_clip(probe: AutoencoderProbe) -> None:
    """A clip is encoded and decoded alone as in a batch."""
    pixels = probe.clips(probe.sizes[-1])
    latents = probe.encode(pixels).mode()
    decoded = probe.decode(latents)
    for row in range(_ROWS):
        at = slice(row, row + 1)
        both = {
            "latents": (probe.encode(pixels[at]).mode(), latents[at]),
            "pixels": (probe.decode(latents[at]), decoded[at]),
        }
        for what, (alone, together) in both.items():
            expect_close(probe, alone, together, f"the {what} of a clip alone and in a batch differ")
    probe.expect(distance(decoded[:1], decoded[1:2]) > 1e-6, "different latents decode into the same pixels")


def inverse_scale(probe: AutoencoderProbe) -> None:
    """An option that scales latents is undone by decode: the pixels stay the same."""
    pixels = probe.clips(probe.sizes[0])
    latents = probe.encode(pixels).mode()
    decoded = probe.decode(latents)
    scaling = 0
    for name, value in _switches(probe):
        other = probe.loaded(changes={name: value})
        changed = probe.encode(pixels, other).mode()
        if (
            changed.shape != latents.shape
            or distance(changed, latents) < 1e-4
            or not _affine(changed, latents)
        ):
            continue
        scaling += 1
        what, most = f"with {name}={value}, decode(encode(pixels)) differs", max(tolerance(decoded), 1e-3)
        hint = "undo shift and scale at the start of decode"
        expect_close(probe, probe.decode(changed, other), decoded, what, hint, most)
    if not scaling:
        raise NotApplicable("no on-off option of the autoencoder scales latents")


def tiles(probe: AutoencoderProbe) -> None:
    """In slices, clips become what they are as a whole; in tiles they do but for seams."""
    names = [(name, value) for name, value in _switches(probe) if re.search("til(ed|es|ing)|slic", name)]
    if not names:
        raise NotApplicable("the autoencoder has no on-off option for tiles or slices")
    _, y, x = probe.component.stride
    size = (probe.sizes[0][0], _SIDE * y, _SIDE * x)
    grains = Randomness(4).normal((_ROWS, 3, size[0], 2 * _SIDE, 2 * _SIDE), "tiles").tanh()
    pixels = interpolate(grains, size, mode="nearest")
    latents = probe.encode(pixels).mode()
    decoded = probe.decode(latents)
    for name, value in names:
        other = probe.loaded(changes={name: value})
        found = {
            "latents": (probe.encode(pixels, other).mode(), latents),
            "pixels": (probe.decode(latents, other), decoded),
        }
        for what, (parts, whole) in found.items():
            most = _SEAMS * min(_apart(whole.flip(-1), whole), _apart(whole.flip(-2), whole))
            most = most if "til" in name else 1e-3
            error = _apart(parts, whole)
            same_scale = 0.7 < float(parts.double().std() / whole.double().std()) < 1.4
            probe.expect(
                error <= most and same_scale,
                f"with {name}={value}, the {what} of a clip differ by {error:.2f} standard deviations",
                accepted=f"at most {most:.3g}",
                hint="check where each tile is placed and how it is scaled, and that overlaps are blended",
            )


def pure(probe: AutoencoderProbe) -> None:
    """Equal calls return equal results: nothing is kept from call to call, and inputs stay unchanged."""
    pixels = probe.clips(probe.sizes[-1])
    latents = probe.encode(pixels).mode().clone()
    check_pure(probe, "encode", lambda: probe.encode(pixels).mode(), [pixels])
    check_pure(probe, "decode", lambda: probe.decode(latents), [latents])


def _switches(probe: AutoencoderProbe) -> Sequence[tuple[str, bool]]:
    """The on-off options of the autoencoder, each with the value that it does not have."""
    options = probe.probe.config.options
    declared = [field.name for field in fields(probe.probe.registered.config_class())]
    return [(name, not options[name]) for name in declared if isinstance(options.get(name), bool)]


def _apart(found: Tensor, whole: Tensor) -> float:
    """The root mean square of a difference, in standard deviations."""
    return float((found - whole).double().square().mean().sqrt() / whole.double().std().clamp(min=1e-12))


def _affine(found: Tensor, latents: Tensor) -> bool:
    """Whether one tensor [B,C,T,H,W] is the other, shifted and scaled in each channel."""
    x, y = (each.double().transpose(0, 1).flatten(1) for each in (latents, found))
    x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    slope = (x * y).sum(1, keepdim=True) / x.square().sum(1, keepdim=True).clamp(min=1e-12)
    return float((y - slope * x).abs().max()) <= 1e-3 * float(y.abs().max().clamp(min=1e-12))


KIT = Kit(checks_of(components.__name__, __name__), probe=AutoencoderProbe)
"""The conformance checks of autoencoders."""
