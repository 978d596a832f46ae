"""`mm sample` for runs that answer in words."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mm_core.cli.options import count
from mm_core.cli.runs.stored_run import check_place, unused
from mm_core.errors import MMError, plural

if TYPE_CHECKING:
    from mm_core.checkpoint.reading import StoredRun
    from mm_core.contracts import Decoding
    from mm_core.inference.answer import Answer, AnswerSession

_WORDS: Mapping[str, object] = MappingProxyType(
    {"max_new_tokens": None, "temperature": 0.0, "top_p": 1.0, "batch_size": 1}
)
_CLIPS: Mapping[str, object] = MappingProxyType(
    {
        **{"last_image": [], "input": [], "negative_prompt": "", "steps": None, "guidance": None},
        **{"num_frames": None, "height": None, "width": None, "fps": None},
    }
)
"""Options that only apply to answers, or only to clips -> their values when they are not set."""


def add_decoding(parser: argparse._ActionsContainer) -> None:
    """Adds the options for sampling the tokens of an answer to a command's parser."""
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="largest number of tokens per answer (default: as the task sets it, else 512)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=_WORDS["temperature"],
        help="sampling temperature; 0 (the default) always takes the most likely token",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=_WORDS["top_p"],
        help="sample from the most likely tokens whose probabilities sum to this value (default 1)",
    )


def add_batches(parser: argparse._ActionsContainer) -> None:
    """Adds the option --batch-size, the number of prompts answered at once, to a command's parser."""
    parser.add_argument(
        "--batch-size",
        type=count,
        default=_WORDS["batch_size"],
        metavar="N",
        help="rows of --prompts that a rank answers at once (default 1); does not change the answers",
    )


def decoding_of(args: argparse.Namespace) -> Decoding:
    """The sampling settings for answers from a command's options.

    Raises:
        MMError: a value is out of range.
    """
    from mm_core.contracts import Decoding
    from mm_core.inference.answer import checked

    return checked(Decoding(args.max_new_tokens, args.temperature, args.top_p, args.seed))


def refuse_words(args: argparse.Namespace, task: str) -> None:
    """Raises MMError if options for answers are passed to `mm sample` with a run that makes clips."""
    _refuse(args, _WORDS, f"the task {task} makes clips")


def print_answers(args: argparse.Namespace, stored: StoredRun, samples: Path) -> int:
    """Answers the prompts of `mm sample`, or the rows of a file of prompts, and returns the exit code.

    All ranks compute the answers; the first prints and writes them.

    Args:
        args: the parsed options.
        stored: the trained run.
        samples: folder for the answers when --out names no file.
    """
    _refuse(args, _CLIPS, "the run's task answers in words")
    if args.prompts and (args.prompt or args.image):
        raise MMError(
            "--prompts cannot be used together with --prompt or --image",
            where="command line",
            accepted="--prompts FILE, whose rows name their own images; or --prompt and --image",
        )
    if args.batch_size > 1 and not args.prompts:
        raise MMError(
            "--batch-size works only with --prompts: prompts on the command line are answered one by one",
            where="command line",
            hint="put the prompts into a file and pass it as --prompts, or remove --batch-size",
        )
    _check_out(args)
    from mm_core.inference.answer import answer_session

    decoding = decoding_of(args)
    with answer_session(stored, weights=args.weights) as opened:
        out = (
            Path(args.out)
            if args.out
            else opened.ranks.on_first("choosing a file", lambda: unused(samples / "answers.jsonl"))
        )
        if args.prompts:
            _answer_rows(opened, opened.rows(Path(args.prompts), decoding, args.batch_size), out)
        else:
            opened.run_on_first_rank(
                lambda: _answer_all(args, opened, decoding, None if args.out is None else out)
            )
    return 0


def _check_out(args: argparse.Namespace) -> None:
    """Raises MMError if --out cannot be written, or is the file of the prompts."""
    if args.out is None:
        return
    out = Path(args.out)
    check_place(out)
    if args.prompts and out.exists() and Path(args.prompts).exists() and out.samefile(args.prompts):
        raise MMError(
            "--out is the same file as --prompts: the answers would overwrite the prompts",
            where=args.out,
            accepted="another file",
        )


def _answer_all(
    args: argparse.Namespace, opened: AnswerSession, decoding: Decoding, out: Path | None
) -> None:
    from mm_core.contracts import Turn
    from mm_core.inference.answer import Answer

    images = tuple(map(Path, args.image))
    answers = []
    for number, prompt in enumerate(args.prompt):
        if len(args.prompt) > 1:
            print("> " + prompt.encode(errors="backslashreplace").decode(), flush=True)
        answer = opened.answer([Turn("user", prompt, images)], decoding, number, print_piece)
        print(flush=True)
        answers.append(Answer(number, f"prompt {number + 1}", prompt, answer))
    if out is not None:
        _write(answers, out)


def print_piece(text: str) -> None:
    """Prints a piece of an answer on the terminal as soon as it is generated."""
    print(text, end="", flush=True)


def _answer_rows(opened: AnswerSession, answers: Iterable[Answer], out: Path) -> None:
    """Writes one line of JSON per row as soon as it is answered, and counts rows that cannot be read."""
    if opened.ranks.rank:
        for _ in answers:
            pass  # only the first rank writes answers
        return
    good, bad, reason = 0, 0, ""
    for answer in answers:
        _write([answer], out, more=good + bad > 0)
        good, bad = good + (answer.error is None), bad + (answer.error is not None)
        reason = reason or answer.error or ""
    if not good:
        first = reason.partition("\n")[0]
        raise MMError(
            f"none of {plural(bad, 'row')} could be read; error of the first: {first}",
            where=str(out),
            hint="fix the rows of --prompts; the error of each row is in this file",
        )
    first = f"{', the first' if bad > 1 else ''}: {reason.splitlines()[0]}" if bad else ""
    unread = f"; {plural(bad, 'row')} could not be read{first}" if bad else ""
    print(f"{plural(good, 'answer')} in {out}{unread}", flush=True)


def _write(answers: Iterable[Answer], out: Path, more: bool = False) -> None:
    """Writes answers as lines of JSON; with `more`, appends them to the file."""
    text = "".join(json.dumps(answer.to_mapping(), ensure_ascii=False) + "\n" for answer in answers)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # A file name that is not valid UTF-8 is written with JSON escapes.
        with out.open("a" if more else "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as fault:
        what = f"the file cannot be written: {fault.strerror or fault}"
        raise MMError(what, where=str(out), hint="free the disk, or set --out to another file") from fault


def _refuse(args: argparse.Namespace, unset: Mapping[str, object], because: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name, value in unset.items() if getattr(args, name) != value]
    if given:
        them = "this option" if len(given) == 1 else "these options"
        raise MMError(
            f"{because}, so {' and '.join(given)} cannot be used", where="command line", hint=f"remove {them}"
        )
