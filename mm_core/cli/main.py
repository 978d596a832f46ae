"""`mm` and `mm-train`: choose a subcommand, run it, turn errors into messages and exit codes.

Exit codes: 0 done; 1 an error was printed; 2 the command line does not parse; 69 a rank, host, device or
connection was lost (mm train); 75 saved and stopped on
request (mm train); 130 interrupted; 141 the reader of the output has gone.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib import import_module
from types import MappingProxyType
from typing import Any, NoReturn, TextIO

from mm_core.errors import MMError, PeerError, RunWarning, did_you_mean, outer_fault, without_controls
from mm_core.runtime.output import Aside, standard_streams

COMMANDS = MappingProxyType(
    {
        "train": ("mm_core.cli.training.train", "train the run that a YAML describes (mm-train is the same)"),
        "launch": ("mm_core.cli.launch", "print a job of Slurm or Kubernetes that trains a run"),
        "sample": ("mm_core.cli.runs.sample", "make clips or answers with a trained run"),
        "chat": ("mm_core.cli.runs.chat", "chat with a trained run"),
        "eval": ("mm_core.cli.runs.evaluate", "held-out loss, metrics and predictions of a trained run"),
        "import": (
            "mm_core.cli.weights.import_weights",
            "write weights files as the first checkpoint of a new run",
        ),
        "export": (
            "mm_core.cli.weights.export",
            "write a trained run's weights as files that other libraries load",
        ),
        "weights": ("mm_core.cli.weights.show", "list what weights files contain, or compare two of them"),
        "report": (
            "mm_core.cli.runs.report",
            "write one HTML page about runs: curves, noise levels, clips, config, comparison",
        ),
        "align": ("mm_core.cli.align", "record two trainings, and name the first number that differs"),
        "migrate": ("mm_core.cli.migrate", "make a config of the files of another training tool"),
        "validate": ("mm_core.cli.training.validate", "check YAML files without training"),
        "data": ("mm_core.cli.data", "what the data of a run contain, and which files are bad"),
        "cache": ("mm_core.cli.cache", "encode the data of a run once, and train without encoders"),
        "config": (
            "mm_core.cli.config",
            "explain keys, write a schema for editors, copy YAML files of plugins",
        ),
        "plugins": ("mm_core.cli.plugins", "list, show and check plugins and their components"),
        "doctor": (
            "mm_core.cli.installation.doctor",
            "check this installation and machine, and name the command that fixes what is wrong",
        ),
    }
)
"""Subcommand -> (module with `configure(parser)` and `execute(args) -> int`, one-line summary)."""

PRINTING = frozenset({"weights", "validate", "config", "plugins", "chat", "data", "doctor", "launch"})
"""Subcommands whose only result is what they print. The others also write files."""

ALIASES = MappingProxyType({"evaluate": "eval"})
"""Former name of a subcommand -> its name today."""


def _described(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


class _Actions(argparse._SubParsersAction):  # type: ignore[type-arg]
    """The actions of a command: the help of each begins with the line that the command's help has for it."""

    def add_parser(self, name: str, **options: Any) -> Any:
        return super().add_parser(name, description=_described(options["help"]), **options)


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest choice or option when one is misspelt. Overrides may come
    between options."""

    _intermixed = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("action", "parsers", _Actions)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """The parsed arguments and those that are left; argparse calls it for each subcommand too."""
        if self._intermixed or self._subparsers:  # argparse cannot intermix where there are subcommands
            return super().parse_known_args(args, namespace)
        self._intermixed = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = False

    def error(self, message: str) -> NoReturn:
        """Prints the usage of the command and what is wrong with its arguments, then exits with code 2."""
        hint = None
        if match := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            hint = did_you_mean(match[1], re.findall(r"[\w-]+", match[2]))
        elif match := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            hint = did_you_mean(match[1], [o for action in self._actions for o in action.option_strings])
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}{'; ' + hint if hint else ''}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command `mm` and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _ended(_guarded(arguments, "mm"), argv)


def train_main(argv: Sequence[str] | None = None) -> int:
    """Runs the command `mm-train`, which is `mm train`, and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _ended(_guarded(["train", *arguments], "mm-train"), argv)


