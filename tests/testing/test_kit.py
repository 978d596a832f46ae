"""`mm plugins test`, the pytest suite of a plugin, and the checks of every kind of component."""

from __future__ import annotations

import json
import os
import random
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mm_core.cli.main import main
from mm_core.diffusion.flow_match import FlowMatch
from mm_core.errors import PluginError
from mm_core.plugin.checks.contract import members_of
from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.plugin.kinds import Contract
from mm_core.plugin.registry import get_registry
from mm_core.testing import conformance_tests
from mm_core.testing.common import CHECKS
from mm_core.testing.kit import Examination, Outcome, kit_of
from mm_core.testing.suite import find_components
from support.conformance import examined
from support.warm import run

test_flow_match = conformance_tests("core/flow_match")

PLUGIN = """
from mm_core import Component, hookimpl
from mm_core.diffusion.flow_match import FlowMatch


class Ends(FlowMatch):
    def sigmas(self, steps):
        return super().sigmas(steps).clamp(min=0.1)

    def target(self, latents, noise, timestep):
        raise ZeroDivisionError("no steps")


@hookimpl
def mm_schedulers():
    return [Component("ends", "PLUGIN:Ends")]
"""


LATE = """
import os

import torch
from torch import nn

from mm_core import Component, hookimpl
from mm_core.contracts import PredictorModule


class Late(PredictorModule):
    patch_size = (1, 2, 2)

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 4)
        self.register_buffer("angles", torch.outer(torch.arange(4.0), torch.arange(4.0)))
        nn.Parameter(torch.empty(4)).data.normal_()
        self.in_channels = self.out_channels = self.text_dim = 4

    def forward(self, latents, timestep, text, text_mask):
        return latents


class Optimizer(torch.optim.SGD):
    def __init__(self, named_parameters):
        super().__init__(named_parameters, lr=0.1)


class Sneaky(Optimizer):
    def __init__(self, named_parameters):
        import turtledemo

        super().__init__(named_parameters)
        os.environ["SNEAKY"] = "1"
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        torch.nn.functional.gelu = torch.nn.functional.silu


@hookimpl
def mm_predictors():
    return [Component("late", "late:Late")]


@hookimpl
def mm_optimizers():
    return [Component("late", "late:Optimizer"), Component("sneaky", "late:Sneaky")]
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A one-file plugin with a scheduler that has two faults."""
    file = tmp_path / "ends_early.py"
    file.write_text(PLUGIN.replace("PLUGIN", file.stem))
    return file


def test_a_good_component_has_the_milliseconds_of_each_check_and_code_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plugins", "test", "core/flow_match", "--verbose"]) == 0
    first, *checks, last = capsys.readouterr().out.splitlines()
    assert len(checks) == 18
    *passed, without = checks
    assert all(re.fullmatch(r" +\d+ ms  passed: [a-z_]+", line) for line in passed), passed
    assert "not applicable: intervals: it is no mm_core.contracts.SupportsTruncated" in without
    assert first.startswith("core/flow_match  (scheduler)  17 of 18 passed, 1 not applicable, ")
    assert last == "1 component, 18 checks, 0 failures"


def test_checks_that_do_not_fail_are_only_counted_by_default(
    plugin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "test", "core/flow_match"]) == 0
    first, without, last = capsys.readouterr().out.splitlines()
    assert " 17 of 18 passed, 1 not applicable, " in first and last == "1 component, 18 checks, 0 failures"
    assert without == "  not applicable (--verbose: why): intervals"
    assert main(["plugins", "test", "local/ends", "--path", str(plugin)]) == 1
    _, without, *lines, _ = capsys.readouterr().out.splitlines()
    assert "not applicable" in without and lines and all("  failed: " in line for line in lines)


