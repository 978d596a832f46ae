"""`mm eval`: a stored run gives the figures of validation, from real clips; faults are readable errors."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
import yaml

import mm_core
from mm_core.checkpoint.store import CheckpointStore
from mm_core.cli.main import main
from mm_core.config.dump import to_yaml
from mm_core.config.load import load_config
from mm_core.contracts import Clip, Randomness, SampleKey
from mm_core.data.media.video_files import write_video
from mm_core.errors import MMError
from mm_core.modules.initialise import initialise
from mm_core.plan import build_task
from support.tiny_models import ONE_BLOCK

ROWS = 5


def config_of(folder: Path) -> dict:
    clips = {"type": "video_text", "annotations": str(folder / "clips.json"), "num_frames": 4}
    clips |= {"height": 16, "width": 16, "fps": 8.0}
    return {
        "run": {"name": "tiny", "dir": str(folder)},
        "task": ONE_BLOCK,
        "data": {"train": clips, "validation": clips, "loader": {"workers": 0}},
        "train": {"steps": 1, "micro_batch_size": 2},
        "validation": {"metrics": [{"type": "latent_psnr"}]},
        "ema": {},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with real clips, one of them unreadable, and an average beside its weights."""
    folder = tmp_path_factory.mktemp("evaluated")
    for i in range(ROWS):
        pixels = Randomness(4).normal((3, 1, 16, 16), "clip", i).mul(0.4).clamp(-1, 1).expand(3, 4, 16, 16)
        write_video(Clip(pixels, 8.0, ""), folder / f"{i}.mp4")
    (folder / "3.mp4").write_bytes(b"no video")
    rows = [{"path": f"{i}.mp4", "cap": f"clip {i}"} for i in range(ROWS)]
    (folder / "clips.json").write_text(json.dumps(rows))
    (folder / "config.yaml").write_text(yaml.safe_dump(config_of(folder)))
    config = load_config(folder / "config.yaml")
    task = loaded(config, 1.0)
    model = {f"predictor.{name}": tensor for name, tensor in task.predictor.state_dict().items()}
    ema = {name: tensor * 0.5 for name, tensor in model.items()}
    store = CheckpointStore(folder / "tiny", 1)
    store.save(9, {"model": model, "optimizer": {}, "ema": ema}, {}, to_yaml(config))
    return folder / "tiny"


def loaded(config, factor: float) -> torch.nn.Module:
    task = build_task(config)
    task.text_encoder.load(torch.device("cpu"))
    task.predictor.to_empty(device="cpu")
    initialise(task.predictor, "predictor", Randomness(1))
    with torch.no_grad():
        for name, parameter in task.predictor.named_parameters():
            parameter.add_(0.1 * Randomness(2).normal(tuple(parameter.shape), name)).mul_(factor)
    return task.eval()


def expected_loss(run: Path, rows: list[int], factor: float) -> float:
    config = load_config(next(run.glob("checkpoints/*/config.yaml")))
    task, dataset = loaded(config, factor), config.registry.build("dataset", config.data.validation)
    losses = []
    for row in rows:
        batch = dataset.collate([{**dataset[row], "key": SampleKey(0, row), "weight": 1.0}])
        found = task.evaluate(batch, Randomness(config.run.seed), config.validation.quantiles)
        losses.append(found.sums["loss"].item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("weights", "factor"), [("auto", 0.5), ("model", 1.0)])
def test_the_figures_are_those_of_the_rows_that_can_be_read(run, weights, factor):
    notes: list[str] = []
    found = mm_core.evaluate(run, weights=weights, note=notes.append)
    assert found.figures["loss"] == pytest.approx(expected_loss(run, [0, 1, 2, 4], factor), rel=1e-5)
    assert (found.figures["rows"], found.figures["unreadable"], found.step) == (4, 1, 9)
    assert "3.mp4" in notes[0] and "latent_psnr" in found.figures
    assert found.weights == {"auto": "ema", "model": "model"}[weights]


