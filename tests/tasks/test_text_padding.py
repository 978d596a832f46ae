"""A predictor that ignores the mask, and declares that masked text has no effect, is found by the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mm_core.config.load import load_config
from mm_core.config.sections import RunConfig
from mm_core.errors import ContractError
from mm_core.plan import make_plan
from support.runs import VIDEO, config_of

PLUGIN = """
import torch
from torch import nn

from mm_core import Component, hookimpl
from mm_core.contracts import PredictorModule

class Mixer(PredictorModule):
    def __init__(self, width: int = 32, channels: int = 12) -> None:
        super().__init__()
        self.in_channels, self.text_dim = channels, width
        self.mix = nn.Linear(width, channels)

    def forward(self, latents, timestep, text, text_mask):
        return latents * SHARE[:, :, None, None, None]

@hookimpl
def mm_predictors():
    return [Component(name="mixer", target="mixer:Mixer", TINY)]
"""
MEAN = "self.mix(text).mean(1)"
MASKED = "((self.mix(text) * text_mask[..., None]).sum(1) / text_mask.sum(1, keepdim=True))"
TINY = "tiny={'width': 4, 'channels': 2}"
OWN = 'text_padding = property(lambda self: "masked" if self.text_dim > 4 else ("fixed", 3))\n\n    '


def written(folder: Path, share: str, tiny: str, more: str = "") -> RunConfig:
    text = PLUGIN.replace("SHARE", share).replace("TINY", tiny).replace("def forward", f"{more}def forward")
    (folder / "mixer.py").write_text(text, encoding="utf-8")
    task = {**VIDEO, "predictor": {"type": "local/mixer"}}
    return config_of(folder, task, plugin=str(folder / "mixer.py"), train={"steps": 1})


def told(config: RunConfig) -> list[str]:
    return [note for note in make_plan(config, 1).notes if "text_padding" in note]


def test_a_small_instance_whose_output_depends_on_padding_is_refused(tmp_path):
    before = torch.get_rng_state()
    with pytest.raises(ContractError) as raised:
        make_plan(written(tmp_path, MEAN, TINY), 1)
    text = str(raised.value)
    assert 'text_padding is "masked", but the number of padding tokens changes the output' in text
    assert f"task.predictor, {tmp_path / 'mixer.py'}, line 14" in text
    assert 'set text_padding = ("fixed", n)' in text
    assert torch.equal(torch.get_rng_state(), before)


def test_conditions_of_the_clip_are_given_to_the_small_instance(tmp_path):
    config = written(tmp_path, MEAN, TINY)
    source = (tmp_path / "mixer.py").read_text().replace("text_mask):", "text_mask, fps):")
    (tmp_path / "mixer.py").write_text(
        source.replace("return latents", "return fps[:, None, None, None, None] * latents")
    )
    with pytest.raises(ContractError, match="the number of padding tokens changes the output"):
        make_plan(load_config(tmp_path / "tuned.yaml"), 1)
    assert config.run.name == "tuned"


def test_without_a_small_instance_a_mask_that_is_never_read_is_noted(tmp_path):
    (note,) = told(written(tmp_path, MEAN, ""))
    assert "forward never reads text_mask, so it trains on padding" in note and "task.predictor" in note


@pytest.mark.parametrize(("passed", "notes"), [("", 1), ("rest and ", 0)])
def test_a_mask_that_a_forward_takes_by_two_stars_and_drops_is_noted_too(tmp_path, passed, notes):
    written(tmp_path, MEAN, "")
    source = (tmp_path / "mixer.py").read_text().replace("text_mask):", "**rest):")
    (tmp_path / "mixer.py").write_text(source.replace("return latents", f"return {passed}latents"))
    assert len(told(load_config(tmp_path / "tuned.yaml"))) == notes


@pytest.mark.parametrize(
    ("share", "tiny", "more"),
    [
        (MASKED, TINY, ""),
        (MASKED, "", ""),
        (MEAN, TINY, 'text_padding = ("fixed", 128)\n\n    '),
        (MEAN, f"{TINY}, expected_failures={{'text_padding': 'as its paper'}}", ""),
        ("timestep[:, None]", TINY, ""),  # no caption has an effect
        ("timestep[:, None]", "", ""),
        # The small instance has no masked text, the run has.
        (f"({MASKED} if self.text_dim > 4 else {MEAN})", TINY, OWN),
        ("text_mask.missing", TINY, ""),  # cannot be called: `mm plugins test` shows it
    ],
)
def test_others_are_planned_as_they_are(tmp_path, share, tiny, more):
    assert told(written(tmp_path, share, tiny, more)) == []