def test_a_fault_names_its_plugin_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "twice.py"
    file.write_text(
        "from mm_core import Component, hookimpl\n\n\nclass Bare:\n    pass\n\n\n@hookimpl\n"
        "def mm_predictors():\n"
        "    return [Component('bare', 'twice:Bare'), Component('gone', 'twice:Gone')]\n"
    )
    assert main(["plugins", "test", "local", "--path", str(file)]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "  failed: " in line]
    assert len(failed) == 4 and "does not derive from torch.nn.Module" in failed[0]
    assert "the target 'twice:Gone' does not exist" in failed[2] and "as resolves" in failed[3]
    assert [line.count("plugin 'local'") for line in failed] == [1, 1, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rotary", "embedded", "convolved", "lumina"])
def test_a_sound_predictor_passes_in_a_new_process(name: str) -> None:
    path = Path(__file__).with_name("sound_predictors.py")
    words = ["-m", "mm_core.cli.main", "plugins", "test", f"local/{name}", "--path", path]
    done = run(words, anew=True, timeout=120)
    assert done.returncode == 0 and " 33 checks, 0 failures" in done.stdout, done.stdout + done.stderr


COLD = """
import sys
from mm_core.plugin.registry import get_registry
from mm_core.testing.kit import Examination
from mm_core.testing.suite import find_components

path, name, kind, *checks = sys.argv[1:]
(found,) = find_components(get_registry((path,)), name, kind)
of = Examination(found, get_registry((path,)))
print([(o.status, o.reason) for o in map(of.run, checks)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("checks", [("no_side_effects",), ("builds", "no_side_effects")])
@pytest.mark.parametrize("kind", ["optimizer", "predictor"])
def test_what_torch_imports_late_is_not_the_component_s_doing(
    kind: str, checks: tuple[str, ...], tmp_path: Path
) -> None:
    """In a new process, which has not imported torch._dynamo yet."""
    file = tmp_path / "late.py"
    file.write_text(LATE)
    done = run(["-c", COLD, file, "local/late", kind, *checks], anew=True)
    assert done.stdout == f"{[('passed', '')] * len(checks)}\n", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("checks", [("no_side_effects",), ("builds", "no_side_effects")])
def test_what_a_component_changes_is_found_although_it_imports_a_library_first(
    checks: tuple[str, ...], tmp_path: Path
) -> None:
    """The library's own changes are those of the first construction only."""
    file = tmp_path / "late.py"
    file.write_text(LATE)
    done = run(["-c", COLD, file, "local/sneaky", "optimizer", *checks], anew=True)
    assert done.stdout.count("('failed', ") == 1, done.stdout + done.stderr
    for name in ("torch's default generator", "torch's default dtype", "the number of environment variables"):
        assert name in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*COMPONENT_KINDS} - {"predictor", "image_encoder"}))
def test_components_of_a_kind_pass_in_a_new_process(kind: str) -> None:
    words = ["-m", "mm_core.cli.main", "plugins", "test", "core", "--kind", kind]
    done = run(words, anew=True, timeout=600)
    assert done.returncode == 0 and ", 0 failures" in done.stdout, done.stdout + done.stderr


def test_faults_are_readable_errors_with_the_authors_file_and_line(
    plugin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "test", "local/ends", "--path", str(plugin)]) == 1
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "noise_levels" in line)
    assert line.partition(" ms  ")[2].startswith(
        "failed: noise_levels: plugin 'local', scheduler 'local/ends', "
    )
    assert f"{plugin}, line 6: sigmas(1) are [1.0, 0.1]; accepted: from at most 1 (noise) down to 0" in line
    assert f"failed: linear: ZeroDivisionError: no steps ({plugin}, line 11)" in out
    assert "/mm_core/" not in out, "no frame of the core is shown"


def test_a_reason_that_several_checks_share_is_printed_once(
    plugin: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Outcome("local/ends", "scheduler", "first", "failed", "no levels")
    both = [failing, replace(failing, check="second"), replace(failing, check="third", reason="other")]
    monkeypatch.setattr("mm_core.testing.kit.Examination.__iter__", lambda self: iter(both))
    assert main(["plugins", "test", "local/ends", "--path", str(plugin)]) == 1
    lines = [line.partition("failed: ")[2] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert lines == ["first: no levels", "second: as first", "third: other"]


def test_json_has_every_check(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "test", "local/ends", "--json", "--path", str(plugin)]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    states = {check["check"]: check["status"] for check in answer["checks"]}
    assert states["noise_levels"] == "failed" and states["timesteps"] == "passed"
    assert states["light_description"] == "not applicable"


@pytest.mark.parametrize("name", ["custom_dit", "mm-custom-dit", "mm_custom_dit"])
def test_a_plugin_is_found_by_its_namespace_and_by_the_name_of_its_distribution(name: str) -> None:
    assert {c.qualified for c in find_components(get_registry(), name)} == {
        "custom_dit/custom_dit",
        "custom_dit/wan_transformer",
    }


def test_names_that_are_not_there_have_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "test", "core/flow_macth"]) == 1
    assert "no component is named 'core/flow_macth'" in capsys.readouterr().err
    assert main(["plugins", "test", "custom_dit", "--kind", "dataset"]) == 1
    error = capsys.readouterr().err
    assert "'custom_dit' has no component of the kind 'dataset'" in error and "predictor" in error


