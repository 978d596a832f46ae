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


def recorded(folder, model):
    """The record of one forward and backward; names as in the model."""
    recorder = Recorder(folder, {"net": model})
    recorder.inputs(latents=(latents := torch.ones(2, 4)))
    recorder.loss(loss := model(latents).square().mean())
    loss.backward()
    recorder.before_update(1.0)
    recorder.after_update({})
    recorder.close()
    return folder


class Net(nn.Module):
    """A layer and a weight of its own, under names that a test chooses."""

    def __init__(self, layer="first", weight="scale"):
        super().__init__()
        torch.manual_seed(0)
        self.names = (layer, weight)
        self.add_module(layer, nn.Linear(4, 4))
        self.register_parameter(weight, nn.Parameter(torch.ones(4)))

    def forward(self, x):
        layer, weight = self.names
        return self.get_submodule(layer)(x) * self.get_parameter(weight)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"layer": "last"}, "1 name of modules and weights: net.last"),
        ({"weight": "gain"}, "1 name of modules and weights: net.gain"),
    ],
)
def test_a_renamed_module_or_weight_is_a_difference(names, sentence, tmp_path, capsys):
    """It is compared with nothing, so that equal numbers elsewhere do not make the records equal."""
    one, same, two = (recorded(tmp_path / n, Net(**n_)) for n, n_ in (("a", {}), ("b", {}), ("c", names)))
    assert main(["align", "compare", str(one), str(same)]) == 0
    capsys.readouterr()
    assert main(["align", "compare", str(one), str(two)]) == 1
    printed = capsys.readouterr().out
    assert " 0 different" in printed and f"only the second record has {sentence}" in printed
    renamed = [
        f"--map=net.{theirs}=net.{ours}"
        for ours, theirs in zip(("first", "scale"), Net(**names).names, strict=True)
    ]
    assert main(["align", "compare", str(one), str(two), *renamed]) == 0


def test_names_in_a_record_command_no_terminal(tmp_path, capsys):
    """Names, classes and settings of a record, in text, page, chart and JSON."""
    wild = "x\x1b[2J\x9b1m\nforged\u202e"
    one, two = (recorded(tmp_path / n, Net(layer)) for n, layer in (("a", f"one{wild}"), ("b", f"two{wild}")))
    changed = recorded(tmp_path / "c", Net(f"one{wild}").requires_grad_(False).requires_grad_())
    rows = (changed / "rows_0.jsonl").read_text().replace('"class": "Linear"', '"class": "L\\u001b[1m"')
    (changed / "rows_0.jsonl").write_text(rows.replace('"l2": ', '"l2": 1'))
    for folder, value in ((one, "a"), (changed, wild)):
        (folder / "record.json").write_text(json.dumps({"config": {"key": value}}))
    for other in (two, changed):
        for more in ([], ["--json"]):
            files = (
                [f"--html={tmp_path}/page.html", f"--svg={tmp_path}/chart.svg"] if other is changed else []
            )
            assert main(["align", "compare", str(one), str(other), *files, *more]) == 1
            printed = capsys.readouterr().out
            assert not any(mark in printed for mark in ("\x1b", "\x9b", "\u202e", "\nforged")), repr(printed)
            assert "x\\x1b[2J\\x9b1m\\nforged\\u202e" in printed or json.loads(printed)
    assert main(["align", "checklist", str(one), str(changed)]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "x\\x1b[2J" in printed
    for name in ("page.html", "chart.svg"):
        text = (tmp_path / name).read_text()
        assert "\x1b" not in text and "x\\x1b[2J" in text
