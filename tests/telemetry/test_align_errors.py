"""What `mm align` refuses, each with a sentence: damaged records, names and numbers that fit nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mm_core.cli.main import main
from mm_core.errors import MMError
from mm_core.report.align.records import Names, read_record
from mm_core.telemetry.align import attaching
from mm_core.telemetry.align.recorder import Recorder


@pytest.fixture
def record(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    recorder = Recorder(tmp_path / "record", {"net": model})
    recorder.inputs(latents=(latents := torch.ones(2, 4)))
    recorder.loss(model(latents).sum())
    recorder.close()
    return tmp_path / "record"


def mm(capsys, *words) -> tuple[int, str]:
    """The exit code of a command and what it prints as errors."""
    try:
        code = main(list(map(str, words)))
    except SystemExit as left:
        code = left.code
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda row: 5, "5 is not a row"),
        (lambda row: row | {"step": "one"}, "is not a row: no valid 'step'"),
        (lambda row: row | {"l2": None}, "is not a row: no valid 'l2'"),
        (lambda row: row | {"kind": "output"}, "is not a row"),
        (lambda row: row | {"sketch": ["a"] * 8}, "is not a row"),
        (lambda row: row | {"sketch": [0.0] * 7}, "is not a row"),
        (lambda row: {key: row[key] for key in row if key != "name"}, "is not a row: no valid 'name'"),
    ],
)
def test_a_damaged_row_is_named(change, sentence, record, capsys):
    rows = (record / "rows_0.jsonl").read_text().splitlines()
    rows[1] = json.dumps(change(json.loads(rows[1])))
    (record / "rows_0.jsonl").write_text("\n".join(rows) + "\n")
    code, printed = mm(capsys, "align", "compare", record, record)
    assert code == 1 and sentence in printed and "no record that is complete" in printed


@pytest.mark.parametrize("name", ["record.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["{", "[]"])
def test_a_checklist_of_a_damaged_file_names_it(name, damage, tmp_path, capsys):
    (tmp_path / name).write_text(damage)
    code, printed = mm(capsys, "align", "checklist", tmp_path, tmp_path)
    assert code == 1 and str(tmp_path / name) in printed and "Traceback" not in printed


def test_facts_that_are_no_mapping_are_refused(record, capsys):
    (record / "record.json").write_text("[]")
    code, printed = mm(capsys, "align", "compare", record, record)
    assert code == 1 and "record.json is no JSON object" in printed


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "small"])
def test_a_tolerance_that_is_none_is_refused(value, record, capsys):
    code, printed = mm(capsys, "align", "compare", record, record, "--tolerance", value)
    assert code == 2 and "--tolerance" in printed


def test_a_negative_number_of_steps_is_refused(tmp_path, capsys):
    words = ("align", "record", "--config", "x.yaml", "--out", tmp_path / "out", "--after", -1)
    code, printed = mm(capsys, *words)
    assert code == 2 and "--after: -1 is less than 0" in printed


def test_a_map_that_fits_no_name_is_refused_with_those_that_there_are(record, capsys):
    code, printed = mm(capsys, "align", "compare", record, record, "--map", "nte.0=net.0")
    assert code == 1
    assert "no name of the other record begins with 'nte.0'" in printed
    assert "accepted: net, net.0, net.1" in printed and "did you mean 'net.0'" in printed


def test_braces_in_a_map_are_taken_as_they_are(record):
    names = Names.parse(["net.*.weight={x}.*.{}", "net={0}"])
    assert names.ours("net.0.weight") == "{x}.0.{}"
    assert {row.module for row in read_record(record, names).rows} == {"", "{0}", "{0}.0", "{0}.1"}


def test_patterns_of_modules_must_fit_one():
    task = SimpleNamespace(trainable=("predictor",), predictor=nn.Sequential(nn.Linear(4, 4)))
    attaching.check_patterns(task, ["predictor", "*.0"])
    with pytest.raises(MMError, match="no module of this run has the name") as error:
        attaching.check_patterns(task, ["predictor.1"])
    assert "predictor, predictor.0" in str(error.value)
