"""Tables of another tool's keys, the readers of its files, and the YAML that a migration writes."""

import re
from pathlib import Path

import pytest
import yaml

from mm_core.config.load import load_config
from mm_core.errors import ConfigError
from mm_core.interchange import (
    Default,
    Differs,
    Drop,
    Instead,
    Key,
    Migrated,
    apply,
    read_source,
    to_yaml,
)
from mm_core.schema.nodes import to_python

ROOT = Path(__file__).parents[3]


def source(folder: Path, text: str, name: str = "their.yaml"):
    file = folder / name
    file.write_text(text)
    return read_source(file)


def positive(value):
    if value <= 0:
        raise ValueError("it is not above 0")
    return float(value)


ROWS = (
    Key("opt.lr", "optimizer.lr", positive, "peak"),
    Drop("opt.fused", "speed", only=(True,)),
    Differs("opt.fused", "it rounds differently"),
    Key("sets.*.path", "data.train.sources.*.annotations"),
    Key("mode", ""),
    Default("opt.clip", "train.clip_grad_norm", None, "off"),
    Drop("extra", "a whole mapping"),
)
FULL = "opt: {lr: 2, fused: false, new: 1}\nsets:\n- {path: a}\n- {path: b}\nmode: x\nextra: {a: 1}\n"


def test_each_key_goes_where_its_first_fitting_row_says_and_the_rest_is_unknown(tmp_path):
    run = Migrated("x")
    apply(ROWS, source(tmp_path, FULL), run)
    lines = {key: (line.value, line.place, line.note) for key, line in run.lines.items()}
    assert lines == {
        "optimizer.lr": (2.0, "their.yaml:1 opt.lr", "peak"),
        "data.train.sources.0.annotations": ("a", "their.yaml:3 sets.0.path", ""),
        "data.train.sources.1.annotations": ("b", "their.yaml:4 sets.1.path", ""),
        "train.clip_grad_norm": (None, "default of the tool for opt.clip", "off"),
    }
    assert [(left.key, left.value, left.why) for left in run.dropped] == [
        ("extra", {"a": 1}, "a whole mapping")
    ]
    assert [(left.place, left.value, left.why) for left in run.differs] == [
        ("their.yaml:1 opt.fused", False, "it rounds differently"),
        ("their.yaml:1 opt.new", 1, "an unknown key of the tool"),
    ]


CONDITIONS = (
    Key("rate", "optimizer.lr", float, given="mode!=fixed|none"),
    Drop("rate", "the rate is fixed"),
    Key("size", "data.train.height data.train.width", lambda size: [size, 2 * size]),
    Default("size", "data.train.height", 480),
    Default("loss", "", "mean", "another mean", given="opt.kind=a|b"),
)


@pytest.mark.parametrize(
    ("text", "lines", "dropped", "differs"),
    [
        ("mode: free\nrate: 2\n", {"optimizer.lr": 2.0, "data.train.height": 480}, [], []),
        ("mode: fixed\nrate: 2\n", {"data.train.height": 480}, ["rate"], ["mode"]),
        ("rate: 2\n", {"data.train.height": 480}, ["rate"], []),
        ("size: 64\n", {"data.train.height": 64, "data.train.width": 128}, [], []),
        ("opt: {kind: b}\n", {"data.train.height": 480}, [], ["loss"]),
        ("opt: {kind: c}\n", {"data.train.height": 480}, [], []),
        ("opt: {kind: b}\nloss: sum\n", {"data.train.height": 480}, [], ["loss"]),
    ],
)
def test_a_row_may_depend_on_another_key_and_set_several(text, lines, dropped, differs, tmp_path):
    run = Migrated("x")
    apply((*CONDITIONS, Key("mode", only=("free",)), Key("opt.kind")), source(tmp_path, text), run)
    assert {key: line.value for key, line in run.lines.items()} == lines
    assert [left.key for left in run.dropped] == dropped
    assert [left.key for left in run.differs] == differs


def test_a_row_with_a_star_takes_a_whole_mapping_unless_another_row_is_about_a_key_in_it(tmp_path):
    rows = (Key("a.one.x", "run.name"), Drop("a.*", "rest"))
    run = Migrated("x")
    apply(rows, source(tmp_path, "a: {one: {x: 1, y: 2}, two: {x: 3, y: 4}}\n"), run)
    assert run.lines["run.name"].value == 1
    assert [left.key for left in run.dropped] == ["a.one.y", "a.two"]


def test_a_value_that_cannot_be_converted_has_no_counterpart(tmp_path):
    run = Migrated("x")
    apply(ROWS, source(tmp_path, "opt: {lr: 0, clip: 3, fused: true}\n"), run)
    assert [(left.key, left.why) for left in run.differs] == [
        ("opt.lr", "it is not above 0"),
        ("opt.clip", "an unknown key of the tool"),
    ]
    assert "train.clip_grad_norm" not in run.lines, "the key is there, so its default does not count"


