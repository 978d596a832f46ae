"""YAML files and what they include: read strictly, merged with each value's own file and line."""

from __future__ import annotations

import pytest

from mm_core.config.yaml_nodes import MAX_DEPTH


def test_a_file_that_is_not_there_names_the_files_beside_it(place):
    assert place.fault(name="rum.yaml") == (
        "rum.yaml: there is no such file\n  accepted: run.yaml\n  hint: did you mean 'run.yaml'?"
    )
    assert place.fault(name="nowhere/run.yaml") == (
        f"nowhere/run.yaml: there is no such file\n  hint: the folder {place.folder}/nowhere does not exist"
    ).replace(f"{place.folder}/", "")


def test_a_folder_is_not_a_file(place):
    place.write("configs/a.yaml", "{}")
    assert place.fault(name="configs") == (
        "configs: this is a folder, not a YAML file\n  accepted: configs/a.yaml"
    )


EMPTY = (
    "run.yaml: the file is empty\n  accepted: a mapping with run, task, data, train, ...,"
    " or with the keys of the section that includes it"
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", EMPTY),
        ("# only a comment\n", EMPTY),
        (
            b"run: {name: \xff}",
            "run.yaml: the file is not UTF-8 text (byte 12)\n  hint: save the file as UTF-8",
        ),
        (
            "run: {name: x\ntask: 3\n",
            "run.yaml:2: this is not YAML: while parsing a flow mapping, expected ',' or '}'",
        ),
        (
            "run: x\n\ttask: y\n",
            "run.yaml:2: this is not YAML: while scanning for the next token, found character '\\t' that",
        ),
        ("run: x\nname: \x00\n", "run.yaml:2: this is not YAML: the character U+0000 is not allowed"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: this is not YAML: expected a single document in the stream"),
        ("run: *there\n", "run.yaml:1: this is not YAML: found undefined alias 'there'"),
        ("run: &a {b: *a}\n", "run.yaml:1: an alias refers to a value that contains the alias itself"),
        ("a: " + "[" * 5000, "run.yaml: a value in this file is nested more than 100 levels deep"),
        (
            "a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH,
            "run.yaml:1: this value is nested more than 100 levels deep",
        ),
        (
            "blocks: [predictor.{*}]\n",
            "run.yaml:1: this is not YAML: while scanning an alias, expected alphabetic or numeric",
        ),
    ],
)
def test_what_is_not_yaml_is_one_error_with_its_line(place, text, fault):
    place.write("run.yaml", text)
    assert place.fault().startswith(fault)


@pytest.mark.parametrize(("text", "shown"), [("- a\n", "['a'], a list"), ("3\n", "3, an integer")])
def test_a_root_that_is_no_mapping_is_named_by_its_type(place, text, shown):
    place.write("run.yaml", text)
    assert place.fault() == (
        f"run.yaml:1: the file is not a mapping: found {shown}\n"
        "  accepted: run, task, data, train, engine, optimizer, lr_schedule, init_from, ema, validation,"
        " checkpoint, log, profile, callbacks, plugins"
    )


def test_braces_without_quotes_are_explained(place):
    place.write("run.yaml", "blocks: [predictor.blocks.{*}]\n")
    assert place.fault().endswith("hint: if this is a module pattern with braces, put it in quotes")


def test_a_key_that_stands_twice_is_a_fault_that_names_the_first(place):
    place.edit(("steps: 10", "steps: 10\n  steps: 20"))
    assert (
        place.fault() == "run.yaml:15: train: the key 'steps' is set twice, first at run.yaml:14\n"
        "  hint: remove one of the two"
    )


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("true: 3", "run.yaml:2: the key 'true' is not a string\n  hint: put it in quotes"),
        ("? [a]\n: 3", "run.yaml:2: the key a list or mapping is not a string\n  hint: put it in quotes"),
        (
            "seed: !!python/object:os.system 3",
            "run.yaml:2: seed: '3' cannot be read: could not determine a constr",
        ),
        ("seed: !!set {a, b}", "run.yaml:2: seed: the tag 'set' is not supported"),
        ("seed: !!binary aGk=", "run.yaml:2: seed: the tag 'binary' is not supported"),
        ("seed: !mine {a: 1}", "run.yaml:2: seed: the tag '!mine' is not supported"),
        ("<<: 3", "run.yaml:2: '<<' takes a mapping, or a list of mappings"),
    ],
)
def test_yaml_that_stands_for_no_plain_value_is_a_fault(place, line, fault):
    place.edit(("run: {name: small}\n", f"run: {{name: small}}\n{line}\n"))
    assert any(found.startswith(fault) for found in place.faults()), place.faults()


def test_aliases_that_explode_are_stopped(place):
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    place.write("run.yaml", "\n".join(lines))
    assert "aliases expand to more than 100,000 values" in place.fault()


