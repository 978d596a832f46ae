"""Measures startup time: `mm --help` against a bare interpreter, and `mm plugins list` with 50 more plugins.

All commands are measured in turn and compared by medians, so a change of the machine's speed affects all
of them. The cost per plugin is compared with its lower limit: the standard library lists the entry points
and imports each, pluggy registers it, and nothing is checked.

Usage: python benchmarks/startup.py [--rounds N] [--plugins N]
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RATIO_BAR = 10.0
PLUGIN_BAR_MS = 0.5
FLOOR_BAR = 1.5
MM = [sys.executable, "-m", "mm_core.cli.main"]
FORBIDDEN = ("torch", "transformers", "diffusers", "rich", "omegaconf", "numpy")
HELP_FORBIDDEN = (*FORBIDDEN, "importlib.metadata", "mm_core.plugin.manager", "mm_core.cli.plugins")

FLOOR = """
from importlib.metadata import entry_points
import pluggy
from mm_core import Component, hookimpl
manager = pluggy.PluginManager("mm_core")
for point in entry_points(group="mm_core.plugins"):
    if point.name.startswith("bench_"):
        manager.register(point.load())
"""

PLUGIN = '''"""A plugin like any other: one predictor."""

from mm_core import Component, hookimpl


@hookimpl
def mm_predictors():
    return [Component(name="dit", target="{package}.model:DiT", config="{package}.config:DiTConfig",
                      summary="the transformer of plugin {package}")]
'''
METADATA = (
    """Metadata-Version: 2.4
Name: {name}
Version: 1.2.3
Summary: a plugin
Requires-Python: >=3.11
Requires-Dist: mm-core<0.2,>=0.1
Requires-Dist: torch>=2.7

# {name}

"""
    + "A line of the description that every real distribution carries along.\n" * 40
)


def write_plugins(folder: Path, count: int) -> None:
    """Writes `count` installed plugins as pip would: a package and a dist-info for each."""
    for number in range(count):
        package = f"mm_bench_{number:03d}"
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("")
        (folder / package / "plugin.py").write_text(PLUGIN.format(package=package))
        info = folder / f"{package}-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format(name=package.replace("_", "-")))
        (info / "entry_points.txt").write_text(f"[mm_core.plugins]\nbench_{number:03d} = {package}.plugin\n")
    compileall.compile_dir(folder, quiet=2)  # as pip does when it installs


def seconds(command: list[str], path: str) -> float:
    """Wall time of one run of a command, with `path` as PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": path}
    start = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def in_turn(commands: list[tuple[list[str], str]], rounds: int) -> list[list[float]]:
    """Times of each command, run in turn after one warm-up run of each."""
    times: list[list[float]] = [[] for _ in commands]
    for round_ in range(rounds + 1):
        for command, into in zip(commands, times, strict=True):
            elapsed = seconds(*command)
            if round_:
                into.append(elapsed)
    return times


def imported(arguments: list[str], path: str, forbidden: tuple[str, ...]) -> list[str]:
    """Names of the forbidden modules that a command of `mm` imports."""
    code = (
        "import sys; from mm_core.cli.main import main; main(sys.argv[2:]);"
        "print(','.join(set(sys.argv[1].split(',')) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(forbidden), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    return [name for name in done.stderr.strip().splitlines()[-1:] if name]


def result(name: str, value: float, bar: float) -> bool:
    """Prints a RESULT line; returns whether the bar is met."""
    good = value <= bar
    print(f"RESULT {name} {value:.3f} {bar:g} {'ok' if good else 'short'}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--plugins", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as many, tempfile.TemporaryDirectory() as none:
        write_plugins(Path(many), options.plugins)
        listing, floor = [*MM, "plugins", "list"], [sys.executable, "-c", FLOOR]
        commands = [
            ("python -c pass", [sys.executable, "-c", "pass"], none),
            ("mm --help", [*MM, "--help"], none),
            ("mm plugins list", listing, none),
            (f"mm plugins list, {options.plugins} more plugins", listing, many),
            ("importlib.metadata and pluggy", floor, none),
            (f"the same, {options.plugins} more plugins", floor, many),
        ]
        times = in_turn([(command, path) for _, command, path in commands], options.rounds)
        heavy = imported(["--help"], many, HELP_FORBIDDEN) + imported(["plugins", "list"], many, FORBIDDEN)
    print(f"{'command':<36}  {'median ms':>9}  {'fastest ms':>10}")
    for (name, *_), of in zip(commands, times, strict=True):
        print(f"{name:<36}  {statistics.median(of) * 1e3:>9.1f}  {min(of) * 1e3:>10.1f}")
    print(f"heavy modules imported: {', '.join(heavy) or 'none'}")
    bare, helped, without, with_many, floor_without, floor_many = (statistics.median(of) for of in times)
    good = [
        result("startup_help_ratio", helped / bare, RATIO_BAR),
        result("startup_ms_a_plugin", (with_many - without) * 1e3 / options.plugins, PLUGIN_BAR_MS),
        result("startup_plugin_over_floor", (with_many - without) / (floor_many - floor_without), FLOOR_BAR),
        result("startup_heavy_modules", len(heavy), 0),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
