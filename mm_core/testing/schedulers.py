"""The conformance kit of noise schedulers (`mm_core.contracts.NoiseScheduler`)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mm_core.contracts import NoiseScheduler, Randomness, SupportsForTokens, SupportsTruncated
from mm_core.testing.common import expect_tensor
from mm_core.testing.kit import Kit, Probe, checks_of

_DRAWS = 20_000
_SHAPE = (3, 2, 2, 4, 4)


def _generators(count: int, seed: int = 0) -> list[torch.Generator]:
    rng = Randomness(seed)
    return [rng.generator("scheduler", index) for index in range(count)]


def _pair() -> tuple[Tensor, Tensor]:
    rng = Randomness(1)
    return rng.normal(_SHAPE, "latents"), rng.normal(_SHAPE, "noise")


def _times(scheduler: object, count: int = 3) -> Tensor:
    times: Tensor = scheduler.timestep_quantile(torch.linspace(0.1, 0.9, count))  # type: ignore[attr-defined]
    return times


def _factors(method: Callable[..., Tensor], like: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of latents and noise in `add_noise` or `target`, of the shape of `like`."""
    zero, ones = torch.zeros_like(like), torch.ones_like(like)
    return method(ones, zero, at), method(zero, ones, at)


def _falls(sigmas: Tensor) -> bool:
    return bool((sigmas.diff() < 0).all()) and float(sigmas[-1]) == 0


def timesteps(probe: Probe) -> None:
    """Training timesteps are finite float32 on the CPU, and row i depends on generator i alone."""
    scheduler = probe.build()
    drawn = scheduler.sample_timesteps(_generators(4))
    expect_tensor(probe, "sample_timesteps", drawn, torch.float32, 4)
    probe.expect(bool(drawn.isfinite().all()), "sample_timesteps returned NaN or infinity")
    alone = scheduler.sample_timesteps(_generators(4)[2:3])
    probe.expect(
        torch.equal(alone, drawn[2:3]),
        "the timestep of a row depends on the rest of the batch",
        hint="draw row i from generators[i] alone",
    )
    probe.expect(
        not torch.equal(drawn, scheduler.sample_timesteps(_generators(4, seed=1))),
        "other generators give the same timesteps",
    )


def density(probe: Probe) -> None:
    """timestep_quantile is the inverse of the distribution of the training timesteps."""
    scheduler = probe.build()
    generator = _generators(1)[0]
    drawn = scheduler.sample_timesteps([generator] * _DRAWS).double().sort().values
    shares = torch.linspace(0.02, 0.98, 49)
    quantiles = scheduler.timestep_quantile(shares)
    probe.expect(
        bool((quantiles.diff() >= 0).all()), "timestep_quantile falls", accepted="it rises with the share"
    )
    found = torch.searchsorted(drawn, quantiles.double(), right=True) / _DRAWS
    below = torch.searchsorted(drawn, quantiles.double()) / _DRAWS
    # At values that are drawn often, the share may lie anywhere between those below and those up to it.
    error = torch.maximum(below - shares, shares - found).max().item()
    probe.expect(
        error < 0.02,  # 5 standard deviations of a share of 20,000 draws
        f"of {_DRAWS:,} timesteps, the share below a quantile differs by {error:.3f} from what was asked",
        accepted="at most 0.02",
        hint="timestep_quantile must invert the distribution that sample_timesteps draws from",
    )


def linear(probe: Probe) -> None:
    """add_noise and target are linear in latents and noise, with factors of the timestep only."""
    scheduler = probe.build()
    latents, noise = _pair()
    at = _times(scheduler)
    for name in ("add_noise", "target"):
        method = getattr(scheduler, name)
        both = method(latents, noise, at)
        expect_tensor(probe, name, both, torch.float32, *latents.shape)
        parts = method(latents, torch.zeros_like(noise), at) + method(torch.zeros_like(latents), noise, at)
        scaled = method(2 * latents, 2 * noise, at) / 2
        error = max((both - other).abs().max().item() for other in (parts, scaled))
        probe.expect(error < 1e-4, f"{name} is not linear in latents and noise: it is off by {error:.1e}")
        single = method(latents[:1], noise[:1], at[:1])
        probe.expect(
            torch.allclose(single, both[:1], atol=1e-6),
            f"{name} of a sample alone is not that of the sample in a batch",
        )


def clean_latents(probe: Probe) -> None:
    """The clean latents follow from x_t and the target: the two together determine them."""
    scheduler = probe.build()
    latents, noise = _pair()
    at = _times(scheduler)
    a, b = _factors(scheduler.add_noise, latents, at)
    c, d = _factors(scheduler.target, latents, at)
    determinant = a * d - b * c
    probe.expect(
        bool((determinant.abs() > 1e-4).all()),
        "x_t and the target do not determine the clean latents: one is a multiple of the other",
        accepted="two independent sums of latents and noise",
    )
    noisy, target = scheduler.add_noise(latents, noise, at), scheduler.target(latents, noise, at)
    error = ((d * noisy - b * target) / determinant - latents).abs().max().item()
    probe.expect(
        error < 1e-3, f"the clean latents that follow from x_t and the target are off by {error:.1e}"
    )


def noise_levels(probe: Probe) -> None:
    """sigmas fall from 1 to 0, one more than there are steps, and timesteps raise the noise."""
    scheduler = probe.build()
    for steps in (1, 2, 10):
        sigmas = scheduler.sigmas(steps)
        expect_tensor(probe, f"sigmas({steps})", sigmas, torch.float32, steps + 1)
        probe.expect(
            _falls(sigmas) and float(sigmas[0]) <= 1,
            f"sigmas({steps}) are {[round(s, 4) for s in sigmas.tolist()]}",
            accepted="from at most 1 (noise) down to 0 (clean), each less than the one before",
        )
    ones = torch.ones(5, 1, 1, 1, 1)
    share = scheduler.add_noise(torch.zeros_like(ones), ones, _times(scheduler, 5)).flatten()
    probe.expect(
        bool((share.diff() > 0).all()),
        f"the share of noise at rising quantiles is {share.tolist()}",
        accepted="it rises: timestep_quantile(u) is increasing with the noise",
    )


