"""Faults in predictors with frames, experts or their own guidance, and the check that finds each."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from mm_core.contracts import Expert, PredictorInputs
from mm_core.errors import ContractError
from mm_core.testing.kit import NotApplicable
from mm_core.testing.predictors.capabilities import experts, given_frames, guided
from mm_core.testing.predictors.probe import PredictorProbe


class Plain(nn.Module):
    """A predictor of one linear layer."""

    text_padding, patch_size, in_channels, out_channels, text_dim = "masked", (1, 1, 1), 4, 4, 8

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def init_weights(self):
        self.layer.reset_parameters()

    def forward(self, latents, timestep, text, text_mask):
        return self.layer(latents.movedim(1, -1)).movedim(-1, 1).clone()


class InPlace(Plain):
    """It takes the first frame in place of the first latents."""

    frame_choices, image_dim = (("first",), ()), None

    def frames_clip(self, frames, num_frames):
        return frames[0][:, :, None]

    def with_frames(self, latents, timestep, given):
        counts = torch.ones(1, 1, *latents.shape[2:], dtype=torch.bool)
        counts[:, :, 0] = False
        known = torch.cat([given.latents.to(latents), latents[:, :, 1:]], dim=2)
        tokens = latents[0, 0].numel()
        return PredictorInputs(known, timestep[:, None].repeat(1, tokens), counts=counts)

    def forward(self, latents, timestep, text, text_mask):
        return super().forward(latents, timestep, text, text_mask) + latents[:, :, :1].mean()


class Beside(Plain):
    """It takes the first and the last frame as a condition, and features of an image encoder."""

    frame_choices, image_dim = (("first", "last"),), 5

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(5, 4)

    def init_weights(self):
        super().init_weights()
        self.features.reset_parameters()

    @property
    def condition_shapes(self):
        return {"shown": (4, 3, 3, 2), "features": (6, 5)}

    def frames_clip(self, frames, num_frames):
        first, last = (frame[:, :, None] for frame in frames)
        grey = first.new_zeros(*first.shape[:2], num_frames - 2, *first.shape[3:])
        return torch.cat([first, grey, last], dim=2)

    def with_frames(self, latents, timestep, given):
        return PredictorInputs(latents, timestep, {"shown": given.latents, "features": given.features})

    def forward(self, latents, timestep, text, text_mask, shown, features):
        own = super().forward(latents + shown, timestep, text, text_mask)
        return own + self.features(features).mean(1)[:, :, None, None, None]


class TwoExperts(Plain):
    """Two layers, the first for timesteps from 400 upwards."""

    experts = (Expert("high", 400.0), Expert("low", 0.0, 400.0))

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 4)

    def init_weights(self):
        super().init_weights()
        self.other.reset_parameters()

    @contextmanager
    def complete(self, device):
        yield

    def forward(self, latents, timestep, text, text_mask, expert=None):
        if expert is None:
            high = (timestep >= 400)[:, None, None, None, None]
            return torch.where(high, self.of(latents, "high"), self.of(latents, "low"))
        return self.of(latents, expert)

    def of(self, latents, name):
        layer = self.layer if name == "high" else self.other
        return layer(latents.movedim(1, -1)).movedim(-1, 1).clone()


class Guided(Plain):
    """Guidance is added to the conditional prediction, and each token keeps that prediction's norm."""

    guidance_off = 0.0

    def guided(self, conditional, unconditional, scale):
        added = conditional + scale * (conditional - unconditional)
        return added * conditional.norm(dim=1, keepdim=True) / added.norm(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("check", "good"),
    [(given_frames, InPlace), (given_frames, Beside), (experts, TwoExperts), (guided, Guided)],
)
def test_good_predictors_pass(check, good):
    check(PredictorProbe(good))


@pytest.mark.parametrize(
    ("check", "why"),
    [
        (given_frames, "it is no .*SupportsFrames"),
        (experts, "it is no .*SupportsExperts"),
        (guided, "it is no .*SupportsGuided"),
    ],
)
def test_the_checks_are_for_the_capabilities(check, why):
    with pytest.raises(NotApplicable, match=why):
        check(PredictorProbe(Plain))


def test_a_predictor_of_text_alone_has_no_frames_to_check():
    with pytest.raises(NotApplicable, match="takes no frames of its clip"):
        given_frames(PredictorProbe(faulty(InPlace, frame_choices=((),))))


def faulty(good, **members):
    return type("Faulty", (good,), members)


def shown(good, **changes):
    """A predictor whose with_frames returns other fields: functions of its arguments and its result."""

    def with_frames(self, latents, timestep, given):
        found = good.with_frames(self, latents, timestep, given)
        return replace(found, **{name: change(self, latents, found) for name, change in changes.items()})

    return faulty(good, with_frames=with_frames)


