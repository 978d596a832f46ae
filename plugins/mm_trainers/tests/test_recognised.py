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
    for given in (paths, [tmp_path], *([path] for path in paths if path.name != "ds.json")):
        assert [each for each, tool in TOOLS.items() if tool().recognise(given)] == [name]
        assert migration_of(get_registry(), given).tool == TOOLS[name].tool


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
