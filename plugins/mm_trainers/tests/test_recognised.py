"""Each tool's files are recognised by its own migration alone."""

import pytest
from mm_trainers import testing
from mm_trainers.aitoolkit import AiToolkit
from mm_trainers.language import LlamaFactory, TrainingArguments
from mm_trainers.musubi import MusubiTuner

from mm_core.errors import ConfigError
from mm_core.interchange import migration_of
from mm_core.plugin.registry import get_registry
from support.conformance import examined
from support.texts import ROOT

TOOLS = {
    "ai_toolkit": AiToolkit,
    "musubi_tuner": MusubiTuner,
    "llama_factory": LlamaFactory,
    "training_arguments": TrainingArguments,
}


@pytest.mark.parametrize("name", TOOLS)
def test_the_migration_keeps_the_contract_of_migrations(name):
    outcomes = examined(f"trainers/{name}")
    assert {o.check: o.reason for o in outcomes if o.status != "passed"} == {}


@pytest.mark.parametrize("name", TOOLS)
def test_files_of_a_tool_are_recognised_by_its_migration_alone(name, tmp_path):
    paths = getattr(testing, name)(tmp_path)
    for given in (
        paths,
        [tmp_path],
        *([path] for path in paths if path.name not in ("ds.json", "dataset_info.json")),
    ):
        assert [each for each, tool in TOOLS.items() if tool().recognise(given)] == [name]
        assert migration_of(get_registry(), given).tool == TOOLS[name].tool


@pytest.mark.parametrize(
    ("name", "file", "old", "new"),
    [
        ("ai_toolkit", "style.yaml", "resolution: 512", "resolution: [a, b]"),
        ("ai_toolkit", "style.yaml", "resolution: 512", "num_frames: many"),
        ("musubi_tuner", "data.toml", "target_frames = [17]", "target_frames = ['a']"),
        ("musubi_tuner", "train.sh", "--max_train_steps 10", "--min_timestep first"),
        ("llama_factory", "sft.yaml", "lora_rank: 8", "lora_rank: [8]"),
        ("training_arguments", "arguments.json", '"learning_rate"', '"warmup_steps": "few", "learning_rate"'),
    ],
)
def test_values_of_other_types_are_an_error_that_names_the_file(name, file, old, new, tmp_path):
    paths = getattr(testing, name)(tmp_path)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=f"is none that {TOOLS[name].tool} takes"):
        TOOLS[name]().migrate(paths)


def test_what_only_a_shell_knows_is_told_and_counts_as_absent(tmp_path):
    paths = testing.musubi_tuner(tmp_path)
    script = tmp_path / "train.sh"
    script.write_text(
        script.read_text().replace("--discrete_flow_shift 3.0", "--discrete_flow_shift $(shift)")
    )
    (run,) = MusubiTuner().migrate(paths)
    assert [left.key for left in run.differs] == ["--discrete_flow_shift"]
    assert run.lines["task.scheduler.shift"].value == 1.0


def test_a_list_of_anything_is_no_data_set(written):
    assert not MusubiTuner().recognise([written("a.toml", "datasets = [1, 'a', {b = 2}]")])


def test_none_takes_a_config_of_ours_or_a_json_of_deepspeed_alone(written):
    ours = [*ROOT.glob("configs/*/*.yaml"), *ROOT.glob("plugins/mm_deepspeed/tests/jsons/*.json")]
    assert len(ours) > 20
    for path in (*ours, written("ds.json", '{"zero_optimization": {"stage": 2}}')):
        assert not [name for name, tool in TOOLS.items() if tool().recognise([path])], path


def test_validating_a_file_of_a_tool_names_the_command(tmp_path):
    from mm_core.config.load import load_config
    from mm_core.interchange import foreign

    (file,) = testing.ai_toolkit(tmp_path)
    error = foreign(get_registry(), file)
    assert isinstance(error, ConfigError)
    assert "this is a file of ai-toolkit" in error.what
    with pytest.raises(ConfigError):
        load_config(file)
