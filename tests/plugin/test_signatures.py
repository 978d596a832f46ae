"""Targets without `config=`: arguments that the core passes by position are not keys, for each kind."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import mm_core
from mm_core.plugin.checks.inspection import inspect_plugins
from mm_core.plugin.hookspecs import COMPONENT_KINDS, KINDS
from mm_core.plugin.manager import discover, local_files
from mm_core.plugin.registry import Registry, get_registry
from mm_core.schema.describe import describe_nested
from support.logs import log_of
from support.sites import clear_cache

ONE_FILE = """
from mm_core import Component, hookimpl

{hooks}

def target({leading}power: float = 2.0):
    return ({leading}power)
"""
LEADING = {kind: record.leading for kind, record in COMPONENT_KINDS.items() if record.leading}
CONFIG = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    power: float = 2.0
"""
HOOK = """
@hookimpl
def {hook}():
    return [Component(name="mine", target="mine:target")]
"""


@pytest.fixture(autouse=True)
def _forget():
    yield
    clear_cache()


def _passed() -> dict[str, int]:
    """Kind -> arguments that the core's own calls of `Registry.build` pass after the config."""
    found: dict[str, int] = {}
    for path in Path(mm_core.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called == "build" and node.args and isinstance(node.args[0], ast.Constant):
                kind = str(node.args[0].value)
                assert found.setdefault(kind, len(node.args) - 2) == len(node.args) - 2, f"{path}: {kind}"
    return found


def test_the_table_is_what_the_core_really_passes():
    passed = _passed()
    assert {"optimizer", "lr_schedule", "tracker", "dataset", "task"} <= passed.keys() <= KINDS.keys()
    assert {kind: count for kind, count in passed.items() if count} == LEADING


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("toys")
def test_a_one_file_component_of_each_kind_is_checked_and_built_as_the_core_builds_it(tmp_path, kind):
    names = [f"given_{number}" for number in range(COMPONENT_KINDS[kind].leading)]
    source = ONE_FILE.format(hooks=HOOK.format(hook=KINDS[kind]), leading="".join(f"{n}, " for n in names))
    file = tmp_path / "mine.py"
    file.write_text(source)
    made = get_registry((str(file),)).build(kind, {"type": "local/mine", "power": 3}, *names)
    assert made == ((*names, 3.0) if names else 3.0)


def test_check_with_imports_takes_a_one_file_component_with_a_config(tmp_path):
    file = tmp_path / "mine.py"
    for number in sorted(set(LEADING.values())):
        leading = "".join(f"given_{i}, " for i in range(number))
        kept = "".join(
            HOOK.format(hook=KINDS[kind]).replace('"mine:target"', '"mine:target", config="mine:Config"')
            for kind in LEADING
            if LEADING[kind] == number
        )
        source = ONE_FILE.format(hooks=kept, leading=leading)
        file.write_text(source + CONFIG)
        registry = Registry(
            tuple(r for r in discover(local_files((str(file),)), {}) if r.namespace == "local")
        )
        assert registry.components() and inspect_plugins(registry, import_targets=True) == []
        clear_cache()


@pytest.mark.slow
def test_everything_that_is_installed_checks_with_its_imports(mm):
    done = mm("plugins", "check", "--import", "--json")
    findings = json.loads(done.out)["findings"]
    assert [finding for finding in findings if finding["severity"] == "fault"] == []
    assert done.code == 0


@pytest.mark.slow
def test_a_one_file_schedule_moves_the_learning_rate_of_a_real_run(tiny, tmp_path, monkeypatch):
    (tmp_path / "halving.py").write_text(
        "from mm_core import Component, hookimpl\n\n"
        "@hookimpl\ndef mm_lr_schedules():\n"
        "    return [Component(name='halving', target='halving:Halving')]\n\n"
        "class Halving:\n"
        "    def __init__(self, total_steps, base_lr, rate: float = 0.5):\n"
        "        assert total_steps == 3\n"
        "        assert base_lr == 1e-3\n"
        "        self.rate = rate\n\n"
        "    def factor(self, step):\n"
        "        return self.rate**step\n"
    )
    config = mm_core.load_config(
        tiny,
        [
            f"plugins.path=[{tmp_path}/halving.py]",
            "lr_schedule={type: local/halving, rate: 0.25}",
            "train.steps=3",
            f"run.dir={tmp_path}",
        ],
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = mm_core.train(config)
    rows = log_of(Path(run.run_dir))
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates == pytest.approx([1e-3, 2.5e-4, 6.25e-5])


DOCUMENTED = """
from dataclasses import dataclass

from mm_core import Component, hookimpl


class Plain:
    '''Made of parts.

    Args:
        width: of each layer, over
            two lines.
        depth: replaced by the comment.
    '''

    def __init__(
        self,
        width: int,
        depth: int = 2,  # layers
        first: int = 0, second: int = 1,  # of which?
        unknown: str = "",
    ):
        pass


@dataclass
class Fields:
    size: int = 1  # of a field


def made(rate: float):  # noqa: RET501
    '''Made by a function.

    Args:
        rate (float): in hertz.

    Returns:
        None.
    '''


@hookimpl
def mm_callbacks():
    return [Component(name.lower(), f"mine:{name}") for name in ("Plain", "Fields", "made")]
"""


def test_the_keys_of_a_signature_have_the_docs_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DOCUMENTED)
    registry = Registry(discover(local_files((str(tmp_path / "mine.py"),)), {}))

    def docs(name: str) -> dict[str, str]:
        found = registry.resolve("callback", name).config_class()
        return {field.name: field.comment for field in describe_nested(found)}

    wide = "of each layer, over two lines."
    assert docs("plain") == {"width": wide, "depth": "layers", "first": "", "second": "", "unknown": ""}
    assert docs("fields") == {"size": "of a field"}
    assert docs("made") == {"rate": "in hertz."}
