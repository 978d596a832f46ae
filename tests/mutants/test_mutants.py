"""Faults of plugin authors in good components of every kind: the kit finds each, by the check for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from mm_core.plugin.hookspecs import KINDS
from mm_core.testing.kit import kit_of
from support.mutants import Mutant, findings, installed, read_mutants
from support.scripts import script

SIGHTED, BLIND = (read_mutants(Path(__file__).with_name(f"{name}.toml")) for name in ("sighted", "blind"))
ALL = (*SIGHTED, *BLIND)
FEW = {kind: next(m for m in BLIND if m.kind == kind and m.seen == "test") for kind in KINDS}


def found(mutant: Mutant, folder: Path) -> None:
    """Asserts that a mutant shows where it is recorded, as an error with the author's file."""
    where = findings(folder, mutant, mutant.kind, ranks=mutant.check in kit_of(mutant.kind).ranks)
    if mutant.escapes:
        assert not where.checks, "it is found now: replace `escapes` by `check` and `seen`"
        return
    assert mutant.check in where.checks, where.checks
    first = "check" if where.static else "check --import" if where.imported else "test"
    assert first == mutant.seen
    reason = where.checks[mutant.check]
    assert str(folder) in reason and "Traceback" not in reason and "/mm_core/" not in reason


def test_each_mutant_is_a_program_and_has_its_own_name() -> None:
    assert len({(mutant.kind, mutant.name) for mutant in ALL}) == len(ALL)
    for mutants in (SIGHTED, BLIND):
        assert {*Counter(mutant.kind for mutant in mutants)} == {*KINDS}
    for mutant in ALL:
        compile(mutant.text.replace("$package", "good"), mutant.name, "exec")
        assert mutant.old != mutant.new
        assert bool(mutant.check) != bool(mutant.escapes)


@pytest.mark.parametrize("mutants", [SIGHTED, BLIND])
def test_the_kit_finds_95_of_100_mutants(mutants: tuple[Mutant, ...]) -> None:
    """That it finds each of them is what `test_every_mutant_is_found` shows."""
    assert len(mutants) >= 60
    assert sum(bool(mutant.check) for mutant in mutants) >= 0.95 * len(mutants)


def test_the_table_of_kinds_and_faults_is_that_of_the_mutants() -> None:
    table = script("tests/mutants/table.py")
    written = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    assert written == table.render(SIGHTED, BLIND), "run python tests/mutants/table.py"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ALL, ids=[f"{m.kind}: {m.name}" for m in ALL])
def test_no_mutant_shows_a_traceback_in_a_run(mutant: Mutant, tmp_path: Path, mm: Any, shapes: Path) -> None:
    """A run of two steps may succeed; an error message names the author's file."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/clips").symlink_to(shapes)
    name = f"mutant-{crc32(f'{mutant.kind}/{mutant.name}'.encode())}"
    with installed(tmp_path, name, mutant.kind, mutant.text) as (_, package):
        config = tmp_path / name / package / "configs" / f"{mutant.kind}.yaml"
        settings = ["train.steps=2", "data.loader.workers=0"]
        settings += ["validation.every=1"] * ("\nvalidation:" in config.read_text(encoding="utf-8"))
        done = mm("train", "--config", config, *settings, cwd=tmp_path, PYTHONPATH=str(tmp_path / name))
    assert "Traceback" not in done.err, done.err
    # A reader that reports a wrong length or rate looks like damaged videos: the message names the videos.
    named = [str(tmp_path / name), *(["could not be read"] if mutant.kind == "video_reader" else [])]
    assert done.code == 0 or (done.code == 1 and any(each in done.err for each in named)), done.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_mutant_of_a_kind_is_found(kind: str, tmp_path: Path) -> None:
    found(FEW[kind], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ALL, ids=[f"{m.kind}: {m.name}" for m in ALL])
def test_every_mutant_is_found(mutant: Mutant, tmp_path: Path) -> None:
    found(mutant, tmp_path)
