"""The conformance kit of migrations: the example of a new plugin passes, a faulty one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_core.plugin.scaffold.new_plugin import template_of
from mm_core.testing.kit import Examination
from support.conformance import edited

CHECKS = ("strangers", "migrates", "accounts")


@pytest.fixture
def good(tmp_path: Path) -> Path:
    file = tmp_path / "good.py"
    file.write_text(
        template_of("migration")
        + "\n\nfrom mm_core import Component, hookimpl\n\n\n@hookimpl\ndef mm_migrations():\n"
        + '    return [Component(name="good", target="good:SmallTrainer", examples="good:examples")]\n'
    )
    return file


def examine(good: Path, old: str = "", new: str = "") -> Examination:
    folder = good.parent / "edited"
    folder.mkdir()
    return edited(good, folder, "migration", old, new)


def test_the_example_of_a_new_plugin_keeps_the_contract(good):
    examination = examine(good)
    assert {check: examination.run(check).reason for check in CHECKS} == dict.fromkeys(CHECKS, "")


@pytest.mark.parametrize(
    ("check", "old", "new", "why"),
    [
        (
            "strangers",
            "        except ValueError:\n            return False",
            "        finally:\n            pass",
            "recognise of",
        ),
        ("strangers", '"trainer" in read_source(paths[0]).value', "True", "returned True"),
        ("migrates", "        return [run]", "        return []", "describes no run"),
        (
            "migrates",
            'run.set(key, value, "as the trainer has it")',
            'run.set(key, value, "")',
            "came from nowhere",
        ),
        ("migrates", '"optimizer.lr"', '"optimizer.rate"', "rate"),
        (
            "accounts",
            'Key("trainer.rate", "optimizer.lr")',
            'Key("trainer.rate")',
            "trainer.rate: in no list",
        ),
        ("migrates", "clips are not mixed here", "", "without a reason"),
        ("migrates", 'return [folder / "settings.json"]', "return []", "no example"),
    ],
)
def test_a_faulty_migration_is_refused(check, old, new, why, good):
    outcome = examine(good, old, new).run(check)
    assert outcome.status == "failed" and why in outcome.reason
