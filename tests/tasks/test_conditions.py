"""Conditions of text_to_video: what encoders and clips give reaches the forward by name."""

from __future__ import annotations

import inspect
import re
from typing import ClassVar

import pytest
import torch
from torch import nn

from mm_core.builtin.configs.text_to_video import SampleConfig
from mm_core.contracts import FeatureBatch, Randomness, SampleRequest
from mm_core.data.cache.samples import stacked
from mm_core.diffusion.encoders.text import ByteTextEncoder
from mm_core.errors import ContractError
from mm_core.modules.casting import cast_inputs
from support.text_to_video import CAPTIONS, CPU, RNG, SmallPredictor, make_batch, make_task

SPEC = {"num_frames": 2, "height": 8, "width": 8}
NEW_REQUEST = SampleRequest(prompts=("a", "a red circle"), negative_prompt="blue")


class PooledEncoder(ByteTextEncoder):
    """The mean of the real tokens' states, and the lengths of the captions as a second, integer condition."""

    condition_shapes: ClassVar = {"pooled": (8,), "lengths": (None,)}

    def encode(self, ids, mask):
        hidden, mask = super().encode(ids, mask)
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return hidden, mask, {"pooled": pooled, "lengths": mask.sum(1, keepdim=True)}


class Conditioned(SmallPredictor):
    """Records what it gets; `fps` and `size` are optional, `pooled` is needed."""

    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        self.given = []

    def forward(self, latents, timestep, text, text_mask, *, pooled, fps=None, size=None):
        self.given.append({"pooled": pooled, "fps": fps, "size": size})
        return super().forward(latents, timestep, text, text_mask) + pooled.mean(1)[:, None, None, None, None]


def conditioned_task(predictor=None, encoder=None, **fields):
    task = make_task(predictor or Conditioned(), **fields)
    task.text_encoder = PooledEncoder(8, 32) if encoder is None else encoder
    task.text_encoder.load(CPU)
    task.captions.encoder = task.text_encoder
    return task


def pooled_of(task, captions):
    rows = [
        task.text_encoder.encode(*task.text_encoder.tokenizer()([text]))[2]["pooled"] for text in captions
    ]
    return torch.cat(rows)


def fault_of(task):
    with pytest.raises(ContractError) as fault:
        task.check(SPEC)
    return text_of(fault)


def text_of(fault):
    """The error message without the places of components."""
    return re.sub(r"(?m)^(task\.\w+), /.*\.py, line \d+: ", r"\1: ", str(fault.value))


def test_what_the_text_encoder_returns_beside_the_text_reaches_the_forward_by_name():
    task = conditioned_task()
    task.check(SPEC)
    inputs = task.prepare(make_batch(task), RNG)
    assert set(inputs.given.conditions) == {
        "pooled",
        "size",
    }  # no frame rate in this batch; lengths not taken
    torch.testing.assert_close(inputs.given.conditions["pooled"], pooled_of(task, CAPTIONS))
    with_text = task.loss(inputs).total.item()
    inputs.given.conditions["pooled"].zero_()
    assert task.loss(inputs).total.item() != with_text


def test_dropped_captions_and_the_negative_prompt_have_conditions_of_their_own():
    task = conditioned_task(caption_dropout=1.0)
    found = task.prepare(make_batch(task), RNG).given.conditions["pooled"]
    torch.testing.assert_close(found, pooled_of(task, ["", "", ""]))
    task.sample(NEW_REQUEST)
    torch.testing.assert_close(
        task.predictor.given[-1]["pooled"], pooled_of(task, ["a", "a red circle", "blue", "blue"])
    )
    task.evaluate(make_batch(task), RNG, (0.5,))  # captions are never dropped here
    torch.testing.assert_close(task.predictor.given[-1]["pooled"], pooled_of(task, CAPTIONS))


def test_without_guidance_only_the_prompts_conditions_are_passed():
    task = conditioned_task()
    task.sample(SampleRequest(prompts=NEW_REQUEST.prompts, guidance=1.0))
    torch.testing.assert_close(task.predictor.given[-1]["pooled"], pooled_of(task, NEW_REQUEST.prompts))


