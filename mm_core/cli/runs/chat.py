"""`mm chat`: a conversation with a trained run, in the terminal or from a pipe."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mm_core.cli.ranks import add_ranks, on_ranks
from mm_core.cli.runs.answers import add_decoding, decoding_of, tell
from mm_core.cli.runs.stored_run import add_run, open_stored, run_folder
from mm_core.errors import DataError, MMError

if TYPE_CHECKING:
    from mm_core.contracts import Decoding, Turn
    from mm_core.inference.answer import AnswerSession

_HELP = """\
/image FILE   shows an image before the next line
/new          begins a new conversation
/quit         ends, as the end of the input does
/help         says this"""

INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_run(parser)
    parser.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="shown before the first line, in order"
    )
    parser.add_argument("--system", help="what the model is told before anything else")
    add_decoding(parser)
    parser.add_argument("--seed", type=int, default=0, help="answer i is drawn from (seed, i)")
    add_ranks(parser)


def execute(args: argparse.Namespace) -> int:
    """Answers line after line. Exits 1 where a line of a pipe could not be answered. Under a launcher (RANK
    is set) this process is a rank, and does not return."""
    return on_ranks(args, "chat", _chat, _check, before_launch=_choose, outlives_interrupts=True)


def _check(args: argparse.Namespace) -> None:
    """MMError for what is wrong at first sight."""
    run_folder(args.run)
    if sys.stdin is None:
        raise MMError("standard input is closed, so there is nobody to answer", hint="pipe lines into it")
    for file in args.image:
        _check_image(file, "--image")


def _choose(args: argparse.Namespace) -> None:
    from mm_core.inference.answer import check_words

    decoding_of(args)
    check_words(open_stored(args).config)


def _chat(args: argparse.Namespace) -> int:
    """Alone, or as one of several ranks, of which the first reads and prints."""
    from mm_core.inference.answer import answer_session

    if os.environ.get("RANK", "0") == "0":
        _check(args)
    decoding = decoding_of(args)
    with answer_session(open_stored(args), weights=args.weights, patient=True) as opened:
        if "RANK" in os.environ:  # up to here, Ctrl-C ends a rank
            ours = signal.SIG_IGN if opened.ranks.rank else signal.default_int_handler
            signal.signal(signal.SIGINT, ours)
        return opened.run_on_first_rank(
            lambda: _converse(Chat(opened, decoding, args.system, [*map(Path, args.image)]))
        )


def _converse(chat: Chat) -> int:
    """The exit code. Whatever it stands for is said."""
    from mm_core.runtime.launch.rank_process import has_told

    code = INTERRUPTED
    try:
        code = _talk(chat, sys.stdin.isatty())
    except KeyboardInterrupt:
        print("mm: interrupted", file=sys.stderr, flush=True)
    if code:
        has_told()
    return code


@dataclass
class Chat:
    """A conversation so far. images: those that the next line shows."""

    session: AnswerSession
    decoding: Decoding
    system: str | None = None
    images: list[Path] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    answers: int = 0

    def __post_init__(self) -> None:
        self._begin()

    def line(self, text: str, heard: Callable[[str], None]) -> bool:
        """Does what a line says: a command, or a turn that is answered. False for the last one. DataError
        for a turn that cannot be; it is forgotten, and so are its images. KeyboardInterrupt where the answer
        was stopped."""
        command, _, rest = text.strip().partition(" ")
        if command == "/quit":
            return False
        if command == "/help":
            heard(_HELP + "\n")
        elif command == "/new":
            self._begin()
        elif command == "/image":
            _check_image(rest.strip(), "/image")
            self.images.append(Path(rest.strip()))
        elif command.startswith("/") and command[1:].isalpha():
            raise DataError(f"there is no command {command}", accepted="/image, /new, /quit, /help")
        elif text.strip():
            self._say(text.strip(), heard)
        return True

    def _say(self, text: str, heard: Callable[[str], None]) -> None:
        from mm_core.contracts import Turn

        asked = [*self.turns, Turn("user", text, tuple(self.images))]
        self.images = []
        with _stoppable() as stopped:
            said = self.session.say(asked, self.decoding, self.answers, heard, stopped)
            heard("\n")
            if stopped():
                raise KeyboardInterrupt
        self.answers += 1
        self.turns = [*asked, Turn("assistant", said)]

    def _begin(self) -> None:
        from mm_core.contracts import Turn

        self.turns = [] if self.system is None else [Turn("system", self.system)]


def _check_image(file: str, option: str) -> None:
    if not file or "\0" in file or not Path(file).is_file():
        raise DataError("there is no such image", where=file or option, accepted=f"{option} FILE")


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C only makes the given function true: no rank leaves an answer alone. Once more,
    it ends this process."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals are heard elsewhere
        return
    heard: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(heard)
    finally:
        signal.signal(signal.SIGINT, before)


def _talk(chat: Chat, terminal: bool) -> int:
    """Each line of standard input, answered on standard output."""
    bad = 0
    for line in _lines(terminal):
        try:
            if not chat.line(line, tell):
                break
        except DataError as fault:
            bad += 1
            print(f"mm: {fault.render()}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("(stopped; this turn is forgotten)")
    return min(bad, 1) if not terminal else 0


def _lines(terminal: bool) -> Iterator[str]:
    """What a person types, or another command says."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # one line that is no text ends no conversation
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # arrow keys and history in input()
        print(_HELP)
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except EOFError:
            print()
            return
        except BrokenPipeError:
            raise  # of what input() writes
        except OSError as fault:
            raise MMError(f"standard input cannot be read: {fault.strerror or fault}") from fault
        if not (line or terminal):
            return
        yield line
