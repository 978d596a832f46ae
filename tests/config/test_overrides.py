"""`key=value` from the shell: typed like YAML, braces and brackets without extra quotes."""

from __future__ import annotations

import pytest

from mm_core.config.overrides import parse_override
from mm_core.errors import ConfigError
from mm_core.schema.nodes import to_python


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("1e-5", 1e-5),
        ("2.0", 2.0),
        ("true", True),
        ("off", False),
        ("null", None),
        ("", None),
        ("~", None),
        ("bf16", "bf16"),
        ("'3'", "3"),
        ('"a\\tb"', "a\tb"),
        ("'it''s'", "it's"),
        ("'open", "'open"),
        ("a # b", "a # b"),
        ("a: b", "a: b"),
        ("- a", "- a"),
        ("*a", "*a"),
        ("&a", "&a"),
        ("!a", "!a"),
        ("%a", "%a"),
        ("@a", "@a"),
        ("| a", "| a"),
        ("a=b=c", "a=b=c"),
        ("it's, a", "it's, a"),
        ("2026-01-02", "2026-01-02"),
        ("12:30", "12:30"),
        ("010", "010"),
        ("中文", "中文"),
        ("{*}", "{*}"),
        ("predictor.blocks.{*}", "predictor.blocks.{*}"),
        ("[predictor.blocks.{*}]", ["predictor.blocks.{*}"]),
        ("[a.{0-3,5}.b.{*}, c.{1,2}]", ["a.{0-3,5}.b.{*}", "c.{1,2}"]),
        ("[]", []),
        ("[1, 2,]", [1, 2]),
        ("[[1, 2], [3]]", [[1, 2], [3]]),
        ("['a, b', \"c]\"]", ["a, b", "c]"]),
        ("[it's, that's]", ["it's", "that's"]),
        ("[a", "[a"),
        ("{}", {}),
        ("{a: 1, b: [x, y], c: {d: null}}", {"a": 1, "b": ["x", "y"], "c": {"d": None}}),
        ("{type:adamw,lr:3}", {"type": "adamw", "lr": 3}),
        ("{'a:b': 1}", {"a:b": 1}),
        ("{a: 'x, y: z'}", {"a": "x, y: z"}),
        ("{path: http://x}", {"path": "http://x"}),
    ],
)
def test_values_are_read_as_a_person_means_them(text, value):
    keys, node = parse_override(f"a.b-c.0={text}")
    found = to_python(node)
    assert keys == ["a", "b-c", "0"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    ["steps", "=3", "a..b=3", ".a=3", "a b=3", "+a=3", "~a", "a.b", "other.yaml", ".".join("a" * 200) + "=1"],
)
def test_what_is_no_override_has_a_hint_what_one_looks_like(text):
    with pytest.raises(ConfigError) as caught:
        parse_override(text)
    assert str(caught.value) == (
        f"command line: {text!r} is not a config override\n  accepted: key.path=value, e.g. train.steps=10"
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [("a={b: 1, b: 2}", "the key 'b' is set twice"), ("a=" + "[" * 3000 + "]" * 3000, "nested too deeply")],
)
def test_a_bad_value_is_a_readable_error(text, what):
    with pytest.raises(ConfigError, match=what):
        parse_override(text)


def test_overrides_reach_any_depth_and_make_what_is_missing(place):
    config = place.load(
        "train.steps=3",
        "task.predictor.patch=[2, 2, 2]",
        "task.predictor.inner.left=5",
        "task.predictor.extra.a.b=[x]",
        "engine.sub_modules_to_wrap=[predictor.blocks.{*}]",
        "checkpoint.every=7",
    )
    toy = config.task.options["predictor"].options
    assert (config.train.steps, toy["patch"], toy["inner"].left) == (3, (2, 2, 2), 5)
    assert toy["extra"] == {"a": {"b": ["x"]}}
    assert config.engine.options["sub_modules_to_wrap"] == ("predictor.blocks.{*}",)
    assert config.checkpoint.every == 7 and config.checkpoint.keep == 3