def _ended(code: int, argv: Sequence[str] | None) -> int:
    """Returns the exit code. In a process of its own, a command that has loaded torch exits here instead,
    without running C++ destructors."""
    if argv is None and "torch" in sys.modules:
        from mm_core.runtime.launch.rank_process import leave

        leave(code)
    return code


def _guarded(arguments: list[str], program: str) -> int:
    asked = arguments[0] if arguments else "--help"
    asked = ALIASES.get(asked, asked)
    # torch would import every installed backend and fail if one does not load on this host, even where
    # MM_DEVICE selects another: mm_core.device imports only the backend in use. Ranks inherit the setting.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    required = asked not in COMMANDS or asked in PRINTING or _asks_for_output(asked, arguments)
    with standard_streams(required=required, live=asked == "train"):
        try:
            with redirect_stdout(Aside(sys.stdout)) if _prints_json(arguments) else nullcontext():
                code = _reported(arguments, program)
            sys.stdout.flush()  # a closed pipe shows here, not at interpreter exit
        except BrokenPipeError:
            return 141
        except MMError as error:
            print(f"mm: error: {error.render()}", file=sys.stderr)
            return 1
        return code


def _prints_json(arguments: Sequence[str]) -> bool:
    """Whether a command prints one JSON document, with `--json` or always."""
    options = {argument.partition("=")[0] for argument in arguments}
    return "--json" in options or (list(arguments[:2]) == ["config", "schema"] and "--out" not in options)


def _asks_for_output(asked: str, arguments: Sequence[str]) -> bool:
    """Whether an option makes a subcommand that otherwise writes files only print."""
    options = {argument.partition("=")[0] for argument in arguments}
    return bool(options & {"--dry-run", "--verify-resume"}) or (asked == "eval" and "--json" in options)


def _reported(arguments: list[str], program: str) -> int:
    """The exit code of a command, after its errors are printed as messages."""
    try:
        with _warnings_printed():
            return _run(arguments, program)
    except SystemExit as stop:  # argparse: --help, --version, usage errors
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        raise
    except PeerError:
        return 1  # the rank that failed prints the error
    except KeyboardInterrupt:
        print("mm: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        from mm_core.plugin.authors import author_error, author_line

        known = error if isinstance(error, MMError) else outer_fault(error, author_line(error))
        shown = known or author_error(error)
        if shown is None:
            raise
        if os.environ.get("MM_DEBUG", "0") not in ("", "0"):
            import traceback

            traceback.print_exc()
        print(f"mm: error: {shown.render()}", file=sys.stderr)
        return 69 if shown.passing else 1


@contextmanager
def _warnings_printed() -> Iterator[None]:
    """Prints each RunWarning as a plain `warning: ...` line, and on the first rank only."""
    before = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, RunWarning):
            before(message, category, filename, lineno, file, line)
        elif os.environ.get("RANK", "0") == "0":
            print(f"warning: {without_controls(str(message))}", file=sys.stderr)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _run(arguments: list[str], program: str) -> int:
    name = arguments[0] if arguments else "--help"
    name = ALIASES.get(name, name)
    if name in COMMANDS:
        module_name, summary = COMMANDS[name]
        module = import_module(module_name)
        prog = program if program == "mm-train" else f"mm {name}"
        # No abbreviations: an option added later must not change what an existing script does.
        parser = Parser(prog=prog, description=_described(summary), allow_abbrev=False)
        module.configure(parser)
        code: int = module.execute(parser.parse_args(arguments[1:]))
        return code
    parser = _top_level()
    if not name.startswith("-"):
        hint = did_you_mean(name, COMMANDS) or f"the commands are {', '.join(COMMANDS)}"
        parser.print_usage(sys.stderr)
        parser.exit(2, f"mm: error: unknown command {name!r}; {hint}\n")
    parser.parse_args(arguments or ["--help"])
    parser.error("no command was given")


def _top_level() -> Parser:
    """The parser of `mm --help`, which lists subcommands without importing them."""
    from mm_core import __version__

    width = max(map(len, COMMANDS))
    parser = Parser(
        prog="mm",
        usage="mm [-h] [--version] COMMAND ...",
        description="Train multimodal models: plugins, one YAML, FSDP2.",
        epilog="\n".join(
            ["commands:"]
            + [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
            + ["", "`mm COMMAND --help` shows a command's options. MM_DEBUG=1 shows tracebacks."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mm {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
