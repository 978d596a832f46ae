"""`mm chat`: a conversation with a trained run, in the terminal or from a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mm_core.cli.answers import add_decoding, decoding_of, tell
from mm_core.cli.evaluate import add_weights, run_folder
from mm_core.errors import DataError

if TYPE_CHECKING:
    from mm_core.contracts import Decoding, Turn
    from mm_core.train.answering import Speaker

_HELP = """\
/image FILE   shows an image before the next line
/new          begins a new conversation
/quit         ends, as the end of the input does
/help         says this"""


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="over the run's config, for folders that have moved"
    )
    parser.add_argument(
        "--run", required=True, metavar="DIR[@STEP]", help="a run's folder, or one of its checkpoints"
    )
    parser.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="shown before the first line, in order"
    )
    parser.add_argument("--system", help="what the model is told before anything else")
    add_decoding(parser)
    parser.add_argument("--seed", type=int, default=0, help="answer i is drawn from (seed, i)")
    add_weights(parser)


def execute(args: argparse.Namespace) -> int:
    """Answers line after line. Exits 1 where a line of a pipe could not be answered."""
    run_folder(args.run)
    from mm_core.train.answering import speaker

    decoding = decoding_of(args)
    with speaker(
        args.run, weights=args.weights, checkpoint=args.checkpoint, overrides=args.overrides
    ) as opened:
        chat = Chat(opened, decoding, args.system, list(map(Path, args.image)))
        return _terminal(chat) if sys.stdin.isatty() else _pipe(chat)


@dataclass
class Chat:
    """A conversation so far. images: those that the next line shows."""

    speaker: Speaker
    decoding: Decoding
    system: str | None = None
    images: list[Path] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    answers: int = 0

    def __post_init__(self) -> None:
        self._begin()

    def line(self, text: str, heard: Callable[[str], None]) -> bool:
        """Does what a line says: a command, or a turn that is answered. False for the last one. DataError
        for a turn that can not be; it is forgotten, and so are its images."""
        command, _, rest = text.strip().partition(" ")
        if command == "/quit":
            return False
        if command == "/help":
            heard(_HELP + "\n")
        elif command == "/new":
            self._begin()
        elif command == "/image":
            self._show(rest.strip())
        elif command.startswith("/") and command[1:].isalpha():
            raise DataError(f"there is no command {command}", accepted="/image, /new, /quit, /help")
        elif text.strip():
            self._say(text.strip(), heard)
        return True

    def _show(self, file: str) -> None:
        if not Path(file).is_file():
            raise DataError("there is no such image", where=file or "/image", accepted="/image FILE")
        self.images.append(Path(file))

    def _say(self, text: str, heard: Callable[[str], None]) -> None:
        from mm_core.contracts import Turn

        asked = [*self.turns, Turn("user", text, tuple(self.images))]
        self.images = []
        said = self.speaker.say(asked, self.decoding, self.answers, heard)
        heard("\n")
        self.answers += 1
        self.turns = [*asked, Turn("assistant", said)]

    def _begin(self) -> None:
        from mm_core.contracts import Turn

        self.turns = [] if self.system is None else [Turn("system", self.system)]


def _pipe(chat: Chat) -> int:
    """Lines of standard input, each answered on standard output."""
    bad = 0
    for line in sys.stdin:
        try:
            if not chat.line(line, tell):
                break
        except DataError as fault:
            bad += 1
            print(f"mm: {fault.render()}", file=sys.stderr, flush=True)
    return min(bad, 1)


def _terminal(chat: Chat) -> int:
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history in input()
    print(_HELP)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        try:
            if not chat.line(line, tell):
                return 0
        except DataError as fault:
            print(f"mm: {fault.render()}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(stopped; this turn is forgotten)")
