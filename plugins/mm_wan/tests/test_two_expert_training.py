"""Training of wan/two_expert: whose timesteps a step has, and that the expert that rests is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import expert_ranks as training
import pytest
import torch
import wan_variants as variants
from mm_wan.schedulers.flow_match import WanFlowMatch

from mm_core.contracts import Randomness, SampleKey
from mm_core.errors import ContractError
from mm_core.tasks.text_to_video.experts import Experts
from support.ranks import run_ranks

HERE = Path(__file__).parent


RNG = training.RNG
MASS = {"high": 1 - 0.875 / (5 - 4 * 0.875)}  # u = sigma / (s - (s - 1) sigma) of s = 5
MASS["low"] = 1 - MASS["high"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Two transformers of 12-channel latents, listed by a pipeline's index."""
    top = tmp_path_factory.mktemp("pair")
    parts = ("transformer", "transformer_2")
    for seed, part in enumerate(parts):
        model = variants.published("wan2.2-t2v-a14b", in_channels=12, out_channels=12, text_dim=32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(top / part)
    index = {"_class_name": "WanPipeline", "boundary_ratio": 0.875}
    index |= {part: ["diffusers", "WanTransformer3DModel"] for part in parts}
    (top / "model_index.json").write_text(json.dumps(index))
    return str(top)


# -- timesteps -------------------------------------------------------------------------------------


def uniform_of(timestep: torch.Tensor, shift: float = 5.0) -> torch.Tensor:
    """The share of all training timesteps below, of a uniform density under a shift."""
    sigma = timestep.double() / 1000
    return sigma / (shift - (shift - 1) * sigma)


def distance(timesteps: torch.Tensor, low: float, high: float) -> float:
    """Kolmogorov and Smirnov's, of the density between two shares."""
    found = ((uniform_of(timesteps.sort().values) - low) / (high - low)).clamp(0, 1)
    count = len(found)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    return float(torch.maximum((found - steps[:-1]).abs(), (steps[1:] - found).abs()).max())


@pytest.mark.parametrize(("train", "low", "high"), [("high", MASS["low"], 1.0), ("low", 0.0, MASS["low"])])
def test_an_expert_trains_the_truncated_density_of_its_timesteps(folder, train, low, high):
    task = training.task_of(folder, train)
    drawn = []
    for step in range(10):
        task.begin_step(step)
        batch = training.row_of(task, 0, 0, 4)
        batch.keys = [SampleKey(step, number) for number in range(500)]
        batch.pixels = batch.pixels[:1, :, :1, :2, :2].expand(500, -1, -1, -1, -1)
        batch.sample_weights = torch.ones(500)
        batch.text_ids, batch.text_mask = (t[:1].expand(500, -1) for t in (batch.text_ids, batch.text_mask))
        inputs = task.prepare(batch, RNG)
        assert inputs.expert == train
        drawn.append(inputs.given.timestep)
    timesteps = torch.cat(drawn)
    inside = timesteps >= 875 if train == "high" else timesteps < 875
    assert inside.all()
    # 1.63 / sqrt(n) is exceeded once in a hundred; the levels add a thousandth of the whole density.
    assert distance(timesteps, low, high) < 1.63 / 5000**0.5 + 0.001 / (high - low)
    # Clamping would put 70 % of them on one value: each of the levels is drawn about equally often.
    _, counts = timesteps.unique(return_counts=True)
    assert counts.max() < 5 * 5000 / (1000 * (high - low))


def test_training_both_draws_a_steps_expert_with_the_mass_of_its_timesteps(folder):
    experts = training.task_of(folder).experts
    drawn = [experts.of_step(RNG, step) for step in range(4000)]
    share = sum(name == "high" for name, _ in drawn) / 4000
    assert share == pytest.approx(MASS["high"], abs=3 * (MASS["high"] * MASS["low"] / 4000) ** 0.5)
    again = Experts(training.task_of(folder).predictor, WanFlowMatch())
    assert [again.of_step(RNG, step)[0] for step in range(50)] == [name for name, _ in drawn[:50]]
    other = [again.of_step(Randomness(6), step)[0] for step in range(50)]
    assert other != [name for name, _ in drawn[:50]]
    # Over the steps the timesteps are those of one model that is trained on all.
    timesteps = torch.cat(
        [
            scheduler.sample_timesteps([RNG.generator("timestep", 0, step)])
            for step, (_, scheduler) in enumerate(drawn)
        ]
    )
    high = torch.tensor([name == "high" for name, _ in drawn])
    assert torch.equal(timesteps >= 875, high)
    assert distance(timesteps, 0, 1) < 1.63 / 4000**0.5 + 0.001


def test_all_micro_batches_of_a_step_train_one_expert(folder):
    task = training.task_of(folder)
    chosen = []
    for step in range(12):
        task.begin_step(step)
        chosen.append({task.prepare(training.row_of(task, step, row), RNG).expert for row in range(3)})
    assert all(len(one) == 1 for one in chosen) and {"high", "low"} == set.union(*chosen)
    task.begin_step(3)  # as after a resume
    assert task.prepare(training.row_of(task, 3, 0), RNG).expert in chosen[3]


def test_declared_noise_levels_are_those_of_what_is_trained(folder):
    """Ten bins of sigma, against the density by hand; and what a step reports falls where it is declared."""
    edges = uniform_of(torch.linspace(0, 1000, 11))
    both, high, low = (training.task_of(folder, train) for train in ("both", "high", "low"))
    # A level that lies on an edge belongs to the bin above it: a thousandth.
    assert both.bins.declared == pytest.approx(edges.diff().tolist(), abs=0.0011)
    cut = edges.clamp(min=MASS["low"]).diff() / MASS["high"]
    assert high.bins.declared == pytest.approx(cut.tolist(), abs=0.0011 / MASS["high"])
    cut = edges.clamp(max=MASS["low"]).diff() / MASS["low"]
    assert low.bins.declared == pytest.approx(cut.tolist(), abs=0.0011 / MASS["low"])
    for task in (both, high, low):
        found = torch.zeros(10)
        for step in range(60):
            task.begin_step(step)
            with torch.no_grad():
                found += task.loss(task.prepare(training.row_of(task, step, 0, 2), RNG)).bins[1]
        declared = torch.tensor(task.bins.declared)
        assert found.sum() == 120 and not found[declared == 0].any()
        assert ((found / 120 - declared).abs() < 4 * (declared / 120).sqrt() + 0.02).all()


def test_weights_of_the_loss_are_those_of_one_model(folder):
    """Training both is the same objective as training one model on all timesteps; one alone has its part."""
    whole = WanFlowMatch()
    for train in ("both", "high", "low"):
        task = training.task_of(folder, train)
        timestep = torch.tensor([990.0, 880.0, 870.0, 300.0])
        assert torch.equal(task.scheduler.loss_weight(timestep), whole.loss_weight(timestep))


def test_an_evaluation_asks_each_quantile_of_its_expert(folder):
    quantiles = (0.1, 0.3, 0.5, 0.7, 0.9)
    for train, expected in (
        ("both", ["low"] * 3 + ["high"] * 2),
        ("high", ["high"] * 5),
        ("low", ["low"] * 5),
    ):
        task = training.task_of(folder, train)
        seen: list[tuple[str, float]] = []
        task.predictor.register_forward_pre_hook(
            lambda _, args, given, seen=seen: seen.append((given["expert"], float(given["timestep"][0]))),
            with_kwargs=True,
        )
        found = task.evaluate(training.row_of(task, 0, 0, 2), RNG, quantiles)
        assert [name for name, _ in seen] == expected and set(found.sums) > {"loss_at/0.1", "loss_at/0.9"}
        low, high = {"both": (0.0, 1.0), "high": (MASS["low"], 1.0), "low": (0.0, MASS["low"])}[train]
        places = [low + q * (high - low) for q in quantiles]
        assert uniform_of(torch.tensor([t for _, t in seen])).tolist() == pytest.approx(places, abs=0.0011)


def test_an_expert_whose_timesteps_are_never_drawn_is_a_readable_error(folder):
    with pytest.raises(ContractError, match="training never draws a timestep within timesteps from 875 to t"):
        training.task_of(folder, min_timestep_boundary=0.6)


# -- the optimizer, over ranks ---------------------------------------------------------------------


def by_hand(folder: str) -> dict:
    """The same steps without an engine: each expert has an AdamW of its own, which steps in its steps."""
    task = training.task_of(folder)
    from diffusers import WanTransformer3DModel

    parts = {"high": "transformer", "low": "transformer_2"}
    for name, part in parts.items():
        model = WanTransformer3DModel.from_pretrained(Path(folder) / part)
        task.predictor.get_submodule(name).load_state_dict(model.state_dict())
    optimizers = {
        name: torch.optim.AdamW(task.predictor.get_submodule(name).parameters(), **training.ADAMW)
        for name in parts
    }
    average = {n: p.detach().clone() for n, p in task.predictor.named_parameters()}
    seen = {"steps": [], "weights": []}
    for step in range(training.STEPS):
        task.begin_step(step)
        expert = task.experts.of_step(RNG, step)[0]
        losses = [
            task.loss(task.prepare(training.row_of(task, step, row), RNG)) for row in range(training.ROWS)
        ]
        total = sum(loss.total for loss in losses) / training.ROWS
        total.backward()
        trained = task.predictor.get_submodule(expert).parameters()
        norm = torch.nn.utils.clip_grad_norm_(list(trained), training.CLIP)
        optimizers[expert].step()
        optimizers[expert].zero_grad()
        with torch.no_grad():
            for name, parameter in task.predictor.named_parameters():
                average[name].lerp_(parameter, 1 - training.AVERAGE.decay)
        seen["steps"].append((expert, float(total.detach()), float(norm)))
        seen["weights"].append({n: p.detach().clone() for n, p in task.predictor.named_parameters()})
    return {**seen, "ema": average}


@pytest.fixture(scope="module")
def runs_of(folder, tmp_path_factory) -> dict[int, dict]:
    found = {}
    for world in (1, 2):
        out = tmp_path_factory.mktemp("out") / f"{world}.pt"
        run_ranks(HERE / "expert_ranks.py", world, out, folder)
        found[world] = torch.load(out)
    return found


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within 1e-5 of the largest value."""
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max().clamp_min(1e-8))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_it_trains_as_two_loops_each_with_an_optimizer_of_its_own(folder, runs_of, world):
    found, expected = runs_of[world], by_hand(folder)
    assert [name for name, *_ in found["steps"]] == [name for name, *_ in expected["steps"]]
    assert {name for name, *_ in found["steps"]} == {"high", "low"}
    for (_, loss, norm), (_, other, theirs) in zip(found["steps"], expected["steps"], strict=True):
        assert loss == pytest.approx(other, rel=1e-5) and norm == pytest.approx(theirs, rel=1e-5)
    assert max(norm for *_, norm in found["steps"]) > training.CLIP  # some step was clipped
    for ours, theirs in zip(found["weights"][1:], expected["weights"], strict=True):
        assert all(close(ours[f"predictor.{name}"], tensor) for name, tensor in theirs.items())
    assert all(close(found["ema"][f"predictor.{name}"], t) for name, t in expected["ema"].items())


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_expert_that_rests_is_not_moved_and_counts_its_own_steps(runs_of, world):
    """Neither by weight decay nor by momentum, not by a bit."""
    found = runs_of[world]
    for (expert, *_), before, after in zip(
        found["steps"], found["weights"], found["weights"][1:], strict=False
    ):
        for name, tensor in after.items():
            rests = not name.startswith(f"predictor.{expert}.")
            assert torch.equal(tensor, before[name]) == rests, (expert, name)
    for name, count in found["optimizer"].items():
        if name.endswith(".step"):
            expert = name.split(".")[1]
            assert count == sum(one == expert for one, *_ in found["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_it_goes_on_bit_for_bit_after_a_step_that_only_one_expert_has_taken(runs_of, world):
    found = runs_of[world]
    assert len({name for name, *_ in found["steps"][:1]}) == 1
    assert found["resumed"] == found["steps"][1:]
    for part, whole in (
        ("model", found["weights"][-1]),
        ("optimizer", found["optimizer"]),
        ("ema", found["ema"]),
    ):
        again = found[f"resumed {part}"]
        assert again.keys() == whole.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in whole.items()), part
