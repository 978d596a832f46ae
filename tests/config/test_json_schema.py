"""`mm config schema`: what the check of a config accepts, the schema accepts; what the schema can express, it
refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from mm_core.config.json_schema import run_schema
from mm_core.config.load import load_config
from mm_core.config.yaml_nodes import read_file
from mm_core.errors import ConfigError
from mm_core.plugin.registry import get_registry
from mm_core.schema.checking import check_component
from mm_core.schema.json_schema import TEXTS, SchemaWriter
from mm_core.schema.nodes import to_python

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs/custom_dit/quickstart.yaml"
SHIPPED = sorted({*ROOT.glob("plugins/*/mm_*/configs/*.yaml"), *ROOT.glob("configs/*.yaml")})
BASE: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    written, faults = run_schema(get_registry())
    assert faults == []
    return json.loads(json.dumps(written, allow_nan=False))


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator(schema)


def with_value(path: str, value: object, base: dict[str, Any] = BASE) -> dict[str, Any]:
    """A copy of a config with another value at a path; `...` removes the key."""
    config = copy.deepcopy(base)
    *above, last = path.split(".")
    place: Any = config
    for key in above:
        place = place.setdefault(key, {})
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return config


def test_it_is_a_json_schema(schema):
    whole = {name: each for name, each in schema["$defs"].items() if not name.startswith("partial.")}
    Draft202012Validator.check_schema({**schema, "$defs": whole})  # the others have the same form
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_there_are_configs_of_every_plugin():
    assert {path.parts[-3] for path in SHIPPED} == {"mm_custom_dit", "mm_diffusers", "mm_internvl", "mm_wan"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def test_every_shipped_config_is_valid(validator, path):
    tree = to_python(read_file(path, []))
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(tree)] == []


FAULTS = [
    ("run", ...),
    ("run.nam", "x"),
    ("run.seed", "abc"),
    ("run.name", 3),
    ("task.type", "text_to_vido"),
    ("task.predictor.type", "custom_dt"),
    ("task.predictor.type", ...),
    ("task.predictor.ffn_dm", 8),
    ("task.predictor.ffn_dim", "wide"),
    ("task.predictor.ffn_dim", 0),
    ("task.predictor.patch_size", [1, 2]),
    ("task.predictor.patch_size", 2),
    ("task.predictor.absolute_positions", 1),
    ("task.scheduler.type", "adamw"),
    ("task.scheduler.shift", -5),
    ("data.train.annotations", ...),
    ("data.train.num_frames", True),
    ("data.loader.sampler", "sequental"),
    ("data.loader.workers", -1),
    ("engine.reduce_dtype", "fp16"),
    ("engine.type", "fsdp3"),
    ("optimizer.betas", [0.9, 1.0]),
    ("optimizer.lr", float("inf")),
    ("optimizer", [0.1]),
    ("train.steps", 1.5),
    ("train.clip_grad_norm", 0),
    ("train.spike", {"window": 8}),
    ("checkpoint.async", "processes"),
    ("log.trackers", ["tenserboard"]),
    ("ema", {"decay": 1}),
    ("inculde", ["a.yaml"]),
]


@pytest.mark.parametrize(("path", "value"), FAULTS, ids=lambda part: str(part))
def test_what_validate_refuses_is_refused(validator, tmp_path, path, value):
    config = with_value(path, value)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError):
        load_config(file)
    assert not validator.is_valid(config)


GOOD = [
    ("task.predictor.type", "custom_dit/custom_dit"),
    ("task.text_encoder", "bytes"),
    ("optimizer", "core/adamw"),
    ("optimizer", {"lr": 0.1}),
    ("optimizer.lr", "1e-5"),
    ("train.steps", "${oc.env:MM_STEPS,5}"),
    ("run", "${oc.env:MM_RUN}"),
    ("task.predictor.patch_size", ["${run.seed}", 1, 1]),
    ("validation", {"clips": 3, "samples": {"prompts": ["x"]}}),
    ("log.trackers", ["tensorboard", {"type": "jsonl"}]),
]


@pytest.mark.parametrize(("path", "value"), GOOD, ids=lambda part: str(part))
def test_every_way_to_write_a_value_is_valid(validator, path, value):
    assert validator.is_valid(with_value(path, value))


@pytest.mark.parametrize("former", ["process", "thread"])
def test_a_former_value_of_a_stored_run_is_valid_and_deprecated(schema, validator, former):
    assert validator.is_valid(with_value("checkpoint.async", former))
    choices = schema["$defs"]["mm_core.config.sections.CheckpointSection"]["properties"]["async"]["anyOf"]
    assert [each["enum"] for each in choices if each.get("deprecated")] == [["process", "thread"]]


@pytest.mark.parametrize(("path", "loose"), [([], False), (["./dit.py"], True), ("${oc.env:DIT}", True)])
def test_only_one_file_plugins_make_the_schema_loose(validator, path, loose):
    config = with_value("task.predictor.type", "local/dit")
    assert validator.is_valid(config | {"plugins": {"path": path}}) is loose


def test_a_former_name_and_the_new_one_together_are_refused(validator):
    both = {"clips": 3, "rows": 3, "samples": {"prompts": ["x"]}}
    assert not validator.is_valid(with_value("validation", both))


def test_a_section_with_a_file_of_its_own_may_have_any_keys(validator):
    part: dict[str, Any] = {"engine": {"include": "fsdp2.yaml"}, "train": {"steps": 3}}
    assert validator.is_valid(part)
    assert not validator.is_valid(part | {"train": {"stps": 3}})
    assert not validator.is_valid(part | {"engine": {"include": 3}})
    assert not validator.is_valid(part | {"engine": {"sharding_size": 2}})  # nothing else names a file


@pytest.mark.parametrize("further", [{"include": "base.yaml"}, {"plugins": {"path": ["mine.py"]}}])
def test_a_part_of_a_config_needs_no_key_but_misspells_none(validator, further):
    """Other files give the rest: keys, types, and components that are not installed."""
    part: dict[str, Any] = {"data": {"train": {"height": 8}}}
    part["task"] = {"type": "text_to_video", "predictor": {"type": "mine", "depth": 3}}
    assert not validator.is_valid(part)
    assert validator.is_valid(part | further)
    assert not validator.is_valid(part | further | {"train": {"stps": 3}})
    part["task"]["predictor"]["type"] = "custom_dit"  # which has no key `depth`
    assert not validator.is_valid(part | further)


VALUES: list[object] = [
    *(None, True, False, 0, 1, -1, 3, 64, 65, 10**400, 0.5, -2.5, 8.0, float("inf")),
    *("", "x", "toy", "relu", "auto", "8", "1_000", "1e-5", " .5 ", "nan", "yes", "pyav", "core/decord"),
    *([], [1], [1, 2, 3], [1, 2, "x"], ["a"], [[1]]),
    *({}, {"a": 1}, {"1": 2}, {"1": "a"}, {"left": 3}, {"left": "x"}, {"lft": 3}),
    *({"type": "decord"}, {"type": "decord", "max_pixels": 4}, {"max_pixels": 4}, {"max_pixels": -4}),
    *({"type": "dcord"}, {"type": 3}),
]
"""Values for every field of the toy component, right for some and wrong for others."""
LENIENT = {
    ("depth", "'1_000'"),  # a number that editors, which read YAML 1.2, take for a string
    ("width", "'1_000'"),
    ("bias", "'yes'"),  # without quotes it is true here, and a string in an editor
    ("depth", "8.0"),  # an integer in JSON Schema
    ("width", "8.0"),
    ("width", "1"),  # a rule in Python: the width is even
    ("width", "-1"),
    ("width", "3"),
    ("width", "65"),
}
"""What the check refuses and the schema cannot, or does not, tell from what is right."""


def test_the_schema_agrees_with_the_check_on_every_value_of_every_type(place):
    registry = get_registry((str(place.folder / "toy.py"),))
    definitions = dict(TEXTS)
    SchemaWriter(registry, definitions).component("predictor")
    validator = Draft202012Validator({"$ref": "#/$defs/predictor:local~1toy", "$defs": definitions})
    lenient, accepted = set(), 0
    for field in definitions["predictor:local/toy"]["properties"].keys() - {"type"}:
        for value in VALUES:
            mapping = {"type": "toy", "depth": 2, field: value}
            valid = validator.is_valid(mapping)
            try:
                check_component("predictor", mapping, registry, "toy")
                accepted += 1
                assert valid, f"the schema refuses {field}: {value!r}"
            except ConfigError:
                if valid:
                    lenient.add((field, repr(value)))
    assert lenient == LENIENT
    assert accepted > 80


def test_a_component_whose_keys_cannot_be_read_is_open_and_reported(place):
    text = (place.folder / "toy.py").read_text().replace("left: int = 1", "left: 'Nowhere' = 1")
    place.write("toy.py", text)
    schema, faults = run_schema(get_registry((str(place.folder / "toy.py"),)))
    assert {fault.where.rpartition(", ")[2] for fault in faults} == {
        "predictor 'local/toy'",
        "predictor 'local/other'",
    }
    assert all("name 'Nowhere' is not defined" in fault.what for fault in faults)
    strict = Draft202012Validator({"$ref": "#/$defs/run", "$defs": schema["$defs"]})
    assert strict.is_valid(with_value("task.predictor", {"type": "local/toy", "any": 1}))


def test_keys_carry_comment_and_default(schema):
    keys = schema["$defs"]["predictor:custom_dit/custom_dit"]["properties"]
    assert keys["ffn_dim"]["description"] == "inner width of the feed-forward"
    assert keys["ffn_dim"]["default"] == 13824
    train = schema["$defs"]["mm_core.config.sections.TrainSection"]
    assert train["properties"]["non_finite"]["default"] == {"policy": "stop", "in_a_row": 3, "in_all": 100}
