"""The task text_to_video: its loss follows equations, draws derive from keys, and faults are errors."""

import pickle
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mm_core.builtin.configs.text_to_video import SampleConfig
from mm_core.config.load import load_config
from mm_core.contracts import Randomness, SampleKey, SampleRequest
from mm_core.diffusion.encoders.pixel import PixelAutoencoder
from mm_core.diffusion.encoders.text import ByteTextEncoder, HFTextEncoder
from mm_core.diffusion.flow_match import FlowMatch
from mm_core.errors import ContractError
from mm_core.plan import build_task
from mm_core.tasks.text_to_video.captions import chosen
from mm_core.tasks.text_to_video.task import TextToVideo
from support.text_to_video import CAPTIONS, CPU, RNG, SmallPredictor, make_batch, make_task, row

# -- training ----------------------------------------------------------------------------------


def test_the_loss_is_the_weighted_sum_of_each_samples_mean_squared_error():
    task = make_task()
    batch = make_batch(task, weights=(1.0, 0.5, 0.0))
    inputs = task.prepare(batch, RNG)
    loss = task.loss(inputs)
    clean = PixelAutoencoder(2).encode(batch.pixels).mode().double()
    expected = 0.0
    for i, key in enumerate(batch.keys):
        noise = RNG.normal(tuple(clean.shape[1:]), "noise", *key).double()
        (timestep,) = FlowMatch(shift=3.0).sample_timesteps([RNG.generator("timestep", *key)]).double()
        noisy = (1 - timestep / 1000) * clean[i] + timestep / 1000 * noise
        hidden, mask = task.text_encoder.encode(batch.text_ids[i : i + 1], batch.text_mask[i : i + 1])
        given = (noisy[None], timestep[None], hidden.double(), mask)
        predicted = SmallPredictor().double()(*given)
        expected += (
            float(batch.sample_weights[i]) * (predicted[0] - (noise - clean[i])).square().mean().item()
        )
    assert loss.total.item() == pytest.approx(expected, rel=1e-6)
    assert loss.weight == task.weight(batch) == 1.5


def test_a_batch_and_its_samples_alone_give_the_same_loss_and_gradient():
    task = make_task(caption_dropout=0.5)
    batch = make_batch(task)
    together = task.loss(task.prepare(batch, RNG))
    together.total.backward()
    gradient = task.predictor.project.weight.grad.clone()
    task.zero_grad()
    alone = [task.loss(task.prepare(row(batch, i), RNG)) for i in range(3)]
    sum(loss.total for loss in alone).backward()
    assert sum(loss.total.item() for loss in alone) == pytest.approx(together.total.item(), rel=1e-6)
    torch.testing.assert_close(task.predictor.project.weight.grad, gradient)


def test_random_draws_depend_on_epoch_and_sample():
    task = make_task()
    one, again = (task.prepare(make_batch(task), RNG) for _ in range(2))
    later = task.prepare(make_batch(task, epoch=1), RNG)
    assert torch.equal(one.given.latents, again.given.latents)
    assert torch.equal(one.given.timestep, again.given.timestep)
    assert not (one.given.timestep == later.given.timestep).any()
    assert len(one.given.timestep.unique()) == 3


def test_a_sample_without_weight_moves_no_gradient():
    task = make_task()
    task.loss(task.prepare(make_batch(task, weights=(0.0, 0.0, 0.0)), RNG)).total.backward()
    assert all(not parameter.grad.any() for parameter in task.parameters())


def test_dropped_captions_become_the_empty_caption():
    task = make_task(caption_dropout=1.0)
    inputs = task.prepare(make_batch(task), RNG)
    hidden, mask = task.text_encoder.encode(*task.text_encoder.tokenizer()([""]))
    assert inputs.text_mask.sum(1).tolist() == mask.sum(1).tolist() * 3
    torch.testing.assert_close(inputs.text[:, :1], hidden.expand(3, -1, -1))
    assert not inputs.text[:, 1:].any()


def test_what_is_encoded_uses_no_randomness_and_serves_every_draw():
    task = make_task(caption_dropout=0.5, latents="sample")
    batch = make_batch(task)
    before = torch.get_rng_state()
    clips = task.encode(batch)
    assert torch.equal(torch.get_rng_state(), before)
    for rng in (RNG, Randomness(8)):
        drawn, prepared = task.draw(clips, rng), task.prepare(batch, rng)
        for name in ("text", "text_mask", "target", "factors", "sigma"):
            assert torch.equal(getattr(drawn, name), getattr(prepared, name)), name
        assert torch.equal(drawn.given.latents, prepared.given.latents)


