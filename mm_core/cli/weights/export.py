"""`mm export`: writes a trained run's weights as files that other libraries load."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mm_core.cli.options import add_allow_code, human_size
from mm_core.cli.runs.stored_run import root_of, run_folder, unused
from mm_core.errors import plural, printable
from mm_core.fetching import local


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--run", required=True, metavar="DIR[@STEP]", help="a run's folder (its newest checkpoint, or @STEP)")
    add(
        "--to",
        required=True,
        metavar="FORMAT",
        help="safetensors, diffusers, transformers, or a plugin's; a run's adapters as one file that another"
        " program loads: lora/comfyui, lora/kohya, lora/diffusers, lora/peft",
    )
    add(
        "--out", metavar="PATH", help="a new folder, or a new file of a LoRA (default: in the run's exports/)"
    )
    add("--trigger-words", nargs="+", metavar="WORD", default=(), help="for the header of a LoRA file")
    add("--ema", action="store_true", help="export the moving average of the weights")
    add(
        "--merge-lora",
        action="store_true",
        help="export the full weights with the adapters merged in (default: the adapters only)",
    )
    add(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="dtype of the exported tensors (default: as in the checkpoint)",
    )
    add("--max-shard", metavar="SIZE", help="largest size of one file, e.g. 5GB (the default) or 4GiB")
    add("--component", metavar="NAME", help="component to export, if the run trains several")
    add(
        "--pipeline",
        metavar="DIR",
        help="pipeline to copy the remaining parts from (default: the one training started from)",
    )
    add("--push", metavar="ORG/NAME", help="then publish it on the Hugging Face Hub, in one commit")
    add(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="override a key of the run's config, e.g. for folders that have moved",
    )
    add_allow_code(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs `mm export`: writes the folder of weights files and prints one line per file."""
    run_folder(args.run)
    from mm_core.checkpoint.reading import checkpoint_at
    from mm_core.interchange.export import MAX_SHARD, export
    from mm_core.interchange.push import check_push

    if args.push:
        check_push(args.push)
    source = checkpoint_at(args.run)
    if args.to.startswith("lora/"):
        return _lora(args, source)
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
        pipeline=local(args.pipeline) if args.pipeline else None,
        overrides=args.overrides,
        allow_code=args.allow_code,
        published=args.push,
        note=lambda sentence: print(f"mm: {printable(sentence)}", file=sys.stderr),
    )
    sizes = {path.relative_to(out): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
    for path, size in sizes.items():
        print(f"  {human_size(size):>9}  {path}")
    files, total = plural(len(sizes), "file"), human_size(sum(sizes.values()))
    print(f"{source} as {args.to}: {files}, {total} in {out}")
    _push(args, [out], source)
    return 0


def _push(args: argparse.Namespace, files: Sequence[Path], source: Path) -> None:
    if args.push:
        from mm_core.interchange.push import push

        print(f"pushed: {push(files, args.push, f'{source.name} of {root_of(source).name}, by mm_core')}")


def _lora(args: argparse.Namespace, source: Path) -> int:
    """Exports a run's adapters as LoRA files."""
    from mm_core.interchange.lora import export_lora

    name = f"{source.name}-{args.to.rpartition('/')[2]}{'-ema' if args.ema else ''}"
    name += "" if args.to == "lora/peft" else ".safetensors"
    files = export_lora(
        source,
        Path(args.out) if args.out else unused(root_of(source) / "exports" / name),
        args.to,
        weights="ema" if args.ema else "model",
        dtype=args.dtype,
        component=args.component,
        trigger_words=args.trigger_words,
        overrides=args.overrides,
        allow_code=args.allow_code,
        published=args.push,
        note=lambda sentence: print(f"mm: {printable(sentence)}", file=sys.stderr),
    )
    for path in files:
        print(f"  {human_size(path.stat().st_size):>9}  {path}")
    print(f"{source} as {args.to}: {plural(len(files), 'file')}, loaded again and equal to the checkpoint")
    _push(args, files, source)
    return 0
