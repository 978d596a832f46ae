"""Errors that list accepted values do not end in an empty list if there are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mm_core.builtin.configs.adapters import AdapterConfig
from mm_core.contracts import SampleKey, TextBatch
from mm_core.errors import MMError
from mm_core.evaluation.predictions import write_predictions
from mm_core.modules.patterns import match
from mm_core.tasks.pretrained.batches import CountLabels, Limits
from mm_core.weights.adapters.targets import _no_target
from mm_core.weights.fitting import no_layout_error
from mm_core.weights.formats.format import divided


def no_inputs() -> None:
    batch = TextBatch([SampleKey(0, 0)], torch.ones(1), ["a"], inputs={})
    CountLabels(False, None, Limits())(batch)


def no_layers() -> None:
    raise _no_target(nn.Module(), AdapterConfig(targets=("to_q",)), "to_q", (), ())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: match(["blocks.{*}"], [""], "engine.key"), "no pattern: there are no modules"),
        (no_layers, "no target: the component has no linear layer"),
        (no_inputs, "the batch contains none"),
        (lambda: no_layout_error(Path("x"), "predictor", ()), "none (no plugin has a format)"),
        (lambda: divided((), ["a"]), "names below no part at all"),
    ],
)
def test_where_nothing_would_do_the_error_is_complete(call: Callable[[], object], said: str) -> None:
    try:
        fault = call()
    except MMError as raised:
        fault = raised
    text = str(fault)
    assert said in text
    assert not any(line.endswith((" ", ":", ",")) for line in text.splitlines())


def test_predictions_of_rows_whose_names_are_no_text_are_written(tmp_path: Path) -> None:
    """The row of a dataset that cannot be read is named by its path, whatever that is."""
    rows = [{"row": 0, "id": "half \ud83d é", "error": "it is broken"}]
    write_predictions(rows, tmp_path / "rows.jsonl")
    assert json.loads((tmp_path / "rows.jsonl").read_text(encoding="utf-8")) == rows[0]