def test_the_command_prints_a_table_or_json(run, capsys):
    arguments = ["eval", "--run", str(run), "--weights", "model", "--rows", "2"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "step_00000009, model weights, data.validation" in table and "loss_at/0.5" in table
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 2 and found["step"] == 9
    assert found["metrics"]["loss"] == pytest.approx(expected_loss(run, [0, 2], 1.0), rel=1e-5)


def predicted(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_fixed_noise_loss_of_each_clip_is_written_down(run, tmp_path):
    out = tmp_path / "rows.jsonl"
    assert main(["eval", "--run", str(run), "--weights", "model", "--predictions", str(out)]) == 0
    rows = predicted(out)
    assert [row["row"] for row in rows] == list(range(ROWS))
    assert "3.mp4" in rows[3]["id"] and rows[3].keys() == {"row", "id", "error"}
    for row in (rows[number] for number in (0, 1, 2, 4)):
        assert row["loss"] == pytest.approx(expected_loss(run, [row["row"]], 1.0), rel=1e-5)
        assert row["id"].endswith(f"{row['row']}.mp4") and row["weight"] == 1
        at = [row[f"loss_at/{quantile}"] for quantile in (0.1, 0.3, 0.5, 0.7, 0.9)]
        assert sum(at) / 5 == pytest.approx(row["loss"], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_answer_as_one_does(run, tmp_path, mm):
    found = []
    for ranks in (1, 2):
        out, rows = tmp_path / f"{ranks}.json", tmp_path / f"{ranks}.jsonl"
        files = ["--out", str(out), "--predictions", str(rows)]
        if ranks == 1:
            assert main(["eval", "--run", str(run), *files]) == 0
        else:
            done = mm("eval", "--run", run, "--nproc", ranks, *files)
            assert done.code == 0, done.err
            assert done.err.count("could not be read") == 1
        found.append((json.loads(out.read_text()), predicted(rows)))
    (one, alone), (two, shared) = found
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-6) and two["rows"] == one["rows"] == 4
    assert (one["ranks"], two["ranks"]) == (1, 2) and one["weights"] == two["weights"] == "ema"
    for mine, theirs in zip(alone, shared, strict=True):
        assert mine.pop("id") == theirs.pop("id") and mine.pop("error", None) == theirs.pop("error", None)
        assert theirs == pytest.approx(mine, rel=1e-6)


def test_other_data_can_be_named(run, capsys):
    sizes = ["num_frames=4", "height=16", "width=16"]
    data = ["type=video_text", f"annotations={run.parent / 'clips.json'}", *sizes]
    overrides = [f"data.test.{item}" for item in data]
    assert main(["eval", "--run", str(run), "--split", "test", "--clips", "1", "--json", *overrides]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 1


def test_the_label_is_of_the_weights_that_were_taken_whatever_the_config_asks(run, capsys):
    assert main(["eval", "--run", str(run), "--json", "ema=null"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["loss"] == pytest.approx(expected_loss(run, [0, 1, 2, 4], 0.5), rel=1e-5)
    assert found["weights"] == "ema", "the checkpoint holds an average, and that is what was evaluated"


def test_auto_takes_the_weights_of_a_checkpoint_without_an_average(run, tmp_path):
    plain, config = tmp_path / "tiny", load_config(next(run.glob("checkpoints/*/config.yaml")))
    model = {f"predictor.{name}": t for name, t in loaded(config, 1.0).predictor.state_dict().items()}
    CheckpointStore(plain, 1).save(9, {"model": model, "optimizer": {}}, {}, to_yaml(config))  # ema: {} in it
    found = mm_core.evaluate(plain)
    assert found.figures["loss"] == pytest.approx(expected_loss(run, [0, 1, 2, 4], 1.0), rel=1e-5)
    assert found.weights == "model"


@pytest.fixture(scope="module")
def unvalidated(run, tmp_path_factory) -> Path:
    """The same run as one that was trained without held-out data."""
    folder = tmp_path_factory.mktemp("unvalidated with a space") / "tiny"
    config = config_of(run.parent)
    del config["data"]["validation"], config["validation"]
    path = folder.parent / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    plain = load_config(path)
    model = {f"predictor.{name}": t for name, t in loaded(plain, 1.0).predictor.state_dict().items()}
    CheckpointStore(folder, 1).save(9, {"model": model, "optimizer": {}}, {}, to_yaml(plain))
    return folder


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_hint_for_a_run_without_the_data_is_a_command_that_works(unvalidated, capsys, split):
    assert main(["eval", "--run", str(unvalidated), "--split", split]) == 1
    error = capsys.readouterr().err
    assert f"the run's config has no data.{split}" in error
    (command,) = (line.partition(": mm ")[2] for line in error.splitlines() if ": mm " in line)
    assert "random_start" not in command and "reader" not in command, "what has its default is left out"
    assert main(shlex.split(command)) == 0
    out = capsys.readouterr().out
    assert f"step_00000009, model weights, data.{split}" in out and "loss_at/0.5" in out


def test_the_hint_for_a_table_names_all_of_its_file(tmp_path):
    table = {"type": "text_rows", "file": "rows.csv", "tokenizer": "words", "label": "mood", "part": [0, 0.9]}
    task = {"type": "pretrained", "from_pretrained": "m", "auto_class": "AutoModelForCausalLM"}
    document = {"run": {"name": "a"}, "task": task, "data": {"train": table}, "train": {"steps": 1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    CheckpointStore(tmp_path, 1).save(1, {"model": {}}, {}, to_yaml(load_config(tmp_path / "run.yaml")))
    with pytest.raises(MMError, match="has no data") as caught:
        mm_core.evaluate(tmp_path, split="test")
    assert "the complete training file: mm eval" in caught.value.hint
    assert "label: mood" in caught.value.hint and "part" not in caught.value.hint


def test_one_override_names_the_held_out_data_of_a_run_without_any(run, unvalidated, capsys):
    data = f"data.validation={{type: video_text, annotations: {run.parent / 'clips.json'}, num_frames: 4,"
    assert main(["eval", "--run", str(unvalidated), "--json", data + " height: 16, width: 16}"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--run", "nowhere"], "nowhere: there is no such run"),
        (["--run", "{run}", "--split", "test"], "the run's config has no data.test"),
        (["--run", "{run}", "--checkpoint", "best"], "this run has recorded no best checkpoint"),
    ],
)
def test_what_is_wrong_is_a_readable_error(run, capsys, arguments, sentence):
    assert main(["eval", *(argument.format(run=run) for argument in arguments)]) == 1
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error
    if "--split" in arguments:
        assert "accepted: --split validation" in error
