"""`mm config explain`: what a key means, what its value is and who set it."""

from __future__ import annotations

import pytest

from mm_core.config.explain import explain
from mm_core.config.load import load_with_places
from mm_core.errors import ConfigError, PluginError
from mm_core.plugin.registry import get_registry


@pytest.fixture
def told(place):
    """Explains a key of the run in `place`, with paths relative to its folder."""

    def tell(key, config=True):
        if config:
            loaded = load_with_places(place.run)
            (found,) = explain(key, loaded[0].registry, loaded)
        else:
            (found,) = explain(key, get_registry())
        return found

    return tell


def brief(found, place=None):
    origin = found.origin.replace(f"{place.folder}/", "") if place and found.origin else found.origin
    return found.type, found.default, found.value, origin


def test_a_key_of_a_component_has_type_default_value_and_place(told, place):
    found = told("task.predictor.depth")
    assert brief(found, place) == ("int >= 1 and <= 64", None, 2, "run.yaml:7")
    assert (found.owner, found.accepted) == ("predictor local/toy", "an integer >= 1 and <= 64")
    assert brief(told("task.predictor.width")) == ("int", "8", 8, "default")


def test_a_section_lists_its_keys_with_their_values(told, place):
    keys = {each.key: brief(each, place) for each in told("train").keys}
    assert keys["train.steps"] == ("int >= 0 or null", "null", 10, "run.yaml:14")
    assert keys["train.clip_grad_norm"] == ("float > 0 or null", "1.0", 1.0, "default")
    assert told("train").doc.startswith("Config section `train`: training length")
    assert told("train").origin.endswith("run.yaml:13")


def test_the_whole_config_lists_the_sections_and_include(told):
    assert [each.key for each in told("").keys][-3:] == ["callbacks", "plugins", "include"]
    assert told("include", config=False).doc == "other files, relative to this one, or `config:NAME` of a plugin; merged first"


def test_a_component_shows_the_type_that_is_chosen_and_those_that_could_be(told, place):
    found = told("task.text_encoder")
    assert found.accepted == "core/bytes, core/hf_text, diffusers/text, wan/umt5"
    assert found.keys[0].key == "task.text_encoder.type"
    assert brief(told("task.text_encoder.type"), place) == (
        "name of text_encoder",
        None,
        "core/bytes",
        "run.yaml:9",
    )
    assert brief(told("task.autoencoder.type"), place)[2:] == ("core/pixel", "run.yaml:8")  # a bare name
    assert brief(told("engine.type")) == ("name of engine", "core/fsdp2", "core/fsdp2", "default")


def test_a_default_component_is_explained_without_a_config(told):
    assert told("engine.param_dtype", config=False).owner == "engine core/fsdp2"
    assert told("data.loader.workers", config=False).default == "2"


def test_an_included_file_and_a_former_name_are_places(told, place):
    place.write("base.yaml", "\nvalidation: {every: 5, clips: 3, samples: {prompts: [x]}}\n")
    place.edit(("run: {name: small}", "include: base.yaml\nrun: {name: small}"))
    assert brief(told("validation.rows"), place)[2:] == (3, "base.yaml:2")
    assert told("validation.clips").key == "validation.rows"
    assert brief(told("validation.samples.prompts.0"), place)[2:] == ("x", "base.yaml:2")


def test_the_environment_is_not_shown(told, place, monkeypatch):
    monkeypatch.setenv("MM_SECRET", "hidden")
    place.edit(("run: {name: small}", "run: {name: small, dir: '${oc.env:MM_SECRET}'}"))
    assert brief(told("run.dir"), place)[2:] == ("${oc.env:MM_SECRET}", "run.yaml:1")


def test_keys_of_what_is_not_set_are_explained_without_a_value(told):
    assert brief(told("ema.decay")) == ("float >= 0 and < 1", "0.9999", None, None)
    assert brief(told("train.adapters.0.rank")) == ("int >= 1", "16", None, None)
    assert brief(told("task.predictor.extra.anything")) == ("any", None, None, None)


