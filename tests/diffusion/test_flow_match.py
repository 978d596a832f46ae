"""Flow matching: equations against float64, densities, sampling against Diffusers."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from mm_core.builtin.configs.diffusion import DynamicShift
from mm_core.contracts import NoiseScheduler, Randomness
from mm_core.diffusion import rectified_flow
from mm_core.diffusion.flow_match import FlowMatch
from mm_core.errors import ContractError

DRAWS = 4000
KS_LIMIT = 1.95 / DRAWS**0.5
"""Kolmogorov's critical value at p = 0.001 (1.95 / sqrt(n))."""


def generators(count: int) -> list[torch.Generator]:
    rng = Randomness(5)
    return [rng.generator("timestep", i) for i in range(count)]


def ks_distance(draws: torch.Tensor, cdf) -> float:
    ordered = np.sort(draws.double().numpy())
    expected, count = cdf(ordered), len(ordered)
    steps = np.arange(count + 1) / count
    return max(np.abs(expected - steps[:-1]).max(), np.abs(expected - steps[1:]).max())


def unshift(sigma: np.ndarray, shift: float) -> np.ndarray:
    """The inverse of SD3's eq. 23."""
    return sigma / (shift - (shift - 1) * sigma)


def normal_cdf(x: np.ndarray) -> np.ndarray:
    return torch.special.ndtr(torch.from_numpy(x)).numpy()


def test_it_satisfies_the_contract():
    assert isinstance(FlowMatch(), NoiseScheduler)


@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_uniform_timesteps_have_the_shifted_uniform_density(shift):
    timestep = FlowMatch(shift=shift).sample_timesteps(generators(DRAWS))
    assert timestep.dtype == torch.float32 and timestep.min() >= 0 and timestep.max() <= 1000
    assert ks_distance(timestep / 1000, lambda sigma: unshift(sigma, shift)) < KS_LIMIT


@pytest.mark.parametrize(("shift", "mean", "std"), [(1.0, 0.0, 1.0), (3.0, -0.5, 1.4)])
def test_logit_normal_timesteps_have_the_shifted_logit_normal_density(shift, mean, std):
    scheduler = FlowMatch(shift=shift, timesteps="logit_normal", logit_mean=mean, logit_std=std)
    sigma = scheduler.sample_timesteps(generators(DRAWS)) / 1000

    def cdf(value: np.ndarray) -> np.ndarray:
        u = unshift(value, shift)
        return normal_cdf((np.log(u / (1 - u)) - mean) / std)

    assert ks_distance(sigma, cdf) < KS_LIMIT
    assert ks_distance(sigma, lambda value: value) > 2 * KS_LIMIT  # the test can tell densities apart


DENSITIES = [
    {"shift": 1.0},
    {"shift": 5.0},
    {"timesteps": "logit_normal"},
    {"timesteps": "logit_normal", "shift": 3.0, "logit_mean": -0.5, "logit_std": 1.4},
]


@pytest.mark.parametrize("fields", DENSITIES)
def test_quantiles_are_the_inverse_of_the_density_that_timesteps_are_drawn_from(fields):
    scheduler = FlowMatch(**fields)
    grid = torch.linspace(0, 1, 20001, dtype=torch.float64)[1:-1]
    values = scheduler.timestep_quantile(grid)
    assert values.dtype == torch.float32 and (values.diff() >= 0).all()

    def cdf_of(values: torch.Tensor):
        return lambda timestep: np.interp(timestep, values.double().numpy(), grid.numpy())

    drawn = scheduler.sample_timesteps(generators(DRAWS))
    assert ks_distance(drawn, cdf_of(values)) < KS_LIMIT
    other = FlowMatch(**{**fields, "shift": 1.3 * fields.get("shift", 1.0)}).timestep_quantile(grid)
    assert ks_distance(drawn, cdf_of(other)) > KS_LIMIT  # the test can tell densities apart


