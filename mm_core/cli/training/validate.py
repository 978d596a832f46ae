"""`mm validate x.yaml`: checks a config within a second, without importing torch."""

from __future__ import annotations

import argparse

from mm_core.cli.options import add_allow_code, print_json, refuse_missing
from mm_core.errors import ConfigError, MMError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the YAML file of a run")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override a config key, e.g. train.steps=10"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--print", action="store_true", dest="show", help="print the config with every default filled in"
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a file to read is missing")
    add_allow_code(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs `mm validate`: exit code 0 when the config is valid, 1 after printing every error in it, or with
    --strict if files that it names are missing."""
    from mm_core.cli.options import config_of
    from mm_core.config.components import absent_paths, inputs_of, option_faults, target_faults
    from mm_core.hub import hint_for

    try:
        config = config_of(args)
        if faults := target_faults(config) or option_faults(config):
            raise ConfigError(faults, where=args.config)
    except MMError as error:
        if not args.json:
            raise  # the command line prints it on standard error
        print_json({"ok": False, "faults": _rows(error)})
        return 1
    missing = absent_paths(config)
    if args.json:
        good = not (args.strict and missing)
        result: dict[str, object] = {"ok": good, "faults": [], "missing_files": missing}
        if args.show:
            from mm_core.config.dump import to_mapping

            result["config"] = to_mapping(config)
        print_json(result)
        return int(not good)
    if args.show:
        from mm_core.config.dump import to_yaml

        print(to_yaml(config), end="")
    else:
        data = config.data.train.type
        of_data = {path for paths in inputs_of(config).values() for path in paths}
        print(f"{args.config}: ok (task {config.task.type}, data {data}, engine {config.engine.type})")
        for path in missing:
            print(f"missing: {path} (needed to train)")
            if path not in of_data and (hint := hint_for(path)):
                print(f"  hint: {hint}")
    if args.strict:
        refuse_missing(missing)
    return 0


def _rows(error: MMError) -> list[dict[str, str | None]]:
    faults = getattr(error, "faults", ()) or (error,)
    return [{"where": f.where, "what": f.what, "accepted": f.accepted, "hint": f.hint} for f in faults]
