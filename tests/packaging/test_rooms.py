"""Rules about the source that import-linter can not state."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mm_core"
DEVICE_NAMES = {"cuda", "npu", "nccl", "hccl", "gloo"}


def device_names_in(source: str) -> set[str]:
    """Device and backend names that stand as string constants, f-strings included, docstrings not."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words = set(node.value.replace(":", " ").replace(",", " ").split())
            found |= words & DEVICE_NAMES
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('x = "cuda"', {"cuda"}),
        ('x = f"cpu:gloo,{device}:nccl"', {"gloo", "nccl"}),
        ('"""Runs on cuda and npu."""\nx = "cpu"', set()),
        ('def f():\n    """cuda"""\n    return "hccl"', {"hccl"}),
    ],
)
def test_device_names_are_found_in_code_and_not_in_docstrings(source: str, found: set[str]) -> None:
    assert device_names_in(source) == found


def test_only_device_py_names_devices_and_backends() -> None:
    offenders = {
        str(file.relative_to(ROOT)): sorted(names)
        for file in PACKAGE.rglob("*.py")
        if file != PACKAGE / "device.py" and (names := device_names_in(file.read_text()))
    }
    assert offenders == {}
    assert device_names_in((PACKAGE / "device.py").read_text()) >= {"cuda", "npu", "gloo"}


def test_no_docstring_that_ships_is_unwritten() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "plugins").glob("mm_*/mm_*/**/*.py")]
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    unwritten = [
        f"{file.relative_to(ROOT)}: {text}"
        for file in files
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, nodes)
        and (text := ast.get_docstring(node)) is not None
        and {"TODO", "FIXME", "XXX", "TBD"} & set(text.replace(":", " ").split())
    ]
    assert len(files) > 100 and unwritten == []


def test_every_room_has_its_place_in_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    placed = {name.strip(" ()").split(".")[1] for layer in layers for name in layer.split("|")}
    rooms = {
        path.stem
        for path in PACKAGE.iterdir()
        if path.stem != "__init__" and (path.suffix == ".py" or (path / "__init__.py").is_file())
    }
    assert rooms - {"testing"} == placed - {"testing"}


def test_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_module_is_longer_than_a_person_reads() -> None:
    long = {
        str(file.relative_to(ROOT)): lines
        for folder in (PACKAGE, ROOT / "plugins")
        for file in folder.rglob("*.py")
        if "tests" not in file.parts and (lines := len(file.read_text().splitlines())) > 400
    }
    assert long == {}
