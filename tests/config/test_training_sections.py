"""Rules about several keys of the training sections, each reported at its key."""

from __future__ import annotations

import pytest

from mm_core.config.load import load_config
from mm_core.errors import ConfigError

HELD_OUT = "data.validation={type: video_text, annotations: a.json, num_frames: 8, height: 16, width: 16}"


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "run: {name: a}\n"
        "task: {type: text_to_video, predictor: custom_dit, autoencoder: pixel, text_encoder: bytes,"
        " scheduler: flow_match}\n"
        "data: {train: {type: video_text, annotations: a.json, num_frames: 8, height: 16, width: 16}}\n"
        "train: {steps: 10}\n"
    )
    return file


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["train.epochs=2"],
            "train.steps: steps and epochs are both set; remove one of them",
        ),
        (["train.steps=null"], "train.steps: steps and epochs are both missing; set one of them"),
        (
            ["validation={every: 5}"],
            "validation: validation is set but there is nothing to validate: set data.validation or",
        ),
        ([HELD_OUT], "data.validation is set but validation is not: add e.g. `validation: {every: 500}`"),
        (["checkpoint.export=lora/comfyui"], "checkpoint.export writes adapters, but there are none"),
        (["checkpoint.best=loss"], "checkpoint.best needs validation: set validation and data.validation"),
        (
            [HELD_OUT, "validation={every: 4}", "checkpoint={best: loss, every: 6}"],
            "make checkpoint.every (6) or validation.every (4) a multiple of the other",
        ),
        (["validation={samples: {prompts: []}}"], "validation.samples.prompts: prompts is empty"),
        ([HELD_OUT, "validation={timesteps: []}"], "validation.timesteps: timesteps is empty"),
        (["profile={steps: [5, 3]}"], "profile.steps: steps must be [first, last] with first <= last"),
        (["checkpoint.async=perhaps"], "found 'perhaps', a string\n  accepted: true or false"),
    ],
)
def test_keys_that_do_not_go_together(overrides, words, path):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize(("saves", "validations"), [(2, 6), (6, 6), (6, 2)])
def test_the_best_may_be_judged_at_every_save_or_at_some(saves, validations, path):
    every = f"checkpoint={{best: loss, every: {saves}}}"
    config = load_config(path, [HELD_OUT, f"validation={{every: {validations}}}", every])
    assert config.checkpoint.best == "loss"


def test_async_is_written_as_users_write_it(path):
    from mm_core.config.dump import to_mapping

    assert to_mapping(load_config(path, ["checkpoint.async=false"]))["checkpoint"]["async"] is False


# -- checkpoint.async of earlier versions ----------------------------------------------------------


@pytest.mark.parametrize("value", ["process", "thread"])
def test_a_way_to_save_that_was_removed_is_named_at_its_line(value, path):
    path.write_text(f"{path.read_text()}checkpoint:\n  every: 5\n  async: {value}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (fault,) = caught.value.faults
    assert str(fault) == (
        f"{path}:7: checkpoint.async: found {value!r}: the process mode was removed, and a thread writes"
        " every asynchronous save\n"
        "  accepted: true or false\n"
        "  hint: write `true` instead"
    )


@pytest.mark.parametrize("value", ["process", "thread"])
def test_a_way_to_save_that_was_removed_is_one_fault_among_the_others(value, path):
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"checkpoint={{async: {value}, every: 0}}", "train.steps=-1"])
    assert sorted(str(fault).split(": found")[0] for fault in caught.value.faults) == [
        "override 'checkpoint={async: " + value + ", every: 0}': checkpoint.async",
        "override 'checkpoint={async: " + value + ", every: 0}': checkpoint.every",
        "override 'train.steps=-1': train.steps",
    ]


@pytest.mark.parametrize(
    ("value", "read"), [("process", True), ("thread", True), ("true", True), ("false", False)]
)
@pytest.mark.parametrize("allow_code", [False, True])
def test_a_stored_config_of_an_earlier_version_is_read(value, read, allow_code, path):
    path.write_text(f"{path.read_text()}checkpoint: {{async: {value}}}\n")
    assert load_config(path, stored=True, allow_code=allow_code).checkpoint.async_ is read
    stored = path.with_name("config.yaml")  # `mm-train --config runs/x/config.yaml`
    stored.write_text(path.read_text())
    stored.with_name("manifest.json").write_text("{}")
    assert load_config(stored, allow_code=allow_code).checkpoint.async_ is read


def test_what_a_person_lays_upon_a_stored_config_is_of_this_version(path):
    with pytest.raises(ConfigError, match=r"checkpoint\.async: found 'process': the process mode was"):
        load_config(path, ["checkpoint.async=process"], stored=True)


@pytest.mark.parametrize("name", ["rows", "clips"])
def test_the_rows_of_a_validation_are_read_by_their_older_name_too(name, path):
    assert load_config(path, [HELD_OUT, f"validation={{{name}: 3}}"]).validation.rows == 3
    with pytest.raises(ConfigError, match=rf"validation\.{name}: found 0, an integer"):
        load_config(path, [HELD_OUT, f"validation={{{name}: 0}}"])


def test_a_key_under_both_of_its_names(path):
    with pytest.raises(ConfigError) as caught:
        load_config(path, [HELD_OUT, "validation={clips: 3, rows: 4}"])
    assert "validation.clips: 'clips' is a former name of 'rows', and both are set" in str(caught.value)
    assert "hint: set only one of them; in an override, use the name that the file uses" in str(caught.value)
