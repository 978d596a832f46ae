"""Options shared by several commands, and how commands print sizes, tables and JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.errors import ConfigError, MMError, plural, printable

if TYPE_CHECKING:
    from mm_core.config.load import Fetch
    from mm_core.config.sections import RunConfig

# JSON escapes the others itself, and inside strings only.
_JSON_ESCAPES = {
    code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    """Adds the option --allow-code, which permits a command to run code named by a stored run's config."""
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="run code named by a stored run's config, although you have not trained with that code before",
    )


def config_of(args: argparse.Namespace, *more: str, fetch: Fetch = False) -> RunConfig:
    """The config that a command's option --config names, with the overrides applied.

    Args:
        args: the command's options.
        more: overrides that come last.
        fetch: as for `load_config`.

    Raises:
        MMError: lists every error in the config; or it is a file of another tool.
    """
    from mm_core.config.load import files_of, load_config

    try:
        return load_config(args.config, [*args.overrides, *more], allow_code=args.allow_code, fetch=fetch)
    except ConfigError as error:
        from mm_core.interchange import foreign, ours_of
        from mm_core.plugin.registry import get_registry

        path = Path(args.config)
        for file in files_of(path)[::-1]:
            theirs = [fault for fault in error.faults if f"{fault.where}".startswith(f"{file}:")]
            if (file == path or theirs) and (known := foreign(get_registry(), file)):
                raise (known if file == path else ConfigError([known, *theirs], where=str(path))) from None
        for fault in error.faults:
            key = re.fullmatch(r"(?:unknown key|.* has no key) '(\w+)'", fault.what)
            if key and "this key is" not in (fault.hint or ""):
                fault.hint = ours_of(get_registry(), key[1]) or fault.hint
        raise


def count(text: str) -> int:
    """Parses a command-line option that must be an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def whole(text: str) -> int:
    """Parses a command-line option that must be an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def human_size(size: float, digits: int = 1) -> str:
    """A size in bytes as commands print it: `12 B`, `3.4 kB`.

    Args:
        size: the size in bytes.
        digits: decimal places of gigabytes.
    """
    for unit, places in (("B", 0), ("kB", 1), ("MB", 1)):
        if size < 1000:
            return f"{size:.{places}f} {unit}"
        size /= 1000
    return f"{size:.{digits}f} GB"


def print_json(value: Mapping[str, object], indent: int | None = 2) -> None:
    """Prints the JSON document of a command, alone on standard output (see `runtime.output.Aside`)."""
    stream = getattr(sys.stdout, "document", sys.stdout)
    text = json.dumps(value, indent=indent, default=str, ensure_ascii=False).translate(_JSON_ESCAPES)
    print(text, file=stream, flush=True)


def print_table(rows: Iterable[Sequence[str | None]], indent: str = "") -> None:
    """Prints rows as aligned columns, separated by two spaces."""
    cells = [[printable(cell or "") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print((indent + "  ".join(padded)).rstrip())


def write_named(out: Path, text: str, option: str) -> None:
    """Writes a text to the file that `option` of a command names.

    Raises:
        MMError: it cannot be written.
    """
    from mm_core.files import replace_text

    if not out.name:
        raise MMError("this is a folder", where=str(out), hint=f"name a file with {option}")
    try:
        replace_text(out, text, named=True)
    except OSError as error:
        raise MMError(
            f"the file cannot be written: {error.strerror}",
            where=str(out),
            hint=f"choose another file with {option}" + ", or free the disk" * (error.errno == ENOSPC),
        ) from None


def refuse_missing(paths: Sequence[str]) -> None:
    """Raises MMError if files that a run needs are missing, for --strict."""
    if paths:
        what = f"{plural(len(paths), 'file')} that the run needs {'is' if len(paths) == 1 else 'are'} missing"
        raise MMError(
            f"{what}: {', '.join(paths[:5])}", where="--strict", hint="copy them there, or correct the paths"
        )
