"""A component that returns another shape than its contract is named, with both shapes."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from mm_core.contracts import SampleRequest
from mm_core.diffusion.encoders.pixel import PixelAutoencoder
from mm_core.diffusion.encoders.text import ByteTextEncoder
from mm_core.diffusion.flow_match import FlowMatch
from mm_core.errors import ContractError
from support.text_to_video import RNG, SmallPredictor, make_batch, make_task

SPEC = {"num_frames": 2, "height": 8, "width": 8}


class NoBroadcast(FlowMatch):
    """Factors [B] where [B,1,1,1,1] is needed: of 100,000 timesteps they make 100,000 x 100,000 numbers."""

    def add_noise(self, latents, noise, timestep):
        sigma = timestep / 1000
        return (1 - sigma) * latents + sigma * noise


class Wrong(FlowMatch):
    def __init__(self, name, change):
        super().__init__()
        found = getattr(super(), name)
        setattr(self, name, lambda *given: change(found(*given)))


def text_of(fault):
    """The error message without the place of the component, which is this file."""
    text, places = re.subn(rf", {re.escape(__file__)}, line \d+: ", ": ", str(fault.value))
    assert places == 1
    return text


HINT = "\n  hint: reshape factors that depend on the timestep (sigma, alpha) to [B, 1, 1, 1, 1]"
FULL = f"[3, 12, 2, 5, 7] is needed{HINT}"


def test_a_scheduler_that_does_not_broadcast_is_named_before_anything_is_allocated():
    task = make_task(scheduler=NoBroadcast())
    with pytest.raises(ContractError) as fault:
        task.check(SPEC)
    assert text_of(fault).startswith(
        "task.scheduler: add_noise fails for timesteps of shape [3] and latents of shape [3, 12, 2, 5, 7]: "
        "The size of"
    )
    assert str(fault.value).endswith(HINT)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("sample_timesteps", lambda t: t[:, None], "sample_timesteps returned [3, 1] where [3] is needed"),
        ("timestep_quantile", lambda t: t[:1], "timestep_quantile returned [1] where [3] is needed"),
        ("add_noise", lambda t: t[0], f"add_noise returned [12, 2, 5, 7] where {FULL}"),
        ("target", lambda t: t[:, :4], f"target returned [3, 4, 2, 5, 7] where {FULL}"),
        ("loss_weight", lambda t: t[:, None], "loss_weight returned [3, 1] where [3] is needed"),
        ("model_timestep", lambda t: t.sum(), "model_timestep returned [] where [3] is needed"),
    ],
)  # fmt: skip
def test_each_answer_of_a_scheduler_is_checked_in_the_plan(name, change, text):
    with pytest.raises(ContractError) as fault:
        make_task(scheduler=Wrong(name, change)).check(SPEC)
    assert text_of(fault) == f"task.scheduler: {text}"


def test_a_scheduler_that_fits_passes():
    make_task().check(SPEC)


def test_an_autoencoder_is_checked_where_it_encodes_and_where_it_decodes():
    class Flat(PixelAutoencoder):
        def encode(self, pixels):
            flat = super().encode(pixels).mode()[:, :, 0]
            return SimpleNamespace(mode=lambda: flat, moments=flat)

        def decode(self, latents):
            return super().decode(latents)[:, :, :1]

    task = make_task()
    task.autoencoder = Flat(2)
    where = r"^task\.autoencoder, .*: encode returned \[3, 12, 4, 4\] where \[3, 12, 2, 4, 4\] is needed$"
    batch = make_batch(task)
    with pytest.raises(ContractError, match=where):
        task.prepare(batch, RNG)
    with pytest.raises(ContractError, match=where):
        task.evaluate(batch, RNG, (0.5,))
    with pytest.raises(ContractError, match=r"decode returned \[1, 3, 1, 8, 8\] where \[1, 3, 2, 8, 8\] is"):
        task.sample(SampleRequest(prompts=("a",)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda h, m: (h[0], m), "encode returned [{L}, 8] where hidden states [3, L, D] is needed"),
        (lambda h, m: (h, m[:, 1:]), "the mask of encode returned [3, {S}] where [3, {L}] is needed"),
        (lambda h, m: (h[:1], m[:1]), "encode returned [1, {L}, 8] where hidden states [3, L, D] is needed"),
    ],
)
def test_a_text_encoder_is_checked_where_it_encodes(change, text):
    class Odd(ByteTextEncoder):
        def encode(self, ids, mask):
            return change(*super().encode(ids, mask))

    task = make_task()
    batch = make_batch(task)
    encoder = Odd(8, 32)
    encoder.load(torch.device("cpu"))
    task.captions.encoder = encoder
    length = batch.text_ids.shape[1]
    with pytest.raises(ContractError) as fault:
        task.prepare(batch, RNG)
    assert text_of(fault) == "task.text_encoder: " + text.format(L=length, S=length - 1)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_predictor_and_a_solver_are_checked_where_they_sample(guidance):
    class Short(SmallPredictor):
        def forward(self, latents, timestep, text, text_mask):
            return super().forward(latents, timestep, text, text_mask)[:, :, :1]

    rows = 2 if guidance > 1 else 1
    request = SampleRequest(prompts=("a",), guidance=guidance)
    with pytest.raises(ContractError) as fault:
        make_task(predictor=Short()).sample(request)
    assert text_of(fault) == (
        f"task.predictor: forward returned [{rows}, 12, 1, 4, 4] where [{rows}, 12, 2, 4, 4] is needed"
    )
    with pytest.raises(ContractError, match=r"^task\.scheduler, .*: integrate returned \[1, 12, 4, 4\]"):
        make_task(scheduler=Wrong("integrate", lambda t: t[:, :, 0])).sample(request)


def test_a_clip_size_without_a_fitting_one_beside_it_has_no_empty_hint():
    class Never(PixelAutoencoder):
        def latent_shape(self, num_frames, height, width):
            if (num_frames, height, width) == (2, 8, 8):
                raise ContractError("2 frames of 8 x 8 are too many at once", accepted="smaller clips")
            return super().latent_shape(num_frames, height, width)

    task = make_task()
    task.autoencoder = Never(2)
    with pytest.raises(ContractError) as fault:
        task.check(SPEC)
    assert str(fault.value) == "data.train: 2 frames of 8 x 8 are too many at once\n  accepted: smaller clips"


def test_what_is_no_tensor_at_all_is_named():
    class Silent(PixelAutoencoder):
        def encode(self, pixels):
            """It forgets to return."""

    class Mute(ByteTextEncoder):
        def encode(self, ids, mask):
            """It forgets to return."""

    task = make_task()
    batch = make_batch(task)
    task.autoencoder, kept = Silent(2), task.autoencoder
    with pytest.raises(ContractError) as fault:
        task.prepare(batch, RNG)
    assert text_of(fault).startswith("task.autoencoder: encode returned a NoneType\n  accepted: an mm_core.")
    task.autoencoder, task.captions.encoder = kept, Mute(8, 32)
    with pytest.raises(ContractError) as fault:
        task.prepare(batch, RNG)
    assert text_of(fault).startswith(
        "task.text_encoder: encode returned a NoneType\n  accepted: (hidden[B,L,D]"
    )


def test_a_mask_of_another_dtype_is_named():
    class Counted(ByteTextEncoder):
        def encode(self, ids, mask):
            hidden, mask = super().encode(ids, mask)
            return hidden, mask.long()

    task = make_task()
    task.captions.encoder = Counted(8, 32)
    task.captions.encoder.load(torch.device("cpu"))
    with pytest.raises(ContractError) as fault:
        task.prepare(make_batch(task), RNG)
    assert text_of(fault) == (
        "task.text_encoder: encode returned a tensor of torch.int64\n"
        "  accepted: a bool mask, false for padding"
    )


def test_a_shift_by_tokens_is_checked_in_the_plan():
    with pytest.raises(ContractError) as fault:
        make_task(scheduler=Wrong("for_tokens", lambda found: None)).check(SPEC)
    assert text_of(fault).startswith(
        "task.scheduler: for_tokens(70) returned a NoneType\n  accepted: a noise"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda ids, mask: (ids[:2], mask),
            "`ids` of the tokenizer returned [2, {L}] where [3, ...] is needed",
        ),
        (
            lambda ids, mask: {"ids": ids, "mask": mask.tolist()},
            "`mask` of the tokenizer returned a list where",
        ),
        (lambda ids, mask: [ids, mask], "the tokenizer returned a list"),
        (lambda ids, mask: {}, "the tokenizer returned a dict"),
    ],
)
def test_a_tokenizer_is_checked_where_it_is_called(change, text):
    class Odd(ByteTextEncoder):
        def tokenizer(self):
            own = super().tokenizer()
            return lambda captions: change(*own(captions))

    task = make_task()
    length = make_batch(task).text_ids.shape[1]
    task.text_encoder = Odd(8, 32)
    with pytest.raises(ContractError) as fault:
        task.batch_transform()(make_batch())
    assert text_of(fault).startswith(f"task.text_encoder: {text}".replace("{L}", str(length)))