def test_a_fault_of_an_override_is_located_at_it(place):
    assert place.fault("train.steps=many") == (
        "override 'train.steps=many': train.steps: found 'many', a string\n"
        "  accepted: an integer >= 0 or null"
    )
    assert place.fault("train.stps=3") == (
        "override 'train.stps=3': train.stps: unknown key 'stps'\n"
        "  accepted: steps, epochs, micro_batch_size, global_batch_size, clip_grad_norm, adapters,"
        " also_train, base_dtype, freeze, parameter_groups, decay_norms_and_biases, non_finite, spike,"
        " overfit_one_batch\n"
        "  hint: did you mean 'steps'?"
    )


def test_faults_of_overrides_and_of_the_file_come_together(place):
    place.edit(("steps: 10", "steps: ten"))
    faults = place.faults("train", "run.seed=x")
    assert [fault.split(":")[0] for fault in faults] == ["command line", "override 'run.seed=x'", "run.yaml"]


def test_later_overrides_win(place):
    assert place.load("train.steps=3", "train.steps=4").train.steps == 4


def test_a_name_or_a_mapping_switches_the_component(place):
    for text in ("lr_schedule=cosine", "lr_schedule={type: cosine}", "lr_schedule.type=cosine"):
        assert place.load(text).lr_schedule.type == "core/cosine"
    place.edit(("    type: toy\n    depth: 2", "    type: toy\n    depth: 2\n    width: 4"))
    switched = place.load("task.predictor=other").task.options["predictor"]
    assert (switched.type, switched.options) == ("local/other", {"left": 1, "right": 2.0})
    kept = place.load("task.predictor=local/toy").task.options["predictor"]
    assert kept.options["width"] == 4


@pytest.mark.parametrize("name", ["task.predictor=other", "task.predictor.type=other"])
def test_a_switch_keeps_the_options_given_beside_it_in_any_order(place, name):
    for texts in ([name, "task.predictor.left=7"], ["task.predictor.left=7", name]):
        switched = place.load(*texts).task.options["predictor"]
        assert (switched.type, switched.options["left"]) == ("local/other", 7)


def test_options_are_added_to_a_component_by_its_bare_name(place):
    assert place.load("task.autoencoder.spatial=4").task.options["autoencoder"].options["spatial"] == 4


def test_places_of_a_list_are_numbers(place):
    place.edit(("train:\n  steps", "log: {trackers: [jsonl, tensorboard]}\ntrain:\n  steps"))

    def trackers(*texts: str) -> list[tuple[str, dict[str, int]]]:
        return [(t.type, dict(t.options)) for t in place.load(*texts).log.trackers]

    assert trackers("log.trackers.1.flush_secs=5") == [
        ("core/jsonl", {}),
        ("core/tensorboard", {"flush_secs": 5}),
    ]
    assert trackers("log.trackers.0=tensorboard", "log.trackers.2=jsonl") == [
        ("core/tensorboard", {"flush_secs": 30}),
        ("core/tensorboard", {"flush_secs": 30}),
        ("core/jsonl", {}),
    ]
    assert place.fault("log.trackers.4=jsonl") == (
        "override 'log.trackers.4=jsonl': log.trackers.4: index 4 is out of range: the list has 2 items\n"
        "  accepted: 0 to 2 (2 appends)"
    )


def test_places_make_a_list_that_was_not_there(place):
    assert len(place.load("log.trackers.1=jsonl", "log.trackers.0=tensorboard").log.trackers) == 2
    assert "found {'1': 'jsonl'}, a mapping" in place.fault("log.trackers.1=jsonl")


def test_numbers_are_keys_of_a_mapping(predictor):
    assert predictor("layers={1: 2.0}", "layers.3=4")["layers"] == {1: 2.0, 3: 4.0}