def test_integers_and_masks_stay_what_they_are_and_floats_take_the_weights_dtype():
    class Lengths(SmallPredictor):
        def forward(self, latents, timestep, text, text_mask, lengths, pooled, size):
            self.dtypes = lengths.dtype, pooled.dtype, size.dtype
            return super().forward(latents, timestep, text, text_mask)

    task = conditioned_task(Lengths().to(torch.bfloat16))
    task.loss(task.prepare(make_batch(task), RNG))
    assert task.predictor.dtypes == (torch.int64, torch.bfloat16, torch.float32)


def test_a_text_condition_that_is_not_taken_is_a_note_and_is_not_passed():
    task = conditioned_task()
    note = "task.text_encoder: `lengths` is not used: the predictor's forward does not name it"
    assert task.notes() == [note]
    assert make_task().notes() == []


def test_a_condition_that_nothing_gives_is_one_error_in_the_plan():
    class Needs(SmallPredictor):
        def forward(self, latents, timestep, text, text_mask, poled):
            return latents

    assert fault_of(conditioned_task(Needs())) == (
        "task.predictor: the predictor's forward needs `poled`, which nothing gives\n"
        "  accepted: fps, guidance, lengths, pooled, size, or a parameter with a default\n"
        "  hint: did you mean 'pooled'?"
    )
    assert fault_of(make_task(Conditioned())) == (
        "task.predictor: the predictor's forward needs `pooled`, which nothing gives\n"
        "  accepted: fps, guidance, size, or a parameter with a default\n"
        "  hint: use a text encoder that returns `pooled`, or give it a default"
    )


def test_declared_conditions_are_compared_with_what_is_given():
    def declaring(**shapes):
        predictor = Conditioned()
        predictor.condition_shapes = shapes
        return conditioned_task(predictor)

    declaring(pooled=(8,)).check(SPEC)
    declaring(pooled=(None,), size=(2,)).check(SPEC)
    assert fault_of(declaring(pooled=(16,))) == (
        "task.predictor: the predictor takes `pooled` [B, 16], but the text encoder gives [B, 8]\n"
        "  accepted: [B, 8]"
    )
    assert fault_of(declaring(pooled=(8,), size=())) == (
        "task.predictor: the predictor takes `size` [B], but the task gives [B, 2]\n  accepted: [B, 2]"
    )
    assert fault_of(declaring(pooled=(8,), sise=(2,))) == (
        "the task has 2 errors:\n"
        "task.predictor: condition_shapes names `sise`, but the predictor's forward does not\n"
        "  accepted: fps, pooled, size\n"
        "  hint: did you mean 'size'?\n"
        "task.predictor: the predictor's forward needs `sise`, which nothing gives\n"
        "  accepted: fps, guidance, lengths, pooled, size, or a parameter with a default\n"
        "  hint: did you mean 'size'?"
    )


def test_a_predictor_takes_exactly_the_conditions_that_it_declares_and_they_may_be_open():
    class Open(SmallPredictor):
        condition_shapes: ClassVar = {"pooled": (8,)}

        def forward(self, latents, timestep, text, text_mask, size=None, **conditions):
            self.found = size, set(conditions)
            return super().forward(latents, timestep, text, text_mask)

    task = conditioned_task(Open())
    task.check(SPEC)
    task.loss(task.prepare(make_batch(task), RNG))
    assert task.predictor.found == (None, {"pooled"})
    assert "needs `pooled`" in fault_of(make_task(Open()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda given: {},
            "encode returned no condition, but condition_shapes declares `pooled`, `lengths`\n"
            "  hint: declare in `condition_shapes` exactly what the third value of encode contains",
        ),
        (
            lambda given: {**given, "pooled": given["pooled"][:1]},
            "encode returned `pooled` of shape [1, 8] for 3 captions\n  accepted: [B, 8]",
        ),
        (
            lambda given: {**given, "pooled": given["pooled"][:, :4]},
            "encode returned `pooled` of shape [3, 4] for 3 captions\n  accepted: [B, 8]",
        ),
    ],
)
def test_what_a_text_encoder_returns_is_held_against_what_it_declares(change, text):
    class Odd(PooledEncoder):
        def encode(self, ids, mask):
            hidden, mask, given = super().encode(ids, mask)
            return hidden, mask, change(given)

    task = conditioned_task(encoder=Odd(8, 32))
    with pytest.raises(ContractError) as fault:
        task.prepare(make_batch(task), RNG)
    line = inspect.getsourcelines(Odd.encode)[1]
    assert str(fault.value) == f"task.text_encoder, {__file__}, line {line}: {text}"


