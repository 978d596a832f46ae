"""The keys of a DeepSpeed JSON file know where they were written, and errors say it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from json_cases import facts_of
from mm_deepspeed.config import DeepSpeedConfig
from mm_deepspeed.json_file import place_of, read_json
from mm_deepspeed.settings import completed

from mm_core.errors import ConfigError

TEXT = """// "gradient_clipping": 7
{
  /* "zero_optimization": {
  */
  "zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"},
  # "train_batch_size": 4
  "train_batch_size": 16, "gradient_clipping": 0.5,
  optimizer: {
    "type": "AdamW"  // "params": {}
    params: {"lr": 0.5,
      "betas": [0.9,
        0.999]}
  },
  "scheduler": {
    "type": "WarmupLR", "params": {
      "note": "lr",
      "warmup_num_steps":
        7
    }
  },
  "wandb": {"enabled": false, "project": "http://host/{a}"}
}
"""


def test_each_key_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(TEXT)
    settings = read_json("ds.json")
    lines = {
        "zero_optimization": 5,
        "zero_optimization.reduce_bucket_size": 5,
        "train_batch_size": 7,
        "gradient_clipping": 7,
        "optimizer": 8,
        "optimizer.type": 9,
        "optimizer.params": 10,
        "optimizer.params.lr": 10,
        "optimizer.params.betas": 11,
        "optimizer.params.eps": 10,  # absent: the section's
        "scheduler.params.warmup_num_steps": 17,
        "wandb.enabled": 21,
    }
    assert {path: place_of(settings, path) for path in lines} == {p: f"ds.json:{n}" for p, n in lines.items()}
    assert place_of(settings, "bf16.enabled") == "ds.json"
    assert place_of({"bf16": {"enabled": True}}, "bf16.enabled") == ""
    assert settings["optimizer"] == {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.9, 0.999]}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '{\n"zero_optimization": {\n\n"overlap": true}}',
            "config ds.json:4: zero_optimization.overlap is not",
        ),
        ('{\n"fp16": {"enabled": 1}}', "config ds.json:2: fp16.enabled is 1, not true or false"),
        ('{"zero_optimization": {\n"stage": 9}}', "config ds.json:2: zero_optimization.stage is 9"),
        ('{\n"optimizer": {"type": "Lamb"}}', "config ds.json:2: optimizer.type Lamb is not taken over"),
    ],
)
def test_a_key_that_is_wrong_in_a_file_is_named_with_its_line(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        DeepSpeedConfig(config="ds.json")
    assert sentence in caught.value.render()


def test_a_key_that_is_there_twice_is_named_with_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true},\n"fp16": {"enabled": false},\n\n"bf16": {}}')
    with pytest.raises(ValueError, match=r"ds\.json:4: the key 'bf16' appears twice, also on line 1"):
        DeepSpeedConfig(config=str(file))


def test_a_setting_that_contradicts_the_run_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(TEXT.replace('"note": "lr",', ""))
    settings = DeepSpeedConfig(config="ds.json").settings

    def found(facts: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            completed(settings, facts)
        return [fault.what for fault in caught.value.faults]

    faults = found(facts_of())
    assert faults[0].startswith("ds.json:7: train_batch_size is 16, but ")
    assert any(
        fault.startswith("ds.json:10: optimizer.params.lr is 0.5, but optimizer.lr") for fault in faults
    )
    assert any(
        fault.startswith("ds.json:17: scheduler.params.warmup_num_steps is 7, but") for fault in faults
    )
    assert all(fault.startswith("ds.json:") for fault in faults)
    other = replace(facts_of().optimizer, type="core/muon")
    assert any(
        fault.startswith("ds.json:9: optimizer.type is AdamW, which is core/adamw, but")
        for fault in found(replace(facts_of(), optimizer=other))
    )