def with_expected(**expected: str) -> Examination:
    registry = get_registry()
    (registered,) = find_components(registry, "core/flow_match")
    component = replace(registered.component, expected_failures=expected)
    return Examination(replace(registered, component=component), registry)


def test_an_expected_failure_that_passes_is_a_failure() -> None:
    outcome = with_expected(linear="it is not").run("linear")
    assert outcome.status == "failed"
    assert outcome.reason == "it passes now: take 'linear' out of the expected_failures"


def test_an_expected_failure_has_its_reason_and_the_error_of_the_check() -> None:
    class Curved(FlowMatch):
        def add_noise(self, latents, noise, timestep):
            return super().add_noise(latents, noise, timestep) ** 2

    examination = examined("core/flow_match", Curved)
    component = replace(examination.registered.component, expected_failures={"linear": "squares are kept"})
    known = Examination(replace(examination.registered, component=component), examination.registry)
    outcome = known.run("linear")
    assert outcome.status == "expected"
    assert outcome.reason.startswith("squares are kept (plugin 'core', scheduler 'core/flow_match', ")
    assert "add_noise is not linear in latents and noise" in outcome.reason


def test_an_expected_failure_of_no_check_is_refused() -> None:
    with pytest.raises(PluginError, match="expected_failures names 'lineal', which is not a check") as caught:
        with_expected(lineal="")
    assert caught.value.hint == "did you mean 'linear' or 'intervals'?"


# -- the checks of every kind: each refuses a fault ------------------------------------------------


def reason(faulty: type, check: str, **changes: object) -> str:
    outcome = examined("core/flow_match", faulty, **changes).run(check)
    assert outcome.status == "failed", outcome
    return outcome.reason


def test_a_plugin_that_imports_torch_is_not_light() -> None:
    examination = examined("core/flow_match")
    component = replace(examination.registered.component, config="mm_core.diffusion.flow_match:FlowMatch")
    heavy = Examination(replace(examination.registered, component=component), examination.registry)
    assert "imports torch, which makes every command slow" in heavy.run("light_description").reason


def test_a_class_without_its_methods_does_not_resolve() -> None:
    class Empty:
        pass

    assert "Empty does not keep its contract: it lacks 8 methods" in reason(Empty, "resolves", config=None)


def test_a_component_that_is_not_built_gets_no_further_checks() -> None:
    class Broken(FlowMatch):
        def __post_init__(self):
            raise RuntimeError("never")

    outcomes = list(examined("core/flow_match", Broken))
    assert [outcome.check for outcome in outcomes] == ["light_description", "resolves", "builds"]
    assert outcomes[-1].reason.startswith("RuntimeError: never (")


class Unequal(float):
    """A value that is lost on the way to another process."""

    def __reduce__(self):
        return (float, (0.0,))


