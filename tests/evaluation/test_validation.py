"""Validation in one process: what is read, what is computed, what is left behind."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm_core.config.load import load_config
from mm_core.config.sections import LoaderSection
from mm_core.contracts import (
    Clip,
    DataRanks,
    Evaluation,
    Randomness,
    SampleKey,
    SampleRequest,
    VideoTextBatch,
)
from mm_core.data.loading.sampler import EvenRows
from mm_core.errors import ContractError, DataError
from mm_core.evaluation import LatentPSNR
from mm_core.evaluation.batches import EvaluationData
from mm_core.evaluation.sampled_clips import share_of, with_trained_size
from mm_core.evaluation.validator import build_metrics
from mm_core.plan.samples import Samples
from mm_core.plugin.registry import build
from mm_core.runtime.process_group import process_group
from support import validation


@pytest.fixture
def parts(tmp_path):
    with process_group():
        yield validation.Parts(validation.write_config(tmp_path))


# -- what is read ------------------------------------------------------------------------------


@given(total=st.integers(1, 60), share=st.integers(1, 60), world=st.integers(1, 5), micro=st.integers(1, 5))
def test_every_row_is_read_once_over_all_ranks_in_equally_many_batches(total, share, world, micro):
    count = min(share, total)
    plan = EvenRows(count, micro, micro * world, 0, "sequential", drop_last=False, total=total)
    steps = range(plan.batches_per_epoch)
    shares = [[b for step in steps for b in plan.micro_batches(step, rank, world)] for rank in range(world)]
    assert len({len(own) for own in shares}) == 1
    assert all(len(batch) == micro for own in shares for batch in own)
    rows = sorted(slot.key.index for own in shares for batch in own for slot in batch if slot.weight)
    assert rows == [i * total // count for i in range(count)] and len(set(rows)) == count
    # a micro-batch holds the same rows at any world size
    alone = EvenRows(count, micro, micro, 0, "sequential", drop_last=False, total=total)
    for step in range(alone.batches_per_epoch):
        real = [slot for slot in alone.global_batch(step) if slot.weight]
        there = shares[step % world][step // world]
        assert [slot for slot in there if slot.weight] == real


def data(dataset, **fields) -> EvaluationData:
    settings = {
        "where": "data.validation",
        "rows": None,
        "micro_batch_size": 4,
        "ranks": DataRanks(),
        "transform": None,
        "seed": 1,
        "loader": LoaderSection(workers=0),
        "device": torch.device("cpu"),
    }
    return EvaluationData(Samples(dataset), **{**settings, **fields})


def test_a_subset_is_spread_over_the_dataset_under_its_own_indices():
    found = data(validation.Clips(100), rows=5)
    (first, second) = found.read()
    assert [*first.keys, *second.keys][:5] == [SampleKey(0, row) for row in (0, 20, 40, 60, 80)]
    assert first.ids == ["clip 0", "clip 20", "clip 40", "clip 60"]
    assert second.sample_weights.tolist() == [1, 0, 0, 0] and found.rows == 5 and found.batches == 2


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_cannot_be_read_have_weight_0_in_every_pass(workers):
    found = data(validation.Clips(10, broken=(2, 5)), loader=LoaderSection(workers=workers))
    batches = list(found.read(passes=2))
    assert len(batches) == 6
    weights = torch.cat([batch.sample_weights for batch in batches]).tolist()
    assert weights == [1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0] * 2


def test_a_dataset_without_rows_and_one_that_cannot_be_read_are_readable_errors():
    with pytest.raises(DataError, match=r"data\.test: the dataset has no rows to evaluate"):
        data(validation.Clips(0), where="data.test")
    with pytest.raises(DataError, match=r"data\.validation: sample 0 and 2 others tried in its place"):
        list(data(validation.Clips(3, broken=(0, 1, 2))).read())


# -- held-out loss -----------------------------------------------------------------------------


def expected_loss(parts, rows) -> float:
    dataset, transform = validation.Clips(200), parts.task.batch_transform()
    losses = []
    for row in rows:
        sample = {**dataset[row], "key": SampleKey(0, row), "weight": 1.0}
        with parts.engine.evaluating():
            batch = transform(dataset.collate([sample]))
            losses.append(parts.task.evaluate(batch, Randomness(11), (0.2, 0.5, 0.8)).sums["loss"].item())
    return sum(losses) / len(losses)


def test_the_loss_is_the_mean_over_rows_with_and_without_the_average(parts):
    figures = parts.validator(validation.Clips(10), ema=parts.ema).run(4)
    assert figures["validation/loss"] == pytest.approx(expected_loss(parts, range(10)), rel=1e-6)
    with parts.ema.applied():
        averaged = expected_loss(parts, range(10))
    assert figures["validation_ema/loss"] == pytest.approx(averaged, rel=1e-6)
    assert averaged != pytest.approx(figures["validation/loss"], rel=1e-3)
    at = [figures[f"validation/loss_at/{quantile}"] for quantile in (0.2, 0.5, 0.8)]
    assert sum(at) / 3 == pytest.approx(figures["validation/loss"]) and figures["validation/rows"] == 10
    assert "validation/frame_change" not in figures  # nothing was sampled


def test_it_is_the_same_each_time_and_leaves_no_trace(parts):
    validator = parts.validator(validation.Clips(10), ema=parts.ema)
    weights = [p.detach().clone() for _, p in parts.engine.named_parameters()]
    parts.task.predictor.train()
    state = torch.get_rng_state()
    first, second = validator.run(1), validator.run(2)
    assert first == second and torch.equal(torch.get_rng_state(), state)
    assert parts.task.predictor.training
    after = [p for _, p in parts.engine.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True))


def test_a_part_of_the_rows_meets_the_same_noise_as_all_of_them(parts):
    settings = type(parts.config.validation)(rows=3, timesteps=(0.2, 0.5, 0.8))
    figures = parts.validator(validation.Clips(12), settings=settings).run(1)
    assert figures["validation/loss"] == pytest.approx(expected_loss(parts, (0, 4, 8)), rel=1e-6)


def test_every_row_of_a_test_set_is_evaluated_under_its_name(parts):
    parts.config = replace(parts.config, validation=replace(parts.config.validation, rows=2))
    assert parts.validator(validation.Clips(7), split="test").run(1)["test/rows"] == 7
    assert parts.validator(validation.Clips(7)).run(1)["validation/rows"] == 2


def test_rows_that_cannot_be_read_are_left_out_counted_and_named_once(parts):
    validator = parts.validator(validation.Clips(10, broken=(3,)))
    figures = validator.run(1)
    assert figures["validation/loss"] == pytest.approx(
        expected_loss(parts, [0, 1, 2, *range(4, 10)]), rel=1e-6
    )
    assert (figures["validation/rows"], figures["validation/unreadable"]) == (9, 1)
    validator.run(2)
    (note,) = parts.notes
    assert "1 of 10 rows of data.validation could not be read" in note
    assert "clip 3: the file is damaged" in note


@pytest.mark.parametrize("look", [1, 2, 4])
def test_a_request_to_stop_is_followed_between_batches(parts, look):
    data = validation.Clips(12)
    validator = parts.validator(data, ema=parts.ema, stop=validation.stops_at(look))
    assert validator.run(4) is None
    assert sum(data.reads.values()) == 4 * look  # the batch in hand, none after
    assert "validation after step 4 was abandoned" in parts.notes[0]


def test_every_batch_and_forward_is_a_sign_of_life(parts):
    phases = []
    validator = parts.validator(validation.Clips(8), enter=phases.append)
    validator.run(1)
    assert phases == ["validation"] * 2
    validator.sample(1)
    assert len(phases) == 2 + 3  # three solver steps


# -- metrics -----------------------------------------------------------------------------------


def latents_batch(weights) -> VideoTextBatch:
    count = len(weights)
    pixels = torch.zeros(count, 3, 1, 2, 2)
    keys = [SampleKey(0, i) for i in range(count)]
    return VideoTextBatch(keys, torch.tensor(weights), ["x"] * count, pixels=pixels, captions=["x"] * count)


def test_latent_psnr_is_the_ordinary_one_for_references_that_fill_their_range_evenly():
    """With x uniform on [-1, 4] the range is 5: PSNR = 10 log10(25 / MSE)."""
    clean = 5 * torch.rand(4, 1, 1, 100, 100, generator=Randomness(1).generator("clean")) - 1
    error = 0.1 * Randomness(1).normal((4, 1, 1, 100, 100), "noise")
    expected = 10 * math.log10(25 / error[:3].square().mean().item())
    estimate = clean + error
    estimate[3] = math.nan  # a row that counts for nothing
    halves = [LatentPSNR(), LatentPSNR()]  # as on two ranks
    shares = ((slice(0, 2), [1.0, 1.0]), (slice(2, 4), [1.0, 0.0]))
    for metric, (rows, weights) in zip(halves, shares, strict=True):
        outputs = {"clean": clean[rows], "estimate": estimate[rows]}
        metric.batch(latents_batch(weights), Evaluation({}, torch.ones(2), outputs))
    found = halves[0].result(halves[0].sums() + halves[1].sums())
    assert found["latent_psnr"] == pytest.approx(expected, abs=0.05)


def test_latent_psnr_of_nothing_and_of_perfection():
    metric = LatentPSNR()
    assert metric.result(metric.sums()) == {}
    clean = Randomness(1).normal((2, 1, 1, 4, 4), "clean")
    perfect = Evaluation({}, torch.ones(2), {"clean": clean, "estimate": clean})
    metric.batch(latents_batch([1.0, 1.0]), perfect)
    assert metric.result(metric.sums()) == {"latent_psnr": math.inf}
    with pytest.raises(ContractError, match="the metric needs 'clean' and 'estimate', which"):
        metric.batch(latents_batch([1.0]), Evaluation({}, torch.ones(1), {"other": clean}))


def test_frame_change_distinguishes_frozen_clips_from_moving_ones():
    metric = build("metric", {"type": "frame_change"})
    frozen = Clip(Randomness(1).normal((3, 1, 4, 4), "frame").clamp(-1, 1).expand(3, 5, 4, 4), 8.0, "")
    flicker = Clip(torch.ones(3, 5, 4, 4) * torch.tensor([1, -1, 1, -1, 1]).view(1, 5, 1, 1), 8.0, "")
    metric.sampled([frozen, Clip(torch.zeros(3, 1, 4, 4), 8.0, "still")])
    assert metric.result(metric.sums()) == {"frame_change": 0.0}
    metric.sampled([flicker])
    assert metric.result(metric.sums()) == {"frame_change": 0.5}
    metric.reset()
    assert metric.result(metric.sums()) == {}


def test_a_figure_that_is_given_twice_is_refused(parts):
    with pytest.raises(ContractError, match="two metrics return the figure 'latent_psnr'"):
        parts.validator(validation.Clips(4), metrics=("latent_psnr", "latent_psnr")).run(1)


def test_a_figure_that_is_no_number_is_refused(parts, monkeypatch):
    monkeypatch.setattr(LatentPSNR, "result", lambda metric, sums: {"latent_psnr": sums})
    with pytest.raises(ContractError) as fault:
        parts.validator(validation.Clips(4), metrics=("latent_psnr",)).run(1)
    text = str(fault.value)
    assert re.match(r"validation.metrics: latent_psnr, .*\.py, line \d+: the figure 'latent_psnr' is", text)
    assert text.endswith("is a Tensor\n  accepted: a number, such as float(tensor)")


def test_the_metric_of_the_documentation_works(tmp_path):
    page = (Path(__file__).parents[2] / "docs/validation.md").read_text()
    (code,) = (found for found in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "hookimpl" in found)
    (tmp_path / "brightness.py").write_text(code)
    config = load_config(
        validation.write_config(
            tmp_path,
            plugins={"path": [str(tmp_path / "brightness.py")]},
            validation={"metrics": [{"type": "brightness"}], "samples": {"prompts": ["up"]}},
        )
    )
    ((name, metric),) = build_metrics(config.registry, config.validation)
    metric.sampled([Clip(torch.full((3, 2, 4, 4), value), 8.0, "") for value in (0.25, -0.75)])
    assert name == "local/brightness" and metric.result(metric.sums()) == {"brightness": -0.25}


# -- sampled clips -----------------------------------------------------------------------------


@given(count=st.integers(1, 20), world=st.integers(1, 8))
def test_prompts_are_shared_in_blocks_of_equal_length(count, world):
    prompts = tuple(str(i) for i in range(count))
    shares = [share_of(SampleRequest(prompts), DataRanks(rank, world)) for rank in range(world)]
    assert len({len(own.prompts) for own, _ in shares}) == 1
    assert tuple(p for own, real in shares for p in own.prompts[:real]) == prompts
    assert all(own.prompts[:real] == prompts[own.first : own.first + real] for own, real in shares)


def test_clips_are_those_of_the_averaged_weights_and_lie_in_the_steps_folder(parts):
    folder = parts.validator(validation.Clips(4), ema=parts.ema).sample(500)
    assert folder == Path(parts.config.run.dir) / "tiny/samples/step_00000500"
    rows = json.loads((folder / "prompts.json").read_text())
    assert [row["cap"] for row in rows] == validation.PROMPTS
    assert rows[0]["path"] == "000-a-red-circle-moves-left.mp4"
    assert all((folder / row["path"]).exists() for row in rows) and (folder / "contact_sheet.png").exists()
    request = SampleRequest(tuple(validation.PROMPTS), seed=5)
    request = with_trained_size(request, parts.config.task, parts.config.data.train)
    with parts.ema.applied(), parts.engine.evaluating():
        expected = parts.task.sample(request)
    ((step, shown, where),) = parts.shown
    assert (step, where) == (500, folder)
    for clip, wanted in zip(shown, expected, strict=True):
        torch.testing.assert_close(clip.pixels, wanted.pixels, rtol=0, atol=1.01 / 127.5)
    change = sum(clip.pixels.diff(dim=1).abs().mean().item() / 2 for clip in expected) / 3
    assert parts.logged == {"validation_ema/frame_change": pytest.approx(change, rel=1e-5)}


def test_a_request_to_stop_is_followed_between_forwards_and_nothing_is_written(parts):
    forwards = []
    hook = parts.task.predictor.register_forward_hook(lambda *_: forwards.append(1))
    assert parts.validator(None, stop=validation.stops_at(3)).sample(4) is None
    assert len(forwards) == 2 and not list(Path(parts.config.run.dir).rglob("*.mp4"))
    hook.remove()
    assert parts.validator(None).sample(4) is not None  # the hooks are gone, the modules work


def test_clips_that_cannot_be_written_are_reported_and_end_no_run(parts):
    samples = Path(parts.config.run.dir) / "tiny/samples"
    samples.parent.mkdir()
    samples.write_text("a file where the folder should be")
    assert parts.validator(None).sample(4) is not None
    assert "the clips after step 4 could not be written" in parts.notes[0]
    assert "rank 0: DataError" in parts.notes[0]