def test_quantiles_equal_their_closed_forms():
    u = torch.tensor([0.1, 0.5, 0.9])
    # s u / (1 + (s - 1) u) with s = 5
    shifted = FlowMatch(shift=5.0).timestep_quantile(u) / 1000
    np.testing.assert_allclose(shifted, [0.5 / 1.4, 2.5 / 3, 4.5 / 4.6], rtol=1e-6)
    # sigmoid(m + s z), with the normal quantiles z of 0.1, 0.5, 0.9
    logit = FlowMatch(timesteps="logit_normal", logit_mean=0.3, logit_std=2.0).timestep_quantile(u) / 1000
    expected = 1 / (1 + np.exp(-(0.3 + 2.0 * np.array([-1.2815515655, 0, 1.2815515655]))))
    np.testing.assert_allclose(logit, expected, rtol=1e-6)


def test_a_timestep_depends_on_its_own_generator_alone():
    together = FlowMatch().sample_timesteps(generators(3))
    alone = FlowMatch().sample_timesteps(generators(3)[2:])
    assert together[2] == alone[0]


def test_noise_and_target_equal_their_equations_in_float64():
    rng = Randomness(0)
    clean, noise = rng.normal((3, 4, 2, 3, 3), "x0"), rng.normal((3, 4, 2, 3, 3), "eps")
    timestep = torch.tensor([0.0, 998.7, 1000.0])
    scheduler = FlowMatch()
    sigma = timestep.double().numpy()[:, None, None, None, None] / 1000
    expected = (1 - sigma) * clean.double().numpy() + sigma * noise.double().numpy()
    np.testing.assert_allclose(scheduler.add_noise(clean, noise, timestep), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        scheduler.target(clean, noise, timestep), noise.double() - clean.double(), rtol=0, atol=1e-6
    )


def test_noise_added_to_bf16_latents_is_computed_in_float32():
    clean = torch.ones(1, 1, 1, 1, 1, dtype=torch.bfloat16)
    noisy = FlowMatch().add_noise(clean.float(), torch.zeros(1, 1, 1, 1, 1), torch.tensor([998.7]))
    assert noisy.item() == pytest.approx(0.0013, abs=1e-6)  # 0 if the timestep had been 1000


def test_the_target_moves_noisy_latents_to_clean_ones():
    rng = Randomness(1)
    clean, noise = rng.normal((2, 3, 1, 2, 2), "x0"), rng.normal((2, 3, 1, 2, 2), "eps")
    timestep = torch.tensor([250.0, 900.0])
    scheduler = FlowMatch(shift=3.0)
    noisy, target = scheduler.add_noise(clean, noise, timestep), scheduler.target(clean, noise, timestep)
    torch.testing.assert_close(noisy - (timestep / 1000).view(-1, 1, 1, 1, 1) * target, clean)


def test_every_sample_has_the_same_weight_and_the_model_sees_the_timestep_itself():
    timestep = torch.tensor([1.0, 998.7])
    assert FlowMatch().loss_weight(timestep).tolist() == [1.0, 1.0]
    assert FlowMatch().model_timestep(timestep) is timestep


def test_sigmas_run_from_noise_to_clean_by_the_shift():
    sigmas = FlowMatch(shift=5.0).sigmas(4)
    assert sigmas.dtype == torch.float32
    # s u / (1 + (s - 1) u) at u = 1, 3/4, 1/2, 1/4, 0 with s = 5
    np.testing.assert_allclose(sigmas, [1, 3.75 / 4, 2.5 / 3, 1.25 / 2, 0], rtol=1e-6)


def test_one_step_of_the_exact_velocity_reaches_the_clean_latents():
    rng = Randomness(2)
    clean, noise = rng.normal((1, 2, 1, 2, 2), "x0"), rng.normal((1, 2, 1, 2, 2), "eps")
    for steps in (1, 7):
        solved = FlowMatch(shift=5.0).integrate(lambda x, t: noise - clean, noise, steps)
        torch.testing.assert_close(solved, clean)


