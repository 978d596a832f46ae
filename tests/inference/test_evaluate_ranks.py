"""`mm eval` of Transformers' models: figures and predictions are the library's, on any number of ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score

import mm_core
from mm_core.cli.main import main
from mm_core.config.load import load_config
from support import pretrained_models as models
from support.token_rows import TokenRows

HERE = Path(__file__).parent
ROWS, BROKEN = 13, 8


def run_of(name: str, folder: Path, **test) -> Path:
    """A run that has stopped at step 0, with the weights of its model's folder and a test set."""
    model = models.save_model(name, folder)
    models.save_words(model)
    data = {"test": {"type": "token_rows", "kind": models.MODELS[name][4], "rows": ROWS, "seed": 1, **test}}
    path = models.run_config(name, model, folder, data=data, train={"steps": 0})
    mm_core.train(load_config(path))
    return folder / "runs" / name


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return run_of("bert_classes", tmp_path_factory.mktemp("classified"), broken=BROKEN)


def files_of(folder: Path, ranks: int) -> tuple[list[str], Path, Path]:
    """The options that name the files, and the files."""
    out, rows = folder / f"{ranks}.json", folder / "new" / f"{ranks}.jsonl"
    return ["--out", str(out), "--predictions", str(rows)], out, rows


def check_classes(run: Path, out: Path, rows: Path, ranks: int) -> tuple[dict, list[dict]]:
    """The files contain what the library computes with the exported model, row by row."""
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(run.parents[1] / "bert_classes")
    data = TokenRows("classes", rows=ROWS, seed=1)
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert [line["row"] for line in lines] == list(range(ROWS))
    assert lines[BROKEN] == {"row": BROKEN, "id": f"row {BROKEN}", "error": "the row is damaged"}
    del lines[BROKEN]
    losses = []
    for line in lines:
        batch = models.batch_of(data, range(line["row"], line["row"] + 1), last=1.0)
        with torch.no_grad():
            found = theirs.eval()(**batch.inputs)
        label, predicted = int(batch.inputs["labels"]), int(found.logits.argmax())
        assert (line["id"], line["weight"]) == (str(line["row"]), 1.0)
        assert (line["label"], line["prediction"]) == (label, predicted)
        assert (line["text"], line["references"]) == (f"LABEL_{predicted}", [f"LABEL_{label}"])
        assert line["loss"] == pytest.approx(float(found.loss), rel=1e-5)
        losses.append(float(found.loss))
    report = json.loads(out.read_text())
    labels, predicted = ([line[name] for line in lines] for name in ("label", "prediction"))
    assert report["metrics"] == {
        "loss": pytest.approx(sum(losses) / len(losses), rel=1e-5),
        "accuracy": pytest.approx(accuracy_score(labels, predicted), rel=1e-12),
        "f1_micro": pytest.approx(f1_score(labels, predicted, average="micro"), rel=1e-12),
        "exact_match": pytest.approx(accuracy_score(labels, predicted), rel=1e-12),
    }
    expected = {"rows": ROWS - 1, "unreadable": 1, "step": 0, "split": "test", "weights": "model"}
    assert expected.items() <= report.items() and report["ranks"] == ranks
    assert len(report["config_sha256"]) == 64
    return report, lines


METRICS = ["--metric", "accuracy", "--metric", "{type: f1, average: micro}", "--metric", "exact_match"]


