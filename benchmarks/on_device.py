"""All that is worth knowing of mm_core on an accelerator, in minutes: numbers, speed, memory, formats, data.

    python benchmarks/on_device.py [--minutes 9] [PART...]

Needs no network and no installation of mm_core: it takes this checkout and the Python that runs it, with what
the plugins require. The parts run in the order of their worth, each in a process of its own with a limit
until the time is up. benchmarks/results/DATE-DEVICE.md is written again after every line of a part: a run
that is cut keeps what it had. Without an accelerator, each part has a tiny form: its times mean nothing.

The part `parity` compares with device_suite/parity.json; `--be store --folder TEMPORARY` on a CPU writes it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mm_core.errors import plural  # noqa: E402
from mm_core.files import replace_text  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
PARTS = {  # in the order of their worth, with the seconds that each is expected to take on an H100
    "parity": (18, "fp32 losses of the quickstart and a tiny Wan against those of the CPU"),
    "resume": (28, "a resumed run against an uninterrupted one, bit for bit"),
    "late_norm": (12, "a planted NaN and an infinite gradient, with the norm read at once and late"),
    "wan_49": (160, "Wan 1.3B at 49x480x832: as shipped, with what helps, and beside a plain loop"),
    "wan_17": (127, "the same at 17x480x832, setting by setting"),
    "syncs": (11, "how often the host waits in a step"),
    "growth": (30, "what the allocator holds after two epochs of 6 buckets"),
    "start": (8, "from the command to step 1"),
    "base": (40, "LoRA on a base in bf16, streamed, int8, fp8, nf4"),
    "fp16": (9, "a planted overflow in fp16"),
    "deepspeed": (28, "DeepSpeed's stages 1 to 3, full and with adapters, against fsdp2"),
    "packed": (40, "InternVL 3.5 2B on packed rows of 8,192 tokens"),
    "workers": (28, "the wait for data workers in a step, and the clips a second that they read"),
}
TINY_LIMIT = 300
"""Seconds that a tiny form may take; on a device, a part has twice what is expected, and half a minute."""


@dataclass
class Outcome:
    """What a part has printed so far, and how it ended.

    Attributes:
        name: of the part.
        state: how it ended, for the table.
        lines: what it printed.
        seconds: that it took.
    """

    name: str
    state: str = "running"
    lines: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def results(self) -> list[list[str]]:
        """The RESULT lines: name, value, bar, ok or short."""
        return [line.split()[1:] for line in self.lines if line.startswith("RESULT ")]


# -- a part's own process ----------------------------------------------------------------------------------


def be_part(name: str, folder: Path) -> None:
    """Runs a part in this process, which ends when the one that started it does."""

    def watch() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    if name != "store":
        threading.Thread(target=watch, daemon=True).start()
    from device_suite import parts

    if name == "about":
        print(json.dumps(about()))
        return
    from mm_core.runtime.process_group import process_group

    with process_group(None):
        if name.startswith("wan_"):
            parts.wan_speed(folder, int(name.removeprefix("wan_")))
        else:
            getattr(parts, name)(folder)


def about() -> dict[str, str]:
    """The device, and versions of what is installed."""
    from mm_core.device import device_stack

    found = {"python": sys.version.split()[0], **device_stack()}
    for package in ("diffusers", "transformers", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def environment(folder: Path) -> dict[str, str]:
    """The environment of the parts: packages of the checkout and, where they are not installed, metadata
    that names their plugins."""
    projects = [ROOT, *(file.parent for file in sorted(ROOT.glob("plugins/*/pyproject.toml")))]
    for project in projects:
        table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(table["name"])
            continue
        info = folder / f"{table['name'].replace('-', '_')}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {table['name']}\nVersion: 0.1.0\n")
        plugins = table["entry-points"]["mm_core.plugins"]
        lines = [f"{name} = {target}" for name, target in plugins.items()]
        (info / "entry_points.txt").write_text("\n".join(["[mm_core.plugins]", *lines, ""]))
    paths = [str(path) for path in (*projects, folder)] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


# -- the run -----------------------------------------------------------------------------------------------


def take(
    outcome: Outcome, folder: Path, env: dict[str, str], limit: float, written: Callable[[], None]
) -> None:
    """Runs a part's process to its end or limit; calls `written` after each line that it prints."""
    began = time.monotonic()
    words = [sys.executable, __file__, "--be", outcome.name, "--folder", str(folder)]
    errors = folder / f"{outcome.name}.log"
    with errors.open("w") as log:
        process = subprocess.Popen(
            words,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            process_group=0,
        )

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    late = threading.Timer(limit, kill)
    late.start()
    try:
        for line in process.stdout or ():
            outcome.lines.append(line.rstrip())
            outcome.seconds = time.monotonic() - began
            written()
        code = process.wait()
    finally:
        kill()
        late.cancel()
    outcome.seconds = time.monotonic() - began
    outcome.state = "ended"
    if code:
        outcome.state = f"cut after {limit:.0f} s" if outcome.seconds >= limit else "FAILED"
        outcome.lines += errors.read_text().strip().splitlines()[-12:]
    written()