def test_a_text_encoder_cannot_give_what_the_task_gives():
    class Sized(PooledEncoder):
        condition_shapes: ClassVar = {"pooled": (8,), "size": (2,)}

    assert fault_of(conditioned_task(encoder=Sized(8, 32))) == (
        "task.text_encoder: the text encoder's condition_shapes names `size`, which the task itself gives\n"
        "  hint: give this condition another name in encode and in condition_shapes"
    )


def test_frame_rate_and_size_reach_the_forward_in_training_evaluation_and_sampling():
    task = conditioned_task()
    batch = make_batch(task)
    batch.fps = torch.tensor([23.976, 24.0, 30.0])
    task.loss(task.prepare(batch, RNG))
    task.evaluate(batch, RNG, (0.5,))
    for given in task.predictor.given:
        torch.testing.assert_close(given["fps"], batch.fps)
        assert given["size"].tolist() == [[8.0, 8.0]] * 3
    task.sample(SampleRequest(prompts=("a",), fps=12.5, height=12, width=16))
    assert task.predictor.given[-1]["fps"].tolist() == [12.5, 12.5]  # prompt and negative prompt
    assert task.predictor.given[-1]["size"].tolist() == [[12.0, 16.0]] * 2


def test_a_needed_frame_rate_that_the_batch_lacks_is_one_error():
    class Rated(SmallPredictor):
        def forward(self, latents, timestep, text, text_mask, fps):
            return super().forward(latents, timestep, text, text_mask)

    task = make_task(Rated())
    task.check(SPEC)  # the dataset is not read for the plan
    with pytest.raises(ContractError) as fault:
        task.loss(task.prepare(make_batch(task), RNG))
    assert text_of(fault) == (
        "task.predictor: the predictor's forward needs `fps`, but the batch has no frame rate\n"
        "  hint: set `fps` [B] of the VideoTextBatch in the dataset's collate, or give `fps` a default"
    )


def test_lowered_precision_leaves_frame_rates_and_sizes_exact():
    class Rates(nn.Module):
        def forward(self, text, fps, size):
            return text.dtype, fps.item(), size.tolist()

    module = Rates()
    cast_inputs(module, torch.bfloat16)
    found = module(torch.ones(1), fps=torch.tensor([23.976]), size=torch.tensor([[481.0, 854.0]]))
    assert found == (torch.bfloat16, pytest.approx(23.976, rel=1e-6), [[481.0, 854.0]])


class Distilled(SmallPredictor):
    """Embedded guidance: the scale pushes the output, and all calls are recorded."""

    def forward(self, latents, timestep, text, text_mask, guidance):
        found = super().forward(latents, timestep, text, text_mask)
        self.calls[-1]["guidance"] = guidance.tolist()
        return found + 0.01 * guidance[:, None, None, None, None].to(found)


def test_embedded_guidance_is_the_requests_scale_in_one_pass():
    task = make_task(Distilled())
    task.check(SPEC)
    low, high = (task.sample(SampleRequest(prompts=("a", "up"), guidance=scale)) for scale in (0.5, 3.5))
    assert [call["guidance"] for call in task.predictor.calls] == [[0.5] * 2] * 3 + [[3.5] * 2] * 3
    assert not torch.equal(low[0].pixels, high[0].pixels)
    task.sample(SampleRequest(prompts=("a",)))
    assert task.predictor.calls[-1]["guidance"] == [2.0]  # task.sample.guidance


def test_embedded_guidance_and_an_unconditional_pass_of_its_own_scale():
    sizes = {"num_frames": 2, "height": 8, "width": 8, "fps": 4.0, "steps": 1, "guidance": 3.5}
    request = SampleRequest(prompts=("a red circle",), negative_prompt="blue")
    task = make_task(Distilled(), sample=SampleConfig(**sizes, true_guidance=4.0))
    (found,) = task.sample(request)
    assert [call["guidance"] for call in task.predictor.calls] == [[3.5, 3.5]]
    # One Euler step from noise: x - v, where v is guided; both passes get the same embedded scale.
    noise = Randomness(0).normal((12, 2, 4, 4), "sample", 0)[None]
    outputs = []
    for prompt in ("a red circle", "blue"):
        text, mask = task.text_encoder.encode(*task.text_encoder.tokenizer()([prompt]))
        outputs.append(task.predictor(noise, torch.tensor([1000.0]), text, mask, torch.tensor([3.5])))
    velocity = outputs[1] + 4.0 * (outputs[0] - outputs[1])
    wanted = task.autoencoder.decode(noise - velocity)[0].clamp(-1, 1)
    torch.testing.assert_close(found.pixels, wanted.detach(), rtol=1e-5, atol=1e-5)