def test_figures_and_predictions_are_those_of_the_library(run, tmp_path, capsys):
    options, out, rows = files_of(tmp_path, 1)
    assert main(["eval", "--run", f"{run}@0", "--split", "test", *METRICS, *options]) == 0
    said = capsys.readouterr()
    assert "accuracy" in said.out and f"rows         {ROWS - 1}" in said.out
    assert "warning: 1 of 13 rows of data.test could not be read" in said.err
    report, _ = check_classes(run, out, rows, 1)
    # Other data are another config; the default place of the figures is the run's own folder.
    assert main(["evaluate", "--run", str(run), "--split", "test", "data.test.rows=4", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["config_sha256"] != report["config_sha256"] and other["rows"] == 4
    assert json.loads((run / "evaluations/test_step_00000000_model.json").read_text()) == other
    assert other["overrides"] == ["data.test.rows=4"] and set(other["metrics"]) == {"loss"}


def test_the_documentation_shows_rows_as_they_are(run, tmp_path):
    page = (HERE.parents[1] / "docs/validation.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    read, lost = map(json.loads, block.splitlines())
    options, _, rows = files_of(tmp_path, 1)
    assert main(["eval", "--run", str(run), "--split", "test", *options]) == 0
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert read.keys() == lines[0].keys() and lost.keys() == lines[BROKEN].keys()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_answer_as_one_does(run, tmp_path, mm, ranks):
    options, out, rows = files_of(tmp_path, ranks)
    done = mm("eval", "--run", run, "--split", "test", "--nproc", ranks, *METRICS, *options)
    assert done.code == 0, done.err
    assert done.out.count("accuracy") == 1 and done.err.count("could not be read") == 1
    check_classes(run, out, rows, ranks)


@pytest.mark.slow
def test_ranks_that_answer_at_different_lengths_wait_for_each_other(tmp_path, mm, capsys):
    run = run_of("qwen3", tmp_path)
    # Some answers end at once, and some not before they are too long.
    options = ["task.max_new_tokens=5", "task.overrides={eos_token_id: [2, 5, 6, 20, 30, 31]}"]
    options += ["--metric", "anls", "--metric", "perplexity", "--split", "test"]
    found = []
    for ranks in (1, 2):
        files, out, rows = files_of(tmp_path, ranks)
        if ranks == 1:
            assert main(["eval", "--run", str(run), *options, *files]) == 0
        else:
            done = mm("eval", "--run", run, "--nproc", ranks, *options, *files)
            assert done.code == 0, done.err
        answers = [json.loads(line) for line in rows.read_text().splitlines()]
        found.append((json.loads(out.read_text())["metrics"], answers))
    (one, lines), (two, others) = found
    assert two == pytest.approx(one, rel=1e-6) and set(one) == {"loss", "anls", "perplexity"}
    assert [(r["row"], r["text"], r["references"]) for r in others] == [
        (r["row"], r["text"], r["references"]) for r in lines
    ]
    assert len({len(line["text"].split()) for line in lines}) > 1
    assert all(len(line["label"]) == len(line["prediction"]) == line["weight"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--split", "validation"], "the run's config has no data.validation"),
        (["--run", "{run}@7"], "this run has no complete checkpoint '7'"),
        (["--run", "{run}-not"], "there is no such run"),
        (["--metric", "anlz"], "did you mean 'anls'?"),
        (["--metric", "latent_psnr"], "validation.metrics: latent_psnr: the metric needs 'clean' and"),
        (["--predictions", "{run}"], "the file cannot be written: this is a folder"),
        (["--out", "{run}/config.yaml/x.json"], "the file cannot be written: "),
    ],
)
def test_what_is_wrong_is_a_readable_error(run, capsys, arguments, sentence):
    given = [argument.format(run=run) for argument in arguments]
    defaults = {"--run": str(run), "--split": "test"}
    words = [word for name, value in defaults.items() if name not in given for word in (name, value)]
    assert main(["eval", *words, *given]) == 1
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--split", "tset"], "did you mean 'test'?"),
        (["--metric", "{average: micro}"], "is neither a metric nor {type: METRIC, key: value}"),
        (["--nproc", "0"], "0 is less than 1"),
    ],
)
def test_a_command_line_that_does_not_parse_names_the_nearest(run, capsys, arguments, sentence):
    assert main(["eval", "--run", str(run), *arguments]) == 2
    assert sentence in capsys.readouterr().err
