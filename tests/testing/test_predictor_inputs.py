"""The kit's inputs of a predictor: one frame for models of images, and the conditions that it takes."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from torch import nn

from mm_core.contracts import Input, PredictorInputs
from mm_core.errors import ContractError
from mm_core.testing import PredictorProbe, check_predictor
from mm_core.testing.kit import NotApplicable
from mm_core.testing.predictors.given import given_inputs


class Silent(nn.Module):
    """A network of images that does not declare it: each patch, plus embeddings of the text and the time."""

    patch_size = (1, 2, 2)
    text_padding = "masked"
    in_channels = out_channels = 4
    text_dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, 16, 2, 2)
        self.text = nn.Linear(8, 16)
        self.time = nn.Linear(2, 16)
        self.out = nn.ConvTranspose2d(16, 4, 2, 2)

    def init_weights(self) -> None:
        for layer in (self.patch, self.text, self.time, self.out):
            nn.init.normal_(layer.weight, std=0.2)
            nn.init.zeros_(layer.bias)

    def forward(self, latents, timestep, text, text_mask):
        (image,) = latents.unbind(2)  # fails for clips
        real = text_mask[..., None].to(text)
        mean = (text.masked_fill(~text_mask[..., None], 0)).sum(1) / real.sum(1).clamp(min=1)
        waves = torch.stack([timestep.sin(), timestep.cos()], 1).to(self.time.weight.dtype)
        pushed = self.text(mean) + self.time(waves)
        hidden = torch.tanh(self.patch(image) + pushed[..., None, None])
        return self.out(hidden)[:, :, None].clone()


class ImageModel(Silent):
    max_frames = 1


class Conditioned(ImageModel):
    """Takes a pooled vector, the size, embedded guidance and, optionally, something unknown."""

    condition_shapes = MappingProxyType({"pooled": (8,), "size": (2,), "guidance": ()})

    def forward(self, latents, timestep, text, text_mask, pooled, guidance, size, other=None):
        assert other is None and pooled.dtype == text.dtype
        assert guidance.dtype == size.dtype == torch.float32
        text = (
            text
            + pooled[:, None]
            + guidance[:, None, None].to(text)
            + 1e-3 * size.sum(1)[:, None, None].to(text)
        )
        return super().forward(latents, timestep, text, text_mask)


class Pooled(ImageModel):
    def forward(self, latents, timestep, text, text_mask, pooled, lengths=None):
        text = text + pooled[:, None]
        return super().forward(latents, timestep, text, text_mask)


def test_a_model_of_images_passes_without_given_patches():
    with pytest.raises(ContractError, match="1 of 26 checks:\nsharded_training: the component cannot be"):
        check_predictor(lambda: ImageModel(), ranks=True)
    assert PredictorProbe(ImageModel).inputs(ImageModel())["latents"].shape == (2, 4, 1, 6, 4)


def test_a_model_that_fails_for_clips_and_works_for_one_frame_has_a_hint_what_to_declare():
    with pytest.raises(ContractError) as fault:
        check_predictor(Silent)
    assert (
        "output: predictor made by Silent: the predictor takes 1 latent frame, but not 2: "
        "ValueError: too many values to unpack" in str(fault.value)
    )
    assert "hint: correct its forward, or set max_frames = 1 in its class if it takes no clips" in str(
        fault.value
    )


def test_declared_conditions_are_given_and_their_precision_is_that_of_training():
    check_predictor(Conditioned)
    inputs = PredictorProbe(Conditioned).inputs(Conditioned(), batch=3)
    assert {name: tuple(inputs[name].shape) for name in ("pooled", "size", "guidance")} == {
        "pooled": (3, 8),
        "size": (3, 2),
        "guidance": (3,),
    }


def test_conditions_that_are_not_declared_come_from_the_argument():
    check_predictor(Pooled, conditions={"pooled": (8,)})
    lengths = torch.arange(3)[None]
    probe = PredictorProbe(Pooled, conditions={"pooled": (8,), "lengths": lengths[0]})
    assert torch.equal(probe.inputs(Pooled())["lengths"], lengths.expand(2, 3))
    with pytest.raises(ContractError) as fault:
        PredictorProbe(Pooled).inputs(Pooled())
    assert str(fault.value) == (
        "predictor made by Pooled: the predictor's forward needs `pooled`, whose shape is not known\n"
        "  accepted: a shape in the predictor's `condition_shapes`, such as {'pooled': (768,)}\n"
        "  hint: declare it, or call check_predictor with conditions={'pooled': (768,)}"
    )


def test_a_declared_condition_that_the_forward_does_not_name_fails_the_attributes():
    class Misspelt(Pooled):
        condition_shapes = MappingProxyType({"pooled": (8,), "poled": (8,)})

    with pytest.raises(ContractError, match=r"attributes: .*: condition_shapes names `poled`, but the"):
        check_predictor(Misspelt)


class References(ImageModel):
    """Takes a number, and up to two references, whose mean is added to the latents."""

    inputs = (Input("strength"), Input("references", encoder="autoencoder", most=2))

    def with_inputs(self, latents, timestep, given):
        return PredictorInputs(latents, timestep, given)

    def forward(self, latents, timestep, text, text_mask, strength, references, references_sizes):
        areas = references_sizes.prod(-1).clamp(min=1)[..., None]
        means = (references.sum((3, 4, 5)) / areas).to(latents).sum(1)
        latents = latents + (means * strength[:, None].to(latents))[..., None, None, None]
        return super().forward(latents, timestep, text, text_mask)


class Unsized(References):
    def forward(self, latents, timestep, text, text_mask, strength, references, references_sizes):
        means = references.mean((1, 3, 4, 5)).to(latents) * strength[:, None].to(latents)
        return Silent.forward(self, latents + means[..., None, None, None], timestep, text, text_mask)


class Deaf(References):
    def with_inputs(self, latents, timestep, given):
        ones = torch.ones_like(given["strength"])
        return PredictorInputs(latents, timestep, {**given, "strength": ones})


class Inside(References):
    def with_inputs(self, latents, timestep, given):
        scale = self.out.bias.sum().detach() + 1
        return PredictorInputs(latents * scale, timestep, given)


class InPlace(References):
    def with_inputs(self, latents, timestep, given):
        return PredictorInputs(latents.add_(1), timestep, given)


class Counting(References):
    calls = 0

    def with_inputs(self, latents, timestep, given):
        self.calls += 1
        return PredictorInputs(latents + self.calls, timestep, given)


def test_a_predictor_with_a_table_of_inputs_passes():
    check_predictor(References)


@pytest.mark.parametrize(
    ("faulty", "sentence"),
    [
        (Unsized, "zeros behind the pictures of `references` change the prediction"),
        (Deaf, "the input `strength` does not change the prediction"),
        (Inside, "with_inputs reads parameters of the predictor"),
        (InPlace, "with_inputs changes its arguments"),
        (Counting, "with_inputs returns other inputs for the same arguments"),
    ],
)
def test_faults_of_with_inputs_are_found(faulty, sentence):
    with pytest.raises(ContractError) as fault:
        given_inputs(PredictorProbe(faulty))
    assert sentence in str(fault.value)


def folded(fields, size):
    """A mask of the clip in the latents' size of an autoencoder with strides (4,8,8), times a number."""
    mask = (fields["mask"][:, :1, ::4] > 0).float() * fields["weight"].view(-1, 1, 1, 1, 1)
    batch, _, frames, height, width = mask.shape
    return mask.view(batch, frames, height // 8, 8, width // 8, 8).permute(0, 3, 5, 1, 2, 4).flatten(1, 2)


class Masked(Silent):
    """Takes a folded mask, a number that is made of two, a class and features of pictures."""

    inputs = (
        Input("mask", ("mask", "weight"), make=folded),
        Input("sum", ("low", "high"), make=lambda fields, size: torch.stack([*fields.values()], 1).sum(1)),
        Input("masked", ("mask",), make=lambda fields, size: fields["mask"].flatten(1).amin(1) < -0.5),
        Input("high"),
        Input("style", ("style", "other"), encoder="image_encoder"),
        Input("faces", encoder="image_encoder", most=2),
    )

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Linear(5, 4)

    def init_weights(self) -> None:
        super().init_weights()
        self.look.reset_parameters()

    def with_inputs(self, latents, timestep, given):
        return PredictorInputs(latents, timestep, given)

    def forward(self, latents, timestep, text, text_mask, mask, sum, masked, high, style, faces, faces_sizes):
        assert sum.dim() == high.dim() == 1 and masked.dtype == torch.bool
        pushed = (faces.sum(2) / faces_sizes.clamp(min=1)).sum(1) + style.mean(1)
        pushed = self.look(pushed.to(latents)) + (sum + high + masked)[:, None]
        latents = latents + pushed.to(latents)[..., None, None, None]
        frames = (latents + mask.mean(1, keepdim=True).to(latents)).unbind(2)
        each = [Silent.forward(self, one[:, :, None], timestep, text, text_mask) for one in frames]
        return torch.cat(each, dim=2)


class Failing(Masked):
    inputs = (Input("mask", make=lambda fields, size: fields["mask"][9]), *Masked.inputs[1:])


def test_conditions_without_an_autoencoder_are_made_of_random_fields_and_features():
    check_predictor(Masked)
    for frames in (1, 2):
        inputs = PredictorProbe(Masked, patches=(frames, 3, 2)).inputs(Masked())
        assert inputs["mask"].shape == (2, 64, frames, 6, 4)
    assert inputs["style"].shape == (2, 6, 5) and inputs["faces"].shape == (2, 2, 3, 5)
    assert inputs["faces_sizes"].tolist() == [[[3], [3]], [[3], [0]]]


def test_conditions_whose_shape_is_not_known_leave_the_other_checks_and_may_be_given():
    check_predictor(Failing)  # what needs them does not apply
    with pytest.raises(NotApplicable, match="`make` of the input `mask` takes neither pixels nor"):
        given_inputs(PredictorProbe(Failing))
    shapes = {"mask": torch.zeros(1, 1, 1, 1), "style": (9, None)}
    assert PredictorProbe(Failing, conditions=shapes).inputs(Failing())["style"].shape == (2, 9, 5)
    check_predictor(Failing, conditions={"mask": torch.ones(1, 1, 1, 1)})
