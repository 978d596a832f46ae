"""`mm chat`: a conversation with a trained run, typed in the terminal or read from a pipe."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mm_core.cli.ranks import add_ranks, on_ranks
from mm_core.cli.runs.answers import add_decoding, decoding_of, print_piece
from mm_core.cli.runs.stored_run import add_run, open_stored, run_folder
from mm_core.errors import DataError, MMError

if TYPE_CHECKING:
    from mm_core.contracts import Decoding, Turn
    from mm_core.inference.answer import AnswerSession

_HELP = """\
/image FILE   adds an image before the next line
/new          starts a new conversation
/quit         ends the chat (so does the end of the input)
/help         shows this list"""

INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="image placed before the first line; may be repeated, the order is kept",
    )
    parser.add_argument("--system", help="system prompt: text placed before the conversation")
    add_decoding(parser)
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed (default 0); answer i uses (seed, i)"
    )
    add_ranks(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs `mm chat`: answers each line of input; exit code 1 if a line of a pipe could not be answered.

    Under a launcher (RANK is set) this process is a rank, and does not return.
    """
    return on_ranks(args, "chat", _chat, _check, before_launch=_choose, outlives_interrupts=True)


def _check(args: argparse.Namespace) -> None:
    run_folder(args.run)
    if sys.stdin is None:
        raise MMError(
            "standard input is closed, so there is nothing to answer", hint="type or pipe lines into mm chat"
        )
    for file in args.image:
        _check_image(file, "--image")


def _choose(args: argparse.Namespace) -> None:
    from mm_core.inference.answer import check_words

    decoding_of(args)
    config = open_stored(args).config
    check_words(config.registry, config.task)


def _chat(args: argparse.Namespace) -> int:
    """Chats in this process, or as one of several ranks, of which the first reads and prints."""
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
    """The exit code, after its reason was printed."""
    from mm_core.runtime.launch.rank_process import mark_reported

    code = INTERRUPTED
    try:
        code = _talk(chat, sys.stdin.isatty())
    except KeyboardInterrupt:
        print("mm: interrupted", file=sys.stderr, flush=True)
    if code:
        mark_reported()
    return code


@dataclass
class Chat:
    """The conversation of `mm chat` so far.

    Attributes:
        session: the loaded model.
        decoding: how answers are sampled.
        system: system prompt.
        images: images that the next line is sent with.
        turns: what the user and the model have written.
        answers: number of answers so far.
    """

    session: AnswerSession
    decoding: Decoding
    system: str | None = None
    images: list[Path] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    answers: int = 0

    def __post_init__(self) -> None:
        self._begin()

    def line(self, text: str, write: Callable[[str], None]) -> bool:
        """Handles one line typed into `mm chat`: runs its /command, or answers it. False for /quit.

        Args:
            text: the line.
            write: called with each piece of text to print.

        Raises:
            DataError: the line cannot be answered; it is dropped, and so are its images.
            KeyboardInterrupt: the user stopped the answer.
        """
        command, _, rest = text.strip().partition(" ")
        if command == "/quit":
            return False
        if command == "/help":
            write(_HELP + "\n")
        elif command == "/new":
            self._begin()
        elif command == "/image":
            _check_image(rest.strip(), "/image")
            self.images.append(Path(rest.strip()))
        elif command.startswith("/") and command[1:].isalpha():
            raise DataError(f"unknown command {command}", accepted="/image, /new, /quit, /help")
        elif text.strip():
            self._answer(text.strip(), write)
        return True

    def _answer(self, text: str, write: Callable[[str], None]) -> None:
        from mm_core.contracts import Turn

        asked = [*self.turns, Turn("user", text, tuple(self.images))]
        self.images = []
        with _stoppable() as stopped:
            answer = self.session.answer(asked, self.decoding, self.answers, write, stopped)
            write("\n")
            if stopped():
                raise KeyboardInterrupt
        self._draw(asked, answer, write)
        self.answers += 1
        self.turns = [*asked, Turn("assistant", answer)]

    def _draw(self, asked: Sequence[Turn], answer: str, write: Callable[[str], None]) -> None:
        """Draws the boxes of an answer on copies of their images, in the working directory."""
        from mm_core.contracts import GivesBoxes
        from mm_core.inference.boxes import draw_boxes

        if isinstance(self.session.conversing, GivesBoxes):
            for image, boxes in self.session.conversing.boxes(asked, answer).items():
                file = Path(f"{image.stem}_answer_{self.answers + 1}.png")
                draw_boxes(image, boxes, file)
                write(f"boxes: {file}\n")

    def _begin(self) -> None:
        from mm_core.contracts import Turn

        self.turns = [] if self.system is None else [Turn("system", self.system)]


def _check_image(file: str, option: str) -> None:
    if not file or "\0" in file or not Path(file).is_file():
        raise DataError("there is no such image", where=file or option, accepted=f"{option} FILE")


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Within the block, Ctrl-C only makes the yielded function true, so that no rank abandons an answer
    that its peers compute. A second Ctrl-C ends this process."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread receives signals
        return
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, before)


def _talk(chat: Chat, terminal: bool) -> int:
    """Answers each line of standard input on standard output; returns the exit code."""
    bad = 0
    for line in _lines(terminal):
        try:
            if not chat.line(line, print_piece):
                break
        except DataError as fault:
            bad += 1
            print(f"mm: {fault.render()}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("(stopped; this turn is dropped from the conversation)")
    return min(bad, 1) if not terminal else 0


def _lines(terminal: bool) -> Iterator[str]:
    """The lines that a person types, or that another command pipes in."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 must not end the chat
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
            raise  # input() failed to write its prompt
        except OSError as fault:
            raise MMError(
                f"standard input cannot be read: {fault.strerror or fault}",
                hint="pipe text into mm chat, or answer a file of prompts with mm sample --prompts FILE",
            ) from fault
        if not (line or terminal):
            return
        yield line