FRAMES = [
    (faulty(InPlace, frame_choices=(("middle",),)), "frame_choices is (('middle',),)"),
    (faulty(InPlace, frame_choices=()), "frame_choices is ()"),
    (
        faulty(InPlace, frames_clip=lambda self, frames, num_frames: frames[0]),
        "frames_clip returned [2, 3, 3, 2]",
    ),
    (
        faulty(InPlace, frames_clip=lambda self, frames, num_frames: frames[0].neg_()[:, :, None]),
        "changes its frames",
    ),
    (
        faulty(InPlace, frames_clip=lambda self, frames, num_frames: 3 * frames[0][:, :, None]),
        "outside of -1 to 1",
    ),
    (
        faulty(InPlace, with_frames=lambda self, latents, timestep, given: latents),
        "with_frames returned a Tensor",
    ),
    (
        shown(InPlace, latents=lambda self, latents, found: latents.add_(1)),
        "with_frames changes its arguments",
    ),
    (
        shown(InPlace, latents=lambda self, latents, found: found.latents + torch.rand(1)),
        "other inputs for the same",
    ),
    (
        shown(
            InPlace, latents=lambda self, latents, found: found.latents + self.layer.weight.detach().mean()
        ),
        "reads parameters of the predictor",
    ),
    (
        shown(InPlace, latents=lambda self, latents, found: torch.cat([latents, latents], 1)),
        "returns latents [2, 8,",
    ),
    (shown(InPlace, timestep=lambda self, latents, found: found.timestep[:, :5]), "returns timesteps [2, 5]"),
    (shown(InPlace, counts=lambda self, latents, found: found.counts.float()), "counts of with_frames"),
    (shown(InPlace, counts=lambda self, latents, found: ~found.counts & found.counts), "or count nothing"),
    (
        shown(InPlace, counts=lambda self, latents, found: ~found.counts),
        "changes latents that count as predicted",
    ),
    (
        shown(InPlace, latents=lambda self, latents, found: latents),
        "do not change the prediction of the rest",
    ),
    (
        shown(Beside, conditions=lambda self, latents, found: {**found.conditions, "shown": 0 * latents}),
        "(first and last)",
    ),
]


@pytest.mark.parametrize(("build", "what"), FRAMES, ids=[what for _, what in FRAMES])
def test_faults_of_given_frames_are_found(build, what):
    with pytest.raises(ContractError) as fault:
        given_frames(PredictorProbe(build))
    assert what in str(fault.value)


def test_given_frames_that_move_with_each_call_are_found():
    def with_frames(self, latents, timestep, given):
        found = InPlace.with_frames(self, latents, timestep, given)
        return replace(found, latents=torch.where(found.counts, found.latents, found.latents + latents))

    with pytest.raises(ContractError, match="applied to its own latents changes them again"):
        given_frames(PredictorProbe(faulty(InPlace, with_frames=with_frames)))


class Extra(TwoExperts):
    """It leaves an expert behind that was loaded for sampling."""

    @contextmanager
    def complete(self, device):
        self.extra = nn.Linear(1, 1).requires_grad_(False)
        yield


class Trains(TwoExperts):
    """It loads an expert for sampling that could be trained."""

    @contextmanager
    def complete(self, device):
        self.extra = nn.Linear(1, 1)
        yield


class Swapped(TwoExperts):
    def of(self, latents, name):
        return super().of(latents, "high")

    def forward(self, latents, timestep, text, text_mask, expert=None):
        if expert is not None:
            return super().of(latents, expert).clone()
        return super().forward(latents, timestep, text, text_mask)


class Detached(TwoExperts):
    def forward(self, latents, timestep, text, text_mask, expert=None):
        return super().forward(latents, timestep, text, text_mask, expert).detach().requires_grad_()


EXPERTS = [
    (
        faulty(TwoExperts, experts=(Expert("high", 400.0), Expert("low", 0.0, 300.0))),
        "the experts are high [400, None)",
    ),
    (
        faulty(TwoExperts, experts=(Expert("low", 0.0, 400.0), Expert("high", 400.0))),
        "from noise (high=None)",
    ),
    (faulty(TwoExperts, experts=()), "the experts are none"),
    (
        faulty(TwoExperts, experts=tuple(replace(e, trained=False) for e in TwoExperts.experts)),
        "no expert is trained",
    ),
    (Swapped, "from that of the expert 'low' alone"),
    (Trains, "within complete(), extra.weight, extra.bias is not frozen"),
    (Extra, "after complete(), the predictor still has extra.bias, extra.weight"),
    (Detached, "no weight gets a gradient from it"),
]


@pytest.mark.parametrize(("build", "what"), EXPERTS, ids=[what for _, what in EXPERTS])
def test_faults_of_experts_are_found(build, what):
    with pytest.raises(ContractError) as fault:
        experts(PredictorProbe(build))
    assert what in str(fault.value)


GUIDED = [
    (faulty(Guided, guidance_off=1.0), "at guidance_off = 1, guided differs from the conditional prediction"),
    (
        faulty(Guided, guided=lambda self, c, u, s: Guided.guided(self, u, c, s)),
        "at guidance_off = 0, guided differs from the conditional prediction by",
    ),
    (
        faulty(Guided, guided=lambda self, c, u, s: (c + s * (c - u)) * c.norm() / (c + s * (c - u)).norm()),
        "guided of a row alone and of the same row in a batch differ by",
    ),
    (faulty(Guided, guided=lambda self, c, u, s: c.add_(s * (c - u))), "guided changes its arguments"),
    (faulty(Guided, guided=lambda self, c, u, s: (c + s * (c - u)).movedim(1, -1)), "guided returned [2, 2,"),
    (faulty(Guided, guided=lambda self, c, u, s: (c, u)), "guided returned tuple"),
]


@pytest.mark.parametrize(("build", "what"), GUIDED, ids=[what for _, what in GUIDED])
def test_faults_of_guidance_are_found(build, what):
    with pytest.raises(ContractError) as fault:
        guided(PredictorProbe(build))
    assert what in str(fault.value)


def test_guidance_that_reads_a_parameter_is_found():
    scaled = faulty(Guided, guided=lambda self, c, u, s: c + s * self.layer.weight.mean() * (c - u))
    with pytest.raises(RuntimeError, match="meta"):
        guided(PredictorProbe(scaled))