@pytest.mark.parametrize("name", ["custom_dit", "custom_dit/custom_dit", "predictor/custom_dit"])
def test_a_component_is_named_as_mm_plugins_names_it(told, name):
    found = told(f"{name}.ffn_dim", config=False)
    assert (found.key, found.owner, found.default) == (
        "custom_dit/custom_dit.ffn_dim",
        "predictor custom_dit/custom_dit",
        "13824",
    )
    assert told(name, config=False).doc == "Wan-style text-to-video DiT of the tutorial"


def test_a_name_of_several_components_explains_each_that_has_the_key():
    found = explain("flow_match.shift", get_registry())
    assert [each.owner for each in found] == ["scheduler core/flow_match", "scheduler wan/flow_match"]
    assert [each.owner for each in explain("flow_match.sigma_min", get_registry())] == [
        "scheduler wan/flow_match"
    ]


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("trian.steps", "unknown key 'trian'"),
        ("train.stps", "train: unknown key 'stps'"),
        ("task.predictor.dept", "task.predictor: predictor local/toy has no key 'dept'"),
        ("task.predictor.depth.x", "task.predictor.depth: this is a single value (int >= 1 and <= 64)"),
        ("log.trackers.type", "log.trackers: this is a list of tracker: name one item by its number"),
        ("betas", "unknown key 'betas'"),
        ("task.predictor.patch.3", "task.predictor.patch: this is a [int, int, int]"),
    ],
)
def test_a_key_that_is_not_there_is_one_error(told, key, sentence):
    with pytest.raises(ConfigError) as caught:
        told(key)
    assert str(caught.value).startswith(sentence)


def test_annotations_that_do_not_resolve_are_a_readable_error(place):
    text = (place.folder / "toy.py").read_text().replace("left: int = 1", "left: 'Nowhere' = 1")
    registry = get_registry((str(place.write("toy.py", text)),))
    with pytest.raises(PluginError, match=r"Inner cannot be resolved: name 'Nowhere' is not defined"):
        explain("local/other.left", registry)


def test_a_misspelt_key_names_the_nearest(told):
    with pytest.raises(ConfigError) as caught:
        told("task.predictor.dept")
    assert caught.value.hint == "did you mean 'depth'?"
    with pytest.raises(PluginError, match="no component is named 'wan/transfomer'") as lost:
        told("wan/transfomer.dim")
    assert "did you mean 'wan/transformer'" in lost.value.hint


def test_the_type_itself_needs_no_config(told):
    found = told("task.type", config=False)
    assert (found.key, found.type, found.default, found.origin) == ("task.type", "name of task", None, None)
    assert found.accepted == "core/pretrained, core/text_to_video, diffusers/pipeline"
    item = told("log.trackers.0.type", config=False)
    assert item.accepted == "core/jsonl, core/mlflow, core/tensorboard, core/wandb"


def test_a_key_below_a_type_that_is_not_chosen_lists_the_types(told):
    with pytest.raises(ConfigError) as caught:
        told("task.predictor.ffn_dims", config=False)
    assert str(caught.value) == (
        "task: the keys depend on the type of this task, and no config is named\n"
        "  accepted: type: core/pretrained, core/text_to_video, diffusers/pipeline\n"
        "  hint: name a config that chooses the type (--config FILE), or ask for a component's key:"
        " `mm config explain core/text_to_video.predictor`"
    )
    with pytest.raises(ConfigError, match="and the config does not set it") as unset:
        told("data.validation.height")
    known = ("conversations", "media_text", "shapes", "text_rows", "video_text")
    listed = [*(f"core/{name}" for name in known), "internvl/conversations"]
    assert unset.value.accepted == f"type: {', '.join(listed)}"


def test_below_a_mapping_without_types_is_any_value(told, place):
    loose = "from dataclasses import dataclass\nfrom typing import Mapping\n"
    loose += "from mm_core import Component, hookimpl\n"
    loose += "@dataclass(frozen=True)\nclass C:\n    more: Mapping | None = None\n"
    loose += (
        "def f(more): ...\n@hookimpl\ndef mm_callbacks(): return [Component('loose', 'loose:f', 'loose:C')]\n"
    )
    place.write("loose.py", loose)
    place.edit(("[toy.py]", "[toy.py, loose.py]"))
    assert told("local/loose.more.key").accepted == "anything"