def loss_weights(probe: Probe) -> None:
    """loss_weight returns one finite weight a sample, float32 and not negative."""
    scheduler = probe.build()
    at = _times(scheduler)
    weight = scheduler.loss_weight(at)
    expect_tensor(probe, "loss_weight", weight, torch.float32, len(at))
    allowed = bool((weight.isfinite() & (weight >= 0)).all())
    probe.expect(allowed, f"loss_weight returned {weight}", accepted="finite weights of 0 or more")
    probe.expect(
        torch.equal(scheduler.loss_weight(at[:1]), weight[:1]),
        "loss_weight of a timestep alone is not that of the timestep in a batch",
        accepted="a weight that depends on its own timestep: batches differ between numbers of ranks",
    )


def precise_timesteps(probe: Probe) -> None:
    """model_timestep keeps the shape, and neighbouring timesteps stay different."""
    scheduler = probe.build()
    at = _times(scheduler, 1001)
    given = scheduler.model_timestep(at)
    expect_tensor(probe, "model_timestep", given, torch.float32, len(at))
    apart = len(set(given.tolist())) == len(set(at.tolist()))
    probe.expect(apart, "model_timestep rounds timesteps", accepted="a different value for each timestep")


def samples(probe: Probe) -> None:
    """integrate finds the clean latents when the model knows them, and keeps shape and dtype."""
    scheduler = probe.build()
    latents, noise = _pair()

    def oracle(noisy: Tensor, timestep: Tensor) -> Tensor:
        """The target of the training pair at x_t whose clean latents are known."""
        at = timestep.expand(len(noisy)).float()
        a, b = _factors(scheduler.add_noise, latents, at)
        implied = (noisy - a * latents) / b
        predicted: Tensor = scheduler.target(latents, implied, at)
        return predicted

    with torch.no_grad():
        found = scheduler.integrate(oracle, noise, 20)
    expect_tensor(probe, "integrate", found, torch.float32, *noise.shape)
    error = (found - latents).abs().max().item()
    probe.expect(
        error < 1e-2,  # libraries round the timesteps that they give to the model
        f"with a model that knows the clean latents, 20 steps end {error:.1e} away from them",
        accepted="at most 1e-2",
        hint="check the signs, the timesteps given to the model, and that the last step ends at sigma 0",
    )


def pure(probe: Probe) -> None:
    """Equal calls return equal results: nothing is kept from call to call, and inputs stay unchanged."""
    scheduler = probe.build()
    latents, noise = _pair()
    at = _times(scheduler)
    kept = [each.clone() for each in (latents, noise, at)]

    def results() -> list[Tensor]:
        return [
            scheduler.sample_timesteps(_generators(3)),
            scheduler.add_noise(latents, noise, at),
            scheduler.target(latents, noise, at),
            scheduler.sigmas(5),
            scheduler.integrate(lambda x, t: x * 0.1, noise, 5),
        ]

    first, second = results(), results()
    probe.expect(
        all(map(torch.equal, first, second)), "equal calls return different results", hint="keep no state"
    )
    same = all(map(torch.equal, kept, (latents, noise, at)))
    probe.expect(same, "the scheduler changes tensors that it is given")


def by_tokens(probe: Probe) -> None:
    """for_tokens returns a noise scheduler, the same for equal numbers of tokens."""
    scheduler = probe.build()
    probe.require(scheduler, SupportsForTokens)
    for tokens in (256, 4096):
        found, again = scheduler.for_tokens(tokens), scheduler.for_tokens(tokens)
        probe.expect(
            isinstance(found, NoiseScheduler),
            f"for_tokens({tokens}) returned a {type(found).__name__}",
            accepted="a noise scheduler: this one, or another for samples of that size",
        )
        sigmas = found.sigmas(8)
        probe.expect(
            torch.equal(sigmas, again.sigmas(8)) and _falls(sigmas),
            f"for_tokens({tokens}) has the noise levels {[round(each, 4) for each in sigmas.tolist()]}",
            accepted="falling ones down to 0, the same for each call with that number",
        )


def intervals(probe: Probe) -> None:
    """mass is the share of training timesteps in an interval, and truncated draws from it alone."""
    scheduler = probe.build()
    probe.require(scheduler, SupportsTruncated)
    drawn = scheduler.sample_timesteps([_generators(1)[0]] * _DRAWS)
    middle = float(scheduler.timestep_quantile(torch.tensor([0.5])))
    for low, high in ((0.0, middle), (middle, None), (0.0, None)):
        end = math.inf if high is None else high
        share = float(((drawn >= low) & (drawn < end)).double().mean())
        found = scheduler.mass(low, high)
        probe.expect(
            abs(found - share) < 0.02,  # 5 standard deviations of a share of 20,000 draws
            f"mass({low:g}, {end:g}) is {found:.3g}",
            accepted=f"{share:.3g}, the share of {_DRAWS:,} timesteps that were drawn",
        )
        inside = scheduler.truncated(low, high).sample_timesteps(_generators(64))
        probe.expect(
            bool(((inside >= low) & (inside < end)).all()),
            f"truncated({low:g}, {end:g}) draws from {float(inside.min()):g} to {float(inside.max()):g}",
            accepted="timesteps of the interval",
        )


KIT = Kit(checks_of(__name__))
"""The conformance checks of noise schedulers."""
