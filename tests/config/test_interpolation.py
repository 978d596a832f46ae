"""`${...}`: keys of the config and the environment, nothing else; the stored config keeps the text."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from mm_core.config.dump import to_mapping, to_yaml
from mm_core.config.interpolation import resolve
from mm_core.errors import MMError
from mm_core.schema.nodes import from_python, to_python

ACCEPTED = "  accepted: ${key.path}, ${oc.env:NAME} or ${oc.env:NAME,default}"


def test_keys_are_referred_to_absolutely_and_relatively(place):
    place.edit(
        ("height: 16, width: 16", "height: 16, width: '${.height}'"),
        ("run: {name: small}", "run: {name: 's${train.steps}-${data.train.width}'}"),
        (
            "    depth: 2",
            "    depth: ${train.micro_batch_size}\n    sizes: [1, '${.[0]}']\n    extra: ${data}",
        ),
    )
    config = place.load("train.steps=12")
    toy = config.task.options["predictor"].options
    assert config.run.name == "s12-16"
    assert config.data.train.options["width"] == 16
    assert (toy["depth"], toy["sizes"], toy["extra"]["train"]["height"]) == (2, [1, 1], 16)
    assert config.literals == {}
    assert to_mapping(config)["run"]["name"] == "s12-16"


def test_values_from_the_environment_are_read_by_the_fields_type(predictor, monkeypatch):
    for name, value in {"N": "8", "F": "1e-3", "S": "8", "B": "false", "P": "/data", "T": "gelu"}.items():
        monkeypatch.setenv(name, value)
    options = predictor(
        "width=${oc.env:N}",
        "rate=${oc.env:F}",
        "name=${oc.env:S}",
        "bias=${oc.env:B}",
        "folder=${oc.env:P}/x",
        "act=${oc.env:T}",
        "sizes=['${oc.env:N}', 2]",
        "scale=${oc.env:NOT_THERE,null}",
        "reader={type: decord, max_pixels: '${oc.env:NOT_THERE,64}'}",
    )
    assert (options["width"], options["rate"], options["name"], options["bias"]) == (8, 1e-3, "8", False)
    assert (str(options["folder"]), options["act"], options["sizes"]) == ("/data/x", "gelu", [8, 2])
    assert options["scale"] is None and options["reader"].options["max_pixels"] == 64


def test_a_component_can_be_chosen_by_the_environment(place, monkeypatch):
    monkeypatch.setenv("MODEL", "toy")
    place.edit(("    type: toy", "    type: ${oc.env:MODEL}"))
    config = place.load()
    assert config.task.options["predictor"].type == "local/toy"
    assert to_mapping(config)["task"]["predictor"]["type"] == "${oc.env:MODEL}"


def test_a_value_of_the_environment_that_does_not_fit_is_a_fault_at_its_line(place, monkeypatch):
    monkeypatch.setenv("N", "eight")
    place.edit(("    depth: 2", "    depth: ${oc.env:N}"))
    assert place.fault() == (
        "run.yaml:7: task.predictor.depth: found 'eight', a string\n  accepted: an integer >= 1 and <= 64"
    )


def test_a_variable_that_is_not_set_is_a_fault_at_its_line_and_only_there(place, monkeypatch):
    monkeypatch.delenv("MM_NOT_SET", raising=False)
    place.edit(("    depth: 2", "    depth: ${oc.env:MM_NOT_SET}"))
    assert place.fault() == (
        "run.yaml:7: task.predictor.depth: '${oc.env:MM_NOT_SET}' cannot be resolved: "
        "Environment variable 'MM_NOT_SET' not found\n"
        "  hint: set MM_NOT_SET, or give a default: ${oc.env:MM_NOT_SET,default}"
    )


@pytest.mark.parametrize(
    ("text", "name", "hint"),
    [
        ("${oc.evn:HOME}", "oc.evn", "\n  hint: did you mean 'oc.env'?"),
        ("${oc.decode:'1'}", "oc.decode", ""),
        ("${oc.env:HOME,${oc.select:run}}", "oc.select", ""),
        ("${oc.${run.name}:x}", "oc.${run.name}", ""),
        ("a ${now:%Y}", "now", ""),
    ],
)
def test_no_other_resolver_is_there(place, text, name, hint):
    place.write("run.yaml", place.run.read_text() + f'checkpoint: {{every: "{text}"}}\n')
    assert place.fault() == (
        f"run.yaml:17: checkpoint.every: unknown resolver {name!r} in {text!r}\n{ACCEPTED}{hint}"
    )


@pytest.mark.parametrize("text", ["${train.steps", "${}", "costs ${5 dollars}"])
def test_what_is_no_interpolation_has_a_hint_how_to_write_the_characters(place, text):
    assert place.fault(f"run.name={text}") == (
        f"override {f'run.name={text}'!r}: run.name: {text!r} is not a valid interpolation\n{ACCEPTED}\n"
        "  hint: write \\${ for a literal ${"
    )
    name = text.replace("${", r"\${")
    assert place.load(f"run.name={name}").run.name == text


def test_a_key_that_is_not_there_and_a_circle_are_faults(place):
    assert place.fault("run.name=${train.stps}") == (
        "override 'run.name=${train.stps}': run.name: '${train.stps}' cannot be resolved: "
        "Interpolation key 'train.stps' not found\n"
        "  hint: an interpolation can refer only to keys set in the files or overrides, not to defaults"
    )
    first, second = place.faults("run.name=${run.dir}", "run.dir=${run.name}")
    assert "run.name: '${run.dir}' cannot be resolved: Recursive interpolation detected" in first
    assert "run.dir: '${run.name}'" in second


def test_what_came_from_the_environment_is_written_as_it_stood(place, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    place.edit(
        (
            "    depth: 2",
            "    depth: 2\n    name: '${oc.env:TOKEN}'\n    extra: {'a.b': ['${oc.env:TOKEN}']}",
        ),
        ("run: {name: small}", "run: {name: 'x-${task.predictor.name}', dir: '${run.name}'}"),
    )
    place.write("run.yaml", place.run.read_text() + "log: {trackers: ['${oc.env:TRACKER,jsonl}']}\n")
    config = place.load("task.scheduler.shift=3")
    toy = config.task.options["predictor"].options
    assert (toy["name"], config.run.name, config.run.dir) == ("secret", "x-secret", "x-secret")
    assert toy["extra"] == {"a.b": ["secret"]}
    assert config.literals == {
        "run.name": "x-${task.predictor.name}",
        "run.dir": "${run.name}",
        "task.predictor.name": "${oc.env:TOKEN}",
        "task.predictor.extra.a.b.0": "${oc.env:TOKEN}",
        "log.trackers.0": "${oc.env:TRACKER,jsonl}",
    }
    text = to_yaml(config)
    assert "secret" not in text
    place.write("again.yaml", text)
    again = place.load(name="again.yaml")
    assert again == config and again.literals == config.literals


@pytest.mark.parametrize(
    "reference",
    [
        "${task.predictor.extra}",
        "${task.predictor.extra.list}",
        "${task.predictor.extra.list[0]}",
        "${task.predictor.extra[list][0]}",
        "${.predictor.extra.list.0}",
        "${task.${which}.extra.list.0}",
    ],
)
def test_no_way_of_referring_to_a_secret_writes_it(place, monkeypatch, reference):
    monkeypatch.setenv("TOKEN", "secret")
    place.edit(
        ("    depth: 2", "    depth: 2\n    extra: {list: ['${oc.env:TOKEN}'], which: predictor}"),
        ("text_encoder: {type: bytes}", "text_encoder: {type: local_text, taken: 3}"),
    )
    toy = (
        (place.folder / "toy.py")
        .read_text()
        .replace(
            "@hookimpl\ndef mm_predictors",
            "@dataclass(frozen=True)\nclass Text:\n    taken: Any\n\n\n"
            "@hookimpl\ndef mm_text_encoders():\n"
            "    return [Component(name='local_text', target='toy:Toy', config='toy:Text')]\n\n\n"
            "@hookimpl\ndef mm_predictors",
        )
    )
    place.write("toy.py", toy)
    text = reference.replace("${.predictor", "${..predictor").replace(
        "${which}", "${task.predictor.extra.which}"
    )
    config = place.load(f"task.text_encoder.taken='{text}'")
    assert "secret" in str(config.task.options["text_encoder"].options["taken"])
    assert "secret" not in to_yaml(config)


@pytest.mark.parametrize(
    "text",
    [
        *("${a.b}", "x-${a.b}-${a.b}", "${a}", "${.list[1]}", "${.list.0}", "${a.${which}}", "${a[b]}"),
        *(
            "${oc.env:SET}",
            "${oc.env:NOT,null}",
            "${oc.env:NOT, x y }",
            "${oc.env:NOT,${a.b}}",
        ),
        *("${oc.env:${name}}", "${oc.env:NOT,'a b'}", "${oc.env:NOT,a/b:c}"),
        *(r"\${a.b}", r"\\${a.b}", r"\\\${a.b}", r"a\b ${a.b}", "{${a.b}}", "$ {a} ${a.b}", "${a.none} x"),
    ],
)
def test_values_are_those_of_omegaconf(text, monkeypatch):
    monkeypatch.setenv("SET", "8")
    monkeypatch.delenv("NOT", raising=False)
    tree = {"a": {"b": 3, "none": None}, "which": "b", "name": "SET", "list": [1, 2.5], "text": text}
    expected = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    faults: list[MMError] = []
    found, _ = resolve(from_python(tree, "here"), faults)
    assert not faults
    assert to_python(found) == expected
