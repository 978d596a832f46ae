"""Rules that join keys of the training sections, each placed at the key that it is about."""

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
            "train.steps: steps and epochs are both set; one of them says how long to train",
        ),
        (["train.steps=null"], "train.steps: steps or epochs must say how long to train"),
        (["validation={every: 5}"], "validation: validation has nothing to do: set data.validation, or"),
        ([HELD_OUT], "data.validation is set, but validation (every: 500, say) is not"),
        (["checkpoint.best=loss"], "checkpoint.best needs a validation: set validation and data.validation"),
        (
            [HELD_OUT, "validation={every: 4}", "checkpoint={best: loss, every: 6}"],
            "of checkpoint.every 6 and validation.every 4 neither is a multiple of the other",
        ),
        (["validation={samples: {prompts: []}}"], "validation.samples.prompts: prompts is empty"),
        ([HELD_OUT, "validation={timesteps: []}"], "validation.timesteps: timesteps is empty"),
        (["profile={steps: [5, 3]}"], "profile.steps: steps must rise: [first, last]"),
        (
            ["checkpoint.async=perhaps"],
            "found 'perhaps', a text\n  accepted: true or false or thread, process",
        ),
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

    assert to_mapping(load_config(path, ["checkpoint.async=process"]))["checkpoint"]["async"] == "process"
