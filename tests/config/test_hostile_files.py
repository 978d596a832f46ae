"""Files and strings made to break the reader: each gives a quick error message."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_core.config.load import load_config
from mm_core.config.yaml_nodes import MAX_BYTES
from mm_core.errors import ConfigError, MMError

LIMIT = 20.0
"""Seconds, on a machine that runs other tests too; what these tests are about took minutes, or for ever."""
MORE = "and more: only the first 100 errors are listed\n  hint: fix these first, then check the config again"


@contextlib.contextmanager
def _within_the_limit():
    before = time.monotonic()
    yield
    assert time.monotonic() - before < LIMIT


@pytest.fixture(autouse=True)
def _soon(request):
    """Holds a test to the limit; one that draws its files holds each reading to it."""
    draws = getattr(request.function, "is_hypothesis_test", False)
    with contextlib.nullcontext() if draws else _within_the_limit():
        yield


def _with(place, line: str) -> None:
    place.edit(("run: {name: small}\n", f"run: {{name: small}}\n{line}\n"))


# -- what stands in a value ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "fault"),
    [
        ("!!bool maybe", "'maybe' cannot be read as 'bool'"),
        ("!!int 1:30", "'1:30' cannot be read as 'int'"),
        ("!!int ''", "'' cannot be read as 'int'"),
        ("!!float x", "'x' cannot be read as 'float'"),
        ("!!timestamp soon", "the tag 'timestamp' is not supported"),
        ("!!omap x", "the tag 'omap' is not supported"),
        ("!!python/name:os.system ''", "'' cannot be read: could not determine a constructor"),
        ("!!map 3", "the tag 'map' is not supported"),
        ("0x" + "f" * 5000, "is an integer of more than 1024 bits"),
        ("1" * 5000, "cannot be read: Exceeds the limit"),
    ],
)
def test_a_tag_that_its_text_does_not_fit_is_a_fault_at_its_line(place, seed, fault):
    _with(place, f"seed: {seed}")
    assert any(found.startswith("run.yaml:2: seed: ") and fault in found for found in place.faults())


def test_an_escape_that_is_no_character_is_not_yaml(place):
    _with(place, 'seed: "\\UFFFFFFFF"')
    assert place.fault().startswith("run.yaml: this is not YAML: ")


@pytest.mark.parametrize("text", ['"a\\0b"', '"\\ud800"'])
def test_a_text_that_no_path_can_hold_is_refused_wherever_it_stands(place, monkeypatch, text):
    for old, new in [
        ("plugins: {path: [toy.py]}", f"plugins: {{path: [toy.py, {text}]}}"),
        ("run: {name: small}", f"run: {{name: {text}}}"),
        ("annotations: a.json", f"annotations: {text}"),
        ("run: {name: small}", f"include: {text}\nrun: {{name: small}}"),
        ("    depth: 2", f"    depth: 2\n    extra: {{{text}: 3}}"),
    ]:
        place.edit((old, new))
        assert "it contains " in place.faults()[0], new
    place.edit()
    assert "it contains " in place.fault(f"run.dir={text}")
    monkeypatch.setitem(os.environ, "ODD", "\udcff")
    assert "it contains bytes or characters that are not Unicode text" in place.fault("run.dir=${oc.env:ODD}")


def test_a_home_of_nobody_is_a_fault_at_its_line(place, mm):
    place.edit(("[toy.py]", "[toy.py, ~nobody-of-that-name/x.py]"))
    (fault,) = [each for each in place.faults() if each.startswith("run.yaml:2: plugins.path: plugin file ")]
    assert "~nobody-of-that-name/x.py' cannot be read: No such file or directory" in fault


NOT_FINITE = ", which is not finite\n  accepted: "


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=.inf",
        "optimizer.lr=.nan",
        "optimizer.lr=1e999",
        "optimizer.lr='1e999'",
        "optimizer.lr=" + "9" * 400,
        "optimizer.lr=${oc.env:HUGE}",
        "task.scheduler.shift=.inf",
        "task.scheduler.logit_mean=-.inf",
        "task.scheduler.logit_mean=.nan",
        "train.clip_grad_norm=.inf",
        "validation={timesteps: [.nan]}",
        "optimizer.betas=[0.9, .nan]",
        "task.predictor.layers={1: .inf}",
        "task.predictor.inner={right: .inf}",
        "task.predictor.scale=.nan",
    ],
)
def test_a_number_that_is_not_finite_is_refused_in_every_field(place, monkeypatch, override):
    monkeypatch.setenv("HUGE", "1e999")
    (fault,) = place.faults(override)
    assert NOT_FINITE in fault or "accepted: a number" in fault, fault


def test_a_field_that_may_be_infinite_declares_it_by_its_default_or_its_range(place):
    toy = (place.folder / "toy.py").read_text()
    toy = toy.replace(
        "    rate: float = 0.5",
        '    rate: float = float("inf")\n'
        "    most: Annotated[float, Range(ge=0, infinite=True)] = 1.0\n"
        '    limits: tuple[float, float] = (0.0, float("inf"))',
    )
    place.write("toy.py", toy)
    read = place.load("task.predictor.most=.inf", "task.predictor.limits=[1, .inf]").task.options["predictor"]
    assert (read.options["rate"], read.options["most"]) == (float("inf"), float("inf"))
    assert read.options["limits"] == (1.0, float("inf"))
    assert place.fault("task.predictor.most=.nan").endswith("accepted: a number >= 0 or infinite")


# -- how much it stands for ------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["${a%d}${a%d}", "x ${..b.a%d} ${..b.a%d}"])
def test_interpolations_that_multiply_are_stopped(place, reference):
    lines = [f"  a{i}: '{reference % (i + 1, i + 1)}'".replace("${a", "${b.a") for i in range(19)]
    place.write("run.yaml", place.run.read_text() + "b:\n" + "\n".join(lines) + f"\n  a19: {'x' * 40}\n")
    assert any("interpolations expand to more than 1,000,000 characters" in fault for fault in place.faults())


def test_containers_that_multiply_and_chains_without_end_are_stopped(place):
    lines = [f"  a{i}: {{x: '${{b.a{i + 1}}}', y: '${{b.a{i + 1}}}'}}" for i in range(18)]
    chain = [f"  c{i}: '${{b.c{i + 1}}}'" for i in range(1500)]
    text = "b:\n" + "\n".join(lines) + "\n  a18: [1, 2, 3, 4]\n" + "\n".join(chain) + "\n  c1500: x\n"
    place.write("run.yaml", place.run.read_text() + text)
    faults = place.faults()
    assert any("interpolations expand to more than" in fault for fault in faults)
    assert any("it refers to another key over more than 20 steps" in fault for fault in faults)
    assert faults[-1] == MORE


def test_interpolations_whose_paths_are_computed_multiply_no_more_than_others(place):
    lines = [f"  a{i}: '${{b.${{b.n{i}}}}}${{b.${{b.n{i}}}}}'\n  n{i}: a{i + 1}" for i in range(19)]
    place.write("run.yaml", place.run.read_text() + "b:\n" + "\n".join(lines) + f"\n  a19: {'x' * 40}\n")
    assert any("interpolations expand to more than" in fault for fault in place.faults())


def test_many_long_and_nested_interpolations_are_soon_read_or_refused(place):
    place.write("many.yaml", "\n".join(f"a{i}: '${{b}}{i} {'x' * 80}'" for i in range(2500)))
    assert place.faults(name="many.yaml")[-1] == MORE
    place.write("same.yaml", "a: [" + ", ".join(["'${b'"] * 2_000) + "]")
    assert place.faults(name="same.yaml")[-1] == MORE
    _with(place, "seed: '" + "${" * 8000 + "}" * 8000 + "'")
    assert "is not a valid interpolation" in place.faults()[0]


def test_a_file_that_is_too_large_is_refused_before_it_is_parsed(place):
    place.write("run.yaml", "a: [" + "1, " * 3_500_000 + "]")
    assert place.fault() == (
        "run.yaml: the config is too large: with this file, its files exceed 256 KiB in total\n"
        "  hint: check that this is the YAML of a run; rows of data belong in separate files"
    )
    for number in range(3):
        place.write(f"{number}.yaml", f"# {'x' * 120_000}\nlog: {{every: 3}}\n")
    place.edit(("run: {name: small}", "include: [0.yaml, 1.yaml, 2.yaml]\nrun: {name: small}"))
    assert (
        "2.yaml: the config is too large: with this file, its files exceed 256 KiB in total" in place.fault()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [" + "1," * 60_000 + "]", "unknown key 'a'"),
        ("a: " + "[" * 90 + "1," * 60_000 + "]" * 90, "unknown key 'a'"),
        ("? " + "x" * 60_000 + "\n: [" + "1," * 30_000 + "]", "are longer than 1,000 characters"),
        ("\n".join(f"k{i}: 1" for i in range(9_000)), "and more: only the first 100 errors are listed"),
        ("log: {trackers: [" + "jsonk," * 20_000 + "]}", "and more: only the first 100 errors are listed"),
        ("log: {every: [" + "[1]," * 20_000 + "]}", "log.every: found [[1], [1],"),
        ("include: [" + "x.yaml, " * 10_000 + "]", "include more than 200 others"),
        (
            "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}, k{i}: 1}}\n" for i in range(1, 900)),
            "nested more than 100 levels deep",
        ),
        ("a: &a " + "x" * 60_000 + "\nb: [" + "*a," * 15_000 + "]", "unknown key 'b'"),
        ("a: '" + "\\" * 100_000 + "${'", "is not a valid interpolation"),
    ],
)
def test_what_takes_long_for_other_reasons_is_soon_a_readable_error(place, text, fault):
    place.write("run.yaml", text)
    assert any(fault in found for found in place.faults()), place.faults()[-1]


def test_overrides_have_bounds_too(place):
    assert "nested too deeply" in place.fault("task.predictor.extra=" + "[" * 5000 + "]" * 5000)
    assert place.fault("task.predictor.width=" + "7" * 4000).startswith("override 'task.predictor.width=777")


# -- what is no such file --------------------------------------------------------------------------


def test_a_pipe_a_device_and_a_circle_of_links_are_no_configs(place):
    os.mkfifo(place.folder / "pipe.yaml")
    (place.folder / "a.yaml").symlink_to("b.yaml")
    (place.folder / "b.yaml").symlink_to("a.yaml")
    assert place.fault(name="pipe.yaml") == (
        "pipe.yaml: this is a pipe, socket or device, not a file\n  accepted: a YAML file on disk"
    )
    with pytest.raises(ConfigError, match="this is a pipe, socket or device, not a file"):
        load_config("/dev/zero")
    assert "a.yaml: the file cannot be read: " in place.fault(name="a.yaml")
    assert "cannot be read: File name too long" in place.fault(name="x" * 300 + ".yaml")
    place.edit(("[toy.py]", "[toy.py, pipe.py]"))
    os.mkfifo(place.folder / "pipe.py")
    assert "pipe.py' cannot be read: it is not a regular file" in place.faults()[0]


def test_utf16_is_named(place):
    place.write("run.yaml", place.run.read_text().encode("utf-16"))
    assert place.fault() == (
        "run.yaml: the file is not UTF-8 text (byte 0)\n  hint: the file is UTF-16: save it as UTF-8"
    )
    place.edit()
    place.write("run.yaml", place.run.read_text().encode("utf-8-sig"))
    assert place.load().run.name == "small"


# -- tabs ------------------------------------------------------------------------------------------


def test_a_published_fsdp2_file_with_tabs_at_its_line_ends_reads(place):
    lines = [
        "engine:\t",
        "  sharding_size: auto\t",
        "  sub_modules_to_wrap:\t",
        "    - predictor.blocks.{*}\t  ",
        "",
    ]
    place.write("run.yaml", place.run.read_text() + "\n".join(lines))
    assert place.load().engine.options["sub_modules_to_wrap"] == ("predictor.blocks.{*}",)


@pytest.mark.parametrize(
    ("text", "line"), [("run:\n\tname: x\n", 2), ("a:\n  b: 1\n \tc: 2\n", 3), ("a:\n  b:\t1\n", 2)]
)
def test_a_tab_elsewhere_is_named_with_its_line(place, text, line):
    place.write("run.yaml", text)
    fault = place.fault()
    assert fault.startswith(f"run.yaml:{line}: this is not YAML: ")
    assert fault.endswith("hint: replace tabs by spaces")


# -- names of folders ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("../..", "'../..' leads out of the folder of runs"),
        ("/tmp/x", "'/tmp/x' leads out of the folder of runs"),
        ("a/../../b", "'a/../../b' leads out of the folder of runs"),
        ("a/", "'a/' leads out of the folder of runs"),
        ("a/./b", "'a/./b' leads out of the folder of runs"),
        ("a\\b", "'a\\\\b' contains a backslash"),
        ("..", "'..' leads out of the folder of runs"),
        (".", "'.' leads out of the folder of runs"),
        ("''", "is empty"),
        ('"a\\nb"', "'a\\nb' contains the unprintable character U+000A"),
        ('"a\\u202eb"', "'a\\u202eb' contains the unprintable character U+202E"),
        ("'a '", "'a ' starts or ends with a space"),
        ("ü" * 128, "takes 256 bytes; file systems allow 255"),
    ],
)
def test_a_name_that_is_no_folder_of_runs_is_refused(place, name, fault):
    found = place.fault(f"run.name={name}")
    assert ": run.name: name " in found and found.endswith(
        f"{fault}: choose a valid folder name, the run's folder in `dir`"
    )
    assert (
        place.load("run.name=ü.1 b").run.name == "ü.1 b"
        and place.load("run.name=first/1e-4")
        and place.load("run.name=" + "x" * 255)
    )
    assert "dir is empty" in place.fault("run.dir=' '")


# -- code of plugins -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("class E(BaseException): ...\nraise E('x')", "E: x"),
    ],
)
def test_a_plugin_that_would_end_the_process_is_a_fault(place, raised, said):
    toy = (place.folder / "toy.py").read_text()
    place.write("toy.py", f"{raised}\n{toy}")
    assert place.faults()[0].startswith("run.yaml:2: plugins.path: import of toy.py failed: " + said)
    body = raised.replace("\n", "\n        ")
    place.write(
        "toy.py", toy.replace("        if self.width % 2:", f"        {body}\n        if self.width % 2:")
    )
    assert f"cannot be created: {said.split(':')[0]}" in place.fault()


# -- a fuzz ----------------------------------------------------------------------------------------

_PIECES = st.sampled_from(
    [
        "run: ",
        "task: ",
        "data: ",
        "train: ",
        "plugins: ",
        "path: ",
        "include: ",
        "log: ",
        "{",
        "}",
        "[",
        "]",
        ", ",
        ": ",
        "- ",
        "\n",
        "\n  ",
        "\n    ",
        "\t",
        "'",
        '"',
        "&a ",
        "*a",
        "<<: ",
        "!!",
        "!!bool ",
        "!!int ",
        "!!set ",
        "!!binary ",
        "${",
        "${a}",
        "${.",
        "}",
        "\\",
        "\x00",
        "\x85",
        "\ufeff",
        "\u2028",
        "? ",
        "#",
        "%",
        "@",
        "`",
        "",
        "",
        "> ",
        "~",
        ".inf",
        ".nan",
        "1e999",
        "0x",
        "-",
        "x",
        "name",
        "steps",
        "3",
        "true",
        "null",
        "oc.env:",
        "toy.py",
        "depth",
        "type: ",
        "text_to_video",
        "a",
        "b",
        "---",
        "...",
        "\\ud800",
        "\\0",
        "é",
        "../",
    ]
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(_PIECES, max_size=30), at=st.integers(0, 400), over=st.text(max_size=20))
def test_no_file_and_no_override_escapes_as_another_error(place, pieces, at, over):
    place.edit()
    text = place.run.read_text()
    place.write("odd.yaml", (text[:at] + "".join(pieces) + text[at:]).encode("utf-8", "surrogatepass"))
    for overrides in ([], [f"run.name={''.join(pieces)}"], [f"task.predictor.extra.a={over}"], [over]):
        with _within_the_limit(), contextlib.suppress(MMError):
            place.load(*overrides, name="odd.yaml" if not overrides else "run.yaml")


def test_the_limits_leave_room_for_every_config_here():
    root = Path(__file__).parents[2]
    sizes = [
        path.stat().st_size for path in (*root.glob("plugins/**/*.yaml"), *root.glob("examples/**/*.yaml"))
    ]
    assert sizes and max(sizes) * 10 < MAX_BYTES


def test_aliases_of_many_files_are_counted_together(tmp_path, monkeypatch):
    monkeypatch.setattr("mm_core.config.yaml_nodes.MAX_NODES", 1_000)
    names = [f"part{i}.yaml" for i in range(4)]
    for name in names:
        ten = ", ".join(["1"] * 10)
        (tmp_path / name).write_text(f"x: &a [{ten}]\ny: &b [{', '.join(['*a'] * 10)}]\nz: [*b, *b]\n")
    root = tmp_path / "root.yaml"
    root.write_text(f"include: [{', '.join(names)}]\n")
    with pytest.raises(ConfigError, match="aliases expand to more than 1,000 values"):
        load_config(root)
