"""Rules about the source that import-linter cannot state."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from importlib import import_module
from pathlib import Path

import pytest

from support.scripts import nodes_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mm_core"
DEVICE_NAMES = {"cuda", "npu", "nccl", "hccl", "gloo"}


def device_names_in(source: str) -> set[str]:
    """Device and backend names in string constants, with f-strings but without docstrings."""
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


def test_only_one_room_names_devices_and_backends() -> None:
    offenders = {
        str(file.relative_to(ROOT)): sorted(names)
        for file in PACKAGE.rglob("*.py")
        if file.parent != PACKAGE / "device" and (names := device_names_in(file.read_text()))
    }
    assert offenders == {}
    own = [device_names_in(file.read_text()) for file in (PACKAGE / "device").glob("*.py")]
    assert set().union(*own) >= {"cuda", "npu", "gloo"}


def test_a_launcher_that_waits_for_its_ranks_holds_no_torch() -> None:
    """It stays in memory for as long as the run lasts, and starts before torch could be imported."""
    names = [f"mm_core.runtime.launch.{file.stem}" for file in (PACKAGE / "runtime/launch").glob("[a-z]*.py")]
    code = f"import sys, {', '.join(names)}\nassert 'torch' not in sys.modules"
    assert len(names) > 4
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_docstring_that_ships_is_unwritten() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "plugins").glob("mm_*/mm_*/**/*.py")]
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    unwritten = [
        f"{file.relative_to(ROOT)}: {text}"
        for file in files
        for node in nodes_of(file)
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


def _sources() -> dict[str, Path]:
    """Files of the core and of this repository's plugins, by module name."""
    found = {}
    for package in (PACKAGE, *(ROOT / "plugins").glob("mm_*/mm_*/")):
        for file in package.rglob("*.py"):
            parts = file.relative_to(package.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _imports(file: Path, modules: Collection[str]) -> set[str]:
    """Modules that a file imports, also within functions; without modules used only in annotations."""
    nodes = nodes_of(file)
    only_typing = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in nodes:
        if id(node) in only_typing:
            continue
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(modules)


def _offered(name: str) -> set[str]:
    """Names that plugins may import from a room or a module beside the rooms: its `__all__`, if it has
    one."""
    return set(getattr(import_module(name), "__all__", ())) if name.count(".") < 2 else set()


def test_plugins_and_examples_import_only_what_a_room_offers() -> None:
    """The public surface of the core: all other names may change with any commit."""
    files = [*(ROOT / "plugins").glob("mm_*/mm_*/**/*.py"), *(ROOT / "examples").rglob("*.py")]
    names = set()
    for file in files:
        for node in nodes_of(file):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("mm_core."):
                names |= {(str(file.relative_to(ROOT)), str(node.module), a.name) for a in node.names}
            elif isinstance(node, ast.Import):
                names |= {(str(file.relative_to(ROOT)), a.name, "") for a in node.names}
    whole = {(file, name) for file, name, of in names if not of and name.startswith("mm_core.")}
    kept = {(file, f"{room}.{of}") for file, room, of in names if of and of not in _offered(room)}
    assert whole | kept == set()
    assert len(files) > 50 and len({room for _, room, of in names if of}) >= 8


def test_what_a_room_offers_is_there() -> None:
    rooms = [
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    ]
    modules = [import_module(f"mm_core.{room}" if room != "__init__" else "mm_core") for room in rooms]
    missing = {
        f"{module.__name__}.{name}"
        for module in modules
        for name in getattr(module, "__all__", ())
        if not hasattr(module, name)
    }
    assert missing == set()


def test_tests_stand_in_the_room_of_what_they_test() -> None:
    """Folders besides the rooms: complete runs, this repository, trust in code (many rooms), shared
    support."""
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    folders = {path.name for path in (ROOT / "tests").iterdir() if [*path.glob("*.py")]}
    assert folders - rooms == {"runs", "repo", "trust", "support", "mutants"}


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = _sources()
    graph = {name: _imports(file, modules) - {name} for name, file in modules.items()}
    # A module that imports a package by name imports no other part of it, and packages import their parts.
    graph = {
        name: {other for other in others if not name.startswith(f"{other}.")}
        for name, others in graph.items()
    }
    left = dict(graph)
    while leaves := [name for name, others in left.items() if not others & left.keys()]:
        for name in leaves:
            del left[name]
    assert left == {}, "these lie on circles, or import what does"
    assert len(graph) > 250


def test_no_room_is_crowded() -> None:
    files = {file.parent for file in _sources().values()}
    crowded = {str(f.relative_to(ROOT)): n for f in files if (n := len(list(f.glob("*.py")))) > 14}
    assert crowded == {}
    assert len([folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()]) <= 26


def test_no_function_is_longer_than_a_screen() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        f"{module}.{node.name}": lines
        for module, file in _sources().items()
        for node in nodes_of(file)
        if isinstance(node, kinds) and (lines := (node.end_lineno or 0) - node.lineno + 1) > 60
    }
    assert long == {}


