"""`wan/flow_match` against the formulas in float64, written here with numpy from their definitions."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from mm_wan.schedulers.flow_match import WanFlowMatch

import mm_core
from mm_core.contracts import NoiseScheduler, Randomness
from mm_core.diffusion.mixture import clean_estimate, noise_share
from mm_core.errors import ConfigError, ContractError
from mm_core.tasks.text_to_video.bins import declared_bins

SETTINGS = [
    {},
    {"shift": 1.0, "extra_one_step": False},
    {"shift": 3.0, "sigma_min": 0.003 / 1.002, "extra_one_step": False},
    {"shift": 8.0, "num_train_timesteps": 250},
    {"shift": 12.0, "sigma_min": 0.02, "sigma_max": 0.98},
    {"shift": 0.5, "sigma_max": 0.9, "extra_one_step": False, "num_train_timesteps": 37},
]

DENSITIES = [
    {},
    {"timesteps": "logit_normal"},
    {"timesteps": "logit_normal", "logit_mean": -0.5, "logit_std": 1.4, "shift": 3.0},
    {"timesteps": "mode"},
    {"timesteps": "mode", "mode_scale": -0.8, "shift": 1.0},
    {"timesteps": "beta"},
    {"timesteps": "beta", "beta_alpha": 0.7, "beta_beta": 3.0, "shift": 1.0},
]

DRAWS = 20_000
KS_LIMIT = 1.95 / DRAWS**0.5
"""Kolmogorov-Smirnov distance that a sample of its own density exceeds once in a thousand times."""


def levels(
    shift=5.0, sigma_min=0.0, sigma_max=1.0, extra_one_step=True, num_train_timesteps=1000
) -> np.ndarray:
    """sigma of each level, from noise to clean: the issue's formula."""
    n = num_train_timesteps
    u = (
        np.linspace(sigma_max, sigma_min, n + 1)[:-1]
        if extra_one_step
        else np.linspace(sigma_max, sigma_min, n)
    )
    return shift * u / (1 + (shift - 1) * u)


def drawn(scheduler: WanFlowMatch, count: int = DRAWS, seed: int = 0) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return scheduler.sample_timesteps([generator] * count).double().numpy()


def every_level(scheduler: WanFlowMatch) -> torch.Tensor:
    """The timesteps of a uniform schedule, from noise to clean: the middles of N equal shares."""
    n = scheduler.num_train_timesteps
    return scheduler.timestep_quantile((torch.arange(n, dtype=torch.float64) + 0.5) / n).flip(0)


