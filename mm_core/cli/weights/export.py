"""`mm export`: a trained run's weights as files that other libraries load."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mm_core.cli.options import add_allow_code, human_size
from mm_core.cli.runs.stored_run import root_of, run_folder, unused


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add = parser.add_argument
    add(
        "--run", required=True, metavar="DIR[@STEP]", help="a run's folder, of its newest step or another one"
    )
    add("--to", required=True, metavar="FORMAT", help="safetensors, diffusers, transformers, or a plugin's")
    add("--out", metavar="DIR", help="a new folder (default: one in the run's exports/)")
    add("--ema", action="store_true", help="the moving average of the weights")
    add("--merge-lora", action="store_true", help="the weights with the adapters in them, not these alone")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="of the files (default: as in the checkpoint)")
    add("--max-shard", metavar="SIZE", help="most bytes of a file, as 5GB (the default) or 4GiB")
    add("--component", metavar="NAME", help="of a run that trains several")
    add(
        "--pipeline",
        metavar="DIR",
        help="whose other parts are taken over (default: that the run began with)",
    )
    add(
        "overrides", nargs="*", metavar="key=value", help="over the run's config, for folders that have moved"
    )
    add_allow_code(parser)


def execute(args: argparse.Namespace) -> int:
    """Writes the folder and prints a line a file."""
    run_folder(args.run)
    from mm_core.checkpoint.reading import checkpoint_at
    from mm_core.interchange.export import MAX_SHARD, export

    source = checkpoint_at(args.run)
    name = f"{source.name}-{args.to.rpartition('/')[2]}{'-ema' if args.ema else ''}"
    out = export(
        source,
        Path(args.out) if args.out else unused(root_of(source) / "exports" / name),
        args.to,
        weights="ema" if args.ema else "model",
        merge_adapters=args.merge_lora,
        dtype=args.dtype,
        max_shard=args.max_shard or MAX_SHARD,
        component=args.component,
        pipeline=args.pipeline,
        overrides=args.overrides,
        allow_code=args.allow_code,
        note=lambda sentence: print(f"mm: {sentence}", file=sys.stderr),
    )
    sizes = {path.relative_to(out): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
    for path, size in sizes.items():
        print(f"  {human_size(size):>9}  {path}")
    files = f"{len(sizes)} file{'s' * (len(sizes) != 1)}"
    print(f"{source} as {args.to}: {files}, {human_size(sum(sizes.values()))} in {out}")
    return 0