def test_conditions_of_dropped_captions_are_those_of_the_empty_one():
    own = (
        torch.ones(3, 5, 2),
        torch.ones(3, 5, dtype=torch.bool),
        {"pooled": torch.ones(3, 4), "n": torch.ones(3)},
    )
    empty = (
        torch.zeros(1, 5, 2),
        torch.tensor([[True, False, False, False, False]]),
        {"pooled": torch.zeros(1, 4), "n": torch.zeros(1)},
    )
    text, mask, conditions = chosen(own, empty, [False, True, False])
    assert text.sum((1, 2)).tolist() == [10, 0, 10] and mask.sum(1).tolist() == [5, 1, 5]
    assert conditions["pooled"].sum(1).tolist() == [4, 0, 4] and conditions["n"].tolist() == [1, 0, 1]


def test_own_and_empty_captions_are_encoded_in_one_call_and_dropped_ones_are_as_if_encoded_alone():
    calls = []

    class Counted(ByteTextEncoder):
        def encode(self, ids, mask):
            calls.append(len(ids))
            return super().encode(ids, mask)

    encoder = Counted(8, 32)
    encoder.load(torch.device("cpu"))
    task = TextToVideo(SmallPredictor(), PixelAutoencoder(2), encoder, FlowMatch(), caption_dropout=0.5)
    clips = task.encode(make_batch(task))
    alone = encoder.encode(*encoder.tokenizer()([""]))[0]
    assert calls == [4, 1] and torch.equal(clips.empty[0][:, :1], alone)
    assert clips.empty[1].sum() == 1 and not clips.empty[0][:, 1:].any()
    task.caption_dropout = 0.0
    assert task.encode(make_batch(task)).empty is None and calls == [4, 1, 3]


def test_stored_moments_stand_in_for_pixels():
    task = make_task(caption_dropout=0.5)
    batch = make_batch(task)
    moments = task.encode(batch).posterior.moments
    stored = replace(batch, pixels=None, moments=moments, clip_size=batch.size)
    assert stored.size == (2, 8, 8)
    drawn, expected = (task.prepare(each, RNG) for each in (stored, batch))
    assert torch.equal(drawn.target, expected.target) and torch.equal(drawn.text, expected.text)
    losses = [task.evaluate(each, RNG, QUANTILES).sums["loss"] for each in (stored, batch)]
    assert torch.equal(*losses)
    with pytest.raises(ValueError, match="needs `moments` and `clip_size`"):
        replace(batch, pixels=None)


def test_moments_are_refused_where_the_autoencoder_cannot_take_them_or_frames_are_shown():
    task = make_task()
    batch = make_batch(task)
    moments = task.encode(batch).posterior.moments
    stored = replace(batch, pixels=None, moments=moments, clip_size=batch.size)
    task.frames = ("first",)
    with pytest.raises(ContractError, match="is shown frames of the clips, but the batch has no pixels"):
        task.prepare(stored, RNG)
    task.frames = ()
    unstored = replace(task._encoder, autoencoder=object())
    with pytest.raises(ContractError, match="the autoencoder has no method `posterior`"):
        unstored.encode(stored, 1.0, drops=False)


def test_captions_are_dropped_at_the_rate_that_was_asked_for():
    task = make_task(caption_dropout=0.25)
    dropped = 0
    for first in range(0, 600, 60):
        batch = make_batch(task, ["a red circle"] * 60, (1.0,) * 60, first=first)
        dropped += int((task.prepare(batch, RNG).text_mask.sum(1) == 1).sum())
    assert 105 <= dropped <= 195  # 150 expected, 4 standard deviations of 10.6 and a little


def test_captions_are_tokenized_in_workers_or_where_no_worker_did():
    task = make_task()
    transform = pickle.loads(pickle.dumps(task.batch_transform()))
    by_worker, here = transform(make_batch()), make_batch()
    assert by_worker.text_mask.sum(1).tolist() == [len(caption) + 1 for caption in CAPTIONS]
    assert torch.equal(task.prepare(by_worker, RNG).text, task.prepare(here, RNG).text)


