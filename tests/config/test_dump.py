"""A config is written with every default filled in, and loads again as an equal config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mm_core.config.dump import to_mapping, to_yaml
from mm_core.errors import ConfigError
from mm_core.schema.fields import ComponentConfig


def test_every_default_is_written_with_qualified_types(place):
    written = to_mapping(place.load())
    assert written["engine"]["type"] == "core/fsdp2"
    assert written["engine"]["sub_modules_to_wrap"] == "auto"
    assert written["optimizer"] == {
        "type": "core/adamw",
        "lr": 1e-5,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
    assert written["task"]["predictor"]["reader"] == {"type": "core/pyav", "max_pixels": 4096 * 4096}
    assert written["task"]["predictor"]["inner"] == {"left": 1, "right": 2.0}
    assert written["plugins"] == {"path": [str(place.folder / "toy.py")]}
    assert "literals" not in written


def test_what_is_written_loads_again_from_anywhere(place, tmp_path):
    config = place.load("task.predictor.folder=some/where", "log.trackers=[tensorboard, jsonl]")
    text = to_yaml(config)
    place.write("runs/deep/config.yaml", text)
    again = place.load(name="runs/deep/config.yaml")
    assert again == config
    assert again.task.options["predictor"].options["folder"] == Path("some/where")
    assert to_yaml(again) == text


def test_defaults_that_no_yaml_holds_stay_with_the_target(place):
    place.edit(("    type: toy", "    type: bare"))
    config = place.load()
    place.write("again.yaml", to_yaml(config))
    assert place.load(name="again.yaml") == config


def test_a_value_that_no_yaml_holds_is_named(place):
    config = place.load()
    broken = ComponentConfig("predictor", "local/toy", {"extra": {"a": [object]}})
    config = dataclasses.replace(
        config, task=dataclasses.replace(config.task, options={**config.task.options, "predictor": broken})
    )
    with pytest.raises(ConfigError) as caught:
        to_mapping(config)
    assert str(caught.value).startswith(
        "task.predictor.extra.a.0: <class 'object'> of type type cannot be written as YAML\n"
    )


def test_a_config_that_could_not_be_read_again_is_not_written(place):
    config = place.load()
    big = ComponentConfig("predictor", "local/toy", {"extra": {"a": [0] * 100_000}})
    config = dataclasses.replace(
        config, task=dataclasses.replace(config.task, options={**config.task.options, "predictor": big})
    )
    with pytest.raises(ConfigError, match="with every default filled in, this config takes") as caught:
        to_yaml(config)
    assert caught.value.accepted == "at most 256 KiB"


_LOOK_ALIKES = r"1e5 1. 010 0o17 1:30 0x1F yes null ~ 2026-01-02 = << .inf - {*}"
_LOOK_ALIKES += r" ${a} \${a} \\${a} a${ ${oc.env:HOME} \ a\b"
_TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12
) | st.sampled_from([*_LOOK_ALIKES.split(), "", "a\\", "\n", "\t# x", "\x85", "\ufeff"])
_FLOATS = st.floats(allow_nan=False)
_FINITE = st.floats(allow_nan=False, allow_infinity=False)  # a float key takes no others
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _FLOATS | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    name=_TEXTS,
    rate=_FINITE,
    sizes=st.lists(st.integers(), max_size=3),
    blocks=st.just("auto") | st.lists(_TEXTS, max_size=3),
    layers=st.dictionaries(st.integers(), _FINITE, max_size=3),
    extra=st.dictionaries(_TEXTS, _VALUES, max_size=4),
)
@example("${a}", 1e-05, [], ["\\${a}"], {-1: 1e22}, {"a.b": {"": "1e5"}, "1e5": 1, "yes": None})
def test_any_value_survives_writing_and_loading(place, name, rate, sizes, blocks, layers, extra):
    config = place.load()
    toy = config.task.options["predictor"]
    options = {
        **toy.options,
        "name": name,
        "rate": rate,
        "sizes": sizes,
        "blocks": blocks if isinstance(blocks, str) else tuple(blocks),
        "layers": layers,
        "extra": extra,
    }
    predictor = dataclasses.replace(toy, options=options)
    config = dataclasses.replace(
        config, task=dataclasses.replace(config.task, options={**config.task.options, "predictor": predictor})
    )
    place.write("again.yaml", to_yaml(config))
    assert place.load(name="again.yaml") == config


def test_any_yaml_reader_reads_the_same_values(place):
    config = place.load("task.predictor.name='1e5'", "task.predictor.rate=1e-5")
    assert yaml.safe_load(to_yaml(config)) == to_mapping(config)


def test_what_another_setting_filled_in_is_not_written(place):
    config = place.load()
    filled = dataclasses.replace(
        config.task.options["predictor"], options={"depth": 2, "name": "from above"}, derived=("name",)
    )
    config = dataclasses.replace(
        config, task=dataclasses.replace(config.task, options={**config.task.options, "predictor": filled})
    )
    assert to_mapping(config)["task"]["predictor"] == {"type": filled.type, "depth": 2}