def distance(sample: np.ndarray, other: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance of two samples."""
    places = np.unique(np.concatenate([sample, other]))
    one, two = (np.searchsorted(np.sort(s), places, side="right") / len(s) for s in (sample, other))
    return float(np.abs(one - two).max())


# -- golden ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", SETTINGS)
def test_timesteps_and_weights_equal_their_formulas_in_float64(fields):
    scheduler = WanFlowMatch(**fields)
    n, sigma = scheduler.num_train_timesteps, levels(**fields)
    timesteps = every_level(scheduler)
    assert timesteps.dtype == torch.float32
    np.testing.assert_allclose(timesteps / n, sigma, rtol=0, atol=1e-6)
    np.testing.assert_allclose(timesteps, n * sigma, rtol=1e-6, atol=1e-6)

    y = np.exp(-2 * ((n * sigma - n / 2) / n) ** 2)
    expected = (y - y.min()) * n / (y - y.min()).sum()
    np.testing.assert_allclose(scheduler.loss_weight(timesteps), expected, rtol=0, atol=1e-6)
    assert (WanFlowMatch(**fields, loss_weighting="none").loss_weight(timesteps) == 1).all()


def test_a_weight_equals_the_one_that_diffsynth_computes():
    # DiffSynth-Studio c458cb42, shift 5, index 500: 1.0248619318
    scheduler = WanFlowMatch()
    np.testing.assert_allclose(scheduler.loss_weight(every_level(scheduler))[500], 1.0248619318, rtol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_weights_the_error_of_the_clean_latents_by_the_clipped_ratio(gamma):
    scheduler = WanFlowMatch(loss_weighting="min_snr", min_snr_gamma=gamma)
    timestep = torch.tensor([1.0, 100.0, 309.0, 400.0, 875.0, 999.0])
    rng = Randomness(0)
    clean, noise = rng.normal((6, 2, 1, 3, 3), "x0"), rng.normal((6, 2, 1, 3, 3), "eps")
    predicted = rng.normal((6, 2, 1, 3, 3), "v")
    noisy = scheduler.add_noise(clean, noise, timestep)
    estimate = clean_estimate(scheduler, noisy, predicted, timestep)
    of_clean = (estimate - clean).double().square().flatten(1).mean(1)
    of_velocity = (predicted - scheduler.target(clean, noise, timestep)).double().square().flatten(1).mean(1)
    sigma = timestep.double() / 1000
    ratio = ((1 - sigma) / sigma) ** 2
    torch.testing.assert_close(
        scheduler.loss_weight(timestep).double() * of_velocity,
        ratio.clamp(max=gamma) * of_clean,
        rtol=1e-4,  # the estimate at sigma 0.001 is a difference of float32
        atol=0,
    )
    assert scheduler.loss_weight(torch.tensor([0.0, 1000.0])).tolist() == [0, 0]


def test_noise_and_target_equal_their_equations_in_float64():
    rng = Randomness(0)
    clean, noise = rng.normal((3, 4, 2, 3, 3), "x0"), rng.normal((3, 4, 2, 3, 3), "eps")
    timestep = torch.tensor([0.0, 998.7, 1000.0])
    scheduler = WanFlowMatch()
    sigma = timestep.double().numpy()[:, None, None, None, None] / 1000
    expected = (1 - sigma) * clean.double().numpy() + sigma * noise.double().numpy()
    np.testing.assert_allclose(scheduler.add_noise(clean, noise, timestep), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        scheduler.target(clean, noise, timestep), noise.double() - clean.double(), rtol=0, atol=1e-6
    )
    assert scheduler.add_noise(clean.bfloat16(), noise, timestep).dtype == torch.float32
    assert (scheduler.model_timestep(timestep) == timestep).all()
    torch.testing.assert_close(noise_share(scheduler, timestep), timestep / 1000)


# -- drawing ---------------------------------------------------------------------------------------


def draw_by_definition(fields: dict, rng: np.random.Generator, count: int = DRAWS) -> np.ndarray:
    """Timesteps from the published definitions: noise levels before the shift, then the table's cell."""
    kind = fields.get("timesteps", "uniform")
    if kind == "logit_normal":
        normal = rng.normal(fields.get("logit_mean", 0.0), fields.get("logit_std", 1.0), count)
        v = 1 / (1 + np.exp(-normal))
    elif kind == "mode":  # SD3, eq. 20
        u, s = rng.random(count), fields.get("mode_scale", 1.29)
        v = 1 - u - s * (np.cos(np.pi / 2 * u) ** 2 - 1 + u)
    elif kind == "beta":
        v = rng.beta(fields.get("beta_alpha", 1.5), fields.get("beta_beta", 1.0), count)
    else:
        v = rng.random(count)
    sigma = levels(shift=fields.get("shift", 5.0))
    return 1000 * sigma[np.minimum(np.floor((1 - v) * 1000).astype(int), 999)]


@pytest.mark.parametrize("fields", DENSITIES)
def test_timesteps_are_drawn_from_the_density_that_is_named(fields):
    sample = drawn(WanFlowMatch(**fields))
    rng = np.random.default_rng(0)
    # Two samples: their distance varies by the square root of two more. Equal levels differ in rounding.
    assert distance(sample.round(3), draw_by_definition(fields, rng).round(3)) < 2**0.5 * KS_LIMIT
    other = {"timesteps": "logit_normal", "logit_mean": 0.4} if not fields else {}
    assert distance(sample.round(3), draw_by_definition(other, rng).round(3)) > 2 * KS_LIMIT


RANGES = [
    {},
    {"min_timestep_boundary": 0.417},
    {"max_timestep_boundary": 0.417},
    {"min_timestep_boundary": 0.2, "max_timestep_boundary": 0.9},
]


@pytest.mark.parametrize("fields", DENSITIES)
@pytest.mark.parametrize("bounds", RANGES)
def test_quantiles_are_the_inverse_of_what_is_drawn(fields, bounds):
    scheduler = WanFlowMatch(**fields, **bounds)
    grid = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    values = scheduler.timestep_quantile(grid)
    assert values.dtype == torch.float32 and (values.diff() >= 0).all()
    assert distance(drawn(scheduler), values.double().numpy()) < KS_LIMIT


@pytest.mark.parametrize("fields", DENSITIES)
def test_a_range_is_cut_out_of_the_density_and_nothing_gathers_at_its_ends(fields):
    whole = drawn(WanFlowMatch(**fields), 4 * DRAWS)
    low, high = np.quantile(whole, [0.35, 0.8])
    within = whole[(whole >= low) & (whole < high)]
    cut = drawn(WanFlowMatch(**fields).truncated(low, high), seed=1)
    assert cut.min() >= low and cut.max() < high
    edges = np.quantile(within, np.linspace(0, 1, 11))
    expected = np.histogram(within, edges)[0] / len(within)
    found = np.histogram(cut, edges)[0] / len(cut)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.012)  # clamped: 0.4 and 0.25 at the ends


def test_boundaries_are_shares_of_the_indexes_counted_from_noise():
    table = (1000 * levels()).astype(np.float32)
    first = drawn(WanFlowMatch(max_timestep_boundary=0.417))
    assert set(first.astype(np.float32)) == set(table[:417])  # 417 levels, 20 000 draws: all are hit
    rest = drawn(WanFlowMatch(min_timestep_boundary=0.417), 40_000)
    assert set(rest.astype(np.float32)) == set(table[417:])
    assert first.min() >= 875 > rest.max()  # Wan 2.2's experts meet there, with a shift of 5
    counts = np.unique(first, return_counts=True)[1]
    assert counts.max() < 2 * counts.mean()  # clamped, the last level would have 583 of 1000