def test_integration_equals_diffusers_euler_scheduler_on_the_same_sigmas():
    scheduler = FlowMatch(shift=5.0)
    noise = Randomness(3).normal((2, 3, 2, 4, 4), "eps")

    def velocity(latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return torch.sin(3 * latents) + timestep.view(-1, 1, 1, 1, 1) / 700

    theirs = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0)
    theirs.set_timesteps(sigmas=scheduler.sigmas(12)[:-1].tolist())
    latents, seen = noise, []
    for timestep in theirs.timesteps:
        latents = theirs.step(velocity(latents, timestep.expand(2)), timestep, latents).prev_sample

    def watched(latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        assert timestep.shape == (2,) and timestep.dtype == torch.float32
        seen.append(timestep[0].item())
        return velocity(latents, timestep)

    torch.testing.assert_close(scheduler.integrate(watched, noise, 12), latents, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(seen, theirs.timesteps, rtol=1e-6)


def test_euler_converges_to_the_exact_solution_at_first_order():
    """dx/dsigma = x from sigma 1 to 0 shrinks x by e."""
    errors = [
        abs(
            rectified_flow.euler(lambda x, _: x, torch.tensor(1.0), torch.linspace(1, 0, steps + 1)).item()
            - np.exp(-1)
        )
        for steps in (50, 100)
    ]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)


FLUX = {"base_shift": 0.5, "max_shift": 1.15}
LINEAR = {"base_shift": 1.5, "max_shift": 6.0}


@pytest.mark.parametrize(("form", "ends"), [("exponential", FLUX), ("linear", LINEAR)])
@pytest.mark.parametrize("tokens", [64, 256, 1024, 4096, 9000])
def test_a_dynamic_shift_samples_at_the_levels_of_diffusers(form, ends, tokens):
    """Diffusers' own class, given mu as its FLUX pipeline computes it: linear in the tokens, 256 to 4096."""
    scheduler = FlowMatch(dynamic_shift=DynamicShift(**ends, form=form)).for_tokens(tokens)
    theirs = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=form, **ends)
    config = theirs.config
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    mu = config.base_shift + slope * (tokens - config.base_image_seq_len)
    for steps in (1, 4, 28):
        theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        torch.testing.assert_close(scheduler.sigmas(steps), theirs.sigmas, rtol=2e-7, atol=1e-7)


def test_the_dynamic_shift_of_flux_is_e_to_the_half_at_256_tokens_and_more_for_larger_images():
    """mu of FLUX.1 at 256 and 4096 tokens: black-forest-labs/flux, sampling.py get_schedule."""
    scheduler = FlowMatch(dynamic_shift=DynamicShift())
    assert scheduler.for_tokens(256).shift == pytest.approx(np.exp(0.5))
    assert scheduler.for_tokens(4096).shift == pytest.approx(np.exp(1.15))
    assert scheduler.sigmas(4).tolist() == scheduler.for_tokens(256).sigmas(4).tolist()
    static = FlowMatch(shift=3.0)
    assert static.for_tokens(4096) is static


def test_training_timesteps_have_the_density_of_the_dynamic_shift():
    scheduler = FlowMatch(dynamic_shift=DynamicShift()).for_tokens(4096)
    timestep = scheduler.sample_timesteps(generators(DRAWS))
    assert ks_distance(timestep / 1000, lambda sigma: unshift(sigma, np.exp(1.15))) < KS_LIMIT


def test_a_dynamic_shift_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"^shift cannot be used with dynamic_shift, which sets it"):
        FlowMatch(shift=3.0, dynamic_shift=DynamicShift())
    with pytest.raises(ValueError, match=r"^base_tokens must be less than max_tokens"):
        DynamicShift(base_tokens=4096)
    with pytest.raises(ValueError, match="must be above 0 if form is linear"):
        DynamicShift(base_shift=0.0, form="linear")
    falls = FlowMatch(dynamic_shift=DynamicShift(base_shift=1.5, max_shift=0.5, form="linear"))
    with pytest.raises(ContractError) as fault:
        falls.for_tokens(9000)
    assert str(fault.value) == (
        "task.scheduler.dynamic_shift: dynamic_shift gives samples of 9,000 tokens the shift -0.777083\n"
        "  accepted: a shift above 0\n"
        "  hint: set form: exponential, or raise the shift of the nearer end"
    )
