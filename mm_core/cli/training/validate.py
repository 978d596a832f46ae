"""`mm validate x.yaml`: checks a config in a moment, without torch."""

from __future__ import annotations

import argparse
import json

from mm_core.cli.options import add_allow_code
from mm_core.errors import MMError


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("config", help="the YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="laid upon the file")
    parser.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    parser.add_argument(
        "--print", action="store_true", dest="show", help="print the config with every default filled"
    )
    add_allow_code(parser)


def execute(args: argparse.Namespace) -> int:
    """0 when the config checks, 1 with every fault when it does not."""
    from mm_core.config.load import load_config

    try:
        config = load_config(args.config, args.overrides, allow_code=args.allow_code)
    except MMError as error:
        if not args.json:
            raise  # the command line prints it on standard error
        print(json.dumps({"ok": False, "faults": _rows(error)}, indent=2))
        return 1
    if args.json:
        result: dict[str, object] = {"ok": True, "faults": []}
        if args.show:
            from mm_core.config.dump import to_mapping

            result["config"] = to_mapping(config)
        print(json.dumps(result, indent=2))
    elif args.show:
        from mm_core.config.dump import to_yaml

        print(to_yaml(config), end="")
    else:
        data = config.data.train.type
        print(f"{args.config}: ok (task {config.task.type}, data {data}, engine {config.engine.type})")
    return 0


def _rows(error: MMError) -> list[dict[str, str | None]]:
    faults = getattr(error, "faults", ()) or (error,)
    return [{"where": f.where, "what": f.what, "accepted": f.accepted, "hint": f.hint} for f in faults]