@pytest.mark.parametrize("length", [4, 40])
def test_a_predictor_of_fixed_text_gets_zeros_behind_the_caption_and_no_more_than_it_takes(length):
    task = make_task(SmallPredictor(text_padding=("fixed", length)))
    inputs = task.prepare(make_batch(task), RNG)
    assert inputs.text.shape == (3, length, 8) and inputs.text_mask.shape == (3, length)
    assert not inputs.text[2, 3:].any() and inputs.text[2, :3].any()  # "up" and the end


def test_latents_are_sampled_from_the_posterior_by_the_samples_own_generator():
    class Noisy(PixelAutoencoder):
        def encode(self, pixels):
            posterior = super().encode(pixels)
            posterior.sample = lambda generators: torch.stack(
                [
                    m + torch.randn(m.shape, generator=g)
                    for m, g in zip(posterior.moments, generators, strict=True)
                ]
            )
            return posterior

    task = make_task(latents="sample")
    task.autoencoder = Noisy(2)
    batch = make_batch(task)
    together = task.prepare(batch, RNG)
    alone = task.prepare(row(batch, 1), RNG)
    torch.testing.assert_close(together.target[1], alone.target[0])
    task.latents = "mode"
    assert not torch.allclose(task.prepare(batch, RNG).target, together.target)


def test_the_predictor_gets_its_timestep_in_float32_beside_bf16_latents():
    task = make_task(SmallPredictor().bfloat16())
    inputs = task.prepare(make_batch(task), RNG)
    assert inputs.given.latents.dtype == torch.float32
    loss = task.loss(inputs)
    (call,) = task.predictor.calls
    assert call["timestep"].dtype == torch.float32 and torch.equal(call["timestep"], inputs.given.timestep)
    assert call["latents"].dtype == call["text"].dtype == torch.bfloat16
    assert loss.total.dtype == torch.float32


def test_a_prediction_of_another_shape_is_a_readable_error():
    class Short(SmallPredictor):
        def forward(self, latents, timestep, text, text_mask):
            return super().forward(latents, timestep, text, text_mask)[:, :6]

    task = make_task(Short())
    wrong = r"forward returned \[3, 6, 2, 4, 4\] where \[3, 12, 2, 4, 4\] is needed"
    with pytest.raises(ContractError, match=wrong):
        task.loss(task.prepare(make_batch(task), RNG))


def test_the_loss_is_also_reported_by_noise_level():
    task = make_task()
    batch = make_batch(task, weights=(1.0, 0.5, 0.0))
    inputs = task.prepare(batch, RNG)
    loss = task.loss(inputs)
    assert loss.bins.shape == (2, 10) and not loss.bins.requires_grad
    expected = torch.zeros(2, 10)
    for i, key in enumerate(batch.keys):
        sigma = task.scheduler.sample_timesteps([rng_of(key)]).item() / 1000
        alone = task.loss(task.prepare(row(batch, i), RNG)).total.item()
        expected[:, int(sigma * 10)] += torch.tensor([alone, batch.sample_weights[i]])
    torch.testing.assert_close(loss.bins, expected)
    assert loss.bins[0].sum().item() == pytest.approx(loss.total.item(), rel=1e-6)
    assert (loss.bins[1] > 0).sum() == 2  # the samples lie in different bins


def rng_of(key: SampleKey) -> torch.Generator:
    return RNG.generator("timestep", *key)


def test_a_loss_that_is_not_finite_stays_in_its_bin():
    task = make_task()
    inputs = task.prepare(make_batch(task, weights=(1.0, 0.5, 1.0)), RNG)
    inputs.target[0] = float("nan")
    bins = task.loss(inputs).bins
    assert bins[0].isnan().sum() == 1 and bins[1].isfinite().all()


def test_the_declared_shares_are_those_of_the_training_timesteps():
    task = make_task(scheduler=FlowMatch(shift=3.0))
    assert task.bins.name == "sigma" and task.bins.edges == tuple(i / 10 for i in range(11))
    # sigma < x for a share u = x / (3 - 2x) of uniform draws: the inverse of s u / (1 + (s - 1) u)
    below = [i / 10 / (3 - 2 * i / 10) for i in range(11)]
    expected = [high - low for low, high in pairwise(below)]
    assert task.bins.declared == pytest.approx(expected, abs=3e-5)
    assert sum(task.bins.declared) == pytest.approx(1)


