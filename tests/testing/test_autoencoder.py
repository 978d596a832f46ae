"""The conformance kit of autoencoders: shipped ones pass, and each check refuses a faulty one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_core.diffusion.encoders.pixel import PixelAutoencoder, PixelPosterior
from mm_core.errors import ContractError
from mm_core.testing.frozen.autoencoders import KIT
from support.conformance import examined, refusal, shortcomings


@pytest.mark.parametrize("name", ["core/pixel", pytest.param("wan/vae", marks=pytest.mark.slow)])
def test_shipped_autoencoders_keep_their_contract(name: str) -> None:
    assert shortcomings(name) == []


class Noisy(PixelPosterior):
    """A posterior with a spread, drawn as the contract requires."""

    def sample(self, generators):
        shape = self.moments.shape[1:]
        return self.moments + 0.1 * torch.stack([torch.randn(shape, generator=g) for g in generators])


class Good(PixelAutoencoder):
    """An autoencoder with a spread, a scale, and tiles that meet without seams."""

    distribution: type = Noisy

    def posterior(self, moments):
        return self.distribution(moments)

    def __init__(self, scaled: bool = True, tiling: bool = False) -> None:
        super().__init__(2, 2)
        self.scaled, self.tiling = scaled, tiling

    def encode(self, pixels):
        return self.distribution(super().encode(pixels).moments * (2 if self.scaled else 1))

    def decode(self, latents):
        return super().decode(latents / (2 if self.scaled else 1))


def good_with(**members: object) -> type:
    """A class as `Good` with one fault."""
    return type("Faulty", (Good,), members)


def test_a_good_one_with_all_options_passes() -> None:
    outcomes = list(examined("core/pixel", Good, tiny={}, config=None))
    assert [o.reason for o in outcomes if o.status == "failed"] == []
    assert {o.check for o in outcomes if o.status != "passed"} == {"streamed"}


def spread_of(change) -> type:
    return type("Faulty", (Noisy,), {"sample": change})


def shape(change):
    """A latent_shape that differs from the true one."""
    return lambda self, *size: change(Good().latent_shape, *size)


def raising(error: Exception):
    def latent_shape(self, *size):
        try:
            return Good().latent_shape(*size)
        except ContractError:
            raise error from None

    return latent_shape


class Reloaded(Good):
    def load(self, device):
        self.register_buffer("table", torch.zeros(3))


class Infinite(Good):
    def load(self, device):
        self.register_buffer("table", torch.full((3,), float("inf")))


class Training(Good):
    def __init__(self, scaled: bool = True, tiling: bool = False) -> None:
        super().__init__(scaled, tiling)
        self.dropout = nn.Dropout()


class InTiles(Good):
    """Its left and right halves are swapped."""

    def encode(self, pixels):
        halves = pixels.chunk(2, dim=-1)
        return super().encode(torch.cat(halves[::-1], dim=-1) if self.tiling else pixels)


class OneScale(Good):
    """What encode scales is not undone."""

    def decode(self, latents):
        return PixelAutoencoder.decode(self, latents)


class Counting(Good):
    calls = 0

    def encode(self, pixels):
        self.calls += 1
        return super().encode(pixels + 0.01 * self.calls)


class InPlace(Good):
    def encode(self, pixels):
        return super().encode(pixels.mul_(0.5))


FAULTS = [
    (
        "stored_moments",
        good_with(
            encode=lambda self, pixels: Noisy(2 * PixelAutoencoder.encode(self, pixels).moments),
            posterior=lambda self, moments: Noisy(moments / 2),
        ),
        "posterior(moments) has another mode or sample than what encode returned",
    ),
    ("loads", Reloaded, "a second load makes new tensors"),
    ("loads", Infinite, "the tensor table contains NaN or infinity after loading"),
    ("loads", Training, "Dropout is in training mode, so that dropout is active"),
    (
        "missing_files",
        good_with(missing_files=lambda self: ["vae"]),
        "missing_files returned ['vae'], though the component loads",
    ),
    (
        "sizes",
        good_with(latent_shape=shape(lambda true, *size: (*true(*size)[:3], true(*size)[3] + 1))),
        "latent_shape(2, 4, 6) is (24, 1, 2, 4), with the stride (2, 2, 2) and 24 latent_channels",
    ),
    (
        "sizes",
        good_with(latent_channels=property(lambda self: 12, lambda self, value: None)),
        "for clips [3, 3, 2, 4, 6], mode returned latents [3, 24, 1, 2, 3]",
    ),
    (
        "sizes",
        good_with(decode=lambda self, latents: Good.decode(self, latents)[:, :, :1]),
        "decode returned clips [3, 3, 1, 4, 6]",
    ),
    (
        "refused_sizes",
        good_with(latent_shape=raising(ContractError("no"))),
        "latent_shape refuses num_frames 0 without naming a valid one: no",
    ),
    ("refused_sizes", good_with(latent_shape=raising(ValueError("odd"))), "ValueError: odd"),
    (
        "refused_sizes",
        good_with(latent_shape=lambda self, f, y, x: (24, f // 2, y // 2, x // 2)),
        "latent_shape accepts num_frames 0",
    ),
    (
        "refused_sizes",
        good_with(
            latent_shape=shape(lambda true, f, y, x: true(f, y, x - x % 2)),
            encode=lambda self, pixels: PixelAutoencoder(2, 2).encode(pixels),
        ),
        "latent_shape accepts width 7 and returns (24, 2, 2, 3), but encode gives ('ContractError',)",
    ),
    (
        "values",
        good_with(decode=lambda self, latents: 127.5 * (Good.decode(self, latents) + 1)),
        "decode returned pixels from ",
    ),
    (
        "values",
        good_with(encode=lambda self, pixels: Noisy(Good.encode(self, pixels).moments / 0)),
        "or contains NaN or infinity",
    ),
    (
        "unit_scale",
        good_with(encode=lambda self, pixels: Noisy(Good.encode(self, pixels).moments * 0.1)),
        "latents of soft random clips have a standard deviation of 0.1",
    ),
    (
        "posterior",
        good_with(distribution=spread_of(lambda self, generators: 2 * Noisy.sample(self, generators))),
        "the mean of the posterior's samples is not its mode",
    ),
    (
        "given_generators",
        good_with(distribution=spread_of(lambda self, _: self.moments + torch.randn_like(self.moments))),
        "sample draws from torch's default generator, or keeps a state",
    ),
    (
        "given_generators",
        good_with(distribution=spread_of(lambda self, generators: Noisy.sample(self, generators[::-1]))),
        "the sample of a row depends on the generators or clips of other rows",
    ),
    (
        "given_generators",
        good_with(
            distribution=spread_of(
                lambda self, generators: (
                    self.moments + torch.randn(self.moments.shape, generator=torch.Generator().manual_seed(1))
                )
            )
        ),
        "other generators give the same sample",
    ),
    (
        "each_clip",
        good_with(encode=lambda self, pixels: Good.encode(self, pixels - pixels.mean(0))),
        "the latents of a clip alone and in a batch differ by ",
    ),
    (
        "each_clip",
        good_with(decode=lambda self, latents: torch.zeros_like(Good.decode(self, latents))),
        "different latents decode into the same pixels",
    ),
    ("inverse_scale", OneScale, "with scaled=False, decode(encode(pixels)) differs by "),
    ("tiles", InTiles, "with tiling=True, the latents of a clip differ by 1."),
    ("pure", Counting, "equal calls of encode return different results"),
    ("pure", InPlace, "encode changes tensors that it is given"),
]


@pytest.mark.parametrize(("check", "faulty", "sentence"), FAULTS)
def test_a_faulty_one_is_refused(check: str, faulty: type, sentence: str) -> None:
    reason = refusal("core/pixel", check, faulty, tiny={}, config=None)
    assert sentence in reason
    assert "test_autoencoder" in reason  # the place of the author's class


def test_each_check_has_a_fault() -> None:
    assert {check for check, *_ in FAULTS} | {"streamed"} == set(KIT.checks)  # see test_text_encoder