def test_an_interval_of_timesteps_equals_the_boundaries_that_enclose_it():
    whole = WanFlowMatch()
    u = torch.rand(1000, dtype=torch.float64)
    for interval, bounds in (
        ((875,), {"max_timestep_boundary": 0.417}),
        ((0, 875), {"min_timestep_boundary": 0.417}),
    ):
        cut = whole.truncated(*interval)
        assert torch.equal(cut.timestep_quantile(u), WanFlowMatch(**bounds).timestep_quantile(u))
        assert torch.equal(cut.loss_weight(u * 1000), whole.loss_weight(u * 1000))
    assert whole.mass(875) == pytest.approx(0.417) and whole.mass(0, 875) == pytest.approx(0.583)
    assert whole.truncated(875).mass(0, 875) == 0 and whole.truncated(875).mass(875) == 1
    assert len(np.unique(drawn(whole))) == 1000  # the whole schedule is as it was


def test_a_draw_on_the_border_of_two_levels_belongs_to_the_upper_one():
    scheduler = WanFlowMatch(num_train_timesteps=4, shift=1.0)
    assert scheduler.timestep_quantile(torch.tensor([0.0, 0.25, 0.5, 0.75])).tolist() == [1, 2, 3, 4]


def test_a_timestep_depends_on_its_own_generator_alone():
    def generators(count):
        return [torch.Generator().manual_seed(i) for i in range(count)]

    together, alone = (
        WanFlowMatch().sample_timesteps(generators(3)),
        WanFlowMatch().sample_timesteps(generators(3)[2:]),
    )
    assert together[2] == alone[0] and len(together.unique()) == 3
    shared = WanFlowMatch(draw_per="micro_batch").sample_timesteps(generators(3))
    assert shared.tolist() == [together[0].item()] * 3


# -- as a component --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wan/flow_match", "wan_flow_match_scheduler"])
def test_it_is_built_by_its_names_and_satisfies_the_contract(name):
    scheduler = mm_core.build("scheduler", {"type": name, "shift": 3.0})
    assert isinstance(scheduler, NoiseScheduler) and isinstance(scheduler, WanFlowMatch)
    np.testing.assert_allclose(every_level(scheduler), 1000 * levels(shift=3.0), rtol=1e-6)
    shares = declared_bins(scheduler).declared
    np.testing.assert_allclose(
        shares, np.histogram(levels(shift=3.0), np.linspace(0, 1, 11))[0] / 1000, atol=2e-3
    )


def test_its_tables_are_real_where_models_are_built_without_memory():
    with torch.device("meta"):
        scheduler = WanFlowMatch(timesteps="mode")
        timesteps = scheduler.sample_timesteps([torch.Generator().manual_seed(0)])
        assert scheduler.sigmas(2).device.type == timesteps.device.type == "cpu"
    expected = WanFlowMatch(timesteps="mode").sample_timesteps([torch.Generator().manual_seed(0)])
    assert torch.equal(timesteps, expected)


def test_its_config_imports_no_torch():
    code = "import sys, mm_wan.plugin, mm_wan.schedulers.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"min_timestep_boundary": 0.5, "max_timestep_boundary": 0.417},
            "min_timestep_boundary 0.5 must be below max_timestep_boundary 0.417",
        ),
        (
            {"min_timestep_boundary": 0.4171, "max_timestep_boundary": 0.4175},
            "none of the 1,000 timesteps is between min_timestep_boundary 0.4171 and max_timestep_boundary "
            "0.4175",
        ),
        ({"sigma_min": 0.5, "sigma_max": 0.5}, "sigma_min 0.5 must be below sigma_max 0.5"),
        (
            {"solver": "euler", "solver_order": 2},
            "solver_order 2 does not apply to the solver euler, which has order 1",
        ),
        ({"solver": "ddim"}, "solver: found 'ddim'"),
        ({"shift": 0.0}, "shift: found 0"),
        ({"mode_scale": 3.0}, "mode_scale: found 3"),
    ],
)
def test_fields_that_make_no_sense_are_one_error(fields, sentence):
    with pytest.raises(ConfigError) as error:
        mm_core.build("scheduler", {"type": "wan/flow_match", **fields})
    assert sentence in str(error.value)


def test_intervals_and_weights_with_nothing_in_them_are_refused():
    with pytest.raises(ContractError, match="never draws a timestep within timesteps from 875 to the end"):
        WanFlowMatch(min_timestep_boundary=0.5).truncated(875)
    with pytest.raises(
        ContractError, match=r"never draws a timestep within the boundaries \(timesteps: logit_normal"
    ):
        WanFlowMatch(timesteps="logit_normal", logit_mean=-60.0, max_timestep_boundary=0.1)
    with pytest.raises(ContractError, match="the Gaussian loss weights of these noise levels are all 0"):
        WanFlowMatch(num_train_timesteps=2, extra_one_step=False)