def page(title: str, versions: dict[str, str], outcomes: list[Outcome]) -> str:
    """The results so far, as Markdown."""
    lines = [f"# {title}", "", ", ".join(f"{name} {value}" for name, value in versions.items()), ""]
    lines += ["| part | | s | expected on an H100 | ended |", "|---|---|---|---|---|"]
    for each in outcomes:
        seconds, what = PARTS[each.name]
        lines.append(f"| `{each.name}` | {what} | {each.seconds:.0f} | {seconds} | {each.state} |")
    lines += ["", "| figure | value | bar | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for each in outcomes for row in each.results]
    lines += ["", "```text", *(line for each in outcomes for line in each.lines), "```", ""]
    return "\n".join(lines)


def commit() -> str:
    """The checkout's commit, and whether files differ from it; unknown without git."""
    try:
        words = [
            "git",
            "-C",
            str(ROOT),
            "describe",
            "--always",
            "--dirty=, changed",
            "--abbrev=8",
            "--exclude=*",
        ]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def unused(stem: str) -> Path:
    """A file for results that is not there yet."""
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return next(file for name in names if not (file := RESULTS / f"{name}.md").exists())


def main() -> int:
    """Runs the parts; returns 1 where one failed or was cut, or a figure falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of them (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be:
        be_part(args.be, args.folder)
        sys.stdout.flush()
        os._exit(0)  # what a part leaves behind is ended with its process group
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not 0 < args.minutes < 1e6:
        parser.error("--minutes must be above 0")
    if args.out and not args.out.resolve().parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.resolve().parent}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part's process ends as well
    chosen = [name for name in PARTS if not args.parts or name in args.parts]
    with tempfile.TemporaryDirectory(prefix="on_device-") as scratch:
        folder = Path(scratch)
        env = environment(folder)
        asked = Outcome("about")
        take(asked, folder, env, TINY_LIMIT, lambda: None)
        if asked.state != "ended":
            print("\n".join(asked.lines), file=sys.stderr)
            return 1
        versions: dict[str, str] = json.loads(asked.lines[-1])
        name = versions.get("name", "cpu")
        short = next((word for word in name.split() if any(map(str.isdigit, word))), name).lower()
        today = datetime.date.today().isoformat()
        out = args.out or unused(f"{today}-{short}")
        expected = sum(PARTS[part][0] for part in chosen)
        print(f"{plural(len(chosen), 'part')}, {expected} s on an H100 as expected, {args.minutes:g} minutes")
        print(
            f"device: {name}{', so each part in its tiny form' * (name == 'cpu')}; results: {out}", flush=True
        )
        of = args.commit or commit()
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + 60 * args.minutes

        def write() -> None:
            replace_text(out, page(f"{today}, {name}, commit {of}", versions, outcomes))

        write()  # an error of the file comes before the first part
        for part in chosen:
            outcomes.append(Outcome(part))
            left = deadline - time.monotonic()
            if left < 15:
                outcomes[-1].state = "no time left"
                write()
                continue
            limit = TINY_LIMIT if name == "cpu" else 2 * PARTS[part][0] + 30
            take(outcomes[-1], folder, env, min(limit, left), write)
            print("\n".join(outcomes[-1].lines))
            print(f"{part}: {outcomes[-1].state}, {outcomes[-1].seconds:.0f} s", flush=True)
    short_of = [row[0] for each in outcomes for row in each.results if row[-1] != "ok"]
    bad = [each.name for each in outcomes if each.state not in ("ended", "no time left")]
    if short_of or bad:
        print(f"short: {', '.join(short_of) or 'none'}; did not end: {', '.join(bad) or 'none'}")
    return int(bool(short_of or bad))


if __name__ == "__main__":
    sys.exit(main())
