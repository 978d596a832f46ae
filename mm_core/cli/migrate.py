"""`mm migrate PATHS --out run.yaml`: makes a config of the files of another tool."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.cli.options import print_table, write_named
from mm_core.errors import ConfigError, MMError

if TYPE_CHECKING:
    from mm_core.interchange import Left, Migrated


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="the files of a run of another tool, or their folder")
    out = "the config to write; further runs of a folder are written beside it"
    add("--out", required=True, metavar="YAML", help=out)
    add("--from", dest="tool", metavar="NAME", help="the migration to use, if several recognise the files")
    add("--accept", action="store_true", help="exit code 0 although training would differ")
    parser.epilog = (
        "Prints three lists: what was taken, what was dropped because it does nothing here, and what has no"
        " counterpart, so that training would differ. Exit codes: 0 done; 1 the last list is not empty, or an"
        " error; 2 the command line does not parse."
    )


def execute(args: argparse.Namespace) -> int:
    """Runs `mm migrate`: writes a config for each run that the files describe, checks it and plans it."""
    from mm_core.interchange import migration_of, to_yaml
    from mm_core.plugin.registry import get_registry

    paths, out = [Path(path) for path in args.paths], Path(args.out)
    if out.suffix not in (".yaml", ".yml"):
        what, hint = "a config is a YAML file", "end its name with .yaml"
        raise MMError(what, where=f"--out {out}", accepted=".yaml, .yml", hint=hint)
    migration = migration_of(get_registry(), paths, args.tool)
    found = migration.migrate(paths)
    # Several files may name one run.
    runs = [run for number, run in enumerate(found) if run not in found[:number]]
    if not runs:
        raise MMError(f"these files of {migration.tool} describe no training", where=", ".join(args.paths))
    differ = broken = False
    files = _files(out, [run.name for run in runs])
    texts = []
    for run, file in zip(runs, files, strict=True):
        head = (
            f"From {migration.tool}, by mm migrate {' '.join(args.paths)}",
            "Behind each line: where it came from.",
            *("Launch:", *(f"  {line}" for line in _launch(run, file))),
        )
        texts.append(to_yaml(run, head))
    _refuse_existing(files, texts)
    for run, file, text in zip(runs, files, texts, strict=True):
        write_named(file, text, "--out")
        _print_lists(run, file, migration.tool)
        broken |= not _planned(file, run.world)
        print("\n".join(["", "launch:", *(f"  {line}" for line in _launch(run, file)), ""]))
        differ |= bool(run.differs)
    if differ and not args.accept:
        print("training would differ: see the third list; --accept takes it as it is")
    return int(broken or (differ and not args.accept))


def _files(out: Path, names: Sequence[str]) -> list[Path]:
    """A file for each run: the first is the one that the user names."""
    files = [out]
    for number, name in enumerate(names[1:], 1):
        again = f"_{names[:number].count(name)}" if name in names[1:number] else ""
        files.append(out.with_name(f"{out.stem}_{name}{again}{out.suffix}"))
    return files


def _refuse_existing(files: Sequence[Path], texts: Sequence[str]) -> None:
    """Raises MMError if a file exists with another text: it may hold what a user has changed since."""
    hint = "name another file, or remove this one first"
    for file, text in zip(files, texts, strict=True):
        if file.is_file() and file.read_bytes() != text.encode():
            raise MMError("this file exists, and is not replaced", where=str(file), hint=hint)


def _launch(run: Migrated, file: Path) -> Sequence[str]:
    return run.launch.replace("{config}", str(file)).splitlines()


def _print_lists(run: Migrated, file: Path, tool: str) -> None:
    print(f"{file}: a run of {tool} ({run.name})")
    print(f"\ntaken ({len(run.lines)})")
    print_table([(key, _short(line.value), line.place) for key, line in run.lines.items()], "  ")
    for title, rows in (
        ("dropped, because it does nothing here", run.dropped),
        ("no counterpart: training would differ", run.differs),
    ):
        print(f"\n{title} ({len(rows)})")
        print_table(map(_row, rows), "  ")
    if run.todo:
        print("\n".join(["\nto do before training", *(f"  {each}" for each in run.todo)]))


def _row(left: Left) -> tuple[str, str, str]:
    return left.place, _short(left.value), left.why


def _short(value: object) -> str:
    text = f"{value}"
    return text if len(text) <= 60 else text[:57] + "..."


def _planned(file: Path, world: int) -> bool:
    """Whether the config is valid and its run can be planned, as `mm validate` and a dry run do it. Missing
    files are no fault: they may be on another machine."""
    from mm_core.config.components import absent_paths, option_faults, target_faults
    from mm_core.config.load import load_config
    from mm_core.plan import build_task, plan_shown

    missing: list[str] = []
    try:
        config = load_config(file)
        missing = absent_paths(config)
        if faults := target_faults(config) or (not missing and option_faults(config)):
            raise ConfigError(faults, where=str(file))
        print(f"\nvalid: task {config.task.type}, data {config.data.train.type}, engine {config.engine.type}")
        for path in missing:
            print(f"missing: {path} (needed to train)")
        plan, _ = plan_shown(config, world, build_task(config))
    except MMError as error:
        print(f"\nnot {'planned' if missing else 'valid'} yet: {error.render()}")
        return bool(missing)
    print(f"\n{plan.render()}")
    return True