def test_torch_distributed_is_called_by_the_rooms_of_ranks_engines_and_layouts_alone() -> None:
    allowed = {"runtime", "engines", "parallel"}
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in PACKAGE.rglob("*.py")
        if file.relative_to(PACKAGE).parts[0] not in allowed
        for node in nodes_of(file)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("dist.", "torch.distributed."))
    ]
    assert found == []


PRIVATE_OF_TORCH = re.compile(
    r"torch\._(C|subclasses|functorch)\b|_python_dispatch|fsdp\._fully_shard|tensor\._(utils|dtensor_spec)"
)


def test_one_module_alone_uses_what_torch_keeps_private() -> None:
    """It has a test of each name, so that a new torch shows by name what it changed."""
    files = [
        f for top in ("mm_core", "plugins", "examples", "benchmarks") for f in (ROOT / top).rglob("*.py")
    ]
    users = [f for f in files if "tests" not in f.parts and PRIVATE_OF_TORCH.search(f.read_text("utf-8"))]
    assert users == [PACKAGE / "device/torch_private.py"]


DATA_ROOMS = ("data", "training", "evaluation", "inference", "telemetry", "tasks")
MAY_KNOW_THE_RANK = {"RunRecorder", "rank_log", "Watchdog", "ProfileWindow", "make_progress"}
"""Logs, displays and the watchdog, which each process has."""


def layout_faults(source: str) -> list[str]:
    """Where a source reads an engine's options, or takes the rank of a process for its share of the data."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if text.endswith("engine.options"):
            found.append(text)
        if text.split(".")[-2:] not in (["ranks", "rank"], ["_ranks", "rank"], ["current()", "rank"]):
            continue
        parent = parents[node]
        parent = parents[parent] if isinstance(parent, ast.keyword) else parent
        asks = isinstance(parent, ast.Compare | ast.BoolOp | ast.UnaryOp)
        asks |= isinstance(parent, ast.If | ast.IfExp) and parent.test is node
        shown = isinstance(parent, ast.Call) and ast.unparse(parent.func) in MAY_KNOW_THE_RANK
        if not asks and not shown:
            found.append(ast.unparse(parent))
    return found


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("config.engine.options.get('param_dtype')", 1),
        ("micro = index * count + Ranks.current().rank", 1),
        ("loader(dataset, rank=self._ranks.rank)", 1),
        ("mine = numbers[ranks.rank :: count]", 1),
        ("micro = index * count + engine.data_ranks.rank", 0),
        ("if ranks.rank == 0 and not run.ranks.rank:\n    write()", 0),
        ("note if ranks.rank else None\nmake_progress(steps, ranks.rank, 0)", 0),
    ],
)
def test_readers_of_the_layout_are_found(source: str, faults: int) -> None:
    assert len(layout_faults(source)) == faults


def test_an_engine_alone_reads_its_options_and_gives_the_shares_of_the_data() -> None:
    found = {
        str(file.relative_to(ROOT)): faults
        for file in PACKAGE.rglob("*.py")
        if (faults := layout_faults(file.read_text(encoding="utf-8")))
        and (file.relative_to(PACKAGE).parts[0] in DATA_ROOMS or any("options" in text for text in faults))
    }
    assert found == {}


def test_no_room_holds_more_than_15_percent_of_the_lines() -> None:
    lines = {file: len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    shares = {
        room: sum(count for file, count in lines.items() if file.is_relative_to(PACKAGE / room))
        / sum(lines.values())
        for room in rooms
    }
    assert len(rooms) <= 26 and max(shares.values()) <= 0.15, shares