def test_a_micro_batch_counts_the_patches_that_the_predictor_sees():
    task = make_task()
    assert task.loss(task.prepare(make_batch(task), RNG)).tokens == 3 * (2 // 1) * (4 // 2) * (4 // 2)


# -- evaluation --------------------------------------------------------------------------------

QUANTILES = (0.1, 0.5, 0.9)


def test_evaluation_is_each_rows_loss_at_the_quantiles_of_the_training_timesteps():
    task = make_task(caption_dropout=1.0)
    batch = make_batch(task, first=5)
    found = task.evaluate(batch, RNG, QUANTILES)
    clean = PixelAutoencoder(2).encode(batch.pixels).mode().double()
    hidden, mask = task.text_encoder.encode(batch.text_ids, batch.text_mask)  # no caption is dropped
    noise = torch.stack(
        [RNG.normal(tuple(clean.shape[1:]), "validation noise", i) for i in (5, 6, 7)]
    ).double()
    predictor, losses = SmallPredictor().double(), []
    for quantile in QUANTILES:
        sigma = 3 * quantile / (1 + 2 * quantile)  # SD3, eq. 23
        noisy = (1 - sigma) * clean + sigma * noise
        timestep = torch.full((3,), 1000 * sigma, dtype=torch.float64)
        predicted = predictor(noisy, timestep, hidden.double() * mask[..., None], mask)
        losses.append((predicted - (noise - clean)).square().flatten(1).mean(1))
        torch.testing.assert_close(found.sums[f"loss_at/{quantile}"].double(), losses[-1], rtol=1e-5, atol=0)
        if quantile == 0.5:
            expected = (noisy - sigma * predicted).float()
            torch.testing.assert_close(found.outputs["estimate"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.sums["loss"].double(), torch.stack(losses).mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.outputs["clean"].double(), clean)
    assert found.weights.tolist() == [1.0, 1.0, 1.0] and len(task.predictor.calls) == len(QUANTILES)


def test_evaluation_is_the_same_each_time_and_for_each_row_alone():
    task = make_task(latents="sample")
    batch = make_batch(task)
    together = task.evaluate(batch, RNG, QUANTILES)
    later = task.evaluate(make_batch(task, epoch=3), RNG, QUANTILES)
    assert torch.equal(together.sums["loss"], later.sums["loss"])
    alone = [task.evaluate(row(batch, i), RNG, QUANTILES).sums["loss"] for i in range(3)]
    torch.testing.assert_close(torch.cat(alone), together.sums["loss"])
    assert not torch.equal(task.evaluate(batch, Randomness(8), QUANTILES).sums["loss"], together.sums["loss"])


def test_each_rows_evaluation_estimates_its_training_loss():
    """At many quantiles the mean is the expectation over the training timesteps."""
    task = make_task()
    batch = make_batch(task)
    quantiles = [(i + 0.5) / 40 for i in range(40)]
    expected = task.evaluate(batch, RNG, quantiles).sums["loss"].mean().item()
    drawn = [task.loss(task.prepare(make_batch(task, epoch=e), RNG)).total.item() / 3 for e in range(300)]
    assert sum(drawn) / len(drawn) == pytest.approx(expected, rel=0.05)


# -- sampling ----------------------------------------------------------------------------------


def test_sampling_is_guided_euler_from_the_noise_of_seed_and_clip():
    task = make_task()
    clips = task.sample(SampleRequest(("a red circle", "up"), seed=3))
    assert [clip.prompt for clip in clips] == ["a red circle", "up"] and clips[0].fps == 4.0
    scheduler, encoder = FlowMatch(shift=3.0), task.text_encoder
    for i, clip in enumerate(clips):
        prompt, nothing = (encoder.encode(*encoder.tokenizer()([text])) for text in (clip.prompt, ""))
        x = Randomness(3).normal((1, 12, 2, 4, 4), "sample", i)
        sigmas = scheduler.sigmas(3)
        for here, there in pairwise(sigmas):
            timestep = 1000 * here[None]
            with torch.no_grad():
                conditional = task.predictor(x, timestep, *prompt)
                unconditional = task.predictor(x, timestep, *nothing)
            x = x + (there - here) * (unconditional + 2.0 * (conditional - unconditional))
        expected = task.autoencoder.decode(x)[0].clamp(-1, 1)
        torch.testing.assert_close(clip.pixels, expected, rtol=1e-5, atol=1e-5)


def test_guidance_of_one_costs_one_forward_a_step_and_two_otherwise():
    task = make_task()
    plain = task.sample(SampleRequest(("up",), guidance=1.0))
    assert [len(call["latents"]) for call in task.predictor.calls] == [1, 1, 1]
    task.predictor.calls.clear()
    task.sample(SampleRequest(("up",), guidance=3.0))
    assert [len(call["latents"]) for call in task.predictor.calls] == [2, 2, 2]
    prompt_twice = task.sample(SampleRequest(("up",), guidance=3.0, negative_prompt="up"))
    torch.testing.assert_close(prompt_twice[0].pixels, plain[0].pixels)


def test_a_clip_does_not_depend_on_what_is_generated_with_it():
    task = make_task(sample=SampleConfig(num_frames=2, height=8, width=8, fps=4.0, steps=3, batch_size=2))
    many = task.sample(SampleRequest(("up", "up", "a blue square moves to the right"), seed=1))
    alone = task.sample(SampleRequest(("up",), seed=1))
    torch.testing.assert_close(many[0].pixels, alone[0].pixels, rtol=0, atol=1e-5)
    assert not torch.allclose(many[0].pixels, many[1].pixels)


def test_clips_are_numbered_from_the_requests_first():
    task = make_task()
    whole = task.sample(SampleRequest(("up", "a red circle", "up"), seed=1))
    rest = task.sample(SampleRequest(("a red circle", "up"), seed=1, first=1))
    for clip, wanted in zip(rest, whole[1:], strict=True):
        torch.testing.assert_close(clip.pixels, wanted.pixels, rtol=0, atol=1e-5)


def test_a_request_goes_before_the_tasks_own_defaults():
    task = make_task()
    (clip,) = task.sample(SampleRequest(("up",), steps=1, num_frames=4, height=4, width=12, fps=30))
    assert clip.pixels.shape == (3, 4, 4, 12) and clip.fps == 30 and len(task.predictor.calls) == 1
    assert clip.pixels.dtype == torch.float32 and clip.pixels.abs().max() <= 1


def test_what_is_set_nowhere_is_named():
    task = make_task(sample=SampleConfig(height=8))
    with pytest.raises(ContractError, match="not set: num_frames, width, fps") as caught:
        task.sample(SampleRequest(("up",)))
    assert "(mm sample: --num-frames N --width N --fps N) or under task.sample" in str(caught.value)


def test_no_steps_and_sizes_that_do_not_divide_are_readable_errors():
    task = make_task()
    with pytest.raises(ContractError, match="at least one step, not 0"):
        task.sample(SampleRequest(("up",), steps=0))
    with pytest.raises(ContractError, match="width 10 makes 5 latents") as caught:
        task.sample(SampleRequest(("up",), width=10))
    assert "8 or 12" in str(caught.value)


# -- checks ------------------------------------------------------------------------------------

FITTING = {"num_frames": 2, "height": 8, "width": 8}


def test_components_that_fit_pass_and_build_on_meta():
    with torch.device("meta"):
        task = TextToVideo(SmallPredictor(), PixelAutoencoder(2), ByteTextEncoder(8, 32), FlowMatch())
    task.check(FITTING)
    assert task.trainable == ("predictor",) and task.frozen == ("autoencoder", "text_encoder")


def test_all_mismatches_are_reported_at_once_with_what_would_fit():
    task = make_task(SmallPredictor(channels=16, text_dim=10))
    with pytest.raises(ContractError) as caught:
        task.check({"num_frames": 2, "height": 8, "width": 830})
    text = str(caught.value)
    assert "the task has 4 errors" in text
    assert "task.predictor.in_channels: in_channels is 16, but the autoencoder's latents have 12" in text
    assert "task.predictor.out_channels: out_channels is 16" in text
    assert "text_dim is 10, but the text encoder's hidden states are 8 wide" in text
    assert (
        "data.train.width: width 830 makes 415 latents, which do not divide into the predictor's patches of 2"
        in text
    )
    assert "828 or 832" in text


def test_sizes_that_the_autoencoder_refuses_are_reported_with_valid_ones_near():
    with pytest.raises(ContractError, match=r"width 9 \(nearest: 8, 10\)"):
        make_task().check({**FITTING, "width": 9})


def test_sizes_to_sample_are_checked_when_they_are_not_the_datas():
    task = make_task(sample=SampleConfig(height=10))
    with pytest.raises(ContractError, match=r"task\.sample\.height: height 10 makes 5 latents"):
        task.check(FITTING)


def test_a_text_encoder_whose_files_are_missing_does_not_stop_a_dry_run(tmp_path):
    task = make_task()
    task.text_encoder = HFTextEncoder(str(tmp_path / "nowhere"))
    task.check(FITTING)


def test_captions_longer_than_a_fixed_predictor_takes_are_a_mismatch():
    with pytest.raises(ContractError, match="max_length is 32, but the predictor takes 16 tokens"):
        make_task(SmallPredictor(text_padding=("fixed", 16))).check(FITTING)


class SmallAutoencoder(PixelAutoencoder):
    """Takes no more pixels than a few, and no clip that is higher than wide."""

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        if height * width > 128 or height > width:
            raise ContractError(f"a clip of {width}x{height} is too large or too high")
        return super().latent_shape(num_frames, height, width)


@pytest.mark.parametrize("sizes", [(16, 16), (12, 8), (64, 8), (8, 4096)])
def test_sizes_that_are_refused_together_get_no_empty_list_of_others(sizes):
    autoencoder = SmallAutoencoder(2)
    task = TextToVideo(SmallPredictor(), autoencoder, ByteTextEncoder(8, 32), FlowMatch())
    with pytest.raises(ContractError, match="too large or too high") as caught:
        task.check({"num_frames": 2, "height": sizes[0], "width": sizes[1]})
    for line in str(caught.value).splitlines():
        assert not line.rstrip().endswith((":", ",")) and ": ," not in line and line == line.rstrip()


@pytest.mark.parametrize("size", [0, -1, -8, -100])
def test_a_size_below_one_is_answered_with_the_least_that_fits(size):
    with pytest.raises(ContractError, match=rf"width {size} \(nearest: 2\)") as caught:
        make_task().check({**FITTING, "width": size})
    assert "width 4" in str(caught.value), "a hint with sizes that divide into patches"


def test_a_name_that_is_no_module_of_the_task_is_refused_in_the_plan(tiny, monkeypatch):
    monkeypatch.setattr(TextToVideo, "trainable", ("predictor", "head"))
    with pytest.raises(ContractError) as fault:
        build_task(load_config(tiny))
    text = str(fault.value)
    assert re.match(r"task, .*task\.py, line \d+: `trainable` names 'head', which is not a module of", text)
    assert text.endswith("accepted: predictor, autoencoder, text_encoder")


class Counting(SmallPredictor):
    """Notes the lengths of captions."""

    def forward(self, latents, timestep, text, text_mask, text_lengths=None):
        self.lengths = text_lengths
        return super().forward(latents, timestep, text, text_mask)


def test_a_forward_that_names_the_lengths_of_captions_gets_them_as_numbers():
    task = make_task(Counting(), caption_dropout=0.5)
    task.check({"num_frames": 2, "height": 8, "width": 8})
    for epoch in range(3):
        inputs = task.prepare(make_batch(task, epoch=epoch), RNG)
        task.loss(inputs)
        assert task.predictor.lengths == inputs.text_mask.sum(1).tolist()
    list(task.clips(SampleRequest(prompts=("abc",), guidance=1.0)))
    assert task.predictor.lengths == [task.captions.encoded_texts(["abc"], CPU, {})[1].sum().item()]


class Strings(ByteTextEncoder):
    """The encoder of bytes, given captions: a library's own code tokenizes them."""

    def tokenizer(self):
        raise AssertionError("never called")

    def encode(self, ids, mask):
        raise AssertionError("never called")

    def encode_captions(self, captions, device):
        tokens = ByteTextEncoder.tokenizer(self)(captions)
        return ByteTextEncoder.encode(self, *(each.to(device) for each in tokens))


def test_an_encoder_that_is_given_captions_trains_caches_and_samples_as_one_of_tokens():
    ours, other = (make_task(caption_dropout=0.5) for _ in range(2))
    strings = Strings(8, 32)
    strings.load(torch.device("cpu"))
    ours.text_encoder = ours.captions.encoder = strings
    found, wanted = (task.prepare(make_batch(task), RNG) for task in (ours, other))
    assert torch.equal(found.text, wanted.text) and torch.equal(found.text_mask, wanted.text_mask)
    assert not torch.equal(found.text[0], found.text[1])
    (clip,), (same,) = (task.sample(SampleRequest(prompts=("a b",))) for task in (ours, other))
    assert torch.equal(clip.pixels, same.pixels)
    stored, theirs = (task.features("text states", ["a", ""]) for task in (ours, other))
    assert all(torch.equal(a["states"], b["states"]) for a, b in zip(stored, theirs, strict=True))