def test_a_key_counts_by_other_keys_takes_their_values_and_has_a_default_that_is_converted(tmp_path):
    rows = (
        Key("rate", "lr_schedule.min_lr", lambda rate, lr: rate * lr, absent=0.5, of={"opt.lr": 2.0}),
        Key("opt.lr", "optimizer.lr"),
        Key("warm", "lr_schedule.warmup_steps", absent=100, given="mode=warm|none fast"),
        Drop("warm", "no warm-up"),
        Drop("mode", "x"),
        Drop("fast", "x"),
    )
    for text, minimum, warm in (
        ("fast: true\n", 1.0, 100),
        ("{fast: true, mode: Warm, warm: 7, opt: {lr: 4}}\n", 2.0, 7),
        ("{fast: true, mode: cold, rate: 0.1}\n", 0.2, None),
        ("{fast: [], warm: 7}\n", 1.0, None),
    ):
        run = Migrated("x")
        apply(rows, source(tmp_path, text), run)
        assert run.lines["lr_schedule.min_lr"].value == minimum
        assert (line.value if (line := run.lines.get("lr_schedule.warmup_steps")) else None) == warm
        assert [left.key for left in run.dropped if left.key == "warm"] == ["warm"] * (
            warm is None and "warm:" in text
        )
    assert run.lines["lr_schedule.min_lr"].place == "default of the tool for rate"


def test_a_substitute_is_written_and_told(tmp_path):
    def replaced(value):
        raise Instead("adamw", f"{value!r} is not here")

    run = Migrated("x")
    apply((Key("opt", "optimizer.type", replaced),), source(tmp_path, "opt: lion\n"), run)
    assert run.lines["optimizer.type"].value == "adamw"
    assert [left.why for left in run.differs] == ["'lion' is not here; adamw is written in its place"]


@pytest.mark.parametrize(
    ("name", "text", "value", "line"),
    [
        (
            "a.json",
            '{\n\t"a": {\n\t\t"b":1e-5,\n\t\t"c":[1,\t2]\n\t}\n}\n',
            {"a": {"b": 1e-5, "c": [1, 2]}},
            3,
        ),
        ("a.yaml", "a:\n\tb:\t1e-5\n", {"a": {"b": 1e-5}}, 2),
        ("a.yaml", "x: &p 1\na:\n  b: &p 2\n  c: *p\n", {"x": 1, "a": {"b": 2, "c": 2}}, 3),
        ("a.yaml", "a:\n  b: 1\n  b: 2\n", {"a": {"b": 2}}, 3),
        ("a.yaml", "\ufeffa: {b: 1}\n", {"a": {"b": 1}}, 1),
        ("a.toml", "x = 1\n\n[a]\nb = 2  # why\n", {"x": 1, "a": {"b": 2}}, 4),
    ],
)
def test_files_are_read_as_other_tools_take_them_with_the_line_of_every_value(
    name, text, value, line, tmp_path
):
    root = source(tmp_path, text, name)
    assert to_python(root) == value
    assert root.at("a", "b").where == f"{tmp_path / name}:{line}"


def test_lines_of_toml_count_the_items_of_arrays_of_tables(tmp_path):
    text = "[general]\nsize = 1\n[[sets]]\nn = 1\n[[sets]]\nn = 2\n[sets.sub]\nm = 3\n"
    root = source(tmp_path, text, "a.toml")
    first, second = root.at("sets").value
    assert [
        node.where.rpartition(":")[2] for node in (first.at("n"), second.at("n"), second.at("sub", "m"))
    ] == [
        "4",
        "6",
        "8",
    ]


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.toml", "a = \n", "this is not TOML"),
        ("a.json", "[1]", "no mapping"),
        ("a.yaml", "a: [1\n", "not YAML"),
        ("a.yaml", "a: !!python/name:os.system x\n", "tag"),
        ("a.yaml", "a: &x [*x]\n", "alias"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_with_its_place(name, text, match, tmp_path):
    with pytest.raises(ConfigError, match=match) as caught:
        source(tmp_path, text, name)
    assert str(tmp_path / name) in str(caught.value)


def test_the_yaml_has_a_comment_behind_each_line_and_is_read_back_as_it_was(tmp_path):
    run = Migrated("x")
    for key, value in {
        "run.name": "x",
        "task": {"type": "pretrained", "from_pretrained": "a b", "auto_class": "AutoModelForCausalLM"},
        "train.steps": 3,
        "optimizer.lr": 1e-5,
        "optimizer.type": "adamw",
        "optimizer.betas.1": 0.95,
        "optimizer.betas.0": 0.9,
        "data.train.type": "conversations",
        "data.train.sources.0.annotations": "${HOME}/a.json",
        "data.train.sources.0.weight": 2.0,
        "data.train.sources.1.annotations": "b: c # d",
        "train.clip_grad_norm": None,
    }.items():
        run.set(key, value, "a.sh:1 --x\n# evil: 1", "why")
    text = to_yaml(run, ["head"])
    assert all(
        "  # a.sh:1 --x\\n# evil: 1: why" in line
        for line in text.splitlines()[1:]
        if not line.rstrip().endswith(":")
    )
    read = yaml.safe_load(text)
    assert list(read) == ["run", "task", "data", "train", "optimizer"]
    assert read["optimizer"] == {"type": "adamw", "lr": 1e-5, "betas": [0.9, 0.95]}
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = load_config(file)
    first, second = config.data.train.options["sources"]
    assert (first.annotations, first.weight, second.annotations) == ("${HOME}/a.json", 2.0, "b: c # d")
    assert config.train.clip_grad_norm is None


def test_the_core_names_no_tool_in_its_migration():
    names = re.compile(r"mindspeed|megatron|ai.toolkit|musubi|llama.?factory|ostris|wan\b", re.IGNORECASE)
    files = [*(ROOT / "mm_core/interchange/migration").glob("*.py"), ROOT / "mm_core/cli/migrate.py"]
    files += [
        ROOT / "mm_core/testing/migrations.py",
        *(ROOT / "mm_core/plugin/scaffold/templates").rglob("migration*"),
    ]
    assert len(files) >= 8
    assert not [(file.name, match[0]) for file in files if (match := names.search(file.read_text()))]
