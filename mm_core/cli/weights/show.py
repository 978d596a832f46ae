"""`mm weights`: lists the tensors in weights files, and compares two of them."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.cli.options import add_allow_code, human_size, print_json
from mm_core.errors import plural, printable
from mm_core.fetching import local

if TYPE_CHECKING:
    import torch


def configure(parser: argparse.ArgumentParser) -> None:
    weights = "a weights file, a folder, a run (RUN, RUN@STEP) or a checkpoint"
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser(
        "show", help="list tensors: names, shapes, dtypes, sizes; and the format", allow_abbrev=False
    )
    show.add_argument("path", metavar="PATH", help=weights)
    show.add_argument("--config", metavar="YAML", help="compare the tensors with this config's components")
    show.add_argument(
        "--all",
        action="store_true",
        help="list every tensor (by default, numbered siblings are folded into one line)",
    )
    show.add_argument("--json", action="store_true", help="print JSON")
    add_allow_code(show)
    diff = actions.add_parser("diff", help="list the tensors that differ", allow_abbrev=False)
    diff.add_argument("first", metavar="A", help=weights)
    diff.add_argument("second", metavar="B", help="what to compare it with")


def execute(args: argparse.Namespace) -> int:
    """Runs `mm weights show` or `diff`; the exit code of `diff` is 1 if any tensor differs."""
    return _show(args) if args.action == "show" else _diff(args)


def _show(args: argparse.Namespace) -> int:
    from mm_core.interchange.inspect import contents, folded

    found = contents(local(args.path), Path(args.config) if args.config else None, args.allow_code)
    rows = folded(found.tensors) if not args.all else [(t.name, t, 1) for t in found.tensors]
    total, count = sum(t.nbytes for t in found.tensors), sum(math.prod(t.shape) for t in found.tensors)
    if args.json:
        tensors = {
            t.name: {"shape": list(t.shape), "dtype": _dtype(t.dtype), "bytes": t.nbytes}
            for t in found.tensors
        }
        document = {
            "formats": found.formats,
            "fits": found.fits,
            "absent": found.absent,
            "metadata": dict(found.texts),
            "bytes": total,
            "tensors": tensors,
        }
        print_json(document)
        return 0
    rows = [(printable(name), tensor, times) for name, tensor, times in rows]
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, tensor, times in rows:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        often, size = f"  x {times}" if times > 1 else "", human_size(tensor.nbytes, 2)
        print(f"{name:<{width}}  {shape:>16}  {_dtype(tensor.dtype):>5}  {size:>9}{often}")
    print(f"{plural(len(found.tensors), 'tensor')}, {plural(count, 'number')}, {human_size(total, 2)}")
    print(f"format: {', '.join(found.formats) or 'unknown (no installed format recognises it)'}")
    for line in found.fits:
        print(f"fits {printable(line)}")
    for line in found.absent:
        print(f"missing: {printable(line)}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from mm_core.interchange.inspect import differences

    found = differences(local(args.first), local(args.second))
    for letter, names in zip("AB", found.only, strict=True):
        for name in names:
            print(f"only in {letter}: {printable(name)}")
    for name, *shapes in found.shaped:
        print(f"{printable(name)}: shapes differ, {' and '.join(str(list(shape)) for shape in shapes)}")
    for change in found.changed:
        place, ours, theirs = change.at
        print(
            f"{printable(change.name)}: norms {change.norms[0]:.6g} and {change.norms[1]:.6g}, differs by"
            f" up to {change.largest:.3g}; first at {list(place)}: {ours:.9g} and {theirs:.9g}"
        )
    if found.dtypes:
        name, first, second = found.dtypes[0]
        print(
            f"{plural(len(found.dtypes), 'tensor')} with different dtypes: {printable(name)} is"
            f" {_dtype(first)} in A and {_dtype(second)} in B"
        )
    differing = len(found.only[0]) + len(found.only[1]) + len(found.shaped) + len(found.changed)
    print(f"{plural(len(found.same), 'tensor')} equal, {differing} different")
    return 0 if found.none else 1


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}.get(name, name)
