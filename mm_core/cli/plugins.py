"""`mm plugins list|show|check|test|new`: what is installed and what is broken; the files of a new plugin."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mm_core.cli.options import print_json, print_table
from mm_core.errors import plural
from mm_core.plugin.hookspecs import COMPONENT_KINDS, KINDS
from mm_core.plugin.records import PluginRecord, Registered
from mm_core.plugin.registry import Registry, is_strict, survey

if TYPE_CHECKING:
    from mm_core.plugin.kinds import ComponentKind
    from mm_core.testing.kit import Outcome


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="list|show|check|test|new", required=True)
    listing = actions.add_parser("list", help="all plugins and components", allow_abbrev=False)
    kind: dict[str, Any] = {"type": _kind, "choices": tuple(KINDS), "metavar": "KIND"}
    listing.add_argument("--kind", **kind, help=f"one of {', '.join(KINDS)}")
    show = actions.add_parser(
        "show", help="one component: its fields, defaults and source", allow_abbrev=False
    )
    show.add_argument(
        "name", metavar="NAME", help="name (with or without its plugin) or alias of a component"
    )
    check = actions.add_parser("check", help="exit with code 1 if a plugin is broken", allow_abbrev=False)
    check.add_argument(
        "--import",
        action="store_true",
        dest="import_targets",
        help="also import every component and compare its class with its contract",
    )
    test = actions.add_parser("test", help="run the conformance checks of components", allow_abbrev=False)
    test.add_argument("name", metavar="NAME", help="a plugin, or the name of a component")
    test.add_argument("--kind", **kind, help="only components of this kind")
    test.add_argument("--verbose", action="store_true", help="also print the checks that do not fail")
    new = actions.add_parser("new", help="write the files of a new plugin", allow_abbrev=False)
    new.add_argument("name", metavar="NAME", help="name of its distribution, such as my-dit")
    new.add_argument(
        "--kind",
        **kind,
        action="append",
        help=f"kind of component, once for each (default: predictor): one of {', '.join(KINDS)}",
    )
    new.add_argument(
        "--from-diffusers", metavar="CLASS", help="a predictor around this transformer class of Diffusers"
    )
    new.add_argument(
        "--from-class",
        action="append",
        default=[],
        metavar="FILE:CLASS",
        help="a component around your own model or map-style Dataset, once for each; the file is not run",
    )
    for action in (listing, show, check, test):
        action.add_argument("--json", action="store_true", help="print JSON")
        action.add_argument(
            "--path", action="append", default=[], metavar="FILE", help="also load this one-file plugin"
        )


def _kind(typed: str) -> str:
    """A kind as it is typed: a distribution's name demands hyphens, so kinds are taken with them too."""
    return typed.replace("-", "_")


def execute(arguments: argparse.Namespace) -> int:
    """Runs `mm plugins list`, `show`, `check`, `test` or `new` and returns its exit code."""
    if arguments.action == "new":
        return _new(arguments.name, arguments.kind, arguments.from_diffusers, arguments.from_class)
    registry = survey(tuple(arguments.path))
    if arguments.action == "list":
        return _list(registry, arguments.kind, arguments.json)
    if arguments.action == "show":
        return _show(registry.find(arguments.name), arguments.json)
    if arguments.action == "test":
        return _test(registry, arguments.name, arguments.kind, arguments.json, arguments.verbose)
    return _check(registry, arguments.import_targets, arguments.json)


def _list(registry: Registry, kind: str | None, as_json: bool) -> int:
    code = int(is_strict() and any(plugin.broken for plugin in registry.plugins))
    if as_json:
        print_json({"plugins": [_plugin_json(plugin, kind) for plugin in registry.plugins]})
        return code
    rows = [("PLUGIN", "VERSION", "STATUS", "DISTRIBUTION")]
    rows += [(p.namespace, p.version, p.status, p.distribution) for p in registry.plugins]
    print_table(rows)
    for each in KINDS if kind is None else [kind]:
        components = registry.components(each)
        if components or kind is not None:
            print(f"\n{each}")
            print_table([(c.qualified, c.component.summary) for c in components], indent="  ")
    broken = [plugin for plugin in registry.plugins if plugin.status != "ok"]
    if broken:
        print("\nnot loaded")
        for plugin in broken:
            print(f"  {plugin.label} {plugin.status}: {plugin.error}")
    return code


def _show(found: Sequence[Registered], as_json: bool) -> int:
    from mm_core.schema.describe import describe_nested

    described = [(r, describe_nested(r.config_class())) for r in found]
    if as_json:
        print_json(
            {
                "components": [
                    {**_component_json(r), "source": _source(r), "fields": [vars(field) for field in fields]}
                    for r, fields in described
                ]
            }
        )
        return 0
    for number, (r, fields) in enumerate(described):
        print("\n" * bool(number) + f"{r.qualified}  ({r.kind})")
        facts = [
            ("summary", r.component.summary),
            ("distribution", f"{r.distribution} {r.version}"),
            ("target", r.component.target),
            ("config", r.component.config or "the target's signature"),
            ("source", _source(r)),
            ("aliases", ", ".join(r.component.aliases)),
            ("capabilities", ", ".join(f"{k}={v!r}" for k, v in r.component.capabilities.items())),
            ("licence", r.component.licence),
            ("paper", r.component.paper),
        ]
        print_table([(name, value) for name, value in facts if value], indent="  ")
        print("\n  fields" if fields else "\n  no fields")
        print_table(
            [
                (
                    f.name,
                    f.type,
                    "required" if f.default is None else f.default,
                    f.comment and f"# {f.comment}",
                )
                for f in fields
            ],
            indent="    ",
        )
    return 0


