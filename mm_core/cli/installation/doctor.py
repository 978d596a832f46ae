"""`mm doctor`: checks an installation, and names the command that fixes what is wrong."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

from mm_core import __version__
from mm_core.cli.installation.checks import Report, check_machine, check_packages
from mm_core.cli.options import print_json, print_table
from mm_core.errors import plural


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dir", default="runs", metavar="DIR", help="folder that runs are written to (default runs)")
    add("--deep", action="store_true", help="also multiply matrices, let two ranks communicate, save a file")
    add("--hosts", metavar="FILE", help="ask the hosts of a hostfile by ssh, and compare what they have")
    add("--json", action="store_true", help="print JSON")
    add("--meets-at", metavar="HOST", help=argparse.SUPPRESS)  # what --hosts asks of each host
    add("--two-ranks", action="store_true", help=argparse.SUPPRESS)  # what --deep starts


def execute(args: argparse.Namespace) -> int:
    """Runs `mm doctor`; the exit code is 1 if there is an error."""
    if args.two_ranks:
        from mm_core.cli.installation.deep import two_ranks

        return two_ranks()
    report = Report({"python": platform.python_version(), "mm-core": __version__})
    if args.hosts is not None:
        from mm_core.cli.installation.compared import check_hosts

        check_hosts(report, Path(args.hosts), ["--dir", args.dir, *["--deep"] * args.deep])
    else:
        check_packages(report, os.environ)
        check_machine(report, os.environ, Path(args.dir))
    if args.meets_at is not None:
        from mm_core.cli.installation.compared import check_meeting

        check_meeting(report, args.meets_at)
    if args.deep and args.hosts is None:
        from mm_core.cli.installation.deep import check_deep

        check_deep(report, Path(args.dir))
    errors = sum(finding.severity == "error" for finding in report.findings)
    if args.json:
        findings = [vars(finding) for finding in report.findings]
        print_json({"ok": not errors, "facts": report.facts, "findings": findings})
    else:
        print_table(list(report.facts.items()))
        for finding in report.findings:
            print(f"\n{finding.severity}: {finding.sentence}\n  fix: {finding.fix}")
        counts = f"{plural(errors, 'error')}, {plural(len(report.findings) - errors, 'warning')}"
        print(f"\n{counts if report.findings else 'nothing is wrong'}")
    return 1 if errors else 0
