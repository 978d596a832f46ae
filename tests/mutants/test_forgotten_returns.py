"""A method of any contract that forgets its `return`: the kit finds it, and a run shows no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from mm_core.plugin.checks.contract import members_of, method_name
from mm_core.plugin.hookspecs import COMPONENT_KINDS, KINDS
from mm_core.plugin.kinds import Contract
from mm_core.plugin.scaffold.new_plugin import template_of
from support.mutants import Mutant, findings, installed

FORGOTTEN = """

def forgotten(*args, **kwargs):
    pass


{owner}.{method} = forgotten
"""
IGNORED = {("optimizer", "step"): "its result is ignored"}


def methods_of(kind: str) -> set[str]:
    """The methods that return something: of the contract, and of the capabilities that the template has."""
    contract, text = COMPONENT_KINDS[kind], template_of(kind)
    found = set()
    for path in (contract.protocol, *contract.optional):
        for member in members_of(Contract(path)).values():
            name = method_name(contract, member)
            if member.signature is not None and "None" not in member.returns:
                found |= {name} if path == contract.protocol or f"def {name}(" in text else set()
    return {name for name in found if (kind, name) not in IGNORED}


CASES = [(kind, name) for kind in KINDS for name in sorted(methods_of(kind))]


def forgetful(kind: str, name: str) -> Mutant:
    text = template_of(kind)
    end = text[-200:]
    added = FORGOTTEN.format(owner=COMPONENT_KINDS[kind].target, method=name)
    return Mutant(f"{name} forgets its return", kind, end, end + added, "no return")


def test_the_methods_of_most_kinds_return_something() -> None:
    assert {kind for kind, _ in CASES} == {*KINDS} - {"optimizer", "tracker", "callback"}
    assert {("lr_schedule", "factor"), ("predictor", "forward"), ("engine", "grad_norm")} <= {*CASES}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_kit_finds_a_forgotten_return(kind: str, name: str, tmp_path: Path) -> None:
    found = findings(tmp_path, forgetful(kind, name), kind)
    assert found.checks
    for check, reason in found.checks.items():
        assert str(tmp_path) in reason and "/mm_core/" not in reason, (check, reason)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_run_names_the_file_of_a_forgotten_return(
    kind: str, name: str, tmp_path: Path, mm: Any, shapes: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/clips").symlink_to(shapes)
    plugin = f"forgetful-{crc32(f'{kind}/{name}'.encode())}"
    with installed(tmp_path, plugin, kind, forgetful(kind, name).text) as (_, package):
        config = tmp_path / plugin / package / "configs" / f"{kind}.yaml"
        settings = ["train.steps=2", "data.loader.workers=0"]
        settings += ["validation.every=1"] * ("\nvalidation:" in config.read_text(encoding="utf-8"))
        done = mm("train", "--config", config, *settings, cwd=tmp_path, PYTHONPATH=str(tmp_path / plugin))
    assert "Traceback" not in done.err, done.err
    assert done.code == 0 or (done.code == 1 and str(tmp_path / plugin) in done.err), done.err
