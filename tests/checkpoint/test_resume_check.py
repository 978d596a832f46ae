"""What has changed since a checkpoint: safe, to be allowed, or refused."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest

from mm_core.builtin.configs.engines import FSDP2Config
from mm_core.checkpoint.resume_check import allowed, check_resume, differences_of, rule
from mm_core.config.components import resume_marks
from mm_core.config.load import load_config
from mm_core.config.sections import RunConfig
from mm_core.errors import CheckpointError

QUICKSTART = Path(__file__).parents[2] / "configs/custom_dit/quickstart.yaml"
BEFORE = {
    "config": {
        "run": {"name": "a", "dir": "runs", "seed": 1},
        "task": {
            "type": "core/text_to_video",
            "predictor": {"type": "custom_dit/custom_dit", "num_layers": 2},
        },
        "data": {"train": {"type": "core/video_text", "annotations": "a.json"}, "loader": {"workers": 2}},
        "train": {"steps": 10, "global_batch_size": 8, "freeze": [], "non_finite": {"policy": "stop"}},
        "engine": {"type": "core/fsdp2", "sharding_size": "auto", "cast_forward_inputs": True},
        "optimizer": {"type": "core/adamw", "lr": 1e-05, "betas": [0.9, 0.999]},
        "ema": None,
    },
    "plugins": [
        {"key": "task", "type": "core/text_to_video", "distribution": "mm-core", "version": "0.1.0"},
        {"key": "p", "type": "custom_dit/custom_dit", "distribution": "mm-custom-dit", "version": "0.1.0"},
    ],
    "data": {"train": {"type": "core/video_text", "rows": 64, "files": {"annotations": "ab12"}}},
    "devices": {"device": "cpu", "torch": "2.13.0"},
    "world": 2,
}


def changed(path: str, value: object) -> dict:
    after = copy.deepcopy(BEFORE)
    *parents, last = path.split(".")
    place = after
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[last] = value
    return after


def test_data_that_the_checkpoint_does_not_list():
    """What `mm import` makes: any data will do, and the table shows it."""
    made = BEFORE | {"data": {}}
    assert check_resume(made, BEFORE) == [
        "changed since the checkpoint:",
        "  data.train  not known -> 64 rows  safe  the checkpoint was made without data",
    ]
    assert check_resume(made, made) == []


def test_nothing_changed_reports_nothing():
    assert check_resume(BEFORE, copy.deepcopy(BEFORE)) == []


@pytest.mark.parametrize(
    ("path", "value", "verdict"),
    [
        ("world", 4, "safe"),
        ("config.train.steps", 20, "safe"),
        ("config.data.loader.workers", 0, "safe"),
        ("config.data.train.annotations", "elsewhere/a.json", "safe"),
        ("devices.torch", "2.7.1", "safe"),
        ("config.train.non_finite", {"policy": "skip"}, "safe"),
        ("config.engine.type", "own/pairs", "safe"),
        ("config.optimizer.lr", 2e-05, "allow"),
        ("config.run.seed", 2, "allow"),
        ("config.train.global_batch_size", 16, "allow"),
        ("data.train.files", {"annotations": "cd34"}, "allow"),
        ("plugins.1.version", "0.2.0", "allow"),
        ("plugins.0.version", "0.1.1", "safe"),
        ("config.ema", {"decay": 0.9}, "allow"),
        ("config.task.predictor.num_layers", 3, "allow"),
        ("config.task.predictor.type", "wan/transformer", "refused"),
        ("config.optimizer.type", "core/muon", "refused"),
        ("config.train.freeze", ["predictor.blocks.0"], "refused"),
    ],
)
def test_each_difference_has_a_verdict(path, value, verdict):
    (difference,) = differences_of(BEFORE, changed(path, value))
    assert difference.verdict == verdict


FSDP2 = {
    "sharding_size": "safe",
    "sub_modules_to_wrap": "safe",
    "ignored_modules": "safe",
    "frozen": "safe",
    "recompute_modules": "safe",
    "use_reentrant": "safe",
    "reshard_after_forward": "safe",
    "param_dtype": "allow",
    "reduce_dtype": "allow",
    "output_dtype": "allow",
    "cast_forward_inputs": "allow",
    "num_to_forward_prefetch": "safe",
    "num_to_backward_prefetch": "safe",
    "offload_to_cpu": "safe",
    "pin_memory": "safe",
}


def test_the_keys_of_fsdp2_have_the_verdicts_that_they_had_before_they_were_marked():
    """Golden: the table of 789543b."""
    marks = resume_marks(load_config(QUICKSTART))
    reasons = {"safe": "changes speed, memory or what is shown", "allow": "changes the precision"}
    found = {
        field.name: rule(f"config.engine.{field.name}", marks) for field in dataclasses.fields(FSDP2Config)
    }
    before = {key: (verdict, reasons[verdict]) for key, verdict in FSDP2.items()}
    assert {key: found[key] for key in before} == before
    safe, rounding = ("safe", reasons["safe"]), ("allow", "changes the kernels, and so the rounding")
    for key in ("preset", "context_parallel", "recompute", "offload"):
        assert found[key] == safe
    for key in ("attention", "compile", "accumulate"):
        assert found[key] == rounding
    assert {rule(f"config.engine.base.{key}", marks) for key in ("stream", "keep")} == {safe}
    assert rule("config.engine.frozen.text_encoder", marks) == found["frozen"]
    assert rule("config.engine.type", marks) == (
        "safe",
        "states are loaded by name, and other names are refused",
    )
    assert rule("config.engine.new", marks) == ("allow", "changes what is learned")


def test_adapters_are_compared_by_the_layers_that_they_have():
    """Not by the file or the patterns that named them, where both sides list which these are."""
    layer = {"rank": 4, "alpha": 4.0, "dora": False, "rslora": False, "modules": ["predictor.a"]}
    row = {"name": "default", "train": True, "dropout": 0.0, "layers": [layer]}
    before = changed("config.train.adapters", [{"from": "gone"}]) | {"adapters": [row]}
    after = changed("config.train.adapters", [{"targets": ["a"]}])
    assert differences_of(before, after | {"adapters": [row]}) == []
    wider = after | {"adapters": [{**row, "layers": [{**layer, "alpha": 8.0}]}]}
    (difference,) = differences_of(before, wider)
    assert (difference.key, difference.verdict) == ("train.adapters", "allow")
    # A checkpoint of before such records.
    (difference,) = differences_of({**before, "adapters": []}, wider)
    assert difference.before == [{"from": "gone"}]


def test_a_change_to_be_allowed_names_the_flag_and_shows_the_table():
    with pytest.raises(CheckpointError) as caught:
        check_resume(BEFORE, changed("config.optimizer.lr", 2e-05))
    assert str(caught.value) == (
        "the run has changed since the checkpoint: optimizer.lr\n"
        "  optimizer.lr  1e-05 -> 2e-05  needs --allow  changes what is learned\n"
        "  hint: if the change is intended, add --allow optimizer.lr"
    )
    for allow in ("optimizer.lr", "optimizer", "all"):
        lines = check_resume(BEFORE, changed("config.optimizer.lr", 2e-05), [allow])
        assert lines[0] == "changed since the checkpoint:"


def test_what_is_refused_is_refused_whatever_is_allowed():
    with pytest.raises(CheckpointError, match=r"(?s)optimizer.type.*init_from to load the weights only"):
        check_resume(BEFORE, changed("config.optimizer.type", "core/muon"), ["all"])


def test_another_value_from_the_environment_is_a_difference():
    before = {**BEFORE, "environment": {"optimizer.lr": "12ab", "run.dir": "0000", "gone": "1"}}
    after = {**BEFORE, "environment": {"optimizer.lr": "34cd", "run.dir": "ffff", "come": "2"}}
    assert [(found.key, found.verdict) for found in differences_of(before, after)] == [
        ("optimizer.lr", "allow"),
        ("run.dir", "safe"),
    ]
    with pytest.raises(CheckpointError, match=r"optimizer.lr  from the environment -> another value"):
        check_resume(before, after)
    assert check_resume(BEFORE, after) == []


def test_a_key_that_a_newer_version_adds_is_no_difference():
    assert differences_of(BEFORE, changed("config.train.new_key", 5)) == []


def test_a_checkpoint_without_these_facts_is_noted():
    assert check_resume({}, BEFORE) == [
        "the checkpoint has no manifest: changes since it was saved were not checked"
    ]


def test_allow_takes_whole_parts_of_keys():
    assert not allowed("optimizer.lr", ["opt"]) and not allowed("optimizer.lr", ["optimizer.l"])


def test_every_section_of_the_schema_has_a_rule_of_its_own_or_the_strict_one():
    """A key that nobody has thought of needs --allow."""
    assert rule("config.something.new") == ("allow", "changes what is learned")
    names = {field.name for field in dataclasses.fields(RunConfig) if field.metadata.get("yaml", True)}
    assert {"checkpoint", "log", "validation", "profile", "callbacks"} <= {
        name for name in names if rule(f"config.{name}.x")[0] == "safe"
    }
