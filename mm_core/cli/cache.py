"""`mm cache build|status|prune`: fills the feature cache of a run, shows what it has, removes the rest."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from mm_core.cli.options import add_allow_code, config_of, human_size, print_json, print_table
from mm_core.cli.ranks import add_ranks, on_ranks
from mm_core.errors import CacheError, MMError, plural

if TYPE_CHECKING:
    from mm_core.loading.caching import Progress


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="build|status|prune", required=True)
    one: dict[str, Any] = {"required": True, "metavar": "YAML", "help": "the run's config file"}
    several = {**one, "action": "append", "help": "a run that uses the cache; repeatable"}
    for name, config, shown in (
        ("build", one, "encode what is missing; stop and start it as you like"),
        ("status", one, "what is there, what is missing and why (exit code 1)"),
        ("prune", several, "remove what this run does not need"),
    ):
        action = actions.add_parser(name, help=shown, allow_abbrev=False)
        action.add_argument("--config", **config)
        action.add_argument("overrides", nargs="*", metavar="key=value", help="override a config key")
        add_allow_code(action)
        if name == "build":
            add_ranks(action, and_share=": each encodes a share")
        if name == "status":
            action.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Runs `mm cache build`, `status` or `prune` and returns its exit code."""
    if args.action == "build":
        return on_ranks(args, "cache build", _build, _check)
    return _status(args) if args.action == "status" else _prune(args)


def _check(args: argparse.Namespace) -> None:
    """Finds what is wrong in the config before ranks are started."""
    config_of(args, fetch=True)


def _build(args: argparse.Namespace) -> int:
    from mm_core.config.sections import CacheSection
    from mm_core.loading.caching import build_cache
    from mm_core.runtime.process_group import process_group

    config = config_of(args, fetch=True)
    with process_group(None) as ranks:
        built = build_cache(config, _show)
        folder = (config.data.cache or CacheSection()).dir
        if ranks.rank == 0:
            found = [f"{count:,} {part}" for part, count in built.encoded.items()]
            print(f"{folder}: encoded {', '.join(found) or 'nothing: everything was there'}")
            if cut := built.cut.described():
                print(cut)
            if built.removed:
                print(f"removed {plural(built.removed, 'entry')} whose features were damaged or not finite")
            if built.summed:
                print(f"gave {plural(built.summed, 'entry')} of before a checksum")
            if built.unreadable:
                print(f"{plural(built.unreadable, 'sample')} cannot be read; `mm data check` lists them")
        if built.left_out:
            whys = Counter(built.left_out.values()).most_common(3)
            raise CacheError(
                f"left out {plural(len(built.left_out), 'item')}: {'; '.join(why for why, _ in whys)}",
                where=folder,
                hint="run the command again: it encodes them; what an encoder returns that is not finite it"
                " returns again: check its weights, or set its dtype to fp32",
            )
    return 0


def _show(progress: Progress) -> None:
    each = f", {human_size(progress.each)} each" if progress.each else ""
    left = "" if progress.seconds is None else f", {_clock(progress.seconds)} left"
    print(f"{progress.what}: {progress.done:,} of {progress.of:,}{each}{left}", flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def _status(args: argparse.Namespace) -> int:
    from mm_core.plan import cache_of

    _, cache = cache_of(config_of(args))
    faults = cache.store.faults()
    rows, lines = cache.survey(faults)
    without = sum(len(shard.keys) for shard in cache.store.shards if shard.sums is None)
    unused = int((~cache.needed(cache.store)).sum())
    size = sum(shard.path.stat().st_size for shard in cache.store.shards)
    lacking = any(row.missing or row.stale for row in rows)
    if args.json:
        more = {"damaged": len(faults), "unverified": without, "unused": unused, "bytes": size}
        print_json({"parts": [row._asdict() for row in rows], **more})
        return int(lacking)
    head = ("SPLIT", "FEATURES", "PRESENT", "STALE", "MISSING", "UNREADABLE")
    print_table([head, *((row.split, row.part, *(f"{number:,}" for number in row[2:])) for row in rows)])
    for line in lines:
        print(line)
    if faults:
        print(
            f"{plural(len(faults), 'entry')} cannot be used: `mm cache build` removes or encodes them again"
        )
    if without:
        print(f"{plural(without, 'entry')} of before have no checksum (unverified): `mm cache build` adds it")
    shards, entries = plural(len(cache.store.shards), "shard"), plural(unused, "entry")
    print(f"{human_size(size)} in {shards}; {entries} that this run does not need")
    return int(lacking)


def _prune(args: argparse.Namespace) -> int:
    import numpy as np

    from mm_core.config.load import load_config
    from mm_core.plan import cache_of

    configs = [load_config(path, args.overrides, allow_code=args.allow_code) for path in args.config]
    caches = [cache_of(config)[1] for config in configs]
    if len({cache.store.folder.resolve() for cache in caches}) > 1:
        raise MMError("the configs name different caches", where="--config", hint="prune one cache at a time")
    first = caches[0]
    needed = np.any([cache.needed(first.store) for cache in caches], axis=0)
    freed = first.store.keep(needed)
    print(f"{first.section.dir}: removed {plural(int((~needed).sum()), 'entry')}, {human_size(freed)}")
    return 0