def test_a_config_that_does_not_come_back_is_noticed() -> None:
    examination = examined("core/flow_match")
    probe = examination._probe
    options = dict(probe.config.options)
    probe.config = replace(probe.config, options={**options, "shift": Unequal(5.0)})
    assert "the config is a different one after pickling" in examination.run("picklable_config").reason
    probe.config = replace(probe.config, options={**options, "timesteps": "no such"})
    assert "timesteps" in examination.run("config_round_trip").reason


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda: torch.manual_seed(0), "torch's default generator"),
        (lambda: random.random(), "the generator of `random`"),
        (lambda: os.environ.update(MM_TEST_SIDE_EFFECT="1"), "the number of environment variables"),
        (lambda: torch.set_default_dtype(torch.float64), "torch's default dtype"),
        (lambda: setattr(torch, "matmul", lambda a, b: a), "torch.matmul"),
    ],
)
def test_what_building_changes_is_named(act, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "matmul", torch.matmul)
    monkeypatch.setenv("MM_TEST_SIDE_EFFECT", "")
    monkeypatch.delenv("MM_TEST_SIDE_EFFECT")

    class Careless(FlowMatch):
        def __post_init__(self):
            act()

    kept = torch.get_rng_state(), random.getstate()
    try:
        assert f"building the component changes {named}" in reason(Careless, "no_side_effects")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        os.environ.pop("MM_TEST_SIDE_EFFECT", None)


def test_what_only_the_first_build_changes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MM_TEST_SIDE_EFFECT", "0")

    class Careless(FlowMatch):
        def __post_init__(self):
            os.environ["MM_TEST_SIDE_EFFECT"] = "1"

    outcomes = {}
    for outcome in examined("core/flow_match", Careless):
        outcomes[outcome.check] = outcome.reason
        next(iter(examined("core/flow_match", FlowMatch)))  # another is examined meanwhile
    assert "changes the environment variable MM_TEST_SIDE_EFFECT" in outcomes["no_side_effects"]


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("import os\n\nos.environ['A'] = '1'", "os.environ['A']"),
        ("from os import environ\n\nenviron.setdefault('A', '1')", "environ.setdefault('A', '1')"),
        ("import torch\n\ntorch.manual_seed(1)", "torch.manual_seed(1)"),
        ("import torch.nn as n\n\nif n:\n    n.Linear.bias = None", "n.Linear.bias"),
        (
            "import torch\n\nclass Mine:\n    torch.backends.cuda.matmul.allow_tf32 = False",
            "torch.backends.cuda",
        ),
        ("import torch\n\ndef later():\n    torch.manual_seed(1)", None),
        ("import torch\n\nWIDTH: dict[str, int] = {}\nWIDTH['a'] = torch.iinfo(torch.int8).max", None),
    ],
)
def test_what_an_import_changes_is_named_with_its_line(code: str, shown: str | None, tmp_path: Path) -> None:
    file = tmp_path / "at_import.py"
    file.write_text(PLUGIN.replace("PLUGIN", file.stem) + f"\n\n{code}\n")
    line = len(file.read_text().splitlines())
    registry = get_registry((str(file),))
    (registered,) = find_components(registry, "local/ends")
    state = torch.get_rng_state()
    outcome = Examination(registered, registry).run("no_side_effects")
    if shown is None:
        assert "importing" not in outcome.reason
    else:
        assert f"importing {file} changes the process (line {line}): {shown}" in outcome.reason
    torch.set_rng_state(state)
    os.environ.pop("A", None)
    if "bias" in vars(torch.nn.Linear):
        del torch.nn.Linear.bias
    torch.backends.cuda.matmul.allow_tf32 = False


def test_a_device_in_the_code_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "on_a_device.py"
    file.write_text(PLUGIN.replace("PLUGIN", file.stem) + "\n\nDEVICE = 'cuda:0'\n")
    registry = get_registry((str(file),))
    (registered,) = find_components(registry, "local/ends")
    outcome = Examination(registered, registry).run("no_device_names")
    assert f"the code names the device 'cuda:0' ({file}, line 19)" in outcome.reason


def test_each_member_of_each_contract_has_a_check() -> None:
    """A member or capability that is added needs its row in examined.toml, and a check that examines it."""
    examined = tomllib.loads(Path(__file__).with_name("examined.toml").read_text(encoding="utf-8"))
    assert examined.keys() == COMPONENT_KINDS.keys()
    for kind, contract in COMPONENT_KINDS.items():
        asked = [members_of(contract), *(members_of(Contract(path)) for path in contract.optional)]
        assert examined[kind].keys() == {name for members in asked for name in members}, kind
        known = {*CHECKS, *kit_of(kind).checks}
        for member, checks in examined[kind].items():
            assert checks and known.issuperset(checks), (kind, member)
