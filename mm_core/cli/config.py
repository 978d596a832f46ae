"""`mm config explain|schema|list|copy`: what keys mean, a schema for editors, the YAML files of plugins."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.cli.options import add_allow_code, print_json, print_table, write_named
from mm_core.plugin.registry import get_registry

if TYPE_CHECKING:
    from mm_core.config.explain import Explanation


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="explain|schema|list|copy", required=True)
    explain = actions.add_parser(
        "explain", help="one key: its type, default, value and where it was set", allow_abbrev=False
    )
    explain.add_argument(
        "key", nargs="?", default="", metavar="KEY", help="e.g. train.steps, or a component's: adamw.lr"
    )
    explain.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override a config key of --config"
    )
    explain.add_argument("--config", help="the YAML file of a run, for values and for the types it chooses")
    add_allow_code(explain)
    schema = actions.add_parser(
        "schema", help="the JSON Schema of a run's YAML, with the installed components", allow_abbrev=False
    )
    schema.add_argument("--out", metavar="FILE", help="write it to this file instead of printing it")
    listing = actions.add_parser("list", help="the YAML files that plugins ship", allow_abbrev=False)
    copy = actions.add_parser("copy", help="copy one of these files", allow_abbrev=False)
    copy.add_argument("name", metavar="NAME", help="as `mm config list` shows it, e.g. wan/t2v_1_3b")
    copy.add_argument(
        "destination", nargs="?", metavar="DEST", help="a new file or a folder (default: this folder)"
    )
    for action in (explain, schema):
        action.add_argument(
            "--path", action="append", default=[], metavar="FILE", help="also load this one-file plugin"
        )
    for action in (explain, listing, copy):
        action.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Runs `mm config explain`, `schema`, `list` or `copy` and returns its exit code."""
    if args.action == "explain":
        return _explain(args)
    if args.action == "schema":
        return _schema(args)
    return _list(args.json) if args.action == "list" else _copy(args)


def _explain(args: argparse.Namespace) -> int:
    from mm_core.config.explain import explain

    key, overrides = ("", [args.key, *args.overrides]) if "=" in args.key else (args.key, args.overrides)
    loaded = None
    if args.config is not None:
        from mm_core.config.load import load_with_places

        loaded = load_with_places(args.config, overrides, allow_code=args.allow_code)
    elif overrides:
        from mm_core.errors import ConfigError

        what = f"there is no config for {', '.join(overrides)} to override"
        raise ConfigError(what, hint="name the config: --config FILE; one key is explained at a time")
    registry = loaded[0].registry if loaded is not None else get_registry(tuple(args.path))
    found = explain(key, registry, loaded)
    if args.json:
        print_json({"explained": [dataclasses.asdict(each) for each in found]})
        return 0
    for number, each in enumerate(found):
        print("\n" * bool(number), end="")
        _print_explanation(each, loaded is not None)
    return 0


def _print_explanation(found: Explanation, with_values: bool) -> None:
    """Prints one explanation.

    Args:
        found: the explanation.
        with_values: whether keys have values, since the user has named a config.
    """
    if found.key:
        print(found.key)
        rows = [
            ("doc", found.doc),
            ("type", found.type),
            ("accepted", found.accepted),
            ("default", _default(found)),
            ("value", _value(found) if with_values else ""),
            ("set at", found.origin or ""),
            ("of", found.owner),
        ]
        print_table([(name, text) for name, text in rows if text], indent="  ")
    if found.keys:
        print("\n  keys" if found.key else "keys")
        rows_below = [
            (
                each.key.rpartition(".")[2],
                each.type,
                _short(_default(each)),
                *((_short(_value(each)), each.origin or "") if with_values else ()),
                each.doc and f"# {each.doc}",
            )
            for each in found.keys
        ]
        print_table(rows_below, indent="    " if found.key else "  ")


def _default(found: Explanation) -> str:
    return "required" if found.default is None else found.default


def _value(found: Explanation) -> str:
    from mm_core.schema.describe import value_text

    return "not set" if found.origin is None else value_text(found.value)


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _schema(args: argparse.Namespace) -> int:
    from mm_core.config.json_schema import run_schema

    schema, faults = run_schema(get_registry(tuple(args.path)))
    for fault in faults:
        print(f"warning: these keys are not checked: {fault.render()}", file=sys.stderr)
    if args.out is None:
        print_json(schema, indent=1)
        return 0
    path = Path(args.out)
    write_named(path, json.dumps(schema, indent=1, ensure_ascii=False) + "\n", "--out")
    print(f"{path}: for editors, begin a YAML with `# yaml-language-server: $schema={path}`")
    return 0


def _list(as_json: bool) -> int:
    from mm_core.config.shipped import shipped_configs

    found = shipped_configs(get_registry().plugins)
    if as_json:
        print_json({"configs": [{**vars(each), "file": str(each.file)} for each in found]})
        return 0
    print_table([("CONFIG", "DESCRIPTION"), *((each.name, each.description) for each in found)])
    return 0


def _copy(args: argparse.Namespace) -> int:
    from mm_core.config.shipped import copy_shipped, find_shipped, relative_references

    config = find_shipped(args.name, get_registry().plugins)
    beside = relative_references(config)
    path = copy_shipped(config, None if args.destination is None else Path(args.destination))
    if args.json:
        print_json({"name": config.name, "file": str(path), "relative": list(beside)})
        return 0
    print(f"{path}: copied from {config.distribution} {config.version}; check it: mm validate {path}")
    if beside:
        print(f"It names files relative to itself, which were not copied: {', '.join(beside)}")
    return 0
