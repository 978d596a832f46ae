"""`mm sample`: a stored run generates what its task generates; files hold the clips; faults are errors."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from mm_core.checkpoint.store import CheckpointStore
from mm_core.cli.main import main
from mm_core.config.dump import to_yaml
from mm_core.config.load import load_config
from mm_core.contracts import Clip, EnginePlan, Randomness, SampleRequest
from mm_core.data.media.images import read_image
from mm_core.data.media.video_files import write_clips
from mm_core.data.rows.prompts import Prompt, read_prompts
from mm_core.engines.fsdp2 import FSDP2Engine
from mm_core.errors import CheckpointError, DataError, MMError
from mm_core.inference import sample as sampling
from mm_core.inference.sample import cast_parameters, sample
from mm_core.loading import initial_weights
from mm_core.modules.casting import cast_as_planned
from mm_core.modules.initialise import initialise
from mm_core.plan import build_task
from mm_core.runtime.process_group import process_group
from mm_core.tasks.text_to_video.task import TextToVideo
from support.runs import load_task
from support.tiny_models import ONE_BLOCK

PROMPTS = ["a red circle moves left", "a blue square"]
CONFIG = {
    "run": {"name": "tiny"},
    "task": {**ONE_BLOCK, "sample": {"steps": 3, "guidance": 2.0}},
    "data": {
        "train": {
            "type": "video_text",
            "annotations": "data.json",
            "num_frames": 4,
            "height": 8,
            "width": 12,
            "fps": 8,
        }
    },
    "train": {"steps": 1},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with weights that are no longer those of its seed."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    config = load_config(folder / "config.yaml")
    task = trained_task(folder)
    model = {f"predictor.{key}": tensor for key, tensor in task.predictor.state_dict().items()}
    CheckpointStore(folder, 1).save(7, {"model": model, "optimizer": {}}, {}, to_yaml(config))
    return folder


def trained_task(folder: Path) -> torch.nn.Module:
    task = build_task(load_config(folder / "config.yaml"))
    task.text_encoder.load(torch.device("cpu"))
    task.predictor.to_empty(device="cpu")
    initialise(task.predictor, "predictor", Randomness(1))
    with torch.no_grad():
        for name, parameter in task.predictor.named_parameters():
            parameter.add_(0.1 * Randomness(2).normal(tuple(parameter.shape), name))
    return task


@pytest.fixture(scope="module")
def averaged(tmp_path_factory) -> Path:
    """A run whose best checkpoint (3) is not its newest (7); each holds an average of other weights."""
    folder = tmp_path_factory.mktemp("runs") / "averaged"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "ema": {}}))
    config = load_config(folder / "config.yaml")
    store = CheckpointStore(folder, 9)
    for step in (3, 7):
        model = {f"predictor.{k}": t * step for k, t in trained_task(folder).predictor.state_dict().items()}
        ema = {name: tensor * 0.5 for name, tensor in model.items()}
        store.save(step, {"model": model, "optimizer": {}, "ema": ema}, {}, to_yaml(config))
    (folder / "checkpoints/BEST").write_text("step_00000003\n")
    return folder


def expected_clip(folder: Path, factor: float) -> torch.Tensor:
    task = trained_task(folder)
    with torch.no_grad():
        for parameter in task.predictor.parameters():
            parameter.mul_(factor)
    request = SampleRequest((PROMPTS[0],), seed=5, num_frames=4, height=8, width=12, fps=8.0)
    return task.sample(request)[0].pixels


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 3.5),
        ({"weights": "ema"}, 3.5),
        ({"weights": "model"}, 7.0),
        ({"checkpoint": "best"}, 1.5),
        ({"checkpoint": "best", "weights": "model"}, 3.0),
        ({"step": 3}, 1.5),
        ({"step": "latest", "weights": "model"}, 7.0),
    ],
)
def test_the_average_is_sampled_where_there_is_one_and_checkpoint_and_weights_may_be_chosen(
    averaged, options, factor
):
    step = options.get("step")
    named = averaged if step is None else f"{averaged}@{step}"
    others = {name: value for name, value in options.items() if name != "step"}
    (clip,) = sample(named, PROMPTS[0], seed=5, **others)
    torch.testing.assert_close(clip.pixels, expected_clip(averaged, factor), rtol=0, atol=1e-6)


def test_an_average_that_is_not_there_is_a_readable_error(run, capsys):
    assert main(["sample", "--run", str(run), "--prompt", "x", "--weights", "ema"]) == 1
    assert "this checkpoint contains no average of the weights" in capsys.readouterr().err
    assert main(["sample", "--run", str(run), "--prompt", "x", "--checkpoint", "best"]) == 1
    assert "this run has recorded no best checkpoint" in capsys.readouterr().err


def on_accelerator(task: TextToVideo, **fields) -> EnginePlan:
    """The plan of one process that samples on an accelerator."""
    engine = FSDP2Engine(**fields)
    engine.device = torch.device("cuda")
    return engine.plan(task, 1, 0, purpose="sample")


def cast_whole(task: TextToVideo, plan: EnginePlan) -> None:
    """What the engine of one process does before weights are there."""
    cast_parameters(task, plan)
    cast_as_planned(task, plan)


def test_a_lone_process_computes_in_bf16_what_the_engine_computes(run):
    """Sharded modules cast parameters and inputs, and spare the timestep: so does sampling."""
    config = load_config(run / "config.yaml", ["engine.param_dtype=bf16"])
    request = SampleRequest((PROMPTS[0],), seed=5, num_frames=4, height=8, width=12, fps=8.0)
    lone = load_task(config, run / "checkpoints/step_00000007")
    weights = {name: tensor.clone() for name, tensor in lone.predictor.named_parameters(prefix="predictor")}
    full = lone.sample(request)[0].pixels
    cast_whole(lone, on_accelerator(lone, param_dtype="bf16", sharding_size=4))
    found = lone.sample(request)[0].pixels
    with process_group():
        sharded, engine = build_task(config), config.registry.build("engine", config.engine)
        plan = engine.plan(sharded, 1, 2)
        sharded.text_encoder.load(torch.device("cpu"))
        engine.prepare(sharded, plan, lambda p: torch.optim.AdamW(p.values()), Randomness(1))
        with torch.no_grad():
            for name, parameter in engine.named_parameters():
                parameter.to_local().copy_(weights[name])
        with engine.evaluating():
            expected = sharded.sample(request)[0].pixels
    assert torch.equal(found, expected)
    assert 1e-4 < (found - full).abs().mean() < 0.05  # bf16 is neither fp32 nor nonsense


def read_video(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_a_stored_run_generates_what_its_task_generates(run):
    clips = sample(run, prompts=PROMPTS, seed=5)
    request = SampleRequest(tuple(PROMPTS), seed=5, num_frames=4, height=8, width=12, fps=8.0)
    expected = trained_task(run).sample(request)
    for clip, wanted in zip(clips, expected, strict=True):
        assert torch.equal(clip.pixels, wanted.pixels)
        assert (clip.prompt, clip.fps) == (wanted.prompt, 8.0)


def test_a_checkpoint_may_be_named_itself_and_options_change_the_clip(run):
    whole = sample(run, PROMPTS[0])[0]
    assert torch.equal(sample(run / "checkpoints/step_00000007", PROMPTS[0])[0].pixels, whole.pixels)
    small = sample(run, PROMPTS[0], num_frames=1, height=4, width=4, steps=1, guidance=1.0, fps=3.0)[0]
    assert small.pixels.shape == (3, 1, 4, 4) and small.fps == 3.0
    other = sample(run, PROMPTS[0], negative_prompt="a blue square")[0]
    assert not torch.allclose(other.pixels, whole.pixels, atol=1e-3)


def test_the_command_writes_mp4_prompts_and_a_sheet(run, tmp_path, capsys):
    out = tmp_path / "clips"
    arguments = ["sample", "--run", str(run), "--out", str(out), "--seed", "5"]
    assert main([*arguments, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]) == 0
    assert f"2 clips in {out}" in capsys.readouterr().out
    rows = json.loads((out / "prompts.json").read_text())
    assert [row["cap"] for row in rows] == PROMPTS
    assert all(read_video(out / row["path"]).shape == (4, 8, 12, 3) for row in rows)
    with Image.open(out / "contact_sheet.png") as sheet:
        assert sheet.width > 4 * 12


@pytest.mark.parametrize(("height", "width"), [(16, 16), (17, 15), (128, 130)])
def test_a_written_clip_keeps_its_colours(tmp_path, height, width):
    pixels = torch.full((3, 5, height, width), -0.8)
    pixels[0, :, 4:10, 4:10] = 0.8  # red
    pixels[2, :, 10:14, 4:10] = 0.9  # blue
    write_clips([Clip(pixels, 8.0, "a / ü?")], tmp_path)
    (path,) = tmp_path.glob("*.mp4")
    found = read_video(path)
    wanted = ((pixels + 1) * 127.5).permute(1, 2, 3, 0).numpy()
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).mean() < 6
    with av.open(str(path)) as container:
        assert float(container.streams.video[0].average_rate) == 8.0


def test_a_single_frame_is_a_clip_too(tmp_path):
    write_clips([Clip(torch.zeros(3, 1, 16, 16), 8.0, "still")], tmp_path)
    assert read_image(next(tmp_path.glob("000-still.png"))).shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.txt", "one\n\n two \n"),
        ("p.json", '["one", {"prompt": "two"}]'),
        ("p.jsonl", '"one"\n{"path": "x.mp4", "cap": "two"}\n'),
    ],
)
def test_prompts_are_read_from_lines_json_and_jsonl(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name) == [Prompt("one"), Prompt("two")]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("p.txt", "\n \n", "the file of prompts is empty"),
        ("p.json", "[]", "the file of prompts is empty"),
        ("p.json", "{480, 832}", "this is not JSON"),
        ("p.json", "[3]", "a row is not a prompt: 3"),
    ],
)
def test_prompt_files_that_hold_none_are_readable_errors(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=sentence) as caught:
        read_prompts(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--run", "nowhere", "--prompt", "x"], "nowhere: there is no such run"),
        (["--run", "{run}"], "there is no prompt"),
        (["--run", "{run}", "--prompts", "nowhere.txt"], "the file of prompts does not exist"),
        (["--run", "{run}", "--prompt", "x", "--width", "7"], "width 7 (nearest: 6, 8)"),
        (["--run", "{empty}", "--prompt", "x"], "neither a checkpoint nor a run"),
    ],
)
def test_what_is_wrong_is_a_readable_error(run, tmp_path, capsys, arguments, sentence):
    places = {"run": str(run), "empty": str(tmp_path)}
    assert main(["sample", *(argument.format(**places) for argument in arguments)]) == 1
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


def test_from_python_the_same_faults_are_errors(run, tmp_path):
    with pytest.raises(MMError, match="there is no prompt"):
        sample(run)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="this run has no complete checkpoint"):
        sample(tmp_path, "x")


def test_options_of_answers_are_refused_of_a_run_that_makes_clips(run, capsys):
    assert main(["sample", "--run", str(run), "--prompt", "x", "--temperature", "0.5"]) == 1
    said = capsys.readouterr().err
    assert "the task core/text_to_video makes clips, so --temperature cannot be used" in said


def test_a_run_that_makes_clips_does_not_chat(run, capsys):
    assert main(["chat", "--run", str(run)]) == 1
    assert "the task core/text_to_video does not answer prompts with text" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused(run, tmp_path):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["task"]["predictor"]["num_layers"] = 2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    other = trained_task(run)
    model = {f"predictor.{key}": tensor for key, tensor in other.predictor.state_dict().items()}
    text = to_yaml(load_config(tmp_path / "config.yaml"))
    CheckpointStore(tmp_path, 1).save(1, {"model": model, "optimizer": {}}, {}, text)
    with pytest.raises(CheckpointError, match=r"predictor\.blocks\.1"):
        sample(tmp_path, "x")


# -- over several ranks ------------------------------------------------------------------------------


NAMES = ["000-a-red-circle-moves-left.mp4", "001-a-blue-square.mp4", "002-green.mp4"]


def sampled(run: Path, out: Path, *options: str) -> dict[str, bytes]:
    rows = out.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [*PROMPTS, "green"]))
    assert main(["sample", "--run", str(run), "--prompts", str(rows), "--out", str(out), *options]) == 0
    return {file.name: file.read_bytes() for file in out.iterdir()}


@pytest.mark.slow
def test_two_ranks_write_the_files_of_one(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MM_DEVICE", "cpu")
    # One clip at a time: of a batch of another size, some CPUs compute other last bits.
    options = ["--guidance", "3", "--negative-prompt", "-- blue", "--seed", "5", "task.sample.batch_size=1"]
    alone = sampled(run, tmp_path / "one", *options)
    shared = sampled(run, tmp_path / "two", *options, "--nproc", "2")
    # The sheet holds every frame without a loss; x264 makes other bytes of the same frames now and then.
    assert shared.keys() == alone.keys()
    assert all(shared[name] == alone[name] for name in ("contact_sheet.png", "prompts.json"))
    assert sorted(alone) == sorted([*NAMES, "contact_sheet.png", "prompts.json"])
    assert capfd.readouterr().out.count("3 clips in ") == 2


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_with_one_error(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MM_DEVICE", "cpu")
    (tmp_path / NAMES[1]).mkdir()
    words = [word for text in PROMPTS for word in ("--prompt", text)]
    assert main(["sample", "--run", str(run), *words, "--nproc", "2", "--out", str(tmp_path)]) == 1
    error = capfd.readouterr().err
    assert error.count("mm: error") == 1 and "Traceback" not in error
    assert error.startswith(f"mm: error: rank 1: {tmp_path / NAMES[1]}: the clip cannot be written: ")


def test_each_clip_is_written_when_it_is_ready(run, tmp_path):
    (tmp_path / NAMES[1]).mkdir()
    with pytest.raises(DataError, match=r"001-a-blue-square\.mp4: the clip cannot be written: "):
        sample(run, prompts=PROMPTS, out=tmp_path)
    assert read_video(tmp_path / NAMES[0]).shape == (4, 8, 12, 3)
    (tmp_path / NAMES[1]).rmdir()
    assert sample(run, prompts=PROMPTS, out=tmp_path, keep=False) == []
    assert (tmp_path / NAMES[1]).is_file()


def test_a_rank_starts_no_ranks(run, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert main(["sample", "--run", str(run), "--prompt", "x", "--nproc", "2"]) == 1
    assert "--nproc cannot be used here: this process is already rank 0" in capsys.readouterr().err


def test_what_cannot_be_sampled_is_reported_before_weights_are_read(run, monkeypatch, capsys):
    monkeypatch.setattr(initial_weights, "load_model_only", None)
    assert main(["sample", "--run", str(run), "--prompt", "x", "--height", "7"]) == 1
    assert "height 7 (nearest: 6, 8)" in capsys.readouterr().err


def test_weights_are_read_in_the_dtype_that_computes(run, monkeypatch):
    """No tensor of the predictor is ever held in another one."""
    config = load_config(run / "config.yaml", ["engine.param_dtype=bf16"])
    checkpoint = run / "checkpoints/step_00000007"
    later = load_task(config, checkpoint)  # a CPU computes in float32: cast afterwards
    cast_whole(later, on_accelerator(later, param_dtype="bf16"))
    build, read = FSDP2Engine.__init__, {}

    def on_cuda(engine: FSDP2Engine, **fields: object) -> None:
        build(engine, **fields)
        engine.device = torch.device("cuda")

    monkeypatch.setattr(FSDP2Engine, "__init__", on_cuda)  # it plans, and another engine holds the weights

    def reading(path, state, weights, load=initial_weights.load_model_only):
        read.update({name: tensor.dtype for name, tensor in state.items()})
        return load(path, state, weights)

    monkeypatch.setattr(initial_weights, "load_model_only", reading)
    task = load_task(config, checkpoint)
    assert {torch.bfloat16} == {read[f"predictor.{name}"] for name, _ in task.predictor.named_parameters()}
    for name, tensor in task.predictor.state_dict(keep_vars=True).items():
        assert torch.equal(tensor, later.predictor.state_dict()[name]), name
    request = SampleRequest((PROMPTS[0],), seed=5, num_frames=4, height=8, width=12, fps=8.0)
    assert torch.equal(task.sample(request)[0].pixels, later.sample(request)[0].pixels)


def without(monkeypatch, *names: str, **methods) -> None:
    """A class of its own for the task that is sampled: text_to_video without some of its methods."""
    body = {k: v for k, v in vars(TextToVideo).items() if k not in (*names, "__dict__", "__weakref__")}
    kind = type("Quiet", (torch.nn.Module,), body | methods)

    def building(*given) -> torch.nn.Module:
        task = build_task(*given)
        task.__class__ = kind
        return task

    monkeypatch.setattr(sampling, "build_task", building)


@pytest.mark.parametrize("answer", [[], None])
def test_a_task_that_makes_nothing_is_a_readable_error(run, tmp_path, monkeypatch, capsys, answer):
    without(monkeypatch, "clips", sample=lambda task, request: answer)
    code = main(["sample", "--run", str(run), "--prompt", "a", "--prompt", "b", "--out", str(tmp_path / "o")])
    assert code == 1
    assert capsys.readouterr().err == (
        "mm: error: task.type: the task core/text_to_video made 0 clips for 2 prompts\n"
        "  accepted: a task whose `sample` returns one clip for each prompt, or one that answers with text\n"
        "  hint: let the task's `sample` return the clips; `mm eval` evaluates runs of tasks without clips\n"
    )


def test_a_task_without_samples_is_reported_before_weights_are_read(run, monkeypatch, capsys):
    without(monkeypatch, "clips", "sample", "check_request")
    monkeypatch.setattr(sampling, "load_as_rank", None)
    assert main(["sample", "--run", str(run), "--prompt", "a"]) == 1
    assert "the task text_to_video makes no clips\n" in capsys.readouterr().err.replace("core/", "")