def _check(registry: Registry, import_targets: bool, as_json: bool) -> int:
    from mm_core.plugin.checks.inspection import inspect_plugins

    findings = inspect_plugins(registry, import_targets)
    faults = sum(finding.severity == "fault" for finding in findings)
    if as_json:
        plugins = [_plugin_json(plugin, None) for plugin in registry.plugins]
        print_json(
            {"ok": not faults, "findings": [vars(finding) for finding in findings], "plugins": plugins}
        )
    else:
        for finding in findings:
            print(f"{'error' if finding.severity == 'fault' else finding.severity}: {finding.sentence}")
        counts = (
            (len(registry.plugins), "plugin"),
            (len(registry.components()), "component"),
            (faults, "error"),
            (len(findings) - faults, "warning"),
        )
        print(", ".join(plural(count, noun) for count, noun in counts))
    return 1 if faults else 0


def _test(registry: Registry, name: str, kind: str | None, as_json: bool, verbose: bool) -> int:
    from mm_core.testing.kit import Examination
    from mm_core.testing.suite import find_components

    components = find_components(registry, name, kind)
    found = []
    for registered in components:
        outcomes = list(Examination(registered, registry))
        found += outcomes
        if not as_json:
            _print_outcomes(registered, outcomes, verbose)
    failed = sum(outcome.status == "failed" for outcome in found)
    if as_json:
        print_json({"ok": not failed, "checks": [vars(outcome) for outcome in found]})
    else:
        counts = ((len(components), "component"), (len(found), "check"), (failed, "failure"))
        print(", ".join(plural(count, noun) for count, noun in counts))
    return 1 if failed else 0


def _print_outcomes(registered: Registered, outcomes: Sequence[Outcome], verbose: bool) -> None:
    """Prints a component with what came of how many of its checks, and a line for each that failed, or with
    `verbose` for each: its milliseconds, and its reason if it did not pass, once if several have the same."""
    counts = Counter(outcome.status for outcome in outcomes)
    passed = f"{counts.pop('passed', 0)} of {len(outcomes)} passed"
    found = ", ".join([passed, *(f"{count} {status}" for status, count in counts.items())])
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{registered.qualified}  ({registered.kind})  {found}, {seconds:.1f} s")
    without = [outcome.check for outcome in outcomes if outcome.status == "not applicable"]
    if without and not verbose:
        print(f"  not applicable (--verbose: why): {', '.join(without)}")
    first: dict[str, str] = {}
    for outcome in outcomes:
        reason = f": {outcome.reason}" if outcome.reason else ""
        if outcome.status == "failed" and first.setdefault(outcome.reason, outcome.check) != outcome.check:
            reason = f": as {first[outcome.reason]}"
        if verbose or outcome.status == "failed":
            print(f"  {1000 * outcome.seconds:7.0f} ms  {outcome.status}: {outcome.check}{reason}")


def _source(registered: Registered) -> str | None:
    from mm_core.plugin.checks.locate import source_file

    return source_file(registered.module_of(registered.component.target))


def _plugin_json(plugin: PluginRecord, kind: str | None) -> dict[str, object]:
    return {
        **{name: value for name, value in vars(plugin).items() if name != "file"},
        "components": [_component_json(r) for r in plugin.components if kind in (None, r.kind)],
    }


def _component_json(registered: Registered) -> dict[str, object]:
    component = registered.component
    return {
        "name": registered.qualified,
        "kind": registered.kind,
        "summary": component.summary,
        "target": component.target,
        "config": component.config,
        "aliases": list(component.aliases),
        "capabilities": dict(component.capabilities),
        "licence": component.licence,
        "paper": component.paper,
        "distribution": registered.distribution,
        "version": registered.version,
    }


def _new(
    name: str, kinds: Sequence[str] | None, library_class: str | None, own_classes: Sequence[str]
) -> int:
    from pathlib import Path

    from mm_core.plugin.scaffold.new_plugin import new_plugin

    records: dict[str, ComponentKind] = {}
    if library_class is not None:
        from mm_core.plugin.scaffold.diffusers_frame import frame

        records["predictor"] = frame(library_class)
    if own_classes:
        from mm_core.plugin.scaffold.from_class import components

        records |= components(own_classes, name.replace("-", "_"), records)
    for kind in kinds or (() if records else ("predictor",)):
        records.setdefault(kind, COMPONENT_KINDS[kind])
    made = new_plugin(name, records, survey(), Path())
    config = next(path for path in made if path.suffix == ".yaml").relative_to(name)
    print(f"{name}: {plural(len(made), 'file')}")
    for path in made:
        print(f"  {path}")
    if library_class is not None:
        module = next(path for path in made if path.name == "predictor.py")
        print(f"first follow the lines with TODO in {module}: until then `pytest` shows what is missing")
    if own_classes:
        from mm_core.plugin.scaffold.own_class import marked

        print("first look at what the source of your class does not show:")
        for line in marked(made):
            print(f"  {line}")
    print(f"next:\n  cd {name} && pip install -e '.[dev]'\n  pytest\n  mm-train --config {config}")
    return 0
