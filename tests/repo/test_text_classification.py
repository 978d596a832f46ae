"""examples/text_classification: its README's commands run, and keywords alone do not classify its texts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from mm_core.config.dump import to_yaml
from mm_core.config.load import load_config
from support.logs import log_of
from support.pages import blocks

EXAMPLE = Path(__file__).parents[2] / "examples/text_classification"


@pytest.fixture
def make_data(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from mm_emotion import make_data

    return make_data


def test_words_do_not_reveal_the_emotion_and_the_test_has_no_text_of_the_training(make_data):
    train, test = (make_data.make_rows(count, 1, held) for count, held in ((1200, False), (300, True)))
    assert not {text for text, _ in train} & {text for text, _ in test}
    labels = [label for _, label in test]
    assert {labels.count(label) for label in set(labels)} == {50}
    known = make_data.texts
    words = [word for of in (known.ENGLISH, known.CHINESE) for group in of.values() for word in group]
    counted = CountVectorizer(
        vocabulary=words, analyzer=lambda text: [word for word in words if word in text]
    )
    model = LogisticRegression(max_iter=500).fit(
        counted.transform([text for text, _ in train]), [label for _, label in train]
    )
    found = model.predict(counted.transform([text for text, _ in test]))
    assert sum(found == labels) / len(labels) < 0.65


def test_every_text_names_the_emotion_of_its_label_and_another(make_data):
    known = make_data.texts
    rng = random.Random(5)
    for number in range(120):
        label = known.LABELS[number % 6]
        text, _ = make_data.make_text(rng, label)
        named = {
            name
            for name in known.LABELS
            if any(word in text for words in (known.ENGLISH, known.CHINESE) for word in words[name])
        }
        assert label in named and len(named) > 1


def test_the_config_checks_and_survives_being_written(make_data, tmp_path):
    plugin = f"plugins.path=[{EXAMPLE / 'mm_emotion/plugin.py'}]"  # as it is found where it is installed
    config = load_config(EXAMPLE / "mm_emotion/configs/emotion.yaml", [plugin])
    assert config.data.train.options["labels"] == config.task.options["labels"] == make_data.texts.LABELS
    again = tmp_path / "config.yaml"
    again.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(again) == config


@pytest.mark.slow
def test_the_commands_of_the_readme_give_a_report_of_every_row_once(run, workspace, tmp_path):
    """A quick variant: few rows, few steps; the package is installed into a folder of this test."""
    (block,) = (b for b in blocks(EXAMPLE / "README.md") if b.language == "bash")
    install, data, train, evaluate, report = block.text.splitlines()
    run(f"{install} --quiet --no-deps --no-build-isolation --target {tmp_path / 'site'}")
    path = {"PYTHONPATH": str(tmp_path / "site")}
    run(f"{data} --train 300 --test 37", **path)
    few = "train.epochs=null train.steps=4 lr_schedule.warmup_steps=1 validation.every=2 checkpoint.every=2"
    run(f"{train} {few} data.loader.workers=0", **path)
    run(evaluate, **path)
    rows = [json.loads(line) for line in (workspace / "predictions.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(37))
    assert [row["id"] for row in rows] == [f"test.json, row {number}" for number in range(1, 38)]
    printed = run(report, **path).stdout
    assert (
        "37 rows, 37 different, 0 unreadable" in printed and "surprise" in printed and "accuracy" in printed
    )
    logged = log_of(workspace / "runs/emotion")
    (held_out,) = (row for row in logged if "test/accuracy" in row)
    assert held_out["test/rows"] == 37 and "test/recall/joy" in held_out
    right = sum(row["prediction"] == row["label"] for row in rows)
    (figures,) = (workspace / "runs/emotion/evaluations").glob("test_step_*.json")
    assert json.loads(figures.read_text())["metrics"]["accuracy"] == pytest.approx(right / 37)