def test_aliases_and_merge_keys_work_and_keep_the_line_of_what_they_stand_for(place):
    place.edit(
        ("run: {name: small}", "run: {name: small}\nlog: {every: 5}\ncheckpoint: &often {every: 7, keep: 9}"),
        ("train:\n  steps", "lr_schedule: {<<: *often, type: constant}\ntrain:\n  steps"),
    )
    first, second = place.faults()
    assert first.startswith("run.yaml:3: lr_schedule.every: lr_schedule 'core/constant' has no key 'every'")
    assert second.startswith("run.yaml:3: lr_schedule.keep")


def test_dates_and_times_stay_texts(place):
    assert place.load("run.name=2026-01-02").run.name == "2026-01-02"
    place.edit(("name: small", "name: 2026-01-02"))
    assert place.load().run.name == "2026-01-02"


# -- include ---------------------------------------------------------------------------------------


def test_included_files_come_first_and_the_file_itself_wins(place):
    place.write(
        "shared/a.yaml", "optimizer: {type: adamw, lr: 0.1, eps: 0.5}\nlog: {every: 3, trackers: [jsonl]}\n"
    )
    place.write("shared/b.yaml", "include: c.yaml\noptimizer: {lr: 0.2}\n")
    place.write("shared/c.yaml", "checkpoint: {every: 7}\noptimizer: {lr: 0.9}\n")
    place.edit(
        ("run: {name: small}", "include: [shared/a.yaml, shared/b.yaml]\nrun: {name: small}"),
        ("train:\n  steps", "log: {trackers: []}\noptimizer: {weight_decay: 0.0}\ntrain:\n  steps"),
    )
    config = place.load()
    optimizer = config.optimizer.options
    assert (optimizer["lr"], optimizer["eps"], optimizer["weight_decay"]) == (0.2, 0.5, 0.0)
    assert (config.log.every, config.log.trackers, config.checkpoint.every) == (3, (), 7)


def test_a_fault_of_an_included_file_is_located_there(place):
    place.write("shared/a.yaml", "\ncheckpoint:\n  evry: 3\n")
    place.edit(("run: {name: small}", "include: shared/a.yaml\nrun: {name: small}"))
    assert place.fault().startswith("shared/a.yaml:3: checkpoint.evry: unknown key 'evry'")


def test_another_type_replaces_the_component_and_its_options(place):
    place.write("a.yaml", "lr_schedule: {type: cosine, min_lr: 0.1, warmup_steps: 5}\n")
    place.edit(("run: {name: small}", "include: a.yaml\nrun: {name: small}\nlr_schedule: {type: constant}"))
    schedule = place.load().lr_schedule
    assert (schedule.type, "min_lr" in schedule.options) == ("core/constant", False)
    assert schedule.options["warmup_steps"] == 0


@pytest.mark.parametrize("written", ["{type: core/cosine}", "cosine", "{type: cosine}", "{}"])
def test_the_same_type_keeps_the_options_however_it_is_written(place, written):
    place.write("a.yaml", "lr_schedule: {type: cosine, warmup_steps: 5}\n")
    place.edit(("run: {name: small}", f"include: a.yaml\nrun: {{name: small}}\nlr_schedule: {written}"))
    assert place.load().lr_schedule.options["warmup_steps"] == 5


def test_a_mapping_adds_options_to_a_bare_name(place):
    place.write("a.yaml", "lr_schedule: cosine\n")
    place.edit(("run: {name: small}", "include: a.yaml\nrun: {name: small}\nlr_schedule: {warmup_steps: 5}"))
    schedule = place.load().lr_schedule
    assert (schedule.type, schedule.options["warmup_steps"]) == ("core/cosine", 5)


def test_files_that_include_each_other_are_an_error_that_names_the_circle(place):
    place.write("a.yaml", "include: b.yaml\n")
    place.write("b.yaml", "include: a.yaml\n")
    place.edit(("run: {name: small}", "include: a.yaml\nrun: {name: small}"))
    assert place.fault() == (
        "a.yaml: files include each other: a.yaml -> b.yaml -> a.yaml\n"
        "  hint: remove one of these includes; included at b.yaml:1"
    )


def test_a_file_included_along_many_ways_is_read_once_and_its_faults_are_reported_once(place):
    for number in range(30):  # 2^30 readings, were it not so
        place.write(f"{number}.yaml", f"include: [{number + 1}.yaml, {number + 1}.yaml]\n")
    place.write("30.yaml", "log: {every: 3, every: 4}\n")
    place.edit(("run: {name: small}", "include: 0.yaml\nrun: {name: small}"))
    assert (
        place.fault()
        == "30.yaml:1: log: the key 'every' is set twice, first at 30.yaml:1\n  hint: remove one of the two"
    )


