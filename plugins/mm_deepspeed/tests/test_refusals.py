"""What a user can get wrong is one sentence with what to do, before anything trains."""

import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from json_cases import facts_of
from mm_deepspeed import library
from mm_deepspeed.engine import DeepSpeedEngine

from mm_core.cli.main import main, train_main
from mm_core.errors import PlanError, PluginError
from mm_core.schema.fields import ComponentConfig
from mm_core.tasks.pretrained.task import PretrainedTask
from support.runs import VIDEO

INSTALL = "pip install deepspeed==0.19.8"


def config(folder: Path, engine: dict[str, Any], **sections: Any) -> str:
    """The YAML of a run on clips that are made while it runs: 8 samples a step, in micro-batches of 2."""
    document = {
        "run": {"name": "tried", "dir": str(folder / "runs")},
        "task": VIDEO,
        "data": {"train": {"type": "shapes", "num_frames": 8, "height": 16, "width": 16, "clips": 16}},
        "engine": {"type": "deepspeed", **engine},
        "train": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 8, "clip_grad_norm": 1.0},
        **sections,
    }
    path = folder / "tried.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", ["core/muon", "core/adamw_8bit", "core/adamw_bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_needs_shapes_is_refused(kind: str, stage: int) -> None:
    facts = replace(facts_of(), optimizer=ComponentConfig("optimizer", kind, {}))
    engine = DeepSpeedEngine(settings={"zero_optimization": {"stage": stage}})
    with pytest.raises(PlanError) as caught:
        engine.check_training(facts)
    error = caught.value
    assert error.where == "optimizer.type" and error.what.startswith(kind)
    assert "adamw" in str(error.accepted) and "engine.type to fsdp2" in str(error.hint)


def test_a_loss_that_computes_logits_itself_is_refused_at_stage_3(tmp_path: Path) -> None:
    from support.pretrained_models import MODELS, save_model

    folder, name = save_model("qwen3", tmp_path), MODELS["qwen3"][3]
    with torch.device("meta"):
        tasks = [PretrainedTask(str(folder), name, loss=loss) for loss in ("auto", "plain")]
    plans = [DeepSpeedEngine(settings={"zero_optimization": {"stage": stage}}).plan for stage in (2, 3)]
    with pytest.raises(PlanError, match=r"hint: set task\.loss: plain"):
        plans[1](tasks[0], 2, 2.0)
    assert plans[0](tasks[0], 2, 2.0).world == plans[1](tasks[1], 2, 2.0).world == 2


def test_stage_0_takes_any_optimizer() -> None:
    facts = replace(facts_of(), optimizer=ComponentConfig("optimizer", "core/muon", {}))
    DeepSpeedEngine(settings={}).check_training(facts)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="only its version is another")
    monkeypatch.setattr(metadata, "version", lambda _: "0.99.0")
    with pytest.raises(PluginError) as caught:
        library.load(torch.device("cpu"))
    assert "deepspeed 0.99.0 is installed" in caught.value.what
    assert caught.value.accepted == "deepspeed 0.19.8" and caught.value.hint == INSTALL


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_dtype_that_the_device_does_not_have_is_refused(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = pytest.importorskip("deepspeed", reason="it knows what the device has")
    monkeypatch.setattr(type(deepspeed.get_accelerator()), f"is_{dtype}_supported", lambda _: False)
    with pytest.raises(PlanError, match=f"does not compute in {dtype} on this device") as caught:
        library.load(torch.device("cpu"), dtype)
    assert f"remove the section {dtype}" in str(caught.value.hint)


def absent(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    of = metadata.version

    def version(name: str) -> str:
        if name == "deepspeed":
            raise metadata.PackageNotFoundError(name)
        return of(name)

    if how == "not installed":
        monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "deepspeed", None)


@pytest.mark.parametrize("how", ["not installed", "cannot be imported"])
def test_without_deepspeed_there_is_one_sentence(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, how)
    with pytest.raises(PluginError, match="the engine needs deepspeed") as caught:
        library.load(torch.device("cpu"))
    assert caught.value.hint == INSTALL


def test_a_run_without_deepspeed_ends_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent(monkeypatch, "not installed")
    code = main(["train", "--config", config(tmp_path, {})])
    error = capsys.readouterr().err
    assert code == 1 and INSTALL in error and "Traceback" not in error


def test_a_json_that_contradicts_the_yaml_is_one_error_with_both_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four contradictions in one file: all of them are shown together."""
    file = tmp_path / "ds.json"
    file.write_text(
        '{"zero_optimization": {"stage": 2}, "train_batch_size": 16, "gradient_clipping": 0.5,'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},'
        ' "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7, "warmup_type": "linear"}}}'
    )
    lr = {"optimizer": {"type": "adamw", "lr": 1e-3}, "lr_schedule": {"type": "constant", "warmup_steps": 3}}
    path = config(tmp_path, {"config": str(file)}, **lr)
    code = train_main(["--config", path, "--dry-run"])
    error = capsys.readouterr().err
    assert code == 1 and "Traceback" not in error
    for there, here in (
        ("train_batch_size is 16", "train.micro_batch_size 2 x accumulation 4 x 1 shares of the data is 8"),
        ("gradient_clipping is 0.5", "train.clip_grad_norm is 1.0"),
        ("optimizer.params.lr is 0.5", "optimizer.lr is 0.001"),
        ("scheduler.params.warmup_num_steps is 7", "lr_schedule.warmup_steps is 3"),
    ):
        (line,) = [line for line in error.splitlines() if there in line]
        assert here in line


def test_a_dry_run_needs_no_deepspeed_and_shows_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    path = config(tmp_path, {"settings": {"zero_optimization": {"stage": 3}}})
    assert train_main(["--config", path, "--dry-run"]) == 0
    assert "ZeRO 3" in capsys.readouterr().out
