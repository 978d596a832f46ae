"""What the plan finds of a predictor by its small instance: text that should be masked and is not."""

from __future__ import annotations

import pytest

from mm_core.errors import ContractError
from mm_core.plan import build_task
from mm_core.tasks.text_to_video.trial import text_notes
from support.runs import VIDEO, config_of

PLUGIN = """
import mm_core
from mm_core.contracts import PredictorModule
from torch import nn


class Own(PredictorModule):
    {padding}

    def __init__(self, width: int = 32):
        super().__init__()
        self.in_channels, self.text_dim = 12, width
        self.project, self.out = nn.Linear(width, 12), nn.Conv3d(12, 12, 1)

    def forward(self, latents, timestep, text, text_mask):
        shown = text * text_mask[..., None] if {masks} else text
        mean = shown.sum(1) / text_mask.sum(1, keepdim=True).clamp(min=1)
        return self.out(latents + self.project(mean)[:, :, None, None, None]) * timestep.view(-1, 1, 1, 1, 1)


@mm_core.hookimpl
def mm_predictors():
    return [mm_core.Component("own", "own_predictor:Own"{tiny})]
"""


def notes_of(tmp_path, padding="", masks=False, tiny=', tiny={"width": 8}') -> list[str]:
    plugin = tmp_path / "own_predictor.py"
    plugin.write_text(PLUGIN.format(padding=padding or '"""Takes text."""', masks=masks, tiny=tiny))
    config = config_of(tmp_path, {**VIDEO, "predictor": {"type": "own"}}, plugin=str(plugin))
    return text_notes(build_task(config), config.task, config.registry)


@pytest.mark.parametrize("padding", ["", 'text_padding = "masked"'])
def test_a_predictor_that_trains_on_padding_is_refused_at_the_plan(padding, tmp_path):
    with pytest.raises(ContractError) as caught:
        notes_of(tmp_path, padding)
    assert caught.value.what.startswith('text_padding is "masked", but masked text changes the output, by ')
    assert caught.value.where.startswith("task.predictor, ") and "own_predictor.py" in caught.value.where
    assert 'text_padding = ("fixed", n)' in caught.value.hint


@pytest.mark.parametrize("fields", [{"masks": True}, {"padding": 'text_padding = ("fixed", 32)'}])
def test_one_that_keeps_its_word_is_not_mentioned(fields, tmp_path):
    assert notes_of(tmp_path, **fields) == []


@pytest.mark.parametrize(
    ("tiny", "reason"),
    [("", "declares no `tiny`"), (', tiny={"wdth": 8}', "its `tiny` cannot be tried: ")],
)
def test_one_that_cannot_be_tried_and_only_inherits_its_word_is_noted(tiny, reason, tmp_path):
    (note,) = notes_of(tmp_path, tiny=tiny)
    assert note.startswith("task.predictor: it inherits `text_padding") and reason in note
    assert note.endswith('a forward that ignores `text_mask` needs text_padding = ("fixed", n)')
    assert notes_of(tmp_path, 'text_padding = "masked"', tiny=tiny) == [], "its author has said so"


def test_the_dry_run_says_so(tiny, tmp_path, mm):
    plugin = tmp_path / "own_predictor.py"
    for fields, code in (("", 0), (', tiny={"width": 8}', 1)):
        plugin.write_text(PLUGIN.format(padding='"""Takes text."""', masks=False, tiny=fields))
        words = (f"plugins.path=[{plugin}]", "task.predictor={type: own}", "--dry-run")
        done = mm("train", "--config", tiny, *words)
        assert done.code == code, done.err
        assert 'text_padding = ("fixed", n)' in (done.err if code else done.out)