def test_every_include_that_cannot_be_read_is_reported_and_nothing_that_it_may_hold(place):
    place.write("bad.yaml", "a: [\n")
    place.write("run.yaml", "include: [a.yaml, bad.yaml, 3]\nrun: {name: x}\n")
    missing, bad, three = sorted(place.faults(), key=lambda fault: fault.split(":")[0])
    assert missing.startswith("a.yaml: there is no such file\n  accepted: bad.yaml, run.yaml\n  hint: ")
    assert missing.endswith("included at run.yaml:1")
    assert bad.startswith("bad.yaml:2: this is not YAML: ")
    assert three == (
        "run.yaml:1: include.2: found 3, an integer\n  accepted: the path of a YAML file, or a list of them"
    )


def test_a_section_takes_a_file_of_its_own_keys_and_its_own_keys_win(place):
    place.write("shared/fsdp2.yaml", "include: more.yaml\nsharding_size: 2\nparam_dtype: bf16\n")
    place.write("shared/more.yaml", "sharding_size: 4\nreduce_dtype: ${.param_dtype}\n")
    place.write("shared/run.yaml", "engine: {include: fsdp2.yaml}\nrun: {dir: shared_runs}\n")
    place.edit(
        (
            "run: {name: small}",
            "include: shared/run.yaml\nrun: {name: small}\nengine: {param_dtype: fp32}",
        ),
    )
    config = place.load()
    given = config.engine.options
    assert (given["sharding_size"], given["param_dtype"], given["reduce_dtype"]) == (2, "fp32", "fp32")
    assert (config.engine.type, config.run.dir) == ("core/fsdp2", "shared_runs")


def test_a_section_s_file_and_an_override_of_its_keys(place):
    place.write("engine.yaml", "type: fsdp2\nsharding_size: 2\n")
    place.edit(("run: {name: small}", "run: {name: small}\nengine: {include: [engine.yaml]}"))
    assert place.load("engine.sharding_size=4").engine.options["sharding_size"] == 4


def test_another_tool_s_keys_in_a_section_s_file_are_faults_with_their_file_and_line(place):
    place.write(
        "fsdp2.yaml", "sharding_size: auto\nreshard_after_forward: true\nsubmodules_to_wrap:\n  - x\n"
    )
    place.edit(("run: {name: small}", "run: {name: small}\nengine:\n  include: fsdp2.yaml"))
    wrapped, *rest = sorted(place.faults())
    assert wrapped.startswith("fsdp2.yaml:3: engine.submodules_to_wrap: engine 'core/fsdp2' has no key")
    assert "sub_modules_to_wrap" in wrapped and rest == []


def test_what_a_section_cannot_include_is_a_fault_with_its_place(place):
    place.write("list.yaml", "- 1\n")
    place.write("a.yaml", "include: a.yaml\n")
    place.write("empty.yaml", "")
    named = {"engine": 3, "optimizer": "list.yaml", "log": "gone.yaml", "ema": "a.yaml"}
    named["validation"] = "empty.yaml"
    text = "".join(f"{section}: {{include: {name}}}\n" for section, name in named.items())
    place.edit(("run: {name: small}", f"{text}run: {{name: small}}"))
    circle, empty, gone, listed, number = sorted(place.faults())
    assert empty.startswith("empty.yaml: the file is empty") and "or with the keys of the section" in empty
    assert circle.startswith("a.yaml: files include each other: a.yaml -> a.yaml")
    assert gone.startswith("gone.yaml: there is no such file") and "included at run.yaml:" in gone
    assert listed.startswith("list.yaml:1: the file is not a mapping") and "the keys of optimizer" in listed
    assert ": engine.include: found 3, an integer\n  accepted: the path of a YAML file" in number


def test_the_include_of_init_from_names_parameters_and_no_files(place):
    place.edit(("run: {name: small}", "run: {name: small}\ninit_from: {path: x, include: [predictor.head]}"))
    assert place.load().init_from.include == ("predictor.head",)


def test_one_file_plugins_are_found_relative_to_the_file_that_names_them(place, monkeypatch):
    place.write("shared/more.yaml", "plugins: {path: [../toy.py]}\n")
    place.edit(("plugins: {path: [toy.py]}", "include: shared/more.yaml"))
    monkeypatch.chdir(place.folder.parent)
    assert place.load().plugins.path == (str(place.folder / "toy.py"),)
    monkeypatch.chdir(place.folder)
    place.edit(("plugins: {path: [toy.py]}\n", ""))
    assert place.load("plugins.path=[toy.py]").plugins.path == (str(place.folder / "toy.py"),)
    monkeypatch.setenv("PLUGIN_FOLDER", str(place.folder))
    assert place.load("plugins.path=[${oc.env:PLUGIN_FOLDER}/toy.py]").plugins.path == (
        str(place.folder / "toy.py"),
    )


def test_a_one_file_plugin_that_is_not_there_is_a_fault_at_its_line(place):
    place.edit(("[toy.py]", "[joy.py]"), ("    type: toy", "    type: bare"))
    assert place.faults()[0].startswith("run.yaml:2: plugins.path: plugin file ")
    assert "joy.py' cannot be read: No such file or directory" in place.faults()[0]