def test_training_and_evaluation_take_the_configured_guidance():
    for configured, expected in ((None, 1.0), (3.5, 3.5)):
        task = make_task(Distilled(), train_guidance=configured)
        task.check(SPEC)
        task.loss(task.prepare(make_batch(task), RNG))
        task.evaluate(make_batch(task), RNG, (0.5,))
        assert [call["guidance"] for call in task.predictor.calls] == [[expected] * 3] * 2


def test_a_negative_prompt_that_nothing_would_use_is_refused():
    request = SampleRequest(prompts=("a",), negative_prompt="blue")
    with pytest.raises(ContractError) as fault:
        make_task(Distilled()).check_request(request)
    assert str(fault.value) == (
        "negative_prompt: the request has a negative prompt, but embedded guidance makes one pass only\n"
        "  hint: set task.sample.true_guidance above 1, or remove the negative prompt"
    )
    make_task().check_request(request)


def test_settings_of_embedded_guidance_need_a_predictor_that_takes_it():
    sample = SampleConfig(num_frames=2, height=8, width=8, true_guidance=4.0)
    assert fault_of(make_task(train_guidance=3.5, sample=sample)) == (
        "the task has 2 errors:\n"
        "task.train_guidance: train_guidance is 3.5, but the predictor takes no `guidance`\n"
        "  hint: remove it: task.sample.guidance is the scale of classifier-free guidance\n"
        "task.sample.true_guidance: true_guidance is 4, but the predictor takes no `guidance`\n"
        "  hint: remove it: task.sample.guidance is the scale of classifier-free guidance"
    )


def test_clips_longer_than_a_predictor_takes_are_one_error_in_the_plan():
    predictor = SmallPredictor()
    predictor.max_frames = 1
    sample = SampleConfig(num_frames=1, height=8, width=8)
    assert fault_of(make_task(predictor, sample=sample)) == (
        "data.train.num_frames: num_frames 2 makes 2 latent frames, but the predictor takes 1 at most\n"
        "  accepted: 1, for a model of images"
    )
    make_task(predictor, sample=sample).check({**SPEC, "num_frames": 1})
    with pytest.raises(
        ContractError, match=r"^clip to sample\.num_frames: num_frames 2 makes 2 latent frames"
    ):
        make_task(predictor).check_request(SampleRequest(prompts=("a",)))


def test_whole_numbers_of_the_text_encoder_are_those_of_the_batch_in_the_cache_too():
    class Counted(SmallPredictor):
        def forward(self, latents, timestep, text, text_mask, *, count, letters):
            self.given = count, letters
            return super().forward(latents, timestep, text, text_mask)

    class Counting(ByteTextEncoder):
        condition_shapes: ClassVar = {"count": (), "letters": (None,)}

        def encode(self, ids, mask):
            return *super().encode(ids, mask), {"count": mask.sum(1), "letters": ids * mask}

    task = conditioned_task(Counted(), Counting(8, 32), caption_dropout=0.5)
    batch = make_batch(task)
    rows = [{} for _ in batch.captions]
    for part in task.cache_parts():
        for number, row in enumerate(rows):  # each alone, so that lengths differ
            given = [batch.captions[number]] if part.of == "text" else batch
            row[part.name] = task.features(part.name, given)[0 if part.of == "text" else number]
    (empty,) = task.features("text states", [""])
    texts = {"": stacked([{"text states": empty}])}
    cached = FeatureBatch(batch.keys, batch.sample_weights, batch.ids, stacked(rows), texts)
    found = []
    for each in (batch, cached):
        task.loss(task.prepare(each, RNG))
        found.append(task.predictor.given)
    assert all(map(torch.equal, *found)) and found[0][0].dtype == found[0][1].dtype == torch.int64
